"""table: rows of a report -> comma-separated text."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable
from typing import Any


def format_csv(kind: type[Any], rows: Iterable[Any]) -> str:
    """A header line with the fields of the dataclass `kind`, and a line for each of its values."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(kind)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue()
