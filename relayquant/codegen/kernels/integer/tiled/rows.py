"""Dense layer with a number of rows known at run time -> its products on a matrix unit, as TIR.

The weights are packed as kernels for vectors read them (`dynamic_rows`), which compute a few rows,
and all rows of a process that may not use the unit.

Rows are computed in chunks, whose activations stay in the second-level cache, and these in tiles of
up to 16 rows, as even as possible. The last chunk and the last tile are moved back and overlap
their neighbours. Tiles that are too few for a block of sums form blocks of one tile.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_BYTES,
    alloc_workspace,
    ceil_div,
    settle,
)
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    PanelPosition,
    Placement,
    emit_prepared_rows,
    locate_panel,
)
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.integer.tiled.plan import TiledPlan, TileRows
from relayquant.codegen.kernels.integer.tiled.products import (
    CACHED_WEIGHT_BYTES,
    PARALLEL_CYCLES,
    alloc_sums,
    emit_products,
)
from relayquant.codegen.kernels.integer.tiled.results import INTEGERS, SumBlock, SumStores
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.isa.matrix_unit import Tiles
from relayquant.codegen.kernels.unit_permission import emit_if

#: Bytes of the activations of a chunk. A chunk has at least `LEAST_CHUNK` rows.
CHUNK_BYTES, LEAST_CHUNK = 512 * 1024, 64
#: Blocks that fetch the next panel of weights together. Their number is not known.
PREFETCH_SHARING = 2
#: Fewest rows for the unit. They fill at least one vector of packed results.
FEWEST_ROWS = 4
#: Rows are one line of pixels. `SumBlock` says which.
PLACE = Placement((1, 1))


def plan_tiled_rows(spec: Conv2d, isa: Isa) -> TiledPlan | None:
    """Plan the products of many rows on the matrix unit. None if there is none for this dtype.

    The unit takes activations of the same dtype as vectors do, since the bias has its zero point.
    """
    isa = isa.for_activations(spec.in_dtype)
    if isa.unit is None:
        return None
    return TiledPlan(spec, isa, rows=TileRows.MATRIX, is_shared=True)


def emit_tiled_rows(
    plan: TiledPlan, operands: Operands, rows: Expr, parts: Expr | int | None
) -> None:
    """Emit all rows, at least `FEWEST_ROWS`, one chunk after the other.

    The panels and tiles of a chunk have up to so many `parts` for threads; see
    `unit_permission.count_parts`. None: all on one thread.
    """
    threads = parts is not None
    width = plan.spec.in_channels
    size = max(CHUNK_BYTES // width, LEAST_CHUNK)
    (chunks,) = settle(ceil_div(rows, size))
    (count,) = settle(ceil_div(rows, chunks))
    with T.serial(chunks) as chunk:
        (first,) = settle(T.min(chunk * count, rows - count))
        if plan.needs_copy:
            copy = alloc_workspace(size * width + COPY_BYTES, plan.isa.activation)
            is_worth = threads and count * width >= PARALLEL_BYTES
            emit_prepared_rows(operands.data, copy, width, first, count, is_worth)
            emit_chunk(plan, replace(operands, data=copy), T.int64(0), first, count, parts)
        else:
            emit_chunk(plan, operands, first, first, count, parts)


def emit_chunk(
    plan: TiledPlan,
    operands: Operands,
    start: Expr,
    first: Expr,
    count: Expr,
    most_parts: Expr | int | None,
) -> None:
    """Emit `count` rows from `first` on. Their activations are in rows of the data from `start` on.

    All rows of a tile count as pixels of one line.
    """
    side, unit = plan.tile.rows, plan.unit
    (tiles,) = settle(ceil_div(count, unit.rows))
    height, blocks = settle(ceil_div(count, tiles), T.floordiv(tiles, side) + tiles % side)
    (total,) = settle(plan.panels * blocks)
    block_cycles = int(plan.count_block_cycles(plan.tile))
    cycles = total * block_cycles

    def emit_block(registers: Tiles, sums: Buffer, index: Expr) -> None:
        panel, number = settle(T.floordiv(index, blocks), T.floormod(index, blocks))
        position = settle_panel(locate_panel(plan, PLACE, T.int64(0), T.int64(0), panel))

        def emit_rows(numbers: list[Expr]) -> None:
            offsets = settle(*(T.min(each * height, count - height) for each in numbers))
            block = SumBlock(
                rows=height,
                sources=settle(*((start + each) * plan.spec.in_channels for each in offsets)),
                lines=[(0, 0, line) for line in settle(*(first + each for each in offsets))],
                number=panel,
                panel=position,
            )
            ahead = number if plan.weight_bytes > CACHED_WEIGHT_BYTES else None
            image = Image(operands.data, 1, 1)
            emit_products(plan, image, operands, registers, block, sums, ahead, PREFETCH_SHARING)
            SumStores(plan, operands, PLACE, sums, INTEGERS).emit_now(block)

        if side == 1:
            emit_rows([number])
            return
        with T.If((number + 1) * side <= tiles):
            with T.Then():
                emit_rows([number * side + m for m in range(side)])
            with T.Else():  # one of the last tiles, which are fewer than a block has
                emit_rows([number + T.floordiv(tiles, side) * (side - 1)])

    def emit_part(part: Expr, parts: Expr) -> None:
        begin, end = settle(*(T.floordiv((part + i) * total, parts) for i in (0, 1)))
        registers = unit.configure(plan.shape_registers(height))
        sums = alloc_sums(plan, unit.rows)
        with T.serial(end - begin) as step:
            emit_block(registers, sums, begin + step)
        registers.release()

    def emit_shared() -> None:
        (parts,) = settle(T.min(total, T.Cast("int64", most_parts)))
        with T.parallel(parts) as part:
            emit_part(part, parts)

    is_worth = plan.panels * block_cycles >= PARALLEL_CYCLES or cycles >= PARALLEL_CYCLES
    is_worth = most_parts is not None and is_worth
    emit_if(is_worth, emit_shared, lambda: emit_part(T.int64(0), T.int64(1)))


def settle_panel(position: PanelPosition) -> PanelPosition:
    """Compute the offsets of a panel now; see `settle`."""
    constants, bias, vector, *channels = settle(
        position.constants, position.bias, position.first_vector, *position.channels
    )
    return PanelPosition(channels, constants, bias, vector)
