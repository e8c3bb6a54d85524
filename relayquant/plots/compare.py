"""After the data flow: how far values are off, as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from relayquant.analysis import CompareReport
from relayquant.analysis.compare import CompareRow
from relayquant.errors import format_count
from relayquant.plots.terminal_table import Column, Fit, FittedTable
from relayquant.plots.text import stack

#: below this SQNR a value is marked
LOW_SQNR = 15.0


def compare_table(report: CompareReport, title: str = "", *, show_all: bool = True) -> Group:
    """What goes wrong where, and one line for each value in topological order.

    Args:
        report: What was compared.
        title: A line above the table.
        show_all: Whether values that are well off have a line, too.
    """
    lines = [
        Text(f"{format_count(len(report.rows), 'value')}, {format_count(report.samples, 'sample')}")
    ]
    first, worst = report.first_below(LOW_SQNR), report.worst
    if first is not None:
        lines.append(Text(f"first below {LOW_SQNR:g} dB: {first.name}", "yellow"))
    if worst is not None:
        lines.append(Text(f"most damage alone: {worst.name}, {worst.isolated:.1f} dB"))
    rows = [row for row in report.rows if show_all or row.sqnr < LOW_SQNR]
    if not show_all:
        left = format_count(len(report.rows) - len(rows), "value")
        lines.append(Text(f"not shown: {left} of {LOW_SQNR:g} dB and more"))
    return stack(title, *lines, *([value_table(rows)] if rows else []))


def value_table(rows: Sequence[CompareRow]) -> FittedTable:
    """The lines of a `compare_table`; what is not known stays empty."""
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
