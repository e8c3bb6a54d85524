"""Softmax against float64, and bit for bit against the arithmetic that is stated."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machines import best_isa, compile_kernel, every_isa, runnable_target

from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.integer.elementwise import Quantize
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store
from relayquant.ir.reference import qnn
from relayquant.ir.reference.row_arithmetic import exponentiate, softmax_along

SCALE = 1 / 255


def draw(shape, axis):
    """Scores of very different size; where there is room masked ones, and lines without a value."""
    rng = np.random.default_rng(sum(shape))
    x = (rng.normal(0, 1, shape) * 10.0 ** rng.integers(-3, 3, shape)).astype("float32")
    lines = np.moveaxis(x, axis, -1).reshape(-1, shape[axis]).copy()
    if len(lines) > 4:
        lines[1, 1:] = -np.inf
        lines[2] = -np.inf
        lines[3, 0], lines[4, -1] = np.nan, np.inf
    moved = np.moveaxis(x, axis, -1).shape
    return np.ascontiguousarray(np.moveaxis(lines.reshape(moved), -1, axis))


def run(spec, target, x, isa_lanes=1):
    dtype = "float32" if spec.quantized is None else spec.quantized.out.dtype
    y = tvm.runtime.tensor(np.full(x.shape, 7, dtype))
    kernel = compile_kernel(make_softmax(spec, isa_lanes=isa_lanes), target)
    kernel(tvm.runtime.tensor(x), y)
    return y.numpy()


def compute_exactly(x, axis):
    """In float64, as the literature has it."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(x.astype("float64") - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def check(spec, target, shape, isa_lanes=1):
    """The stated bits; within 1e-6 of the exact numbers."""
    x = draw(shape, spec.axis)
    factor = np.float32(1 if spec.factor is None else spec.factor)
    expected, exact = softmax_along(x * factor, spec.axis), compute_exactly(x * factor, spec.axis)
    np.testing.assert_allclose(expected, exact, rtol=1e-6, atol=1e-12)
    if spec.quantized is not None:
        expected = qnn.quantize(expected, SCALE, 0, out_dtype="uint8")
    np.testing.assert_array_equal(run(spec, target, x, isa_lanes), expected)


def quantize(has_fma):
    return Quantize((1,), SCALE, Epilogue(Store.REQUANTIZE, "uint8", 0), has_fma)


@pytest.mark.sample(4)
@every_isa
@pytest.mark.parametrize("factor", [None, 0.3])
def test_softmax__the_same_bits_on_every_instruction_set(isa, factor):
    """Of all that could be contracted to an fma, and of sums whose order could differ."""
    target, shape = runnable_target(isa), (2, 3, 72)
    check(Softmax(shape, 2, factor), target, shape)
    check(Softmax(shape, 2, factor, quantize(isa.has_fma)), target, shape)
    check(Softmax((2, 72, 21), 1), target, (2, 72, 21))


@every_isa
def test_softmax__powers_of_several_registers(isa):
    """The same bits: rows that four registers divide, two, and none."""
    target = runnable_target(isa)
    for width in (128, 96, 72):
        spec = Softmax((2, 3, width), 2, 0.3, quantize(isa.has_fma))
        check(spec, target, spec.shape, isa.lanes)


@pytest.mark.parametrize(
    ("width", "isa_lanes", "together"),
    [(128, 16, 64), (96, 16, 32), (197, 16, 16), (128, 8, 32), (128, 4, 16), (8, 16, 8)],
)
def test_make_softmax__powers_at_once(width, isa_lanes, together):
    """Of four registers, if that divides a row: no power is computed twice for it."""
    text = make_softmax(Softmax((2, width), 1), isa_lanes=isa_lanes).script()
    assert f'"int32x{together}"' in text
    assert f'"int32x{2 * together}"' not in text


@every_isa
def test_softmax__where_the_exponent_is_at_a_tie(isa):
    """Products with 1 / ln 2 that are half of an integer, or next to it: rounded before they are
    rounded to an integer, fused or not.
    """
    at = -(np.arange(126)[:, None] + 0.5) * np.log(2)
    x = (at * (1 + np.arange(-4, 5) * 2.0**-24)).astype("float32")
    x[:, 0] = 0
    target = runnable_target(isa)
    np.testing.assert_array_equal(run(Softmax(x.shape, 1), target, x), softmax_along(x, 1))
    x = np.ascontiguousarray(x.reshape(1, -1))
    np.testing.assert_array_equal(run(Softmax(x.shape, 1), target, x), softmax_along(x, 1))


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("width", [1, 2, 7, 16, 31, 32, 33, 64, 98, 1500])
def test_softmax__of_every_width(width):
    """Known when it is compiled, and when it runs."""
    target, shape = runnable_target(best_isa()), (3, 4, width)
    for known in (shape, (None, 4, width), (3, 4, None), (None, None, None)):
        check(Softmax(known, 2), target, shape)
    check(Softmax((None, 4, width), 2, 3.0, quantize(best_isa().has_fma)), target, shape)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 21, 5, 8), 1), ((70, 33), 0), ((2, 3, 40, 1), 2), ((1, 33, 3), 1), ((5, 1, 17), 1)],
)
def test_softmax__along_other_axes(shape, axis):
    target = runnable_target(best_isa())
    for known in (shape, (None,) * len(shape), (*shape[:-1], None)):
        check(Softmax(known, axis), target, shape)


@pytest.mark.parametrize(
    ("shape", "axis", "told"),
    [((2, 3, 4), 1, "allowed: along the last one"), ((2, None), 1, "or a known length")],
)
def test_softmax__integers_of_rows_of_known_length_alone(shape, axis, told):
    with pytest.raises(ValueError, match=told):
        Softmax(shape, axis, quantized=quantize(has_fma=True))


def test_softmax__factor_along_the_last_axis_alone():
    with pytest.raises(ValueError, match="along axis 0 of 2; allowed: along the last one"):
        Softmax((2, 3), 0, factor=0.5)


def test_softmax__of_as_many_rows_as_threads_share():
    target, shape = runnable_target(best_isa()), (3, 111, 130)
    check(Softmax(shape, 2), target, shape)
    check(Softmax((None, None, None), 2), target, shape)
    check(Softmax((3, 111, 130), 1), target, shape)


def test_exponentiate__against_float64():
    """Every 4,096th float32 from -0 to -infinity, and where it ends."""
    x = np.arange(0x80000000, 0xFF800000, 4096, dtype="uint32").view("float32")
    ends = np.array([-87.3, -87.4, -87.6, -87.7, -88.1, -1e30, -np.inf], "float32")
    for data in (x, ends):
        found, exact = exponentiate(data), np.exp(data.astype("float64"))
        np.testing.assert_allclose(found, exact, rtol=2e-7, atol=2.0**-126)
        assert not found[data < -87.7].any()
    assert exponentiate(np.zeros(1, "float32")) == 1
    assert np.isnan(exponentiate(np.array([np.nan], "float32")))


@pytest.mark.optimized
def test_softmax__compiles_for_arm():
    """Cross-compiled: vectors, and no call of a library function."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]})
    spec = Softmax((None, 100), 1)
    text = tvm.compile(tvm.IRModule({"softmax": make_softmax(spec)}), target=target)
    text = text.mod.inspect_source("asm")
    assert "\tfmul\tv" in text
    assert "\tshl\tv" in text
    assert "expf" not in text
    assert "fmaf" not in text
