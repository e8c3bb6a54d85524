"""Float transposed convolutions in NHWC, as interleaved ordinary ones (see `kernels.transposed`).

    y[n, q*s + p, o] = sum over k with (p + pad - k*d) % s == 0
                       of x[n, q + (p + pad - k*d) / s, i] * w[o, k, i]
                       (+ bias[o]) (+ residual), clipped

One axis is shown. The batch may be symbolic; everything else is static.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.tirx import PrimFunc

from relayquant.kernels.emit import build_kernel
from relayquant.kernels.floating.conv import (
    FloatConv2d,
    FloatPlacement,
    count_macs,
    emit_padding,
    emit_tiles,
    pack_conv2d,
    packed_conv2d_size,
    plan_conv2d,
)
from relayquant.kernels.floating.tile import (
    PARALLEL_MACS,
    FloatEpilogue,
    FloatIsa,
    declare_arguments,
)
from relayquant.kernels.transposed import AxisPhase, TransposedAxis, split_axes


@dataclass(frozen=True)
class FloatConv2dTranspose:
    """A float transposed convolution: data NHWC, weights OHWI.

    `padding` is (top, left, bottom, right) and takes pixels away from the output, `output_padding`
    adds rows and columns at the end.
    """

    batch: Any
    height: int
    width: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    output_padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    epilogue: FloatEpilogue = field(default_factory=FloatEpilogue)

    @property
    def axes(self) -> tuple[TransposedAxis, TransposedAxis]:
        """Rows and columns."""
        return split_axes(
            (self.height, self.width), self.kernel, self.strides, self.padding,
            self.output_padding, self.dilation,
        )  # fmt: skip

    @property
    def out_size(self) -> tuple[int, int]:
        """(OH, OW)."""
        rows, cols = self.axes
        return rows.outputs, cols.outputs

    @property
    def in_shape(self) -> tuple[Any, int, int, int]:
        return self.batch, self.height, self.width, self.in_channels

    @property
    def out_shape(self) -> tuple[Any, int, int, int]:
        return (self.batch, *self.out_size, self.epilogue.pitch(self.out_channels))

    @property
    def image(self) -> FloatConv2d:
        """The padded input, as the input of a 1x1 convolution."""
        (top, bottom), (left, right) = (axis.border for axis in self.axes)
        return FloatConv2d(
            *self.in_shape, self.out_channels, (1, 1), padding=(top, left, bottom, right)
        )

    @property
    def phases(self) -> list[tuple[AxisPhase, AxisPhase]]:
        rows, cols = self.axes
        return list(product(rows.phases, cols.phases))

    def part(self, rows: AxisPhase, cols: AxisPhase) -> FloatConv2d:
        """The convolution of one phase; an empty kernel becomes one zero weight."""
        kernel = max(len(rows.taps), 1), max(len(cols.taps), 1)
        step = self.axes[0].step, self.axes[1].step
        return FloatConv2d(
            self.batch,
            rows.outputs + (kernel[0] - 1) * step[0],
            cols.outputs + (kernel[1] - 1) * step[1],
            self.in_channels,
            self.out_channels,
            kernel,
            dilation=step,
            groups=self.groups,
            epilogue=self.epilogue,
        )


def packed_conv2d_transpose_size(spec: FloatConv2dTranspose, isa: FloatIsa) -> int:
    """Elements of the packed weights."""
    return sum(packed_conv2d_size(spec.part(*phase), isa) for phase in spec.phases)


def pack_conv2d_transpose(
    weight: NDArray[np.float32], spec: FloatConv2dTranspose, isa: FloatIsa
) -> NDArray[np.float32]:
    """OHWI -> the packed weights of each phase (see `pack_conv2d`), one behind the other.

    w[o, ky, kx, i] multiplies the pixel that is written ky rows and kx columns further on.
    """
    parts = []
    for rows, cols in spec.phases:
        part = spec.part(rows, cols)
        taps = np.zeros((part.out_channels, *part.kernel, part.group_in), "float32")
        if rows.taps and cols.taps:
            taps[:] = weight[:, rows.taps][:, :, cols.taps]
        parts.append(pack_conv2d(taps, part, isa))
    return np.concatenate(parts)


def make_conv2d_transpose(
    spec: FloatConv2dTranspose, isa: FloatIsa, name: str = "float_conv2d_transpose"
) -> PrimFunc:
    """PrimFunc(x, packed weights, (bias,) (residual,) y), callable through `call_tir`.

    Of a group there must be two output channels or more.
    """
    parts = [spec.part(*phase) for phase in spec.phases]

    def body() -> None:
        x, weight, bias, residual, y = declare_arguments(
            ("x", spec.in_shape),
            ("w", (packed_conv2d_transpose_size(spec, isa),)),
            ("bias", (spec.out_channels,)) if spec.epilogue.bias else None,
            ("residual", spec.out_shape) if spec.epilogue.residual else None,
            ("y", spec.out_shape),
        )
        threads = sum(map(count_macs, parts)) >= PARALLEL_MACS
        image = emit_padding(spec.image, isa, x, threads) if any(spec.image.padding) else x
        top, left, _, _ = spec.image.padding
        first_weight = 0
        for part, (rows, cols) in zip(parts, spec.phases, strict=True):
            placement = FloatPlacement(
                image=spec.image.padded_size,
                size=spec.out_size,
                origin=(top + rows.first, left + cols.first),
                stride=spec.strides,
                offset=(rows.phase, cols.phase),
                first_weight=first_weight,
            )
            narrow, panels = plan_conv2d(part, isa)
            emit_tiles(part, narrow, panels, image, weight, bias, residual, y, threads, placement)
            first_weight += packed_conv2d_size(part, isa)

    return build_kernel(name, body)
