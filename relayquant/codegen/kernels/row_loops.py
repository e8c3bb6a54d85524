"""Loops over rows whose number is known only at run time, for kernels with register tiles.

Tiles have three heights or more. As many rows as possible go to the highest tiles. The remaining
rows go to tiles of a third of this height, and a single row goes to a tile of one row. The lower
tiles may be partly empty: they repeat the last row, which writes the same values twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.isa.base import Expr

#: Rows, rounded up to whole tiles, for which all panels of weights are read. They stay in a cache.
CHUNK_ROWS = 48

#: emit(index of the height, rows of the tile, panel, index of the tile among tiles of this height)
EmitTile = Callable[[int, list[Expr], Expr, Expr], None]
#: prepare(first row, number of rows) of a chunk
PrepareChunk = Callable[[Expr, Expr], None]


def choose_heights(full: int, least: int = 1) -> tuple[int, ...]:
    """Choose the heights of tiles, highest first. All but `full` are multiples of `least`."""
    medium = max(full // 3 // least * least, least)
    return tuple(sorted({full, medium, least}, reverse=True))


def count_chunk_rows(heights: Sequence[int]) -> int:
    """Count the rows of a chunk: whole tiles of the greatest height."""
    return ceil_div(CHUNK_ROWS, heights[0]) * heights[0]


def loop_over_rows(
    rows: Expr,
    heights: Sequence[int],
    panels: int,
    threads: bool,
    emit: EmitTile,
    prepare: PrepareChunk | None = None,
) -> None:
    """Emit all tiles of `rows` rows for all panels of weights. `rows` must not be negative.

    `prepare` runs before the tiles of each chunk of up to `count_chunk_rows` rows.
    """
    size = count_chunk_rows(heights)
    chunks, loop = ceil_div(rows, size), T.parallel if threads else T.serial
    if prepare is not None:
        with loop(chunks) as chunk:
            first = T.bind(chunk * size)
            prepare(first, T.bind(T.min(rows - first, size)))
            with T.serial(panels) as panel:
                emit_chunk(rows, heights, first, size, panel, emit)
    elif threads:
        # One loop, which the thread pool splits evenly.
        with T.parallel(chunks * panels) as index:
            chunk, panel = T.floordiv(index, panels), T.floormod(index, panels)
            emit_chunk(rows, heights, T.bind(chunk * size), size, T.bind(panel), emit)
    else:
        with T.grid(chunks, panels) as (chunk, panel):
            emit_chunk(rows, heights, chunk * size, size, panel, emit)


def emit_chunk(
    rows: Expr, heights: Sequence[int], first: Expr, size: int, panel: Expr, emit: EmitTile
) -> None:
    """Emit the tiles of one panel for up to `size` rows."""
    # Bound to names: otherwise TVM would take long to simplify their values in every index.
    left = T.bind(T.min(rows - first, size))
    for kind, (height, lower) in enumerate(zip(heights, [*heights[1:], 0], strict=True)):
        is_full = kind == 0 and len(heights) > 1
        # Rows that would need two lower tiles go to another one of this height.
        spare = 0 if is_full else height - lower - 1
        count = T.bind(T.floordiv(left + spare, height))
        with T.serial(count) as index:
            start = first + index * height
            if is_full:
                members = [start + row for row in range(height)]
            else:
                members = [T.min(start + row, rows - 1) if row else start for row in range(height)]
            emit(kind, members, panel, index)
        first, left = T.bind(first + count * height), T.bind(T.max(left - count * height, 0))
