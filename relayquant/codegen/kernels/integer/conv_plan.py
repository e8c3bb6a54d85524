"""Specification of a convolution -> tile, panels and weight order, for generator and packer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import gcd, inf, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.integer.saturating_pack import can_narrow, channel_order
from relayquant.codegen.kernels.integer.specs import (
    Constants,
    Conv2d,
    PackedWeights,
    Tile,
    pack_channels,
)
from relayquant.codegen.kernels.isa.base import Isa

#: Extra cost per word for an accumulator on the stack, which is loaded and stored by other units
#: than those of the dot products; and extra cost in a loop short enough for LLVM to unroll, which
#: then keeps much more on the stack.
STACK_COST, UNROLLED_STACK_COST = 0.4, 3.0
UNROLLED_WORDS = 8
#: Instructions that convert, pack and store a result: 12 for a vector of 16 results. The least of
#: `tiled_plan.STORE_CYCLES` are as many, as a cycle counts as four instructions (`PER_CYCLE`).
RESULT_INSTRUCTIONS = 0.75
#: Words of a loop that LLVM unrolls after which the next pixel may read the same word again.
NEAR_WORDS = 2
#: Share of the registers that a tile may use before joined words. LLVM unrolls the short loops
#: before them, and loads the next values early.
JOINING_SHARE = 0.7
#: Most tiles for which fetching the next panel is shared. With more, its first read hardly counts.
PREFETCH_TILES = 64
#: A packed panel that is not full is stored in pieces of at least this size.
NARROW_PIECE = 8


class TimedTile(NamedTuple):
    """A tile, and the time that all tiles of an output are estimated to take, in dot products."""

    time: float
    tile: Tile


def rank_tiles(
    out_size: tuple[int, int],
    vectors: int,
    words: int,
    isa: Isa,
    narrow: Collection[int] = (),
    taps: int = 1,
    end_words: int = 0,
    repeat: int = 0,
    joined: int = 0,
) -> list[TimedTile]:
    """List tiles for an output of `out_size` x `vectors`, smallest estimated time first.

    The reduction has `taps` loops over `words` words, followed by `end_words` words. Results of
    tiles whose number of blocks is in `narrow` are stored as packed bytes. The time of one word, in
    dot products, is `Isa.time_word`, and more if an accumulator goes to the stack
    (`Isa.count_registers`). A tile takes at least the time of its loads (`TileTiming.load`).
    Overlapping tiles count as work, so sizes that divide evenly win. A tile consists of whole
    accumulators, so an output of fewer than `isa.pixels` pixels has no tile. Pixels `repeat`
    columns apart read the same words (0: no pixels do). LLVM keeps these in registers if it unrolls
    the loop over words. `joined` blocks hold all results of a pixel (0: no number does;
    `joins_results`).
    """
    height, width = out_size
    stack_cost, most_registers = STACK_COST, isa.registers
    latency = max(isa.dots_in_flight, isa.timing.tiles.looped)
    if words <= UNROLLED_WORDS:
        stack_cost, most_registers = UNROLLED_STACK_COST, isa.registers - isa.early_loads
        latency = isa.dots_in_flight
    most_registers = isa.registers * JOINING_SHARE if end_words else most_registers
    found: list[TimedTile] = []
    for blocks in range(1, min(vectors, isa.max_blocks) + 1):
        limit = min(max(isa.accumulators * isa.sharing // blocks, 1), isa.max_pixels)
        for rows in range(1, min(height, limit) + 1):
            for cols in range(1, min(width, limit // rows) + 1):
                pixels = rows * cols
                if pixels % isa.pixels:
                    continue
                dots = pixels * blocks // isa.sharing
                chains = count_chains(dots, words, isa)
                time = isa.time_word(pixels, blocks, latency / chains)
                registers = isa.count_registers(pixels, blocks, dots * chains)
                if repeat and words <= UNROLLED_WORDS and not end_words:
                    registers += rows * max(cols - repeat, 0)
                if registers > isa.registers and not isa.may_spill:
                    continue
                time += stack_cost * (registers > most_registers)
                steps = words * taps + end_words
                tile = Tile(rows, cols, blocks, chains, isa.sharing)
                tiles = ceil_div(height, rows) * ceil_div(width, cols)
                is_narrow = blocks in narrow
                is_joined = is_narrow and joins_results(tile, joined)
                results = dots if is_joined else pixels * blocks
                is_delayed = is_narrow and steps == words and can_delay(tile, words, tiles, isa)
                store = isa.timing.tiles.time_stores(results, blocks, is_narrow, is_delayed)
                time = time * steps + store
                time = max(time, ((pixels + blocks) * steps + dots) * isa.timing.tiles.load)
                cost = tiles * ceil_div(vectors, blocks) * time
                cost = cost * (1 + 0.01 * (rows > 1)) - 0.001 * pixels
                found.append(TimedTile(cost, tile))
    return sorted(found, key=lambda each: each.time)  # stable: of equal tiles the first wins


def count_chains(dots: int, words: int, isa: Isa) -> int:
    """Count the partial sums per result that hide the latency of `dots` dot products per word."""
    return max(min(ceil_div(isa.dots_in_flight, dots), isa.accumulators // dots, words), 1)


def joins_results(tile: Tile, joined: int) -> bool:
    """Whether packed results of all pixels that share a vector of sums follow each other.

    It takes a row of pixels, and the `joined` blocks of a whole one.
    """
    return tile.sharing == 1 or (tile.blocks == joined and tile.cols % tile.sharing == 0)


def can_delay(tile: Tile, words: int, tiles: int, isa: Isa) -> bool:
    """Whether the results of a tile are stored between the products of the next of `tiles`.

    Its sums stay in registers until then. Fewer tiles fetch the weights of the next panel. Where
    pixels share vectors, a tile of more pixels takes less time.
    """
    registers = isa.count_registers(tile.pixels, tile.blocks, 2 * tile.sums) + isa.early_loads
    fits = registers <= isa.registers and tile.chains == isa.pixels == 1
    return fits and words <= isa.timing.tiles.delayed_words and tiles > PREFETCH_TILES


def merge_groups(spec: Conv2d, lanes: int, products: int) -> int:
    """Choose how many neighbouring groups to compute as one, with zero weights between them.

    The number with the fewest dot products wins: merging lengthens the reduction, but fills the
    vectors of `lanes` channels. A step of the reduction multiplies `products` activations.
    """

    def cost(merged: int) -> tuple[int, int]:
        vectors = ceil_div(merged * spec.group_out, lanes)
        steps = ceil_div(merged * spec.group_in, products)
        return spec.groups // merged * vectors * steps, -merged

    return min((d for d in range(1, spec.groups + 1) if spec.groups % d == 0), key=cost)


@dataclass(frozen=True)
class ConvPlan:
    """Choices that generator and packer of a convolution must agree on."""

    spec: Conv2d
    isa: Isa
    weights_per_image: bool = False  #: every image has different weights and bias
    is_part: bool = False  #: reads and writes through a `Placement`

    @cached_property
    def is_matrix(self) -> bool:
        """Whether pixels are contiguous rows of a matrix. Then an image is one row of pixels."""
        spec = self.spec
        plain = spec.kernel == (1, 1) and spec.strides == (1, 1) and not any(spec.padding)
        return plain and not self.is_part

    @cached_property
    def merged(self) -> int:
        return merge_groups(self.spec, self.isa.lanes, self.isa.products)

    @cached_property
    def groups(self) -> int:
        return self.spec.groups // self.merged

    @cached_property
    def group_in(self) -> int:
        return self.spec.in_channels // self.groups

    @cached_property
    def group_out(self) -> int:
        return self.spec.out_channels // self.groups

    @cached_property
    def taps(self) -> tuple[int, int]:
        """Kernel positions that are loops. A kernel row that is contiguous in memory is one run."""
        kh, kw = self.spec.kernel
        contiguous = self.groups == 1 and (self.spec.dilation[1] == 1 or kw == 1)
        return (kh, 1) if contiguous else (kh, kw)

    @cached_property
    def run(self) -> int:
        """Activations of one tap that are consecutive in memory."""
        return self.group_in * self.spec.kernel[1] // self.taps[1]

    @cached_property
    def end(self) -> int:
        """Activations after the whole words of a run, if ends of kernel rows are joined to words.

        0 if each run ends with a separate word that is not full. For example, a row of a first 3x3
        convolution is 9 activations: three rows take 7 words instead of 9.
        """
        products, (rows, cols) = self.isa.products, self.taps
        end = self.run % products
        if not self.isa.joins_ends or cols > 1 or self.run < products or not end or products % end:
            return 0
        return end if ceil_div(rows * end, products) < rows else 0

    @cached_property
    def words(self) -> int:
        """Words of a run, without joined words (`end_words`)."""
        return self.run // self.isa.products if self.end else ceil_div(self.run, self.isa.products)

    @cached_property
    def end_words(self) -> int:
        """Words that join the ends of all runs."""
        return ceil_div(self.taps[0] * self.end, self.isa.products)

    @cached_property
    def panel_words(self) -> int:
        """Dot products of each result."""
        return prod(self.taps) * self.words + self.end_words

    @cached_property
    def pixel_grid(self) -> tuple[int, int, int]:
        """(images, rows, cols) of output pixels as the generator loops over them."""
        spec = self.spec
        if self.is_matrix and self.weights_per_image:
            return spec.batch, 1, spec.height * spec.width
        if self.is_matrix:
            return 1, 1, spec.batch * spec.height * spec.width
        return spec.batch, *spec.out_size

    @cached_property
    def vectors(self) -> int:
        return ceil_div(self.group_out, self.isa.lanes)

    @cached_property
    def narrow_blocks(self) -> tuple[int, ...]:
        """Numbers of channel vectors in a tile for which results can be stored as packed bytes.

        A panel with more channels than exist is stored in a few pieces.
        """
        if not can_narrow(self.isa, self.spec.epilogue):
            return ()
        is_whole = self.group_out % NARROW_PIECE == 0
        return tuple(
            blocks
            for blocks, _ in self.isa.timing.tiles.narrow_store
            if self.group_out >= blocks * self.isa.lanes
            or (is_whole and self.vectors > blocks // 2)
        )

    @cached_property
    def repeat(self) -> int:
        """Columns from a pixel to the next that reads some of the same words, some words earlier.

        0: no pixel does, or it does so within `NEAR_WORDS`, so that a word is not kept for long.
        """
        step, products = self.spec.strides[1] * self.spec.in_channels, self.isa.products
        columns = products // gcd(step, products)
        return columns if NEAR_WORDS * products < columns * step < self.run else 0

    @cached_property
    def timed_tiles(self) -> list[TimedTile]:
        """All possible tiles of an image and group, smallest estimated time first."""
        return rank_tiles(
            self.pixel_grid[1:],
            self.vectors,
            self.words,
            self.isa,
            self.narrow_blocks,
            prod(self.taps),
            self.end_words,
            self.repeat,
            self.joined_blocks,
        )

    @cached_property
    def ranked_tiles(self) -> list[Tile]:
        """All possible tiles, smallest estimated time first."""
        return [each.tile for each in self.timed_tiles]

    @property
    def time(self) -> float:
        """Estimated time of the tiles of an image, in dot products. Infinite without any tile."""
        return self.groups * self.timed_tiles[0].time if self.timed_tiles else inf

    @cached_property
    def tile(self) -> Tile:
        return self.spec.tile or self.ranked_tiles[0]

    @cached_property
    def is_narrow(self) -> bool:
        """Whether results are stored as packed bytes."""
        return self.tile.blocks in self.narrow_blocks

    @cached_property
    def is_delayed(self) -> bool:
        """Whether the results of a tile are stored between the products of the next."""
        tile, (_, rows, cols) = self.tile, self.pixel_grid
        tiles = ceil_div(rows, tile.rows) * ceil_div(cols, tile.cols)
        is_single = self.is_narrow and prod(self.taps) == 1 and not self.end_words
        return is_single and can_delay(tile, self.words, tiles, self.isa)

    @cached_property
    def panel_channels(self) -> int:
        return self.tile.blocks * self.isa.lanes

    @cached_property
    def panels(self) -> int:
        """Runs of `tile.blocks` vectors of channels per group."""
        return ceil_div(self.vectors, self.tile.blocks)

    @cached_property
    def panel_vectors(self) -> int:
        """Packed weight vectors per panel."""
        return self.panel_words * self.tile.blocks

    @cached_property
    def weight_size(self) -> int:
        return self.groups * self.panels * self.panel_vectors * self.isa.weight_vector

    @cached_property
    def weight_bytes(self) -> int:
        return self.weight_size * np.dtype(self.isa.weight_dtype).itemsize

    @cached_property
    def image_bytes(self) -> int:
        """Bytes of all activations as the dot product reads them, without padding."""
        return prod(self.spec.in_shape) * np.dtype(self.isa.activation).itemsize

    @cached_property
    def channel_size(self) -> int:
        """Length of bias and multiplier: one vector for every vector of weights."""
        return self.groups * self.panels * self.panel_channels

    @cached_property
    def fewest_pixels(self) -> int:
        """Pixels of an image."""
        return prod(self.pixel_grid[1:])

    @cached_property
    def instructions(self) -> float:
        """Estimated vector instructions for all tiles and the copy, in vectors of 16 bytes.

        Each word takes dot products, loads of activations and loads of weights. Each tile has to
        split accumulators of several pixels. The copy loads and stores every vector of the input.
        Results are converted and stored, during other products if a matrix unit computes these;
        this is the same for all other instruction sets, as is everything else.
        """
        tile, isa = self.tile, self.isa
        _, rows, cols = self.pixel_grid
        tiles = ceil_div(rows, tile.rows) * ceil_div(cols, tile.cols) * self.pixel_grid[0]
        sums, words = tile.sums, self.panel_words
        weights = tile.blocks * isa.weight_vector * np.dtype(isa.weight_dtype).itemsize / 16
        step = sums * isa.dot_cost + tile.pixels * isa.word_cost + weights
        apart = sums * (isa.pixels - 1)
        copied = 2 * prod(self.spec.in_shape) / 16 if self.needs_copy else 0
        stored = RESULT_INSTRUCTIONS * prod(self.pixel_grid) * self.groups * self.group_out
        return tiles * self.groups * self.panels * (words * step + apart) + copied + stored

    @property
    def result_pitch(self) -> int:
        """Elements of y from one pixel to the next."""
        return self.spec.result_channels

    @property
    def first_result(self) -> int:
        """The first of the channels of y that are written."""
        return self.spec.first_result

    @cached_property
    def store_width(self) -> int:
        """Channels that are stored together: of a vector, or of a panel as packed bytes."""
        return min(self.group_out, self.panel_channels if self.is_narrow else self.isa.lanes)

    @property
    def accumulators(self) -> int:
        """Accumulators of a tile, each with the sums of `Isa.pixels` pixels."""
        return self.tile.pixels // self.isa.pixels * self.tile.blocks

    @property
    def joined_blocks(self) -> int:
        """Number of blocks with which a tile has all results of its pixels, so that these are next
        to each other in memory; 0 if no number does.
        """
        is_whole = self.result_pitch == self.group_out == self.vectors * self.isa.lanes
        return self.vectors if is_whole and not self.is_part else 0

    @property
    def joins_results(self) -> bool:
        """Whether packed results are stored together; see `joins_results`."""
        return joins_results(self.tile, self.joined_blocks)

    @cached_property
    def shift(self) -> int:
        return self.isa.zero_point_shift(self.spec.in_dtype)

    @cached_property
    def needs_copy(self) -> bool:
        """Whether the kernel cannot read its argument in place."""
        reads_past_the_end = self.words * self.isa.products > self.run
        converts = self.spec.in_dtype != self.isa.activation
        return any(self.spec.padding) or converts or reads_past_the_end

    def number_vector(self, word: Any, block: int) -> Any:
        """Return the place of a vector of weights in its panel."""
        return word * self.tile.blocks + block

    def list_runs(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Split OHWI weights, with merged groups, into runs: [group, channel, tap, run]."""
        return weight.reshape(self.groups, self.group_out, prod(self.taps), self.run)

    def order_vectors(self, packed: NDArray[Any]) -> NDArray[Any]:
        """Order the vectors of weights, [group][panel][word][block][...], by `number_vector`."""
        return packed

    @cached_property
    def channel_map(self) -> NDArray[np.int64]:
        """[panel, block, lane] -> channel within the group.

        The last panel or vector is moved back and overlaps its neighbour. Numbers outside the group
        occur only if a group has fewer channels than a vector has lanes, or than a packed panel
        has.
        """
        lanes, blocks = self.isa.lanes, self.tile.blocks
        if self.is_narrow:
            starts = np.arange(self.panels) * self.panel_channels
            starts = np.minimum(starts, max(self.group_out - self.panel_channels, 0))
            return starts[:, None, None] + channel_order(lanes, blocks)
        starts = np.arange(self.panels * blocks) * lanes
        starts = np.minimum(starts, max(self.group_out - lanes, 0))
        return starts.reshape(self.panels, blocks, 1) + np.arange(lanes)

    @cached_property
    def all_channels(self) -> NDArray[np.int64]:
        """Flat channel numbers in the order of bias and multiplier; -1 for no channel."""
        first = np.arange(self.groups)[:, None] * self.group_out
        inside = self.channel_map.reshape(1, -1)
        return np.where(inside < self.group_out, first + inside, -1).reshape(-1)


def list_tiles(plan: ConvPlan, count: int) -> list[Tile]:
    """List the `count` fastest tiles by estimate that differ in blocks, or by a quarter in pixels.

    Among similar tiles the estimate finds the best one well enough.
    """
    chosen: list[Tile] = []
    for tile in plan.ranked_tiles:
        alike = (
            each.blocks == tile.blocks and 0.8 < each.pixels / tile.pixels < 1.25 for each in chosen
        )
        if not any(alike):
            chosen.append(tile)
        if len(chosen) == count:
            break
    return chosen


def pack_constants(plan: ConvPlan, constants: Constants) -> PackedWeights:
    """Pack the constant operands of a kernel for the plan.

    OHWI weight, others as for `pack_channels`.

    Raises:
        ConfigError: A shape does not fit, or the multiplier is missing or not allowed.
    """
    folded, factors = pack_channels(plan.spec, constants, plan.shift, plan.all_channels)
    return PackedWeights(pack_panels(plan, constants.weight), folded, factors)


def pack_panels(plan: ConvPlan, weight: NDArray[np.integer]) -> NDArray[np.integer]:
    """Reorder OHWI weights as the generator reads them: [group][panel][word][block][lane][product].

    They are int8, or int16 for instructions that take int16. The words of all taps come first, one
    tap after the other, then the joined words.
    """
    isa, lanes = plan.isa, plan.isa.lanes
    runs = plan.list_runs(expand_groups(weight, plan.spec.groups, plan.merged))
    whole = plan.run - plan.end
    channels = plan.channel_map.max() + 1
    padded = np.zeros((plan.groups, channels, plan.panel_words * isa.products), weight.dtype)
    first_end = prod(plan.taps) * plan.words * isa.products
    words = padded[..., :first_end].reshape(plan.groups, channels, prod(plan.taps), -1)
    words[:, : plan.group_out, :, :whole] = runs[..., :whole]
    padded[..., :first_end] = words.reshape(plan.groups, channels, -1)
    ends = runs[..., whole:].reshape(plan.groups, plan.group_out, -1)
    padded[:, : plan.group_out, first_end : first_end + ends.shape[-1]] = ends
    # [group, panel, block, lane, word, product]
    split = padded[:, plan.channel_map].reshape(
        plan.groups, plan.panels, plan.tile.blocks, lanes, plan.panel_words, isa.products
    )
    ordered = np.ascontiguousarray(split.transpose(0, 1, 4, 2, 3, 5))
    return np.ascontiguousarray(plan.order_vectors(isa.arrange_weights(ordered))).reshape(-1)


def expand_groups(weight: NDArray[np.integer], groups: int, merged: int) -> NDArray[np.integer]:
    """Expand [O, KH, KW, I/groups] -> [O, KH, KW, merged * I/groups], with zeros between groups."""
    if merged == 1:
        return weight
    out, kh, kw, group_in = weight.shape
    group_out = out // groups
    wide = np.zeros((out, kh, kw, merged, group_in), weight.dtype)
    member = np.arange(out) // group_out % merged
    wide[np.arange(out), :, :, member] = weight
    return wide.reshape(out, kh, kw, merged * group_in)
