"""Transposed convolution -> the ordinary convolutions it consists of, integer and float.

    y[q*s + p] = sum over k with (p + pad - k*d) % s == 0 of x[q + (p + pad - k*d) / s] * w[k]

Every phase p of the stride reads a different subset of the kernel, flipped, at stride 1. So only
needed products are computed, and no zeros are inserted between the pixels. With g = gcd(s, d),
every (s / g)-th k is in the subset. The pixels under these taps are d / g apart, which is the
dilation of the phase's convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.conv_shape import Conv2dShape, ConvShape
from relayquant.codegen.kernels.emit import ceil_div


@dataclass(frozen=True)
class AxisPhase:
    """One phase along one axis: kernel positions in reading order, and the first input it reads."""

    phase: int
    taps: tuple[int, ...]  #: empty if only the bias reaches the output
    first: int  #: input coordinate of taps[0] for the first output; negative: in the padding
    outputs: int


@dataclass(frozen=True)
class TransposedAxis:
    """One axis of a transposed convolution.

    `padding` (before, after) removes pixels of the output, `extra` adds pixels at its end.
    """

    size: int
    kernel: int
    stride: int
    padding: tuple[int, int]
    extra: int
    dilation: int

    @property
    def outputs(self) -> int:
        span = (self.size - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
        return span - sum(self.padding) + self.extra

    @property
    def step(self) -> int:
        """Distance of the pixels under neighbouring taps of one phase."""
        return self.dilation // gcd(self.dilation, self.stride)

    @cached_property
    def phases(self) -> list[AxisPhase]:
        phases = []
        for phase in range(min(self.stride, self.outputs)):
            start = phase + self.padding[0]
            taps = tuple(
                k
                for k in reversed(range(self.kernel))
                if (start - k * self.dilation) % self.stride == 0
            )
            first = (start - taps[0] * self.dilation) // self.stride if taps else 0
            outputs = ceil_div(self.outputs - phase, self.stride)
            phases.append(AxisPhase(phase, taps, first, outputs))
        return phases

    @property
    def border(self) -> tuple[int, int]:
        """Pixels before and after the image that some phase reads."""
        ends = [p.first + p.outputs + (max(len(p.taps), 1) - 1) * self.step for p in self.phases]
        return max(0, -min(p.first for p in self.phases)), max(0, max(ends) - self.size)


@dataclass(frozen=True)
class TransposedShape(ConvShape):
    """Extents of a transposed convolution.

    `padding` removes pixels of the output, `output_padding` adds rows and columns at the end.
    """

    output_padding: tuple[int, int] = (0, 0)

    @cached_property
    def axes(self) -> tuple[TransposedAxis, TransposedAxis]:
        """Axis of rows and axis of columns."""
        top, left, bottom, right = self.padding
        rows, cols = (
            TransposedAxis(*axis)
            for axis in zip(
                (self.height, self.width), self.kernel, self.strides,
                ((top, bottom), (left, right)), self.output_padding, self.dilation, strict=True,
            )
        )  # fmt: skip
        return rows, cols

    @property
    def phases(self) -> list[tuple[AxisPhase, AxisPhase]]:
        """All pairs of a row phase and a column phase."""
        rows, cols = self.axes
        return list(product(rows.phases, cols.phases))

    @property
    def border(self) -> tuple[int, int, int, int]:
        """(top, left, bottom, right): pixels around the image that some phase reads."""
        (top, bottom), (left, right) = (axis.border for axis in self.axes)
        return top, left, bottom, right

    @property
    def out_size(self) -> tuple[int, int]:
        """(OH, OW)."""
        rows, cols = self.axes
        return rows.outputs, cols.outputs

    def shape_part(self, rows: AxisPhase, cols: AxisPhase) -> Conv2dShape:
        """Return the convolution of one phase. An empty kernel becomes one zero weight."""
        kernel = max(len(rows.taps), 1), max(len(cols.taps), 1)
        down, right = (axis.step for axis in self.axes)
        return Conv2dShape(
            self.batch,
            rows.outputs + (kernel[0] - 1) * down,
            cols.outputs + (kernel[1] - 1) * right,
            self.in_channels,
            self.out_channels,
            kernel,
            dilation=(down, right),
            groups=self.groups,
        )

    def split_weight(self, weight: NDArray[Any]) -> list[NDArray[Any]]:
        """Split the weights by phase, OHWI.

        w[o, ky, kx, i] multiplies the pixel ky steps down and kx steps right, where a step is the
        dilation of the phase's convolution.
        """
        parts = []
        for rows, cols in self.phases:
            taps = np.zeros(self.shape_part(rows, cols).weight_shape, weight.dtype)
            if rows.taps and cols.taps:
                taps[:] = weight[:, rows.taps][:, :, cols.taps]
            parts.append(taps)
        return parts
