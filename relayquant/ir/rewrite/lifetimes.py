"""Lifetimes of values in steps that run in order: the values that an executor may drop after a
step.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def find_ends(
    steps: Iterable[Iterable[Value]], kept: Collection[Value] = frozenset()
) -> list[list[Value]]:
    """For each step, find the values that are used there for the last time.

    Args:
        steps: The values that each step reads or computes.
        kept: Values that are needed after the last step. They never end.
    """
    last: dict[Value, int] = {}
    count = 0
    for count, used in enumerate(steps, 1):
        for value in used:
            last[value] = count - 1
    ends: list[list[Value]] = [[] for _ in range(count)]
    for value, i in last.items():
        if value not in kept:
            ends[i].append(value)
    return ends
