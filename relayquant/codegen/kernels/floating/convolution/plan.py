"""Specification of a float convolution -> its plan: the panels, the pixels of a tile, their order.

The plan decides how weights are packed. `pack_conv2d` packs them at compile time, `direct` emits
the kernel that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.conv_shape import Conv2dShape
from relayquant.codegen.kernels.floating.gemm import (
    FloatDense,
    list_dense_schedules,
    pack_groups,
    plan_dense,
)
from relayquant.codegen.kernels.floating.stored import Stored
from relayquant.codegen.kernels.floating.tile import (
    FLOAT_BYTES,
    RESIDENT_WEIGHTS,
    FloatEpilogue,
    FloatIsa,
    FloatSchedule,
    Panels,
    choose_panels,
    list_float_schedules,
    prefers_panels,
    static,
)


@dataclass(frozen=True)
class FloatConv2d(Conv2dShape):
    """A float convolution and its epilogue.

    `stored` says which tensors are bfloat16 in memory. Depthwise kernels and the kernels of module
    `bf16` support it; all others read and write float32 only.
    """

    epilogue: FloatEpilogue = field(default_factory=FloatEpilogue)
    stored: Stored = field(default_factory=Stored)
    schedule: FloatSchedule | None = None  #: None: the estimated best
    #: whether data, weights and result are sequences: images of height 1, without the height
    is_sequence: bool = False

    @property
    def in_shape(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """NHWC, or NWC of sequences."""
        return self.leave_height(*super().in_shape)

    @property
    def out_shape(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shape of the tensor that is written into."""
        shape = self.batch, *self.out_size, self.epilogue.pitch(self.out_channels)
        return self.leave_height(*shape)

    def leave_height(self, first: Any, height: int, *others: int) -> tuple[Any, ...]:
        """Return the shape of a tensor, without its height for sequences."""
        return (first, *others) if self.is_sequence else (first, height, *others)

    @property
    def is_pointwise(self) -> bool:
        """Whether the convolution is a matrix product over pixels."""
        return (
            self.kernel == (1, 1)
            and self.strides == (1, 1)
            and self.padding == (0, 0, 0, 0)
            and self.groups == 1
        )

    def lay_down(self) -> FloatConv2d:
        """Return a convolution over one column, as in conv1d, as the same convolution over one row.

        The memory is the same, and the taps of a row are contiguous.
        """
        if self.width != 1 or self.kernel[1] != 1 or self.padding[1] or self.padding[3]:
            return self
        top, _, bottom, _ = self.padding
        return replace(
            self,
            height=1,
            width=self.height,
            kernel=self.kernel[::-1],
            strides=self.strides[::-1],
            padding=(0, top, 0, bottom),
            dilation=self.dilation[::-1],
        )

    def as_dense(self) -> FloatDense:
        """Return the same computation as a dense layer, if `is_pointwise`."""
        return FloatDense(self.in_shape, self.out_channels, self.epilogue, self.schedule)


def plan_conv2d(spec: FloatConv2d, isa: FloatIsa) -> tuple[FloatIsa, Panels]:
    """Choose vector width and panels of one group, which determine the layout of the weights."""
    if spec.is_depthwise:
        narrow = isa.narrow(spec.out_channels)
        return narrow, Panels(spec.out_channels, narrow.lanes, 1, narrow.accumulators)
    if spec.is_pointwise:
        return plan_dense(spec.as_dense(), isa)
    pitch = spec.strides[1] * spec.in_channels
    # Windows of neighbouring pixels share cache lines, which stay only if half of a set is enough.
    pitch = pitch if spec.kernel == (1, 1) else 2 * pitch
    isa, panels = choose_panels(spec.group_out, None, isa, pitch)
    return isa, panels.follow(spec.schedule)


def walks_panels(spec: FloatConv2d, isa: FloatIsa, panels: Panels) -> bool:
    """Whether all pixels are computed for each panel of weights."""
    if spec.groups > 1:
        return False
    if spec.schedule is not None:
        return spec.schedule.by_panels
    rows, cols = choose_tile(spec, panels.most_rows)
    tiles = -(-spec.out_size[0] // rows) * -(-spec.out_size[1] // cols)
    image_bytes = prod(spec.padded_size) * spec.in_channels * FLOAT_BYTES
    taps = spec.kernel[0] * spec.kernel[1] * spec.in_channels
    return panels.full >= 4 and prefers_panels(
        panels.vectors * panels.lanes * taps * FLOAT_BYTES,
        (static(spec.batch) or 1) * image_bytes,
        isa,
        many_tiles=tiles >= 32 and image_bytes > RESIDENT_WEIGHTS,
    )


def list_conv2d_schedules(spec: FloatConv2d, isa: FloatIsa) -> list[FloatSchedule]:
    """List schedules of a convolution that is not depthwise, with the estimated best first."""
    if spec.is_pointwise:
        return list_dense_schedules(spec.as_dense(), isa)
    isa, panels = plan_conv2d(spec, isa)
    return list_float_schedules(panels, walks_panels(spec.lay_down(), isa, panels), isa)


def packed_conv2d_size(spec: FloatConv2d, isa: FloatIsa) -> int:
    """Count the elements of the packed weights."""
    isa, panels = plan_conv2d(spec, isa)
    taps = spec.kernel[0] * spec.kernel[1]
    if spec.is_depthwise:
        return taps * spec.out_channels
    return spec.groups * panels.vectors * isa.lanes * taps * spec.group_in


def pack_conv2d(
    weight: NDArray[np.float32], spec: FloatConv2d, isa: FloatIsa
) -> NDArray[np.float32]:
    """Pack OHWI -> flat [group][panel][KH][KW][I][vector of the panel][lanes]; depthwise
    [KH][KW][C].
    """
    isa, panels = plan_conv2d(spec, isa)
    taps = spec.kernel[0] * spec.kernel[1]
    if spec.is_depthwise:
        flat = weight.reshape(spec.out_channels, taps).T
        return np.ascontiguousarray(flat, dtype="float32").reshape(-1)
    return pack_groups(weight.reshape(spec.groups, spec.group_out, taps * spec.group_in), panels)


def count_macs(spec: FloatConv2d) -> int:
    """Count the multiply-adds of one call. A symbolic batch counts as 1."""
    oh, ow = spec.out_size
    taps = spec.kernel[0] * spec.kernel[1] * spec.group_in
    return (static(spec.batch) or 1) * oh * ow * spec.out_channels * taps


def choose_tile(spec: FloatConv2d, most: int) -> tuple[int, int]:
    """Choose (rows, columns) of the pixel tile with the least work at the overlapping ends."""
    oh, ow = spec.out_size
    best: tuple[float, int, int] | None = None
    for rows in range(1, min(oh, 7) + 1):
        for cols in range(1, min(ow, most // rows) + 1):
            pixels, tiles = rows * cols, -(-oh // rows) * -(-ow // cols)
            cost = tiles * (max(pixels, most * 0.6) + 1.0) + 0.01 * rows - 0.001 * pixels
            if best is None or cost < best[0]:
                best = (cost, rows, cols)
    assert best is not None  # a convolution has at least one output pixel
    return best[1:]
