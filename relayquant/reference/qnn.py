"""What every `relax.qnn` operator means, in numpy: the contract for compiled code and kernels.

One function per operator, with its name, operand order and attribute names; arrays in, arrays out.
Scales are float32 and zero points int32, of shape () or (C,); a vector of length 1 counts as one
per tensor. Each rounding operator has

- the default arithmetic, Rounding.TONEAREST_EVEN with Arithmetic.FLOAT32: one IEEE float32 multiply
  by m = float32(double(s_in) / double(s_out)), round half to even, clamp in float, cast, and the
  zero point added as an integer (`fixed_point.finish_rounded`). The same bits on every machine.
- the meaning of TVM v0.19 for UPWARD and TONEAREST with INT64, FLOAT32 or FLOAT64.
- TONEAREST_EVEN with FLOAT64 (as the default, in double) and INT64 (as v0.19, half to even).

All raise QnnError when parameters do not fit the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.errors import QnnError, format_count
from relayquant.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.reference.affine import (
    align_parameter,
    average_integer,
    cast_accumulator,
    center_data,
    center_factors,
    choose_exact_dtype,
    count_magnitude,
    cycle_parameter,
    get_scalar,
    has_parameters,
    pick_limits,
    saturate_float,
    scale_integer,
    wrap_sums,
)
from relayquant.reference.convolution import (
    Window,
    convolve,
    convolve_transposed,
    count_window_values,
    get_spatial_letters,
    permute_layout,
    pool_windows,
)
from relayquant.reference.fixed_point import (
    clip_to_integer,
    finish_rounded,
    fma_float32,
    get_fixed_point_multiplier,
    multiply_fixed_point,
    round_values,
    wrap_int32,
)

Array = np.ndarray[Any, Any]


def quantize(
    data: Array,
    scale: Any,
    zero_point: Any,
    *,
    axis: int = -1,
    out_dtype: str = "int8",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
) -> Array:
    """round(data / scale) + zero_point, saturated to `out_dtype`. NaN gives the zero point.

    The division is a true float32 division. TONEAREST and UPWARD add the zero point in float32
    before the clamp, as TVM v0.19, which differs only beyond 2^24.
    """
    data = np.asarray(data).astype("float32", copy=False)
    s = align_parameter(scale, "float32", data, axis)
    z = align_parameter(zero_point, "int32", data, axis)
    with np.errstate(all="ignore"):
        rounded = round_values(np.asarray(data / s), rounding)
    if rounding is Rounding.TONEAREST_EVEN:
        return finish_rounded(rounded, z, out_dtype)
    with np.errstate(all="ignore"):
        shifted = np.where(np.isnan(rounded), np.float32(0), rounded) + z.astype("float32")
    return saturate_float(shifted, out_dtype)


def dequantize(
    data: Array, scale: Any, zero_point: Any, *, axis: int = -1, out_dtype: str = "float32"
) -> Array:
    """float32(int32(data) - zero_point) * scale; float16 saturates at +-65504."""
    data = np.asarray(data)
    centred = center_data(data, zero_point, axis).astype("float32")
    real = centred * align_parameter(scale, "float32", data, axis)
    if out_dtype == "float16":
        return np.clip(real, np.float32(-65504), np.float32(65504)).astype("float16")
    return np.asarray(real.astype(out_dtype, copy=False))


def requantize(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    axis: int = -1,
    out_dtype: str = "int8",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """From one affine space to another; input parameters per channel of `axis`, output scalar.

    TVM v0.19 differs between its ways: INT64 rounds, wraps to int32 and then adds the zero point
    (and does not clip an int32 result); FLOAT32 and FLOAT64 add the zero point and then round.
    """
    data = np.asarray(data)
    if data.dtype == np.int64 and not has_exact_sums(rounding, compute_dtype):
        data = wrap_sums(data, "requantize")
    s_in = align_parameter(input_scale, "float32", data, axis)
    s_out = get_scalar(output_scale, "float32", "output_scale")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    multiplier = s_in.astype("float64") / s_out.astype("float64")
    if rounding is not Rounding.TONEAREST_EVEN and compute_dtype is not Arithmetic.INT64:
        dtype = compute_dtype.value
        z_in = align_parameter(input_zero_point, "int32", data, axis)
        centred = data.astype(dtype) - z_in.astype(dtype)
        value = multiplier.astype(dtype) * centred + z_out.astype(dtype)
        return saturate_float(round_values(np.asarray(value), rounding), out_dtype)
    centred = center_data(data, input_zero_point, axis)
    return scale_integer(centred, multiplier, z_out, out_dtype, rounding, compute_dtype)


def simulated_quantize(
    data: Array,
    dtype: Any,
    scale: Any,
    zero_point: Any,
    *,
    axis: int = -1,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
) -> Array:
    """`quantize`, with the integers in the dtype of `data`; `dtype` is a code of SIMULATED_RANGES.

    max(min(round(data / scale) + zero_point, high), low) in float32. `dtype`, scale and zero point
    may have any length: channel i takes element i mod length. Code 0 and unknown codes pass data
    through. NaN gives the zero point, as in `quantize`.
    """
    data = np.asarray(data)
    codes, s, z = (cycle_parameter(values, data, axis) for values in (dtype, scale, zero_point))
    low, high = (pick_limits(codes, end) for end in (0, 1))
    if np.isnan(low).all():
        return data
    with np.errstate(all="ignore"):
        rounded = round_values(np.asarray(data.astype("float32") / s), rounding)
        rounded = np.where(np.isnan(rounded), np.float32(0), rounded)
        result = np.maximum(np.minimum(rounded + z, high), low).astype(data.dtype)
    return np.where(np.isnan(low), data, result)


def simulated_dequantize(
    data: Array, dtype: Any, scale: Any, zero_point: Any, *, axis: int = -1
) -> Array:
    """(data - zero_point) * scale in float32; operands as for `simulated_quantize`."""
    data = np.asarray(data)
    codes, s, z = (cycle_parameter(values, data, axis) for values in (dtype, scale, zero_point))
    passes = np.isnan(pick_limits(codes, 0))
    if passes.all():
        return data
    with np.errstate(all="ignore"):
        real = np.asarray((data.astype("float32") - z) * s).astype(data.dtype)
    return np.where(passes, data, real)


def conv1d(
    data: Array,
    weight: Array,
    input_zero_point: Any,
    kernel_zero_point: Any,
    input_scale: Any,
    kernel_scale: Any,
    *,
    strides: Sequence[int] = (1,),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
    data_layout: str = "NCW",
    kernel_layout: str = "OIW",
    out_dtype: str = "int32",
) -> Array:
    """As `conv2d`, over one spatial axis."""
    return conv2d(
        data,
        weight,
        input_zero_point,
        kernel_zero_point,
        input_scale,
        kernel_scale,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def conv2d(
    data: Array,
    weight: Array,
    input_zero_point: Any,
    kernel_zero_point: Any,
    input_scale: Any,
    kernel_scale: Any,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    data_layout: str = "NCHW",
    kernel_layout: str = "OIHW",
    out_dtype: str = "int32",
) -> Array:
    """conv(data - input_zero_point, weight - kernel_zero_point), padded with the zero point.

    The result has scale input_scale * kernel_scale and zero point 0; the scales take no part in the
    arithmetic. Kernel parameters are scalar or per output channel. Sums are those of `out_dtype`,
    int32 or int64; those that int32 does not hold wrap modulo 2^32, with a warning.
    """
    del input_scale, kernel_scale
    axis = kernel_layout.index("O")
    result = convolve(
        *center_factors(data, weight, input_zero_point, kernel_zero_point, axis),
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    )
    return cast_accumulator(result, out_dtype, "conv")


def conv2d_transpose(
    data: Array,
    weight: Array,
    input_zero_point: Any,
    kernel_zero_point: Any,
    input_scale: Any,
    kernel_scale: Any,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    output_padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    data_layout: str = "NCHW",
    kernel_layout: str = "IOHW",
    out_dtype: str = "int32",
) -> Array:
    """Transposed `conv2d`; kernel parameters are scalar or per output channel.

    Output channel c is entry c mod O of the kernel's O axis, in group c // O.
    """
    del input_scale, kernel_scale
    inputs, per_group = (np.shape(weight)[kernel_layout.index(letter)] for letter in "IO")
    zero_points = np.asarray(kernel_zero_point, "int32")
    if zero_points.size > 1:
        if zero_points.size != per_group * groups:
            raise QnnError(
                f"qnn.conv2d_transpose: kernel_zero_point has shape {zero_points.shape}; allowed: "
                f"() or ({per_group * groups},), one per output channel."
            )
        per_input = np.repeat(zero_points.reshape(groups, per_group), inputs // groups, axis=0)
        zero_points = permute_layout(per_input[..., None, None], "IOHW", kernel_layout)
    kernel = np.asarray(weight).astype("int64") - zero_points
    centred = center_data(np.asarray(data), input_zero_point, -1)
    largest = count_magnitude(centred) * count_magnitude(kernel)
    kind = choose_exact_dtype(largest * kernel.size)
    result = convolve_transposed(
        centred.astype(kind),
        kernel.astype(kind),
        strides=strides,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    )
    return cast_accumulator(result, out_dtype, "conv2d_transpose")


def dense(
    data: Array,
    weight: Array,
    input_zero_point: Any,
    kernel_zero_point: Any,
    input_scale: Any,
    kernel_scale: Any,
    *,
    out_dtype: str = "int32",
) -> Array:
    """(data - z_x) @ (weight - z_w).T: data (..., K), weight (N, K), result (..., N)."""
    del input_scale, kernel_scale
    x, w = center_factors(data, weight, input_zero_point, kernel_zero_point, 0)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise QnnError(
            f"qnn.dense: data {x.shape} and weight {w.shape} do not fit; allowed: (..., K), (N, K)."
        )
    return cast_accumulator(x @ w.T, out_dtype, "dense")


def batch_matmul(
    x: Array,
    y: Array,
    x_zero_point: Any,
    y_zero_point: Any,
    x_scale: Any,
    y_scale: Any,
    *,
    out_dtype: str = "int32",
) -> Array:
    """(x - z_x) @ (y - z_y)^T: x (..., M, K), y (..., N, K), out (..., M, N), batches broadcast."""
    del x_scale, y_scale
    left = center_data(np.asarray(x), get_scalar(x_zero_point, "int32", "x_zero_point"), -1)
    right = center_data(np.asarray(y), get_scalar(y_zero_point, "int32", "y_zero_point"), -1)
    if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-1]:
        raise QnnError(
            f"qnn.batch_matmul: x {left.shape} and y {right.shape} do not fit; allowed: "
            "(..., M, K) and (..., N, K)."
        )
    largest = count_magnitude(left) * count_magnitude(right) * left.shape[-1]
    kind = choose_exact_dtype(largest)
    product = left.astype(kind) @ right.astype(kind).swapaxes(-1, -2)
    return cast_accumulator(product, out_dtype, "batch_matmul")


def add(
    lhs: Array,
    rhs: Array,
    lhs_scale: Any,
    lhs_zero_point: Any,
    rhs_scale: Any,
    rhs_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Sum of two affine tensors, broadcast, in the output's affine space (default: lhs dtype).

    Default arithmetic: fma(float32(r - z_r), m_r, RN(float32(l - z_l) * m_l)), rounded once. All
    other modes round each side to int32 as TVM v0.19, then add and saturate.
    """
    return add_signed(
        1,
        (lhs, lhs_scale, lhs_zero_point, lhs_axis),
        (rhs, rhs_scale, rhs_zero_point, rhs_axis),
        (output_scale, output_zero_point),
        out_dtype,
        rounding,
        compute_dtype,
    )


def subtract(
    lhs: Array,
    rhs: Array,
    lhs_scale: Any,
    lhs_zero_point: Any,
    rhs_scale: Any,
    rhs_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """As `add`, lhs - rhs."""
    return add_signed(
        -1,
        (lhs, lhs_scale, lhs_zero_point, lhs_axis),
        (rhs, rhs_scale, rhs_zero_point, rhs_axis),
        (output_scale, output_zero_point),
        out_dtype,
        rounding,
        compute_dtype,
    )


def mul(
    lhs: Array,
    rhs: Array,
    lhs_scale: Any,
    lhs_zero_point: Any,
    rhs_scale: Any,
    rhs_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """P = (lhs - z_l) * (rhs - z_r), requantized.

    TONEAREST_EVEN: the multiplier is double(s_l) * double(s_r) / double(s_o). UPWARD and TONEAREST
    go through float32(s_l * s_r) as TVM v0.19. P is exact in the default arithmetic and with
    FLOAT64, int32 in the others.
    """
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    left = center_data(lhs, lhs_zero_point, lhs_axis).astype("int64")
    product = np.asarray(left * center_data(rhs, rhs_zero_point, rhs_axis))
    if not has_exact_sums(rounding, compute_dtype):
        product = wrap_sums(product, "mul")
    s_l = align_parameter(lhs_scale, "float32", lhs, lhs_axis)
    s_r = align_parameter(rhs_scale, "float32", rhs, rhs_axis)
    s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    if rounding is Rounding.TONEAREST_EVEN:
        multiplier = s_l.astype("float64") * s_r.astype("float64") / s_out
    else:
        multiplier = (s_l * s_r).astype("float64") / s_out
    dtype = out_dtype or lhs.dtype.name
    if rounding is not Rounding.TONEAREST_EVEN and compute_dtype is not Arithmetic.INT64:
        real = compute_dtype.value
        value = multiplier.astype(real) * product.astype(real) + z_out.astype(real)
        return saturate_float(round_values(np.asarray(value), rounding), dtype)
    return scale_integer(product, multiplier, z_out, dtype, rounding, compute_dtype)


def concatenate(
    data: Sequence[Array],
    input_scales: Sequence[Any],
    input_zero_points: Sequence[Any],
    output_scale: Any,
    output_zero_point: Any,
    *,
    axis: int = -1,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Tensors of one dtype along `axis`, requantized where parameters differ from the output's."""
    if not len(data) == len(input_scales) == len(input_zero_points) or not data:
        raise QnnError(
            f"qnn.concatenate: {format_count(len(data), 'tensor')}, "
            f"{format_count(len(input_scales), 'scale')} and "
            f"{format_count(len(input_zero_points), 'zero point')}; allowed: the same number, at "
            "least one."
        )
    parts = []
    for part, scale, zero_point in zip(data, input_scales, input_zero_points, strict=True):
        part = np.asarray(part)
        if not has_parameters(scale, zero_point, output_scale, output_zero_point):
            part = requantize(
                part,
                scale,
                zero_point,
                output_scale,
                output_zero_point,
                axis=axis,
                out_dtype=part.dtype.name,
                rounding=rounding,
                compute_dtype=compute_dtype,
            )
        parts.append(part)
    return np.concatenate(parts, axis=axis)


def avg_pool2d(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    pool_size: Sequence[int] = (1, 1),
    strides: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    layout: str = "NCHW",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Average of each window, padded with the zero point; `data` and the result have one dtype.

    TONEAREST_EVEN averages first and rounds once, its windows and counts are those of
    `relax.nn.avg_pool2d`. UPWARD and TONEAREST are TVM v0.19 with its
    defects: every value is requantized to int32 first, pads are 0 instead of the output's zero
    point, and the division by the count truncates.
    """
    data = np.asarray(data)
    is_relay = rounding is not Rounding.TONEAREST_EVEN
    window = Window(
        pool_size, strides, dilation, padding, ceil_mode, layout, starts_inside=not is_relay
    )
    z_in = get_scalar(input_zero_point, "int32", "input_zero_point")
    count = count_window_values(data.shape, window, count_include_pad)
    if rounding is Rounding.TONEAREST_EVEN:
        summands = center_data(data, z_in, -1)
    else:
        output = (output_scale, output_zero_point)
        summands = move_to_int32(data, (input_scale, z_in, -1), output, rounding, compute_dtype)
    total = np.sum(list(pool_windows(summands.astype("int64"), window, 0)), axis=0)
    if not has_exact_sums(rounding, compute_dtype):
        total = wrap_sums(total, "avg_pool2d")
    if rounding is Rounding.TONEAREST_EVEN:
        scales = (input_scale, output_scale, output_zero_point)
        result = average_integer(total, count, scales, data.dtype.name, rounding, compute_dtype)
    else:
        quotient = np.sign(total) * (np.abs(total.astype("int64")) // count)
        result = clip_to_integer(quotient, data.dtype.name)
    return permute_layout(result, "N" + get_spatial_letters(layout) + "C", layout)


def mean(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    axes: Sequence[int] | None = None,
    keepdims: bool = False,
    out_dtype: str = "",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Average over `axes` (None or empty: all) in the output's affine space, rounded once.

    The sum is exact in the default arithmetic and with FLOAT64, int32 in the others.
    """
    data = np.asarray(data)
    centred = center_data(data, get_scalar(input_zero_point, "int32", "input_zero_point"), -1)
    over = tuple(int(axis) % data.ndim for axis in axes) if axes else tuple(range(data.ndim))
    total = np.asarray(np.sum(centred, axis=over, keepdims=keepdims, dtype="int64"))
    if not has_exact_sums(rounding, compute_dtype):
        total = wrap_sums(total, "mean")
    count = np.asarray(np.prod([data.shape[axis] for axis in over], dtype="int64"))
    return average_integer(
        total,
        count,
        (input_scale, output_scale, output_zero_point),
        out_dtype or data.dtype.name,
        rounding,
        compute_dtype,
    )


def leaky_relu(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    alpha: float = 0.01,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """x where x >= 0 else alpha * x, in the output's affine space; the dtype of `data`.

    TONEAREST_EVEN: as `requantize`, with the multiplier double(s_in) * alpha / double(s_out) below
    the input zero point. UPWARD and TONEAREST requantize to int32 and below the zero point multiply
    by alpha in fixed point, as TVM v0.19.
    """
    data = np.asarray(data)
    dtype = data.dtype.name
    z_in = get_scalar(input_zero_point, "int32", "input_zero_point")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    if rounding is Rounding.TONEAREST_EVEN:
        s_in = get_scalar(input_scale, "float32", "input_scale").astype("float64")
        s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
        centred = center_data(data, z_in, -1)
        multiplier = np.where(centred < 0, s_in * float(alpha) / s_out, s_in / s_out)
        return scale_integer(centred, multiplier, z_out, dtype, rounding, compute_dtype)
    moved = move_to_int32(
        data,
        (input_scale, input_zero_point, -1),
        (output_scale, output_zero_point),
        rounding,
        compute_dtype,
    )
    slope = get_fixed_point_multiplier(alpha)
    rest = get_fixed_point_multiplier(1.0 - alpha)
    scaled = multiply_fixed_point(moved, *slope, Rounding.UPWARD).astype("int64")
    scaled = scaled + multiply_fixed_point(z_out, *rest, Rounding.UPWARD)
    return clip_to_integer(np.where(data.astype("int64") < z_in, scaled, moved), dtype)


def prelu(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    slopes: Any,
    *,
    axis: int = 1,
) -> Array:
    """x where x >= 0 else slopes * x, in the output's affine space; the dtype of `data`.

    As `leaky_relu` rounding half to even, with a slope for each index of `axis`: the multiplier
    below the input zero point is double(s_in) * double(slope) / double(s_out).
    """
    data = np.asarray(data)
    s_in = get_scalar(input_scale, "float32", "input_scale").astype("float64")
    s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    slope = align_parameter(slopes, "float32", data, axis).astype("float64")
    centred = center_data(data, get_scalar(input_zero_point, "int32", "input_zero_point"), -1)
    multiplier = np.where(centred < 0, s_in * slope / s_out, s_in / s_out)
    modes = (Rounding.TONEAREST_EVEN, Arithmetic.FLOAT32)
    return scale_integer(centred, multiplier, z_out, data.dtype.name, *modes)


def lookup(data: Array, table: Array) -> Array:
    """table[bit pattern of data as uint8]: data int8 or uint8, table (256,), result table dtype."""
    data, table = np.asarray(data), np.asarray(table)
    if data.dtype.name not in ("int8", "uint8") or table.shape != (256,):
        raise QnnError(
            f"qnn.lookup: data is {data.dtype}, table has shape {table.shape}; allowed: int8 or "
            "uint8 data and a table of shape (256,)."
        )
    return np.asarray(table[data.view("uint8")])


def move_to_int32(
    data: Array,
    parameters: tuple[Any, Any, int],
    output: tuple[Any, Any],
    rounding: Rounding,
    compute_dtype: Arithmetic,
) -> Array:
    """`data` as int32 in the output's affine space, unclipped; a plain cast if it is in it."""
    scale, zero_point, axis = parameters
    if has_parameters(scale, zero_point, *output):
        return data.astype("int32")
    return requantize(
        data,
        scale,
        zero_point,
        *output,
        axis=axis,
        out_dtype="int32",
        rounding=rounding,
        compute_dtype=compute_dtype,
    )


def add_signed(
    sign: int,
    lhs: tuple[Array, Any, Any, int],
    rhs: tuple[Array, Any, Any, int],
    output: tuple[Any, Any],
    out_dtype: str,
    rounding: Rounding,
    compute_dtype: Arithmetic,
) -> Array:
    """lhs + sign * rhs; each side is (data, scale, zero point, axis)."""
    left, right = np.asarray(lhs[0]), np.asarray(rhs[0])
    dtype = out_dtype or left.dtype.name
    z_out = get_scalar(output[1], "int32", "output_zero_point")
    if rounding is Rounding.TONEAREST_EVEN and compute_dtype is Arithmetic.FLOAT32:
        s_out = get_scalar(output[0], "float32", "output_scale").astype("float64")
        m_l, m_r = (
            (align_parameter(scale, "float32", data, axis).astype("float64") / s_out)
            for data, scale, _, axis in ((left, *lhs[1:]), (right, *rhs[1:]))
        )
        first = center_data(left, lhs[2], lhs[3]).astype("float32") * m_l.astype("float32")
        second = center_data(right, rhs[2], rhs[3]).astype("float32")
        total = fma_float32(second, (sign * m_r).astype("float32"), np.asarray(first))
        return finish_rounded(np.rint(total), z_out, dtype)
    moved_left = move_to_int32(left, lhs[1:], output, rounding, compute_dtype).astype("int64")
    moved_right = move_to_int32(right, rhs[1:], output, rounding, compute_dtype)
    total = wrap_int32(np.asarray(moved_left + sign * (moved_right.astype("int64") - z_out)))
    return clip_to_integer(total, dtype)


#: Name of the operator without "relax.qnn." -> its meaning.
OPERATORS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        quantize,
        dequantize,
        requantize,
        simulated_quantize,
        simulated_dequantize,
        conv1d,
        conv2d,
        conv2d_transpose,
        dense,
        batch_matmul,
        add,
        subtract,
        mul,
        concatenate,
        avg_pool2d,
        mean,
        leaky_relu,
        prelu,
        lookup,
    )
}
