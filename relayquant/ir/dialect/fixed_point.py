"""Dialect: the arithmetic of rounding and requantization in TIR, bit for bit what
`reference/fixed_point.py` computes in numpy.

On targets with a fused multiply-add, LLVM contracts `a * b + c` into it. The result is then rounded
once instead of twice, which changes bits. No product here is therefore directly followed by an
addition, except in `fused_multiply_add_tir`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding, has_exact_sums
from relayquant.ir.reference.fixed_point import (
    get_fixed_point_multiplier,
    get_float_limits,
    hold_multiplier,
)

#: A scalar expression of TIR.
PrimExpr = Any

#: Shift beyond which a product of two 31-bit numbers rounds to 0 (2^62 at most, so 2^63 halves it).
_MAX_SHIFT = 63
_FRACTION_BITS = 52  # of a float64
_EXPONENT_BIAS = 1022  # of a float64 with its fraction taken as a number in [0.5, 1)
#: Products are clamped to this magnitude before the zero point is added. Every larger product
#: saturates anyway.
_PRODUCT_BOUND = 2.0**40


def expr_dtype(value: PrimExpr) -> str:
    """Data type of a scalar TIR expression."""
    return str(value.ty.dtype)


# ---------------------------------------------------------------- multiplier -> (integer, shift)


def split_multiplier_tir(multiplier: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Compute `get_fixed_point_multiplier` of a float64 expression that is 0 or normal.

    Both results are int32.
    """
    bits = tirx.reinterpret("int64", multiplier)
    fraction = tirx.bitwise_or(
        tirx.bitwise_and(bits, tirx.const((1 << _FRACTION_BITS) - 1, "int64")),
        tirx.const(1 << _FRACTION_BITS, "int64"),
    )
    exponent = tirx.shift_right(bits, tirx.const(_FRACTION_BITS, "int64")).astype("int32")
    exponent = exponent - tirx.const(_EXPONENT_BIAS, "int32")
    # Round 53 significant bits to 31. The fraction is 2^53 times a number in [0.5, 1).
    dropped = _FRACTION_BITS + 1 - 31
    mantissa = tirx.shift_right(
        fraction + tirx.const(1 << (dropped - 1), "int64"), tirx.const(dropped, "int64")
    )
    carried = tirx.EQ(mantissa, tirx.const(1 << 31, "int64"))
    mantissa = tirx.Select(carried, tirx.const(1 << 30, "int64"), mantissa)
    exponent = tirx.Select(carried, exponent + tirx.const(1, "int32"), exponent)
    is_zero = tirx.EQ(multiplier, tirx.const(0.0, "float64"))
    mantissa = tirx.Select(is_zero, tirx.const(0, "int64"), mantissa)
    exponent = tirx.Select(is_zero, tirx.const(0, "int32"), exponent)
    return mantissa.astype("int32"), exponent


# ---------------------------------------------------------------- integer multiply


def multiply_fixed_point_tir(
    value: PrimExpr, mantissa: PrimExpr, exponent: PrimExpr, rounding: Rounding
) -> PrimExpr:
    """Compute round(value * M * 2^(e - 31)) of int32 expressions in 64 bits, wrapped to int32.

    Products beyond 63 bits wrap, as they do in TVM.
    """
    one, zero = tirx.const(1, "int64"), tirx.const(0, "int64")
    exponent = exponent.astype("int64")
    shift = tirx.min(
        tirx.const(31, "int64") - tirx.min(exponent, zero), tirx.const(_MAX_SHIFT, "int64")
    )
    # A shift by 63 already moves all 32 bits out. A longer shift gives the same result.
    left = tirx.min(tirx.max(exponent, zero), tirx.const(_MAX_SHIFT, "int64"))
    product = tirx.shift_left(value.astype("int64"), left) * mantissa.astype("int64")
    half = tirx.shift_left(one, shift - one)
    if rounding is Rounding.TONEAREST:
        half = tirx.Select(product >= zero, half, half - one)
    elif rounding is Rounding.TONEAREST_EVEN:
        half = half - one + tirx.bitwise_and(tirx.shift_right(product, shift), one)
    return tirx.shift_right(product + half, shift).astype("int32")


# ---------------------------------------------------------------- rounding of floats


def round_tir(value: PrimExpr, rounding: Rounding) -> PrimExpr:
    """Round a float32 or float64 expression to a whole number.

    `tirx.nearbyint` rounds half to even on every target. `tirx.round` differs between targets.
    """
    if rounding is Rounding.TONEAREST_EVEN:
        return tirx.nearbyint(value)
    dtype = expr_dtype(value)
    if rounding is Rounding.UPWARD:
        return tirx.floor(value + tirx.const(0.5, dtype))
    whole = tirx.trunc(value)
    one, zero = tirx.const(1.0, dtype), tirx.const(0.0, dtype)
    sign = tirx.Select(value < zero, -one, one)
    away = tirx.abs(value - whole) >= tirx.const(0.5, dtype)
    return tirx.Select(away, whole + sign, whole)


# ---------------------------------------------------------------- saturation


def saturate_tir(
    value: PrimExpr, zero_point: PrimExpr, dtype: str, may_be_nan: bool = False
) -> PrimExpr:
    """Add an int32 zero point to a whole float and saturate to the integer `dtype`.

    If the value may be NaN, the caller must say so. NaN gives the zero point.

    The float is clamped to the limits minus the zero point, converted, and then the zero point is
    added as an integer. The conversion cannot overflow and the addition is exact. For int32, the
    limits minus the zero point do not fit int32. There the float is clamped to the limits and the
    sum saturates.
    """
    kind = expr_dtype(value)
    low, high = (tirx.const(v, kind) for v in get_float_limits(dtype, kind))
    if may_be_nan:
        value = tirx.Select(tirx.isnan(value), tirx.const(0.0, kind), value)
    if dtype == "int32":
        total = tirx.max(tirx.min(value, high), low).astype("int64") + zero_point.astype("int64")
        low_int, high_int = (tirx.const(v, "int64") for v in INTEGER_LIMITS[dtype])
        return tirx.max(tirx.min(total, high_int), low_int).astype(dtype)
    shifted = zero_point.astype(kind)
    clamped = tirx.min(tirx.max(value, low - shifted), high - shifted)
    return (clamped.astype("int32") + zero_point).astype(dtype)


def clip_integer_tir(value: PrimExpr, dtype: str) -> PrimExpr:
    """Clip an int32 expression to the integer `dtype`. For int32 it is returned as it is."""
    if dtype == "int32":
        return value
    low, high = (tirx.const(v, "int32") for v in INTEGER_LIMITS[dtype])
    return tirx.max(tirx.min(value, high), low).astype(dtype)


# ---------------------------------------------------------------- multipliers, encoded


def encode_multiplier(real: Any, arithmetic: Arithmetic) -> tuple[np.ndarray, ...]:
    """Encode a real float64 multiplier for an `arithmetic`: (M, e) or (float,)."""
    if arithmetic is Arithmetic.INT64:
        return tuple(part.astype("int32") for part in get_fixed_point_multiplier(real))
    return (hold_multiplier(real, arithmetic.value),)


def encode_multiplier_tir(real: PrimExpr, arithmetic: Arithmetic) -> tuple[PrimExpr, ...]:
    """Encode a float64 expression as `encode_multiplier` encodes a number."""
    if arithmetic is Arithmetic.INT64:
        return split_multiplier_tir(real)
    largest = tirx.const(float(np.finfo(arithmetic.value).max), "float64")
    return (tirx.max(tirx.min(real, largest), -largest).astype(arithmetic.value),)


# ---------------------------------------------------------------- requantize


def subtract_zero_point_tir(value: PrimExpr, zero_point: PrimExpr) -> PrimExpr:
    """Subtract an int32 zero point from an integer. The result is int64 for an int64 value, else
    int32.
    """
    dtype = "int64" if expr_dtype(value) == "int64" else "int32"
    return value.astype(dtype) - zero_point.astype(dtype)


def requantize_tir(
    value: PrimExpr,
    zero_point: PrimExpr,
    multiplier: tuple[PrimExpr, ...],
    output_zero_point: PrimExpr,
    dtype: str,
    rounding: Rounding,
    arithmetic: Arithmetic,
) -> PrimExpr:
    """Requantize an integer to the integer type `dtype`. Zero points are int32.

    `multiplier` is input scale / output scale, encoded by `encode_multiplier_tir`. An int64 value
    is cast to int32, except by TONEAREST_EVEN with floats.

    TONEAREST_EVEN with floats: q = saturate(rint(float(x - z_in) * m)) + z_out. INT64: the
    fixed-point product of x - z_in, wrapped to int32, plus z_out, clipped. UPWARD and TONEAREST
    with floats add z_out before they round, as TVM 0.19 does. Ties therefore depend on z_out.
    """
    if has_exact_sums(rounding, arithmetic):
        scaled = subtract_zero_point_tir(value, zero_point).astype(arithmetic.value) * multiplier[0]
        return saturate_tir(tirx.nearbyint(scaled), output_zero_point, dtype)
    value = value.astype("int32")
    if arithmetic is Arithmetic.INT64:
        scaled = multiply_fixed_point_tir(value - zero_point, *multiplier, rounding)
        return clip_integer_tir(scaled + output_zero_point, dtype)
    kind = arithmetic.value
    scaled = (value.astype(kind) - zero_point.astype(kind)) * multiplier[0]
    # The clamp changes no result. It separates product and sum, so that LLVM cannot contract them.
    # A product in float64 would not prevent that: LLVM may narrow it back to float32.
    bound = tirx.const(_PRODUCT_BOUND, kind)
    scaled = tirx.max(tirx.min(scaled, bound), -bound)
    moved = round_tir(scaled + output_zero_point.astype(kind), rounding)
    return saturate_tir(moved, tirx.const(0, "int32"), dtype)


# ---------------------------------------------------------------- one rounding for two operands


def fused_multiply_add_tir(a: PrimExpr, b: PrimExpr, c: PrimExpr) -> PrimExpr:
    """Compute a * b + c of float32 expressions with one rounding.

    On targets without a fused multiply-add, LLVM calls `fmaf` of the C library, which rounds once
    too. c is fenced: if b is 1, LLVM makes a sum of it, and would contract a product c with that
    sum.
    """
    fenced = tirx.call_llvm_pure_intrin("float32", "llvm.arithmetic.fence", c)
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, fenced)
