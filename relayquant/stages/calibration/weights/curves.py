"""Functions behind values: prepared model -> the function that a value's only reader computes of
each number, so that a range can be chosen by the error of the result.

Where the function is flat, errors of its operand cost nothing: hardswish gives 0 for all numbers
below -3, so that a range down to -20 would waste most of the levels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relayquant.ir.ops.chain import TABLES, ChainPattern, evaluate_chain
from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.ops.lut import PRELU
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph, Match
from relayquant.ir.rewrite.attributes import read_attributes
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.prepared import PreparedModel

FloatArray = NDArray[np.float32 | np.float64]

#: Numbers at which functions are tabulated: per sign, and the smallest and the largest one. Between
#: two of them, which differ by half a percent, functions count as straight.
PLACES, LEAST, MOST = 4096, 1e-5, 1e4


@dataclass(frozen=True, eq=False)
class ValueCurve:
    """A function of single numbers as a table.

    Attributes:
        reader: Operator that computes it.
        places: Arguments in rising order, (n,) float64.
        results: Their results, (n,) float64.
    """

    reader: str
    places: NDArray[np.float64]
    results: NDArray[np.float64]

    def __call__(
        self, values: FloatArray, order: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """Return the results. `order` holds the flat indices of all values but 0, in rising order:
        values near each other are found in the table in a seventh of the time.
        """
        if order is None:
            return np.interp(values, self.places, self.results)
        results = np.full(values.size, self(np.zeros(1))[0])
        results[order] = self(values.reshape(-1)[order])
        return results.reshape(values.shape)

    def holds(self, low: float, high: float) -> bool:
        """Whether the function is finite, and known, from `low` to `high`, with the places around
        them: a number between two places is as far from both.
        """
        first = int(np.searchsorted(self.places, low, "right")) - 1
        last = int(np.searchsorted(self.places, high))
        is_known = first >= 0 and last < len(self.places)
        return is_known and bool(np.isfinite(self.results[first : last + 1]).all())


@dataclass(frozen=True, eq=False)
class Slopes:
    """A function that is straight on both sides of 0, with a slope of 1 above.

    Attributes:
        reader: Operator that computes it.
        slopes: Slope below 0 of each channel, (C,) float64.
    """

    reader: str
    slopes: NDArray[np.float64]

    def find_slopes(self, rows: FloatArray) -> NDArray[np.float64]:
        """Return the slope at each number of rows (n, C); 1 if they have other channels."""
        if rows.shape[1] != len(self.slopes):
            return np.ones(rows.shape)
        return np.where(rows < 0, self.slopes, 1.0)

    def __call__(
        self, rows: FloatArray, _order: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        return rows * self.find_slopes(rows)


def find_curves(prepared: PreparedModel) -> dict[str, ValueCurve | Slopes]:
    """Return the functions behind the values of groups, by key, where an operator on integers
    computes them and nothing else reads the value.
    """
    graph, found = Graph(prepared.mod), {}
    for operator in prepared.plan.operators:
        key = dict(operator.operands).get("data")
        if key is None or not operator.quantized:
            continue
        row = find_pattern(prepared.backend, operator.pattern)
        if not (isinstance(row.pattern, ChainPattern) or row.op in (PRELU, *TABLES)):
            continue
        match = match_operator(graph, prepared.backend, operator)
        if not is_only_reader(graph, match, prepared.plan.group(key)):
            continue
        if row.op == PRELU:
            slopes = constant_value(match.call(PRELU).args[1])
            if slopes is not None:
                found[key] = Slopes(operator.name, slopes.reshape(-1).astype("float64"))
        else:
            found[key] = tabulate(operator.name, make_function(match))
    return found


def is_only_reader(graph: Graph, match: Match, group: SharedQParams) -> bool:
    """Whether nothing but a match reads the only value of a group."""
    data = match.parts["data"]
    return (
        group.points == group.members == (data.name,)
        and data not in graph.outputs
        and all(user in match.vars for user in graph.users[data])
    )


def make_function(match: Match) -> Callable[[FloatArray], FloatArray]:
    """Return the function that a match of a table computes."""
    call = match.graph.values[match.root]
    if not match.inner and call.op.name in TABLES:
        return functools.partial(TABLES[call.op.name].tabulate, **read_attributes(call))
    return lambda values: evaluate_chain(match, values.astype("float32"))


def tabulate(reader: str, function: Callable[[FloatArray], FloatArray]) -> ValueCurve:
    """Tabulate a function, more finely the nearer to 0."""
    half = np.geomspace(LEAST, MOST, PLACES)
    places = np.concatenate([-half[::-1], [0.0], half])
    return ValueCurve(reader, places, np.asarray(function(places), "float64"))
