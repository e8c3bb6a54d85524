"""Elementwise operators, compiled for two targets, against direct numpy expectations."""

from __future__ import annotations

import numpy as np
import pytest
from qnn_testing import (
    HOST_TARGET,
    make_module,
    run_call,
    run_constant_and_variable,
    run_module,
)
from tvm import relax, tirx

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.ir.dialect import qnn
from relayquant.ir.reference.fixed_point import fma_float32

RNG = np.random.default_rng(0)
SCALES = np.array([0.1, 0.25, 0.03], "float32")
ZEROS = np.array([1, -2, 3], "int32")
INT8 = RNG.integers(-128, 128, (2, 3, 5, 7)).astype("int8")
INT32 = RNG.integers(-40000, 40000, (2, 3, 5, 7)).astype("int32")
LEGACY = [
    (rounding, arithmetic)
    for rounding in (Rounding.UPWARD, Rounding.TONEAREST)
    for arithmetic in Arithmetic
]


def along(values, axis, rank=4):
    shape = [1] * rank
    shape[axis] = -1
    return np.asarray(values).reshape(shape)


def f32(value):
    return np.asarray(value, "float32")


def f64(value):
    return np.asarray(value, "float32").astype("float64")


def finish(t, zero_point, dtype):
    """rint, clamp, zero point added as an integer: the default arithmetic."""
    low, high = INTEGER_LIMITS[dtype]
    whole = np.clip(np.rint(t).astype("float64"), low - zero_point, high - zero_point)
    return (whole.astype("int64") + zero_point).astype(dtype)


# ---------------------------------------------------------------- quantize, dequantize


@pytest.mark.parametrize("axis", [1, -3])
@pytest.mark.parametrize("dtype", ["int8", "uint16"])
def test_quantize__per_channel(axis, dtype):
    x = RNG.standard_normal((2, 3, 5, 7)).astype("float32") * 20
    zeros = np.abs(ZEROS)
    got = run_constant_and_variable(
        lambda d, s, z: qnn.quantize(d, s, z, axis=axis, out_dtype=dtype), [x], [SCALES, zeros]
    )
    expected = finish(x / along(SCALES, 1), along(zeros, 1), dtype)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (Rounding.TONEAREST_EVEN, [-2, -2, 0, 0, 2, 2, 127, -128, 0]),
        (Rounding.TONEAREST, [-3, -2, -1, 1, 2, 3, 127, -128, 0]),
        (Rounding.UPWARD, [-2, -1, 0, 1, 2, 3, 127, -128, 0]),
    ],
)
def test_quantize__ties_and_non_finite(rounding, expected):
    x = f32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, np.inf, -np.inf, np.nan])
    got = run_constant_and_variable(
        lambda d, s, z: qnn.quantize(d, s, z, rounding=rounding), [x], [1.0, 0]
    )
    np.testing.assert_array_equal(got, expected)


def test_quantize__nan_is_the_zero_point_and_float16_is_read():
    x = np.array([np.nan, 1.0, -1.0], "float16")
    got = run_call(lambda d: qnn.quantize(d, 0.5, 7, out_dtype="uint8"), x)
    np.testing.assert_array_equal(got, [7, 9, 5])


def test_quantize__int32_saturates():
    x = f32([1e30, -1e30, 3e9, 2**31 - 128, 5.0])
    got = run_call(lambda d: qnn.quantize(d, 1.0, 0, out_dtype="int32"), x)
    top = 2**31 - 128
    np.testing.assert_array_equal(got, [top, -(2**31), top, top, 5])


def test_quantize__divides_truly():
    """x * (1 / s) would give other integers for these values, also when s is a constant."""
    scale = np.float32(0.1)
    x = (np.arange(-20000, 20000) + 0.5).astype("float32") * scale
    x = np.concatenate([x, np.nextafter(x, np.float32(0))])
    expected = finish(x / scale, 0, "int16")
    assert (expected != finish(x * (np.float32(1) / scale), 0, "int16")).any()
    got = run_constant_and_variable(
        lambda d, s, z: qnn.quantize(d, s, z, out_dtype="int16"), [x], [scale, 0]
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("axis", [1, -1])
def test_dequantize__per_channel(axis):
    data = np.moveaxis(INT32, 1, axis)
    got = run_constant_and_variable(
        lambda d, s, z: qnn.dequantize(d, s, z, axis=axis), [data], [SCALES, ZEROS]
    )
    expected = (data - along(ZEROS, axis)).astype("float32") * along(SCALES, axis)
    np.testing.assert_array_equal(got, expected)


def test_dequantize__float16_is_clipped():
    data = np.array([-30000, 3, 30000], "int16")
    got = run_call(lambda d: qnn.dequantize(d, 4.0, 1, out_dtype="float16"), data)
    np.testing.assert_array_equal(got, np.array([-65504, 8, 65504], "float16"))


def test_quantize__symbolic_batch():
    variable = relax.TensorType((tirx.Var("n", "int64"), 3), "float32")
    module = make_module(lambda d: qnn.quantize(d, SCALES, ZEROS, axis=1), [variable])
    for batch in (1, 5):
        x = RNG.standard_normal((batch, 3)).astype("float32")
        expected = finish(x / SCALES, ZEROS, "int8")
        np.testing.assert_array_equal(run_module(module, [x]), expected)


# ---------------------------------------------------------------- requantize


@pytest.mark.sample(3)
@pytest.mark.parametrize("axis", [1, -3])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_requantize__default(axis, dtype):
    zero = 0 if dtype == "int32" else 5
    got = run_constant_and_variable(
        lambda d, *p: qnn.requantize(d, *p, axis=axis, out_dtype=dtype),
        [INT32],
        [SCALES, ZEROS, 7.3, zero],
    )
    m = f32(f64(SCALES) / f64(7.3))
    t = (INT32 - along(ZEROS, 1)).astype("float32") * along(m, 1)
    np.testing.assert_array_equal(got, finish(t, zero, dtype))


def test_requantize__int8_from_every_narrow_dtype():
    for dtype in ("int8", "uint8", "int16", "uint16", "int64"):
        low, high = INTEGER_LIMITS[dtype if dtype != "int64" else "int32"]
        data = RNG.integers(low, high, 200, endpoint=True).astype(dtype)
        got = run_call(lambda d: qnn.requantize(d, 0.02, 3, 0.5, -4), data, targets=["llvm"])
        m = f32(f64(0.02) / f64(0.5))
        t = (data.astype("int64") - 3).astype("int32").astype("float32") * m
        np.testing.assert_array_equal(got, finish(t, -4, "int8"))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("rounding", "arithmetic"), LEGACY)
def test_requantize__relay_modes(rounding, arithmetic):
    """Per channel; ties of a power of two show where the zero point is added."""
    scales = np.array([0.5, 0.25, 0.37], "float32")
    got = run_constant_and_variable(
        lambda d, *p: qnn.requantize(d, *p, axis=1, rounding=rounding, compute_dtype=arithmetic),
        [INT8],
        [scales, ZEROS, 1.0, -3],
    )
    real = along(f64(scales), 1)
    centred = INT8.astype("int64") - along(ZEROS, 1)
    if arithmetic is Arithmetic.INT64:
        v = centred * np.floor(real * 2**31 + 0.5) / 2**31  # exact: below 2^53
        t, offset = v, -3
    else:
        v = centred.astype(arithmetic.value) * real.astype(arithmetic.value)
        t, offset = v + np.asarray(-3, arithmetic.value), 0
    if rounding is Rounding.UPWARD:
        q = np.floor(t + np.asarray(0.5, t.dtype))
    else:
        q = np.sign(t) * np.floor(np.abs(t) + np.asarray(0.5, t.dtype))
    np.testing.assert_array_equal(got, np.clip(q + offset, -128, 127).astype("int8"))


def test_requantize__even_in_fixed_point():
    data = np.array([-5, -3, -1, 1, 3, 5], "int32")
    for arithmetic in Arithmetic:
        got = run_call(
            lambda d, a=arithmetic: qnn.requantize(d, 0.5, 0, 1.0, 0, compute_dtype=a), data
        )
        np.testing.assert_array_equal(got, [-2, -2, 0, 0, 2, 2])


@pytest.mark.slow
def test_requantize__tiny_multiplier_gives_the_zero_point():
    data = np.array([-(2**31), -1, 0, 1, 2**31 - 1], "int32")
    for rounding, arithmetic in LEGACY:
        got = run_constant_and_variable(
            lambda d, *p, r=rounding, a=arithmetic: qnn.requantize(
                d, *p, rounding=r, compute_dtype=a
            ),
            [data],
            [1e-20, 0, 1.0, 7],
            targets=["llvm"],
        )
        np.testing.assert_array_equal(got, [7] * 5)


# ---------------------------------------------------------------- simulated

CODES = {1: (-128, 127), 2: (0, 255), 4: (-8, 7), 5: (-32768, 32767), 6: (-127, 127), 7: (0, 65535)}


@pytest.mark.slow
def test_simulated_quantize__codes():
    """One compiled graph serves all codes, also one per channel."""
    x = RNG.standard_normal((4, 6)).astype("float32") * 30
    scale, zero = np.float32(0.1), np.int32(3)
    variables = [
        relax.TensorType(x.shape, "float32"),
        relax.TensorType((2,), "int32"),
        relax.TensorType((), "float32"),
        relax.TensorType((3,), "int32"),
    ]
    module = make_module(lambda *a: qnn.simulated_quantize(*a, axis=-1), variables)
    for code, (low, high) in CODES.items():
        arrays = [x, np.array([0, code], "int32"), scale, np.full(3, zero)]
        expected = np.clip(np.rint(x / scale) + zero, low, high).astype("float32")
        expected[:, ::2] = x[:, ::2]  # code 0 passes
        for target in ("llvm", HOST_TARGET):
            np.testing.assert_array_equal(run_module(module, arrays, target), expected)


def test_simulated_quantize__ties_as_asked():
    x = f32([-2.5, -0.5, 0.5, 2.5, np.nan])
    for rounding, expected in (
        (Rounding.TONEAREST_EVEN, [-2, 0, 0, 2, 0]),
        (Rounding.TONEAREST, [-3, -1, 1, 3, 0]),
        (Rounding.UPWARD, [-2, 0, 1, 3, 0]),
    ):
        got = run_call(lambda d, r=rounding: qnn.simulated_quantize(d, 1, 1.0, 0, rounding=r), x)
        np.testing.assert_array_equal(got, expected)


def test_simulated_dequantize__wraps_around_the_parameters():
    x = np.rint(RNG.standard_normal((2, 5, 3)) * 30).astype("float32")
    scales, zeros = f32([0.1, 0.2]), np.array([1, 2, 3], "int32")
    got = run_constant_and_variable(
        lambda d, c, s, z: qnn.simulated_dequantize(d, c, s, z, axis=1), [x], [1, scales, zeros]
    )
    channel = np.arange(5)
    expected = (x - along(f32(zeros)[channel % 3], 1, 3)) * along(scales[channel % 2], 1, 3)
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- add, subtract, mul


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_add_subtract__round_once(sign):
    lhs, rhs = INT32[:1], INT8
    operator = qnn.add if sign > 0 else qnn.subtract
    got = run_constant_and_variable(
        lambda a, b, *p: operator(a, b, *p, lhs_axis=1, rhs_axis=-3, out_dtype="int16"),
        [lhs, rhs],
        [SCALES, 0, SCALES[::-1].copy(), ZEROS, 0.3, 11],
    )
    m_l, m_r = (along(f32(f64(s) / f64(0.3)), 1) for s in (SCALES, SCALES[::-1]))
    left = lhs.astype("float32") * m_l
    right = (rhs.astype("int32") - along(ZEROS, 1)).astype("float32")
    t = fma_float32(right, sign * m_r, left)
    np.testing.assert_array_equal(got, finish(t, 11, "int16"))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("rounding", "arithmetic"), LEGACY)
@pytest.mark.parametrize("sign", [1, -1])
def test_add_subtract__relay_modes(sign, rounding, arithmetic):
    """Each side is requantized to int32 first."""
    operator = qnn.add if sign > 0 else qnn.subtract
    modes = {"rounding": rounding, "compute_dtype": arithmetic}
    lhs, rhs = INT8, INT8[::-1].astype("uint8")
    got = run_constant_and_variable(
        lambda a, b, *p: operator(a, b, *p, **modes),
        [lhs, rhs],
        [0.1, 3, 0.25, 9, 0.5, -7],
        targets=[HOST_TARGET],
    )
    left, right = (
        run_call(
            lambda d, s=s, z=z: qnn.requantize(d, s, z, 0.5, -7, out_dtype="int32", **modes),
            data,
            targets=["llvm"],
        )
        for data, s, z in ((lhs, 0.1, 3), (rhs, 0.25, 9))
    )
    total = left + right + 7 if sign > 0 else left - right - 7
    np.testing.assert_array_equal(got, np.clip(total, -128, 127).astype("int8"))


@pytest.mark.slow
def test_mul__default():
    lhs, rhs = INT8, RNG.integers(0, 256, (3, 1, 1)).astype("uint8")
    got = run_constant_and_variable(
        lambda a, b, *p: qnn.mul(a, b, *p, lhs_axis=1, out_dtype="uint8"),
        [lhs, rhs],
        [SCALES, ZEROS, 0.02, 128, 0.05, 100],
    )
    product = (lhs.astype("int32") - along(ZEROS, 1)) * (rhs.astype("int32") - 128)
    m = f32(f64(SCALES) * f64(0.02) / f64(0.05))
    t = product.astype("float32") * along(m, 1)
    np.testing.assert_array_equal(got, finish(t, 100, "uint8"))


@pytest.mark.slow
def test_mul__channels_on_two_axes():
    lhs, rhs = INT8[0, :, :, :3], INT8[1, :, :, :3]
    right_scales = f32([0.3, 0.2, 0.5])
    got = run_constant_and_variable(
        lambda a, b, *p: qnn.mul(a, b, *p, lhs_axis=0, rhs_axis=2),
        [lhs, rhs],
        [SCALES, 0, right_scales, 0, 0.5, 0],
    )
    m = f32(f64(SCALES)[:, None, None] * f64(right_scales) / f64(0.5))
    t = (lhs.astype("int32") * rhs.astype("int32")).astype("float32") * m
    np.testing.assert_array_equal(got, finish(t, 0, "int8"))


def test_mul__relay_rounds_the_product_of_scales():
    modes = {"rounding": Rounding.UPWARD, "compute_dtype": Arithmetic.INT64}
    got = run_constant_and_variable(
        lambda a, b, *p: qnn.mul(a, b, *p, **modes), [INT8, INT8], [0.1, 3, 0.2, 4, 0.7, 5]
    )
    product = (INT8.astype("int32") - 3) * (INT8.astype("int32") - 4)
    expected = run_call(
        lambda d: qnn.requantize(d, f32(0.1) * f32(0.2), 0, 0.7, 5, **modes), product
    )
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- the rest


def test_concatenate__requantizes_what_differs():
    parts = [INT8, INT8[:, :1], INT8[:, :2]]
    parameters = [(0.1, 3), (0.05, 3), (0.1, -1)]
    flat = [p[0] for p in parameters] + [p[1] for p in parameters] + [0.1, 3]
    got = run_constant_and_variable(
        lambda a, b, c, *p: qnn.concatenate([a, b, c], p[:3], p[3:6], *p[6:], axis=-3), parts, flat
    )
    expected = [
        finish((part.astype("int32") - z).astype("float32") * f32(f64(s) / f64(0.1)), 3, "int8")
        for part, (s, z) in zip(parts, parameters, strict=True)
    ]
    np.testing.assert_array_equal(expected[0], INT8)
    np.testing.assert_array_equal(got, np.concatenate(expected, axis=1))


def test_concatenate__tuple_variable():
    ty = relax.TupleType([relax.TensorType((2, 3), "int8")] * 2)
    builder = relax.BlockBuilder()
    pair = relax.Var("pair", ty)
    with builder.function("main", [pair]):
        call = qnn.concatenate(pair, [0.1, 0.2], [0, 0], 0.1, 0, axis=0)
        builder.emit_func_output(builder.emit(call))
    builder.finalize()
    lowered = relax.transform.LegalizeOps()(builder.get())
    assert "qnn.concatenate" not in lowered["main"].script()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_leaky_relu__default(alpha):
    got = run_constant_and_variable(
        lambda d, *p: qnn.leaky_relu(d, *p, alpha=alpha), [INT8], [0.1, 30, 0.07, -20]
    )
    centred = (INT8.astype("int32") - 30).astype("float32")
    m = np.where(centred < 0, f32(f64(0.1) * alpha / f64(0.07)), f32(f64(0.1) / f64(0.07)))
    np.testing.assert_array_equal(got, finish(centred * m, -20, "int8"))


@pytest.mark.slow
def test_prelu__slopes_of_channels():
    """Single constants, arrays and variables; below 0, above 1 and not the last axis."""
    data, slopes = np.stack([INT8] * 4), np.array([-1.5, 0, 0.1, 2], "float32")
    parameters = [0.1, 30, 0.07, -20, slopes]
    got = run_constant_and_variable(lambda d, *p: qnn.prelu(d, *p, axis=0), [data], parameters)
    centred = (data.astype("int32") - 30).astype("float32")
    negative = f32(f64(0.1) * slopes.astype("float64") / f64(0.07)).reshape(4, 1, 1, 1, 1)
    m = np.where(centred < 0, negative, f32(f64(0.1) / f64(0.07)))
    np.testing.assert_array_equal(got, finish(centred * m, -20, "int8"))


@pytest.mark.slow
def test_leaky_relu__relay_mode():
    modes = {"rounding": Rounding.UPWARD, "compute_dtype": Arithmetic.INT64}
    got = run_constant_and_variable(
        lambda d, *p: qnn.leaky_relu(d, *p, alpha=0.25, **modes), [INT8], [0.5, 30, 0.25, -20]
    )
    moved = (INT8.astype("int64") - 30) * 2 - 20
    below = np.floor(moved / 4 + 0.5) + np.floor(-20 * 3 / 4 + 0.5)
    expected = np.clip(np.where(INT8 < 30, below, moved), -128, 127)
    np.testing.assert_array_equal(got, expected.astype("int8"))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("table_dtype", ["int8", "float32"])
def test_lookup__bit_pattern(dtype, table_dtype):
    data = np.arange(256).astype("uint8").view(dtype).reshape(16, 16)
    table = RNG.permutation(256).astype("uint8").view("int8").astype(table_dtype)
    got = run_call(lambda d: qnn.lookup(d, table), data)
    np.testing.assert_array_equal(got, table.reshape(16, 16))
    assert run_call(lambda d: qnn.lookup(d, table), np.array([-1], "int8"))[0] == table[255]
