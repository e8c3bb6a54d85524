"""Ranges of values that only tables read: observed range + functions -> the part of the range in
which the functions change.

The input of a SiLU may reach from -20 to 8, but below -7 the result is zero. A range from -7 gives
the input nearly half the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from relayquant.ir.ops.base import ElementFunction
from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph
from relayquant.stages.prepared import PreparedModel

#: points at which a function is evaluated
POINTS = 1025

#: Steps of an 8-bit result that a function may change by within an end that is cut. With a quarter,
#: rounding to nearest adds twice as much.
TOLERANCE = 0.25


def find_functions(prepared: PreparedModel) -> dict[str, list[ElementFunction]]:
    """Return the functions that read a value, by group key, for values that nothing else reads."""
    graph, plan = Graph(prepared.mod), prepared.plan
    found: dict[str, list[ElementFunction]] = {}
    members: dict[str, set[str]] = {}
    for operator in plan.operators:
        if not operator.quantized or not operator.pattern:
            continue
        make = find_pattern(prepared.backend, operator.pattern).function
        keys = dict(operator.operands)
        if make is not None and "data" in keys:
            match = match_operator(graph, prepared.backend, operator)
            found.setdefault(keys["data"], []).append(make(match))
            members.setdefault(keys["data"], set()).update(operator.values)
    return {
        key: functions
        for key, functions in found.items()
        if has_readers(graph, plan.group(key), members[key])
    }


def has_readers(graph: Graph, group: SharedQParams, names: Collection[str]) -> bool:
    """Whether nothing but these operators, and data movement within the group, reads the group."""
    allowed = {*names, *group.members}
    values = [graph.vars[name] for name in group.members]
    return not group.clamped and all(
        var not in graph.outputs and all(user.name in allowed for user in graph.users[var])
        for var in values
    )


def cut_flat_ends(
    low: float, high: float, functions: Sequence[ElementFunction]
) -> tuple[float, float]:
    """Return the part of a range outside of which no function changes its result by more than
    `TOLERANCE`.
    """
    x = np.linspace(low, high, POINTS, dtype="float32")
    first, last = POINTS, 0
    for function in functions:
        y = np.asarray(function(x), "float64")
        if not np.isfinite(y).all():
            return low, high
        first = min(first, find_flat(y))
        last = max(last, POINTS - 1 - find_flat(y[::-1]))
    return (float(x[first]), float(x[last])) if first < last else (low, high)


def find_flat(y: NDArray[np.float64]) -> int:
    """Return the last index whose value stands for all values before it."""
    allowed = TOLERANCE * np.ptp(y) / 255
    above, below = np.maximum.accumulate(y) - y, y - np.minimum.accumulate(y)
    return int(np.flatnonzero((above <= allowed) & (below <= allowed))[-1])
