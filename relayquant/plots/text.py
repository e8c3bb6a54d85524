"""Ledger, findings, sensitivity and errors of values -> tables of text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from relayquant.analysis.compare import CompareReport, CompareRow
from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.sensitivity import SensitivityReport
from relayquant.errors import format_count
from relayquant.ir.ledger import Ledger
from relayquant.plots.terminal_table import Column, Fit, FittedTable

#: Wide enough that no line of a file or a pipe is ever folded.
PLAIN_WIDTH = 10_000


class PlainConsole(Console):
    """A console that lets callers handle a closed pipe. rich would end the process with its own
    exit code.
    """

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that this is called for


def make_console(file: TextIO | None = None) -> Console:
    """Return a console on `file` (default: standard output).

    A terminal gets colours and its own width. Anything else gets plain lines that are never folded,
    so that `grep` and `cut` see whole rows.
    """
    file = sys.stdout if file is None else file
    console = PlainConsole(file=file, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return PlainConsole(
        file=file, width=PLAIN_WIDTH, highlight=False, markup=False, emoji=False, color_system=None
    )


def list_findings(ledger: Ledger) -> list[str]:
    """Return lines on the calibration data, and on findings of the guard and the searches."""
    lines = [f"{what} ({ledger.effort}): {choice}" for what, choice in ledger.choices.items()]
    results = (ledger.guard, ledger.search, ledger.speed)
    return lines + [str(seen) for seen in results if seen is not None]


def ledger_table(
    rows: Sequence[Mapping[str, Any]], title: str = "", *, show_all: bool = True
) -> Group:
    """Return a line that counts what is quantized, and a table of ledger rows.

    Args:
        rows: dicts with `name, op, quantized, pattern, dtype, reason, advice`, as in
            `relayquant.ledger(qmod).to_dict()["operators"]`. A key that is missing or None leaves
            its cell empty.
        title: A line above the table.
        show_all: Whether to list every operator. Otherwise only operators in float.
    """
    quantized = sum(bool(row.get("quantized")) for row in rows)
    text = f"{quantized} of {format_count(len(rows), 'operator')} quantized"
    if not show_all:
        rows = [row for row in rows if not row.get("quantized")]
        text += "; in float are:" if rows else ""
    answers = ["yes" if row.get("quantized") else "no" for row in rows] if show_all else []
    columns = [
        Column("operator", [_text(row, "name") for row in rows], Fit.NAME),
        Column("op", [_text(row, "op").removeprefix("relax.") for row in rows]),
        Column("quantized", answers),
        Column("pattern", [_text(row, "pattern") for row in rows], is_minor=True),
        Column("dtype", [_text(row, "dtype") for row in rows], is_minor=True),
        Column("scheme", [_text(row, "scheme") for row in rows], is_minor=True),
        Column("scale", [_parameter(row, "scale") for row in rows], is_minor=True),
        Column("zero point", [_parameter(row, "zero_point") for row in rows], is_minor=True),
        Column("parameters", ["run time" * bool(r.get("is_dynamic")) for r in rows], is_minor=True),
        Column("rule", [_text(row, "rule") for row in rows], is_minor=True),
        Column("reason", [_text(row, "reason") for row in rows]),
        Column("what to do", [_text(row, "advice") for row in rows]),
        Column("passed over", [_list_passed_over(row) for row in rows]),
    ]
    styles = ["" if row.get("quantized") else "yellow" for row in rows]
    return stack(title, Text(text), *([FittedTable(columns, styles)] if rows else []))


def summary_table(values: Mapping[str, Any], title: str = "") -> Group:
    """Return a table of names and values in two columns. Floats have four significant digits."""
    shown = [
        f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values()
    ]
    columns = [Column("name", [*values], Fit.NAME), Column("value", shown)]
    return stack(title, *([FittedTable(columns, has_head=False)] if values else []))


def stack(title: str, *parts: RenderableType) -> Group:
    # A title or caption of the table itself would be folded to the table's width.
    return Group(*([Text(title, "bold")] if title else []), *parts)


def _parameter(row: Mapping[str, Any], key: str) -> str:
    """Describe the parameter of a result. With several, the first one and their number."""
    values = row.get(key) or ()
    if not values:
        return ""
    return f"{values[0]:.4g}" + (f" (1 of {len(values)})" if len(values) > 1 else "")


def _list_passed_over(row: Mapping[str, Any]) -> str:
    """List the user's rows that matched but did not take the operator, and why."""
    return "; ".join(
        f"{each['pattern']}: {each['reason']}" for each in row.get("passed_over") or ()
    )


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value)


def findings_table(findings: Sequence[Finding], title: str = "") -> Group:
    """Return a line that counts the findings, and one line for each."""
    columns = [
        Column("severity", [f.severity.value for f in findings], is_minor=True),
        Column("check", [finding.check for finding in findings]),
        Column("input", [f.where for f in findings], Fit.NAME, is_minor=True),
        Column("what", [finding.what for finding in findings]),
        Column("what to do", [finding.advice for finding in findings]),
    ]
    styles = ["" if f.severity is Severity.INFO else "yellow" for f in findings]
    counts = [(kind, sum(f.severity is kind for f in findings)) for kind in Severity]
    text = ", ".join(f"{count} {kind.value}" for kind, count in counts if count)
    table = [FittedTable(columns, styles)] if findings else []
    return stack(title, Text(text or "nothing looks wrong"), *table)


def sensitivity_table(report: SensitivityReport, title: str = "", rows: int | None = None) -> Group:
    """Return one line for each operator, the most sensitive first; at most `rows`."""
    shown = report.rows[:rows]
    columns = [
        Column("operator", [row.name for row in shown], Fit.NAME),
        Column("op", [row.op.removeprefix("nn.") for row in shown], is_minor=True),
        Column(report.metric, [f"{row.score:.4g}" for row in shown], Fit.NUMBER),
    ]
    first = Text(report.describe_all())
    left = len(report.rows) - len(shown)
    more = [Text(f"not shown: {format_count(left, 'operator')} that cost less")] if left else []
    return stack(title, first, *([FittedTable(columns)] if shown else []), *more)


#: a value below this SQNR is marked
LOW_SQNR = 15.0


def compare_table(report: CompareReport, title: str = "", *, show_all: bool = True) -> Group:
    """Return a summary of the errors, and one line for each value in topological order.

    Args:
        report: The comparison.
        title: A line above the table.
        show_all: Whether to list values with a small error too.
    """
    lines = [
        Text(f"{format_count(len(report.rows), 'value')}, {format_count(report.samples, 'sample')}")
    ]
    first, worst = report.first_below(LOW_SQNR), report.worst
    if first is not None:
        lines.append(Text(f"first below {LOW_SQNR:g} dB: {first.name}", "yellow"))
    if worst is not None:
        lines.append(
            Text(f"largest error of one operator by itself: {worst.name}, {worst.isolated:.1f} dB")
        )
    rows = [row for row in report.rows if show_all or row.sqnr < LOW_SQNR]
    if not show_all:
        left = format_count(len(report.rows) - len(rows), "value")
        lines.append(Text(f"not shown: {left} of {LOW_SQNR:g} dB and more"))
    return stack(title, *lines, *([value_table(rows)] if rows else []))


def value_table(rows: Sequence[CompareRow]) -> FittedTable:
    """Return the lines of a `compare_table`. Unknown values stay empty."""
    columns = [
        Column("value", [row.name for row in rows], Fit.NAME),
        Column("op", [row.op.removeprefix("nn.") for row in rows], is_minor=True),
        Column("SQNR [dB]", [f"{row.sqnr:.1f}" for row in rows], Fit.NUMBER),
        Column("alone [dB]", [show(row.isolated, ".1f") for row in rows], Fit.NUMBER),
        Column("cosine", [f"{row.cosine:.5f}" for row in rows], Fit.NUMBER, is_minor=True),
        Column("max error", [f"{row.max_error:.4g}" for row in rows], Fit.NUMBER),
        Column("mean error", [f"{row.mean_error:.4g}" for row in rows], Fit.NUMBER, is_minor=True),
        Column("saturated", [show(row.saturated, ".2%") for row in rows], Fit.NUMBER),
    ]
    return FittedTable(columns, ["yellow" if row.sqnr < LOW_SQNR else "" for row in rows])


def show(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
