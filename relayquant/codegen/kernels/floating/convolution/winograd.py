"""Specification of a float 3x3 convolution -> its kernel by Winograd's F(4x4, 3x3).

The transforms are described in `kernels.winograd`.

The points are 0, a, -a, b, -b and infinity. The sums differ from the direct form: each product of
transforms mixes 36 activations and nine weights, and their rounding errors remain in the result.
The size of the errors depends on the points. With a = sqrt(1/2) and b = sqrt(2), whose squares are
exact, the errors are about half as large as with 1 and 2. The weights are transformed in float64
and rounded once.

Infinities and NaN of an activation become NaN in all results of the tiles that read it.

Source of the matrices: Lavin and Gray, see `kernels.winograd`. Source of the points: the float
kernels of ncnn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    build_kernel,
    ceil_div,
    constant,
    emit_prefetch,
    store_vector,
)
from relayquant.codegen.kernels.expansion import Expanded, Expansion
from relayquant.codegen.kernels.floating.convolution.direct import emit_padding
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d, count_macs
from relayquant.codegen.kernels.floating.gemm import finish_into
from relayquant.codegen.kernels.floating.tile import (
    PARALLEL_MACS,
    Buffer,
    Expr,
    FloatIsa,
    Panels,
    choose_rows,
    declare_arguments,
    emit_tile,
    load_vector,
    static,
)
from relayquant.codegen.kernels.winograd import (
    IN,
    OUT,
    POINTS,
    PanelRange,
    Share,
    TileGrid,
    TileMemory,
    TileResults,
    TileSteps,
    can_transform,
    emit_shares,
    transform_columns,
    view_buffers,
)

#: The points a and b.
NEAR, FAR = sqrt(0.5), sqrt(2.0)
#: Largest size of the transformed weights, which have four times the bytes. A last-level cache
#: holds some weights of this size.
MOST_WEIGHT_BYTES = 12 * 1024 * 1024
#: Weights of up to this many bytes stay in the second-level cache, at least partly. Fetching them
#: ahead takes more time than it saves if the last-level cache is fast.
NEAR_WEIGHT_BYTES = 3 * 1024 * 1024
#: Times in units of a vector multiply-add, measured on Zen 4: input and output transform of one
#: vector of a tile.
INPUT_COST, OUTPUT_COST = 160, 160
#: Least number of tiles of a chunk if the last-level cache is slow: products with one weight then
#: take twice the time of reading it.
FEWEST_TILES = 28
#: Winograd is used if its estimated time is below this share of the direct form's time.
WORTH = 0.85


@dataclass(frozen=True)
class FloatWinogradPlan:
    """Choices that generator and packer must agree on."""

    spec: FloatConv2d
    isa: FloatIsa

    @cached_property
    def grid(self) -> TileGrid:
        """The tiles, split into chunks and parts."""
        spec = self.spec
        tile_bytes = 4 * POINTS * (spec.in_channels + spec.out_channels)
        return TileGrid(
            spec.out_size,
            spec.out_channels,
            tile_bytes,
            static(spec.batch) or 1,
            is_parallel=count_macs(spec) >= PARALLEL_MACS,
            shares_inputs=self.isa.caches.is_far_slow,
            fewest_tiles=FEWEST_TILES if self.isa.caches.is_far_slow else 0,
        )

    @cached_property
    def parts(self) -> int:
        """Parts of the panels."""
        return self.grid.count_parts(self.panels.full)

    @cached_property
    def is_common(self) -> bool:
        """Whether all parts read the same transformed activations."""
        return self.grid.shares_inputs and self.parts > 1 and static(self.spec.batch) is not None

    @cached_property
    def panels(self) -> Panels:
        """Panels of the output channels, all with the same number of vectors."""
        lanes, accumulators = self.isa.lanes, self.isa.accumulators
        vectors = self.spec.out_channels // lanes
        blocks = next(count for count in (2, 3, 1) if vectors % count == 0)
        return Panels(self.spec.out_channels, lanes, blocks, accumulators // blocks)

    @cached_property
    def height(self) -> int:
        """Tiles that are multiplied at once."""
        return choose_rows(self.grid.least_tiles, self.panels.most_rows)

    @cached_property
    def ahead(self) -> int:
        """Elements of the next panel of weights that a tile fetches with each channel.

        0 if it is not worth it.
        """
        if 4 * self.weight_size <= NEAR_WEIGHT_BYTES and not self.isa.caches.is_far_slow:
            return 0
        return ceil_div(
            self.panels.blocks * self.isa.lanes, ceil_div(self.grid.least_tiles, self.height)
        )

    @cached_property
    def memory(self) -> TileMemory:
        """Memory for transformed activations and their products."""
        channels = self.spec.in_channels, self.sum_channels
        return TileMemory(self.grid, channels, ("float32",) * 2, self.isa.lanes, self.is_common)

    @cached_property
    def sum_channels(self) -> int:
        """Channels of the products of the largest part."""
        return ceil_div(self.panels.full, self.parts) * self.panels.blocks * self.isa.lanes

    @cached_property
    def weight_size(self) -> int:
        """Elements of the packed weights."""
        return POINTS * self.spec.in_channels * self.spec.out_channels

    @cached_property
    def cost(self) -> float:
        """Estimated time of an image, in vector multiply-adds."""
        spec, lanes = self.spec, self.isa.lanes
        inputs, outputs = spec.in_channels // lanes, spec.out_channels // lanes
        parts = 1 if self.is_common else self.parts
        steps = POINTS * spec.in_channels * outputs
        tile = steps + parts * inputs * INPUT_COST + outputs * OUTPUT_COST
        return prod(self.grid.tiles) * tile + 4 * self.weight_size / self.isa.caches.far_bytes


def prefers_winograd(spec: FloatConv2d, isa: FloatIsa) -> bool:
    """Whether `make_winograd` is possible and estimated to be faster than `make_conv2d`."""
    if not can_transform(spec, isa.lanes):
        return False
    plan = FloatWinogradPlan(spec, isa)
    direct = prod(spec.out_size) * 9 * spec.in_channels * (spec.out_channels // isa.lanes)
    return 4 * plan.weight_size <= MOST_WEIGHT_BYTES and plan.cost < WORTH * direct


def make_winograd(spec: FloatConv2d, isa: FloatIsa, name: str = "float_winograd") -> PrimFunc:
    """Make the same kernel as `make_conv2d`, for weights of `pack_winograd`."""
    plan = FloatWinogradPlan(spec, isa)

    def body() -> None:
        x, weight, bias, residual, y = declare_arguments(
            ("x", spec.in_shape),
            ("w", (plan.weight_size,)),
            ("bias", (spec.out_channels,)) if spec.epilogue.bias else None,
            ("residual", spec.out_shape) if spec.epilogue.residual else None,
            ("y", spec.out_shape),
        )
        image = emit_padding(spec, isa, x, plan.grid.is_parallel) if any(spec.padding) else x
        with view_buffers(image) as [pixels]:
            operands = FloatOperands(pixels, weight, bias, residual, y)
            steps = TileSteps(
                partial(emit_inputs, plan, pixels),
                partial(emit_products, plan, weight),
                partial(emit_results, plan, operands),
            )
            emit_shares(plan.memory, steps, spec.batch, plan.panels.full)

    return build_kernel(name, body)


def emit_inputs(
    plan: FloatWinogradPlan, image: Buffer, inputs: Buffer, at: TileResults, origin: Expr
) -> None:
    """Emit B d B' of one tile, all channels. Tile 0 begins at `origin`."""
    (height, width), channels = plan.spec.padded_size, plan.spec.in_channels
    lanes = plan.isa.lanes
    start = ((at.image * height + at.row) * width + at.col) * channels
    with T.serial(channels // lanes) as v:
        source, first = T.bind(start + v * lanes), T.bind(origin + at.number * channels + v * lanes)

        def load(i: int, j: Expr) -> Expr:
            return load_vector(image, source + (i * width + j) * channels, lanes)

        rows = transform_columns(load, lambda d: transform_inputs(d, lanes), IN, lanes, "float32")
        for i, row in enumerate(rows):
            for j, value in enumerate(transform_inputs(row, lanes)):
                store_vector(inputs, value, first + (i * IN + j) * plan.memory.input_stride, lanes)


def transform_inputs(d: list[Expr], lanes: int) -> list[Expr]:
    """Multiply B by six vectors. With p = a * a and q = b * b, B is

    pq  0  -p-q   0  1  0
    0  -aq  -q    a  1  0
    0   aq  -q   -a  1  0
    0  -bp  -p    b  1  0
    0   bp  -p   -b  1  0
    0  pq    0 -p-q  0  1
    """

    def times(factor: float, value: Expr) -> Expr:
        return value * constant("float32", factor, lanes)

    p, q = NEAR**2, FAR**2
    near, far = d[4] - times(q, d[2]), d[4] - times(p, d[2])
    near_odd, far_odd = (times(NEAR, d[3] - times(q, d[1])), times(FAR, d[3] - times(p, d[1])))
    first = times(p * q, d[0]) + (d[4] - times(p + q, d[2]))
    last = times(p * q, d[1]) + (d[5] - times(p + q, d[3]))
    return [first, near + near_odd, near - near_odd, far + far_odd, far - far_odd, last]


def emit_products(
    plan: FloatWinogradPlan,
    weight: Buffer,
    inputs: Buffer,
    first_input: Expr,
    sums: Buffer,
    share: Share,
) -> None:
    """Emit for every element: transformed activations times transformed weights of a part.

    The activations of the share begin at `first_input`.
    """
    channels, outputs = plan.spec.in_channels, plan.sum_channels
    lanes, panels, height = plan.isa.lanes, plan.panels, plan.height
    own, tiles = share.own, share.tiles
    steps = ceil_div(tiles, height)
    with T.grid(POINTS, own.end - own.first, steps) as (point, index, step):
        panel = T.bind(own.first + index)
        first = T.bind(T.min(step * height, tiles - height))
        base = T.bind((point * panels.full + panel) * (channels * panels.blocks * lanes))
        origin = T.bind(first_input + point * plan.memory.input_stride + first * channels)
        start = point * plan.memory.sum_stride + first * outputs
        target = T.bind(start + index * (panels.blocks * lanes))

        ahead = locate_ahead(plan, point, index, own, step)

        def reduce(
            emit: Callable[[Expr, Callable[[int], Expr]], None],
            base: Expr = base,
            ahead: Expr = ahead,
        ) -> None:
            with T.serial(channels) as k:
                for element in range(0, plan.ahead, CACHE_LINE // 4):
                    emit_prefetch(weight, ahead + k * plan.ahead + element, level=2)
                emit(k, lambda b: base + (k * panels.blocks + b) * lanes)

        def finish(row: int, block: int, value: Expr, target: Expr = target) -> None:
            store_vector(sums, value, target + row * outputs + block * lanes, lanes)

        emit_tile(
            plan.isa,
            [origin + row * channels for row in range(height)],
            panels.blocks,
            inputs,
            weight,
            reduce,
            finish,
        )


def locate_ahead(
    plan: FloatWinogradPlan, point: Expr, index: Expr, own: PanelRange, step: Expr
) -> Expr:
    """Locate the share of a tile in fetching the weights of the next panel.

    Transformed weights of many channels come from the last-level cache.
    """
    channels, panels = plan.spec.in_channels, plan.panels
    size = channels * panels.blocks * plan.isa.lanes
    following = own.locate_next(point, index, panels.full)
    share = channels * plan.ahead
    return T.bind(following * size + T.min(step * share, size - share))


def emit_results(
    plan: FloatWinogradPlan,
    operands: FloatOperands,
    sums: Buffer,
    at: TileResults,
    share: Share,
) -> None:
    """Emit the epilogue for the sums of one tile, for all channels of a part."""
    spec, lanes, blocks = plan.spec, plan.isa.lanes, plan.panels.blocks
    (height, width), channels = spec.out_size, spec.out_channels
    bias, unbiased = operands.bias, replace(operands, bias=None)
    pitch = spec.epilogue.pitch(channels)
    start = ((at.image * height + at.row) * width + at.col) * pitch
    with T.serial((share.own.end - share.own.first) * blocks) as v:
        first = T.bind((share.own.first * blocks + v) * lanes)
        source = T.bind(at.number * plan.sum_channels + v * lanes)

        def load(i: int, j: Expr) -> Expr:
            return load_vector(sums, source + (i * IN + j) * plan.memory.sum_stride, lanes)

        added = T.bind(load_vector(bias, first, lanes)) if bias is not None else None
        rows = transform_columns(load, lambda m: transform_sums(m, lanes), OUT, lanes, "float32")
        for i, row in enumerate(rows):
            targets = [start + (i * width + j) * pitch for j in range(OUT)]
            finish = finish_into(unbiased, spec.epilogue, targets, [first], lanes)
            for j, value in enumerate(transform_sums(row, lanes)):
                finish(j, 0, value if added is None else value + added)


def transform_sums(m: list[Expr], lanes: int) -> list[Expr]:
    """Multiply A by six vectors. A is

    1  1    1   1    1   0
    0  a   -a   b   -b   0
    0  a^2 a^2  b^2 b^2  0
    0  a^3 -a^3 b^3 -b^3 1
    """

    def weigh(power: int, near: Expr, far: Expr) -> Expr:
        near_factor, far_factor = (
            constant("float32", point**power, lanes) for point in (NEAR, FAR)
        )
        return near * near_factor + far * far_factor

    near, far = T.bind(m[1] + m[2]), T.bind(m[3] + m[4])
    near_odd, far_odd = T.bind(m[1] - m[2]), T.bind(m[3] - m[4])
    return [
        m[0] + near + far,
        weigh(1, near_odd, far_odd),
        weigh(2, near, far),
        weigh(3, near_odd, far_odd) + m[5],
    ]


def make_weight_transform() -> NDArray[np.float64]:
    """Make the matrix G."""
    p, q = NEAR**2, FAR**2
    near, far = 2 * p * (p - q), 2 * q * (q - p)
    return np.array(
        [[1 / (p * q), 0, 0]]
        + [[1 / n, x / n, x * x / n] for x, n in ((NEAR, near), (-NEAR, near))]
        + [[1 / n, x / n, x * x / n] for x, n in ((FAR, far), (-FAR, far))]
        + [[0, 0, 1]]
    )


#: G w G', computed in float64 and rounded once.
EXPANSION = Expansion(
    np.kron(make_weight_transform(), make_weight_transform()), "float32", "float64", "float32"
)


def pack_winograd(weight: NDArray[np.float32], spec: FloatConv2d, isa: FloatIsa) -> Expanded:
    """Pack OHWI -> [element][panel][I][vector of the panel][lanes]."""
    panels = FloatWinogradPlan(spec, isa).panels
    taps = weight.reshape(panels.full, panels.blocks, isa.lanes, -1, spec.in_channels)
    packed = np.ascontiguousarray(taps.transpose(3, 0, 4, 1, 2))
    return Expanded(EXPANSION, packed.reshape(len(packed), -1))
