"""Rounding and fixed-point arithmetic in numpy: what every number that leaves an operator goes
through.

Compiled code must give the same bits, so nothing here depends on the machine: only IEEE float32 and
float64 operations and two's complement integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.qtypes import INTEGER_LIMITS, Rounding

Array = np.ndarray[Any, Any]

#: Integers of a smaller magnitude, and what a 16-bit number is from them, are float32 exactly.
EXACT_FLOAT32 = 1 << 23


def round_values(values: Array, rounding: Rounding) -> Array:
    """`values` (float32 or float64, any shape) rounded to whole numbers, in the same dtype."""
    if rounding is Rounding.TONEAREST_EVEN:
        return np.rint(values)
    if rounding is Rounding.UPWARD:
        return np.floor(values + values.dtype.type(0.5))
    whole = np.trunc(values)
    # The difference is exact (Sterbenz), unlike trunc(values + 0.5) for 0.49999997.
    return whole + np.where(np.abs(values - whole) >= 0.5, np.sign(values), 0).astype(values.dtype)


def wrap_int32(values: Array) -> Array:
    """Int64 values reduced to int32 modulo 2^32, as a C cast does."""
    return values.astype("int64").astype("int32")


def get_fixed_point_multiplier(multiplier: Any) -> tuple[Array, Array]:
    """(M, e) with multiplier ~ M * 2^(e - 31), M int64 in [2^30, 2^31), e int64; 0 gives (0, 0).

    The decomposition of gemmlowp and TFLite as in TVM v0.19, `GetFixedPointMultiplierShift`
    (src/relay/qnn/utils.cc). `multiplier`: float64, any shape, >= 0.
    """
    fraction, exponent = np.frexp(np.asarray(multiplier, "float64"))
    # fraction * 2^31 is exact, so adding a half before floor rounds half away correctly.
    mantissa = np.floor(fraction * 2.0**31 + 0.5).astype("int64")
    exponent = exponent.astype("int64")
    overflow = mantissa == 2**31
    mantissa = np.where(overflow, 2**30, mantissa)
    exponent = np.where(overflow, exponent + 1, exponent)
    return mantissa, np.where(mantissa == 0, 0, exponent)


def multiply_fixed_point(
    values: Array, mantissa: Array, exponent: Array, rounding: Rounding
) -> Array:
    """round(values * mantissa * 2^(exponent - 31)) in 64-bit integers, wrapped to int32.

    `values`: int32, or int64 within int32; `mantissa`, `exponent`: as from
    `get_fixed_point_multiplier`, broadcastable. A right shift beyond 63 bits gives 0, to which the
    product rounds; after a left shift of 63 bits the wrapped result is 0, as for any longer one.
    """
    left = np.clip(exponent, 0, 63)
    right = 31 + np.maximum(-exponent, 0)
    product = (values.astype("int64") << left) * mantissa
    shift = np.minimum(right, 63)
    half = np.int64(1) << (shift - 1)
    # Quotient and remainder instead of product + half: the sum may leave int64.
    quotient = product >> shift
    remainder = product - (quotient << shift)
    if rounding is Rounding.UPWARD:
        up = remainder >= half
    elif rounding is Rounding.TONEAREST:
        up = np.where(product >= 0, remainder >= half, remainder > half)
    else:
        up = (remainder > half) | ((remainder == half) & (quotient & 1 == 1))
    return wrap_int32(np.where(right > 63, 0, quotient + up))


def hold_multiplier(multiplier: Any, dtype: str) -> Array:
    """A float64 multiplier, any shape, as float32 or float64: the largest of them instead of
    infinity, which times 0 would not be 0. Both saturate all other integers.
    """
    largest = float(np.finfo(dtype).max)
    with np.errstate(under="ignore"):
        return np.clip(np.asarray(multiplier, "float64"), -largest, largest).astype(dtype)


def fma_float32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 arrays with a single rounding to float32, bit for bit as hardware FMA.

    The product of two float32 is exact in float64. Rounding the float64 sum again would round
    twice, so the sum is rounded to odd (its exact error comes from Knuth's two-sum); 53 >= 24 + 2
    bits then make the last rounding correct. Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57
    (2008).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.asarray(a, "float32").astype("float64") * np.asarray(b, "float32")
        addend = np.asarray(c, "float32").astype("float64")
        total = np.atleast_1d(product + addend)
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = total.view("int64")
        inexact_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        # The bit pattern of a float64 grows with its magnitude.
        towards = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact_even, bits + towards, bits).view("float64")
        shape = np.broadcast_shapes(product.shape, addend.shape)
        return odd.astype("float32").reshape(shape)


def clip_to_integer(values: Array, dtype: str) -> Array:
    """Integers (int64 or int32) limited to the range of `dtype`, as `dtype` ("int4" in int8)."""
    low, high = INTEGER_LIMITS[dtype]
    return np.clip(values.astype("int64"), low, high).astype(get_storage_dtype(dtype))


def get_storage_dtype(dtype: str) -> str:
    """The numpy dtype that holds `dtype`: numpy has no int4, int8 holds it."""
    return "int8" if dtype == "int4" else dtype


def get_float_limits(dtype: str, float_dtype: str) -> tuple[float, float]:
    """Smallest and largest `float_dtype` within the integer `dtype`.

    The upper limit is another than the integer one where that is no float: 2^31 - 128 for int32 in
    float32, and for int64 2^63 - 2^39 in float32 and 2^63 - 1024 in float64.
    """
    low, high = INTEGER_LIMITS[dtype]
    excess = max(high.bit_length() - (24 if float_dtype == "float32" else 53), 0)
    return float(low), float(high >> excess << excess)


def finish_rounded(rounded: Array, zero_point: Array, dtype: str) -> Array:
    """Whole float values to integers: min(max(v, qmin - z), qmax - z), to integer, plus z.

    The clamp comes before the cast, which is undefined outside int32, and the zero point is added
    as an integer, so that no compiler can contract the addition with a multiplication. For int32
    and int64 the clamp is to the limits themselves (`get_float_limits`) and the addition saturates.
    NaN gives the zero point (real value 0).
    """
    kind = rounded.dtype
    zero = zero_point.astype("int64")
    low, high = get_float_limits(dtype, kind.name)
    is_wide = dtype in ("int32", "int64")
    shift = np.zeros((), "int64") if is_wide else zero
    with np.errstate(invalid="ignore"):
        clamped = np.minimum(
            np.maximum(rounded, (low - shift).astype(kind)), (high - shift).astype(kind)
        )
    if clamped.size and np.isnan(clamped.min()):
        clamped = np.where(np.isnan(clamped), kind.type(0), clamped)
    if not is_wide and np.abs(zero).max(initial=0) < EXACT_FLOAT32:
        # Both limits are exact, so that the sum is within the range of the dtype already.
        return (clamped.astype("int32") + zero.astype("int32")).astype(get_storage_dtype(dtype))
    return clip_to_integer(clamped.astype("int64") + zero, dtype)
