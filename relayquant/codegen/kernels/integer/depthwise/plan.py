"""Specification of a depthwise convolution -> words, blocks and weight order.

Generator and packer share the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.integer.saturating_pack import (
    PACKED,
    PART,
    can_narrow,
    channel_order,
)
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, PackedWeights, pack_channels
from relayquant.codegen.kernels.isa.base import Isa

#: Registers for what is neither a word of the window nor a sum of a block.
FREE_REGISTERS = 8
#: Most output columns that read padding. A block has separate code for each of them.
SEPARATE_COLUMNS = 2
#: Output columns that are unrolled, since 3 columns of the input are kept.
TOGETHER = 3
#: Groups of output rows of a block that is split. With four, loads take more time than they save.
GROUPS = 2
#: In times of a block: of a vector, of each column that it interleaves; added by groups of rows.
VECTOR_TIME, COLUMN_TIME, GROUP_TIME = 0.27, 0.08, 0.06


@dataclass(frozen=True)
class Blocks:
    """Blocks of four vectors. The vectors hold the same channels of `groups` groups of output rows.

    A last block that would go beyond the channels, or the rows, is moved back.
    """

    groups: int
    width: int  #: channels of a block
    count: int  #: blocks that cover the channels
    row_units: int  #: blocks that cover the output rows
    first: int  #: number of blocks before, which are `width * groups` channels wide

    @property
    def units(self) -> int:
        """Blocks of an image."""
        return self.count * self.row_units


@dataclass(frozen=True)
class DepthwisePlan:
    """Choices that generator and packer of a depthwise convolution must agree on."""

    spec: Conv2d
    isa: Isa

    @cached_property
    def words(self) -> int:
        """Words that hold the input rows of one output row."""
        return ceil_div(self.spec.kernel[0], self.isa.products)

    @cached_property
    def out_rows(self) -> int:
        """Output rows that fit the same words."""
        if self.spec.dilation[0] > 1:
            return 1
        free = self.words * self.isa.products - self.spec.kernel[0]
        return min(free // self.spec.strides[0] + 1, self.spec.out_size[0])

    @cached_property
    def has_blocks(self) -> bool:
        """Whether channels are processed in blocks: four vectors that are interleaved together.

        They are not if a product takes several instructions and registers, and words serve several
        rows.
        """
        fits = self.isa.products == PACKED and self.words == 1 and self.is_window_small
        fits = fits and (self.isa.is_fused or self.out_rows == 1)
        narrow = can_narrow(self.isa, self.spec.epilogue) and not self.spec.epilogue.residual
        return fits and narrow

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks with one group of output rows."""
        size = PACKED * self.isa.lanes
        count = self.spec.out_channels // size if self.has_blocks else 0
        return Blocks(1, size, count, ceil_div(self.spec.out_size[0], self.out_rows), 0)

    @cached_property
    def split_blocks(self) -> Blocks | None:
        """Blocks of `GROUPS` groups of rows, for the channels after the other blocks.

        None: these are vectors. A vector takes more instructions for a result, but a block does
        more than is needed where channels or rows do not divide evenly.
        """
        (height, _), size = self.spec.out_size, self.blocks.width
        rest = self.spec.out_channels - self.blocks.count * size
        if not self.has_blocks or not rest:
            return None
        width, rows = size // GROUPS, GROUPS * self.out_rows
        if self.isa.lanes < GROUPS * PART or width > self.spec.out_channels or rows > height:
            return None
        count, units = ceil_div(rest, width), ceil_div(height, rows)
        split = Blocks(GROUPS, width, count, units, self.blocks.count)
        vectors = ceil_div(rest, self.isa.lanes) * self.blocks.row_units
        time = vectors * (VECTOR_TIME + (self.span - self.kept) * COLUMN_TIME)
        return split if split.units * (1 + GROUP_TIME) < time else None

    @cached_property
    def is_window_small(self) -> bool:
        """Whether the words and sums of a block stay in registers, and few columns have padding."""
        before, behind = self.inside_columns
        registers = PACKED * (self.span + self.out_rows) + FREE_REGISTERS
        separate = before + self.spec.out_size[1] - behind
        return registers <= self.isa.registers and separate <= SEPARATE_COLUMNS

    @cached_property
    def is_delayed(self) -> bool:
        """Whether the results of a row of a block are stored after the products of the next.

        Products of several instructions leave no registers for these results.
        """
        return self.isa.timing.tiles.delays_rows and self.isa.is_fused

    @cached_property
    def is_narrow(self) -> bool:
        """Whether results are stored as packed bytes, four vectors at a time."""
        columns = PACKED // math.gcd(PACKED, self.out_rows)
        enough = self.spec.out_size[1] >= columns and self.spec.out_channels >= self.isa.lanes
        return enough and can_narrow(self.isa, self.spec.epilogue)

    @cached_property
    def columns(self) -> int:
        """Output columns that are unrolled.

        These are the columns whose results are stored together. If a word is one row, so that there
        are few words, they are as many columns as the window needs to come back to the same
        registers.
        """
        if self.is_narrow:
            return PACKED // math.gcd(PACKED, self.out_rows)
        slides = self.isa.products == 1 and self.spec.strides[1] == 1 < self.span
        return min(TOGETHER, self.spec.out_size[1]) if slides else 1

    @cached_property
    def vectors(self) -> int:
        """Vectors of packed channels. Split blocks may have a channel more than once."""
        if self.split_blocks is not None:
            return PACKED * (self.blocks.count + self.split_blocks.count)
        return ceil_div(self.spec.out_channels, self.isa.lanes)

    @cached_property
    def vector_weights(self) -> int:
        """Packed weight vectors per channel vector: [out_rows][kernel width][words]."""
        return self.out_rows * self.spec.kernel[1] * self.words

    @cached_property
    def channel_size(self) -> int:
        """Length of bias and multiplier: one vector for every vector of channels."""
        return self.vectors * self.isa.lanes

    @cached_property
    def weight_size(self) -> int:
        return self.vectors * self.vector_weights * self.isa.weight_vector

    @cached_property
    def shift(self) -> int:
        return self.isa.zero_point_shift(self.spec.in_dtype)

    @cached_property
    def span(self) -> int:
        """Input columns under the kernel."""
        return (self.spec.kernel[1] - 1) * self.spec.dilation[1] + 1

    @cached_property
    def kept(self) -> int:
        """Input columns under the kernel that the next output column shares."""
        return max(self.span - self.spec.strides[1], 0)

    def reads_slot(self, slot: int) -> bool:
        """Whether the words of a column under the kernel are used, here or after a move."""
        return self.kept > 0 or slot % self.spec.dilation[1] == 0

    @cached_property
    def inside_columns(self) -> tuple[int, int]:
        """(first, end) of the output columns that load no input column outside the image.

        Kept columns are not loaded, except before the first output column.
        """
        (_, stride), left, width = self.spec.strides, self.spec.padding[1], self.spec.out_size[1]
        first = min(ceil_div(max(left - self.kept, 0), stride), width)
        end = (self.spec.width + left - self.span) // stride + 1
        return first, min(max(end, first), width)

    @cached_property
    def needs_copy(self) -> bool:
        """Whether reading a whole vector of channels would exceed the argument."""
        return self.spec.out_channels < self.isa.lanes

    @cached_property
    def channel_map(self) -> NDArray[np.int64]:
        """[vector, lane] -> channel. The last vector overlaps its neighbour.

        In blocks, lanes have the channels that interleaving puts there (`emit_interleaved`).
        """
        lanes, size = self.isa.lanes, PACKED * self.isa.lanes
        starts = np.arange(self.vectors) * lanes
        starts = np.minimum(starts, max(self.spec.out_channels - lanes, 0))
        channels = starts[:, None] + np.arange(lanes)
        order = channel_order(lanes, PACKED)
        for blocks in filter(None, (self.blocks, self.split_blocks)):
            for i in range(blocks.count):
                first = (blocks.first + i) * PACKED
                start = blocks.first * size + i * blocks.width
                start = min(start, self.spec.out_channels - blocks.width)
                channels[first : first + PACKED] = start + order % blocks.width
        return channels


def plan_depthwise(spec: Conv2d, isa: Isa) -> DepthwisePlan:
    """Make the plan of `spec` for generator and packer."""
    return DepthwisePlan(spec, isa.for_activations(spec.in_dtype).for_depthwise(spec.out_channels))


def pack_depthwise(spec: Conv2d, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the constant operands of `build_depthwise`; weight (C, KH, KW, 1)."""
    plan, weight = plan_depthwise(spec, isa), constants.weight
    isa, channels = plan.isa, plan.channel_map
    folded, factors = pack_channels(spec, constants, plan.shift, channels.reshape(-1))
    (kh, kw), lanes = spec.kernel, isa.lanes
    rows = plan.words * isa.products
    shifted = np.zeros((max(spec.out_channels, lanes), plan.out_rows, kw, rows), "int8")
    for r in range(plan.out_rows):
        first = r * spec.strides[0]
        taps = weight[..., 0].transpose(0, 2, 1)
        shifted[: spec.out_channels, r, :, first : first + kh] = taps
    vectors = shifted[channels]
    split = vectors.reshape(plan.vectors, lanes, plan.out_rows, kw, plan.words, isa.products)
    ordered = np.ascontiguousarray(split.transpose(0, 2, 3, 4, 1, 5))
    packed = np.ascontiguousarray(isa.arrange_weights(ordered)).reshape(-1)
    return PackedWeights(packed, folded, factors)
