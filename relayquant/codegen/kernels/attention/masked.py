"""Attention to all keys at once, with a mask -> its kernel; the bits of its operators one by one.

    score = x @ keys^T * factor + mask;  y = softmax(score) @ values

A task is a block of rows of one head. As in `blocks`, rows are the columns of both
products. The scores of a block stay in a near cache.

Masks hide keys by large negative numbers, of a text usually half of them. Where they are so low
that the softmax gives 0 whatever the scores are, the scores are not computed, and the values not
read. Scores are at most |row| |key| (Cauchy and Schwarz). NaN and infinite operands hide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    emit_shared_loop,
    emit_vector_loop,
    fold_lanes,
    load_vector,
    settle,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.floating.row_norm import SUM_LANES
from relayquant.codegen.kernels.floating.softmax import emit_exp
from relayquant.codegen.kernels.floating.tile import (
    FLOAT_BYTES,
    Buffer,
    Expr,
    FloatIsa,
    choose_rows,
    declare_arguments,
    emit_tile,
)
from relayquant.codegen.kernels.isa.base import fence
from relayquant.codegen.kernels.permutation import transpose_vectors

#: Most rows of a block, and fewest keys of a tile.
ROWS, FEWEST_KEYS = 32, 6
#: Most rows that are computed for each row of the result, and fewest blocks of rows that a mask is
#: worth looking at for.
MOST_COMPUTED, FEWEST_BLOCKS = 1.1, 3
#: Rows and columns that registers transpose.
SQUARE = 8
#: Scores this much lower than the largest one have the power 0, with room for their roundings:
#: some of any size, and a share of the largest mask. A share of the product of lengths, too.
REACH, MASK_SHARE, LENGTH_SHARE = 128.0, 2.0**-18, 1.01
#: Fewest tasks of a call, if there are so many blocks.
LEAST_TASKS = 32
LARGEST_FLOAT = float(np.finfo("float32").max)
#: Makes the length of finite values less than `REACH`, and keeps infinity and NaN.
TINY = 1e-37
#: More than what a sum of squares of float32 lacks because small ones are 0.
LOST_SQUARES = 1e-30


@dataclass(frozen=True)
class MaskedAttention:
    """Attention of x (*batch, rows, inner) to keys and values (*batch, keys, width).

    Attributes:
        factor: Number that multiplies the scores, None for 1.
        mask: Shape of the mask, None if there is none. It broadcasts to (*batch, rows, keys).
    """

    batch: tuple[int, ...]
    rows: int
    keys: int
    inner: int
    width: int
    factor: float | None = None
    mask: tuple[int, ...] | None = None

    @property
    def heads(self) -> int:
        return prod(self.batch)


def choose_vectors(spec: MaskedAttention, isa: FloatIsa) -> int:
    """Choose the vectors of a block of rows, 0 if the kernel does not take the sizes."""
    vectors = min(ROWS // isa.lanes, isa.accumulators // FEWEST_KEYS, spec.rows // isa.lanes)
    is_large = min(spec.rows, spec.keys, spec.inner, spec.width) >= max(SQUARE, isa.lanes)
    size = spec.keys * vectors * isa.lanes * FLOAT_BYTES
    return vectors if spec.heads and is_large and size <= isa.caches.near_bytes // 2 else 0


def saves_time(spec: MaskedAttention, isa: FloatIsa) -> bool:
    """Whether the kernel takes less time than a kernel for each operator.

    It computes whole blocks of rows. With a mask it leaves out keys, if there are some blocks.
    Without one it saves only what scores take that do not fit a near cache.
    """
    block = choose_vectors(spec, isa) * isa.lanes
    blocks = ceil_div(spec.rows, block)
    if blocks * block > MOST_COMPUTED * spec.rows:
        return False
    scores = spec.heads * spec.rows * spec.keys * FLOAT_BYTES
    return blocks >= FEWEST_BLOCKS if spec.mask is not None else scores > isa.caches.near_bytes


def make_masked_attention(spec: MaskedAttention, isa: FloatIsa) -> PrimFunc:
    """Make PrimFunc(x, keys, values, (mask,) y)."""
    return build_kernel("masked_attention", lambda: MaskedRows(spec, isa).emit())


def replace_nan(value: Expr, by: float, lanes: int) -> Expr:
    """Emit the value, and `by` for NaN. TVM takes value == value for true."""
    is_number = value >= constant("float32", float("-inf"), lanes)
    return T.Select(is_number, value, constant("float32", by, lanes))


class MaskedRows:
    """Statements of the kernel."""

    def __init__(self, spec: MaskedAttention, isa: FloatIsa) -> None:
        self.spec, self.isa, self.vectors = spec, isa, choose_vectors(spec, isa)
        self.block = self.vectors * isa.lanes
        self.blocks = ceil_div(spec.rows, self.block)
        #: tasks of a head
        self.parts = min(self.blocks, ceil_div(LEAST_TASKS, spec.heads))
        most = isa.accumulators // self.vectors
        self.tile, self.value_tile = choose_rows(spec.keys, most), choose_rows(spec.width, most)
        self.tiles = ceil_div(spec.keys, self.tile)
        #: extents of the mask along the batch, and whether rows have masks of their own
        padded = (*(1,) * (len(spec.batch) + 2), *(spec.mask or ()))
        self.mask_batch = padded[-len(spec.batch) - 2 : -2]
        self.is_per_row = padded[-2] > 1
        self.x, self.keys, self.values, self.mask, self.y = declare_arguments(
            ("x", (*spec.batch, spec.rows, spec.inner)),
            ("keys", (*spec.batch, spec.keys, spec.inner)),
            ("values", (*spec.batch, spec.keys, spec.width)),
            ("mask", spec.mask) if spec.mask is not None else None,
            ("y", (*spec.batch, spec.rows, spec.width)),
        )

    def emit(self) -> None:
        """Emit what masks and heads have in common, and then all blocks of rows."""
        spec = self.spec
        is_worth = spec.heads * spec.rows * spec.keys * spec.inner >= PARALLEL_THRESHOLD
        if self.mask is not None:
            parts = prod(self.mask_batch) * (self.blocks if self.is_per_row else 1)
            size = self.block if self.is_per_row else 1
            self.columns = alloc_workspace(parts * spec.keys * size, "float32")
            self.highest = alloc_workspace(parts * self.tiles, "float32")
            self.tops = alloc_workspace(parts, "float32")
            emit_shared_loop(T.int32(parts), is_worth and parts > 1, self.emit_mask)
        tasks = spec.heads * self.parts
        emit_shared_loop(T.int32(tasks), is_worth and tasks > 1, self.emit_task)

    def find_row(self, block: Expr) -> Expr:
        """Return the first row of a block. The last one is moved back."""
        return T.min(block * self.block, self.spec.rows - self.block)

    # ------------------------------------------------------------ masks

    def emit_mask(self, part: Expr) -> None:
        """Emit a block of rows of a mask as columns, and its largest numbers."""
        spec, keys = self.spec, self.spec.keys
        size = self.block if self.is_per_row else 1
        if self.is_per_row:
            mask, block = T.floordiv(part, self.blocks), T.floormod(part, self.blocks)
            start, target = settle((mask * spec.rows + self.find_row(block)) * keys, part * keys)
            self.emit_transposed(self.mask, start, keys, self.columns, target * size, size)
        else:
            emit_vector_loop(
                keys,
                self.isa.lanes,
                lambda at, lanes: store_vector(
                    self.columns,
                    load_vector(self.mask, part * keys + at, lanes),
                    part * keys + at,
                    lanes,
                ),
            )
        lanes = self.isa.lanes if self.is_per_row else 1
        vectors = size // lanes
        low = constant("float32", float("-inf"), lanes)
        found = alloc_vectors(vectors, lanes, "float32")
        (tile_found,) = alloc_vectors(1, lanes, "float32")
        for each in found:
            store_vector(each, low, 0, lanes)
        with T.serial(self.tiles) as tile:
            store_vector(tile_found, low, 0, lanes)
            with T.serial(self.tile) as k:
                key = T.min(tile * self.tile, keys - self.tile) + k
                for v, each in enumerate(found):
                    at = (part * keys + key) * size + v * lanes
                    value = T.bind(load_vector(self.columns, at, lanes))
                    value = T.bind(replace_nan(value, float("inf"), lanes))
                    for buffer in (each, tile_found):
                        most = T.max(load_vector(buffer, 0, lanes), value)
                        store_vector(buffer, most, 0, lanes)
            largest = fold_lanes(load_vector(tile_found, 0, lanes), lanes, T.max)
            T.buffer_store(self.highest, largest, [part * self.tiles + tile])
        least = load_vector(found[0], 0, lanes)
        for each in found[1:]:
            least = T.min(least, load_vector(each, 0, lanes))
        T.buffer_store(self.tops, fold_lanes(least, lanes, T.min), [part])

    def emit_length(self, buffer: Buffer, start: Expr, count: int, width: int) -> Expr:
        """Emit at least the length of `count` rows as one vector, the root of its squares' sum."""
        lanes = self.isa.lanes
        sums = alloc_vectors(4, lanes, "float32")
        for each in sums:
            store_vector(each, constant("float32", 0, lanes), 0, lanes)
        with T.serial(count) as row:
            for k in range(ceil_div(width, lanes)):
                at = start + row * width + min(k * lanes, width - lanes)
                value, each = T.bind(load_vector(buffer, at, lanes)), sums[k % 4]
                store_vector(each, load_vector(each, 0, lanes) + value * value, 0, lanes)
        value = load_vector(sums[0], 0, lanes)
        for each in sums[1:]:
            value = value + load_vector(each, 0, lanes)
        total = fold_lanes(value, lanes, lambda a, b: a + b)
        return T.bind(T.sqrt(total + T.float32(LOST_SQUARES)))

    def find_seen(self, lengths: list[Expr], part: Expr, row: Expr) -> list[Expr]:
        """Emit the first key that some row of a block may see, and the first one behind them.

        `lengths`: of the head's keys and of its values.
        """
        spec, keys = self.spec, self.spec.keys
        if self.mask is None:
            return settle(0, keys)
        length = self.emit_length(self.x, row * spec.inner, self.block, spec.inner) * lengths[0]
        size = 2 * LENGTH_SHARE * abs(1.0 if spec.factor is None else spec.factor)
        top = T.bind(self.tops[part])
        limit = size if size <= LARGEST_FLOAT else float("inf")  # which hides nothing
        reach = length * constant("float32", limit, 1) + T.float32(REACH)
        reach = reach + T.abs(top) * T.float32(MASK_SHARE)
        reach = reach + lengths[1] * T.float32(TINY)
        floor = T.bind(top - reach)
        floor = T.bind(replace_nan(floor, float("-inf"), 1))
        seen = T.alloc_buffer((2,), "int64")
        T.buffer_store(seen, T.int64(keys), [0])
        T.buffer_store(seen, T.int64(0), [1])

        def see(tile: Expr) -> None:
            with T.If(self.highest[part * self.tiles + tile] >= floor), T.Then():
                first = T.Cast("int64", T.min(tile * self.tile, keys - self.tile))
                T.buffer_store(seen, T.min(seen[0], first), [0])
                T.buffer_store(seen, first + self.tile, [1])

        emit_shared_loop(T.int32(self.tiles), False, see)
        return [T.bind(seen[0]), T.bind(seen[1])]

    # ------------------------------------------------------------ a block of rows

    def emit_task(self, task: Expr) -> None:
        """Emit some blocks of rows of one head: one of `parts` neighbours, so that all parts have
        early and late ones, which may see more keys.
        """
        spec = self.spec
        head, first = settle(T.floordiv(task, self.parts), T.floormod(task, self.parts))
        lengths: list[Expr] = []
        if self.mask is not None:
            lengths = [
                self.emit_length(buffer, head * (spec.keys * width), spec.keys, width)
                for buffer, width in ((self.keys, spec.inner), (self.values, spec.width))
            ]
        with T.serial(T.floordiv(self.blocks - 1 - first, self.parts) + 1) as index:
            self.emit_block(head, first + index * self.parts, lengths)

    def emit_block(self, head: Expr, index: Expr, lengths: list[Expr]) -> None:
        """Emit one block of rows of one head."""
        spec, block, lanes = self.spec, self.block, self.isa.lanes
        part, row = settle(
            self.find_mask(head) * self.blocks + index if self.is_per_row else self.find_mask(head),
            head * spec.rows + self.find_row(index),
        )
        first, end = self.find_seen(lengths, part, row)
        x = alloc_workspace(spec.inner * block, "float32")
        powers = alloc_workspace(spec.keys * block, "float32")
        sums = alloc_workspace(spec.width * block, "float32")
        self.emit_transposed(self.x, row * spec.inner, spec.inner, x, 0, block)
        self.emit_scores(head, part, x, first, end, powers)
        with T.serial(self.vectors) as v:
            self.emit_powers(powers, v * lanes, first, end)
        self.emit_values(head, powers, first, end, sums)
        self.emit_result(sums, row)

    def find_mask(self, head: Expr) -> Expr:
        """Return the number of the mask of a head."""
        number: Expr = T.int32(0)
        places = split_index(head, self.spec.batch)
        for place, extent in zip(places, self.mask_batch, strict=True):
            number = number * extent + (place if extent > 1 else 0)
        return number

    def emit_transposed(
        self,
        source: Buffer,
        start: Expr,
        width: int,
        target: Buffer,
        at: Expr,
        rows: int,
    ) -> None:
        """Emit target[at:] (width, rows) = source[start:] (rows, width)^T."""
        with T.grid(ceil_div(width, SQUARE), rows // SQUARE) as (step, part):
            column = T.min(step * SQUARE, width - SQUARE)
            row = part * SQUARE
            square = [
                T.bind(load_vector(source, start + (row + i) * width + column, SQUARE))
                for i in range(SQUARE)
            ]
            for i, each in enumerate(transpose_vectors(square, SQUARE)):
                store_vector(target, each, at + (column + i) * rows + row, SQUARE)

    def emit_scores(
        self, head: Expr, part: Expr, x: Buffer, first: Expr, end: Expr, scores: Buffer
    ) -> None:
        """Store the scores (keys, rows) of a range of keys."""
        spec, block, lanes = self.spec, self.block, self.isa.lanes
        keys, inner, factor = spec.keys, spec.inner, spec.factor

        with T.serial(ceil_div(end - first, self.tile)) as index:
            key, line = settle(
                T.min(first + index * self.tile, keys - self.tile),
                head * keys + T.min(first + index * self.tile, keys - self.tile),
            )

            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(inner) as k:
                    step(k, lambda v: k * block + v * lanes)

            def finish(i: int, v: int, value: Expr) -> None:
                if factor is not None:
                    value = fence(value * constant("float32", factor, lanes), lanes)
                if self.mask is not None and self.is_per_row:
                    at = (part * keys + key + i) * block + v * lanes
                    value = value + load_vector(self.columns, at, lanes)
                elif self.mask is not None:
                    value = value + broadcast(self.columns[part * keys + key + i], lanes)
                store_vector(scores, value, (key + i) * block + v * lanes, lanes)

            places = [(line + i) * inner for i in range(self.tile)]
            emit_tile(self.isa, places, self.vectors, self.keys, x, reduce, finish, prefetch=False)

    def emit_powers(self, powers: Buffer, row: Expr, first: Expr, end: Expr) -> None:
        """Replace the scores of a vector of rows by their softmax, with the bits of `softmax`."""
        lanes, block, whole = self.isa.lanes, self.block, self.spec.keys // SUM_LANES * SUM_LANES
        largest, factor = alloc_vectors(2, lanes, "float32")
        totals = T.alloc_buffer((SUM_LANES * lanes,), "float32")

        def add_to(at: Expr, value: Expr) -> None:
            store_vector(totals, load_vector(totals, at * lanes, lanes) + value, at * lanes, lanes)

        store_vector(largest, constant("float32", float("-inf"), lanes), 0, lanes)
        with T.serial(end - first) as k:
            score = load_vector(powers, (first + k) * block + row, lanes)
            store_vector(largest, T.max(load_vector(largest, 0, lanes), score), 0, lanes)
        with T.serial(SUM_LANES) as lane:
            store_vector(totals, constant("float32", 0, lanes), lane * lanes, lanes)
        with T.serial(end - first) as k:
            at = (first + k) * block + row
            power = load_vector(powers, at, lanes) - load_vector(largest, 0, lanes)
            store_vector(powers, emit_exp(power, lanes), at, lanes)
        with T.serial(T.min(end, whole) - first) as k:
            value = load_vector(powers, (first + k) * block + row, lanes)
            add_to(T.floormod(first + k, SUM_LANES), value)
        half = SUM_LANES
        while half > 1:
            half //= 2
            with T.serial(half) as lane:
                add_to(lane, load_vector(totals, (lane + half) * lanes, lanes))
        with T.serial(end - T.max(first, T.min(end, whole))) as k:
            key = T.max(first, T.min(end, whole)) + k
            add_to(0, load_vector(powers, key * block + row, lanes))
        value = constant("float32", 1, lanes) / load_vector(totals, 0, lanes)
        store_vector(factor, value, 0, lanes)
        with T.serial(end - first) as k:
            at = (first + k) * block + row
            value = load_vector(powers, at, lanes) * load_vector(factor, 0, lanes)
            store_vector(powers, value, at, lanes)

    def emit_values(self, head: Expr, powers: Buffer, first: Expr, end: Expr, sums: Buffer) -> None:
        """Store values^T @ powers."""
        spec, block, lanes, width = self.spec, self.block, self.isa.lanes, self.spec.width
        with T.serial(ceil_div(width, self.value_tile)) as index:
            number, start = settle(
                T.min(index * self.value_tile, width - self.value_tile),
                (head * spec.keys + first) * width
                + T.min(index * self.value_tile, width - self.value_tile),
            )

            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(end - first) as k:
                    step(k * width, lambda v: (first + k) * block + v * lanes)

            def finish(i: int, v: int, value: Expr) -> None:
                store_vector(sums, value, (number + i) * block + v * lanes, lanes)

            places = [start + i for i in range(self.value_tile)]
            emit_tile(
                self.isa, places, self.vectors, self.values, powers, reduce, finish, prefetch=False
            )

    def emit_result(self, sums: Buffer, row: Expr) -> None:
        """Store the sums (width, rows) as rows."""
        width, block = self.spec.width, self.block
        with T.grid(block // SQUARE, ceil_div(width, SQUARE)) as (part, step):
            column = T.min(step * SQUARE, width - SQUARE)
            square = [
                T.bind(load_vector(sums, (column + i) * block + part * SQUARE, SQUARE))
                for i in range(SQUARE)
            ]
            for i, each in enumerate(transpose_vectors(square, SQUARE)):
                store_vector(self.y, each, (row + part * SQUARE + i) * width + column, SQUARE)
