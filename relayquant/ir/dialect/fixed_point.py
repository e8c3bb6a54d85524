"""Dialect: the arithmetic of rounding and requantization in TIR, bit for bit what
`reference/fixed_point.py` computes in numpy.

Nothing here may be contracted: LLVM turns `a * b + c` into one fused multiply-add on targets that
have it, which rounds once instead of twice and so gives another answer. Hence a product is never
directly followed by an addition, except where the fused operation is asked for by name.
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
_EXPONENT_BIAS = 1022  # of a float64 whose fraction is read as a number in [0.5, 1)
#: Products are held within this bound before the zero point is added; beyond it every answer
#: saturates.
_PRODUCT_BOUND = 2.0**40


def expr_dtype(value: PrimExpr) -> str:
    """Data type of a scalar TIR expression."""
    return str(value.ty.dtype)


# ---------------------------------------------------------------- multiplier -> (integer, shift)


def split_multiplier_tir(multiplier: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """`get_fixed_point_multiplier`, int32 each, of a float64 expression that is 0 or normal."""
    bits = tirx.reinterpret("int64", multiplier)
    fraction = tirx.bitwise_or(
        tirx.bitwise_and(bits, tirx.const((1 << _FRACTION_BITS) - 1, "int64")),
        tirx.const(1 << _FRACTION_BITS, "int64"),
    )
    exponent = tirx.shift_right(bits, tirx.const(_FRACTION_BITS, "int64")).astype("int32")
    exponent = exponent - tirx.const(_EXPONENT_BIAS, "int32")
    # 53 significant bits become 31: the fraction is 2^53 times a number in [0.5, 1).
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
    """round(value * M * 2^(e - 31)) of int32 expressions in 64 bits, wrapped to int32. Products
    beyond 63 bits wrap, as they do in TVM.
    """
    one, zero = tirx.const(1, "int64"), tirx.const(0, "int64")
    exponent = exponent.astype("int64")
    shift = tirx.min(
        tirx.const(31, "int64") - tirx.min(exponent, zero), tirx.const(_MAX_SHIFT, "int64")
    )
    # A longer shift leaves nothing of 32 bits, as one of 63 does.
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
    """A float32 or float64 expression rounded to a whole number.

    `tirx.nearbyint` is half to even on every target; `tirx.round` is not the same everywhere.
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
    """A whole float plus an int32 zero point, saturated to the integer `dtype`; NaN, which must be
    announced, gives the zero point.

    Clamps as a float to the limits minus the zero point, converts, then adds the zero point as an
    integer: the conversion cannot overflow and the addition is exact. For int32 the limits minus
    the zero point are no int32: there the clamp is to the limits and the sum saturates.
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
    """An int32 expression clipped to the integer `dtype`; as it is for int32."""
    if dtype == "int32":
        return value
    low, high = (tirx.const(v, "int32") for v in INTEGER_LIMITS[dtype])
    return tirx.max(tirx.min(value, high), low).astype(dtype)


# ---------------------------------------------------------------- multipliers, encoded


def encode_multiplier(real: Any, arithmetic: Arithmetic) -> tuple[np.ndarray, ...]:
    """What an `arithmetic` multiplies with, for a float64 real multiplier: (M, e) or (float,)."""
    if arithmetic is Arithmetic.INT64:
        return tuple(part.astype("int32") for part in get_fixed_point_multiplier(real))
    return (hold_multiplier(real, arithmetic.value),)


def encode_multiplier_tir(real: PrimExpr, arithmetic: Arithmetic) -> tuple[PrimExpr, ...]:
    """`encode_multiplier` for a float64 expression."""
    if arithmetic is Arithmetic.INT64:
        return split_multiplier_tir(real)
    largest = tirx.const(float(np.finfo(arithmetic.value).max), "float64")
    return (tirx.max(tirx.min(real, largest), -largest).astype(arithmetic.value),)


# ---------------------------------------------------------------- requantize


def centre_tir(value: PrimExpr, zero_point: PrimExpr) -> PrimExpr:
    """value - zero_point of an integer and an int32: int64 if the value is, else int32."""
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
    """An integer of one affine space in another, of integer type `dtype`; int32 zero points.

    `multiplier` is input scale / output scale as `encode_multiplier_tir` gives it. int64 is taken
    as int32 but by TONEAREST_EVEN with floats.

    TONEAREST_EVEN with floats: q = saturate(rint(float(x - z_in) * m)) + z_out. INT64: the
    fixed-point product of x - z_in, wrapped to int32, plus z_out, clipped. UPWARD and TONEAREST
    with floats add z_out before they round, so that ties depend on it, as in TVM 0.19.
    """
    if has_exact_sums(rounding, arithmetic):
        scaled = centre_tir(value, zero_point).astype(arithmetic.value) * multiplier[0]
        return saturate_tir(tirx.nearbyint(scaled), output_zero_point, dtype)
    value = value.astype("int32")
    if arithmetic is Arithmetic.INT64:
        scaled = multiply_fixed_point_tir(value - zero_point, *multiplier, rounding)
        return clip_integer_tir(scaled + output_zero_point, dtype)
    kind = arithmetic.value
    scaled = (value.astype(kind) - zero_point.astype(kind)) * multiplier[0]
    # The clamp changes no answer; it stands between product and sum, so that LLVM cannot contract
    # them. (A product in float64 would not do: LLVM may narrow it back to float32.)
    bound = tirx.const(_PRODUCT_BOUND, kind)
    scaled = tirx.max(tirx.min(scaled, bound), -bound)
    moved = round_tir(scaled + output_zero_point.astype(kind), rounding)
    return saturate_tir(moved, tirx.const(0, "int32"), dtype)


# ---------------------------------------------------------------- one rounding for two operands


def fused_multiply_add_tir(a: PrimExpr, b: PrimExpr, c: PrimExpr) -> PrimExpr:
    """round(a * b + c) of float32 expressions, rounded once.

    Asked for by name: on targets without the instruction LLVM calls `fmaf` of the C library, which
    is exact too.
    """
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, c)
