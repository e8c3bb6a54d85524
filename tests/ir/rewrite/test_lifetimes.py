"""The last use of values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relayquant.ir.rewrite.lifetimes import find_ends


def test_ends__where_a_value_is_used_last():
    assert find_ends(["a", "ab", "bc", "b"]) == [[], ["a"], ["c"], ["b"]]


def test_ends__of_what_is_kept_nowhere():
    assert find_ends([("x", "y"), ("y",)], {"y"}) == [["x"], []]


def test_ends__of_no_steps():
    assert find_ends([]) == []


@given(st.lists(st.lists(st.integers(0, 9))), st.sets(st.integers(0, 9)))
def test_ends__every_value_once_and_never_too_early(steps, kept):
    """A run that drops what ends finds each value that it uses, and is left with what is kept."""
    held = {value for used in steps for value in used}
    for used, ended in zip(steps, find_ends(steps, kept), strict=True):
        assert held.issuperset(used)
        assert held.issuperset(ended)
        held.difference_update(ended)
    assert held <= kept
