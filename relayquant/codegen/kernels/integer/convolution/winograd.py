"""Specification of an integer 3x3 convolution -> its kernel by Winograd's F(4x4, 3x3).

The algorithm, its chunks and its symbols are described in `kernels.winograd`. All arithmetic is in
exact integers:

    576 y = A (sum over i of (G w[i] G') * (B d[i] B')) A'

With the matrices below everything is an integer:

- For activations within -128..127, B d B' is at most 100 * 128 = 12,800, which fits int16.
- For int8 weights, G w G' is at most 144 * 128 = 18,432, which fits int16.
- Sums of products exceed the range of int32. They wrap modulo 2**32, and so do the results of A.
These are 576 y modulo 2**32. Times the inverse of 9 this is 64 y, if y is at least -2**25 and below
2**25 (`LARGEST_SUM`). A shift right by 6 bits gives y. To requantize, the multiplier is 64 times
smaller instead.
- y includes the bias. One of the 36 elements is in each of the 16 results, with the factor 1. So
the packed bias is 576 times as large, and is added to this element.

So results are equal to the direct form, bit for bit. A product of int16 takes twice as long as one
of bytes with VNNI: half of the time remains, plus the transforms; a quarter without VNNI.

Every chunk reads all weights, which have eight times the bytes of the direct form's. The tiles of a
panel fetch the next panel. If the output channels of chunks are split into parts, B d B' of the
whole image is computed first. If the last-level cache is slow (`WinogradTiming.near_weights`),
chunks are few and large. B d B' then stays in the cache of its thread, and parts compute it again,
where kernels can ask how many threads there are.

Source of B and A: Lavin and Gray, see `kernels.winograd`. Rows of G are multiplied by 24, 24, 24,
24, 24 and 12, columns of A by the remaining factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    STORE_COST,
    WEIGHT_COST,
    alloc_vectors,
    build_kernel,
    ceil_div,
    constant,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.expansion import Expanded, Expansion
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, pack_panels
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.tile import (
    Prefetch,
    emit_reduction,
    locate_tile,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    declare_operands,
    emit_narrow_vectors,
    emit_prepared_image,
    emit_store,
)
from relayquant.codegen.kernels.integer.saturating_pack import can_narrow
from relayquant.codegen.kernels.integer.specs import (
    Constants,
    Conv2d,
    PackedWeights,
    Shape,
    pack_channels,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, Wrapping, emit_wrapping
from relayquant.codegen.kernels.winograd import (
    CHUNK_BYTES,
    IN,
    LEAST_ITEMS,
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

#: The matrix G.
WEIGHT_TRANSFORM = np.array(
    [[6, 0, 0], [4, 4, 4], [4, -4, 4], [1, 2, 4], [1, -2, 4], [0, 0, 12]], "float64"
)
#: G w G'.
EXPANSION = Expansion(np.kron(WEIGHT_TRANSFORM, WEIGHT_TRANSFORM), "int8", "int16", "int16")
#: Results are multiplied by FACTOR = 9 * 2**SHIFT.
FACTOR, INVERSE_OF_9, SHIFT = 576, pow(9, -1, 2**32), 6
#: Of six sums, the one that is in all four results, with the factor -1.
BIASED = 1
#: Sums with the bias must be smaller in magnitude.
LARGEST_SUM = 2**25
#: Largest size of the transformed weights, which have eight times the bytes. A last-level cache
#: holds some weights of this size.
MOST_WEIGHT_BYTES = 5 * 1024 * 1024
#: Least number of tiles of a chunk if weights come slowly from the last-level cache: their products
#: take as long as the next panel takes to come, for any number of channels.
FAR_TILES = 24
#: Bytes of transformed activations and products of a chunk then, by bytes of weights, and at most.
CHUNK_PER_WEIGHTS, MOST_CHUNK_BYTES = 1.5, 1400 * 1024
#: Least number of parts of an image in few chunks, if it has enough channels. Narrower panels would
#: make more of them, but multiply more slowly.
LEAST_PARTS = 4
#: Fused dot products in the time of one that multiplies and then adds.
UNFUSED = 2


@dataclass(frozen=True)
class WinogradPlan:
    """Choices that generator and packer must agree on."""

    spec: Conv2d
    isa: Isa

    @cached_property
    def grid(self) -> TileGrid:
        """The tiles, split into chunks and parts."""
        spec, timing = self.spec, self.isa.timing
        near = timing.winograd.near_weights
        is_late = near is not None and timing.counts_threads
        weights = POINTS * spec.in_channels * spec.out_channels
        cost = spec.macs // 2 + STORE_COST * prod(spec.out_shape) + WEIGHT_COST * weights
        grid = TileGrid(
            spec.out_size,
            spec.out_channels,
            POINTS * (2 * spec.in_channels + 4 * spec.out_channels),
            spec.batch,
            is_parallel=cost >= PARALLEL_THRESHOLD,
            shares_inputs=not is_late,
            splits_late=is_late,
        )
        if near is None:
            return grid
        chunk = min(max(int(CHUNK_PER_WEIGHTS * 2 * weights), CHUNK_BYTES), MOST_CHUNK_BYTES)
        least = 2 if 2 * weights > near else LEAST_ITEMS
        return replace(grid, fewest_tiles=FAR_TILES, chunk_bytes=chunk, least_chunks=least)

    @cached_property
    def parts(self) -> int:
        """Parts of the panels, which all read the same transformed activations."""
        return self.grid.count_parts(self.product.panels)

    @cached_property
    def product(self) -> ConvPlan:
        """The matrix product of one element. Its pixels are the tiles of a chunk."""
        grid, least = self.grid, self.grid.least_tiles
        tiles = grid.most_tiles if grid.splits_late else least
        channels = self.spec.in_channels, self.spec.out_channels
        stored, tile = Epilogue(Store.ACCUMULATOR, "int32"), self.spec.tile
        spec = Conv2d(1, 1, tiles, *channels, (1, 1), in_dtype="int16", epilogue=stored, tile=tile)
        isa = self.isa.for_activations("int16").for_wrapping_sums()
        isa = replace(isa, max_pixels=min(isa.max_pixels, least))
        if grid.fewest_tiles and grid.is_parallel:  # parts for the threads that have no chunk
            vectors = ceil_div(self.spec.out_channels, isa.lanes)
            most = vectors * self.spec.batch * grid.chunks // LEAST_PARTS
            isa = replace(isa, max_blocks=max(min(isa.max_blocks, most), 1))
        return ConvPlan(spec, isa)

    @cached_property
    def input_lanes(self) -> int:
        """int16 lanes of transformed activations."""
        lanes = 2 * self.isa.lanes
        return lanes if self.spec.in_channels % lanes == 0 else self.isa.lanes

    @cached_property
    def memory(self) -> TileMemory:
        """Memory for transformed activations, which all parts read, and for their products."""
        channels = self.spec.in_channels, self.sum_channels
        return TileMemory(
            self.grid, channels, ("int16", "int32"), self.isa.lanes, is_common=self.parts > 1
        )

    @cached_property
    def sum_channels(self) -> int:
        """Channels of the products of the largest part."""
        panels = ceil_div(self.product.panels, self.parts)
        return min(panels * self.product.panel_channels, self.spec.out_channels)

    @property
    def scales_results(self) -> bool:
        """Whether sums stay 2**`SHIFT` times too large, and multipliers are as many times smaller.

        Both are exact in float32, so the products are the same.
        """
        return self.spec.epilogue.output is Store.REQUANTIZE

    @cached_property
    def weight_size(self) -> int:
        return POINTS * self.product.weight_size

    @cached_property
    def weight_bytes(self) -> int:
        return POINTS * self.product.weight_bytes

    @cached_property
    def weight_reads(self) -> int:
        """How often the weights come from the last-level cache: once, or for every chunk."""
        near = self.isa.timing.winograd.near_weights
        stay = near is None or self.weight_bytes <= near * self.parts
        return 1 if stay else self.grid.chunks

    @cached_property
    def cost(self) -> float:
        """Estimated time of an image, in dot products of the instruction set for int16."""
        timing, vectors = self.isa.timing.winograd, self.product.vectors
        tiles = prod(self.grid.tiles)
        unit = 1 if self.product.isa.is_fused else UNFUSED
        dots = tiles * POINTS * vectors * self.product.words
        inputs = self.spec.in_channels // self.input_lanes * timing.input_transform
        transforms = tiles * (inputs + vectors * timing.output_transform)
        fetches = timing.time_fetches(self.weight_bytes, self.weight_reads, self.spec.batch) / unit
        hidden = timing.overlap * dots * self.weight_reads / self.grid.chunks
        return dots + transforms / unit + max(fetches - hidden, 0)


def can_winograd(spec: Conv2d, isa: Isa, weight: NDArray[np.int8], bias: NDArray[np.int32]) -> bool:
    """Whether `build_winograd` can compute a convolution with weights (OHWI) and bias (O,).

    The transformed weights must also be small enough for a cache.
    """
    # Pairs of int16: the other instruction sets of the package have none, or better ones for bytes.
    pairs = isa.narrowing is not None and isa.for_activations("int16").products == 2
    if not (can_transform(spec, isa.lanes) and pairs and spec.in_dtype in ("uint8", "int8")):
        return False
    if find_largest_sum(spec, weight, bias) >= LARGEST_SUM:
        return False
    return WinogradPlan(spec, isa).weight_bytes <= MOST_WEIGHT_BYTES


def saves_time(spec: Conv2d, isa: Isa) -> bool:
    """Whether `build_winograd` is estimated to be faster than `build_conv2d`.

    `can_winograd` must be true for the convolution.
    """
    direct = choose_plan(spec, isa)
    if direct.isa.unit is not None:
        return False  # a matrix unit multiplies bytes only, ten times as fast
    dots = prod(spec.out_size) * direct.vectors * direct.panel_words / direct.isa.sharing
    return WinogradPlan(spec, isa).cost < isa.timing.winograd.worth * dots


def find_largest_sum(spec: Conv2d, weight: NDArray[np.int8], bias: NDArray[np.int32]) -> int:
    """Return the largest magnitude of a sum, with its bias, for any activations."""
    low, high = (limit - spec.in_zero_point for limit in INTEGER_LIMITS[spec.in_dtype])
    flat = weight.astype("int64").reshape(len(weight), -1)
    above, below = flat.clip(min=0).sum(axis=1), flat.clip(max=0).sum(axis=1)
    ends = np.stack([above * high + below * low, above * low + below * high]) + bias
    return int(np.abs(ends).max(initial=0))


def build_winograd(spec: Conv2d, isa: Isa, name: str = "conv2d", *shapes: Shape) -> PrimFunc:
    """Build the same kernel as `build_conv2d`, for constants of `pack_winograd`."""

    def body() -> None:
        plan = WinogradPlan(spec, isa)
        operands = declare_operands(
            spec, plan.product.isa, plan.weight_size, spec.out_channels, *shapes
        )
        image = emit_prepared_image(operands.data, spec, with_signed_activations(isa))
        with view_buffers(image.data) as [pixels]:
            steps = TileSteps(
                partial(emit_inputs, plan, replace(image, data=pixels)),
                partial(emit_products, plan, operands),
                partial(emit_results, plan, operands),
            )
            emit_shares(plan.memory, steps, spec.batch, plan.product.panels)

    return build_kernel(name, body)


def with_signed_activations(isa: Isa) -> Isa:
    """Return the instruction set for activations minus 128 instead of uint8.

    Then B d B' and the sums are small enough.
    """
    return replace(isa, activation="int8")


def emit_inputs(
    plan: WinogradPlan, image: Image, inputs: Buffer, at: TileResults, origin: Expr
) -> None:
    """Emit B d B' of one tile, all channels. Tile 0 begins at `origin`."""
    channels, lanes = plan.spec.in_channels, plan.input_lanes
    start = ((at.image * image.height + at.row) * image.width + at.col) * channels
    wide = vector("int16", lanes)
    with T.serial(channels // lanes) as v:
        source, first = T.bind(start + v * lanes), T.bind(origin + at.number * channels + v * lanes)

        def load(i: int, j: Expr) -> Expr:
            at = source + (i * image.width + j) * channels
            return T.Cast(wide, load_vector(image.data, at, lanes))

        rows = transform_columns(load, lambda d: transform_inputs(d, lanes), IN, lanes, "int16")
        for i, row in enumerate(rows):
            row = [T.bind(value) for value in row]
            for j, value in enumerate(transform_inputs(row, lanes)):
                store_vector(inputs, value, first + (i * IN + j) * plan.memory.input_stride, lanes)


def transform_inputs(d: list[Expr], lanes: int) -> list[Expr]:
    """Multiply B by six int16 vectors. B is

    4  0 -5  0  1  0
    0 -4 -4  1  1  0
    0  4 -4 -1  1  0
    0 -2 -1  2  1  0
    0  2 -1 -2  1  0
    0  4  0 -5  0  1
    """

    def times(factor: int, value: Expr) -> Expr:
        return value * constant("int16", factor, lanes)

    # Bound, since TVM writes out an expression wherever it is read.
    even, odd = T.bind(d[4] - times(4, d[2])), T.bind(d[3] - times(4, d[1]))
    near, far = T.bind(d[4] - d[2]), T.bind(times(2, d[3] - d[1]))
    first, last = times(4, d[0] - d[2]) + near, d[5] - d[3] - times(2, far)
    return [first, even + odd, even - odd, near + far, near - far, last]


def emit_products(
    plan: WinogradPlan,
    operands: Operands,
    inputs: Buffer,
    origin: Expr,
    sums: Buffer,
    share: Share,
) -> None:
    """Emit for every element: transformed activations times transformed weights of a part.

    The activations begin at `origin`.
    """
    product, channels, outputs = plan.product, plan.spec.in_channels, plan.sum_channels
    lanes, tile = product.isa.lanes, product.tile
    tiles, own = share.tiles, share.own
    image = Image(inputs, 1, product.spec.width)
    steps = ceil_div(tiles, tile.cols)
    with T.grid(POINTS, own.end - own.first, steps) as (point, index, step):
        panel = T.bind(own.first + index)
        first = T.bind(T.min(step * tile.cols, tiles - tile.cols))
        weights = point * (product.panels * product.panel_vectors)
        place = Placement((1, product.spec.width), first_weight=weights)
        at = replace(
            locate_tile(product, image, place, *[T.int32(0)] * 4, panel),
            origin=origin + point * plan.memory.input_stride + first * channels,
        )
        chains = [alloc_vectors(tile.cols * tile.blocks, lanes) for _ in range(tile.chains)]
        for acc in (acc for accs in chains for acc in accs):
            store_vector(acc, constant("int32", 0, lanes), 0, lanes)
        ahead = plan_prefetch(plan, point, index, own, step)
        emit_reduction(product, image, operands, at, chains, ahead)
        for slot, accs in enumerate(zip(*chains, strict=True)):
            total = load_vector(accs[0], 0, lanes)
            for acc in accs[1:]:
                total = emit_wrapping(Wrapping.ADD, total, load_vector(acc, 0, lanes), lanes)
            pixel, block = divmod(slot, tile.blocks)
            channel = at.out_channels[block] - own.first * product.panel_channels
            target = (first + pixel) * outputs + channel
            store_vector(sums, total, point * plan.memory.sum_stride + target, lanes)


def plan_prefetch(
    plan: WinogradPlan, point: Expr, index: Expr, own: PanelRange, step: Expr
) -> Prefetch:
    """Plan what a tile fetches of the weights of the next panel.

    Transformed weights of many channels come from the last-level cache.
    """
    product = plan.product
    size = product.panel_vectors * product.isa.weight_vector
    tiles = ceil_div(plan.grid.least_tiles, product.tile.cols)
    share = ceil_div(product.tile.blocks * product.isa.weight_vector, tiles)
    following = own.locate_next(point, index, product.panels)
    start = T.min(step * (product.words * share), size - product.words * share)
    return Prefetch(following * size + start, share)


def emit_results(
    plan: WinogradPlan, operands: Operands, sums: Buffer, at: TileResults, share: Share
) -> None:
    """Emit the epilogue for the sums of one tile, for all channels of a part."""
    spec, isa, lanes, own = plan.spec, plan.isa, plan.isa.lanes, share.own
    (height, width), channels = spec.out_size, spec.out_channels
    start = ((at.image * height + at.row) * width + at.col) * spec.result_channels
    inverse = constant("int32", INVERSE_OF_9, lanes)
    blocks = plan.product.tile.blocks
    end = T.bind(T.min(own.end * blocks, channels // lanes))  # the last panel may be partial
    with T.serial(end - own.first * blocks) as v:
        first = T.bind((own.first * blocks + v) * lanes)
        source = T.bind(at.number * plan.sum_channels + v * lanes)
        target = T.bind(start + (first + spec.first_result))

        def load(i: int, j: Expr) -> Expr:
            return load_vector(sums, source + (i * IN + j) * plan.memory.sum_stride, lanes)

        rows = transform_columns(load, lambda m: transform_sums(m, lanes), OUT, lanes, "int32")
        bias = T.bind(load_vector(operands.bias, first, lanes))
        for i, row in enumerate(rows):
            row = [T.bind(value) for value in row]
            row[BIASED] = T.bind(emit_wrapping(Wrapping.SUBTRACT, row[BIASED], bias, lanes))
            totals = []
            for value in transform_sums(row, lanes):
                value = emit_wrapping(Wrapping.MULTIPLY, value, inverse, lanes)
                if not plan.scales_results:
                    value = shift(Wrapping.SHIFT_RIGHT, value, SHIFT, lanes)
                totals.append(value)
            targets = [target + (i * width + j) * spec.result_channels for j in range(OUT)]
            if can_narrow(isa, spec.epilogue):
                emit_narrow_vectors(isa, spec.epilogue, operands, totals, targets, first, 1, lanes)
                continue
            for total, place in zip(totals, targets, strict=True):
                emit_store(operands, spec.epilogue, total, place, first, lanes, lanes)


def transform_sums(m: list[Expr], lanes: int) -> list[Expr]:
    """Multiply A by six int32 vectors, modulo 2**32. A is

    1 -1 -1  1  1  0
    0 -1  1  2 -2  0
    0 -1 -1  4  4  0
    0 -1  1  8 -8  2
    """

    def wrap(operation: Wrapping) -> Callable[[Expr, Expr], Expr]:
        return lambda a, b: emit_wrapping(operation, a, b, lanes)

    def double(value: Expr, times: int = 1) -> Expr:
        return shift(Wrapping.SHIFT_LEFT, value, times, lanes)

    plus, minus = wrap(Wrapping.ADD), wrap(Wrapping.SUBTRACT)
    near_sum, near_difference = T.bind(plus(m[1], m[2])), T.bind(minus(m[1], m[2]))
    far_sum, far_difference = T.bind(plus(m[3], m[4])), T.bind(double(minus(m[3], m[4])))
    return [
        minus(plus(m[0], far_sum), near_sum),
        minus(far_difference, near_difference),
        minus(double(far_sum, 2), near_sum),
        minus(double(plus(double(far_difference), m[5])), near_difference),
    ]


def shift(operation: Wrapping, value: Expr, bits: int, lanes: int) -> Expr:
    """Shift an int32 vector by `bits` bits."""
    return emit_wrapping(operation, value, constant("int32", bits, lanes), lanes)


def pack_winograd(spec: Conv2d, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the constant operands of `build_winograd`. Arguments as for `pack_conv2d`.

    Raises:
        ValueError: A shape does not fit, the multiplier is missing or not allowed, or sums with
            these weights can be too large.
    """
    weight = constants.weight
    centre = with_signed_activations(isa).zero_point_shift(spec.in_dtype)
    order = np.arange(spec.out_channels)
    folded, factors = pack_channels(spec, constants, centre, order)
    largest = find_largest_sum(spec, weight, constants.bias)
    if largest >= LARGEST_SUM:
        raise ValueError(
            f"pack_winograd: sums with these weights reach {largest}; allowed: below "
            f"{LARGEST_SUM}. Use build_conv2d and pack_conv2d.",
        )
    plan = WinogradPlan(spec, isa)
    folded = (folded.astype("int64") * FACTOR).astype("uint32").view("int32")
    if plan.scales_results and factors is not None:
        first = np.arange(factors.size) < spec.out_channels
        factors = np.ldexp(factors, np.where(first, -SHIFT, 0))
    taps = weight.reshape(spec.out_channels, -1, 1, 1, spec.in_channels).swapaxes(0, 1)
    packed = np.stack([pack_panels(plan.product, tap) for tap in taps]).astype("int8")
    return PackedWeights(Expanded(EXPANSION, packed), folded, factors)
