"""Columns of text -> tables that fit the width of the terminal."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

#: cells between two columns
GAP = 3
#: cells that are enough for most names or a few words
ENOUGH = 30


class Fit(enum.Enum):
    """What happens to a column that does not fit."""

    NAME = 12  #: its cells are shortened in the middle, to at least this number of letters
    TEXT = 14  #: its cells are folded between words, into lines of at least this number of letters
    NUMBER = 0  #: nothing: half of a number is another number


@dataclass(frozen=True)
class Column:
    """One column of a `FittedTable`.

    Attributes:
        head: Its heading.
        cells: One text for each row.
        fit: See `Fit`.
        is_minor: Whether it is left out if not all columns fit.
    """

    head: str
    cells: Sequence[str]
    fit: Fit = Fit.TEXT
    is_minor: bool = False

    @property
    def width(self) -> int:
        """The width without shortening."""
        return max(map(cell_len, (self.head, *self.cells)))

    @property
    def least(self) -> int:
        """The minimum width."""
        bound = self.fit.value or self.width
        return min(self.width, max(bound, cell_len(self.head)))

    @property
    def enough(self) -> int:
        """The width at which the column is easy to read. Minor columns are left out to
        reach it.
        """
        return min(self.width, max(self.least, ENOUGH))


@dataclass(frozen=True)
class FittedTable:
    """A table whose lines are at most as long as the terminal is wide.

    Empty columns are left out. If the others do not fit, minor columns are left out, from the last
    to the first. Spare room goes to names first, but at most half of it if there are texts to read.

    Attributes:
        columns: From left to right.
        styles: One rich style for each row. Empty: no row has a style.
        has_head: Whether the first line names the columns.
    """

    columns: Sequence[Column]
    styles: Sequence[str] = ()
    has_head: bool = True

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        columns = choose_columns(self.columns, options.max_width)
        widths = share_width(columns, options.max_width)
        table = Table(
            box=box.SIMPLE_HEAD,
            safe_box=True,
            pad_edge=False,
            show_edge=False,
            show_header=self.has_head,
        )
        cells = []
        for column, width in zip(columns, widths, strict=True):
            is_text = column.fit is Fit.TEXT
            # As Text: in a string, [dB] would be markup.
            table.add_column(
                Text(column.head),
                justify="right" if column.fit is Fit.NUMBER else "left",
                width=width,
                no_wrap=not is_text,
                overflow="fold" if is_text else "crop",
            )
            is_name = column.fit is Fit.NAME
            cells.append([shorten_middle(c, width) if is_name else c for c in column.cells])
        for i, row in enumerate(zip(*cells, strict=True)):
            style = self.styles[i] if self.styles else ""
            table.add_row(*(Text(cell, style) for cell in row))
        yield table


def choose_columns(columns: Sequence[Column], room: int) -> list[Column]:
    """Choose the columns that are shown in this number of cells."""
    kept = [column for column in columns if any(column.cells)]
    for column in [column for column in reversed(kept) if column.is_minor]:
        if sum(other.enough for other in kept) + GAP * (len(kept) - 1) <= room:
            break
        kept = [other for other in kept if other is not column]
    return kept


def share_width(columns: Sequence[Column], room: int) -> list[int]:
    """Return the cells for each column: its full width if it fits, otherwise its minimum and a
    share of the rest.
    """
    widths = [column.least for column in columns]
    spare = room - sum(widths) - GAP * (len(columns) - 1)
    texts = [i for i, column in enumerate(columns) if column.fit is Fit.TEXT]
    names = [i for i, column in enumerate(columns) if column.fit is Fit.NAME]
    missing = {i: columns[i].width - widths[i] for i in (*names, *texts)}
    for places in (names, texts):
        later = sum(missing[i] for i in texts) if places is names else 0
        part = max(spare // 2, spare - later) if later else spare
        for number, i in enumerate(sorted(places, key=lambda i: missing[i])):
            given = min(missing[i], max(part, 0) // (len(places) - number))
            widths[i], part, spare = widths[i] + given, part - given, spare - given
    return widths


def shorten_middle(name: str, letters: int) -> str:
    """Keep both ends of a long name: the end tells neighbours apart, the beginning tells the
    place.
    """
    if len(name) <= letters:
        return name
    tail = (letters - 1) * 2 // 3
    return f"{name[: letters - 1 - tail]}…{name[-tail:]}"
