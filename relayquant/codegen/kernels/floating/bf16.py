"""Specification of a float convolution or dense layer -> its kernel with operands of bfloat16.

    y = sum bf16(x) * bf16(w)  (+ bias) (+ residual), clipped

Sums and bias are float32. Data, residual and results are float32 or bfloat16 in memory (`stored`).
The weights are rounded when they are packed, float32 activations by the copy of the image that also
pads them. Rounding is to nearest, ties to even. The products run on tiles, by the generator for
integers (`integer.tiled`), or on vectors.

A tile may read neighbouring activations and multiply them by zero. So an infinity or a NaN becomes
NaN in the results of some neighbouring pixels, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_THRESHOLD,
    STORE_COST,
    WEIGHT_COST,
    build_kernel,
    constant,
    declare_arguments,
    import_code,
    load_vector,
    repeat_over_batch,
    store_vector,
)
from relayquant.codegen.kernels.floating.conv import FloatConv2d
from relayquant.codegen.kernels.floating.gemm import FloatDense
from relayquant.codegen.kernels.floating.stored import store_floats, widen_bits
from relayquant.codegen.kernels.floating.tile import static
from relayquant.codegen.kernels.integer.conv_plan import pack_panels
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    emit_image_copy,
    load_partial,
)
from relayquant.codegen.kernels.integer.specs import Tile
from relayquant.codegen.kernels.integer.tiled import (
    Storing,
    SumTile,
    emit_tiled,
    locate_result,
)
from relayquant.codegen.kernels.integer.tiled_plan import TiledPlan, list_rows
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.bf16 import ROUNDED_LANES, Bf16Isa, round_to_bf16
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS


@dataclass(frozen=True)
class Bf16Conv2d:
    """A float convolution of static shape, computed with operands of bfloat16.

    The kernel's arguments have the shapes `in_shape` and `out_shape`, with as many elements as the
    data and the result of the convolution. With `is_batched` the first extents are 1, and any
    number of images is taken.
    """

    conv: FloatConv2d
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    is_batched: bool = False


def read_bf16_conv2d(spec: FloatConv2d) -> Bf16Conv2d:
    """Return the specification for a convolution, whose batch may be symbolic."""
    is_batched = static(spec.batch) is None
    one = replace(spec, batch=1) if is_batched else spec
    return Bf16Conv2d(one.lay_down(), one.in_shape, one.out_shape, is_batched)


def read_bf16_dense(spec: FloatDense) -> Bf16Conv2d | None:
    """Return the specification for a dense layer as a convolution over rows.

    None if an extent other than the first is symbolic.
    """
    is_batched = len(spec.shape) > 1 and static(spec.shape[0]) is None
    one = replace(spec, shape=(1, *spec.shape[1:])) if is_batched else spec
    rows = static(one.rows)
    if rows is None:
        return None
    conv = FloatConv2d(1, rows, 1, spec.inner, spec.outputs, (1, 1), epilogue=spec.epilogue)
    return Bf16Conv2d(conv, one.shape, one.out_shape, is_batched)


@dataclass(frozen=True)
class Bf16Plan(TiledPlan):
    """A plan of tiles for operands of bfloat16."""

    spec: FloatConv2d  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    isa: Bf16Isa  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]

    @cached_property
    def narrow_blocks(self) -> tuple[int, ...]:
        return ()

    @cached_property
    def tile(self) -> Tile:
        return self.ranked_tiles[0]

    @cached_property
    def shift(self) -> int:
        return 0

    @cached_property
    def needs_copy(self) -> bool:
        spec = self.spec
        return spec.stored.data != BF16_BITS or any(spec.padding) or self.gap > 0

    @property
    def gap(self) -> int:
        """Activations that a tile reads behind a run. They have weights of zero."""
        return self.words * self.isa.products - self.run


def list_bf16_plans(spec: Bf16Conv2d, isa: Bf16Isa) -> list[Bf16Plan]:
    """List the plans of a convolution: the ways in which pixels become the rows of tiles."""
    ways = list_rows(Bf16Plan(spec.conv, isa))
    return [Bf16Plan(spec.conv, isa, rows=rows) for rows in ways]


def plan_bf16(spec: Bf16Conv2d, isa: Bf16Isa) -> Bf16Plan:
    """Return the fastest plan by estimate, for generator and packer."""
    return min(list_bf16_plans(spec, isa), key=lambda plan: plan.instructions)


def pack_bf16(
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    spec: Bf16Conv2d,
    isa: Bf16Isa,
    plan: Bf16Plan | None = None,
) -> list[NDArray]:
    """Pack the constant operands: OHWI weights as bits of bfloat16, and the bias (C,) or zeros.

    `plan` None: `plan_bf16`.
    """
    plan = plan or plan_bf16(spec, isa)
    packed = pack_panels(plan, round_to_bf16(weight.reshape(spec.conv.weight_shape)))
    order = plan.all_channels
    added = np.zeros(spec.conv.out_channels, "float32") if bias is None else bias
    return [packed, np.where(order >= 0, added[order], 0).astype("float32")]


def make_bf16_conv2d(
    spec: Bf16Conv2d, isa: Bf16Isa, name: str = "bf16_conv2d", plan: Bf16Plan | None = None
) -> PrimFunc:
    """Make PrimFunc(x, packed weights, bias, (residual,) y), for `call_tir`.

    `plan` None: `plan_bf16`.
    """
    plan, epilogue, stored = plan or plan_bf16(spec, isa), spec.conv.epilogue, spec.conv.stored

    def body() -> None:
        x, weight, bias, residual, y = declare_arguments(
            ("x", spec.in_shape, stored.data),
            ("weight", (plan.weight_size,), BF16_BITS),
            ("bias", (plan.channel_size,), "float32"),
            ("residual", spec.out_shape, stored.residual) if epilogue.residual else None,
            ("y", spec.out_shape, stored.result),
        )
        import_code(isa.code)
        operands = Operands(x, weight, bias, None, residual, y)
        shape = plan.spec.weight_shape
        macs = prod(plan.spec.out_shape) * prod(shape[1:])
        cost = macs + STORE_COST * prod(plan.spec.out_shape) + WEIGHT_COST * plan.weight_size
        image = emit_rounded_image(plan, x)
        place = Placement((0, 0), plan.pixel_grid[1:], (1, 1), (0, 0), 0, 0)
        emit_tiled(plan, image, operands, cost >= PARALLEL_THRESHOLD, place, FLOATS)

    if not spec.is_batched:
        return build_kernel(name, body)
    with repeat_over_batch((0, 3, 4) if epilogue.residual else (0, 3)):
        return build_kernel(name, body)


def emit_rounded_image(plan: Bf16Plan, x: Buffer) -> Image:
    """Emit a copy of the image in bfloat16 with its padding. What may be read behind it is 0.

    An image that is bfloat16 already and needs no padding is read in place.
    """
    if not plan.needs_copy:
        image = Image(x, plan.spec.height, plan.spec.width)
    elif plan.spec.stored.data == BF16_BITS:
        image = emit_image_copy(x, plan.spec, BF16_BITS, 0, lambda bits, _: bits, COPY_BYTES // 2)
    else:
        image = emit_image_copy(x, plan.spec, BF16_BITS, 0, plan.isa.round, ROUNDED_LANES)
    if plan.gap:
        batch, (rows, width), channels = (
            plan.spec.batch,
            plan.spec.padded_size,
            plan.spec.in_channels,
        )
        zeros = constant(BF16_BITS, 0, COPY_BYTES)
        store_vector(image.data, zeros, batch * rows * width * channels, COPY_BYTES)
    if plan.is_matrix:
        return Image(image.data, 1, plan.pixel_grid[2])
    return image


def emit_floats(
    plan: Bf16Plan,
    operands: Operands,
    place: Placement,
    tile: SumTile,
    sums: Buffer,
    part: Expr,
) -> None:
    """Store the sums of a pixel, which include the bias, through the epilogue."""
    epilogue, lanes = plan.spec.epilogue, plan.isa.lanes
    pitch = epilogue.pitch(plan.spec.out_channels)
    row, pixel, _ = locate_result(plan, place, *tile.line, part)
    for n, channel in enumerate(tile.channels):
        at = pixel * pitch + channel + epilogue.first
        residual = None
        if operands.residual is not None:
            residual = load_partial(operands.residual, at, lanes, plan.store_width)
            if plan.spec.stored.residual == BF16_BITS:
                residual = widen_bits(residual, lanes)
        acc = load_vector(sums, (tile.first + row) * plan.panel_channels + n * lanes, lanes)
        value = epilogue.finish(acc, residual, lanes)
        store_floats(operands.out, value, at, lanes, plan.isa, plan.store_width)


FLOATS = Storing(lambda plan: 1, emit_floats)
