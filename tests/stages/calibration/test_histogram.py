"""The streaming histogram: exact merging on a global grid."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from relayquant.config.observers.histogram import SMALLEST_EXPONENT, Histogram
from relayquant.errors import ConfigError, DataError

FLOATS = st.floats(-(2.0**127), 2.0**127, width=32)
ARRAYS = arrays("float32", st.integers(0, 30), elements=FLOATS)


def assert_same(a: Histogram, b: Histogram) -> None:
    left, right = a.to_arrays(), b.to_arrays()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def build(*parts: np.ndarray, bins: int = 64) -> Histogram:
    histogram = Histogram.empty(bins)
    for part in parts:
        histogram = histogram.add(part)
    return histogram


@given(ARRAYS, ARRAYS, ARRAYS)
def test_merge__associative_commutative_and_equal_to_concatenation(a, b, c):
    x, y, z = build(a), build(b), build(c)
    whole = build(np.concatenate([a, b, c]))
    assert_same(x.merge(y).merge(z), whole)
    assert_same(x.merge(y.merge(z)), whole)
    assert_same(z.merge(x).merge(y), whole)
    assert_same(build(a, b, c), whole)
    assert_same(build(c, b, a), whole)


@given(ARRAYS)
def test_add__counts_are_those_of_the_grid(a):
    histogram = build(a)
    assert histogram.total == a.size
    index = np.floor(np.ldexp(a[a != 0].astype("float64"), -histogram.exponent)).astype(int)
    expected = np.bincount(index + 64, minlength=128)
    np.testing.assert_array_equal(histogram.counts, expected)
    if (a != 0).any() and histogram.exponent > SMALLEST_EXPONENT:
        # As narrow as possible: at half the width the largest magnitude would not fit.
        top = np.abs(a.astype("float64")).max()
        assert 32 * histogram.width <= top <= 64 * histogram.width


def test_add__keeps_range_and_zeros_exactly():
    histogram = build(np.array([0.0, -0.0, 0.1, -3.3, 0.0], "float32"))
    assert histogram.zeros == 3
    assert histogram.low == np.float32(-3.3)
    assert histogram.high == np.float32(0.1)


def test_add__many_chunks():
    data = np.random.default_rng(0).normal(size=200_001).astype("float32")
    assert_same(build(data, bins=4096), build(*np.array_split(data, 7), bins=4096))
    assert build(data).total == data.size


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_add__refuses_what_is_not_finite(bad):
    with pytest.raises(DataError, match="finite"):
        build(np.array([1.0, bad]))


def test_occupied__range_touches_zero():
    for data in ([3.0, 2.0], [-3.0, -2.0], [-1.0, 2.0], [0.0], [-0.001, 8.0]):
        edges, counts = build(np.array(data)).occupied()
        assert edges.size == counts.size + 1
        assert 0.0 in edges
        assert edges[0] <= min(data) or min(data) > 0
        assert edges[-1] >= max(data)
        assert counts.sum() == np.count_nonzero(data)


@settings(max_examples=count_examples(30))
@given(st.floats(0, 1), st.integers(0, 2**32 - 1), st.sampled_from(["normal", "relu", "minus"]))
def test_find_quantile__within_a_bin_of_numpy(fraction, seed, kind):
    data = np.random.default_rng(seed).normal(size=5000).astype("float32")
    data = {"normal": data, "relu": np.maximum(data, 0), "minus": np.minimum(data, 0.0)}[kind]
    histogram = build(data, bins=256)
    # numpy's bounds allow for the definition of a quantile between two samples.
    slack = 1 / data.size
    for found, values in (
        (histogram.find_quantile(fraction), data),
        (histogram.find_magnitude_quantile(fraction), np.abs(data)),
    ):
        lower = np.quantile(values, max(fraction - slack, 0), method="lower")
        upper = np.quantile(values, min(fraction + slack, 1), method="higher")
        assert lower - histogram.width <= found <= upper + histogram.width


def test_find_quantile__ends_are_exact():
    histogram = build(np.array([-1.3, 0.2, 7.7]))
    assert histogram.find_quantile(1.0) == 7.7
    assert histogram.find_quantile(0.0) == -1.3
    assert histogram.find_magnitude_quantile(1.0) == 7.7
    with pytest.raises(DataError, match="empty"):
        Histogram.empty().find_quantile(0.5)


@given(ARRAYS)
def test_arrays__round_trip(a):
    histogram = build(a)
    assert_same(Histogram.from_arrays(histogram.to_arrays()), histogram)


def test_from_arrays__refuses_damage():
    good = build(np.ones(3)).to_arrays()
    with pytest.raises(DataError, match="lacks counts"):
        Histogram.from_arrays({k: v for k, v in good.items() if k != "counts"})
    with pytest.raises(DataError, match="counts of shape"):
        Histogram.from_arrays({**good, "counts": np.zeros((2, 2), "int64")})
    with pytest.raises(DataError, match="none negative"):
        Histogram.from_arrays({**good, "counts": -good["counts"]})


@pytest.mark.parametrize("bins", [0, 100, 32, 2**21, 64.0])
def test_empty__refuses_other_than_powers_of_two(bins):
    with pytest.raises(ConfigError, match="power of two"):
        Histogram.empty(bins)


def test_merge__refuses_other_number_of_bins():
    with pytest.raises(ConfigError, match="64 and 128 bins"):
        Histogram.empty(64).merge(Histogram.empty(128))
