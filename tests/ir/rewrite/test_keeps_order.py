"""Whether two permutations undo each other around a reshape, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayquant.ir.rewrite.moves import keeps_order


@st.composite
def draw_moves(draw):
    """(shape, permutation, shape after a reshape, permutation)."""
    before = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    first = draw(st.permutations(range(len(before))))
    rest, reshaped = math.prod(before), []
    for _ in range(draw(st.integers(0, 3))):
        reshaped.append(draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= reshaped[-1]
    reshaped.append(rest)
    return before, first, reshaped, draw(st.permutations(range(len(reshaped))))


@given(draw_moves())
def test_keeps_order__as_numpy(moves):
    before, first, reshaped, second = moves
    numbers = np.arange(math.prod(before))
    moved = numbers.reshape(before).transpose(first).reshape(reshaped).transpose(second)
    assert keeps_order(*moves) == np.array_equal(moved.ravel(), numbers)


@pytest.mark.parametrize(
    ("before", "first", "reshaped", "second", "keeps"),
    [
        (("n", 6, 3), (0, 2, 1), ("n", 3, 2, 3), (0, 2, 3, 1), True),
        (("n", "h", 3), (0, 2, 1), ("n", 3, "h", 1), (0, 2, 3, 1), True),
        (("n", 6, 3), (0, 2, 1), ("n", 3, 2, 3), (0, 1, 3, 2), False),
        ((2, "n", "m"), (0, 2, 1), (2, "n", "m"), (0, 2, 1), False),
        ((0, 2, 3), (0, 2, 1), (0, 3, 2), (0, 2, 1), False),  # no elements: nothing is known
    ],
)
def test_keeps_order__symbolic_sizes(before, first, reshaped, second, keeps):
    assert keeps_order(before, first, reshaped, second) is keeps
