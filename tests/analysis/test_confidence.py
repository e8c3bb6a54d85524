"""confidence: bounds hold in as many draws as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relayquant.analysis.confidence import bound_share, find_margins, find_t


@pytest.mark.parametrize(
    ("freedom", "t"),  # of a printed table
    [(1, 6.314), (3, 2.353), (10, 1.812), (11, 1.796), (20, 1.725), (30, 1.697), (120, 1.658)],
)
def test_find_t__as_printed(freedom, t):
    assert find_t(freedom) == pytest.approx(t, abs=0.002)


def test_find_t__needs_a_degree_of_freedom():
    with pytest.raises(ValueError, match="allowed: 1 or more"):
        find_t(0)


@pytest.mark.parametrize(("count", "samples"), [(0, 8), (3, 8), (8, 8), (1, 64), (40, 64)])
def test_bound_share__is_where_the_score_test_turns(count, samples):
    for share in bound_share(count, samples):
        if 0 < share < 1:
            z = (count / samples - share) / math.sqrt(share * (1 - share) / samples)
            assert abs(z) == pytest.approx(1.6449, abs=1e-3)
    assert bound_share(count, samples)[0] <= count / samples <= bound_share(count, samples)[1]


def test_bound_share__nothing_seen_says_nothing():
    assert bound_share(0, 0) == (0.0, 1.0)
    assert bound_share(0, 25)[1] < 0.1 < bound_share(0, 24)[1]


@pytest.mark.parametrize(("samples", "missed"), [(8, 0.18), (16, 0.14), (64, 0.1)])
@pytest.mark.parametrize("deviation", [0.5, 1.2])
def test_find_margins__hold_in_most_draws(samples, missed, deviation):
    """Of log-normal noise, whose mean is known."""
    rng = np.random.default_rng(0)
    mean = 10 * math.log10(math.exp(deviation**2 / 2))
    below = above = 0
    for _ in range(1000):
        signal = rng.gamma(4, 1, samples)
        noise = signal * np.exp(rng.normal(0, deviation, samples))
        ratio = 10 * math.log10(noise.sum() / signal.sum())
        less, more = find_margins(signal, noise)
        assert less > 0 < more
        below += ratio + less < mean
        above += ratio - more > mean
    assert below / 1000 < missed
    assert above / 1000 < 0.05


@pytest.mark.parametrize(
    ("signal", "noise"),
    [([1.0], [0.1]), ([1.0, 1.0], [0.0, 0.0]), ([0.0, 0.0], [1.0, 0.0]), ([1.0, 1.0], [np.inf, 0])],
)
def test_find_margins__nothing_to_tell(signal, noise):
    assert find_margins(np.array(signal), np.array(noise)) == (0.0, 0.0)
