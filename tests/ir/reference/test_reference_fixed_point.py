"""Rounding and fixed-point arithmetic against exact rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relayquant.base.qtypes import INTEGER_LIMITS, Rounding
from relayquant.ir.reference.fixed_point import (
    PART_ELEMENTS,
    finish_rounded,
    fma_float32,
    get_fixed_point_multiplier,
    multiply_fixed_point,
    round_values,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: Few significant bits at any magnitude: sums of products of these hit ties and near ties.
SHORT_FLOAT32 = st.builds(
    lambda m, e: float(np.float32(math.ldexp(m, e))),
    st.integers(-(2**24), 2**24),
    st.integers(-60, 40),
)


def round_fraction(value: Fraction, rounding: Rounding) -> int:
    """The integer an exact value rounds to."""
    if rounding is Rounding.TONEAREST_EVEN:
        return round(value)
    if rounding is Rounding.UPWARD:
        return math.floor(value + Fraction(1, 2))
    away = math.floor(abs(value) + Fraction(1, 2))
    return away if value >= 0 else -away


def round_to_float32(value: Fraction) -> float:
    """The float32 nearest to an exact value, ties to even, overflow to infinity."""
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(value / unit) * unit
    if abs(rounded) >= Fraction(2) ** 128:
        return math.copysign(math.inf, rounded)
    return float(rounded)


@given(a=FLOAT32 | SHORT_FLOAT32, b=FLOAT32 | SHORT_FLOAT32, c=FLOAT32 | SHORT_FLOAT32)
@example(a=1 + 2.0**-12, b=1 + 2.0**-12, c=2.0**-60)  # above a tie by less than a float64 ulp
@example(a=1 + 2.0**-12, b=1 + 2.0**-12, c=-(2.0**-60))
@example(a=1.5 + 2.0**-12, b=1 + 2.0**-12, c=-(2.0**-60))
@settings(max_examples=count_examples(1000))
def test_fma_float32__rounds_once(a, b, c):
    result = fma_float32(np.float32(a), np.float32(b), np.float32(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert result.dtype == np.float32
    assert result.shape == ()
    assert result == round_to_float32(exact)


def test_fma_float32__differs_from_double_rounding():
    a = np.float32(1 + 2.0**-12)
    c = np.float32(2.0**-60)
    twice = np.float32(np.float64(a) * np.float64(a) + np.float64(c))
    assert fma_float32(a, a, c) == np.nextafter(twice, np.float32(2))


def test_fma_float32__special_values():
    result = fma_float32(
        np.array([np.inf, np.inf, np.nan, 3e38], "float32"),
        np.array([1, 0, 1, 3e38], "float32"),
        np.array([1, 1, 1, 1], "float32"),
    )
    np.testing.assert_array_equal(result, np.array([np.inf, np.nan, np.nan, np.inf], "float32"))


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((3, PART_ELEMENTS), (), (3, PART_ELEMENTS)),
        ((5, 4000, 3), (3,), (5, 4000, 3)),
        ((5, 1, 4000), (5, 3, 1), (3, 4000)),
        ((0, 4), (4,), (1, 4)),
    ],
)
def test_fma_float32__many_elements_are_the_same_as_one_by_one(a, b, c):
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape).astype("float32") for shape in (a, b, c)]
    operands[0] = np.asfortranarray(operands[0])
    result = fma_float32(*operands)
    every = np.broadcast_arrays(*operands)
    assert result.shape == every[0].shape
    for at in rng.integers(0, result.shape, (200 if result.size else 0, result.ndim)):
        x, y, z = (Fraction(float(array[tuple(at)])) for array in every)
        assert result[tuple(at)] == round_to_float32(x * y + z)


@given(value=FLOAT32, rounding=st.sampled_from(Rounding))
@example(value=0.49999997, rounding=Rounding.TONEAREST)
@example(value=-2.5, rounding=Rounding.UPWARD)
def test_round_values__exact_but_for_upward_half(value, rounding):
    result = round_values(np.float32([value]), rounding)
    shifted = Fraction(value)
    if rounding is Rounding.UPWARD:
        # The half is added in float32, as TVM does.
        shifted = Fraction(float(np.float32(value) + np.float32(0.5))) - Fraction(1, 2)
    assert result.dtype == np.float32
    assert result[0] == round_fraction(shifted, rounding)


@given(st.floats(1e-30, 1e30) | st.integers(-60, 60).map(lambda e: 2.0**e))
@example(1 - 2.0**-53)  # rounds up to the next power of two
def test_get_fixed_point_multiplier__is_nearest(real):
    mantissa, exponent = get_fixed_point_multiplier(real)
    assert 2**30 <= mantissa < 2**31
    step = Fraction(2) ** (int(exponent) - 31)
    assert abs(int(mantissa) * step - Fraction(real)) <= step / 2


@pytest.mark.parametrize(
    ("real", "mantissa", "exponent"),
    [
        (0.0, 0, 0),
        (1 / 16, 2**30, -3),
        (1 / 3, 1431655765, -1),
        (3.0, 1610612736, 2),
        (1.0, 2**30, 1),
        (1 - 2.0**-40, 2**30, 1),
    ],
)
def test_get_fixed_point_multiplier__known_values(real, mantissa, exponent):
    assert get_fixed_point_multiplier(real) == (mantissa, exponent)


@given(
    value=INT32,
    mantissa=st.integers(2**30, 2**31 - 1) | st.sampled_from([2**30, 3 * 2**29]),
    exponent=st.integers(-70, 70) | st.integers(-8, 3),
    rounding=st.sampled_from(Rounding),
)
@settings(max_examples=count_examples(1000))
def test_multiply_fixed_point__exact_modulo_int32(value, mantissa, exponent, rounding):
    exact = Fraction(value) * mantissa * Fraction(2) ** (exponent - 31)
    if rounding is Rounding.TONEAREST and abs(exact) >= 2**32:
        return  # the sign of a wrapped product is lost
    result = multiply_fixed_point(
        np.array([value], "int32"), np.array(mantissa), np.array(exponent), rounding
    )
    assert result.dtype == np.int32
    assert (int(result[0]) - round_fraction(exact, rounding)) % 2**32 == 0


@given(
    value=st.floats(-1e12, 1e12).map(np.rint) | st.floats(allow_nan=True).map(np.rint),
    dtype=st.sampled_from(["int8", "uint8", "int16", "uint16", "int32"]),
    kind=st.sampled_from(["float32", "float64"]),
    data=st.data(),
)
def test_finish_rounded__saturates(value, dtype, kind, data):
    low, high = INTEGER_LIMITS[dtype]
    zero_point = data.draw(st.integers(low, high))
    with np.errstate(over="ignore"):
        value = np.asarray(value, kind)
    result = finish_rounded(value, np.int32(zero_point), dtype)
    assert result.dtype == dtype
    if np.isnan(value):
        assert result == zero_point
        return
    if dtype == "int32":
        value = np.clip(value, low, high if kind == "float64" else 2**31 - 128)
    expected = min(max(value.item() + zero_point, low), high)
    assert result == expected


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_finish_rounded__int4_is_held_in_int8(dtype):
    result = finish_rounded(np.float32([-500, 500]), np.int32(0), dtype)
    assert result.dtype == np.int8
    assert tuple(result) == INTEGER_LIMITS[dtype]
