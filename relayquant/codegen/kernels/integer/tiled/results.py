"""Sums that a matrix unit left in memory -> stored results, as TIR.

The sums of a block are stored in parts of a few pixels: at once, or each after a step of the next
block (`KeptBlock`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    broadcast,
    ceil_div,
    emit_prefetch,
    load_vector,
    settle,
    split_index,
)
from relayquant.codegen.kernels.in_place import STORES_ONCE
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.operands import (
    Operands,
    PanelPosition,
    Placement,
    emit_narrow_vectors,
    emit_store,
)
from relayquant.codegen.kernels.integer.saturating_pack import PACKED
from relayquant.codegen.kernels.integer.tiled.plan import TiledPlan, TileRows
from relayquant.codegen.kernels.isa.base import Buffer, Expr

#: A residual of more bytes does not stay in the second-level cache until it is added.
NEAR_RESIDUAL_BYTES = 512 * 1024

#: (image, line, first pixel) of a tile of pixels.
Line = tuple[Expr, Expr, Expr]


@dataclass(frozen=True)
class SumBlock:
    """Position of a block of sums."""

    rows: Expr | int  #: pixels of each tile
    sources: list[Expr]  #: of each tile of pixels: its first activation, for the first tap
    lines: list[Line]  #: of each tile of pixels
    number: Expr  #: of the panel of weights
    panel: PanelPosition


@dataclass(frozen=True)
class SumTile:
    """The sums of one tile of pixels of a block, in memory."""

    rows: Expr | int  #: its pixels
    first: Expr | int  #: row of the sums
    line: Line
    channels: list[Expr]  #: as in `PanelPosition`
    constants: Expr  #: as in `PanelPosition`


@dataclass(frozen=True)
class Storing:
    """How sums are stored: parts of `count_rows(plan)` pixels of a tile.

    `emit` stores part number `part`: (plan, operands, place, tile, sums, part).
    """

    count_rows: Callable[[Any], int]
    emit: Callable[[Any, Operands, Placement, SumTile, Buffer, Expr], None]

    def count_parts(self, plan: TiledPlan) -> int:
        """Count the parts of a tile."""
        return ceil_div(plan.tile_rows, self.count_rows(plan))


@dataclass(frozen=True)
class KeptBlock:
    """The position of the last block of a part in memory, for when its sums are stored."""

    plan: TiledPlan
    memory: Buffer

    @classmethod
    def allocate(cls, plan: TiledPlan) -> KeptBlock:
        memory = T.alloc_buffer((2 + plan.tile.blocks + 3 * plan.tile.rows,), "int32")
        T.buffer_store(memory, 0, [0])
        return cls(plan, memory)

    @property
    def has_sums(self) -> Expr:
        """Whether there is a block whose sums are not stored."""
        return self.memory[0] != 0

    def keep(self, block: SumBlock) -> None:
        """Emit stores of the position."""
        lines = [each for line in block.lines for each in line]
        T.buffer_store(self.memory, 1, [0])
        for i, value in enumerate((block.panel.constants, *block.panel.channels, *lines)):
            T.buffer_store(self.memory, T.Cast("int32", value), [1 + i])

    def read(self, m: Expr) -> SumTile:
        """Read the position of tile `m` of pixels."""
        constants, *channels = (self.memory[1 + i] for i in range(1 + self.plan.tile.blocks))
        at = 2 + self.plan.tile.blocks + 3 * m
        image, line, start = (T.bind(self.memory[at + i]) for i in range(3))
        rows = self.plan.tile_rows
        return SumTile(rows, m * rows, (image, line, start), channels, constants)


@dataclass(frozen=True)
class SumStores:
    """The stores of `sums`, which hold one block after the other."""

    plan: TiledPlan
    operands: Operands
    place: Placement
    sums: Buffer
    storing: Storing

    def emit_now(self, block: SumBlock) -> None:
        """Emit the stores of all sums of a block."""
        plan, count = self.plan, self.storing.count_rows(self.plan)
        for m, line in enumerate(block.lines):
            tile = SumTile(
                block.rows, m * plan.tile_rows, line, block.panel.channels, block.panel.constants
            )
            with T.serial(ceil_div(block.rows, count)) as part:
                self.emit_part(tile, part)

    def emit_after(self, step: Expr, kept: KeptBlock, is_due: Expr) -> None:
        """Emit what is stored of a block after step number `step` of the next, if any `is_due`."""
        total = self.plan.tile.rows * self.storing.count_parts(self.plan)
        share = ceil_div(total, self.plan.steps)
        first = step * share
        left = total - first if total == share * self.plan.steps else T.max(total - first, 0)
        self.emit_parts(kept, first, T.if_then_else(is_due, T.min(left, share), 0))

    def emit_last(self, kept: KeptBlock) -> None:
        """Emit the stores of the last block of a part, if there is one."""
        with T.If(kept.has_sums), T.Then():
            self.emit_parts(kept, 0, self.plan.tile.rows * self.storing.count_parts(self.plan))

    def emit_parts(self, kept: KeptBlock, first: Expr | int, count: Expr | int) -> None:
        """Emit the stores of so many parts of the kept block, from the first on."""
        parts = self.storing.count_parts(self.plan)
        with T.serial(count) as i:
            m, part = split_index(first + i, (self.plan.tile.rows, parts))
            self.emit_part(kept.read(m), part)

    def emit_part(self, tile: SumTile, part: Expr) -> None:
        """Emit the stores of one part of a tile."""
        self.storing.emit(self.plan, self.operands, self.place, tile, self.sums, part)


def count_stored_rows(plan: TiledPlan) -> int:
    """Count the pixels whose results are packed and stored together."""
    return min(PACKED // plan.tile.blocks if plan.is_narrow else 1, plan.tile_rows)


def emit_integers(
    plan: TiledPlan,
    operands: Operands,
    place: Placement,
    tile: SumTile,
    sums: Buffer,
    part: Expr,
) -> None:
    """Store a part of a tile of sums through the epilogue. The last part overlaps another."""
    isa, epilogue, blocks = plan.isa, plan.spec.epilogue, plan.tile.blocks
    lanes, width, count = isa.lanes, plan.panel_channels, count_stored_rows(plan)
    is_whole = isinstance(tile.rows, int) and tile.rows % count == 0
    accs, targets = [], []
    for i in range(count):
        row = part * count + i
        if not is_whole:
            row = T.min(row, tile.rows - 1)
        if not isinstance(tile.rows, int):
            (row,) = settle(row)
        row, pixel, number = locate_result(plan, place, *tile.line, row)
        term = None
        if operands.row_term is not None:
            term = broadcast(operands.row_term.vload([number]), lanes)
        for n in range(blocks):
            value = load_vector(sums, (tile.first + row) * width + n * lanes, lanes)
            accs.append(value if term is None else value + term)
        targets.append(pixel * plan.result_pitch)
        if operands.residual is not None:
            channels = tile.channels[:1] if plan.is_narrow else tile.channels
            emit_residual_prefetch(plan, operands.residual, pixel, plan.spec.out_channels, channels)
    if plan.is_narrow:
        to = [pixel + tile.channels[0] for pixel in targets]
        emit_narrow_vectors(
            isa, epilogue, operands, accs, to, tile.constants, blocks, plan.store_width
        )
        return
    for n, acc in enumerate(accs):
        to, first = targets[0] + tile.channels[n], tile.constants + n * lanes
        emit_store(operands, epilogue, acc, to, first, lanes, plan.store_width)


INTEGERS = Storing(count_stored_rows, emit_integers)


def emit_residual_prefetch(
    plan: TiledPlan, residual: Buffer | None, pixel: Expr, pitch: int, channels: Sequence[Expr]
) -> None:
    """Fetch the residual of the pixel that the next block stores where this one stores `pixel`.

    `channels` are the first of each vector. A block is too short to wait for a large residual.
    """
    if residual is None or not is_far(plan, residual.dtype):
        return
    width = np.dtype(residual.dtype).itemsize
    ahead = (pixel + plan.tile.rows * plan.tile_rows) * pitch
    for channel in channels[:: max(plan.unit.row_bytes // (plan.isa.lanes * width), 1)]:
        emit_prefetch(residual, ahead + channel, level=1)


def locate_result(
    plan: TiledPlan, place: Placement, image: Expr, line: Expr, start: Expr, row: Expr
) -> tuple[Expr, Expr, Expr]:
    """Return (row of the tile to store, its pixel in y, its pixel in `Operands.row_term`).

    A row in the padding is replaced by its neighbour on the left, or on the right if that belongs
    to another tile.
    """
    height, width = plan.pixel_grid[1:]
    whole = (TileRows.MATRIX, TileRows.GATHERED, TileRows.PACKED, TileRows.SHIFTED)
    if plan.rows in whole:
        pixel = image * plan.lines[2] + start + row
        return row, pixel, pixel
    x, y = start + row, line
    if plan.rows is TileRows.PADDED:
        y, x = T.floordiv(start + row, plan.pitch), T.floormod(start + row, plan.pitch)
        if plan.pitch > width:
            beyond = T.max(x - (width - 1), 0)  # 0 for a pixel of the image
            is_left = beyond <= row
            row = T.Select(is_left, row - beyond, row + (plan.pitch - x))
            x = T.Select(is_left, x - beyond, 0)
            y = T.Select(is_left, y, y + 1)
    number = (image * height + y) * width + x
    y = y * place.stride[0] + place.offset[0]
    x = x * place.stride[1] + place.offset[1]
    return row, (image * place.size[0] + y) * place.size[1] + x, number


def mark_stores_once(func: PrimFunc, plan: ConvPlan) -> PrimFunc:
    """Mark the kernel of a plan if its result may take the place of its residual.

    Only a large residual gains: a small one and the result fit into the second-level cache.
    """
    if not isinstance(plan, TiledPlan) or not plan.spec.epilogue.residual:
        return func
    if is_far(plan, func.params[-2].dtype) and stores_once(plan):
        return func.with_attr(STORES_ONCE, True)  # pyright: ignore[reportReturnType]
    return func


def is_far(plan: TiledPlan, dtype: str) -> bool:
    """Whether a residual of this dtype leaves the second-level cache before it is added."""
    return prod(plan.spec.out_shape) * np.dtype(dtype).itemsize > NEAR_RESIDUAL_BYTES


def stores_once(plan: TiledPlan) -> bool:
    """Whether each result is stored once, because no tile overlaps another."""
    is_plain = plan.rows is not TileRows.PADDED or plan.pitch == plan.pixel_grid[2]
    is_whole = plan.lines[2] % plan.tile_rows == 0 == plan.image_tiles % plan.tile.rows
    is_wide = plan.panels * plan.panel_channels == plan.group_out
    return is_plain and is_whole and is_wide and plan.tile_rows % count_stored_rows(plan) == 0
