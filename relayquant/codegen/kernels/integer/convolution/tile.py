"""A register tile of a convolution -> its position, products and stores, as TIR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    alloc_vectors,
    broadcast,
    ceil_div,
    constant,
    emit_prefetch,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    emit_narrow_vectors,
    emit_store,
    locate_panel,
)
from relayquant.codegen.kernels.integer.saturating_pack import count_packed
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa

#: Least iterations of a loop that is unrolled. With two, LLVM makes slow code.
LONG_LOOP = 4


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
    width = isa.accumulator_lanes
    chains = [alloc_vectors(plan.accumulators, width, isa.sum_dtype) for _ in range(tile.chains)]
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
    spec, isa, blocks, width = plan.spec, plan.isa, plan.tile.blocks, plan.isa.accumulator_lanes
    pieces = isa.products // plan.end
    rows = range(number * pieces, min((number + 1) * pieces, plan.taps[0]))
    row = spec.dilation[0] * image.width * spec.in_channels
    ends = [row * r + plan.words * isa.products for r in rows]
    pixels = [
        isa.load_joined(image.data, [at.origin + start + end for end in ends], plan.end)
        for start in at.pixel_starts
    ]
    words = [isa.join_words(members) for members in group_pixels(pixels, isa)]
    index = prod(plan.taps) * plan.words + number
    for slot, acc in enumerate(accs):
        members, block = divmod(slot, blocks)
        weights = isa.load_weights(operands.weight, at.first_vector + index * blocks + block)
        value = isa.dot(load_vector(acc, 0, width), words[members], weights)
        store_vector(acc, value, 0, width)


def add_chains(plan: ConvPlan, chains: list[list[Buffer]]) -> list[Expr]:
    """Add up the chains of a tile. Returns accumulators, in the order of `emit_start`."""
    width, totals = plan.isa.accumulator_lanes, []
    for accs in zip(*chains, strict=True):
        total = load_vector(accs[0], 0, width)
        for acc in accs[1:]:
            total = total + load_vector(acc, 0, width)
        totals.append(total)
    return totals


def split_pixels(plan: ConvPlan, totals: list[Expr]) -> list[Expr]:
    """Split the accumulators of a tile into vectors of sums, [pixel * blocks + block]."""
    isa, blocks = plan.isa, plan.tile.blocks
    vectors: list[Expr] = [None] * (plan.tile.pixels * blocks)
    for slot, total in enumerate(totals):
        first, block = divmod(slot, blocks)
        for member, sums in enumerate(isa.split_sums(total)):
            vectors[(first * isa.pixels + member) * blocks + block] = sums
    return vectors


def store_integers(
    plan: ConvPlan, operands: Operands, at: TilePosition, chains: list[list[Buffer]]
) -> None:
    """Store the sums of a tile through the epilogue."""
    epilogue, blocks, lanes = plan.spec.epilogue, plan.tile.blocks, plan.isa.lanes
    totals = add_chains(plan, chains)
    if plan.is_narrow:
        for store in list_packed(plan, operands, at, totals):
            store()
        return
    for slot, total in enumerate(split_pixels(plan, totals)):
        pixel, block = divmod(slot, blocks)
        target = at.out_pixels[pixel] + at.out_channels[block]
        first = at.constants + block * lanes
        emit_store(operands, epilogue, total, target, first, lanes, plan.store_width)


def list_packed(
    plan: ConvPlan, operands: Operands, at: TilePosition, totals: list[Expr]
) -> list[Callable[[], None]]:
    """List the stores of a tile, each of the accumulators that are packed to one vector of bytes.

    Where the results of an accumulator's pixels follow each other, they are stored as one pixel's.
    """
    blocks, width = plan.tile.blocks, plan.store_width
    targets = [pixel + at.out_channels[0] for pixel in at.out_pixels]
    if plan.joins_results:
        targets, width = targets[:: plan.tile.sharing], width * plan.tile.sharing
    count = count_packed(blocks)
    share = count * len(targets) // len(totals)

    def store(number: int) -> None:
        emit_narrow_vectors(
            plan.isa,
            plan.spec.epilogue,
            operands,
            totals[number * count : (number + 1) * count],
            targets[number * share : (number + 1) * share],
            at.constants,
            blocks,
            width,
        )

    return [partial(store, number) for number in range(ceil_div(len(totals), count))]
