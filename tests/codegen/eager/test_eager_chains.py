"""Chains of operators on single values run on one kernel, with the bits of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from scipy import special
from tvm import relax
from tvm.relax import op

from relayquant.codegen.eager import EagerModule
from relayquant.codegen.eager.steps.call import CallStep
from relayquant.codegen.eager.steps.rows import RowStep


def number(value: float) -> relax.Constant:
    return relax.const(np.float32(value))


def kinds(module: EagerModule) -> list[type]:
    steps = module.programs["main"].steps
    return [type(getattr(step.run, "__self__", None)) for step in steps]


def hard_swish(e, x):
    a = e("a", op.add(number(3.1), x))
    b = e("b", op.clip(a, 0.0, 6.0))
    c = e("c", op.divide(b, number(6.3)))
    return e("d", op.multiply(x, c))


def test_chain__hard_swish_is_one_step_with_the_bits_of_numpy():
    module = EagerModule(build_model(hard_swish, ("n", 3, 5)))
    assert kinds(module)[0] is RowStep
    assert CallStep not in kinds(module)
    x = np.random.default_rng(1).normal(0, 4, (7, 3, 5)).astype("float32")
    x[0, 0] = 0.0, np.nan, np.inf, -np.inf, -3.1
    for data in (x, np.asfortranarray(x), x[:0], x[::2]):
        f = data.dtype.type
        with np.errstate(invalid="ignore"):  # 0 times infinity
            want = data * (np.minimum(np.maximum(f(3.1) + data, f(0)), f(6)) / f(6.3))
        np.testing.assert_array_equal(module.run("main", [data])[0], want)


def test_chain__the_result_keeps_the_memory_order_of_the_data():
    module = EagerModule(build_model(hard_swish, (4, 3, 5)))
    data = np.ones((5, 4, 3), "float32").transpose(1, 2, 0)
    assert module.run("main", [data])[0].strides == data.strides


def test_chain__a_sum_behind_a_product_is_rounded_twice():
    def emit(e, x):
        a = e("a", op.subtract(x, number(0.7)))
        b = e("b", op.divide(number(1.1), a))
        c = e("c", op.multiply(b, x))
        d = e("d", op.add(c, number(0.3)))
        return e("y", op.clip(d, -1.0, 9.0))

    module = EagerModule(build_model(emit, (50, 40)))
    assert kinds(module)[0] is RowStep
    assert CallStep not in kinds(module)
    x = np.random.default_rng(2).normal(0, 4, (50, 40)).astype("float32")
    f = x.dtype.type
    want = np.clip(f(1.1) / (x - f(0.7)) * x + f(0.3), f(-1), f(9))
    np.testing.assert_array_equal(module.run("main", [x])[0], want)


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1)])
def test_chain__a_constant_with_one_element_is_a_number(shape):
    # As PaddlePaddle exports hard swish with a learned scale and offset.
    def one(value):
        return relax.const(np.full(shape, value, "float32"))

    def emit(e, x):
        a = e("a", op.add(x, one(3.1)))
        b = e("b", op.clip(a, 0.0, 6.0))
        c = e("c", op.multiply(x, b))
        d = e("d", op.divide(c, one(6.3)))
        return e("y", op.add(e("m", op.multiply(d, one(1.7))), one(-0.3)))

    module = EagerModule(build_model(emit, ("n", 3, 5)))
    assert kinds(module)[0] is RowStep
    assert CallStep not in kinds(module)
    x = np.random.default_rng(4).normal(0, 4, (40, 3, 5)).astype("float32")
    f = x.dtype.type
    want = x * np.clip(x + f(3.1), f(0), f(6)) / f(6.3) * f(1.7) + f(-0.3)
    np.testing.assert_array_equal(module.run("main", [x])[0], want)


def test_chain__a_constant_that_adds_an_axis_stays_in_numpy():
    def emit(e, x):
        a = e("a", op.add(x, relax.const(np.full((1, 1, 1), 3, "float32"))))
        b = e("b", op.clip(a, 0.0, 6.0))
        c = e("c", op.divide(b, number(6)))
        return e("y", op.add(c, number(1)))

    module = EagerModule(build_model(emit, (6, 5)))
    assert kinds(module)[0] is CallStep
    x = np.random.default_rng(5).normal(0, 4, (6, 5)).astype("float32")
    f = x.dtype.type
    want = np.clip(x + f(3), f(0), f(6))[None] / f(6) + f(1)
    np.testing.assert_array_equal(module.run("main", [x])[0], want)


@pytest.mark.parametrize("others", ["a", "b"])
def test_chain__a_value_that_others_read_is_computed(others):
    def emit(e, x):
        a = e("a", op.add(x, number(3)))
        b = e("b", op.clip(a, 0.0, 6.0))
        c = e("c", op.divide(b, number(6)))
        return e("y", op.subtract(op.nn.relu({"a": a, "b": b}[others]), c))

    module = EagerModule(build_model(emit, (6, 5)))
    assert RowStep not in kinds(module)
    x = np.random.default_rng(3).normal(0, 4, (6, 5)).astype("float32")
    a = x + np.float32(3)
    b = np.clip(a, np.float32(0), np.float32(6))
    want = np.maximum({"a": a, "b": b}[others], np.float32(0)) - b / np.float32(6)
    np.testing.assert_array_equal(module.run("main", [x])[0], want)


def test_chain__operands_of_other_shapes_and_few_operators_stay_in_numpy():
    def emit(e, x):
        a = e("a", op.add(x, e.constant(5)))  # a vector, not a number
        b = e("b", op.clip(a, 0.0, 6.0))
        return e("y", op.divide(b, number(6)))

    assert kinds(EagerModule(build_model(emit, (6, 5))))[:3] == [CallStep] * 3


def test_chain__a_sigmoid_and_its_product_are_one_step():
    def swish(e, x):
        return e("y", op.multiply(x, e("s", op.sigmoid(x))))

    def sigmoid(e, x):
        return e("y", op.sigmoid(x))

    module = EagerModule(build_model(swish, ("n", 3, 5)))
    assert kinds(module)[0] is RowStep
    assert CallStep not in kinds(module)
    x = np.random.default_rng(6).normal(0, 9, (40, 3, 5)).astype("float32")
    x[0, 0] = 0.0, np.nan, np.inf, -200.0, 200.0
    want = x * EagerModule(build_model(sigmoid, ("n", 3, 5))).run("main", [x])[0]
    np.testing.assert_array_equal(module.run("main", [x])[0], want)
    exact = x.astype("float64") * special.expit(x.astype("float64"))
    np.testing.assert_allclose(want, exact, rtol=3e-7, atol=1e-30)
