"""Specification of a convolution or matrix product of integers -> its kernel, as TIR.

Activations have 8 or 16 bits, weights are int8:

    y[n, oy, ox, c] = epilogue(bias[c] + sum x[n, oy*s + kh*d, ox*s + kw*d, i] * w[c, kh, kw, i])

One generator serves conv2d, conv1d (height 1), dense (1x1 on a row of pixels) and the phases of a
transposed convolution. It keeps a register tile of `rows x cols` output pixels by `blocks` vectors
of output channels as accumulators, and goes through the reduction in words of `Isa.products`
activations:

- Pixels are the outer, channels the inner loop of the tile: the swapped order makes LLVM spill.
- Remainders of pixels and channels move the last tile back so that it overlaps its neighbour. Both
write the same values. The packer orders the weights accordingly, so there is no tail code.
- In NHWC the kw * c_in bytes under one kernel row are contiguous, so they are one run of words.
This suits a first convolution of 1 or 3 channels as well as any other. The end of a run is
multiplied by zero weights, or the ends of several runs are joined to words in registers
(`ConvPlan.end`).
- Weights that do not fit the first-level cache are read panel by panel, with all pixels for each,
while the next panel is fetched. Threads split the panels, or the pixels if there are few weights.
- Padding, a flip of the sign bit, and slack for the last word are one copy into a workspace, made
only if needed.
- Where a reduction is short, the results of a tile are converted and stored between the products of
the next one, if the core does not do so by itself.
- Small groups are merged until a vector of output channels is filled; the weights between groups
are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    PARALLEL_THRESHOLD,
    STORE_COST,
    WEIGHT_COST,
    alloc_vectors,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    emit_prefetch,
    emit_unknown,
    load_vector,
    loop_over,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.integer.conv_plan import (
    PREFETCH_TILES,
    UNROLLED_WORDS,
    ConvPlan,
    pack_constants,
)
from relayquant.codegen.kernels.integer.depthwise import build_depthwise
from relayquant.codegen.kernels.integer.depthwise_plan import pack_depthwise
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    declare_operands,
    emit_narrow_vectors,
    emit_prepared_image,
    emit_store,
    locate_panel,
)
from relayquant.codegen.kernels.integer.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.saturating_pack import count_packed
from relayquant.codegen.kernels.integer.specs import Conv2d, Dense, PackedWeights
from relayquant.codegen.kernels.integer.tiled import emit_tiled, mark_stores_once
from relayquant.codegen.kernels.integer.tiled_plan import TiledPlan
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa

#: Packed weights of up to this many bytes stay in the first-level cache during all pixels.
SMALL_WEIGHT_BYTES = 20 * 1024
#: A larger image (in bytes) does not stay in the second-level cache; weights up to the second size
#: do.
LARGE_IMAGE_BYTES = 1024 * 1024
CACHED_WEIGHT_BYTES = 300 * 1024
#: Least iterations of a loop that is unrolled. With two, LLVM makes slow code.
LONG_LOOP = 4

#: Threads split the pixels up to this many weights per input value. Weights are read in order and
#: fetched ahead, while data that another core wrote has to be waited for.
WEIGHTS_PER_INPUT = 4

#: Most runs of tiles that threads share, whose results are stored during the next products, and
#: the fewest tiles of a run. Their number is a power of two, so that most threads share evenly.
PARTS, FEWEST_RUN = 64, 4
#: Words of a long reduction between which results are stored.
MIXED_WORDS = 8

#: Loops over tiles: all panels of weights for each tile of pixels, or all pixels for each panel.
PIXEL_ORDER = "n row col group panel"
PANEL_ORDER = "group panel n row col"


def build_general_conv2d(
    spec: Conv2d,
    isa: Isa,
    name: str,
    in_shape: tuple[int, ...] | None,
    out_shape: tuple[int, ...] | None,
) -> PrimFunc:
    """Build the kernel of `build_conv2d` for all convolutions that are not depthwise."""

    return build_planned(choose_plan(spec, isa), name, in_shape, out_shape)


def build_planned(
    plan: ConvPlan,
    name: str = "conv2d",
    in_shape: tuple[int, ...] | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> PrimFunc:
    """Build the kernel of a convolution for a plan and the constants of `pack_constants`."""

    def body() -> None:
        spec = plan.spec
        operands = declare_operands(
            spec, plan.isa, plan.weight_size, plan.channel_size, in_shape, out_shape
        )
        image = Image(operands.data, spec.height, spec.width)
        cost = spec.macs + STORE_COST * prod(spec.out_shape) + WEIGHT_COST * plan.weight_size
        threads = cost >= PARALLEL_THRESHOLD
        if plan.needs_copy:
            image = emit_prepared_image(operands.data, spec, plan.isa)
        emit_convolution(plan, image, operands, threads)

    return mark_stores_once(build_kernel(name, body), plan)


@dataclass(frozen=True)
class TilePosition:
    """One register tile: offsets of the data it reads and writes, and of its constants."""

    origin: Expr  #: of the first activation in the image
    pixel_starts: list[int]  #: of every pixel of the tile, from `origin`
    out_pixels: list[Expr]  #: of the first channel of every pixel in y
    out_channels: list[
        Expr
    ]  #: of every block in a pixel of y; all the same when results are packed
    pixel_numbers: list[Expr]  #: of every pixel in `Operands.row_term`
    constants: Expr  #: in the multipliers
    bias: Expr
    first_vector: Expr  #: number of the first weight vector


#: Stores the sums of a tile: (plan, operands, position of the tile, result of `add_chains`).
StoreSums = Callable[[Any, Operands, TilePosition, list[Expr]], None]


def emit_convolution(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    threads: bool,
    placement: Placement | None = None,
    store: StoreSums | None = None,
) -> None:
    """Emit all tiles of a convolution over a prepared image.

    `store` None: `store_integers`. Plans for a matrix unit take no other.
    """
    images, n_rows, n_cols = plan.pixel_grid
    placement = placement or Placement((0, 0), (n_rows, n_cols), (1, 1), (0, 0), 0, 0)
    if isinstance(plan, TiledPlan):
        emit_tiled(plan, image, operands, threads, placement)
        return
    if plan.is_matrix:
        image = Image(image.data, 1, n_cols)
    sizes = {
        "n": images,
        "row": ceil_div(n_rows, plan.tile.rows),
        "col": ceil_div(n_cols, plan.tile.cols),
        "group": plan.groups,
        "panel": plan.panels,
    }
    order = pick_order(plan)
    axes, halved = order.split(), find_halved_axis(plan, order, sizes) if threads else None
    if halved is not None:
        axes, sizes = ["half", *axes], {**sizes, "half": 2, halved: sizes[halved] // 2}
    extents = tuple(sizes[axis] for axis in axes)

    def name_indices(indices: list[Expr]) -> dict[str, Expr]:
        index = dict(zip(axes, indices, strict=True))
        if halved is not None:
            index[halved] = index[halved] + index.pop("half") * sizes[halved]
        return index

    if plan.is_delayed:
        assert store is None
        emit_delayed(
            plan,
            image,
            operands,
            prod(extents),
            lambda tile: locate_tile(
                plan, image, placement, **name_indices(split_index(tile, extents))
            ),
            threads,
        )
        return
    tiles = sizes["n"] * sizes["row"] * sizes["col"]
    with loop_over(extents, threads) as indices:
        # of the half, if there are two
        within = dict(zip(axes, indices, strict=True))
        tile = (within["n"] * sizes["row"] + within["row"]) * sizes["col"] + within["col"]
        index = name_indices(indices)
        at = locate_tile(plan, image, placement, **index)
        ahead = None
        if order == PANEL_ORDER and tiles <= PREFETCH_TILES:
            panel = index["group"] * plan.panels + index["panel"]
            ahead = plan_prefetch(plan, placement, panel, tile, tiles)
        following = None
        if plan.is_matrix and plan.image_bytes > LARGE_IMAGE_BYTES:
            following = plan_pixel_prefetch(plan, at, order, index["panel"])
        emit_residual_prefetch(plan, operands, at)
        chains = emit_start(plan, operands, at)
        emit_reduction(plan, image, operands, at, chains, ahead, following)
        (store or store_integers)(plan, operands, at, add_chains(plan, chains))


def emit_delayed(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    tiles: int,
    locate: Callable[[Expr], TilePosition],
    threads: bool,
) -> None:
    """Emit so many tiles in runs, each of which stores results during the products of the next.

    `locate` finds a tile by its number. Each run ends with stores alone.
    """
    lanes, most = plan.isa.lanes, min(PARTS, tiles // FEWEST_RUN) if threads else 1
    parts = 1 << most.bit_length() - 1
    with loop_over((parts,), threads) as (part,):
        first, end = (T.floordiv((part + i) * tiles, parts) for i in (0, 1))
        count = end - first
        kept = alloc_vectors(plan.tile.pixels * plan.tile.blocks, lanes)
        unknown = emit_unknown(first + 1)

        def find(tile: Expr) -> TilePosition:
            # LLVM does not know that this is 0. It would load before the loop what is the same for
            # all tiles, and keep it on the stack.
            at, zero = locate(first + tile), (unknown + tile) >> 31
            return replace(at, origin=at.origin + zero, first_vector=at.first_vector + zero)

        def emit_products(tile: Expr, stores: Sequence[Callable[[], None]] = ()) -> None:
            at = find(tile)
            emit_residual_prefetch(plan, operands, at)
            (sums,) = emit_start(plan, operands, at)
            emit_mixed(plan, image, operands, at, sums, stores)
            for old, new in zip(kept, sums, strict=True):
                store_vector(old, load_vector(new, 0, lanes), 0, lanes)

        def list_stores(tile: Expr) -> list[Callable[[], None]]:
            at, totals = find(tile), [load_vector(each, 0, lanes) for each in kept]
            targets = [pixel + at.out_channels[0] for pixel in at.out_pixels]
            return [
                partial(store_packed, plan, operands, targets, at.constants, totals, number)
                for number in range(0, len(totals), count_packed(plan.tile.blocks))
            ]

        emit_products(T.int32(0))
        with T.serial(count - 1) as i:
            emit_products(i + 1, list_stores(i))
        for emit in list_stores(count - 1):
            emit()


def emit_mixed(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    at: TilePosition,
    sums: list[Buffer],
    stores: Sequence[Callable[[], None]],
) -> None:
    """Emit all words of a tile, and `stores` evenly between the first ones."""
    is_long = plan.words > MIXED_WORDS + UNROLLED_WORDS  # LLVM makes a loop of the other words
    count, done = MIXED_WORDS if is_long else plan.words, 0

    def emit(word: Expr | int) -> None:
        emit_words(plan, image, operands, at, [sums], word * plan.isa.products, word, 1)

    for word in range(count):
        emit(word)
        due = ceil_div((word + 1) * len(stores), count)
        for store in stores[done:due]:
            store()
        done = due
    if count < plan.words:
        with T.serial(plan.words - count) as i:
            emit(i + count)


def pick_order(plan: ConvPlan) -> str:
    """Choose the axes of the loop over tiles, outermost first.

    What changes last stays in the caches.
    """
    if plan.weight_bytes <= SMALL_WEIGHT_BYTES:
        return PIXEL_ORDER
    if plan.image_bytes > LARGE_IMAGE_BYTES and plan.weight_bytes <= CACHED_WEIGHT_BYTES:
        return PIXEL_ORDER
    return "n group panel row col" if plan.weights_per_image else PANEL_ORDER


def find_halved_axis(plan: ConvPlan, order: str, sizes: dict[str, int]) -> str | None:
    """Find the axis of pixels to split in two first. None: threads split the panels.

    A thread with part of the pixels finds them in its own cache, from the kernel before. A thread
    with part of the panels reads all pixels, also those that other threads wrote, but fewer
    weights.
    """
    if order != PANEL_ORDER or plan.weight_size > WEIGHTS_PER_INPUT * prod(plan.spec.in_shape):
        return None
    return next((axis for axis in ("n", "row", "col") if sizes[axis] % 2 == 0), None)


@dataclass(frozen=True)
class Prefetch:
    """A tile's share in fetching the weights of the next panel.

    Large weights come from far away: the last-level cache or memory. Without prefetching, the first
    tile of a panel would wait for every line, and the others find them in the cache. So the tiles
    of one panel together fetch the lines of the next panel, a few with each word, while their dot
    products go on.
    """

    start: Expr  #: first element of packed weights, or of the pixels
    step: int  #: elements per word


def plan_prefetch(
    plan: ConvPlan, place: Placement, panel: Expr, tile: Expr, tiles: int
) -> Prefetch:
    """Plan what tile number `tile` of `tiles` fetches during a panel.

    Shares are rounded up, and the last shares moved back, so no address is beyond the weights.
    """
    size = plan.isa.weight_vector
    words = plan.panel_vectors // plan.tile.blocks
    step = ceil_div(plan.tile.blocks * size, tiles)
    following = T.min(panel + 1, plan.groups * plan.panels - 1)
    first = (following * plan.panel_vectors + place.first_weight) * size
    start = T.min(tile * (words * step), plan.panel_vectors * size - words * step)
    return Prefetch(first + start, step)


def plan_pixel_prefetch(plan: ConvPlan, at: TilePosition, order: str, panel: Expr) -> Prefetch:
    """Plan what a tile of a matrix fetches of the pixels of the next tile, which follow in memory.

    If the pixels exceed the second-level cache, each line would be waited for: hardware sees only a
    run of a few lines in every pixel, too short to predict the next. With all panels of weights for
    a tile of pixels, each panel fetches a share.
    """
    size, sharing = plan.tile.cols * plan.spec.in_channels, 1
    if order == PIXEL_ORDER:
        sharing = plan.panels
    step = ceil_div(size, plan.words * sharing)
    start = at.origin + size
    return Prefetch(start + panel * (plan.words * step) if sharing > 1 else start, step)


def emit_residual_prefetch(plan: ConvPlan, operands: Operands, at: TilePosition) -> None:
    """Fetch the residual and the results that a tile will overwrite, while its dot products go on.

    The residual was computed some kernels ago, and its pixels are far apart. Without prefetching,
    every line of it would be waited for, and every line of y next to it.
    """
    if operands.residual is None:
        return
    for buffer, write in ((operands.residual, False), (operands.out, True)):
        line = CACHE_LINE // np.dtype(buffer.dtype).itemsize
        for pixel in at.out_pixels:
            for channel in range(0, min(plan.panel_channels, plan.group_out), line):
                emit_prefetch(buffer, pixel + at.out_channels[0] + channel, level=1, write=write)


def locate_tile(
    plan: ConvPlan,
    image: Image,
    place: Placement,
    n: Expr,
    row: Expr,
    col: Expr,
    group: Expr,
    panel: Expr,
) -> TilePosition:
    """Compute the offsets of the tile with these indices.

    The last tile of an axis is moved back.
    """
    spec, tile = plan.spec, plan.tile
    _, n_rows, n_cols = plan.pixel_grid
    stride_h, stride_w = spec.strides
    oy, ox = row * tile.rows, col * tile.cols
    if n_rows % tile.rows:
        oy = T.min(oy, n_rows - tile.rows)
    if n_cols % tile.cols:
        ox = T.min(ox, n_cols - tile.cols)
    y, x = oy * stride_h + place.origin[0], ox * stride_w + place.origin[1]
    origin = ((n * image.height + y) * image.width + x) * spec.in_channels
    starts, numbers, targets = [], [], []
    for r, c in np.ndindex(tile.rows, tile.cols):
        starts.append((r * stride_h * image.width + c * stride_w) * spec.in_channels)
        numbers.append((n * n_rows + oy + r) * n_cols + ox + c)
        y = (oy + r) * place.stride[0] + place.offset[0]
        x = (ox + c) * place.stride[1] + place.offset[1]
        targets.append(((n * place.size[0] + y) * place.size[1] + x) * plan.result_pitch)

    own = locate_panel(plan, place, n, group, panel)
    return TilePosition(
        origin=origin + group * plan.group_in,
        pixel_starts=starts,
        out_pixels=targets,
        out_channels=own.channels,
        pixel_numbers=numbers,
        constants=own.constants,
        bias=own.bias,
        first_vector=own.first_vector,
    )


def emit_start(plan: ConvPlan, operands: Operands, at: TilePosition) -> list[list[Buffer]]:
    """Emit accumulators [chain][set * blocks + block]. A set is `Isa.pixels` pixels of the tile.

    The first chain starts with the bias, others with 0.
    """
    tile, isa, lanes = plan.tile, plan.isa, plan.isa.lanes
    width, slots = isa.accumulator_lanes, tile.pixels // isa.pixels * tile.blocks
    chains = [alloc_vectors(slots, width, isa.sum_dtype) for _ in range(tile.chains)]
    for slot, acc in enumerate(chains[0]):
        first, block = divmod(slot, tile.blocks)
        sums = []
        for number in group_pixels(at.pixel_numbers, isa)[first]:
            value = load_vector(operands.bias, at.bias + block * lanes, lanes)
            if operands.row_term is not None:
                value = value + broadcast(operands.row_term.vload([number]), lanes)
            sums.append(value)
        store_vector(acc, isa.join_sums(sums), 0, width)
    for acc in (acc for accs in chains[1:] for acc in accs):
        store_vector(acc, constant(isa.sum_dtype, 0, width), 0, width)
    return chains


def group_pixels(values: list[Any], isa: Isa) -> list[list[Any]]:
    """Group values of a tile's pixels by the sets of pixels that share accumulators."""
    return [values[i : i + isa.pixels] for i in range(0, len(values), isa.pixels)]


def emit_reduction(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    at: TilePosition,
    chains: list[list[Buffer]],
    ahead: Prefetch | None,
    following: Prefetch | None = None,
) -> None:
    """Emit the dot products of a tile, in loops over kernel positions and words.

    The loops also fetch the weights `ahead` and the `following` pixels. Pixels and blocks are
    unrolled. On x86 pixels are the outer loop, since the swapped order makes LLVM spill. On Arm
    this order makes LLVM spill (`Isa.blocks_first`).
    """
    spec, isa, blocks = plan.spec, plan.isa, plan.tile.blocks
    dilation_h, dilation_w = spec.dilation

    def steps(tap_h: Expr, tap_w: Expr, word: Expr, count: int) -> None:
        """Emit `count` words from `word` on, distributed over the chains."""
        tap = (tap_h * dilation_h * image.width + tap_w * dilation_w) * spec.in_channels
        offset = tap + word * isa.products
        index = (tap_h * plan.taps[1] + tap_w) * plan.words + word
        for share, buffer, level in ((ahead, operands.weight, 2), (following, image.data, 1)):
            if share is not None:
                line = CACHE_LINE // np.dtype(buffer.dtype).itemsize
                for element in range(0, count * share.step, line):
                    emit_prefetch(buffer, share.start + index * share.step + element, level)
        emit_words(plan, image, operands, at, chains, offset, index, count)

    unrolled = ceil_div(len(chains), isa.words_per_load) * isa.words_per_load
    times = isa.count_steps(plan.tile.pixels, blocks, plan.tile.pixels * blocks * len(chains))
    if plan.words >= LONG_LOOP * times * unrolled:
        unrolled *= times
    whole, rest = divmod(plan.words, unrolled)
    with T.grid(*plan.taps) as (tap_h, tap_w):
        if whole:
            with T.serial(whole) as i:
                steps(tap_h, tap_w, i * unrolled, unrolled)
        if rest:
            steps(tap_h, tap_w, T.int32(whole * unrolled), rest)
    for end_word in range(plan.end_words):
        emit_end_word(plan, image, operands, at, chains[end_word % len(chains)], end_word)


def emit_words(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    at: TilePosition,
    chains: list[list[Buffer]],
    offset: Expr | int,
    index: Expr | int,
    count: int,
) -> None:
    """Emit the dot products of `count` words from number `index` on, distributed over the chains.

    `offset` counts activations from the first one that a pixel reads to word number `index`.
    """
    isa, blocks, width = plan.isa, plan.tile.blocks, plan.isa.accumulator_lanes
    pixels = [
        isa.load_activations(image.data, at.origin + offset + start, count)
        for start in at.pixel_starts
    ]
    loads = [
        [isa.join_words(list(words)) for words in zip(*members, strict=True)]
        for members in group_pixels(pixels, isa)
    ]
    for i in range(count):
        vectors = at.first_vector + (index + i) * blocks
        sums = list(enumerate(chains[i % len(chains)]))
        if isa.blocks_first:
            sums.sort(key=lambda each: each[0] % blocks)
        for slot, acc in sums:
            members, block = divmod(slot, blocks)
            weights = isa.load_weights(operands.weight, vectors + block)
            value = isa.dot(load_vector(acc, 0, width), loads[members][i], weights)
            store_vector(acc, value, 0, width)


def emit_end_word(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    at: TilePosition,
    accs: list[Buffer],
    number: int,
) -> None:
    """Emit the dot products of one word that joins the ends of several kernel rows."""
    spec, isa, blocks = plan.spec, plan.isa, plan.tile.blocks
    pieces = isa.products // plan.end
    rows = range(number * pieces, min((number + 1) * pieces, plan.taps[0]))
    row = spec.dilation[0] * image.width * spec.in_channels
    ends = [row * r + plan.words * isa.products for r in rows]
    words = [
        isa.load_joined(image.data, [at.origin + start + end for end in ends], plan.end)
        for start in at.pixel_starts
    ]
    index = prod(plan.taps) * plan.words + number
    for slot, acc in enumerate(accs):
        pixel, block = divmod(slot, blocks)
        weights = isa.load_weights(operands.weight, at.first_vector + index * blocks + block)
        value = isa.dot(load_vector(acc, 0, isa.lanes), words[pixel], weights)
        store_vector(acc, value, 0, isa.lanes)


def add_chains(plan: ConvPlan, chains: list[list[Buffer]]) -> list[Expr]:
    """Add up the chains of a tile. Returns vectors of sums, [pixel * blocks + block]."""
    isa, blocks = plan.isa, plan.tile.blocks
    totals: list[Expr] = [None] * (plan.tile.pixels * blocks)
    for slot, accs in enumerate(zip(*chains, strict=True)):
        total = load_vector(accs[0], 0, isa.accumulator_lanes)
        for acc in accs[1:]:
            total = total + load_vector(acc, 0, isa.accumulator_lanes)
        first, block = divmod(slot, blocks)
        for member, sums in enumerate(isa.split_sums(total)):
            totals[(first * isa.pixels + member) * blocks + block] = sums
    return totals


def store_integers(
    plan: ConvPlan, operands: Operands, at: TilePosition, totals: list[Expr]
) -> None:
    """Store the sums of a tile through the epilogue."""
    epilogue, blocks, lanes = plan.spec.epilogue, plan.tile.blocks, plan.isa.lanes
    if not plan.is_narrow:
        for slot, total in enumerate(totals):
            pixel, block = divmod(slot, blocks)
            target = at.out_pixels[pixel] + at.out_channels[block]
            first = at.constants + block * lanes
            emit_store(operands, epilogue, total, target, first, lanes, plan.store_width)
        return
    targets = [pixel + at.out_channels[0] for pixel in at.out_pixels]
    for first in range(0, len(totals), count_packed(blocks)):
        store_packed(plan, operands, targets, at.constants, totals, first)


def store_packed(
    plan: ConvPlan,
    operands: Operands,
    targets: list[Expr],
    constants: Expr,
    totals: list[Expr],
    first: int,
) -> None:
    """Store the sums from number `first` on that are packed to one vector of bytes.

    `targets` are the offsets of all pixels of the tile in y.
    """
    isa, epilogue, blocks = plan.isa, plan.spec.epilogue, plan.tile.blocks
    values = totals[first : first + count_packed(blocks)]
    pixels = targets[first // blocks : (first + len(values)) // blocks]
    emit_narrow_vectors(
        isa, epilogue, operands, values, pixels, constants, blocks, plan.store_width
    )


def build_conv2d(
    spec: Conv2d,
    isa: Isa,
    name: str = "conv2d",
    in_shape: tuple[int, ...] | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> PrimFunc:
    """Build the kernel of a convolution: PrimFunc(x, weight, bias[, multiplier][, residual], y).

    x is NHWC, residual and y are like the output; the others come from `pack_conv2d`. `in_shape`
    and `out_shape` declare the arguments with another shape of equally many elements, as for a
    conv1d (N, W, C) or a dense layer (..., K).
    """
    build = build_depthwise if spec.is_depthwise else build_general_conv2d
    return build(spec, isa, name, in_shape, out_shape)


def pack_general_conv2d(
    spec: Conv2d,
    isa: Isa,
    weight: NDArray[np.int8],
    bias: NDArray[np.int32],
    multiplier: NDArray[np.float32] | None,
) -> PackedWeights:
    """Pack the constant operands of `build_general_conv2d`."""
    return pack_constants(choose_plan(spec, isa), weight, bias, multiplier)


def pack_conv2d(
    spec: Conv2d,
    isa: Isa,
    weight: NDArray[np.int8],
    bias: NDArray[np.int32],
    multiplier: NDArray[np.float32] | None,
) -> PackedWeights:
    """Pack the constant operands of `build_conv2d(spec, isa)`.

    Args:
        weight: (O, KH, KW, I / groups) int8, kernel zero point 0.
        bias: (O,) int32, scale s_in * s_w[c]; without the zero point correction.
        multiplier: (O,) or () float32; s_in * s_w[c] / s_out, or s_in * s_w[c] to dequantize. None
            if accumulators are stored.

    Raises:
        ValueError: A shape does not fit, or the multiplier is missing or not allowed.
    """
    pack = pack_depthwise if spec.is_depthwise else pack_general_conv2d
    return pack(spec, isa, weight, bias, multiplier)


def build_dense(
    spec: Dense,
    isa: Isa,
    name: str = "dense",
    in_shape: tuple[int, ...] | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> PrimFunc:
    """Build the kernel of a dense layer: PrimFunc(x, weight, bias[, multiplier][, residual], y).

    x is (M, K) and y (M, N), or the given shapes with M split into several dimensions. The
    constants come from `pack_dense`.
    """
    in_shape = in_shape or (spec.rows, spec.in_features)
    out_shape = (spec.rows, spec.out_features) if out_shape is None else out_shape
    return build_conv2d(spec.as_conv2d(), isa, name, in_shape, out_shape)


def pack_dense(
    spec: Dense,
    isa: Isa,
    weight: NDArray[np.int8],
    bias: NDArray[np.int32],
    multiplier: NDArray[np.float32] | None,
) -> PackedWeights:
    """Pack the operands of `build_dense`: weight (N, K), bias (N,), multiplier (N,) or ()."""
    if weight.shape != (spec.out_features, spec.in_features):
        raise ValueError(
            f"pack_dense: weight has shape {weight.shape}, expected "
            f"{(spec.out_features, spec.in_features)}.",
        )
    return pack_conv2d(spec.as_conv2d(), isa, weight[:, None, None, :], bias, multiplier)
