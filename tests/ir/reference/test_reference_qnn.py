"""Operators of `reference.qnn` against exact rational numbers and against naive loops."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference_fixed_point import round_fraction

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.errors import QnnError
from relayquant.ir.reference import qnn
from relayquant.ir.reference.affine import center_factors

DTYPES = st.sampled_from(["int8", "uint8", "int16"])
SCALES = st.floats(2.0**-10, 8, width=32) | st.sampled_from([2.0**e for e in range(-6, 4)])
SEEDS = st.integers(0, 2**32 - 1)


def draw_array(seed: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    low, high = INTEGER_LIMITS[dtype]
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(dtype)


def nearest_float32(value: Fraction) -> Fraction:
    """The float32 nearest to an exact value of normal magnitude, ties to even."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value)))
    unit = Fraction(2) ** (exponent - 23)
    if abs(value) >= Fraction(2) ** (exponent + 1):
        unit *= 2
    return round(value / unit) * unit


def nearest(value: Fraction, arithmetic: Arithmetic) -> Fraction:
    """The float nearest to an exact value."""
    return Fraction(float(value)) if arithmetic is Arithmetic.FLOAT64 else nearest_float32(value)


def requantize_exact(x, s_in, z_in, s_out, z_out, dtype, rounding, arithmetic):
    """One value by rational numbers, every rounding of the definition explicit."""
    low, high = INTEGER_LIMITS[dtype]
    ratio = Fraction(float(Fraction(s_in) / Fraction(s_out)))
    if arithmetic is Arithmetic.INT64:
        exponent = math.frexp(float(ratio))[1]
        mantissa = math.floor(ratio * Fraction(2) ** (31 - exponent) + Fraction(1, 2))
        exact = (x - z_in) * mantissa * Fraction(2) ** (exponent - 31)
        return min(max(round_fraction(exact, rounding) + z_out, low), high)
    multiplier = nearest(ratio, arithmetic)
    product = nearest(nearest(Fraction(x - z_in), arithmetic) * multiplier, arithmetic)
    if rounding is Rounding.TONEAREST_EVEN:
        return min(max(round(product) + z_out, low), high)
    total = nearest(product + z_out, arithmetic)
    if rounding is Rounding.UPWARD:
        whole = math.floor(nearest(total + Fraction(1, 2), arithmetic))
    else:
        whole = round_fraction(total, rounding)
    return min(max(whole, low), high)


@pytest.mark.slow
@given(
    x=st.integers(-(2**20), 2**20) | st.integers(-300, 300),
    s_in=SCALES,
    z_in=st.integers(-200, 200),
    s_out=SCALES,
    dtype=DTYPES,
    rounding=st.sampled_from(Rounding),
    arithmetic=st.sampled_from(Arithmetic),
    data=st.data(),
)
@settings(max_examples=count_examples(2000))
def test_requantize__every_mode_is_exact(x, s_in, z_in, s_out, dtype, rounding, arithmetic, data):
    z_out = data.draw(st.integers(*INTEGER_LIMITS[dtype]))
    if arithmetic is Arithmetic.INT64 and abs((x - z_in) * s_in / s_out) > 2**30:
        return  # wraps
    result = qnn.requantize(
        np.int32([x]),
        s_in,
        z_in,
        s_out,
        z_out,
        out_dtype=dtype,
        rounding=rounding,
        compute_dtype=arithmetic,
    )
    assert result.dtype == dtype
    assert result[0] == requantize_exact(x, s_in, z_in, s_out, z_out, dtype, rounding, arithmetic)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_requantize__per_channel_is_each_channel_alone(rounding, arithmetic, axis):
    x = draw_array(1, "int16", (3, 4)).astype("int32")
    count = x.shape[axis]
    scales = np.float32([0.3, 0.011, 1.7, 0.5])[:count]
    zeros = np.int32([3, -5, 0, 100])[:count]
    modes = {"rounding": rounding, "compute_dtype": arithmetic}
    result = qnn.requantize(x, scales, zeros, 0.9, 7, axis=axis, **modes)
    for i in range(count):
        alone = qnn.requantize(x.take(i, axis), scales[i], zeros[i], 0.9, 7, **modes)
        np.testing.assert_array_equal(result.take(i, axis), alone)


@given(
    x=st.floats(-1e4, 1e4, width=32),
    scale=SCALES,
    dtype=DTYPES,
    data=st.data(),
)
def test_quantize__is_the_rounded_quotient(x, scale, dtype, data):
    low, high = INTEGER_LIMITS[dtype]
    zero_point = data.draw(st.integers(low, high))
    result = qnn.quantize(np.float32([x]), scale, zero_point, out_dtype=dtype)
    quotient = np.float32(x) / np.float32(scale)
    assert result[0] == min(max(round(Fraction(float(quotient))) + zero_point, low), high)


def test_quantize__special_values():
    x = np.float32([np.nan, np.inf, -np.inf])
    for rounding in Rounding:
        result = qnn.quantize(x, 0.1, 5, rounding=rounding)
        np.testing.assert_array_equal(result, np.int8([5, 127, -128]))


@given(seed=SEEDS, scale=SCALES, zero_point=st.integers(-128, 127))
def test_dequantize__inverts_quantize(seed, scale, zero_point):
    q = draw_array(seed, "int8", (32,))
    real = qnn.dequantize(q, scale, zero_point)
    np.testing.assert_array_equal(qnn.quantize(real, scale, zero_point), q)


@given(seed=SEEDS, scale=SCALES, rounding=st.sampled_from(Rounding), data=st.data())
def test_simulated_quantize__equals_quantize(seed, scale, rounding, data):
    dtype, code = data.draw(st.sampled_from([("int8", 1), ("uint8", 2), ("int16", 5)]))
    zero_point = data.draw(st.integers(*INTEGER_LIMITS[dtype]))
    x = np.random.default_rng(seed).normal(0, 50, (4, 5)).astype("float32")
    simulated = qnn.simulated_quantize(x, code, scale, zero_point, rounding=rounding)
    real = qnn.quantize(x, scale, zero_point, out_dtype=dtype, rounding=rounding)
    assert simulated.dtype == np.float32
    np.testing.assert_array_equal(simulated, real)
    np.testing.assert_array_equal(
        qnn.simulated_dequantize(simulated, code, scale, zero_point),
        qnn.dequantize(real, scale, zero_point),
    )


def test_simulated_quantize__codes_and_cycled_parameters():
    x = np.full((2, 5), 200.3, "float32")
    codes = np.int32([0, 1, 4, 6, 2])
    result = qnn.simulated_quantize(x, codes, np.float32([1.0]), np.int32([0]), axis=1)
    np.testing.assert_array_equal(result[1], np.float32([200.3, 127, 7, 127, 200]))
    low = qnn.simulated_quantize(-x, codes, 1.0, 0, axis=1)
    np.testing.assert_array_equal(low[0], np.float32([-200.3, -128, -8, -127, 0]))
    cycled = qnn.simulated_quantize(x, 3, np.float32([1, 2]), np.int32([0, 1, 2]), axis=1)
    np.testing.assert_array_equal(cycled[0], np.float32([200, 101, 202, 100, 201]))


def convolve_naively(x, w, pads, strides, dilation, groups):
    """NCHW / OIHW cross-correlation of float64 arrays in plain loops, padded with 0."""
    x = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    n, _, height, width = x.shape
    out, per_group, kh, kw = w.shape
    oh = (height - dilation[0] * (kh - 1) - 1) // strides[0] + 1
    ow = (width - dilation[1] * (kw - 1) - 1) // strides[1] + 1
    result = np.zeros((n, out, oh, ow))
    for o, y, z in itertools.product(range(out), range(oh), range(ow)):
        first = o // (out // groups) * per_group
        rows = y * strides[0] + dilation[0] * np.arange(kh)
        columns = z * strides[1] + dilation[1] * np.arange(kw)
        patch = x[:, first : first + per_group][:, :, rows][:, :, :, columns]
        result[:, o, y, z] = (patch * w[o]).sum((1, 2, 3))
    return result


@st.composite
def conv_cases(draw):
    """(groups, channels per group in, out, kernel, strides, dilation, padding, layouts)."""
    return {
        "groups": draw(st.sampled_from([1, 1, 2, 3])),
        "inner": draw(st.integers(1, 3)),
        "outer": draw(st.integers(1, 3)),
        "kernel": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "strides": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "padding": draw(st.tuples(*[st.integers(0, 2)] * 4)),
        "layouts": draw(
            st.sampled_from(
                [("NCHW", "OIHW"), ("NHWC", "HWIO"), ("NHWC", "OHWI"), ("NCHW", "HWOI")]
            )
        ),
        "seed": draw(SEEDS),
    }


def to_layout(array, source, target):
    return array.transpose([source.index(letter) for letter in target])


@given(conv_cases(), st.booleans(), st.integers(0, 255))
@settings(max_examples=count_examples(150), deadline=None)
def test_conv2d__equals_convolution_of_real_values(case, per_channel, z_data):
    """Zero-point algebra: the accumulator times both scales is the float64 convolution."""
    groups, out = case["groups"], case["outer"] * case["groups"]
    x = draw_array(case["seed"], "uint8", (2, case["inner"] * groups, 6, 7))
    w = draw_array(case["seed"] + 1, "int8", (out, case["inner"], *case["kernel"]))
    rng = np.random.default_rng(case["seed"])
    z_kernel = rng.integers(-9, 9, out if per_channel else ()).astype("int32")
    s_data, s_kernel = np.float32(0.37), np.float32(0.011)
    layout, kernel_layout = case["layouts"]
    result = qnn.conv2d(
        to_layout(x, "NCHW", layout),
        to_layout(w, "OIHW", kernel_layout),
        z_data,
        z_kernel,
        s_data,
        s_kernel,
        strides=case["strides"],
        padding=case["padding"],
        dilation=case["dilation"],
        groups=groups,
        data_layout=layout,
        kernel_layout=kernel_layout,
    )
    real_x = float(s_data) * (x.astype("float64") - z_data)
    real_w = float(s_kernel) * (w.astype("float64") - z_kernel.reshape(-1, 1, 1, 1))
    expected = convolve_naively(
        real_x, real_w, case["padding"], case["strides"], case["dilation"], groups
    )
    assert result.dtype == np.int32
    accumulator = to_layout(result, layout, "NCHW")
    np.testing.assert_array_equal(
        accumulator, np.rint(expected / (float(s_data) * float(s_kernel)))
    )


@given(conv_cases(), st.tuples(st.integers(0, 1), st.integers(0, 1)))
@settings(max_examples=count_examples(100), deadline=None)
def test_conv2d_transpose__is_the_gradient_of_conv2d(case, extra):
    """<conv(x), y> = <x, conv_transpose(y)> for all x, y (no output padding beyond the stride)."""
    groups, strides, dilation = case["groups"], case["strides"], case["dilation"]
    extra = tuple(min(e, s - 1) for e, s in zip(extra, strides, strict=True))
    pads = tuple(min(p, 1) for p in case["padding"])
    y = draw_array(case["seed"], "int8", (1, case["outer"] * groups, 3, 4))
    w = draw_array(
        case["seed"] + 1, "int8", (case["outer"] * groups, case["inner"], *case["kernel"])
    )
    rng = np.random.default_rng(case["seed"])
    z_y, z_w = 5, rng.integers(-9, 9, case["inner"] * groups).astype("int32")
    attrs = {"strides": strides, "padding": pads, "dilation": dilation, "groups": groups}
    sizes = [
        (y.shape[2 + i] - 1) * strides[i]
        + dilation[i] * (case["kernel"][i] - 1)
        + 1
        + extra[i]
        - pads[i]
        - pads[i + 2]
        for i in range(2)
    ]
    if min(sizes) < 1:
        return
    result = qnn.conv2d_transpose(y, w, z_y, z_w, 1.0, 1.0, output_padding=extra, **attrs)
    assert result.shape == (1, case["inner"] * groups, *sizes)
    x = draw_array(case["seed"] + 2, "int8", result.shape).astype("float64")
    # Channel c of the result is entry c mod inner of the kernel's second axis, in its group.
    per_input = np.repeat(z_w.reshape(groups, -1), case["outer"], axis=0)
    centred_w = w.astype("float64") - per_input[:, :, None, None]
    forward = convolve_naively(x, centred_w, pads, strides, dilation, groups)
    centred_y = y.astype("float64") - z_y
    # With extra sizes the forward convolution may have more outputs; they meet no value of y.
    forward = forward[:, :, : y.shape[2], : y.shape[3]]
    assert (forward * centred_y).sum() == (x * result).sum()


def test_conv1d__is_conv2d_of_height_one():
    x, w = draw_array(3, "int8", (2, 4, 9)), draw_array(4, "int8", (6, 2, 3))
    args = (3, np.arange(6), 1.0, 1.0)
    flat = qnn.conv1d(x, w, *args, strides=(2,), padding=(1, 2), dilation=(2,), groups=2)
    tall = qnn.conv2d(
        x[:, :, None],
        w[:, :, None],
        *args,
        strides=(1, 2),
        padding=(0, 1, 0, 2),
        dilation=(1, 2),
        groups=2,
    )
    np.testing.assert_array_equal(flat, tall[:, :, 0])


def test_conv2d__many_channels_take_the_tap_by_tap_path():
    x, w = draw_array(5, "uint8", (1, 200, 4, 4)), draw_array(6, "int8", (3, 200, 3, 3))
    result = qnn.conv2d(x, w, 128, 0, 1.0, 1.0, padding=(1, 1))
    expected = convolve_naively(x.astype("float64") - 128, w, (1, 1, 1, 1), (1, 1), (1, 1), 1)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("inputs", "exact"), [(518, "float32"), (519, "float64"), (40_000, "float64")]
)
def test_products__are_exact_up_to_the_largest_sum(inputs, exact):
    data, weight = np.full((1, inputs), 255, "uint8"), np.full((2, inputs), -127, "int8")
    weight[1, ::2] = 127
    assert {a.dtype.name for a in center_factors(data, weight, 0, 0, 0)} == {exact}
    expected = [[-127 * 255 * inputs, 127 * 255 * (inputs % 2)]]
    np.testing.assert_array_equal(qnn.dense(data, weight, 0, 0, 1.0, 1.0), expected)
    image, kernel = data[:, :, None, None], weight[:, :, None, None]
    found = qnn.conv2d(image, kernel, 0, 0, 1.0, 1.0)[:, :, 0, 0]
    np.testing.assert_array_equal(found, expected)


@given(seed=SEEDS, z_x=st.integers(0, 255), per_channel=st.booleans())
def test_dense__equals_product_of_real_values(seed, z_x, per_channel):
    x, w = draw_array(seed, "uint8", (2, 3, 5)), draw_array(seed + 1, "int8", (4, 5))
    z_w = np.int32([1, -2, 3, 0]) if per_channel else np.int32(-7)
    result = qnn.dense(x, w, z_x, z_w, 0.1, 0.2)
    expected = (x.astype("int64") - z_x) @ (w.astype("int64") - np.reshape(z_w, (-1, 1))).T
    assert result.dtype == np.int32
    np.testing.assert_array_equal(result, expected)


@given(seed=SEEDS, z_x=st.integers(-128, 127), z_y=st.integers(0, 255))
def test_batch_matmul__broadcasts_batches(seed, z_x, z_y):
    x, y = draw_array(seed, "int8", (2, 1, 3, 5)), draw_array(seed + 1, "uint8", (4, 6, 5))
    result = qnn.batch_matmul(x, y, z_x, z_y, 1.0, 1.0)
    expected = np.einsum(
        "abmk,bnk->abmn", np.repeat(x.astype(int) - z_x, 4, 1), y.astype(int) - z_y
    )
    np.testing.assert_array_equal(result, expected)


@given(
    left=st.integers(-128, 127),
    right=st.integers(-(2**22), 2**22),
    scales=st.tuples(SCALES, SCALES, SCALES),
    zeros=st.tuples(*[st.integers(-128, 127)] * 3),
    sign=st.sampled_from([1, -1]),
)
@settings(max_examples=count_examples(500))
def test_add_subtract__round_once(left, right, scales, zeros, sign):
    m_left, m_right = (
        nearest_float32(Fraction(float(Fraction(s) / Fraction(scales[2])))) for s in scales[:2]
    )
    first = nearest_float32((left - zeros[0]) * m_left)
    total = nearest_float32((right - zeros[1]) * sign * m_right + first)
    expected = min(max(round(total) + zeros[2], -128), 127)
    operator = qnn.add if sign == 1 else qnn.subtract
    result = operator(
        np.int8([left]),
        np.int32([right]),
        scales[0],
        zeros[0],
        scales[1],
        zeros[1],
        scales[2],
        zeros[2],
    )
    assert result.dtype == np.int8
    assert result[0] == expected


@given(seed=SEEDS, scales=st.tuples(SCALES, SCALES, SCALES), zero=st.integers(-20, 20))
def test_mul__is_requantized_product(seed, scales, zero):
    left, right = draw_array(seed, "int8", (3, 4)), draw_array(seed + 1, "uint8", (4,))
    result = qnn.mul(left, right, scales[0], zero, scales[1], 7, scales[2], 3)
    product = (left.astype(int) - zero) * (right.astype(int) - 7)
    m = np.float32(float(scales[0]) * float(scales[1]) / float(scales[2]))
    expected = np.clip(np.rint(product.astype("float32") * m).astype("int64") + 3, -128, 127)
    np.testing.assert_array_equal(result, expected)


def test_binary__per_channel_axes_belong_to_each_operand():
    left, right = draw_array(1, "int8", (2, 3, 4)), draw_array(2, "int8", (3, 4))
    s_left, s_right = np.float32([0.1, 0.4, 0.9]), np.float32([0.1, 0.2, 0.3, 0.5])
    result = qnn.add(left, right, s_left, 0, s_right, 1, 0.7, 2, lhs_axis=1, rhs_axis=-1)
    for i, j in itertools.product(range(3), range(4)):
        alone = qnn.add(left[:, i, j], right[None, i, j], s_left[i], 0, s_right[j], 1, 0.7, 2)
        np.testing.assert_array_equal(result[:, i, j], alone)


@given(
    seed=SEEDS,
    pool=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 1)] * 4),
    ceil_mode=st.booleans(),
    include=st.booleans(),
)
@settings(deadline=None)
def test_avg_pool2d__is_within_half_a_step_of_the_real_average(
    seed, pool, strides, padding, ceil_mode, include
):
    x = draw_array(seed, "uint8", (1, 2, 6, 7))
    attrs = {"pool_size": pool, "strides": strides, "padding": padding, "ceil_mode": ceil_mode}
    result = qnn.avg_pool2d(x, 0.5, 13, 0.75, 90, count_include_pad=include, **attrs)
    real = np.pad(
        (x.astype("float64") - 13) * 0.5,
        [(0, 0), (0, 0), (padding[0], padding[2] + 3), (padding[1], padding[3] + 3)],
    )
    inside = np.pad(np.ones((6, 7)), [(padding[0], padding[2] + 3), (padding[1], padding[3] + 3)])
    inside_or_pad = np.pad(
        np.ones((6 + padding[0] + padding[2], 7 + padding[1] + padding[3])), [(0, 3), (0, 3)]
    )
    for y, z in itertools.product(range(result.shape[2]), range(result.shape[3])):
        at = np.s_[
            y * strides[0] : y * strides[0] + pool[0], z * strides[1] : z * strides[1] + pool[1]
        ]
        window = real[(slice(None), slice(None), *at)]
        # What lies beyond the padding, where ceil mode reaches, never counts.
        padded = inside_or_pad[at].sum() if include else inside[at].sum()
        count = max(padded, 1)
        average = window.sum((2, 3)) / count
        expected = np.clip(average / 0.75 + 90, 0, 255)
        assert np.abs(result[:, :, y, z] - expected).max() <= 0.5 + 1e-4


@given(seed=SEEDS, keepdims=st.booleans(), axes=st.sampled_from([(2, 3), (-1,), (0, 1), ()]))
def test_mean__is_within_half_a_step_of_the_real_mean(seed, keepdims, axes):
    x = draw_array(seed, "int8", (2, 3, 4, 5))
    result = qnn.mean(x, 0.5, -3, 0.25, 7, axes=axes, keepdims=keepdims, out_dtype="int16")
    over = axes or (0, 1, 2, 3)
    real = ((x.astype("float64") + 3) * 0.5).mean(over, keepdims=keepdims)
    assert result.shape == real.shape
    assert np.abs(result - (real / 0.25 + 7)).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.3, 1.0])
def test_leaky_relu__default_is_within_half_a_step(alpha):
    x = np.arange(-128, 128).astype("int8")
    real = (x.astype("float64") - 5) * 0.1
    expected = np.clip(np.where(real < 0, alpha * real, real) / 0.07 - 4, -128, 127)
    result = qnn.leaky_relu(x, 0.1, 5, 0.07, -4, alpha=alpha)
    assert np.abs(result - expected).max() <= 0.5 + 1e-4


def test_prelu__is_within_half_a_step_of_rationals():
    x, slopes = np.arange(-128, 128).astype("int8"), [-2.0, 0.0, 0.3, 1.5]
    result = qnn.prelu(np.stack([x] * 4), 0.1, 5, 0.07, -4, slopes, axis=0)
    scales = [Fraction(float(np.float32(scale))) for scale in (0.1, 0.07)]
    for row, slope in zip(result, slopes, strict=True):
        factor = Fraction(float(np.float32(slope)))
        for value, got in zip(x.tolist(), row.tolist(), strict=True):
            real = (value - 5) * scales[0] * (factor if value < 5 else 1)
            exact = min(max(real / scales[1] - 4, -128), 127)
            assert abs(exact - got) <= Fraction(1, 2) + Fraction(1, 10**4)


def test_concatenate__leaves_equal_parameters_untouched():
    large = np.int32([[2**31 - 1, -(2**31)]])  # a float32 multiply by 1 would change these
    result = qnn.concatenate([large, np.int32([[4]])], [0.5, 1.0], [3, 0], 0.5, 3, axis=1)
    np.testing.assert_array_equal(result, [[2**31 - 1, -(2**31), 11]])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_lookup__indexes_by_bit_pattern(dtype):
    table = np.arange(256).astype("int16") * 3
    x = draw_array(0, dtype, (4, 5))
    np.testing.assert_array_equal(qnn.lookup(x, table), (x.astype(int) % 256) * 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: qnn.quantize(x.astype("float32"), np.ones(3), 0, axis=1), "axis is 1"),
        (lambda x: qnn.requantize(x, 1.0, 0, np.ones(4), 0), "output_scale"),
        (lambda x: qnn.dense(x, x[:, :3], 0, 0, 1.0, 1.0), "do not fit"),
        (lambda x: qnn.lookup(x, np.zeros(255, "int8")), "(256,)"),
        (
            lambda x: qnn.conv2d(x[None, None], x[None, None], 0, 0, 1, 1, data_layout="NCHW4c"),
            "layout",
        ),
        (
            lambda x: qnn.conv2d(x[None, None], x[None, None], 0, 0, 1, 1, padding=(1, 2, 3)),
            "padding",
        ),
        (lambda x: qnn.concatenate([x], [1.0, 2.0], [0], 1.0, 0), "2 scales"),
    ],
)
def test_wrong_parameters__are_named(call, words):
    with pytest.raises(
        QnnError, match=".*".join(words.replace("(", r"\(").replace(")", r"\)").split())
    ):
        call(np.zeros((2, 4), "int8"))


def test_dequantize__float16_saturates():
    """0 times infinity behind it would be no number."""
    q = np.array([-128, -66, -65, 0, 65, 66, 127], "int8")
    real = qnn.dequantize(q, 1000.0, 0, out_dtype="float16")
    largest = float(np.finfo("float16").max)
    wanted = [max(-largest, min(largest, 1000.0 * int(value))) for value in q]
    np.testing.assert_array_equal(real, np.array(wanted, "float16"))


@pytest.mark.parametrize("rounding", Rounding)
def test_mul__multiplier_is_rounded_where_its_mode_says(rounding):
    """int16 x int16 -> int16, near enough to ties that one bit of the multiplier decides some."""
    a, b = draw_array(0, "int16", (1500,)), draw_array(1, "int16", (1500,))
    s_a, s_b, s_out = (np.float32(scale) for scale in (0.030935612, 0.047030848, 16.129452))
    parameters = (s_a, 3, s_b, -7, s_out, 11)
    compute = Arithmetic.FLOAT32 if rounding is Rounding.TONEAREST_EVEN else Arithmetic.FLOAT64
    got = qnn.mul(a, b, *parameters, rounding=rounding, compute_dtype=compute)
    exact = Fraction(float(s_a)) * Fraction(float(s_b))
    if rounding is Rounding.TONEAREST_EVEN:
        multiplier = nearest_float32(exact / Fraction(float(s_out)))
    else:
        multiplier = nearest_float32(exact) / Fraction(float(s_out))
    low, high = INTEGER_LIMITS["int16"]
    for x, y, have in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        product = (x - 3) * (y + 7)
        if rounding is Rounding.TONEAREST_EVEN:
            value = round(nearest_float32(nearest_float32(Fraction(product)) * multiplier)) + 11
        elif rounding is Rounding.UPWARD:
            value = math.floor(product * multiplier + 11 + Fraction(1, 2))
        else:
            real = product * multiplier + 11
            value = int(math.copysign(math.floor(abs(real) + Fraction(1, 2)), real))
        assert have == max(low, min(high, value))
