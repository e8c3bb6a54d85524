"""Quantized transposed convolution as interleaved ordinary ones (see `kernels.transposed`),
generated as TIR.

    y[n, q*s + p, c] = epilogue(bias[c] + sum over k with (p + pad - k*d) % s == 0
                                of x[n, q + (p + pad - k*d) / s, i] * w[c, k, i])

One axis is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray
from tvm.tirx import PrimFunc

from relayquant.errors import ConfigError
from relayquant.kernels.emit import PARALLEL_THRESHOLD, build_kernel
from relayquant.kernels.integer.conv import Placement, emit_convolution
from relayquant.kernels.integer.conv_plan import ConvPlan, choose_instructions, pack_panels
from relayquant.kernels.integer.epilogue import Epilogue
from relayquant.kernels.integer.operands import declare_operands, emit_prepared_image
from relayquant.kernels.integer.specs import Conv2d, PackedWeights, pack_channels
from relayquant.kernels.isa.base import Isa
from relayquant.kernels.transposed import AxisPhase, TransposedAxis, split_axes


@dataclass(frozen=True)
class Conv2dTranspose:
    """A quantized transposed convolution; data NHWC, weights OHWI.

    `padding` is (top, left, bottom, right) and takes pixels away from the output;
    `output_padding` adds rows and columns at the end.
    """

    batch: int
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
    in_dtype: str = "uint8"
    in_zero_point: int = 0
    epilogue: Epilogue = field(default_factory=Epilogue)

    def __post_init__(self) -> None:
        if min(self.out_size) < 1:
            raise ConfigError(
                f"Conv2dTranspose: padding {self.padding} leaves no output of "
                f"{self.height}x{self.width} with kernel {self.kernel}."
            )

    @property
    def out_size(self) -> tuple[int, int]:
        """(OH, OW)."""
        return self.axes[0].outputs, self.axes[1].outputs

    @property
    def axes(self) -> tuple[TransposedAxis, TransposedAxis]:
        """Rows and columns."""
        return split_axes(
            (self.height, self.width), self.kernel, self.strides, self.padding,
            self.output_padding, self.dilation,
        )  # fmt: skip

    @property
    def in_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.height, self.width, self.in_channels)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, *self.out_size, self.out_channels)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """OHWI."""
        return (self.out_channels, *self.kernel, self.in_channels // self.groups)


@dataclass(frozen=True)
class TransposePlan:
    """The ordinary convolutions of a transposed one, over one image padded for all of them."""

    spec: Conv2dTranspose
    isa: Isa

    @cached_property
    def axes(self) -> tuple[TransposedAxis, TransposedAxis]:
        return self.spec.axes

    @cached_property
    def dilation(self) -> tuple[int, int]:
        """Distance of the pixels under neighbouring taps of one phase."""
        return self.axes[0].step, self.axes[1].step

    @cached_property
    def phases(self) -> list[tuple[AxisPhase, AxisPhase]]:
        return list(product(self.axes[0].phases, self.axes[1].phases))

    @cached_property
    def image(self) -> Conv2d:
        """The padded input, as the input of a 1x1 convolution."""
        spec = self.spec
        (top, bottom), (left, right) = (axis.border for axis in self.axes)
        return Conv2d(
            spec.batch,
            spec.height,
            spec.width,
            spec.in_channels,
            spec.out_channels,
            (1, 1),
            padding=(top, left, bottom, right),
            groups=spec.groups,
            in_dtype=spec.in_dtype,
            in_zero_point=spec.in_zero_point,
            epilogue=spec.epilogue,
        )

    def part(self, rows: AxisPhase, cols: AxisPhase) -> ConvPlan:
        """The convolution of one phase; an empty kernel becomes one zero weight."""
        spec = self.spec
        kernel = max(len(rows.taps), 1), max(len(cols.taps), 1)
        return ConvPlan(
            Conv2d(
                spec.batch,
                rows.outputs + (kernel[0] - 1) * self.dilation[0],
                cols.outputs + (kernel[1] - 1) * self.dilation[1],
                spec.in_channels,
                spec.out_channels,
                kernel,
                dilation=self.dilation,
                groups=spec.groups,
                in_dtype=self.isa.activation,
                epilogue=spec.epilogue,
            ),
            self.isa,
            is_part=True,
        )

    @cached_property
    def parts(self) -> list[ConvPlan]:
        return [self.part(rows, cols) for rows, cols in self.phases]

    @cached_property
    def weight_size(self) -> int:
        return sum(part.weight_size for part in self.parts)

    @cached_property
    def fewest_pixels(self) -> int:
        """Pixels of an image in the smallest phase."""
        return min(part.fewest_pixels for part in self.parts)

    @cached_property
    def instructions(self) -> float:
        """See `ConvPlan.instructions`."""
        return sum(part.instructions for part in self.parts)


def choose_transpose_plan(spec: Conv2dTranspose, isa: Isa) -> TransposePlan:
    """As `choose_plan`, one instruction set for all phases: they share the packed weights."""
    isa = isa.for_convolution(spec.in_dtype)
    return choose_instructions(lambda isa: TransposePlan(spec, isa), isa)


def pack_conv2d_transpose(
    spec: Conv2dTranspose,
    isa: Isa,
    weight: NDArray[np.int8],
    bias: NDArray[np.int32],
    multiplier: NDArray[np.float32] | None,
) -> PackedWeights:
    """Constant operands of `build_conv2d_transpose(spec, isa)`.

    Args:
        weight: (O, KH, KW, I / groups) int8, kernel zero point 0; w[o, kh, kw, i] multiplies the
        pixel
            that is written kh rows and kw columns further on, as in IOHW after a transposition.
        bias, multiplier: as in `pack_conv2d`.

    Raises:
        ConfigError: a shape does not fit, or the multiplier is missing or not wanted.
    """
    plan = choose_transpose_plan(spec, isa)
    whole = Conv2d(
        1, *spec.kernel, spec.in_channels, spec.out_channels, spec.kernel, groups=spec.groups,
        in_zero_point=0, epilogue=spec.epilogue,
    )  # fmt: skip
    none = np.zeros(0, "int64")
    pack_channels(whole, weight, bias, multiplier, 0, none)  # checks the shapes
    packed, folded, factors = [], [], []
    for part, (rows, cols) in zip(plan.parts, plan.phases, strict=True):
        taps = np.zeros(part.spec.weight_shape, "int8")
        if rows.taps and cols.taps:
            taps[:] = weight[:, rows.taps][:, :, cols.taps]
        zero_point = spec.in_zero_point + plan.isa.zero_point_shift(spec.in_dtype)
        packed.append(pack_panels(part, taps))
        part_bias, part_factors = pack_channels(
            part.spec, taps, bias, multiplier, zero_point, part.all_channels
        )
        folded.append(part_bias)
        factors.append(part_factors)
    return PackedWeights(
        np.concatenate(packed),
        np.concatenate(folded),
        None if multiplier is None else np.concatenate(factors),
    )


def build_conv2d_transpose(
    spec: Conv2dTranspose,
    isa: Isa,
    name: str = "conv2d_transpose",
    in_shape: tuple[int, ...] | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> PrimFunc:
    """Kernel of a transposed convolution, with the arguments of `build_conv2d`."""

    def body() -> None:
        plan = choose_transpose_plan(spec, isa)
        operands = declare_operands(
            plan.image,
            plan.isa,
            plan.weight_size,
            sum(part.channel_size for part in plan.parts),
            in_shape,
            out_shape or spec.out_shape,
        )
        macs = sum(part.spec.macs for part in plan.parts)
        threads = macs >= PARALLEL_THRESHOLD
        image = emit_prepared_image(operands.data, plan.image, plan.isa)
        top, left, _, _ = plan.image.padding
        first_weight = first_channel = 0
        for part, (rows, cols) in zip(plan.parts, plan.phases, strict=True):
            placement = Placement(
                origin=(top + rows.first, left + cols.first),
                size=spec.out_size,
                stride=spec.strides,
                offset=(rows.phase, cols.phase),
                first_weight=first_weight // plan.isa.weight_vector,
                first_channel=first_channel,
            )
            emit_convolution(part, image, operands, threads, placement)
            first_weight += part.weight_size
            first_channel += part.channel_size

    return build_kernel(name, body)
