"""Bounds of floats, and products with 0: compiled code keeps NaN and infinities as numpy does."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from compiled_call import build_call, check_exactly, run_compiled
from tvm import relax, tirx

import relayquant as rq
from relayquant.ir.rewrite.function import make_main

NAN, INF = np.nan, np.inf
DATA = np.float32([1, -2, NAN, INF, -INF, 0.5, -0.25, 7] * 3)
OTHER = np.float32([NAN] * 8 + [1, 2, NAN, NAN, 3, -INF, INF, 0.25] + [0.5] * 8)


def const(value):
    return relax.const(value, "float32")


#: name -> (operator, what numpy computes)
BOUNDS = {
    "relu": (relax.op.nn.relu, lambda x: np.maximum(x, 0)),
    "clip": (lambda x: relax.op.clip(x, -1, 1), lambda x: np.clip(x, -1, 1)),
    "clip below": (lambda x: relax.op.clip(x, 0, INF), lambda x: np.clip(x, 0, INF)),
    "clip of bounds that cross": (lambda x: relax.op.clip(x, 2, 1), lambda x: np.clip(x, 2, 1)),
    "a leaky bound": (
        lambda x: relax.op.maximum(x, relax.op.multiply(x, const(0.1))),
        lambda x: np.maximum(x, x * np.float32(0.1)),
    ),
    "maximum": (lambda x: relax.op.maximum(x, const(0.25)), lambda x: np.maximum(x, 0.25)),
    "minimum": (lambda x: relax.op.minimum(x, const(0.25)), lambda x: np.minimum(x, 0.25)),
    "maximum of a number": (
        lambda x: relax.op.maximum(const(0.25), x), lambda x: np.maximum(x, 0.25)
    ),
    "maximum with NaN": (lambda x: relax.op.maximum(x, const(NAN)), lambda x: x + NAN),
    "a gate": (
        lambda x: relax.op.multiply(x, relax.op.clip(relax.op.add(x, const(3.0)), 0, 6)),
        lambda x: x * np.clip(x + np.float32(3), 0, 6),
    ),
    "sign": (relax.op.sign, np.sign),
    "times 0": (lambda x: relax.op.multiply(x, const(0.0)), lambda x: x * np.float32(0)),
    "0 times": (lambda x: relax.op.multiply(const(0.0), x), lambda x: x * np.float32(0)),
    "0 by": (
        lambda x: relax.op.divide(const(0.0), relax.op.subtract(x, const(1.0))),
        lambda x: np.float32(0) / (x - np.float32(1)),
    ),
    "by 0 times": (
        lambda x: relax.op.divide(const(1.0), relax.op.multiply(x, const(0.0))),
        lambda x: np.float32(1) / (x * np.float32(0)),
    ),
    "by 0 beside a constant": (
        lambda x: relax.op.where(
            relax.op.isnan(relax.op.divide(x, const(0.0))),
            relax.op.astype(relax.const(3, "int32"), "float32"),
            x,
        ),
        lambda x: np.where(np.isnan(x), np.float32(3), x),
    ),
    "a constant by 0": (
        lambda x: relax.op.add(x, relax.op.divide(const([1.0]), const([0.0]))), lambda x: x + INF
    ),
}  # fmt: skip


def test_products_with_0__of_bfloat16():
    x, zero = DATA.astype(ml_dtypes.bfloat16), np.zeros((), ml_dtypes.bfloat16)
    number = relax.const(zero, "bfloat16")
    with np.errstate(all="ignore"):
        check_exactly(lambda x: relax.op.multiply(x, number), x * zero, x)
        check_exactly(lambda x: relax.op.divide(number, x), zero / x, x)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds__of_one_value(name):
    compute, expected = BOUNDS[name]
    with np.errstate(all="ignore"):
        check_exactly(compute, np.float32(expected(DATA)), DATA)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_bounds__of_two_values(name, dtype):
    x, y = DATA.astype(dtype), OTHER.astype(dtype)
    check_exactly(getattr(relax.op, name), getattr(np, name)(x, y), x, y)
    check_exactly(getattr(relax.op, name), getattr(np, name)(y, x), y, x)
    column = x[:8, None]
    check_exactly(getattr(relax.op, name), getattr(np, name)(column, y), column, y)


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_bounds__of_two_values_are_vectors(name):
    """As before they kept NaN: a question for each number took three times as long."""

    def compute(x):
        return getattr(relax.op, name)(x, relax.op.multiply(x, const(0.1)))

    mod = build_call(compute, np.zeros((4, 4096), "float32"))
    library = rq.compile(mod, target="llvm -mcpu=znver4").mod
    (text,) = (each.inspect_source("asm") for each in library.imports)
    assert re.search(rf"\tv{name[:3]}ps\t.*zmm", text)
    assert not re.search(rf"\tv{name[:3]}ss\t", text)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_bounds__of_other_floats(dtype):
    x = DATA.astype(dtype)
    check_exactly(relax.op.nn.relu, np.maximum(x, np.zeros((), dtype)), x)
    check_exactly(lambda x: relax.op.clip(x, -1, 1), np.clip(x, -1, 1).astype(dtype), x)
    most = float(np.finfo("float32").max)  # float16 has no such number
    want = np.clip(x.astype("float64"), 0, most if dtype == "float64" else INF).astype(dtype)
    check_exactly(lambda x: relax.op.clip(x, 0, most), want, x)


def test_bounds__that_a_size_gives():
    x = relax.Var("x", relax.TensorType((size := tirx.Var("n", "int64"),), "float32"))
    mod = make_main([x], lambda _: relax.op.clip(x, tirx.Cast("float32", size), np.inf))
    (got,) = rq.Executor(rq.compile(mod)).run("main", [np.float32([1, 5, 2])])
    np.testing.assert_array_equal(got, [3, 5, 3])


def test_bounds__keep_the_sign_of_0():
    """As PyTorch and ONNX Runtime do, compiled and in the reference."""
    x = np.float32([-0.0, 0.0, -1.0] * 8)
    for found in run_compiled(relax.op.nn.relu, x):
        np.testing.assert_array_equal(np.signbit(found), [True, False, False] * 8)


@pytest.mark.parametrize("width", [3, 16])
def test_bounds__behind_a_product(width):
    """Kernels of products bound their sums."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 16)).astype("float32")
    x[1, 2], weight = NAN, rng.standard_normal((16, width)).astype("float32")

    def compute(x):
        return relax.op.clip(relax.op.matmul(x, relax.const(weight)), 0, 6)

    for found in run_compiled(compute, x):
        np.testing.assert_allclose(found, np.clip(x @ weight, 0, 6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [3, 16])
def test_bounds__behind_a_convolution(channels):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, channels, 8, 8)).astype("float32")
    x[0, 1, 3, 4], weight = NAN, rng.standard_normal((16, channels, 3, 3)).astype("float32")
    want = torch.relu(torch.conv2d(torch.from_numpy(x), torch.from_numpy(weight))).numpy()
    for found in run_compiled(
        lambda x: relax.op.nn.relu(relax.op.nn.conv2d(x, relax.const(weight))), x
    ):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
