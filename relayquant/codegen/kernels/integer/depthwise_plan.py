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

#: With fewer vector registers, the words of a block go to the stack.
BLOCK_REGISTERS = 32
#: Output columns that are unrolled, since 3 columns of the input are kept.
TOGETHER = 3
#: Most channels that blocks may compute per existing channel.
MOST_OVERLAP = 1.5


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

        The last block may overlap its neighbour. 0: vectors are processed one by one.
        """
        spec, isa = self.spec, self.isa
        size, channels = PACKED * isa.lanes, spec.out_channels
        count = ceil_div(channels, size)
        pays = self.words == self.out_rows == 1 and spec.strides[1] > 1
        fits = isa.products == PACKED and isa.registers >= BLOCK_REGISTERS
        enough = size <= channels and count * size <= MOST_OVERLAP * channels
        if not (pays and fits and enough and can_narrow(isa, spec.epilogue)):
            return 0
        return 0 if spec.epilogue.residual else count

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
        if self.blocks:
            return PACKED * self.blocks
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
    def needs_copy(self) -> bool:
        """Whether reading a whole vector of channels would exceed the argument."""
        return self.spec.out_channels < self.isa.lanes

    @cached_property
    def channel_map(self) -> NDArray[np.int64]:
        """[vector, lane] -> channel. The last vector overlaps its neighbour.

        In blocks, lanes have the channels that interleaving puts there (`emit_interleaved`).
        """
        lanes = self.isa.lanes
        if not self.blocks:
            last = max(self.spec.out_channels - lanes, 0)
            starts = np.minimum(np.arange(self.vectors) * lanes, last)
            return starts[:, None] + np.arange(lanes)
        size = PACKED * lanes
        starts = np.minimum(np.arange(self.blocks) * size, self.spec.out_channels - size)
        return (starts[:, None, None] + channel_order(lanes, PACKED)).reshape(-1, lanes)


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
