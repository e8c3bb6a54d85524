"""When values are no longer needed by steps that run in order: what an executor may drop."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def find_ends(
    steps: Iterable[Iterable[Value]], kept: Collection[Value] = frozenset()
) -> list[list[Value]]:
    """For each step, the values that it is the last one to use.

    Args:
        steps: The values that each step uses, which are those it reads and those it computes.
        kept: Values that are needed after the last step. They end nowhere.
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
