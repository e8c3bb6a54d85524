"""Affine space in numpy: broadcasting of parameters, exact sums and shared rounding of
`reference.qnn`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.errors import QnnError, format_count, warn_user
from relayquant.ir.reference.fixed_point import (
    clip_to_integer,
    finish_rounded,
    get_fixed_point_multiplier,
    hold_multiplier,
    multiply_fixed_point,
    round_values,
    wrap_int32,
)

Array = np.ndarray[Any, Any]

#: Code of the `dtype` operand of the simulated operators -> range; any other code passes data
#: through.
SIMULATED_RANGES: dict[int, tuple[int, int]] = {
    1: INTEGER_LIMITS["int8"],
    2: INTEGER_LIMITS["uint8"],
    3: INTEGER_LIMITS["int32"],
    4: INTEGER_LIMITS["int4"],
    5: INTEGER_LIMITS["int16"],
    6: (-127, 127),
    7: INTEGER_LIMITS["uint16"],
}


def align_parameter(values: Any, dtype: str, data: Array, axis: int) -> Array:
    """Reshape a scale or zero point, () or (C,) along `axis`, to broadcast against `data`."""
    array = np.asarray(values, dtype)
    if array.size == 1:
        return array.reshape(())
    if array.ndim != 1 or not -data.ndim <= axis < data.ndim or array.size != data.shape[axis]:
        raise QnnError(
            f"a scale or zero point has shape {array.shape}, data has shape {data.shape}, axis is "
            f"{axis}; allowed: shape () or one value per index of that axis.",
            code="RQ601",
        )
    return array.reshape(shape_along(axis, data.ndim))


def cycle_parameter(values: Any, data: Array, axis: int) -> Array:
    """Return a parameter of a simulated operator as float32. Channel i gets element i mod
    length.
    """
    array = np.asarray(values).astype("float32").reshape(-1)
    if array.size == 0:
        raise QnnError("a scale or zero point of a simulated operator is empty.", code="RQ601")
    if data.ndim == 0:
        return array[0]
    if not -data.ndim <= axis < data.ndim:
        raise QnnError(f"axis {axis} is outside data of shape {data.shape}.", code="RQ601")
    cycled = array[np.arange(data.shape[axis]) % array.size]
    return cycled.reshape(shape_along(axis, data.ndim))


def pick_limits(codes: Array, end: int) -> Array:
    """Return the lower (0) or upper (1) float32 limit of each dtype code.

    NaN stands for a code that passes data through.
    """
    limits = np.full(codes.shape, np.nan, "float32")
    for code, limit in SIMULATED_RANGES.items():
        limits = np.where(codes == code, np.float32(limit[end]), limits)
    return limits


def get_scalar(values: Any, dtype: str, name: str) -> Array:
    """Return a parameter that must hold one value as an array of shape ()."""
    array = np.asarray(values, dtype)
    if array.size != 1:
        raise QnnError(
            f"{name} has shape {array.shape}; allowed: one value for the whole tensor.",
            code="RQ601",
        )
    return array.reshape(())


def has_parameters(scale: Any, zero_point: Any, output_scale: Any, output_zero_point: Any) -> bool:
    """Whether scalar parameters equal the output parameters."""
    s, z = np.asarray(scale, "float32"), np.asarray(zero_point, "int32")
    return (
        s.size == z.size == 1
        and s.item() == np.asarray(output_scale, "float32").item()
        and z.item() == np.asarray(output_zero_point, "int32").item()
    )


def subtract_zero_point(data: Array, zero_point: Any, axis: int) -> Array:
    """Compute data - zero_point in wrapping int32. int64 data stays int64.

    The result is `data` itself where nothing changes: do not write to it.
    """
    z = align_parameter(zero_point, "int32", data, axis)
    if data.dtype == np.int32 and not z.any():
        return data
    if data.dtype == np.int64:
        return np.asarray(data - z)
    if not np.can_cast(data.dtype, "int32"):
        return wrap_int32(np.asarray(data.astype("int64") - z))
    with np.errstate(over="ignore"):
        return np.asarray(data.astype("int32") - z)


def choose_exact_dtype(largest: int) -> str:
    """Choose the fastest dtype for exact sums in numpy, in any order of addition.

    `largest` is the largest magnitude of a sum. float32 takes half the time of float64. int64 is
    many times slower.
    """
    if largest < 1 << 24:
        return "float32"
    return "float64" if largest < 1 << 53 else "int64"


def count_magnitude(values: Array) -> int:
    """Return the largest magnitude of integers, or 0 for an empty array."""
    return max(int(values.max(initial=0)), -int(values.min(initial=0)))


def center_factors(
    data: Array, weight: Array, data_zero_point: Any, weight_zero_point: Any, axis: int
) -> tuple[Array, Array]:
    """Subtract the zero points of `data` and `weight`, in a dtype with exact sums of products.

    `axis` is the weight's axis of the outputs.
    """
    data, w = np.asarray(data), np.asarray(weight).astype("float64")
    w -= align_parameter(weight_zero_point, "int32", w, axis)
    zero = get_scalar(data_zero_point, "int32", "zero point")
    limits = np.iinfo(data.dtype)
    largest = max(abs(limits.min - int(zero)), abs(limits.max - int(zero)))
    sums = np.abs(w).sum(axis=tuple(i for i in range(w.ndim) if i != axis))
    kind = choose_exact_dtype(largest * int(sums.max(initial=0)))
    return data.astype(kind) - zero.astype(kind), w.astype(kind, copy=False)


def cast_accumulator(values: Array, out_dtype: str, operator: str) -> Array:
    """Convert exact sums of products to `out_dtype`. If a sum overflows int32, it wraps with a
    warning.
    """
    if values.dtype == np.float32:  # below 2^24
        return values.astype("int32").astype(out_dtype, copy=False)
    total = values.astype("int64", copy=False)
    return wrap_sums(total, operator) if out_dtype == "int32" else total.astype(out_dtype)


def wrap_sums(sums: Array, operator: str) -> Array:
    """Wrap int64 sums or products to int32, modulo 2^32. Warn about the number that overflowed.

    In modules of this package, sums of the default arithmetic never overflow. Operators with the
    arithmetic of TVM v0.19, or of ONNX with an int32 result, wrap as they do there.
    """
    wrapped = wrap_int32(sums)
    lost = int(np.count_nonzero(wrapped != sums))
    if lost:
        warn_user(
            f"qnn.{operator}: int32 cannot hold {lost} of {format_count(sums.size, 'sum')}, and "
            "wraps modulo 2^32",
            RuntimeWarning,
            code="RQ402",
        )
    return wrapped


def saturate_float(values: Array, dtype: str) -> Array:
    """Clip whole floats to `dtype`. For int32, TVM v0.19 left this cast undefined."""
    return finish_rounded(values, np.zeros((), "int32"), dtype)


def scale_integer(
    centred: Array,
    multiplier: Array,
    zero_point: Array,
    dtype: str,
    rounding: Rounding,
    compute_dtype: Arithmetic,
) -> Array:
    """Compute round(centred * multiplier) + zero_point with saturation. The zero point is an
    integer.

    `centred` is int32 or int64, with INT64 only int32. `multiplier` is float64 and broadcasts.
    Float arithmetic is only for TONEAREST_EVEN.
    """
    if compute_dtype is not Arithmetic.INT64:
        real = compute_dtype.value
        scaled = np.asarray(centred.astype(real) * hold_multiplier(multiplier, real))
        return finish_rounded(np.rint(scaled, out=scaled), zero_point, dtype)
    mantissa, exponent = get_fixed_point_multiplier(multiplier)
    moved = multiply_fixed_point(centred, mantissa, exponent, rounding).astype("int64")
    moved = wrap_int32(np.asarray(moved + zero_point))
    return moved if dtype == "int32" else clip_to_integer(moved, dtype)


def average_integer(
    total: Array,
    count: Array,
    scales: tuple[Any, Any, Any],
    dtype: str,
    rounding: Rounding,
    compute_dtype: Arithmetic,
) -> Array:
    """Compute total / count in the output's affine space, rounded once. `count` is int64 and
    broadcasts.

    `scales` is (input scale, output scale, output zero point). FLOAT32 divides the float32
    multiplier by float32(count). FLOAT64 divides the double multiplier. INT64 uses the fixed-point
    form of the double quotient. UPWARD and TONEAREST in float add the zero point before rounding,
    like `requantize`.
    """
    s_in = get_scalar(scales[0], "float32", "input_scale").astype("float64")
    ratio = s_in / get_scalar(scales[1], "float32", "output_scale").astype("float64")
    z_out = get_scalar(scales[2], "int32", "output_zero_point")
    if compute_dtype is Arithmetic.INT64:
        return scale_integer(total, ratio / count, z_out, dtype, rounding, compute_dtype)
    real = compute_dtype.value
    value = np.asarray(total.astype(real) * (hold_multiplier(ratio, real) / count.astype(real)))
    if rounding is Rounding.TONEAREST_EVEN:
        return finish_rounded(np.rint(value), z_out, dtype)
    return saturate_float(round_values(np.asarray(value + z_out.astype(real)), rounding), dtype)
