"""Beside the data flow: rows of a report -> comma-separated text, and HTML for notebooks."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from relayquant.errors import format_count

#: rows of a table that a notebook shows without being asked
SHOWN_ROWS = 200


def format_csv(kind: type[Any], rows: Iterable[Any]) -> str:
    """A header line with the fields of the dataclass `kind`, and a line for each of its values."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(kind)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue()


def format_html(
    columns: Mapping[str, Sequence[object]], caption: str = "", lines: Iterable[str] = ()
) -> str:
    """A table for a notebook: head -> its cells, all of one length, and lines below it.

    Names in models come from anywhere: every text is escaped. Floats have four significant digits,
    None is empty. Of more than `SHOWN_ROWS` rows the first are shown, and how many are not.
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
    """A value in a table for people."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
