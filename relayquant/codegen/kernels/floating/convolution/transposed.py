"""Specification of a float transposed convolution -> its kernel in NHWC.

The kernel interleaves ordinary convolutions (see `kernels.transposed`).

    y[n, q*s + p, o] = sum over k with (p + pad - k*d) % s == 0
                       of x[n, q + (p + pad - k*d) / s, i] * w[o, k, i]
                       (+ bias[o]) (+ residual), clipped

One axis is shown. The batch may be symbolic; everything else is static.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import build_kernel
from relayquant.codegen.kernels.floating.convolution.direct import (
    ConvTiles,
    FloatPlacement,
    emit_padding,
    emit_tiles,
)
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    count_macs,
    pack_conv2d,
    packed_conv2d_size,
    plan_conv2d,
)
from relayquant.codegen.kernels.floating.tile import (
    PARALLEL_MACS,
    FloatEpilogue,
    FloatIsa,
    declare_arguments,
)
from relayquant.codegen.kernels.transposed import TransposedShape


@dataclass(frozen=True)
class FloatConv2dTranspose(TransposedShape):
    """A float transposed convolution and its epilogue."""

    epilogue: FloatEpilogue = field(default_factory=FloatEpilogue)

    @property
    def out_shape(self) -> tuple[Any, int, int, int]:
        """NHWC shape of the tensor that is written into."""
        return (self.batch, *self.out_size, self.epilogue.pitch(self.out_channels))

    @property
    def image(self) -> FloatConv2d:
        """The padded input, as the input of a 1x1 convolution."""
        return FloatConv2d(*self.in_shape, self.out_channels, (1, 1), padding=self.border)

    @property
    def parts(self) -> list[FloatConv2d]:
        """The convolution of each phase."""
        return [
            FloatConv2d(**vars(self.shape_part(*phase)), epilogue=self.epilogue)
            for phase in self.phases
        ]


def pack_conv2d_transpose(
    weight: NDArray[np.float32], spec: FloatConv2dTranspose, isa: FloatIsa
) -> NDArray[np.float32]:
    """Pack OHWI -> the packed weights of each phase (see `pack_conv2d`), one after the other."""
    parts = zip(spec.split_weight(weight), spec.parts, strict=True)
    return np.concatenate([pack_conv2d(taps, part, isa) for taps, part in parts])


def make_conv2d_transpose(
    spec: FloatConv2dTranspose, isa: FloatIsa, name: str = "float_conv2d_transpose"
) -> PrimFunc:
    """Make PrimFunc(x, packed weights, (bias,) (residual,) y), for `call_tir`.

    A group needs at least two output channels.
    """
    parts = spec.parts
    sizes = [packed_conv2d_size(part, isa) for part in parts]

    def body() -> None:
        declared = declare_arguments(
            ("x", spec.in_shape),
            ("w", (sum(sizes),)),
            ("bias", (spec.out_channels,)) if spec.epilogue.bias else None,
            ("residual", spec.out_shape) if spec.epilogue.residual else None,
            ("y", spec.out_shape),
        )
        threads = sum(map(count_macs, parts)) >= PARALLEL_MACS
        operands = FloatOperands(*declared)
        if any(spec.image.padding):
            image = emit_padding(spec.image, isa, operands.data, threads)
            operands = replace(operands, data=image)
        top, left, _, _ = spec.image.padding
        first_weight = 0
        for part, size, (rows, cols) in zip(parts, sizes, spec.phases, strict=True):
            placement = FloatPlacement(
                image=spec.image.padded_size,
                size=spec.out_size,
                origin=(top + rows.first, left + cols.first),
                stride=spec.strides,
                offset=(rows.phase, cols.phase),
                first_weight=first_weight,
            )
            narrow, panels = plan_conv2d(part, isa)
            emit_tiles(ConvTiles(part, narrow, panels, operands, placement), threads)
            first_weight += size

    return build_kernel(name, body)
