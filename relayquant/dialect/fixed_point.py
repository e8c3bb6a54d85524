"""Dialect: the arithmetic of rounding and requantization, in numpy and in TIR side by side.

Each function comes as a pair, `*_numpy` and `*_tir`, which agree bit for bit. The numpy form runs
when parameters are constants (at legalization time), the TIR form when they are variables of the
model.

Nothing here may be contracted: LLVM turns `a * b + c` into one fused multiply-add on targets that
have it, which rounds once instead of twice and so gives another answer. Hence a product is never
directly followed by an addition, except where the fused operation is asked for by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from relayquant.qtypes import INTEGER_LIMITS, Arithmetic, Rounding, has_exact_sums

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


def split_multiplier_numpy(multiplier: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(M, e), int32 each, with multiplier = M * 2^(e - 31) and M in [2^30, 2^31), or (0, 0) for 0.

    `multiplier` is a non-negative finite float64 of any shape. M rounds half away from zero, as in
    gemmlowp's QuantizeMultiplier and TVM's GetFixedPointMultiplierShift.
    """
    fraction, exponent = np.frexp(np.asarray(multiplier, "float64"))
    # fraction * 2^31 is exact, and adding 0.5 to a number below 2^52 is exact too.
    mantissa = np.floor(fraction * 2.0**31 + 0.5).astype("int64")
    exponent = exponent.astype("int32")
    carried = mantissa == 2**31
    mantissa = np.where(carried, 2**30, mantissa)
    exponent = np.where(carried, exponent + 1, exponent)
    exponent = np.where(mantissa == 0, 0, exponent)
    return mantissa.astype("int32"), exponent.astype("int32")


def split_multiplier_tir(multiplier: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """`split_multiplier_numpy` for a float64 expression that is 0 or a normal number."""
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


def multiply_fixed_point_numpy(
    value: Any, mantissa: Any, exponent: Any, rounding: Rounding
) -> NDArray[np.int32]:
    """round(value * M * 2^(e - 31)) in 64-bit integers, wrapped to int32.

    `value`, M and e are int32 of shapes that broadcast. Ties go as `rounding` says. Products beyond
    63 bits wrap, as they do in TVM.
    """
    value, mantissa, exponent = (np.asarray(v).astype("int64") for v in (value, mantissa, exponent))
    shift = np.minimum(31 - np.minimum(exponent, 0), _MAX_SHIFT)
    with np.errstate(over="ignore"):
        product = (value << np.maximum(exponent, 0)) * mantissa
        half = np.int64(1) << (shift - 1)
        if rounding is Rounding.TONEAREST:
            half = np.where(product >= 0, half, half - 1)
        elif rounding is Rounding.TONEAREST_EVEN:
            half = half - 1 + ((product >> shift) & 1)
        return ((product + half) >> shift).astype("int32")


def multiply_fixed_point_tir(
    value: PrimExpr, mantissa: PrimExpr, exponent: PrimExpr, rounding: Rounding
) -> PrimExpr:
    """`multiply_fixed_point_numpy` for int32 expressions."""
    one, zero = tirx.const(1, "int64"), tirx.const(0, "int64")
    exponent = exponent.astype("int64")
    shift = tirx.min(
        tirx.const(31, "int64") - tirx.min(exponent, zero), tirx.const(_MAX_SHIFT, "int64")
    )
    product = tirx.shift_left(value.astype("int64"), tirx.max(exponent, zero)) * mantissa.astype(
        "int64"
    )
    half = tirx.shift_left(one, shift - one)
    if rounding is Rounding.TONEAREST:
        half = tirx.Select(product >= zero, half, half - one)
    elif rounding is Rounding.TONEAREST_EVEN:
        half = half - one + tirx.bitwise_and(tirx.shift_right(product, shift), one)
    return tirx.shift_right(product + half, shift).astype("int32")


# ---------------------------------------------------------------- rounding of floats


def round_numpy(value: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
    """Round float32 or float64 to integral values of the same dtype."""
    if rounding is Rounding.TONEAREST_EVEN:
        return np.rint(value)
    if rounding is Rounding.UPWARD:
        return np.floor(value + value.dtype.type(0.5))
    whole = np.trunc(value)
    with np.errstate(invalid="ignore"):  # an infinity minus itself
        away = np.abs(value - whole) >= 0.5
    return np.where(away, whole + np.sign(value), whole).astype(value.dtype)


def round_tir(value: PrimExpr, rounding: Rounding) -> PrimExpr:
    """`round_numpy` for a float32 or float64 expression.

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


def float_limits(dtype: str, float_dtype: str) -> tuple[float, float]:
    """Smallest and largest float of `float_dtype` within the integer `dtype`.

    Only for int32 in float32 the upper one differs from the integer limit: 2147483520.
    """
    low, high = INTEGER_LIMITS[dtype]
    limit = np.dtype(float_dtype).type(high)
    if int(limit) > high:
        limit = np.nextafter(limit, np.dtype(float_dtype).type(0))
    return float(low), float(limit)


def saturate_numpy(value: NDArray[Any], zero_point: Any, dtype: str) -> NDArray[Any]:
    """Integral floats plus an int32 zero point, saturated to the integer `dtype`; NaN -> zero
    point.

    Clamps as floats to the limits minus the zero point, converts, then adds the zero point as an
    integer: the conversion cannot overflow and the addition is exact. For int32 the limits minus
    the zero point are no int32: there the clamp is to the limits and the sum saturates.
    """
    zero_point = np.asarray(zero_point, "int32")
    kind = value.dtype.type
    low, high = (kind(v) for v in float_limits(dtype, value.dtype.name))
    value = np.where(np.isnan(value), kind(0), value)
    if dtype == "int32":
        total = np.clip(value, low, high).astype("int64") + zero_point
        return np.clip(total, *INTEGER_LIMITS[dtype]).astype(dtype)
    shifted = zero_point.astype(value.dtype)
    clamped = np.minimum(np.maximum(value, low - shifted), high - shifted)
    return (clamped.astype("int32") + zero_point).astype(dtype)


def saturate_tir(
    value: PrimExpr, zero_point: PrimExpr, dtype: str, may_be_nan: bool = False
) -> PrimExpr:
    """`saturate_numpy` for a float expression and an int32 zero point."""
    kind = expr_dtype(value)
    low, high = (tirx.const(v, kind) for v in float_limits(dtype, kind))
    if may_be_nan:
        value = tirx.Select(tirx.isnan(value), tirx.const(0.0, kind), value)
    if dtype == "int32":
        total = tirx.max(tirx.min(value, high), low).astype("int64") + zero_point.astype("int64")
        low_int, high_int = (tirx.const(v, "int64") for v in INTEGER_LIMITS[dtype])
        return tirx.max(tirx.min(total, high_int), low_int).astype(dtype)
    shifted = zero_point.astype(kind)
    clamped = tirx.min(tirx.max(value, low - shifted), high - shifted)
    return (clamped.astype("int32") + zero_point).astype(dtype)


def clip_integer_numpy(value: NDArray[np.int32], dtype: str) -> NDArray[Any]:
    """int32 clipped to the integer `dtype`; as it is for int32."""
    if dtype == "int32":
        return value
    return np.clip(value, *INTEGER_LIMITS[dtype]).astype(dtype)


def clip_integer_tir(value: PrimExpr, dtype: str) -> PrimExpr:
    """`clip_integer_numpy` for an int32 expression."""
    if dtype == "int32":
        return value
    low, high = (tirx.const(v, "int32") for v in INTEGER_LIMITS[dtype])
    return tirx.max(tirx.min(value, high), low).astype(dtype)


# ---------------------------------------------------------------- multipliers, encoded


def encode_multiplier_numpy(real: Any, arithmetic: Arithmetic) -> tuple[NDArray[Any], ...]:
    """What an `arithmetic` multiplies with, for a float64 real multiplier: (M, e) or (float,)."""
    if arithmetic is Arithmetic.INT64:
        return split_multiplier_numpy(real)
    with np.errstate(over="ignore", under="ignore"):
        return (np.asarray(real, "float64").astype(arithmetic.value),)


def encode_multiplier_tir(real: PrimExpr, arithmetic: Arithmetic) -> tuple[PrimExpr, ...]:
    """`encode_multiplier_numpy` for a float64 expression."""
    if arithmetic is Arithmetic.INT64:
        return split_multiplier_tir(real)
    return (real.astype(arithmetic.value),)


# ---------------------------------------------------------------- requantize


def centre_tir(value: PrimExpr, zero_point: PrimExpr) -> PrimExpr:
    """value - zero_point of an integer and an int32: int64 if the value is, else int32."""
    dtype = "int64" if expr_dtype(value) == "int64" else "int32"
    return value.astype(dtype) - zero_point.astype(dtype)


def requantize_numpy(
    value: Any,
    zero_point: Any,
    multiplier: tuple[Any, ...],
    output_zero_point: Any,
    dtype: str,
    rounding: Rounding,
    arithmetic: Arithmetic,
) -> NDArray[Any]:
    """Integers of one affine space in another, of integer type `dtype`; all shapes broadcast.

    `multiplier` is input scale / output scale as `encode_multiplier_numpy` gives it. int64 is taken
    as int32 but by TONEAREST_EVEN with floats.

    TONEAREST_EVEN with floats: q = saturate(rint(float(x - z_in) * m)) + z_out. INT64: the
    fixed-point product of x - z_in, wrapped to int32, plus z_out, clipped. UPWARD and TONEAREST
    with floats add z_out before they round, so that ties depend on it, as in TVM 0.19.
    """
    value, zero_point = np.asarray(value), np.asarray(zero_point, "int32")
    if value.dtype != np.int64 or not has_exact_sums(rounding, arithmetic):
        value = value.astype("int32")
    output_zero_point = np.asarray(output_zero_point, "int32")
    with np.errstate(over="ignore"):
        if arithmetic is Arithmetic.INT64:
            scaled = multiply_fixed_point_numpy(value - zero_point, *multiplier, rounding)
            return clip_integer_numpy(scaled + output_zero_point, dtype)
        kind = np.dtype(arithmetic.value)
        if rounding is Rounding.TONEAREST_EVEN:
            scaled = (value - zero_point).astype(kind) * multiplier[0]
            return saturate_numpy(np.rint(scaled), output_zero_point, dtype)
        scaled = (value.astype(kind) - zero_point.astype(kind)) * multiplier[0]
        scaled = np.clip(scaled, kind.type(-_PRODUCT_BOUND), kind.type(_PRODUCT_BOUND))
        moved = round_numpy(scaled + output_zero_point.astype(kind), rounding)
        return saturate_numpy(moved, 0, dtype)


def requantize_tir(
    value: PrimExpr,
    zero_point: PrimExpr,
    multiplier: tuple[PrimExpr, ...],
    output_zero_point: PrimExpr,
    dtype: str,
    rounding: Rounding,
    arithmetic: Arithmetic,
) -> PrimExpr:
    """`requantize_numpy` for expressions: an integer value, int32 zero points."""
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


def fused_multiply_add_numpy(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """round(a * b + c) to float32, rounded once, for float32 arrays that broadcast.

    The product of two float32 is exact in float64. The sum is made there by TwoSum (Knuth) and
    rounded to odd, after which the conversion to float32 gives the correctly rounded result (Boldo
    and Melquiond 2008, "Emulation of a FMA and correctly rounded sums").
    """
    a, b, c = (np.asarray(v, "float32").astype("float64") for v in (a, b, c))
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_even = (np.asarray(total).view("int64") & 1) == 0
    # Where inexact and even, step to the odd neighbour on the side of the exact sum.
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & is_even, np.nextafter(total, toward), total).astype("float32")


def fused_multiply_add_tir(a: PrimExpr, b: PrimExpr, c: PrimExpr) -> PrimExpr:
    """`fused_multiply_add_numpy` for float32 expressions.

    Asked for by name: on targets without the instruction LLVM calls `fmaf` of the C library, which
    is exact too.
    """
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, c)
