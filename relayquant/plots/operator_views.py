"""Float and integer module -> the measurements of each operator in a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.accumulators import AccumulatorReport
from relayquant.analysis.compare import CompareReport
from relayquant.analysis.sensitivity import SensitivityReport
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.ledger import Ledger, LedgerRow
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, free_vars
from relayquant.plots.report_data import DrawnHistogram, OperatorView, WeightRanges

#: elements in the histogram of a value, over all samples
SHOWN_ELEMENTS = 1 << 13
#: of the histogram of a value
BINS = 48
#: channels of a weight that are drawn separately; with more channels, neighbours are drawn as one
SHOWN_CHANNELS = 96


def view_operators(
    canonical: tvm.IRModule,
    quantized: tvm.IRModule,
    ledger: Ledger,
    compared: CompareReport,
    sampler: Sampler,
    sums: AccumulatorReport,
    ranking: SensitivityReport | None,
    times: Mapping[str, tuple[float, float | None]],
) -> tuple[OperatorView, ...]:
    """Collect the measurements of each operator, in the order of the ledger."""
    graph = Graph(canonical)
    scores = {row.name: row.score for row in ranking.rows} if ranking else {}
    errors = {row.name: row for row in compared.rows}
    sources = find_sources(graph, Graph(quantized), ledger.rows)
    return tuple(
        OperatorView(
            row,
            inputs,
            sum(map(count_macs, row_calls(graph, row))),
            errors.get(row.name),
            sampler.build_histogram(row),
            find_weight_ranges(graph, row),
            sums.row(row.name),
            scores.get(row.name),
            *times.get(row.name, (None, None)),
        )
        for row, inputs in zip(ledger.rows, sources, strict=True)
    )


class Sampler:
    """Keeps some elements of every value while `compare_modules` runs."""

    def __init__(self, batches: int) -> None:
        self.kept = max(SHOWN_ELEMENTS // max(batches, 1), 1)
        self.values: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(self, row: LedgerRow, expected: np.ndarray, real: np.ndarray) -> None:
        """Same interface as `relayquant.analysis.compare.Watch`."""
        # Drawn at random, because a fixed step could always hit the same channel.
        places = np.random.default_rng(0).integers(max(expected.size, 1), size=self.kept)
        places = slice(None) if expected.size <= self.kept else places
        pair = (a.reshape(-1)[places].astype("float32") for a in (expected, real))
        self.values.setdefault(row.name, []).append(tuple(pair))  # pyright: ignore[reportArgumentType]

    def build_histogram(self, row: LedgerRow) -> DrawnHistogram | None:
        """Build the histogram of a value. None if the value was not seen or has no finite
        element.
        """
        pairs = self.values.get(row.name)
        if not pairs:
            return None
        floating, integer = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        floating, integer = floating[np.isfinite(floating)], integer[np.isfinite(integer)]
        chosen = find_range(row)
        ends = [*(chosen or ()), *(f(a) for a in (floating, integer) if a.size for f in (min, max))]
        if not ends:
            return None
        low, high = float(min(ends)), float(max(ends))
        high = high if high > low else low + max(abs(low), 1.0) * 1e-3
        counts = (np.histogram(array, BINS, (low, high))[0] for array in (floating, integer))
        return DrawnHistogram(low, high, *counts, chosen)


def find_range(row: LedgerRow) -> tuple[float, float] | None:
    """Return the range that the result of an operator can represent, in the units of the float
    model.
    """
    if not row.scale or row.dtype not in INTEGER_LIMITS:
        return None
    low, high = ((q - row.zero_point[0]) * row.scale[0] for q in INTEGER_LIMITS[row.dtype])
    return float(low), float(high)


def find_sources(
    graph: Graph, integers: Graph, rows: Sequence[LedgerRow]
) -> list[tuple[int | str, ...]]:
    """Map each row to the positions of the rows that its values read, or to names of inputs.

    An operator that quantization inserted after an input exists only in the integer module. It is
    placed between the input and its readers.
    """
    owner = {name: i for i, row in enumerate(rows) for name in (*row.values, row.name)}
    params = {param.name for param in graph.func.params}
    found: dict[str, tuple[int | str, ...]] = {}  # value -> its source
    for binding in graph.bindings:
        name, names = binding.var.name, [var.name for var in free_vars(binding.value)]
        read = dict.fromkeys(source for one in names for source in found.get(one, (one,)))
        found[name] = (owner[name],) if name in owner else tuple(read)
    result: list[tuple[int | str, ...]] = []
    behind: dict[int | str, int] = {}  # input -> the row that was inserted after it
    for i, row in enumerate(rows):
        names = row_names(graph, row)
        inside = [graph.values[graph.vars[n]] for n in names if graph.vars[n] in graph.values]
        if not names and row.name in integers.vars:
            value = integers.values.get(integers.vars[row.name])
            inside = [] if value is None else [value]
            behind.update((v.name, i) for one in inside for v in free_vars(one))
        read = (var.name for value in inside for var in free_vars(value))
        sources = (source for name in read for source in found.get(name, (name,)))
        known = (s for s in sources if s != i and (isinstance(s, int) or s in params))
        result.append(tuple(dict.fromkeys(known)))
    return [
        tuple(source if behind.get(source, i) == i else behind[source] for source in sources)
        for i, sources in enumerate(result)
    ]


def row_names(graph: Graph, row: LedgerRow) -> list[str]:
    """Names of the float model's values inside an operator, each once."""
    return [name for name in dict.fromkeys((*row.values, row.name)) if name in graph.vars]


def row_calls(graph: Graph, row: LedgerRow) -> Iterable[Any]:
    """Calls of the float model inside an operator."""
    calls = (graph.call_of(graph.vars[name]) for name in row_names(graph, row))
    return [call for call in calls if call is not None]


def find_weight_ranges(graph: Graph, row: LedgerRow) -> WeightRanges | None:
    """Return the weight ranges of the constant that a convolution or product reads. None
    without one.
    """
    for call in row_calls(graph, row):
        weight = constant_value(call.args[1]) if count_macs(call) and len(call.args) > 1 else None
        if weight is None or not weight.size:
            continue
        layout = str(getattr(call.attrs, "kernel_layout", "")) if call.attrs else ""
        axis = layout.index("O") if "O" in layout else -1
        channels = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype("float32")
        parts = np.array_split(channels, min(len(channels), SHOWN_CHANNELS))
        lowest, highest = (np.array([f(part) for part in parts]) for f in (np.min, np.max))
        return WeightRanges(len(channels), lowest, highest)
    return None
