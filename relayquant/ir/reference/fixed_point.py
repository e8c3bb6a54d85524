"""Rounding and fixed-point arithmetic in numpy, used for the result of every integer operator.

Compiled code must give the same bits on every machine. The code here therefore uses only IEEE
float32 and float64 operations and two's complement integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.qtypes import INTEGER_LIMITS, Rounding

Array = np.ndarray[Any, Any]

#: float32 is exact for integers of a smaller magnitude, also after adding a 16-bit number.
EXACT_FLOAT32 = 1 << 23
#: elements that are computed together: their temporary arrays fit the second-level cache
PART_ELEMENTS = 1 << 14


def round_values(values: Array, rounding: Rounding) -> Array:
    """Round float32 or float64 values of any shape to whole numbers, in the same dtype."""
    if rounding is Rounding.TONEAREST_EVEN:
        return np.rint(values)
    if rounding is Rounding.UPWARD:
        return np.floor(values + values.dtype.type(0.5))
    whole = np.trunc(values)
    # The difference is exact (Sterbenz), unlike trunc(values + 0.5) for 0.49999997.
    return whole + np.where(np.abs(values - whole) >= 0.5, np.sign(values), 0).astype(values.dtype)


def wrap_int32(values: Array) -> Array:
    """Wrap int64 values to int32, modulo 2^32, as a C cast does."""
    return values.astype("int64").astype("int32")


def get_fixed_point_multiplier(multiplier: Any) -> tuple[Array, Array]:
    """Return (M, e) with multiplier ~ M * 2^(e - 31).

    M is int64 in [2^30, 2^31), e is int64. A multiplier of 0 gives (0, 0).

    `multiplier` is float64 of any shape, >= 0. Source: the decomposition of gemmlowp and TFLite, as
    in TVM v0.19, `GetFixedPointMultiplierShift` (src/relay/qnn/utils.cc).
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
    """Compute round(values * mantissa * 2^(exponent - 31)) in 64-bit integers, wrapped to int32.

    `values` are int32, or int64 in the range of int32. `mantissa` and `exponent` come from
    `get_fixed_point_multiplier` and broadcast. A right shift beyond 63 bits gives 0, the correctly
    rounded product. A left shift by 63 bits or more gives the wrapped result 0.
    """
    left = np.clip(exponent, 0, 63)
    right = 31 + np.maximum(-exponent, 0)
    product = (values.astype("int64") << left) * mantissa
    shift = np.minimum(right, 63)
    half = np.int64(1) << (shift - 1)
    # Quotient and remainder instead of product + half, because the sum may overflow int64.
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
    """Convert a float64 multiplier of any shape to float32 or float64, without infinity.

    Infinity times 0 would be NaN. The largest finite number replaces it and gives 0 there. For
    other integers, both saturate.
    """
    largest = float(np.finfo(dtype).max)
    with np.errstate(under="ignore"):
        return np.clip(np.asarray(multiplier, "float64"), -largest, largest).astype(dtype)


def fma_float32(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c of float32 arrays with one rounding, with the bits of a hardware FMA.

    The product of two float32 is exact in float64. Rounding the float64 sum to float32 would round
    twice. The sum is therefore rounded to odd, with its exact error from Knuth's two-sum. Because
    53 >= 24 + 2 bits, the last rounding is then correct. Source: Boldo and Melquiond, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on
    Computers 57 (2008).

    It works on parts that fit a cache: arrays of 2 million elements take a tenth of the time.
    """
    operands = [*(np.asarray(operand, "float32") for operand in (a, b, c)), None]
    ways = [["readonly"]] * 3 + [["writeonly", "allocate"]]
    flags = ["external_loop", "buffered", "zerosize_ok"]
    with np.nditer(operands, flags, ways, ["float32"] * 4, buffersize=PART_ELEMENTS) as parts:
        for *given, result in parts:
            result[...] = fma_rows(*given)
        return parts.operands[3]


def fma_rows(a: Array, b: Array, c: Array) -> Array:
    """`fma_float32` of vectors of one length."""
    with np.errstate(invalid="ignore", over="ignore"):
        product, addend = a.astype("float64") * b, c.astype("float64")
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        bits = total.view("int64")
        inexact_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        # The bit pattern of a float64 grows with its magnitude.
        towards = np.where((error > 0) == (total > 0), 1, -1)
        return np.where(inexact_even, bits + towards, bits).view("float64").astype("float32")


def clip_to_integer(values: Array, dtype: str) -> Array:
    """Clip int64 or int32 integers to the range of `dtype` and cast to it. "int4" becomes int8."""
    low, high = INTEGER_LIMITS[dtype]
    return np.clip(values.astype("int64"), low, high).astype(get_storage_dtype(dtype))


def get_storage_dtype(dtype: str) -> str:
    """Return the numpy dtype for `dtype`. numpy has no int4: int8 holds it."""
    return "int8" if dtype == "int4" else dtype


def get_float_limits(dtype: str, float_dtype: str) -> tuple[float, float]:
    """Return the smallest and largest `float_dtype` numbers within the integer `dtype`.

    If the upper integer limit is not a float, the result is the next smaller float: 2^31 - 128 for
    int32 in float32, 2^63 - 2^39 for int64 in float32, 2^63 - 1024 for int64 in float64.
    """
    low, high = INTEGER_LIMITS[dtype]
    excess = max(high.bit_length() - (24 if float_dtype == "float32" else 53), 0)
    return float(low), float(high >> excess << excess)


def finish_rounded(rounded: Array, zero_point: Array, dtype: str) -> Array:
    """Convert whole floats to integers: clamp to qmin - z..qmax - z, cast, add z.

    The clamp comes before the cast, because the cast is undefined outside int32. The zero point is
    added as an integer, so that no compiler can contract the addition with a multiplication. For
    int32 and int64, the clamp uses the limits of `get_float_limits` and the addition saturates. NaN
    gives the zero point (real value 0).
    """
    kind = rounded.dtype
    zero = zero_point.astype("int64")
    low, high = get_float_limits(dtype, kind.name)
    is_wide = dtype in ("int32", "int64")
    shift = np.zeros((), "int64") if is_wide else zero
    with np.errstate(invalid="ignore"):
        clamped = np.asarray(np.maximum(rounded, (low - shift).astype(kind)))
        clamped = np.minimum(clamped, (high - shift).astype(kind), out=clamped)
    if clamped.size and np.isnan(clamped.min()):
        clamped = np.where(np.isnan(clamped), kind.type(0), clamped)
    if not is_wide and np.abs(zero).max(initial=0) < EXACT_FLOAT32:
        # Both limits are exact, and so is every number between them: the sum is in the range of
        # the dtype.
        clamped += zero.astype(kind)
        return clamped.astype(get_storage_dtype(dtype))
    return clip_to_integer(clamped.astype("int64") + zero, dtype)
