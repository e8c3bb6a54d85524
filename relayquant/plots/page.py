"""The data of a report -> one HTML file that needs nothing else.

The page is `page/report.html.jinja` with its style and its script. Charts of the whole model are
lists whose marks have their place from CSS, so that they fit any width and are printed. The page's
script sorts them, and draws plots of one operator from its numbers. Names in models may hold
anything: Jinja2 escapes every text, and the script inserts text only as text.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module, resources
from typing import Any

import numpy as np

from relayquant.base.optional import needed
from relayquant.config import OverflowBound
from relayquant.errors import format_count
from relayquant.ir.agreement import MOST_DECIBELS, describe_sqnr
from relayquant.ir.ledger import Ledger
from relayquant.plots.layout import HEIGHT, WIDTH, lay_out
from relayquant.plots.report_data import OperatorView, OtherView, ReportData
from relayquant.plots.terminal_table import shorten_middle
from relayquant.plots.text import LOW_SQNR, list_findings
from relayquant.plots.verdict import Grade, Verdict

#: module -> its package
NEEDED = {"jinja2": "Jinja2", "grandalf": "grandalf"}
#: dB: a box gets the colour of the first bound above its value
ERROR_BOUNDS = (10.0, 15.0, 20.0, 30.0)
#: share of the run time: a box gets the colour of the first bound below its operator's share
TIME_BOUNDS = (0.10, 0.05, 0.02, 0.005)
#: dB between two ticks of the chart of errors, and the most parts that its axis has
TICK, MOST_TICKS = 10, 7
#: letters of a name beside the chart, two lines of them
CHART_LETTERS = 72
#: letters of a name that fit into a box
BOX_LETTERS = 24


def render_report(data: ReportData) -> str:
    """Render the page.

    Raises:
        MissingDependencyError: Jinja2 or grandalf is not installed.
    """
    check_installed()
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "decimal": show_number,
        "percent": show_share,
        "size": show_bytes,
        "count": format_count,
        "sqnr": describe_sqnr,
    }
    template = environment.from_string(read_page("report.html.jinja"))
    suggestion = data.suggestion
    return template.render(
        data=data,
        rows=[describe_operator(view) for view in data.operators],
        verdict=Verdict.of(data),
        notes=list_findings(data.ledger),
        graph=describe_graph(data),
        chart=chart_errors(data),
        samples=[(view, [encode_image(image) for image in view.images]) for view in data.samples],
        patch=json.dumps(suggestion.mapping, indent=1) if suggestion else "",
        differences=compare_configurations(data, data.other) if data.other else [],
        style=mark_safe(read_page("report.css")),
        script=mark_safe(read_page("report.js")),
        error_bounds=ERROR_BOUNDS,
        time_bounds=TIME_BOUNDS,
    )


def check_installed() -> None:
    """Check that everything that a report needs is installed, before anything takes time.

    Raises:
        MissingDependencyError: Jinja2 or grandalf is not installed.
    """
    for module, package in NEEDED.items():
        with needed(f"A report needs {package}, which is not installed", "relayquant[report]"):
            import_module(module)


def read_page(name: str) -> str:
    """Read a file of the page. It is part of the package."""
    return resources.files("relayquant.plots").joinpath("page", name).read_text("utf-8")


def mark_safe(text: str) -> Any:
    """Mark our own text so that Jinja2 does not escape it."""
    from markupsafe import Markup

    return Markup(text)


# --- Numbers ------------------------------------------------------------------------------------


def show_number(value: float | None) -> str:
    """Format a number for people: "" for None, and infinity as a word."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "exact" if value > 0 else "lost"
    return f"{value:.1f}"


def show_share(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}%}"


def show_bytes(count: int) -> str:
    """Format bytes with decimal units."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # pyright: ignore[reportAssignmentType]
    return f"{count:.3g} GB"


def round_number(value: float | None) -> float | str | None:
    """Round to four significant digits for JSON, which has no infinity."""
    if value is None or math.isnan(value):
        return None
    return show_number(value) if math.isinf(value) else float(f"{value:.4g}")


def find_headroom(view: OperatorView, bound: OverflowBound) -> float | None:
    """Return the bits that the largest sum leaves free in its accumulator. Below 0 if it does
    not fit.
    """
    excess = view.sums.excess(bound) if view.sums is not None else np.zeros(0)
    largest = float(excess.max(initial=0.0))
    return -math.log2(largest) if largest > 0 else None


def describe_operator(view: OperatorView) -> dict[str, Any]:
    """Return what the page shows of one operator, as JSON. Unknown values are left out."""
    row, error = view.row, view.error
    histogram, weights = view.histogram, view.weights
    fields: dict[str, Any] = {
        "name": row.name,
        "op": row.op,
        "quantized": row.quantized,
        "dtype": row.dtype,
        "pattern": row.pattern,
        "scheme": row.scheme,
        "scale": round_number(row.scale[0]) if row.scale else None,
        "zero_point": row.zero_point[0] if row.zero_point else None,
        "parameters": len(row.scale) if len(row.scale) > 1 else None,
        "observer": row.observer,
        "rule": row.rule,
        "accumulator": row.accumulator,
        "reason": row.reason,
        "advice": row.advice,
        "passed_over": [str(passed) for passed in row.passed_over],
        "sources": list(row.sources[:8]),
        "values": list(row.values[:8]) if len(row.values) > 1 else [],
        "macs": view.macs,
        "sqnr": round_number(error.sqnr) if error else None,
        "alone": round_number(error.isolated) if error else None,
        "cosine": round_number(error.cosine) if error else None,
        "max_error": round_number(error.max_error) if error else None,
        "saturated": round_number(error.saturated) if error else None,
        "score": round_number(view.score),
        "us": round_number(None if view.seconds is None else view.seconds * 1e6),
        "peak": round_number(view.peak),
        "headroom": round_number(find_headroom(view, OverflowBound.OBSERVED)),
        "worst_headroom": round_number(find_headroom(view, OverflowBound.WORST_CASE)),
        "overflows": sum(view.sums.overflows) if view.sums is not None else None,
    }
    if histogram is not None:
        fields["histogram"] = {
            "low": round_number(histogram.low),
            "high": round_number(histogram.high),
            "floating": histogram.floating.tolist(),
            "integer": histogram.integer.tolist(),
            "chosen": list(map(round_number, histogram.chosen or ())),
        }
    if weights is not None:
        fields["weights"] = {
            "channels": weights.channels,
            "lowest": [round_number(float(value)) for value in weights.lowest],
            "highest": [round_number(float(value)) for value in weights.highest],
        }
    return {key: value for key, value in fields.items() if value not in (None, "", [])}


def compare_configurations(data: ReportData, other: OtherView) -> list[dict[str, Any]]:
    """Return a line for each operator that differs between both, the largest difference of SQNR
    first.
    """
    first = {row.name: row.sqnr for row in data.compare.rows}
    second = {row.name: row.sqnr for row in other.compare.rows}
    rows = []
    for view in data.operators:
        name = view.row.name
        sqnr = first.get(name, math.nan), second.get(name, math.nan)
        difference = sqnr[1] - sqnr[0] if all(map(math.isfinite, sqnr)) else math.nan
        how = describe_how(data.ledger, name), describe_how(other.ledger, name)
        if how[0] != how[1] or abs(difference) >= 0.05:
            rows.append({"name": name, "how": how, "sqnr": sqnr, "difference": difference})
    return sorted(rows, key=lambda row: -np.nan_to_num(abs(row["difference"])))


def describe_how(ledger: Ledger, name: str) -> str:
    row = ledger.row(name)
    if row is None:
        return "absent"
    return row.dtype if row.quantized else f"float: {row.reason}" if row.reason else "float"


# --- The graph ----------------------------------------------------------------------------------


def describe_graph(data: ReportData) -> dict[str, Any]:
    """Return boxes of operators and inputs, lines between them, and the size of the drawing."""
    names = [source for view in data.operators for source in view.inputs if isinstance(source, str)]
    inputs = list(dict.fromkeys(names))
    places = {name: len(data.operators) + i for i, name in enumerate(inputs)}
    edges = list(
        dict.fromkeys(
            (places[source] if isinstance(source, str) else source, i)
            for i, view in enumerate(data.operators)
            for source in view.inputs
        )
    )
    layout = lay_out(len(data.operators) + len(inputs), edges)
    total = sum(view.seconds or 0.0 for view in data.operators)
    boxes = []
    for i, (x, y) in enumerate(layout.boxes):
        place = {"x": round(x - WIDTH / 2), "y": round(y - HEIGHT / 2)}
        if i >= len(data.operators):
            name = inputs[i - len(data.operators)]
            label = shorten_middle(name, BOX_LETTERS)
            boxes.append(place | {"index": None, "name": name, "label": label})
            continue
        view = data.operators[i]
        boxes.append(
            place
            | {
                "index": i,
                "name": view.row.name,
                "label": shorten_middle(view.row.name, BOX_LETTERS),
                "op": view.row.op.removeprefix("nn."),
                "dtype": view.row.dtype or "other",
                "kind": find_kind(view),
                "sqnr": "" if view.error is None else f"{show_number(view.error.sqnr)} dB",
                "error": grade_error(view),
                "us": "" if view.seconds is None else f"{view.seconds * 1e6:.0f} us",
                "time": grade_time(view, total),
            }
        )
    lines = [" ".join(f"{x:.0f},{y:.0f}" for x, y in line) for line in layout.lines]
    return {
        "boxes": boxes,
        "lines": lines,
        "width": math.ceil(layout.width),
        "height": math.ceil(layout.height),
        "box": (WIDTH, HEIGHT),
    }


def find_kind(view: OperatorView) -> str:
    """Return the kind of an operator's numbers: "int8" up to 8 bits, "wide" for other integers,
    "float".
    """
    if not view.row.quantized:
        return "float"
    return "int8" if view.row.dtype in ("int8", "uint8", "int4", "uint4") else "wide"


def grade_error(view: OperatorView) -> int | str:
    """Return the number of the first bound above the SQNR, or "none" if it was not measured."""
    if view.error is None:
        return "none"
    grades = (i for i, bound in enumerate(ERROR_BOUNDS) if view.error.sqnr < bound)
    return next(grades, len(ERROR_BOUNDS))


def grade_time(view: OperatorView, total: float) -> int | str:
    """Return the number of the first bound below the share of the time."""
    if view.seconds is None or not total:
        return "none"
    grades = (i for i, bound in enumerate(TIME_BOUNDS) if view.seconds / total > bound)
    return next(grades, len(TIME_BOUNDS))


# --- Charts and pictures ------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorChart:
    """A chart with a row for each operator.

    Attributes:
        ticks: Numbers on the axis, dB.
        rows: In the order of the ledger.
        low: The place of `LOW_SQNR`, in percent of the width. None if it is outside.
    """

    ticks: tuple[int, ...]
    rows: tuple[ChartRow, ...]
    low: float | None

    def place(self, decibels: float) -> float:
        """Return the place of a number, in percent of the width."""
        first, last = self.ticks[0], self.ticks[-1]
        return round(100 * (decibels - first) / (last - first), 2)


@dataclass(frozen=True)
class ChartRow:
    """One operator: its position in the ledger, its name if that is short, (kind, place in
    percent) of each mark, and what sorts it by damage.
    """

    index: int
    label: str
    marks: tuple[tuple[str, float], ...]
    damage: float


def chart_errors(data: ReportData) -> ErrorChart | None:
    """Lay out the chart of errors. None if nothing has a finite error."""
    measured = [list_errors(view) for view in data.operators]
    values = [value for row in measured for value in row.values() if math.isfinite(value)]
    if not values:
        return None
    first = TICK * math.floor(min(*values, LOW_SQNR) / TICK)
    last = max(TICK * math.ceil(max(values) / TICK), first + TICK)
    step = TICK * max(1, -(-(last - first) // (MOST_TICKS * TICK)))
    last = first + step * -(-(last - first) // step)
    # Operators without this measure come last.
    sorted_by = "outputs" if any("outputs" in errors for errors in measured) else "alone"
    chart = ErrorChart(tuple(range(first, last + 1, step)), (), None)
    rows = []
    for index, (view, errors) in enumerate(zip(data.operators, measured, strict=True)):
        marks = [(k, chart.place(v)) for k, v in errors.items() if math.isfinite(v)]
        if errors:
            label = shorten_middle(view.row.name, CHART_LETTERS)
            rows.append(
                ChartRow(
                    index,
                    label,
                    tuple(marks),
                    min(errors.get(sorted_by, MOST_DECIBELS), MOST_DECIBELS),
                )
            )
    return replace(chart, rows=tuple(rows), low=chart.place(LOW_SQNR))


def list_errors(view: OperatorView) -> dict[str, float]:
    """Return kind -> dB of the measured errors of an operator."""
    error = view.error
    found = {
        "value": None if error is None else error.sqnr,
        "alone": None if error is None else error.isolated,
        "outputs": view.score,
    }
    return {kind: value for kind, value in found.items() if value is not None}


def encode_image(image: np.ndarray) -> str:
    """Encode an (H, W, 3) uint8 image as a data URL of a PNG (ISO/IEC 15948)."""
    height, width, _ = image.shape
    lines = np.ascontiguousarray(image).reshape(height, -1)
    # Each line begins with its filter, 0: none.
    raw = np.concatenate([np.zeros((height, 1), "uint8"), lines], axis=1).tobytes()
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(raw, 9),
        b"IEND": b"",
    }
    file = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks.items():
        check = zlib.crc32(kind + body)
        file += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def frame_page(page: str) -> str:
    """Frame a page for a notebook, so that neither can access the other."""
    return (
        '<iframe title="relayquant report" sandbox="allow-scripts" '
        f'style="width:100%;height:46rem;border:0" srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def describe_report(data: ReportData) -> Mapping[str, str]:
    """Summarize a report in words, for a terminal."""
    verdict, agreement = Verdict.of(data), data.compare.agreement
    lines = {
        "verdict": verdict.grade.value,
        "outputs": "; ".join(filter(None, [str(agreement), data.compare.weak_part])),
        **{f"{what} on integers": show_share(share) for what, share in data.shares.items()},
        "size": "{} in float, {} now".format(*map(show_bytes, data.sizes)),
    }
    if data.score is not None:
        score = data.score
        samples = format_count(score.samples, "sample")
        lines[score.name] = f"{score.floating:.4g} in float, {score.integer:.4g} now, on {samples}"
    if data.latencies:
        times = {name: f"{row.best * 1e3:.3g} ms" for name, row in data.latencies.items()}
        lines["time"] = ", ".join(f"{name} {time}" for name, time in times.items())
    if data.suggestion is not None:
        lines["suggestion"] = f"keep {', '.join(data.suggestion.names)} in float"
    bad = [seen.text for seen in verdict.observations if seen.grade is not Grade.GOOD]
    lines |= {"because": " ".join(bad)} if bad else {}
    lines["next"] = " && ".join(verdict.commands)
    return lines
