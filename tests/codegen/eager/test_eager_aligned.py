"""Operators in numpy whose results kernels read in place."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax
from tvm.relax import op

from relayquant.base.runtime import ALIGNMENT, find_memory_axes
from relayquant.codegen.eager import EagerModule
from relayquant.errors import ModelError
from relayquant.ir.reference import run

RNG = np.random.default_rng(5)


def join(*shapes: tuple, axis: int, dtype: str = "float32"):
    return build_model(
        lambda e, *parts: e("y", op.concat(relax.Tuple(list(parts)), axis)), *shapes, dtype=dtype
    )


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_concat__is_numpys_in_the_memory_order_of_the_first(axis, order):
    shapes = [[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]]
    for shape, size in zip(shapes, (2, 7, 1), strict=True):
        shape[axis] = size
    parts = [
        RNG.standard_normal([shape[i] for i in np.argsort(order)], "float32").transpose(order)
        for shape in shapes
    ]
    module = EagerModule(join(*map(tuple, shapes), axis=axis))
    for data in (parts, [parts[0], *map(np.ascontiguousarray, parts[1:])]):
        (have,) = module.run("main", data)
        np.testing.assert_array_equal(have, np.concatenate(data, axis))
        check_place(have, parts[0])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool"])
def test_concat__of_integers_and_of_nothing(dtype):
    parts = [RNG.integers(0, 2, (2, size, 3)).astype(dtype) for size in (5, 0, 1)]
    mod = join(*(part.shape for part in parts), axis=1, dtype=dtype)
    (have,), (want,) = EagerModule(mod).run("main", parts), run(mod, parts)
    assert have.dtype == want.dtype == dtype
    np.testing.assert_array_equal(have, want)


def check_place(have: np.ndarray, data: np.ndarray) -> None:
    """Check that a result lies as the data, and where kernels read it."""
    assert have.transpose(find_memory_axes(data)).flags.c_contiguous
    assert have.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
@pytest.mark.parametrize("widths", [(0, 0, 3, 1, 0, 0, 2, 0), (1, 1, 0, 0, 0, 0, 0, 0), (0,) * 8])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_pad__is_numpys_in_the_memory_order_of_the_data(monkeypatch, order, widths, mode):
    monkeypatch.setattr("relayquant.codegen.eager.steps.aligned.FEWEST_BYTES", 0)
    x = RNG.standard_normal([(3, 5, 6, 7)[i] for i in np.argsort(order)], "float32")
    x, value = x.transpose(order), {"constant_values": -1.5} if mode == "constant" else {}
    mod = build_model(lambda e, x: e("y", op.nn.pad(x, list(widths), mode, -1.5)), x.shape)
    (have,) = EagerModule(mod).run("main", [x])
    np.testing.assert_array_equal(have, np.pad(x, np.reshape(widths, (-1, 2)), mode, **value))
    if mode == "constant":
        check_place(have, x)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum", "minimum"])
@pytest.mark.parametrize("other", [(3, 5, 6, 7), (7,), (5, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("is_first", [True, False])
def test_arithmetic__is_numpys_in_the_memory_order_of_the_larger(
    monkeypatch, name, other, is_first
):
    monkeypatch.setattr("relayquant.codegen.eager.steps.aligned.FEWEST_BYTES", 0)
    x = RNG.standard_normal((3, 6, 7, 5), "float32").transpose(0, 3, 1, 2)
    y = RNG.standard_normal(other, "float32")
    x[0, 0, 0, :4] = np.nan, np.inf, -np.inf, -0.0
    parts = (x, y) if is_first else (y, x)

    def body(e, left, right):  # numpy computes it, as no kernel has both operands
        return e("z", getattr(op, name)(left, right))

    mod = build_model(body, *(part.shape for part in parts))
    (have,) = EagerModule(mod).run("main", [*parts])
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(have, getattr(np, name)(*parts))
    assert have.ctypes.data % ALIGNMENT == 0
    if other != x.shape:
        check_place(have, x)


def test_arithmetic__results_larger_than_both_operands_and_integers(monkeypatch):
    monkeypatch.setattr("relayquant.codegen.eager.steps.aligned.FEWEST_BYTES", 0)
    for dtype in ("float32", "int32"):
        x, y = (RNG.integers(-9, 9, shape).astype(dtype) for shape in ((5, 1), (7,)))
        mod = build_model(lambda e, x, y: e("z", op.add(x, y)), x.shape, y.shape, dtype=dtype)
        (have,) = EagerModule(mod).run("main", [x, y])
        assert have.dtype == dtype
        np.testing.assert_array_equal(have, x + y)


def test_relu__is_numpys_in_the_memory_order_of_the_data():
    x = RNG.standard_normal((2, 50, 60, 7), "float32").transpose(0, 3, 1, 2)
    x[0, 0, 0, :4] = np.nan, np.inf, -np.inf, -0.0
    mod = build_model(lambda e, x: e("y", op.nn.relu(x)), x.shape)
    (have,) = EagerModule(mod).run("main", [x])
    np.testing.assert_array_equal(have, np.maximum(0, x))
    check_place(have, x)


def test_concat__sizes_that_do_not_fit_are_the_errors_of_the_reference():
    mod = join(("n", 2), ("m", "k"), axis=0)
    data = [np.zeros((2, 2), "float32"), np.zeros((2, 3), "float32")]
    with pytest.raises(ModelError) as want:
        run(mod, data)
    with pytest.raises(ModelError) as have:
        EagerModule(mod).run("main", data)
    assert str(have.value) == str(want.value)
