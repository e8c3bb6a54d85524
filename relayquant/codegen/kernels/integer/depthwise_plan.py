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
from relayquant.codegen.kernels.integer.saturating_pack import PACKED, can_narrow, channel_order
from relayquant.codegen.kernels.integer.specs import Conv2d, PackedWeights, pack_channels
from relayquant.codegen.kernels.isa.base import Isa

#: Registers for what is neither a word of the window nor a sum of a block.
FREE_REGISTERS = 8
#: Most output columns that read padding. A block has separate code for each of them.
SEPARATE_COLUMNS = 2
#: Output columns that are unrolled, since 3 columns of the input are kept.
TOGETHER = 3


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
    def blocks(self) -> int:
        """Number of blocks: four vectors of channels whose rows are interleaved together.

        The channels after the last block are processed vector by vector. So are all if a product
        takes several instructions and registers, and words serve several rows.
        """
        fits = self.isa.products == PACKED and self.words == 1 and self.is_window_small
        fits = fits and (self.isa.is_fused or self.out_rows == 1)
        if not (fits and can_narrow(self.isa, self.spec.epilogue)) or self.spec.epilogue.residual:
            return 0
        return self.spec.out_channels // (PACKED * self.isa.lanes)

    @cached_property
    def is_window_small(self) -> bool:
        """Whether the words and sums of a block stay in registers, and few columns have padding."""
        before, behind = self.inside_columns
        registers = PACKED * (self.span + self.out_rows) + FREE_REGISTERS
        separate = before + self.spec.out_size[1] - behind
        return registers <= self.isa.registers and separate <= SEPARATE_COLUMNS

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
        for block in range(self.blocks):
            order = block * size + channel_order(lanes, PACKED)
            channels[block * PACKED : (block + 1) * PACKED] = order
        return channels


def plan_depthwise(spec: Conv2d, isa: Isa) -> DepthwisePlan:
    """Make the plan of `spec` for generator and packer."""
    return DepthwisePlan(spec, isa.for_activations(spec.in_dtype).for_depthwise(spec.out_channels))


def pack_depthwise(
    spec: Conv2d,
    isa: Isa,
    weight: NDArray[np.int8],
    bias: NDArray[np.int32],
    multiplier: NDArray[np.float32] | None,
) -> PackedWeights:
    """Pack the constant operands of `build_depthwise`; weight (C, KH, KW, 1)."""
    plan = plan_depthwise(spec, isa)
    isa, channels = plan.isa, plan.channel_map
    folded, factors = pack_channels(
        spec, weight, bias, multiplier, plan.shift, channels.reshape(-1)
    )
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
