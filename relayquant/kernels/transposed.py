"""Transposed convolutions, integer and float: which ordinary convolutions they consist of.

    y[q*s + p] = sum over k with (p + pad - k*d) % s == 0 of x[q + (p + pad - k*d) / s] * w[k]

Every phase p of the stride sees its own subset of the kernel, flipped, at stride 1. So the work is
that of the products that exist; no zeros are inserted between the pixels. With g = gcd(s, d), every
(s / g)-th k is in the subset, and their pixels are d / g apart: that is the dilation of the phase's
convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from relayquant.kernels.emit import ceil_div


@dataclass(frozen=True)
class AxisPhase:
    """One phase along one axis: kernel positions in reading order, and the first input it reads."""

    phase: int
    taps: tuple[int, ...]  #: empty where only the bias reaches the output
    first: int  #: input coordinate of taps[0] for the first output; negative: in the padding
    outputs: int


@dataclass(frozen=True)
class TransposedAxis:
    """One axis of a transposed convolution: `padding` (before, after) takes pixels away from the
    output, `extra` adds some at its end.
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


def split_axes(
    size: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
    output_padding: tuple[int, int],
    dilation: tuple[int, int],
) -> tuple[TransposedAxis, TransposedAxis]:
    """Rows and columns of a transposed convolution; `padding` is (top, left, bottom, right)."""
    top, left, bottom, right = padding
    pads = (top, bottom), (left, right)
    rows, cols = (
        TransposedAxis(*axis)
        for axis in zip(size, kernel, strides, pads, output_padding, dilation, strict=True)
    )
    return rows, cols
