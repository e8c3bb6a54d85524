"""After the data flow: a ledger, or names with values, become tables of text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from relayquant.errors import format_count
from relayquant.ledger import Ledger

#: Wide enough that no line of a file or a pipe is ever folded.
PLAIN_WIDTH = 10_000


def make_console(file: TextIO | None = None) -> Console:
    """A console on `file` (default: standard output).

    A terminal gets colours and its own width. Anything else gets plain lines that are never folded,
    so that `grep` and `cut` see whole rows.
    """
    file = sys.stdout if file is None else file
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(
        file=file, width=PLAIN_WIDTH, highlight=False, markup=False, emoji=False, color_system=None
    )


def list_findings(ledger: Ledger) -> list[str]:
    """Lines on what calibration worked with, and on what the guard and the searches saw."""
    lines = [f"{what} ({ledger.effort}): {choice}" for what, choice in ledger.choices.items()]
    results = (ledger.guard, ledger.search, ledger.speed)
    return lines + [str(seen) for seen in results if seen is not None]


def ledger_table(
    rows: Sequence[Mapping[str, Any]], title: str = "", *, count: bool = True
) -> Group:
    """A table of ledger rows, one line for each operator, and a line that counts them.

    Args:
        rows: dicts with `name, op, quantized, pattern, dtype, reason, advice`, as in
            `relayquant.ledger(qmod).to_dict()["operators"]`. Missing or None means nothing to say.
        title: a line above the table.
        count: whether the last line says how many are quantized.

    Columns in which no row says anything are left out.
    """
    columns = [
        ("operator", [_text(row, "name") for row in rows]),
        ("op", [_text(row, "op").removeprefix("relax.") for row in rows]),
        ("quantized", ["yes" if row.get("quantized") else "no" for row in rows]),
        ("pattern", [_text(row, "pattern") for row in rows]),
        ("dtype", [_text(row, "dtype") for row in rows]),
        ("scheme", [_text(row, "scheme") for row in rows]),
        ("scale", [_parameter(row, "scale") for row in rows]),
        ("zero point", [_parameter(row, "zero_point") for row in rows]),
        ("parameters", ["run time" if row.get("is_dynamic") else "" for row in rows]),
        ("rule", [_text(row, "rule") for row in rows]),
        ("reason", [_text(row, "reason") for row in rows]),
        ("what to do", [_text(row, "advice") for row in rows]),
    ]
    columns = [(head, cells) for head, cells in columns if any(cells)]
    table = new_table()
    for head, _ in columns:
        table.add_column(head, overflow="fold")
    for index, row in enumerate(rows):
        style = "" if row.get("quantized") else "yellow"
        table.add_row(*(Text(cells[index], style) for _, cells in columns))
    quantized = sum(bool(row.get("quantized")) for row in rows)
    parts: list[RenderableType] = [table] if rows else []
    if count:
        parts.append(Text(f"{quantized} of {format_count(len(rows), 'operator')} quantized"))
    return stack(title, *parts)


def summary_table(values: Mapping[str, Any], title: str = "") -> Group:
    """A table of names and values in two columns; floats with four significant digits."""
    table = new_table()
    table.show_header = False
    table.add_column("name", style="bold")
    table.add_column("value", overflow="fold")
    for name, value in values.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(Text(name), Text(text))
    return stack(title, table)


def new_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, safe_box=True, pad_edge=False, show_edge=False)


def stack(title: str, *parts: RenderableType) -> Group:
    # A title and a caption of the table itself would be folded to the table's width.
    return Group(*([Text(title, "bold")] if title else []), *parts)


def _parameter(row: Mapping[str, Any], key: str) -> str:
    """The one parameter of a result; the first and how many of several."""
    values = row.get(key) or ()
    if not values:
        return ""
    return f"{values[0]:.4g}" + (f" (1 of {len(values)})" if len(values) > 1 else "")


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value)
