"""After the data flow: tables of text that fit the terminal they are printed on."""

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
#: cells in which most names, and a few words, are whole
ENOUGH = 30


class Fit(enum.Enum):
    """What happens to a column where there is no room for all of it."""

    NAME = 12  #: its cells are shortened in the middle, to so many letters at least
    TEXT = 14  #: its cells are folded between words, to lines of so many letters at least
    NUMBER = 0  #: nothing: half of a number is another number


@dataclass(frozen=True)
class Column:
    """One column of a `FittedTable`.

    Attributes:
        head: What stands above it.
        cells: One text for each row.
        fit: See `Fit`.
        is_minor: Whether it is left out where there is no room for all columns.
    """

    head: str
    cells: Sequence[str]
    fit: Fit = Fit.TEXT
    is_minor: bool = False

    @property
    def width(self) -> int:
        """Cells that it takes as it is."""
        return max(map(cell_len, (self.head, *self.cells)))

    @property
    def least(self) -> int:
        """Cells that it takes at least."""
        bound = self.fit.value or self.width
        return min(self.width, max(bound, cell_len(self.head)))

    @property
    def enough(self) -> int:
        """Cells with which it is read well: other columns are left out for these."""
        return min(self.width, max(self.least, ENOUGH))


@dataclass(frozen=True)
class FittedTable:
    """A table whose lines are as long as the terminal is wide, at most.

    Columns in which no row says anything are left out, and minor ones from the last to the first
    until the others fit. What room there is goes to names first, but not more than half of it where
    there are texts to be read.

    Attributes:
        columns: From left to right.
        styles: One for each row, as rich has them; empty: none has any.
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
    """Those that are shown in so many cells."""
    kept = [column for column in columns if any(column.cells)]
    for column in [column for column in reversed(kept) if column.is_minor]:
        if sum(other.enough for other in kept) + GAP * (len(kept) - 1) <= room:
            break
        kept = [other for other in kept if other is not column]
    return kept


def share_width(columns: Sequence[Column], room: int) -> list[int]:
    """Cells for each column: what it takes if that fits, else its least and a part of the rest."""
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
    """Both ends of a long name: the end tells neighbours apart, the beginning where it is."""
    if len(name) <= letters:
        return name
    tail = (letters - 1) * 2 // 3
    return f"{name[: letters - 1 - tail]}…{name[-tail:]}"
