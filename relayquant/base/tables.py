"""Rows of a report -> CSV text, and HTML for notebooks. Not part of the data flow."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from relayquant.errors import format_count

#: rows of a table that a notebook shows by default
SHOWN_ROWS = 200


def format_csv(kind: type[Any], rows: Iterable[Any]) -> str:
    """Format a header line with the fields of the dataclass `kind`, and one line per value."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(kind)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue()


def format_html(columns: Mapping[str, Sequence[object]], caption: str, lines: Iterable[str]) -> str:
    """Format a table for a notebook: column header -> cells, all of one length, with lines of text
    below it.

    Names in models can hold anything, so every text is escaped. Floats have four significant
    digits. None is empty. If there are more than `SHOWN_ROWS` rows, the first ones are shown and
    the rest is counted.
    """
    count = max(map(len, columns.values()), default=0)
    parts = ["<table>"]
    if caption:
        parts.append(f"<caption>{escape(caption)}</caption>")
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in columns)
    parts.append(f"<thead><tr>{heads}</tr></thead><tbody>")
    for index in range(min(count, SHOWN_ROWS)):
        cells = (escape(format_cell(values[index])) for values in columns.values())
        parts.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    parts.append("</tbody></table>")
    if count > SHOWN_ROWS:
        lines = (f"Not shown: {format_count(count - SHOWN_ROWS, 'more row')}.", *lines)
    return "".join(parts) + "".join(f"<p>{escape(line)}</p>" for line in lines)


def format_cell(value: object) -> str:
    """Format a value for a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
