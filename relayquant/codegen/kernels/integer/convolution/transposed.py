"""Specification of a quantized transposed convolution -> its kernel, as TIR.

The kernel interleaves ordinary convolutions (see `kernels.transposed`). One axis is shown:

    y[n, q*s + p, c] = epilogue(bias[c] + sum over k with (p + pad - k*d) % s == 0
                                of x[n, q + (p + pad - k*d) / s, i] * w[c, k, i])
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import PARALLEL_THRESHOLD, build_kernel
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, pack_panels
from relayquant.codegen.kernels.integer.convolution.direct import emit_convolution
from relayquant.codegen.kernels.integer.convolution.plan_choice import (
    choose_instructions,
    make_plan,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.integer.operands import (
    Placement,
    declare_operands,
    emit_prepared_image,
)
from relayquant.codegen.kernels.integer.specs import (
    Constants,
    Conv2d,
    PackedWeights,
    Shape,
    pack_channels,
)
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.transposed import TransposedShape


@dataclass(frozen=True)
class Conv2dTranspose(TransposedShape):
    """A quantized transposed convolution. Pixels outside the image hold `in_zero_point`."""

    in_dtype: str = "uint8"
    in_zero_point: int = 0
    epilogue: Epilogue = field(default_factory=Epilogue)

    def __post_init__(self) -> None:
        if min(self.out_size) < 1:
            raise ValueError(
                f"Conv2dTranspose: padding {self.padding} leaves no output of "
                f"{self.height}x{self.width} with kernel {self.kernel}.",
            )


@dataclass(frozen=True)
class TransposePlan:
    """The ordinary convolutions of a transposed one, over one image padded for all of them."""

    spec: Conv2dTranspose
    isa: Isa

    @cached_property
    def image(self) -> Conv2d:
        """The padded input, as the input of a 1x1 convolution."""
        spec = self.spec
        return Conv2d(
            *spec.in_shape,
            spec.out_channels,
            (1, 1),
            padding=spec.border,
            groups=spec.groups,
            in_dtype=spec.in_dtype,
            in_zero_point=spec.in_zero_point,
            epilogue=spec.epilogue,
        )

    @cached_property
    def parts(self) -> list[ConvPlan]:
        """The convolution of each phase."""
        return [
            make_plan(
                Conv2d(
                    **vars(self.spec.shape_part(*phase)),
                    in_dtype=self.isa.activation,
                    epilogue=self.spec.epilogue,
                ),
                self.isa,
                is_part=True,
            )
            for phase in self.spec.phases
        ]

    @cached_property
    def weight_size(self) -> int:
        return sum(part.weight_size for part in self.parts)

    @cached_property
    def fewest_pixels(self) -> int:
        """Pixels of an image in the smallest phase."""
        return min(part.fewest_pixels for part in self.parts)

    @cached_property
    def instructions(self) -> float:
        """Estimated instructions; see `ConvPlan.instructions`."""
        return sum(part.instructions for part in self.parts)


def choose_transpose_plan(spec: Conv2dTranspose, isa: Isa) -> TransposePlan:
    """Choose one instruction set for all phases, since they share the packed weights."""
    isa = isa.for_convolution(spec.in_dtype)
    return choose_instructions(lambda isa: TransposePlan(spec, isa), isa)


def pack_conv2d_transpose(spec: Conv2dTranspose, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the constant operands of `build_conv2d_transpose(spec, isa)`.

    Weight w[o, kh, kw, i] contributes to the output kh rows and kw columns further on, as IOHW
    weights do after a transposition.

    Raises:
        ValueError: A shape does not fit, or the multiplier is missing or not allowed.
    """
    plan = choose_transpose_plan(spec, isa)
    whole = Conv2d(
        1, *spec.kernel, spec.in_channels, spec.out_channels, spec.kernel, groups=spec.groups,
        in_zero_point=0, epilogue=spec.epilogue,
    )  # fmt: skip
    none = np.zeros(0, "int64")
    pack_channels(whole, constants, 0, none)  # checks the shapes
    packed, folded, factors = [], [], []
    for part, taps in zip(plan.parts, spec.split_weight(constants.weight), strict=True):
        zero_point = spec.in_zero_point + plan.isa.zero_point_shift(spec.in_dtype)
        packed.append(pack_panels(part, taps))
        own = replace(constants, weight=taps)
        part_bias, part_factors = pack_channels(part.spec, own, zero_point, part.all_channels)
        folded.append(part_bias)
        if part_factors is not None:
            factors.append(part_factors.reshape(spec.epilogue.multipliers, -1))
    return PackedWeights(
        np.concatenate(packed),
        np.concatenate(folded),
        np.concatenate(factors, axis=1).reshape(-1) if factors else None,
    )


def build_conv2d_transpose(
    spec: Conv2dTranspose, isa: Isa, name: str = "conv2d_transpose", *shapes: Shape
) -> PrimFunc:
    """Build the kernel of a transposed convolution, with the arguments of `build_conv2d`."""

    def body() -> None:
        plan = choose_transpose_plan(spec, isa)
        operands = declare_operands(
            plan.image,
            plan.isa,
            plan.weight_size,
            sum(part.channel_size for part in plan.parts),
            *(shapes or (plan.image.stored_shape, spec.out_shape)),
        )
        macs = sum(part.spec.macs for part in plan.parts)
        threads = macs >= PARALLEL_THRESHOLD
        image = emit_prepared_image(operands.data, plan.image, plan.isa)
        top, left, _, _ = plan.image.padding
        first_weight = first_channel = 0
        for part, (rows, cols) in zip(plan.parts, spec.phases, strict=True):
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
