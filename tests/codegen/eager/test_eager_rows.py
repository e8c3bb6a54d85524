"""Softmax, layer norm, prelu, gelu and sigmoid run on kernels, with the numbers of the reference;
other operators run in numpy without asking TVM.
"""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax
from tvm.relax import op

from relayquant.codegen.eager import EagerModule
from relayquant.codegen.eager.steps.call import CallStep
from relayquant.codegen.eager.steps.rows import RowStep
from relayquant.errors import ModelError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run


def runners(module: EagerModule) -> list:
    return [getattr(step.run, "__self__", None) for step in module.programs["main"].steps]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 3, shape).astype("float32")


def test_softmax_and_layer_norm__the_bits_of_the_reference():
    def emit(e, x):
        y = e("y", op.nn.softmax(x, -1))
        factors = e.constant(19), e.constant(19)
        return e("z", op.nn.layer_norm(y, *factors, axes=[-1], epsilon=1e-5))

    mod, x = build_model(emit, ("n", 5, 19)), draw(3, 5, 19)
    module = EagerModule(mod)
    assert [type(each) for each in runners(module)[:2]] == [RowStep, RowStep]
    # the memory order of the data is another one the second time
    for data in (x, np.asfortranarray(x), x[:0]):
        np.testing.assert_array_equal(module.run("main", [data])[0], run(mod, [data])[0])


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_softmax__along_another_axis_the_bits_of_the_reference(axis):
    mod = build_model(lambda e, x: e("y", op.nn.softmax(x, axis)), (2, 5, 7))
    module, x = EagerModule(mod), draw(2, 5, 7)
    assert isinstance(runners(module)[0], RowStep)
    for data in (x, np.asfortranarray(x)):
        np.testing.assert_array_equal(module.run("main", [data])[0], run(mod, [data])[0])


def test_softmax__along_a_symbolic_axis_in_numpy():
    mod = build_model(lambda e, x: e("y", op.nn.softmax(x, 0)), ("n", 5))
    module, x = EagerModule(mod), draw(3, 5)
    assert not any(isinstance(each, RowStep) for each in runners(module))
    np.testing.assert_array_equal(module.run("main", [x])[0], run(mod, [x])[0])


@pytest.mark.parametrize("width", [3, 32, 67])
@pytest.mark.parametrize("slopes", [(0.25,), (-1.0, 0.0, 0.5, 3.0, np.inf)])
def test_prelu__is_x_or_its_product_with_the_slope(width, slopes):
    slope = np.resize(np.array(slopes, "float32"), width if len(slopes) > 1 else 1)
    mod = build_model(lambda e, x: e("y", op.nn.prelu(x, relax.const(slope), 2)), ("n", 5, width))
    module, x = EagerModule(mod), draw(3, 5, width)
    assert isinstance(runners(module)[0], RowStep)
    x[0, 0, :3] = np.nan, np.inf, -np.inf
    for data in (x, np.asfortranarray(x), x[:0]):
        with np.errstate(invalid="ignore"):
            want = np.where(data > 0, data, data * slope)
        np.testing.assert_array_equal(module.run("main", [data])[0], want)


def test_prelu__along_another_axis_in_numpy():
    slope = relax.const(np.array([0.5, -0.5, 2, 0, 1], "float32"))
    mod = build_model(lambda e, x: e("y", op.nn.prelu(x, slope, 1)), (2, 5, 7))
    module = EagerModule(mod)
    assert not any(isinstance(each, RowStep) for each in runners(module))
    x = draw(2, 5, 7)
    want = np.where(x > 0, x, x * slope.value.numpy()[:, None])
    np.testing.assert_array_equal(module.run("main", [x])[0], want)


@pytest.mark.parametrize("slope", [0.01, 0.3, 1.5, -0.5, 0.0])
def test_leaky_relu__is_x_or_its_product_with_the_slope(slope):
    mod = build_model(lambda e, x: e("y", op.nn.leakyrelu(x, slope)), ("n", 5, 7))
    module, x = EagerModule(mod), draw(3, 5, 7)
    assert isinstance(runners(module)[0], RowStep)
    x[0, 0, :3] = np.nan, np.inf, -np.inf
    for data in (x, np.asfortranarray(x), x[:0]):
        with np.errstate(invalid="ignore"):
            want = np.where(data > 0, data, data * np.float32(slope))
        np.testing.assert_array_equal(module.run("main", [data])[0], want)


def test_gelu__near_the_error_function_everywhere():
    mod = build_model(lambda e, x: e("y", op.nn.gelu(x)), ("n", 3))
    module, x = EagerModule(mod), np.linspace(-30, 30, 30003, dtype="float32").reshape(-1, 3)
    assert isinstance(runners(module)[0], RowStep)
    x[0] = 0, np.nan, np.inf
    have, want = module.run("main", [x])[0], run(mod, [x])[0]
    np.testing.assert_array_equal(have[0], [0, np.nan, np.inf])
    np.testing.assert_array_less(np.abs(have[1:] - want[1:]), 3e-7 * np.abs(x[1:]) + 1e-7)


@pytest.mark.parametrize("function", [op.sigmoid, op.nn.silu])
def test_sigmoid__near_scipy_everywhere(function):
    mod = build_model(lambda e, x: e("y", function(x)), ("n", 3))
    module, x = EagerModule(mod), np.linspace(-80, 80, 30003, dtype="float32").reshape(-1, 3)
    assert isinstance(runners(module)[0], RowStep)
    x[0] = 0, np.nan, np.inf
    have, want = module.run("main", [x])[0], run(mod, [x])[0]
    np.testing.assert_array_equal(have[0], want[0])
    np.testing.assert_allclose(have[1:], want[1:], rtol=1e-6)


def test_call__symbolic_shapes_tuples_and_errors_are_those_of_the_interpreter():
    def emit(e, x):
        a = e("a", op.reshape(x, (-1, 6)))  # its shape is known at run time only
        b = e("b", op.concat([a, a], axis=1))
        c = e("c", op.permute_dims(b, [1, 0]))
        return e("d", op.strided_slice(c, [0], [1], [7]))

    mod, x = build_model(emit, ("n", 3)), draw(4, 3)
    module = EagerModule(mod)
    assert any(isinstance(each, CallStep) for each in runners(module))
    np.testing.assert_array_equal(module.run("main", [x])[0], run(mod, [x])[0])
    fails = build_model(lambda e, x: e("y", op.reshape(x, (2, 3))), ("n", 3))
    with pytest.raises(ModelError, match=r"'y', operator relax\.reshape"):
        EagerModule(fails).run("main", [draw(5, 3)])


def test_call__operators_on_integers_have_their_attributes():
    def emit(e, x):
        q = e("q", qnn.quantize(x, 0.125, 3, out_dtype="int8"))
        up = {"rounding": "UPWARD", "out_dtype": "uint8"}
        r = e("r", qnn.requantize(q, 0.125, 3, 0.25, 0, **up))
        return e("y", qnn.dequantize(r, 0.25, 0))

    mod, x = build_model(emit, ("n", 3)), draw(400, 3)
    module = EagerModule(mod)
    assert [type(each) for each in runners(module)[:3]] == [CallStep] * 3
    have = module.run("main", [x])[0]
    np.testing.assert_array_equal(have, run(mod, [x])[0])
    q = np.clip(np.rint(x * 8) + 3, -128, 127)  # half of them lie between two levels of 0.25
    np.testing.assert_array_equal(have, np.clip(np.floor((q - 3) / 2 + 0.5), 0, 255) / 4)
