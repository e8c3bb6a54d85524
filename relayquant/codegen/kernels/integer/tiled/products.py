"""Plan of a convolution for a matrix unit + operands -> its products on tiles, as TIR.

    A      16 pixels where they lie in NHWC, or in a copy: rows of a tile are at equal distances
    B      packed weights [group][panel][step][tile of 16 channels][word][channel][4 bytes]
    bias   the sums before the first step: a tile load with distance 0 repeats one row
    sums   stored to a block in memory, from where vectors go through the epilogue

A process that may not use the unit runs the same products on vectors, with the same weights.

- Blocks are `Tile.rows` tiles of pixels by `Tile.blocks` tiles of channels, up to four. The other
registers hold operands.
- The last tile of a line is moved back and overlaps its neighbour, as in `convolution.direct`.
- Convolutions with stride 1 may take the padded image as one line of pixels. Sums of a pixel in the
padding are not stored; another pixel of the same tile is stored twice instead.
- Where a block has all pixels, weights are read once, and pixels may come from a copy for each
column of the window. All taps of a chunk of channels follow each other, so that the chunk stays in
the first-level cache, and weights are fetched into it.
- The sums of a block are converted and stored in parts, one after each step of the next block,
while its tiles are multiplied.
- Tiles are configured and released within each part of a parallel loop, since another thread may
run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    alloc_workspace,
    ceil_div,
    constant,
    emit_prefetch,
    load_vector,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    locate_panel,
)
from relayquant.codegen.kernels.integer.tiled.images import emit_folded, emit_gathered, emit_shifted
from relayquant.codegen.kernels.integer.tiled.plan import (
    FEWEST_BLOCKS,
    FIRST_CACHE_BYTES,
    NEAR_BYTES,
    TiledPlan,
    TileRows,
)
from relayquant.codegen.kernels.integer.tiled.results import (
    INTEGERS,
    KeptBlock,
    Storing,
    SumBlock,
    SumStores,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Wrapping, emit_wrapping
from relayquant.codegen.kernels.isa.matrix_unit import Tiles
from relayquant.codegen.kernels.unit_permission import ask_permission, count_parts, emit_if

#: Fewest cycles of products and stores that are worth sharing among threads; see
#: `emit.PARALLEL_THRESHOLD`.
PARALLEL_CYCLES = 15_000
#: Weights of up to this many bytes stay in the second-level cache during all pixels.
CACHED_WEIGHT_BYTES = 256 * 1024
#: Weights of up to this many bytes are not fetched ahead.
NEAR_WEIGHT_BYTES = 64 * 1024
#: Bytes between the weights of a step and those that it fetches into the second-level cache, and
#: into the first, if they are read once. One line in so many is fetched far ahead, if all are near.
FETCHED_AHEAD, FETCHED_NEAR, FETCHED_LINES = 8 * 1024, 2 * 1024, 4
#: Fewer chunks than this number of threads cost as many bytes as the image has for each that is
#: missing.
SHARING_THREADS = 4
#: Accumulators of the product on vectors.
ACCUMULATORS = 16
#: The top bits of four bytes, as int32: also four times 128.
FLIP = -0x7F7F7F80


def emit_tiled(
    plan: TiledPlan,
    image: Image,
    operands: Operands,
    threads: bool,
    place: Placement,
    storing: Storing | None = None,
) -> None:
    """Emit all blocks of a convolution over a prepared image. `storing` None: `INTEGERS`."""
    storing = storing or INTEGERS
    if plan.rows is TileRows.GATHERED:
        image = emit_gathered(plan, image, threads)
    if plan.rows is TileRows.FOLDED:
        image = emit_folded(plan, image, threads)
    if plan.rows is TileRows.SHIFTED:
        image = emit_shifted(plan, image, threads)
    may_use = ask_permission(plan.unit)
    images = plan.lines[0] if plan.weights_per_image else 1
    pixels = ceil_div(plan.image_tiles, plan.tile.rows)
    chunks = count_chunks(plan, pixels) if is_cached(plan) else 1
    sizes = {
        "n": images,
        "chunk": chunks,
        "group": plan.groups,
        "panel": plan.panels,
        "pixel": pixels // chunks,
    }
    total, cycles = prod(sizes.values()), plan.count_cycles(plan.tile)
    is_shared = threads and total > 1 and cycles >= PARALLEL_CYCLES
    parts = T.min(count_parts(plan.unit), total) if is_shared else 1
    with (T.parallel if is_shared else T.serial)(parts) as part:
        first, end = (T.floordiv((part + i) * total, parts) for i in (0, 1))
        tiles: list[Tiles] = []
        shapes = plan.shape_registers(plan.tile_rows)
        emit_if(may_use, lambda: tiles.append(plan.unit.configure(shapes)))
        sums = alloc_sums(plan, plan.tile_rows)
        stores, kept = SumStores(plan, operands, place, sums, storing), KeptBlock.allocate(plan)
        with T.serial(end - first) as number:
            indices = split_index(first + number, tuple(sizes.values()))
            index = dict(zip(sizes, indices, strict=True))
            index["pixel"] = index.pop("chunk") * sizes["pixel"] + index["pixel"]
            block = locate_block(plan, image, place, **index)
            is_fetching = chunks == 1 and count_weights(plan) > NEAR_WEIGHT_BYTES
            ahead = index["pixel"] if is_fetching else None
            is_due = T.bind(kept.has_sums)
            emit_if(may_use, lambda: emit_start(plan, operands, tiles[0], block))
            with loop_over_steps(plan) as step:

                def multiply(step: TileStep = step) -> None:
                    if ahead is not None:
                        emit_weight_prefetch(plan, operands.weight, block, step, ahead, pixels)
                    if ahead is not None and pixels >= FEWEST_BLOCKS:
                        with T.If(number == 0), T.Then():  # no block before fetched its weights
                            emit_weight_prefetch(plan, operands.weight, block, step, ahead, 1)
                    emit_step(plan, image, operands, tiles[0], block, step)
                    emit_spare_store(plan, tiles[0], sums, step)

                emit_if(may_use, multiply)
                if plan.overlaps_stores:
                    stores.emit_after(step.number, kept, is_due)
            emit_if(
                may_use,
                lambda: emit_end(plan, tiles[0], block, sums),
                lambda: emit_vector_products(plan, image, operands, block, sums),
            )
            if plan.overlaps_stores:
                kept.keep(block)
            else:
                stores.emit_now(block)
        emit_if(may_use, lambda: tiles[0].release())
        if plan.overlaps_stores:
            stores.emit_last(kept)


def is_cached(plan: TiledPlan) -> bool:
    """Whether all weights stay in the second-level cache."""
    return count_weights(plan) <= CACHED_WEIGHT_BYTES


def count_weights(plan: TiledPlan) -> int:
    """Count the bytes of all weights."""
    return plan.groups * plan.panels * plan.panel_bytes


def count_chunks(plan: TiledPlan, pixels: int) -> int:
    """Choose in how many chunks the blocks of pixels are computed, with all panels for each.

    The number is the one with the fewest bytes from the second-level cache. Chunks of a few blocks
    stay in the first during all panels, and a panel does during all blocks of a chunk. Threads that
    do not share a chunk do not read what others wrote.
    """
    image = plan.image_bytes
    weights = count_weights(plan)

    def cost(chunks: int) -> tuple[int, int]:
        is_near = image // chunks + plan.panel_bytes <= FIRST_CACHE_BYTES
        total = image if is_near else image * plan.panels
        if weights <= NEAR_BYTES:
            total += weights
        else:
            total += weights * (chunks if plan.panel_bytes <= FIRST_CACHE_BYTES else pixels)
        return total + 2 * image * max(SHARING_THREADS - chunks, 0), -chunks

    return min((d for d in range(1, pixels + 1) if pixels % d == 0), key=cost)


def locate_block(
    plan: TiledPlan,
    image: Image,
    place: Placement,
    n: Expr,
    pixel: Expr,
    group: Expr,
    panel: Expr,
) -> SumBlock:
    """Compute the offsets of a block. The last tile of a line, and of all tiles, is moved back."""
    tile, (_, lines, length) = plan.tile, plan.lines
    numbers, found = [], []
    for m in range(tile.rows):
        number = pixel * tile.rows + m
        if plan.image_tiles % tile.rows:
            number = T.min(number, plan.image_tiles - 1)
        image_number, line, start = split_index(
            number, (ceil_div(plan.image_tiles, lines * plan.line_tiles), lines, plan.line_tiles)
        )
        start = start * plan.tile_rows
        if length % plan.tile_rows:
            start = T.min(start, length - plan.tile_rows)
        found.append((n if plan.weights_per_image else image_number, line, start))
        numbers.append(number)

    sources = []
    for number, (each, line, start) in zip(numbers, found, strict=True):
        if plan.rows is TileRows.PACKED:
            at = number * (plan.steps * plan.chunk_distance)
        elif plan.rows in (TileRows.MATRIX, TileRows.GATHERED):
            at = (each * length + start) * row_distance(plan)
        else:
            y = line * plan.pixel_strides[0] + place.origin[0]
            x = start * plan.pixel_strides[1] + place.origin[1]
            at = ((each * image.height + y) * image.width + x) * plan.pixel_size
        sources.append(at + group * plan.group_in)

    return SumBlock(
        rows=plan.tile_rows,
        sources=sources,
        lines=found,
        number=group * plan.panels + panel,
        panel=locate_panel(plan, place, n, group, panel),
    )


def row_distance(plan: TiledPlan) -> int:
    """Activations from one row of a tile to the next."""
    if plan.rows is TileRows.PACKED:
        return plan.row_values
    return plan.pixel_strides[1] * plan.pixel_size


def tap_offset(plan: TiledPlan, image: Image, row: Expr, column: Expr) -> Expr:
    """Activations from the first tap to another one."""
    dilation = plan.spec.dilation
    if plan.rows is TileRows.SHIFTED:
        stride, images = plan.spec.strides[0], plan.lines[0]
        line, phase = T.floordiv(row * dilation[0], stride), T.floormod(row * dilation[0], stride)
        copy = (column * stride + phase) * images
        return (copy * image.height + line) * image.width * plan.pixel_size
    pixels = row * dilation[0] * image.width + column * dilation[1]
    return pixels * plan.pixel_size


@dataclass(frozen=True)
class TileStep:
    """A step of a block: a chunk of a tap, and the number of the step."""

    row: Expr
    column: Expr
    chunk: Expr
    number: Expr


@contextmanager
def loop_over_steps(plan: TiledPlan) -> Iterator[TileStep]:
    """Emit the loop over the steps of a block, in the order of the weights."""
    sizes = (plan.chunks, *plan.taps) if plan.is_chunked else (*plan.taps, plan.chunks)
    with T.grid(*sizes) as order:
        chunk, row, column = order if plan.is_chunked else (order[2], *order[:2])
        yield TileStep(row, column, chunk, plan.number_step(row, column, chunk))


def emit_products(
    plan: TiledPlan,
    image: Image,
    operands: Operands,
    tiles: Tiles,
    block: SumBlock,
    sums: Buffer,
    pixel: Expr | None,
    pixels: int,
) -> None:
    """Emit the products of a block on tiles.

    With `pixel`, its number among `pixels`, blocks of a panel fetch the next panel together.
    """
    emit_start(plan, operands, tiles, block)
    with loop_over_steps(plan) as step:
        if pixel is not None:
            emit_weight_prefetch(plan, operands.weight, block, step, pixel, pixels)
        emit_step(plan, image, operands, tiles, block, step)
        emit_spare_store(plan, tiles, sums, step)
    emit_end(plan, tiles, block, sums)


def emit_start(plan: TiledPlan, operands: Operands, tiles: Tiles, block: SumBlock) -> None:
    """Emit the start of the sums of a block: the bias."""
    for m, n in np.ndindex(len(block.sources), plan.tile.blocks):
        at = block.panel.bias + n * plan.isa.lanes
        tiles.load(m * plan.tile.blocks + n, operands.bias, at, 0)


def emit_step(
    plan: TiledPlan,
    image: Image,
    operands: Operands,
    tiles: Tiles,
    block: SumBlock,
    step: TileStep,
) -> None:
    """Emit the products of a step of a block on tiles."""
    rows, blocks = len(block.sources), plan.tile.blocks
    own, others = plan.registers
    first_a = plan.tile.rows * blocks
    first_b = first_a + own
    offset = tap_offset(plan, image, step.row, step.column)
    offset = offset + step.chunk * plan.chunk_distance
    load_a, load_b = (tiles.stream if far and rows > 1 else tiles.load for far in plan.streamed)

    def load_pixels(m: int) -> None:
        load_a(first_a + m % own, image.data, block.sources[m] + offset, row_distance(plan))

    def load_weights(n: int) -> None:
        vector = block.panel.first_vector + plan.number_vector(step.number * plan.chunk_words, n)
        size = plan.isa.weight_vector
        load_b(first_b + n % others, operands.weight, vector * size, plan.word_distance * size)

    def multiply(m: int, n: int) -> None:
        a, b = first_a + m % own, first_b + n % others
        tiles.multiply(m * blocks + n, a, b, (plan.isa.activation, plan.isa.weight_dtype))

    for n, m in np.ndindex(blocks, rows):  # products begin before all operands are loaded
        if n == 0:
            load_pixels(m)
        if m == 0:
            load_weights(n)
        multiply(m, n)


def alloc_sums(plan: TiledPlan, rows: int) -> Buffer:
    """Allocate the sums of a block, and a tile for `emit_spare_store` behind them."""
    size = plan.tile.rows * rows * plan.panel_channels + plan.unit.rows * plan.isa.lanes
    sums = alloc_workspace(size, plan.isa.sum_dtype)
    T.buffer_store(sums, T.Cast(plan.isa.sum_dtype, 0), [size - 1])  # a size that TVM sees
    return sums


def emit_spare_store(plan: TiledPlan, tiles: Tiles, sums: Buffer, step: TileStep) -> None:
    """Emit the store of a tile that nothing reads, after some of the steps of a long block.

    Without it, the CPU takes long for the stores behind the block; see `plan.LONG_PRODUCTS`.
    """
    if (apart := plan.spare_store_steps) is None:
        return
    lanes, last = plan.isa.lanes, plan.tile.rows * plan.tile.blocks + sum(plan.registers) - 1
    with T.If(T.floormod(step.number, apart) == apart - 1), T.Then():
        tiles.store(last, sums, sums.shape[0] - plan.unit.rows * lanes, lanes)


def emit_end(plan: TiledPlan, tiles: Tiles, block: SumBlock, sums: Buffer) -> None:
    """Emit the stores of the sums of a block to memory."""
    lanes, width = plan.isa.lanes, plan.panel_channels
    for m, n in np.ndindex(len(block.sources), plan.tile.blocks):
        to = m * plan.tile_rows * width + n * lanes
        tiles.store(m * plan.tile.blocks + n, sums, to, width)


def emit_weight_prefetch(
    plan: TiledPlan, weight: Buffer, block: SumBlock, step: TileStep, pixel: Expr, pixels: int
) -> None:
    """Fetch weights, which may be in the last-level cache: a share of the next panel.

    With one block of pixels, weights are read once, in order. Then those that follow soon are
    fetched. A chunked plan fetches them into the first-level cache, which has room for them. Far
    ahead it fetches one line in `FETCHED_LINES`, after which the CPU fetches the neighbours itself.
    """
    size, count = plan.isa.weight_vector, plan.groups * plan.panels
    vectors = plan.tile.blocks * plan.chunk_words
    share = ceil_div(vectors, pixels)
    first = block.panel.first_vector + step.number * vectors
    ahead, apart = 0, 1
    if pixels == 1:
        ahead, apart = FETCHED_AHEAD // plan.unit.row_bytes, FETCHED_LINES if plan.is_chunked else 1
    elif count == 1:
        return
    else:
        following = T.min(block.number + 1, count - 1) - block.number
        first = first + following * plan.panel_vectors + T.min(pixel * share, vectors - share)
    for i in range(0, share, apart):
        emit_prefetch(weight, (first + ahead + i) * size, level=2)
    for i in range(share if plan.is_chunked else 0):
        near = FETCHED_NEAR // plan.unit.row_bytes
        emit_prefetch(weight, (first + near + i) * size, level=1)


def emit_vector_products(
    plan: TiledPlan, image: Image, operands: Operands, block: SumBlock, sums: Buffer
) -> None:
    """Emit the same products on vectors, a few rows at a time.

    vpdpbusd takes uint8. int8 activations are moved by 128, and 128 times the weights is
    subtracted.
    """
    isa, blocks, lanes = plan.isa, plan.tile.blocks, plan.isa.lanes
    count, width = max(min(ACCUMULATORS // blocks, plan.tile_rows), 1), plan.panel_channels
    is_signed, zeros = isa.activation == "int8", constant("int32", 0, lanes)
    starts = T.alloc_buffer((plan.tile.rows,), "int64")
    for m, source in enumerate(block.sources):
        T.buffer_store(starts, T.Cast("int64", source), [m])
    with T.grid(plan.tile.rows, ceil_div(plan.tile_rows, count)) as (m, part):
        first = T.min(part * count, plan.tile_rows - count)
        start = T.bind(starts[m] + first * row_distance(plan))
        accs = alloc_vectors(count * blocks, lanes, isa.sum_dtype)
        moved = alloc_vectors(blocks if is_signed else 0, lanes)
        for slot, acc in enumerate(accs):
            bias = load_vector(operands.bias, block.panel.bias + slot % blocks * lanes, lanes)
            store_vector(acc, bias, 0, lanes)
        for acc in moved:
            store_vector(acc, zeros, 0, lanes)
        with T.grid(*plan.taps, plan.chunks, plan.chunk_words) as (row, column, chunk, word):
            step = plan.number_step(row, column, chunk)
            at = start + chunk * plan.chunk_distance
            at = at + tap_offset(plan, image, row, column) + word * isa.products
            weights = []
            for n in range(blocks):
                vector = plan.number_vector(step * plan.chunk_words + word, n)
                vector = block.panel.first_vector + vector
                weights.append(T.bind(isa.load_weights(operands.weight, vector)))
            for i in range(count):
                words = load_vector(image.data, at + i * row_distance(plan), isa.products)
                words = T.reinterpret("int32", words)
                if is_signed:  # of the word; LLVM does not return from optimizing bytes here
                    words = T.bitwise_xor(words, T.int32(FLIP))
                value = T.bind(isa.as_activation(T.broadcast(words, lanes)))
                for n in range(blocks):
                    acc = accs[i * blocks + n]
                    dot = isa.dot(load_vector(acc, 0, lanes), value, weights[n])
                    store_vector(acc, dot, 0, lanes)
            for n, acc in enumerate(moved):
                dot = isa.dot(load_vector(acc, 0, lanes), isa.repeat_word(FLIP), weights[n])
                store_vector(acc, dot, 0, lanes)
        for slot, acc in enumerate(accs):
            i, n = divmod(slot, blocks)
            total = load_vector(acc, 0, lanes)
            if is_signed:
                other = load_vector(moved[n], 0, lanes)
                total = emit_wrapping(Wrapping.SUBTRACT, total, other, lanes)
            to = (m * plan.tile_rows + first + i) * width + n * lanes
            store_vector(sums, total, to, lanes)
