"""After the data flow: how far values are off, as a table of text and as pictures.

Pictures need matplotlib: `pip install relayquant[plot]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from relayquant.analysis import CompareReport
from relayquant.analysis.compare import CompareRow
from relayquant.analysis.sensitivity import take_samples
from relayquant.analysis.verify import expose_values
from relayquant.datasets import open_dataset
from relayquant.datasets.inputs import describe_inputs
from relayquant.eager import EagerModule
from relayquant.errors import ConfigError, MissingDependencyError, format_count
from relayquant.ops.find import match_operator, operand_constant
from relayquant.plan import GroupPlan
from relayquant.prepared import PreparedModel
from relayquant.report.text import new_table, stack
from relayquant.rewrite import Graph
from relayquant.storage.files import write_whole

#: below this SQNR a value is marked
LOW_SQNR = 15.0
#: columns of a terminal that all columns of a table have room in, beside names of some length
WIDE = 110
#: (head, whether it is left out on a narrow terminal, cell) of a table beside the value's name;
#: what is not known stays empty
COLUMNS: Sequence[tuple[str, bool, Callable[[CompareRow], str]]] = (
    ("op", True, lambda row: row.op.removeprefix("nn.")),
    ("SQNR [dB]", False, lambda row: f"{row.sqnr:.1f}"),
    ("alone [dB]", False, lambda row: "" if row.isolated is None else f"{row.isolated:.1f}"),
    ("cosine", True, lambda row: f"{row.cosine:.5f}"),
    ("max error", False, lambda row: f"{row.max_error:.4g}"),
    ("mean error", True, lambda row: f"{row.mean_error:.4g}"),
    ("saturated", False, lambda row: "" if row.saturated is None else f"{row.saturated:.2%}"),
)
#: elements of a value that its histogram is made of
SHOWN_ELEMENTS = 1 << 17
BINS = 120


def compare_table(report: CompareReport, title: str = "") -> Group:
    """One line for each value in topological order, and where it goes wrong.

    On a terminal of less than `WIDE` columns without the operators and the columns that say least.
    """
    lines = [
        Text(f"{format_count(len(report.rows), 'value')}, {format_count(report.samples, 'sample')}")
    ]
    first, worst = report.first_below(LOW_SQNR), report.worst
    if first is not None:
        lines.append(Text(f"first below {LOW_SQNR:g} dB: {first.name}", "yellow"))
    if worst is not None:
        lines.append(Text(f"most damage alone: {worst.name}, {worst.isolated:.1f} dB"))
    return stack(title, ValueTable(report.rows), *lines)


@dataclass(frozen=True)
class ValueTable:
    """The lines of a `compare_table`."""

    rows: Sequence[CompareRow]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= WIDE
        heads = [head for head, is_minor, _ in COLUMNS if is_wide or not is_minor]
        table = new_table()
        table.add_column("value", overflow="fold")
        for head in heads:
            # As Text: in a string, [dB] would be markup.
            table.add_column(Text(head), justify="left" if head == "op" else "right", no_wrap=True)
        for row in self.rows:
            style = "yellow" if row.sqnr < LOW_SQNR else ""
            cells = [cell(row) for _, is_minor, cell in COLUMNS if is_wide or not is_minor]
            table.add_row(*(Text(cell, style) for cell in (row.name, *cells)))
        yield table


def plot_compare(report: CompareReport, path: str | Path) -> None:
    """SQNR of every value along the depth of the model: accumulated, and of each operator alone.

    Args:
        report: What `relayquant.compare` gave.
        path: The picture; its ending says of what kind (.png, .svg, .pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the ending is of no kind that matplotlib writes, or there is nothing to draw.
    """
    if not report.rows:
        raise ConfigError("The CompareReport has no rows: there is nothing to draw.")
    figure = new_figure(max(6.0, 0.28 * len(report.rows) + 2), 4.5)
    axes = figure.add_subplot()
    places = np.arange(len(report.rows))
    accumulated = np.array([finite(row.sqnr) for row in report.rows])
    axes.plot(places, accumulated, "o-", markersize=4, label="accumulated")
    alone = [(i, finite(r.isolated)) for i, r in enumerate(report.rows) if r.isolated is not None]
    if alone:
        x, y = zip(*alone, strict=True)
        axes.plot(x, y, "^", markersize=5, label="each operator alone")
    axes.axhline(LOW_SQNR, linestyle=":", color="gray", label=f"{LOW_SQNR:g} dB: it goes wrong")
    axes.set_xticks(places, [shorten(row.name) for row in report.rows], rotation=90, fontsize=7)
    axes.set_ylabel("SQNR [dB]")
    axes.legend()
    save_figure(figure, path)


def plot_ranges(
    prepared: PreparedModel,
    dataset: Any,
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    samples: int = 32,
) -> None:
    """Histograms of weights and activations in float, with the range that calibration chose.

    Weights with a scale per channel are drawn in steps: each channel divided by its scale.

    Args:
        prepared: A calibrated model.
        dataset: As for `quantize`.
        path: The picture; its ending says of what kind.
        names: Keys of parameters (`prepared.plan.groups`); None: all of them, 40 at most.
        samples: Draw the first batches that hold so many samples.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the model is not calibrated, or a name is not known.
        DataError: the data does not fit the model.
    """
    found = collect_ranges(prepared, dataset, names=names, samples=samples)
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure = new_figure(3.4 * columns, 2.4 * rows)
    for i, drawn in enumerate(found, 1):
        axes = figure.add_subplot(rows, columns, i)
        axes.stairs(drawn.counts, drawn.edges, fill=True)
        axes.set_yscale("log")
        for bound in drawn.chosen:
            axes.axvline(bound, color="C1")
        axes.set_title(shorten(drawn.name), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlabel(f"{drawn.unit}, {drawn.outside:.2%} outside", fontsize=7)
    save_figure(figure, path)


@dataclass(frozen=True, eq=False)
class DrawnRange:
    """A histogram: counts (n,), edges (n + 1,), the chosen range, the share outside it."""

    name: str
    unit: str
    counts: np.ndarray
    edges: np.ndarray
    chosen: tuple[float, float]
    outside: float


def collect_ranges(
    prepared: PreparedModel,
    dataset: Any,
    *,
    names: Sequence[str] | None = None,
    samples: int = 32,
) -> list[DrawnRange]:
    """What `plot_ranges` draws; see there."""
    parameters = prepared.require_parameters()
    plan = prepared.plan
    groups = plan.groups[:40] if names is None else [plan.group(name) for name in names]
    if not groups:
        raise ConfigError("Nothing is quantized, or no names are given: there is nothing to draw.")
    values = collect_values(prepared, groups, dataset, samples)
    drawn = []
    for group in groups:
        qparams = parameters[group.key]
        low, high = (np.array(limit, "float64") for limit in group.info.spec.limits)
        zero_point, array, unit = qparams.zero_point, values[group.key], "steps"
        if qparams.scale.ndim and qparams.axis is not None:
            shape = [-1 if i == qparams.axis else 1 for i in range(array.ndim)]
            array = array / qparams.scale.reshape(shape)
            ends = float((low - zero_point).min()), float((high - zero_point).max())
        else:
            unit, scale = "value", float(qparams.scale.reshape(-1)[0])
            zero = float(zero_point.reshape(-1)[0])
            ends = float(low - zero) * scale, float(high - zero) * scale
        # Half a step further out still rounds to the end.
        slack = (ends[1] - ends[0]) / float(high - low) / 2
        outside = np.mean((array < ends[0] - slack) | (array > ends[1] + slack))
        counts, edges = np.histogram(array, BINS)
        drawn.append(DrawnRange(group.key, unit, counts, edges, ends, float(outside)))
    return drawn


def collect_values(
    prepared: PreparedModel, groups: Sequence[GroupPlan], dataset: Any, samples: int
) -> dict[str, np.ndarray]:
    """Group key -> the weight as it is, or some elements of its activations in float."""
    graph = Graph(prepared.mod)
    found: dict[str, list[np.ndarray]] = {group.key: [] for group in groups}
    points: dict[str, str] = {}  # value -> group
    for group in groups:
        if group.constant is not None:
            name, operand = group.constant
            match = match_operator(graph, prepared.backend, prepared.plan.operator(name))
            found[group.key].append(operand_constant(match, operand))
        else:
            points.update(dict.fromkeys(group.points or group.members[:1], group.key))
    if points:
        inputs = {param.name for param in graph.func.params}
        inner = [name for name in points if name not in inputs]
        module = EagerModule(expose_values(prepared.mod, inner))
        data = open_dataset(dataset, describe_inputs(prepared.mod))
        batches = list(take_samples(data, samples))
        kept = max(SHOWN_ELEMENTS // len(batches), 1)
        for batch in batches:
            results = dict(zip(inner, module.run("main", [*batch.values()]), strict=False))
            for name, key in points.items():
                flat = {**batch, **results}[name].reshape(-1)
                found[key].append(flat[:: -(-flat.size // kept)])
    return {k: a[0] if len(a) == 1 else np.concatenate(a) for k, a in found.items()}


def finite(decibels: float | None) -> float:
    """For the axis: infinity (no difference) is left out."""
    return float(decibels) if decibels is not None and np.isfinite(decibels) else float("nan")


def shorten(name: str, length: int = 40) -> str:
    """The end of a long name, which says most."""
    return name if len(name) <= length else "..." + name[3 - length :]


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches, independent of any display.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib, which is not installed: pip install relayquant[plot]."
        ) from error
    return Figure(figsize=(min(width, 200), min(height, 200)), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure.

    Raises:
        ConfigError: the ending is of no kind that matplotlib writes.
        FileError: it cannot be written.
    """
    check_picture(path)
    write_whole(Path(path), lambda temporary: figure.savefig(temporary, dpi=120))


def check_picture(path: str | Path) -> None:
    """Whether a picture can be written under this name: before there is anything to draw.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the ending is of no kind that matplotlib writes.
    """
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ConfigError(
            f"The picture {str(path)!r} has the ending {kind!r}; allowed: "
            f"{', '.join(sorted(kinds))}."
        )
