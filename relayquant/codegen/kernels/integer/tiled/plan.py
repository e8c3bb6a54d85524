"""Specification of a convolution -> tiles, panels and weight order for a matrix unit.

Also the copy of the pixels that a matrix unit needs. Generator and packer share the plan.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, merge_groups
from relayquant.codegen.kernels.integer.specs import Tile
from relayquant.codegen.kernels.isa.matrix_unit import Expr, MatrixUnit

#: Blocks of sums, (tiles of pixels, tiles of channels), that leave registers for the operands.
BLOCKS = ((1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1))
#: Cycles for storing a vector of results, alone or packed with others from 1, 2 or 4 tiles of
#: channels; and of the instructions around a block.
PLAIN_STORE_CYCLES, STORE_CYCLES, BLOCK_CYCLES = 7.0, {1: 3.8, 2: 3.4, 4: 3.0}, 40
#: Cycles more for a vector of results if its pixel may be in the padding.
PADDED_STORE_CYCLES = 5.0
#: Cycles for copying a run of up to 64 bytes of a pixel.
GATHER_CYCLES = 8.0
#: Cycles for 64 bytes of a copy with folded pixels; most bytes of such a pixel.
FOLD_CYCLES, MOST_FOLDED = 6.0, 32
#: Cycles for loading a tile from the second-level cache. Weights of a panel of up to this many
#: bytes stay in the first, or twice as many if a block has only one tile of pixels besides.
FAR_LOAD_CYCLES, NEAR_BYTES = 24, 16 * 1024
#: Bytes of operands that stay in the first-level cache, if others do not pass through it.
FIRST_CACHE_BYTES = 40 * 1024
#: With at least so many blocks of pixels, a panel of weights should stay in the first-level cache,
#: and each part of a loop fetches its first panel ahead.
FEWEST_BLOCKS = 3
#: Weights of more bytes come from the last-level cache in each run: a byte in so many cycles, if
#: they are read once and if they are read for several blocks of pixels.
SECOND_CACHE_BYTES, FAR_BYTE_CYCLES = 2 * 1024 * 1024, (0.12, 0.13)
#: Cycles for loading a tile of pixels, some of which are in the second-level cache.
PIXEL_LOAD_CYCLES = 12
#: Fewest steps of a block for which its products and the stores of the last block overlap.
DELAYED_STEPS = 3
#: The store of a tile waits for 260 ns if there was none for 560 ns (Granite Rapids). So a block of
#: at least 112 products stores a tile that nothing reads after every 32.
LONG_PRODUCTS, SPARE_PRODUCTS = 112, 32
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
    FOLDED = "folded"  #: of a line of the output, with a copy that has squares of pixels as pixels
    PACKED = "packed"  #: all pixels; of a copy in which the rows of each tile follow each other
    SHIFTED = "shifted"  #: all pixels; of a copy for each column of the window


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
        return merge_groups(self.spec, self.isa.lanes, self.row_values)

    @property
    def is_chunked(self) -> bool:
        """Whether all taps of a chunk follow each other, so that the first-level cache keeps it."""
        return self.rows is TileRows.SHIFTED

    def number_step(self, row: Expr, column: Expr, chunk: Expr) -> Expr:
        """Return the number of a step in the order of the weights."""
        tap = row * self.taps[1] + column
        return chunk * prod(self.taps) + tap if self.is_chunked else tap * self.chunks + chunk

    @cached_property
    def taps(self) -> tuple[int, int]:
        if self.rows is TileRows.SHIFTED:
            return self.spec.kernel
        if self.rows is TileRows.FOLDED:
            return ceil_div(self.spec.kernel[0], self.spec.strides[0]), 1
        return (1, 1) if self.rows is TileRows.GATHERED else super().taps

    @cached_property
    def run(self) -> int:
        if self.rows is TileRows.FOLDED:
            return ceil_div(self.spec.kernel[1], self.spec.strides[1]) * self.pixel_size
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

    @property
    def chunk_distance(self) -> int:
        """Activations from a tile of activations to the next of the same pixels."""
        return self.tile_rows * self.row_values if self.rows is TileRows.PACKED else self.chunk

    @cached_property
    def pixel_size(self) -> int:
        """Activations from one pixel of the image that tiles are loaded from to the next."""
        if self.rows in (TileRows.GATHERED, TileRows.SHIFTED):
            return self.copied_size
        folded = prod(self.spec.strides) if self.rows is TileRows.FOLDED else 1
        return folded * self.spec.in_channels

    @cached_property
    def pixel_strides(self) -> tuple[int, int]:
        """Pixels of the same image from one pixel of the output to the next, in y and x."""
        is_copy = self.rows in (TileRows.GATHERED, TileRows.FOLDED, TileRows.SHIFTED)
        return (1, 1) if is_copy else self.spec.strides

    @cached_property
    def shifted_lines(self) -> int:
        """Lines of a phase of an image in a copy for `TileRows.SHIFTED`: one in each stride."""
        spec = self.spec
        below = (spec.kernel[0] - 1) * spec.dilation[0] // spec.strides[0]
        return spec.out_size[0] + below

    @cached_property
    def shifted_pixels(self) -> int:
        """Pixels of all copies for `TileRows.SHIFTED`."""
        columns, (images, _, width) = self.spec.kernel[1], self.pixel_grid
        return columns * self.spec.strides[0] * images * self.shifted_lines * width

    @cached_property
    def folded_size(self) -> tuple[int, int]:
        """(H, W) of the folded image, without the rest of a line that no window reads."""
        kernel, strides = self.spec.kernel, self.spec.strides
        height, width = (
            size + ceil_div(k, s) - 1
            for size, k, s in zip(self.spec.out_size, kernel, strides, strict=True)
        )
        return height, width

    @cached_property
    def folded_pixels(self) -> int:
        """Folded pixels that are copied at once."""
        return min(self.row_values // self.pixel_size, self.folded_size[1])

    @cached_property
    def needs_copy(self) -> bool:
        return self.rows is TileRows.FOLDED or super().needs_copy

    @cached_property
    def copied_size(self) -> int:
        """Activations from one pixel of a gathered or shifted copy to the next.

        They are whole rows of tiles, and a few more where all pixels would meet in some sets of the
        cache.
        """
        return (self.chunks + (self.chunks % 4 == 0)) * self.row_values

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
        if self.rows is TileRows.SHIFTED:
            return images, 1, height * width
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
        """All possible blocks of tiles, smallest estimated time first.

        Of equal ones, those come first that have all pixels: they read each weight once.
        """
        tiles = [
            Tile(rows, self.unit.rows, blocks)
            for rows, blocks in BLOCKS
            if blocks <= self.vectors and rows <= self.image_tiles
        ]
        return sorted(tiles, key=lambda t: (self.count_cycles(t), t.rows < self.image_tiles))

    def count_cycles(self, tile: Tile) -> float:
        """Estimate the cycles of all blocks of this size."""
        images = self.lines[0] if self.weights_per_image else 1
        blocks, panels = ceil_div(self.image_tiles, tile.rows), ceil_div(self.vectors, tile.blocks)
        cycles = blocks * self.count_block_cycles(tile)
        panel = self.steps * tile.blocks * self.chunk_words * self.unit.row_bytes
        if self.groups * panels * panel > SECOND_CACHE_BYTES:
            cycles = max(cycles, panel * FAR_BYTE_CYCLES[blocks > 1])
        return images * self.groups * panels * cycles

    def count_block_cycles(self, tile: Tile) -> float:
        """Estimate the cycles of a block."""
        sums, unit = tile.rows * tile.blocks, self.unit
        panel = self.steps * tile.blocks * self.chunk_words * unit.row_bytes
        near = NEAR_BYTES * (2 if tile.blocks == 4 else 1)
        weight = unit.load_cycles if panel <= near else FAR_LOAD_CYCLES
        loads = tile.rows * PIXEL_LOAD_CYCLES + tile.blocks * weight
        products = self.steps * max(sums * unit.product_cycles, loads)
        one = STORE_CYCLES[tile.blocks] if tile.blocks in self.narrow_blocks else PLAIN_STORE_CYCLES
        store = sums * self.tile_rows * one
        time = max(products, store) if self.overlaps_stores else products + store
        if self.rows is TileRows.PADDED:
            time += sums * self.tile_rows * PADDED_STORE_CYCLES
        return time + sums * unit.store_cycles + BLOCK_CYCLES

    @cached_property
    def spare_store_steps(self) -> int | None:
        """Steps from one store of a tile that nothing reads to the next, a power of two.

        None: a block has so few products that it needs no such stores.
        """
        sums = self.tile.rows * self.tile.blocks
        if self.steps * sums < LONG_PRODUCTS:
            return None
        return 1 << (ceil_div(SPARE_PRODUCTS, sums) - 1).bit_length()

    @cached_property
    def overlaps_stores(self) -> bool:
        """Whether the sums of a block are converted and stored during the products of the next."""
        return self.steps >= DELAYED_STEPS

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
        if self.rows is TileRows.FOLDED:
            cycles += FOLD_CYCLES * prod(self.folded_size) / self.folded_pixels * self.lines[0]
        if self.rows is TileRows.SHIFTED:
            cycles += GATHER_CYCLES * self.shifted_pixels * self.chunks
        elif has_few_pixels(self) and self.image_bytes > FIRST_CACHE_BYTES:
            cycles += FAR_LOAD_CYCLES * self.image_tiles * self.panels * self.steps
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
    def streamed(self) -> tuple[bool, bool]:
        """Whether (activations, weights) are loaded past the first-level cache.

        A panel that stays there during all pixels is not displaced by activations. A larger panel
        does not displace the activations, which other taps read again.
        """
        if self.rows is TileRows.PACKED:
            return True, False
        if self.tile.rows == 1 or self.panel_bytes <= NEAR_BYTES:
            return False, False
        is_often = self.is_shared or ceil_div(self.image_tiles, self.tile.rows) >= FEWEST_BLOCKS
        if is_often and self.panel_bytes <= FIRST_CACHE_BYTES:
            return prod(self.taps) == 1, False
        is_far = self.groups * self.panels * self.panel_bytes > SECOND_CACHE_BYTES
        return False, not (is_often and is_far and prod(self.taps) == 1)

    @property
    def word_distance(self) -> int:
        """Vectors from a word of a tile of weights to the next."""
        return self.tile.blocks if self.is_shared else 1

    def number_vector(self, word: Expr, block: Expr) -> Expr:
        if self.is_shared:
            return super().number_vector(word, block)
        step, own = word // self.chunk_words, word % self.chunk_words
        return (step * self.tile.blocks + block) * self.chunk_words + own

    def list_runs(self, weight: NDArray[Any]) -> NDArray[Any]:
        if self.rows is not TileRows.FOLDED:
            return super().list_runs(weight)
        (out, kh, kw, channels), (sh, sw) = weight.shape, self.spec.strides
        rows, columns = ceil_div(kh, sh), ceil_div(kw, sw)
        whole = np.zeros((out, rows * sh, columns * sw, channels), weight.dtype)
        whole[:, :kh, :kw] = weight
        folded = whole.reshape(out, rows, sh, columns, sw, channels).transpose(0, 1, 3, 2, 4, 5)
        return super().list_runs(folded)

    def order_vectors(self, packed: NDArray[np.int8]) -> NDArray[np.int8]:
        if self.is_shared:
            return packed
        sizes = (prod(self.taps), self.chunks, self.chunk_words)
        steps = np.moveaxis(packed.reshape(*packed.shape[:2], *sizes, *packed.shape[3:]), 4, 5)
        return np.moveaxis(steps, 2, 3) if self.is_chunked else steps


def has_few_pixels(plan: ConvPlan) -> bool:
    """Whether a block can have all pixels, so that each weight is read once, and several taps."""
    assert plan.isa.unit is not None
    images, height, width = plan.pixel_grid
    tiles = images * ceil_div(height * width, plan.isa.unit.rows)
    return prod(plan.spec.kernel) > 1 and tiles <= max(rows for rows, _ in BLOCKS)


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
    size = np.dtype(plan.isa.activation).itemsize
    assert plan.isa.unit is not None
    is_whole = spec.groups == 1 and spec.in_channels * size % plan.isa.unit.row_bytes == 0
    if is_whole and has_few_pixels(plan):
        found.append(TileRows.SHIFTED)
    is_plain = spec.groups == 1 and spec.dilation == (1, 1) and spec.strides == (2, 2)
    if size == 1 and is_plain and prod(spec.strides) * spec.in_channels <= MOST_FOLDED:
        found.append(TileRows.FOLDED)
    return found


def plan_tiles(plan: ConvPlan) -> TiledPlan:
    """Return the fastest plan for the matrix unit of the plan's instruction set, by estimate."""
    own = {each.name: getattr(plan, each.name) for each in fields(ConvPlan)}
    plans = [TiledPlan(**own, rows=rows) for rows in list_rows(plan)]
    return min(plans, key=lambda each: each.instructions)
