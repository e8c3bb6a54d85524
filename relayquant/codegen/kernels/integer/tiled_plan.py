"""Specification of a convolution -> tiles, panels and weight order for a matrix unit.

Also the copy of the pixels that a matrix unit needs. Generator and packer share the plan.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.specs import Tile
from relayquant.codegen.kernels.isa.matrix_unit import Expr, MatrixUnit

#: Blocks of sums, (tiles of pixels, tiles of channels), that leave registers for the operands.
BLOCKS = ((1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1))
#: Cycles for storing a vector of results, alone or packed with others from 1, 2 or 4 tiles of
#: channels; and of the instructions around a block.
PLAIN_STORE_CYCLES, STORE_CYCLES, BLOCK_CYCLES = 7.0, {1: 3.8, 2: 3.4, 4: 3.0}, 40
#: Cycles more for a vector of results if its pixel may be in the padding.
PADDED_STORE_CYCLES = 2.0
#: Cycles for copying a run of up to 64 bytes of a pixel.
GATHER_CYCLES = 6.0
#: Cycles for loading a tile from the second-level cache. Weights of a panel of up to this many
#: bytes stay in the first.
FAR_LOAD_CYCLES, NEAR_BYTES = 24, 16 * 1024
#: Cycles for loading a tile of pixels, some of which are in the second-level cache.
PIXEL_LOAD_CYCLES = 12
#: Instructions of `ConvPlan.instructions` that take a cycle.
PER_CYCLE = 4.0
#: Fewest pixels for which a product on tiles can be faster than on vectors.
FEWEST_PIXELS = 6


class TileRows(enum.Enum):
    """Pixels that become the rows of tiles. They lie at equal distances."""

    MATRIX = "matrix"  #: all pixels of all images, one after the other
    LINES = "lines"  #: of a line of the output
    PADDED = "padded"  #: of the padded image as one line; results in its padding are thrown away
    GATHERED = "gathered"  #: of a copy that has the whole window of each pixel


@dataclass(frozen=True)
class TiledPlan(ConvPlan):
    """A convolution whose products are computed by a matrix unit.

    `Tile` here means: `rows` tiles of `cols` pixels, by `blocks` tiles of 16 channels.
    """

    rows: TileRows = TileRows.LINES
    is_shared: bool = False  #: the weights have the order in which kernels for vectors read them

    @cached_property
    def unit(self) -> MatrixUnit:
        assert self.isa.unit is not None
        return self.isa.unit

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of an activation, and of a weight."""
        return np.dtype(self.isa.activation).itemsize

    @cached_property
    def row_values(self) -> int:
        """Most activations of a row of a tile."""
        return self.unit.row_bytes // self.value_bytes

    @cached_property
    def merged(self) -> int:
        """Neighbouring groups that are computed as one: as many as take the fewest products."""
        spec = self.spec

        def cost(merged: int) -> tuple[int, int]:
            vectors = ceil_div(merged * spec.group_out, self.isa.lanes)
            steps = ceil_div(merged * spec.group_in, self.row_values)
            return spec.groups // merged * vectors * steps, -merged

        return min((d for d in range(1, spec.groups + 1) if spec.groups % d == 0), key=cost)

    @cached_property
    def taps(self) -> tuple[int, int]:
        return (1, 1) if self.rows is TileRows.GATHERED else super().taps

    @cached_property
    def run(self) -> int:
        return self.group_in * prod(self.spec.kernel) // prod(self.taps)

    @cached_property
    def end(self) -> int:
        return 0

    @cached_property
    def chunks(self) -> int:
        """Tiles that a run of activations takes."""
        return ceil_div(self.run, self.row_values)

    @cached_property
    def chunk_words(self) -> int:
        """Words of activations in a row of a tile of activations."""
        return ceil_div(ceil_div(self.run, self.chunks), self.isa.products)

    @cached_property
    def chunk(self) -> int:
        """Activations of a row of a tile of activations."""
        return self.chunk_words * self.isa.products

    @cached_property
    def words(self) -> int:
        return self.chunks * self.chunk_words

    @cached_property
    def steps(self) -> int:
        """Products of tiles for each tile of sums."""
        return prod(self.taps) * self.chunks

    @cached_property
    def gathered_size(self) -> int:
        """Activations from one pixel of the gathered copy to the next: whole rows of tiles."""
        return self.chunks * self.row_values

    @cached_property
    def pitch(self) -> int:
        """Pixels of a line of the padded image."""
        return self.spec.padded_size[1]

    @cached_property
    def lines(self) -> tuple[int, int, int]:
        """(images, lines of an image, pixels of a line) of the output, as tiles go over them."""
        images, height, width = self.pixel_grid
        if self.rows is TileRows.GATHERED:
            return 1, 1, images * height * width
        if self.rows is TileRows.PADDED:
            return images, 1, (height - 1) * self.pitch + width
        return images, height, width

    @cached_property
    def line_tiles(self) -> int:
        """Tiles of a line."""
        return ceil_div(self.lines[2], self.unit.rows)

    @cached_property
    def tile_rows(self) -> int:
        """Pixels of each tile of a line, as even as possible. The last tile is moved back."""
        return ceil_div(self.lines[2], self.line_tiles)

    @cached_property
    def image_tiles(self) -> int:
        """Tiles of pixels that share weights."""
        images, lines, _ = self.lines
        return lines * self.line_tiles * (1 if self.weights_per_image else images)

    @cached_property
    def ranked_tiles(self) -> list[Tile]:
        """All possible blocks of tiles, smallest estimated time first."""
        tiles = [
            Tile(rows, self.unit.rows, blocks)
            for rows, blocks in BLOCKS
            if blocks <= self.vectors and rows <= self.image_tiles
        ]
        return sorted(tiles, key=self.count_cycles)

    def count_cycles(self, tile: Tile) -> float:
        """Estimate the cycles of all blocks of this size."""
        images = self.lines[0] if self.weights_per_image else 1
        blocks = images * ceil_div(self.image_tiles, tile.rows) * self.groups
        return blocks * ceil_div(self.vectors, tile.blocks) * self.count_block_cycles(tile)

    def count_block_cycles(self, tile: Tile) -> float:
        """Estimate the cycles of a block."""
        sums, unit = tile.rows * tile.blocks, self.unit
        panel = self.steps * tile.blocks * self.chunk_words * unit.row_bytes
        weight = unit.load_cycles if panel <= NEAR_BYTES else FAR_LOAD_CYCLES
        loads = tile.rows * PIXEL_LOAD_CYCLES + tile.blocks * weight
        step = max(sums * unit.product_cycles, loads)
        one = STORE_CYCLES[tile.blocks] if tile.blocks in self.narrow_blocks else PLAIN_STORE_CYCLES
        one += PADDED_STORE_CYCLES if self.rows is TileRows.PADDED else 0
        store = sums * (unit.load_cycles + self.tile_rows * one)
        return self.steps * step + store + BLOCK_CYCLES

    @cached_property
    def instructions(self) -> float:
        cycles = self.count_cycles(self.tile)
        if self.needs_copy:
            cycles += prod(self.spec.in_shape) / 32
        if self.rows is TileRows.GATHERED:
            pieces = self.spec.kernel[0] * ceil_div(
                self.run // self.spec.kernel[0], self.row_values
            )
            cycles += GATHER_CYCLES * self.lines[2] * pieces
        return cycles * PER_CYCLE

    @property
    def panel_bytes(self) -> int:
        """Bytes of the weights of a panel."""
        return self.panel_vectors * self.unit.row_bytes

    @cached_property
    def registers(self) -> tuple[int, int]:
        """Tile registers for activations and for weights; those for sums come first."""
        tile = self.tile
        left = self.unit.registers - tile.rows * tile.blocks
        if tile.blocks > tile.rows:
            return 1, min(tile.blocks, left - 1)
        return min(tile.rows, left - tile.blocks), tile.blocks

    def shape_registers(self, rows: Expr | int) -> list[tuple[Expr | int, int]]:
        """List (rows, bytes of a row) of the tile registers, for tiles of this many pixels."""
        activations, weights = self.registers
        return [
            *[(rows, self.unit.row_bytes)] * (self.tile.rows * self.tile.blocks),
            *[(rows, self.chunk * self.value_bytes)] * activations,
            *[(self.chunk_words, self.unit.row_bytes)] * weights,
        ]

    @property
    def word_distance(self) -> int:
        """Vectors from a word of a tile of weights to the next."""
        return self.tile.blocks if self.is_shared else 1

    def number_vector(self, word: Expr, block: Expr) -> Expr:
        if self.is_shared:
            return super().number_vector(word, block)
        step, own = word // self.chunk_words, word % self.chunk_words
        return (step * self.tile.blocks + block) * self.chunk_words + own

    def order_vectors(self, packed: NDArray[np.int8]) -> NDArray[np.int8]:
        if self.is_shared:
            return packed
        shape = (*packed.shape[:2], self.steps, self.chunk_words, *packed.shape[3:])
        return np.moveaxis(packed.reshape(shape), 3, 4)


def list_rows(plan: ConvPlan) -> list[TileRows]:
    """List the ways in which the pixels of a convolution can be the rows of tiles."""
    spec = plan.spec
    if plan.is_matrix:
        return [TileRows.MATRIX]
    if plan.is_part:
        return [TileRows.LINES]
    found = [TileRows.LINES]
    if spec.strides == (1, 1):
        found.append(TileRows.PADDED)
    if spec.groups == 1 and prod(spec.kernel) * spec.in_channels <= 2**14:
        found.append(TileRows.GATHERED)
    return found


def plan_tiles(plan: ConvPlan) -> TiledPlan:
    """Return the fastest plan for the matrix unit of the plan's instruction set, by estimate."""
    own = {each.name: getattr(plan, each.name) for each in fields(ConvPlan)}
    plans = [TiledPlan(**own, rows=rows) for rows in list_rows(plan)]
    return min(plans, key=lambda each: each.instructions)
