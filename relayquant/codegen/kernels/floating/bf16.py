"""Specification of a float convolution or dense layer -> its kernel with operands of bfloat16.

    y = sum bf16(x) * bf16(w)  (+ bias) (+ residual), clipped

Sums and bias are float32. Data, residual and results are float32 or bfloat16 in memory (`stored`).
The weights are rounded when they are packed, float32 activations by the copy of the image that also
pads them. Rounding is to nearest, ties to even. The products run on tiles or vectors of x86, or on
Arm, by the generators for integers (`integer.tiled`, `integer.convolution`).

A tile may read neighbouring activations and multiply them by zero. So an infinity or a NaN becomes
NaN in the results of some neighbouring pixels, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_BYTES,
    PARALLEL_THRESHOLD,
    STORE_COST,
    WEIGHT_COST,
    alloc_workspace,
    build_kernel,
    ceil_div,
    constant,
    declare_arguments,
    import_code,
    load_vector,
    loop_over,
    repeat_over_batch,
    store_vector,
)
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.gemm import FloatDense
from relayquant.codegen.kernels.floating.stored import Stored, store_floats, widen_bits
from relayquant.codegen.kernels.floating.tile import static
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, pack_panels
from relayquant.codegen.kernels.integer.convolution.direct import emit_convolution
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_instructions
from relayquant.codegen.kernels.integer.convolution.tile import TilePosition
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    emit_image_copy,
    load_partial,
)
from relayquant.codegen.kernels.integer.specs import Tile
from relayquant.codegen.kernels.integer.tiled.plan import (
    FIRST_CACHE_BYTES,
    TiledPlan,
    TileRows,
    list_rows,
)
from relayquant.codegen.kernels.integer.tiled.products import emit_tiled
from relayquant.codegen.kernels.integer.tiled.results import (
    Storing,
    SumTile,
    emit_residual_prefetch,
    locate_result,
    mark_stores_once,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa, round_to_bf16
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS

#: Fewest tiles of pixels and panels of weights for which a packed copy of the pixels pays, and the
#: time of products without one relative to products with one, if a panel is larger than the
#: first-level cache.
PACKED_TILES, PACKED_PANELS, SCATTERED = 8, 16, 1.15


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
    conv = replace(one.lay_down(), is_sequence=False)
    return Bf16Conv2d(conv, one.in_shape, one.out_shape, is_batched)


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
class Bf16Plan(ConvPlan):
    """A plan for operands of bfloat16."""

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

    @property
    def result_pitch(self) -> int:
        return self.spec.epilogue.pitch(self.spec.out_channels)

    @property
    def first_result(self) -> int:
        return self.spec.epilogue.first

    def with_stored(self, stored: Stored) -> Bf16Plan:
        """Return the plan for other dtypes in memory, which reads the same packed weights."""
        return replace(self, spec=replace(self.spec, stored=stored))


@dataclass(frozen=True)
class Bf16TiledPlan(Bf16Plan, TiledPlan):
    """A plan of tiles for operands of bfloat16."""

    spec: FloatConv2d  # pyright: ignore[reportIncompatibleVariableOverride]

    @cached_property
    def chunks(self) -> int:
        """As few as possible, or up to a fourth more without a gap, for which data is copied."""
        least = super().chunks
        more = range(least, least + least // 4 + 1)
        return next((n for n in more if self.run % (n * self.isa.products) == 0), least)

    @cached_property
    def needs_copy(self) -> bool:
        if self.rows is TileRows.SHIFTED and self.spec.stored.data == BF16_BITS:
            return False
        return self.rows is TileRows.PACKED or super().needs_copy

    def with_stored(self, stored: Stored) -> Bf16Plan:
        """Also leave data in bfloat16, which needs no other copy, where it is."""
        is_packed = self.rows is TileRows.PACKED and stored.data == BF16_BITS
        plain = replace(self, rows=TileRows.MATRIX) if is_packed else self
        return super(Bf16TiledPlan, plain).with_stored(stored)

    @cached_property
    def instructions(self) -> float:
        is_far = self.is_matrix and self.panel_bytes > FIRST_CACHE_BYTES
        is_read_often = self.image_tiles >= PACKED_TILES and self.panels >= PACKED_PANELS
        is_scattered = is_far and is_read_often and self.rows is not TileRows.PACKED
        return super().instructions * (SCATTERED if is_scattered else 1)


def list_bf16_plans(spec: Bf16Conv2d, isa: Bf16Isa) -> list[Bf16Plan]:
    """List the plans of a convolution: the ways in which pixels become the rows of tiles.

    Without tiles there is one plan.
    """
    if isa.unit is None:
        return [choose_bf16_vectors(spec.conv, isa)]
    plain = Bf16TiledPlan(spec.conv, isa)
    ways = list_rows(plain)
    if plain.is_matrix and spec.conv.groups == 1 and plain.run % plain.row_values == 0:
        ways.append(TileRows.PACKED)
    return [Bf16TiledPlan(spec.conv, isa, rows=rows) for rows in ways]


def choose_bf16_vectors(
    conv: FloatConv2d, isa: Bf16Isa, weights_per_image: bool = False
) -> Bf16Plan:
    """Choose the plan for `isa` or its companion, which has no tiles either."""

    def make(each: Isa) -> Bf16Plan:
        assert isinstance(each, Bf16Isa)
        return Bf16Plan(conv, each, weights_per_image)

    return choose_instructions(make, isa)


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
        emit_bf16_products(plan, image, operands, cost >= PARALLEL_THRESHOLD)

    if not spec.is_batched:
        return mark_stores_once(build_kernel(name, body), plan)
    with repeat_over_batch((0, 3, 4) if epilogue.residual else (0, 3)):
        return mark_stores_once(build_kernel(name, body), plan)


def emit_bf16_products(plan: Bf16Plan, image: Image, operands: Operands, threads: bool) -> None:
    """Emit the products over a rounded image, and the stores of their sums."""
    place = Placement(plan.pixel_grid[1:])
    if isinstance(plan, Bf16TiledPlan):
        emit_tiled(plan, image, operands, threads, place, FLOATS)
    else:
        emit_convolution(plan, image, operands, threads, place, store_tile)


def emit_rounded_image(plan: Bf16Plan, x: Buffer) -> Image:
    """Emit a copy of the image in bfloat16 with its padding. What may be read behind it is 0.

    An image that is bfloat16 already and needs no padding is read in place.
    """
    if isinstance(plan, Bf16TiledPlan) and plan.rows is TileRows.PACKED:
        return emit_packed_tiles(plan, x)
    if not plan.needs_copy:
        image = Image(x, plan.spec.height, plan.spec.width)
    elif plan.spec.stored.data == BF16_BITS:
        image = emit_image_copy(x, plan.spec, BF16_BITS, 0, lambda bits, _: bits, COPY_BYTES // 2)
    else:
        image = emit_image_copy(x, plan.spec, BF16_BITS, 0, plan.isa.round, plan.isa.rounded_lanes)
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


def emit_packed_tiles(plan: Bf16TiledPlan, x: Buffer) -> Image:
    """Emit a copy in bfloat16 that holds the rows of a tile of pixels, step by step."""
    (_, _, pixels), rows, width = plan.lines, plan.tile_rows, plan.row_values
    tiles, lanes = ceil_div(pixels, rows), plan.isa.rounded_lanes
    copy = alloc_workspace(tiles * plan.steps * plan.chunk_distance, BF16_BITS)
    with loop_over((tiles, rows), pixels * plan.run >= PARALLEL_BYTES) as (tile, row):
        first = T.min(tile * rows, pixels - rows) + row
        target = (tile * plan.steps * rows + row) * width
        with T.serial(plan.steps) as step:
            for i in range(0, width, lanes):
                value = load_vector(x, first * plan.run + step * width + i, lanes)
                if x.dtype != BF16_BITS:
                    value = plan.isa.round(value, lanes)
                store_vector(copy, value, target + step * plan.chunk_distance + i, lanes)
    return Image(copy, 1, pixels)


def emit_floats(
    plan: Bf16TiledPlan,
    operands: Operands,
    place: Placement,
    tile: SumTile,
    sums: Buffer,
    part: Expr,
) -> None:
    """Store the sums of a pixel, which include the bias, through the epilogue."""
    lanes = plan.isa.lanes
    row, pixel, _ = locate_result(plan, place, *tile.line, part)
    emit_residual_prefetch(plan, operands.residual, pixel, plan.result_pitch, tile.channels)
    for n, channel in enumerate(tile.channels):
        acc = load_vector(sums, (tile.first + row) * plan.panel_channels + n * lanes, lanes)
        store_sums(plan, operands, acc, pixel * plan.result_pitch + channel)


def store_tile(plan: Bf16Plan, operands: Operands, at: TilePosition, totals: list[Expr]) -> None:
    """Store the sums of a tile of registers; see `convolution.direct.StoreSums`."""
    for slot, acc in enumerate(totals):
        pixel, block = divmod(slot, plan.tile.blocks)
        store_sums(plan, operands, acc, at.out_pixels[pixel] + at.out_channels[block])


def store_sums(plan: Bf16Plan, operands: Operands, acc: Expr, at: Expr) -> None:
    """Store a vector of sums, which include the bias, through the epilogue.

    `at` is the place of the first in y.
    """
    epilogue, lanes, residual = plan.spec.epilogue, plan.isa.lanes, None
    if operands.residual is not None:
        residual = load_partial(operands.residual, at, lanes, plan.store_width)
        if plan.spec.stored.residual == BF16_BITS:
            residual = widen_bits(residual, lanes)
    value = epilogue.finish(acc, residual, lanes)
    store_floats(operands.out, value, at, lanes, plan.isa, plan.store_width)


FLOATS = Storing(lambda plan: 1, emit_floats)
