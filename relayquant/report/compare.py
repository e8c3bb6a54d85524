"""After the data flow: how far values are off, as a table of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from relayquant.analysis import CompareReport
from relayquant.analysis.compare import CompareRow
from relayquant.errors import format_count
from relayquant.report.text import new_table, stack

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
