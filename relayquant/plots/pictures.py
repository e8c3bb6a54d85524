"""Measurements -> plots.

Plots need matplotlib: `pip install relayquant[plot]`. Each function returns a figure, which a
notebook shows. With `path`, it also writes the figure to a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.analysis.compare import CompareReport
from relayquant.analysis.sensitivity import SensitivityReport
from relayquant.analysis.speed.latency import Latency
from relayquant.base.arguments import check_arguments
from relayquant.base.axes import shape_along
from relayquant.base.optional import needed
from relayquant.base.storage.files import write_whole
from relayquant.codegen.eager import EagerModule
from relayquant.data import open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.ir.ops.find import match_operator, operand_constant
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.plots.text import LOW_SQNR
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.streams import follow_state

#: elements in the histogram of a value
SHOWN_ELEMENTS = 1 << 17
BINS = 120
#: operators whose names fit below an axis
NAMED = 60
#: text and axes, and lines; the page of a report replaces these colours with its theme
INK, SERIES, OTHER_SERIES, FAINT = "#1b1b1f", "#2a6fb1", "#c2570c", "#8a8a93"
STYLE: Mapping[str, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "relayquant",  # equal figures are equal bytes
    "text.color": INK,
    # A name in a model may contain dollar signs, which matplotlib would treat as mathematics.
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}

Figure = Any  #: a matplotlib.figure.Figure, imported only when needed


@check_arguments
def plot_error_by_depth(report: CompareReport, path: str | Path | None = None) -> Figure:
    """Plot the SQNR of every value along the depth of the model: accumulated, and of each operator
    alone.

    Args:
        report: The result of `relayquant.compare`.
        path: The file to write, if any. Its ending selects the format (.png, .svg, .pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: matplotlib does not write files of this ending, or there is nothing to draw.
    """
    if not report.rows:
        raise ConfigError("The CompareReport has no rows: there is nothing to draw.", code="RQ101")
    with drawing():
        count = len(report.rows)
        width = 0.28 * count + 2 if count <= NAMED else 12
        figure = new_figure(max(6.0, width), 4.5)
        axes = figure.add_subplot()
        places = np.arange(count)
        accumulated = np.array([finite(row.sqnr) for row in report.rows])
        axes.plot(places, accumulated, "o-", color=SERIES, markersize=3, label="accumulated")
        alone = [
            (i, finite(r.isolated)) for i, r in enumerate(report.rows) if r.isolated is not None
        ]
        if alone:
            x, y = zip(*alone, strict=True)
            axes.plot(x, y, "^", color=OTHER_SERIES, markersize=4, label="each operator alone")
        wrong = f"{LOW_SQNR:g} dB: it goes wrong"
        axes.axhline(LOW_SQNR, linestyle=":", color=FAINT, label=wrong)
        if count <= NAMED:
            names = [shorten(row.name) for row in report.rows]
            axes.set_xticks(places, names, rotation=90, fontsize=7)
        else:
            axes.set_xlabel("operator, in the order of the model")
        axes.set_ylabel("SQNR [dB]")
        place_legend(figure)
        save_figure(figure, path)
    return figure


@check_arguments
def plot_sensitivity(
    report: SensitivityReport, path: str | Path | None = None, *, rows: int = 30
) -> Figure:
    """Plot the accuracy that each operator costs when only it is quantized, the most sensitive on
    top.

    Args:
        report: The result of `relayquant.sensitivity`.
        path: As for `plot_error_by_depth`.
        rows: Maximum number of operators, >= 1.

    Raises:
        MissingDependencyError, ConfigError: as for `plot_error_by_depth`; or `rows` < 1.
    """
    if rows < 1:
        raise ConfigError(f"plot_sensitivity: rows is {rows}; allowed: 1 or more.", code="RQ101")
    if not report.rows:
        raise ConfigError(
            "The SensitivityReport has no rows: there is nothing to draw.", code="RQ101"
        )
    with drawing():
        shown = report.rows[:rows]
        figure = new_figure(7, 0.22 * len(shown) + 1.2)
        axes = figure.add_subplot()
        places = np.arange(len(shown))
        axes.plot([finite(row.score) for row in shown], places, "o", color=SERIES)
        if np.isfinite(report.score):
            axes.axvline(report.score, color=OTHER_SERIES, label=f"all {len(report.rows)} of them")
            place_legend(figure)
        axes.set_yticks(places, [shorten(row.name) for row in shown], fontsize=7)
        axes.invert_yaxis()
        axes.grid(axis="y", color=FAINT, alpha=0.3)
        axes.set_xlabel(f"{report.metric}, quantized alone")
        save_figure(figure, path)
    return figure


@check_arguments
def plot_latency(latencies: Mapping[str, Latency], path: str | Path | None = None) -> Figure:
    """Plot the best and the median time of each candidate.

    Args:
        latencies: Name -> time, the result of `relayquant.analysis.measure_latency`.
        path: As for `plot_error_by_depth`.

    Raises:
        MissingDependencyError, ConfigError: as for `plot_error_by_depth`.
    """
    if not latencies:
        raise ConfigError("There are no latencies: there is nothing to draw.", code="RQ101")
    with drawing():
        figure = new_figure(7, 0.5 * len(latencies) + 1.2)
        axes = figure.add_subplot()
        places = np.arange(len(latencies))
        best = [row.best * 1e3 for row in latencies.values()]
        axes.barh(places, best, 0.6, color=SERIES, label="best")
        medians = [row.median * 1e3 for row in latencies.values()]
        axes.plot(medians, places, "|", color=OTHER_SERIES, markersize=16, label="median")
        for place, low, middle in zip(places, best, medians, strict=True):
            text = f"  {low:.3g}, {middle:.3g}"
            axes.text(max(low, middle), place, text, va="center", fontsize=8)
        axes.margins(x=0.25)
        axes.set_yticks(places, list(latencies), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        place_legend(figure)
        save_figure(figure, path)
    return figure


@check_arguments
def plot_ranges(
    prepared: PreparedModel,
    dataset: Any,
    path: str | Path | None = None,
    *,
    names: Sequence[str] | None = None,
    samples: int = 32,
) -> Figure:
    """Plot histograms of weights and float activations with the range that calibration chose.

    Per-channel weights are drawn in steps: each channel is divided by its scale.

    Args:
        prepared: A calibrated model.
        dataset: As for `quantize`.
        path: As for `plot_error_by_depth`.
        names: Keys of parameters (`prepared.plan.groups`). None: all of them, at most 40.
        samples: Draw the first batches with at least this number of samples.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the model is not calibrated, or a name is not known.
        DataError: the data does not fit the model.
    """
    return draw_ranges(collect_ranges(prepared, dataset, names=names, samples=samples), path)


def draw_ranges(found: Sequence[DrawnRange], path: str | Path | None = None) -> Figure:
    """Draw the figure of `plot_ranges`."""
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    with drawing():
        figure = new_figure(3.4 * columns, 2.4 * rows)
        for i, drawn in enumerate(found, 1):
            axes = figure.add_subplot(rows, columns, i)
            axes.stairs(drawn.counts, drawn.edges, fill=True, color=SERIES)
            axes.set_yscale("log")
            for bound in drawn.chosen:
                axes.axvline(bound, color=OTHER_SERIES)
            axes.set_title(shorten(drawn.name), fontsize=8)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(f"{drawn.unit}, {drawn.outside:.2%} outside", fontsize=7)
        save_figure(figure, path)
    return figure


@dataclass(frozen=True, eq=False)
class DrawnRange:
    """A histogram: counts (n,), edges (n + 1,), the chosen range, and the share of elements
    outside it.
    """

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
    """Collect the histograms of `plot_ranges`. See there."""
    parameters = prepared.require_parameters()
    plan = prepared.plan
    groups = plan.groups[:40] if names is None else [plan.group(name) for name in names]
    if not groups:
        raise ConfigError(
            "Nothing is quantized, or no names are given: there is nothing to draw.", code="RQ101"
        )
    values = collect_values(prepared, groups, dataset, samples)
    drawn = []
    for group in groups:
        qparams = parameters[group.key]
        low, high = (np.array(limit, "float64") for limit in group.info.spec.limits)
        zero_point, array, unit = qparams.zero_point, values[group.key], "steps"
        if qparams.scale.ndim and qparams.axis is not None:
            shape = shape_along(qparams.axis, array.ndim)
            array = array / qparams.scale.reshape(shape)
            ends = float((low - zero_point).min()), float((high - zero_point).max())
        else:
            unit, scale = "value", float(qparams.scale.reshape(-1)[0])
            zero = float(zero_point.reshape(-1)[0])
            ends = float(low - zero) * scale, float(high - zero) * scale
        # Half a step beyond the end still rounds to the end.
        slack = (ends[1] - ends[0]) / float(high - low) / 2
        outside = np.mean((array < ends[0] - slack) | (array > ends[1] + slack))
        counts, edges = np.histogram(array, BINS)
        drawn.append(DrawnRange(group.key, unit, counts, edges, ends, float(outside)))
    return drawn


def collect_values(
    prepared: PreparedModel, groups: Sequence[SharedQParams], dataset: Any, samples: int
) -> dict[str, np.ndarray]:
    """Map each group key to the weight, or to some elements of its float activations."""
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
        data = open_dataset(follow_state(prepared.mod, dataset), describe_inputs(prepared.mod))
        batches = list(take_samples(data, samples))
        kept = max(SHOWN_ELEMENTS // len(batches), 1)
        for batch in batches:
            results = dict(zip(inner, module.run("main", [*batch.values()]), strict=False))
            for name, key in points.items():
                flat = {**batch, **results}[name].reshape(-1)
                found[key].append(flat[:: -(-flat.size // kept)])
    return {k: a[0] if len(a) == 1 else np.concatenate(a) for k, a in found.items()}


def place_legend(figure: Figure) -> None:
    """Place the legend above the axes, where it covers nothing."""
    figure.legend(loc="outside upper left", ncols=3, fontsize=8)


def finite(decibels: float | None) -> float:
    """Leave out infinity (no difference), for the axis."""
    return float(decibels) if decibels is not None and np.isfinite(decibels) else float("nan")


def shorten(name: str) -> str:
    """Shorten a name of over 40 characters to its end, which is the most specific part."""
    return name if len(name) <= 40 else "..." + name[-37:]


@contextmanager
def drawing() -> Iterator[None]:
    """Use this package's style for figures made inside, whatever the user's style is.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with needed("Plots need matplotlib, which is not installed", "relayquant[plot]"):
        from matplotlib import rc_context
    with rc_context(dict(STYLE)):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of this size in inches, independent of any display. Use it inside `drawing`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(min(width, 200), min(height, 200)), layout="constrained")


def save_figure(figure: Figure, path: str | Path | None) -> None:
    """Write a figure to `path`, if there is one.

    Raises:
        ConfigError: matplotlib does not write files of this ending.
        FileError: it cannot be written.
    """
    if path is None:
        return
    kind = check_picture(path)
    write_whole(Path(path), lambda temporary: figure.savefig(temporary, format=kind, dpi=120))


def check_picture(path: str | Path) -> str:
    """Return the format that this file name selects, before anything is drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: matplotlib does not write files of this ending.
    """
    with drawing():
        kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ConfigError(
            f"The picture {str(path)!r} has the ending {kind!r}; allowed: "
            f"{', '.join(sorted(kinds))}.",
            code="RQ101",
        )
    return kind
