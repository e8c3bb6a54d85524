"""Attention of one new row for each sequence -> its kernel. Reading the cache takes the time.

    score[k] = scale * sum(query * key[k]);  result = sum(e^(score - max) * value) / sum(e^...)

The keys that a row sees are cut in pieces. A task is one piece of one head of the cache: it reads
each key and value once, for all query heads of the group. It stores the largest score, the sum of
the powers and the weighted sum of the values. Then the pieces of a head are put together:

    m = max(m_i);  sum = sum(sum_i * e^(m_i - m));  result = sum(values_i * e^(m_i - m)) / sum

The size of a piece does not depend on the number of threads, and so neither do the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import add

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.attention.halves import load_numbers
from relayquant.codegen.kernels.attention.new_rows import Extents
from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    PARALLEL_BYTES,
    alloc_vectors,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    emit_prefetch,
    emit_shared_loop,
    emit_vector_loop,
    flat_view,
    fold_lanes,
    load_vector,
    name_extents,
    settle,
    store_vector,
)
from relayquant.codegen.kernels.floating.softmax import emit_exp
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa

#: Keys of a piece, and most pieces of a long cache.
PIECE, MOST_PIECES = 256, 64
#: Keys whose products are added up together. Their sums need two in-lane shuffles.
GROUP = 4
#: Bytes between an address and what is fetched ahead. It is more than a page, where the fetching of
#: the CPU itself ends.
FETCH_BYTES, FETCH_LEVEL = 8192, 2
#: Less than any score. Infinity would give NaN when it is subtracted from itself.
LOWEST = -3.0e38
ITEM_BYTES = {"float16": 2, "float32": 4, "int8": 1}


@dataclass(frozen=True)
class Attention:
    """Attention to a cache.

    Attributes:
        extents: Of the query (B, R, H, D).
        groups: Heads of the cache.
        length: Rows of the cache.
        dtype: Of the cache: float16, float32, or int8 with scales.
        scale: Factor of the scores.
        window: Number of keys that a row sees, 0 for all.
        soft_cap: Bound of the scores, 0 for none.
        has_sinks: Whether each query head has one more score, whose value is 0.
    """

    extents: Extents
    groups: int
    length: int
    dtype: str
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def share(self) -> int:
        """Query heads of one head of the cache."""
        return self.extents[2] // self.groups

    @property
    def width(self) -> int:
        return self.extents[3]


def declare_operands(spec: Attention, extents: list[Expr]) -> list[Buffer]:
    """Declare query, keys[, scales], values[, scales], positions[, sinks], result as flat views.

    There are always 8 entries. A scale that the cache does not have is None, and so are no sinks.
    """
    batch = extents[0]
    has_scales = spec.dtype == "int8"
    shape = (batch, spec.groups, spec.length)
    cache, row = ((*shape, spec.width), spec.dtype), ((*shape, 1), "float32")
    operands = {
        "query": (tuple(extents), "float32"),
        "keys": cache,
        "key_scale": row if has_scales else None,
        "values": cache,
        "value_scale": row if has_scales else None,
        "positions": ((batch,), "int32"),
        "sinks": ((spec.extents[2],), "float32") if spec.has_sinks else None,
        "result": (tuple(extents), "float32"),
    }
    declared = [
        None if form is None else T.arg(name, T.Buffer(*form)) for name, form in operands.items()
    ]
    return [None if buffer is None else flat_view(buffer) for buffer in declared]


def finish_scores(spec: Attention, products: Expr, lanes: int) -> Expr:
    """Emit the scores of products with the keys."""
    scores = products * constant("float32", spec.scale, lanes)
    if not spec.soft_cap:
        return scores

    def hold(value: Expr) -> Expr:  # TVM would put the value of a name into all that reads it
        (variable,) = alloc_vectors(1, lanes, "float32")
        store_vector(variable, value, 0, lanes)
        return load_vector(variable, 0, lanes)

    # tanh(x) = sign(x) * (1 - p) / (1 + p) with p = e^-2|x|
    one, zero = constant("float32", 1, lanes), constant("float32", 0, lanes)
    scores = hold(scores)
    power = hold(emit_exp(T.abs(scores) * constant("float32", -2 / spec.soft_cap, lanes), lanes))
    size = hold((one - power) / (one + power) * constant("float32", spec.soft_cap, lanes))
    return T.Select(scores < zero, -size, size)


def choose_lanes(spec: Attention, isa: FloatIsa) -> int:
    """Choose a power of two that divides the width of a head."""
    lanes = isa.lanes
    while spec.width % lanes:
        lanes //= 2
    return lanes


def list_shuffles(lanes: int) -> list[tuple[list[int], list[int]]]:
    """List the shuffles of two vectors that add up vectors pair by pair, level by level.

    After all levels, lane i of the one result is the sum of vector i. The first two levels stay in
    lanes of 128 bits.
    """
    if lanes == 1:
        return []
    if lanes == 2:
        return [([0, 2], [1, 3])]
    quads = range(0, lanes, 4)
    first = [q + k for q in quads for k in (0, lanes, 1, lanes + 1)]
    second = [q + k for q in quads for k in (0, 1, lanes, lanes + 1)]
    levels = [(first, [k + 2 for k in first]), (second, [k + 2 for k in second])]
    outer = [start + q + k for start in (0, lanes) for q in quads[::2] for k in range(4)]
    levels += [(outer, [k + 4 for k in outer])] * (len(quads).bit_length() - 1)
    return levels


def add_up(vectors: list[Expr], levels: list[tuple[list[int], list[int]]]) -> list[Expr]:
    """Emit the sums of neighbouring vectors in each level."""
    for level in levels:
        low, high = ([T.int32(k) for k in lanes] for lanes in level)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [T.bind(T.Shuffle([a, b], low) + T.Shuffle([a, b], high)) for a, b in pairs]
    return vectors


def make_attention(spec: Attention, isa: FloatIsa) -> PrimFunc:
    """Make PrimFunc(query, keys[, key_scale], values[, value_scale], positions[, sinks], result),
    R = 1.
    """
    return build_kernel("attention", lambda: RowAttention(spec, isa).emit())


class RowAttention:
    """Statements of the kernel for one row."""

    def __init__(self, spec: Attention, isa: FloatIsa) -> None:
        self.spec, self.isa = spec, isa
        self.lanes = choose_lanes(spec, isa)
        self.piece = max(PIECE, ceil_div(ceil_div(spec.length, MOST_PIECES), PIECE) * PIECE)
        self.most_pieces = ceil_div(spec.length, self.piece)
        self.steps = spec.width // self.lanes
        levels = list_shuffles(self.lanes)
        self.group = min(GROUP, self.lanes)
        self.inner, self.outer = levels[: self.group // 2], levels[self.group // 2 :]

    def emit(self) -> None:
        """Emit the tasks, and then put the pieces of each head together."""
        spec, pieces = self.spec, self.most_pieces
        extents = name_extents(spec.extents)
        query, keys, key_scale, values, value_scale, positions, self.sinks, result = (
            declare_operands(spec, extents)
        )
        self.query, self.keys, self.values, self.scales = (
            query,
            keys,
            values,
            (key_scale, value_scale),
        )
        self.positions, self.result = positions, result
        batch, share, width = extents[0], spec.share, spec.width
        tasks = batch * (spec.groups * pieces)
        self.sums = alloc_workspace(tasks * (share * width), "float32")
        self.largest = alloc_workspace(tasks * share, "float32")
        self.totals = alloc_workspace(tasks * share, "float32")
        most = alloc_workspace(1, "int64")
        T.buffer_store(most, T.int64(0), [0])
        with T.serial(batch) as sequence:
            _, count = self.find_keys(sequence)
            T.buffer_store(most, T.max(most[0], count), [0])
        count = T.bind(most[0])
        used = T.bind(ceil_div(count, self.piece))
        size = batch * count * (2 * spec.groups * width * ITEM_BYTES[spec.dtype])
        tasks = batch * used * spec.groups
        is_worth = T.And(size >= PARALLEL_BYTES, tasks > 1)
        emit_shared_loop(tasks, is_worth, partial(self.emit_task, used))
        heads = batch * (spec.groups * share)
        is_worth = heads * used * (width * 4) >= PARALLEL_BYTES
        emit_shared_loop(heads, is_worth, self.emit_head)

    def find_keys(self, sequence: Expr) -> tuple[Expr, Expr]:
        """Return the first key that a sequence's row sees, and their number."""
        place = T.Cast("int64", self.positions[sequence])
        first = T.int64(0)
        if self.spec.window:
            first = T.max(place - (self.spec.window - 1), first)
        end = T.min(place + 1, T.int64(self.spec.length))
        return T.bind(first), T.bind(T.max(end - first, T.int64(0)))

    def emit_task(self, used: Expr, task: Expr) -> None:
        """Emit one piece of one head of the cache. A piece behind the last key does nothing."""
        spec, share = self.spec, self.spec.share
        head, piece = T.bind(T.floordiv(task, used)), T.bind(T.floormod(task, used))
        first, count = self.find_keys(T.floordiv(head, spec.groups))
        before = piece * self.piece
        start, size = settle(first + before, T.min(count - before, T.int64(self.piece)))
        with T.If(size > 0), T.Then():
            line, row, slot = settle(
                head * spec.length + start,
                head * share,
                (head * self.most_pieces + piece) * share,
            )
            products = alloc_workspace(share * self.piece * self.lanes // self.group, "float32")
            powers = alloc_workspace(share * self.piece, "float32")
            self.emit_products(line, row, size, products)
            scales = [self.copy_scales(each, line, size) for each in self.scales]
            with T.serial(share) as own:
                self.emit_powers(products, scales, powers, own, size, slot)
            self.emit_values(line, size, powers, slot)

    def fetch(self, cache: Buffer, at: Expr, count: int) -> None:
        """Fetch the lines of `count` numbers that are read some time after those from `at` on."""
        size = ITEM_BYTES[self.spec.dtype]
        for k in range(0, count, CACHE_LINE // size):
            emit_prefetch(cache, at + (FETCH_BYTES // size + k), level=FETCH_LEVEL)

    def each_chunk(self, size: int, emit: Callable[[Expr, int], None]) -> None:
        """Emit emit(first query head, count) for chunks of up to `size` heads. They may overlap."""
        share = self.spec.share
        chunks = ceil_div(share, size)
        size = ceil_div(share, chunks)
        if chunks == 1:
            emit(T.int64(0), size)
            return
        with T.serial(T.int64(0), T.int64(chunks)) as chunk:
            emit(T.bind(T.min(chunk * size, T.int64(share - size))), size)

    def copy_scales(self, scales: Buffer | None, line: Expr, size: Expr) -> Buffer | None:
        """Copy the scales of a piece, so that whole vectors of them can be read."""
        if scales is None:
            return None
        copy = alloc_workspace(self.piece, "float32")
        with T.serial(size) as key:
            T.buffer_store(copy, scales[line + key], [key])
        return copy

    def emit_products(self, line: Expr, row: Expr, size: Expr, products: Buffer) -> None:
        """Emit the products of all keys of a piece with the query heads, not yet added up.

        A stored vector belongs to `group` keys. A key's product is the sum of several of its lanes.
        """
        lanes, width = self.lanes, self.spec.width

        def emit_group(first: Expr, count: int, index: Expr) -> None:
            # The last keys of a group may be missing.
            keys = settle(
                *(line + T.min(index * self.group + k, size - 1) for k in range(self.group))
            )
            self.fetch(self.keys, (line + index * self.group) * width, self.group * width)
            sums = alloc_vectors(count * self.group, lanes, "float32")
            for each in sums:
                store_vector(each, constant("float32", 0, lanes), 0, lanes)
            with T.serial(self.steps) as step:
                at = step * lanes
                rows = [
                    T.bind(load_vector(self.query, (row + first + own) * width + at, lanes))
                    for own in range(count)
                ]
                for k, key in enumerate(keys):
                    value = T.bind(load_numbers(self.keys, key * width + at, lanes, self.isa))
                    for query, total in zip(rows, sums[k :: self.group], strict=True):
                        added = load_vector(total, 0, lanes) + query * value
                        store_vector(total, added, 0, lanes)
            for own in range(count):
                mine = sums[own * self.group : (own + 1) * self.group]
                (added,) = add_up([load_vector(each, 0, lanes) for each in mine], self.inner)
                at = ((first + own) * (self.piece // self.group) + index) * lanes
                store_vector(products, added, at, lanes)

        def emit_chunk(first: Expr, count: int) -> None:
            with T.serial(ceil_div(size, self.group)) as index:
                emit_group(first, count, index)

        self.each_chunk(max(1, self.isa.accumulators // self.group), emit_chunk)

    def emit_powers(
        self,
        products: Buffer,
        scales: list[Buffer | None],
        powers: Buffer,
        own: Expr,
        size: Expr,
        slot: Expr,
    ) -> None:
        """Emit the powers of the scores of one query head, times the scales of the values.

        The largest score and the sum of the powers are stored.
        """
        spec, lanes = self.spec, self.lanes
        parts = lanes // self.group
        largest, total = alloc_vectors(2, lanes, "float32")
        store_vector(largest, constant("float32", LOWEST, lanes), 0, lanes)
        store_vector(total, constant("float32", 0, lanes), 0, lanes)
        steps = T.bind(ceil_div(size, lanes))
        start = own * self.piece
        with T.serial(steps) as step:
            at = step * lanes
            first = (start // self.group + step * parts) * lanes
            vectors = [load_vector(products, first + k * lanes, lanes) for k in range(parts)]
            (value,) = add_up(vectors, self.outer)
            if scales[0] is not None:
                value = value * load_vector(scales[0], at, lanes)
            index = T.ramp(T.Cast("int32", at), 1, lanes) if lanes > 1 else T.Cast("int32", at)
            is_seen = index < broadcast(T.Cast("int32", size), lanes)
            low = constant("float32", float("-inf"), lanes)
            value = T.bind(T.Select(is_seen, finish_scores(spec, value, lanes), low))
            store_vector(powers, value, start + at, lanes)
            store_vector(largest, T.max(load_vector(largest, 0, lanes), value), 0, lanes)
        found = T.bind(fold_lanes(load_vector(largest, 0, lanes), lanes, T.max))
        T.buffer_store(self.largest, found, [slot + own])
        with T.serial(steps) as step:
            at = step * lanes
            power = load_vector(powers, start + at, lanes) - broadcast(found, lanes)
            power = T.bind(emit_exp(power, lanes))
            store_vector(total, load_vector(total, 0, lanes) + power, 0, lanes)
            if scales[1] is not None:
                power = power * load_vector(scales[1], at, lanes)
            store_vector(powers, power, start + at, lanes)
        added = fold_lanes(load_vector(total, 0, lanes), lanes, add)
        T.buffer_store(self.totals, added, [slot + own])

    def emit_values(self, line: Expr, size: Expr, powers: Buffer, slot: Expr) -> None:
        """Store the sums of all values of a piece, times their powers."""
        lanes, width = self.lanes, self.spec.width
        most = self.isa.accumulators

        def emit_columns(first: Expr, count: int, vectors: int, column: Expr) -> None:
            sums = alloc_vectors(count * vectors, lanes, "float32")
            for each in sums:
                store_vector(each, constant("float32", 0, lanes), 0, lanes)
            with T.serial(size) as key:
                place = (line + key) * width + column
                self.fetch(self.values, place, vectors * lanes)
                values = [
                    T.bind(load_numbers(self.values, place + v * lanes, lanes, self.isa))
                    for v in range(vectors)
                ]
                for own in range(count):
                    power = powers[(first + own) * self.piece + key]
                    power = T.bind(broadcast(power, lanes))
                    for value, total in zip(values, sums[own * vectors :], strict=False):
                        added = load_vector(total, 0, lanes) + power * value
                        store_vector(total, added, 0, lanes)
            for i, total in enumerate(sums):
                own, v = divmod(i, vectors)
                at = (slot + first + own) * width + column + v * lanes
                store_vector(self.sums, load_vector(total, 0, lanes), at, lanes)

        def emit_chunk(first: Expr, count: int) -> None:
            vectors = max(1, min(self.steps, most // count))
            blocks = ceil_div(self.steps, vectors)
            vectors = ceil_div(self.steps, blocks)
            wide = vectors * lanes
            with T.serial(blocks) as block:
                column = T.bind(T.min(block * wide, width - wide))
                emit_columns(first, count, vectors, column)

        self.each_chunk(most, emit_chunk)

    def emit_head(self, row: Expr) -> None:
        """Put the pieces of one query head together."""
        spec, width = self.spec, self.spec.width
        head, own = T.floordiv(row, spec.share), T.floormod(row, spec.share)
        _, count = self.find_keys(T.floordiv(head, spec.groups))
        used = T.bind(ceil_div(count, self.piece))
        first = T.bind((head * self.most_pieces) * spec.share + own)
        largest, total = alloc_vectors(2, 1, "float32")
        sink = None
        if self.sinks is not None:
            sink = T.bind(self.sinks[T.floormod(row, spec.extents[2])])
        T.buffer_store(largest, T.float32(LOWEST) if sink is None else sink, [0])

        def each_piece(emit: Callable[[Expr], None]) -> None:
            with T.serial(used) as piece:
                emit(T.bind(first + piece * spec.share))

        def compare(slot: Expr) -> None:
            T.buffer_store(largest, T.max(largest[0], self.largest[slot]), [0])

        def weigh(slot: Expr) -> None:
            power = T.bind(emit_exp(self.largest[slot] - largest[0], 1))
            T.buffer_store(self.largest, power, [slot])
            T.buffer_store(total, total[0] + power * self.totals[slot], [0])

        each_piece(compare)
        start = T.float32(0) if sink is None else emit_exp(sink - largest[0], 1)
        T.buffer_store(total, start, [0])
        each_piece(weigh)
        factor = T.bind(T.Select(total[0] > T.float32(0), T.float32(1) / total[0], T.float32(0)))

        def emit_columns(at: Expr, lanes: int) -> None:
            (value,) = alloc_vectors(1, lanes, "float32")
            store_vector(value, constant("float32", 0, lanes), 0, lanes)

            def add_piece(slot: Expr) -> None:
                part = load_vector(self.sums, slot * width + at, lanes)
                part = part * broadcast(self.largest[slot], lanes)
                store_vector(value, load_vector(value, 0, lanes) + part, 0, lanes)

            each_piece(add_piece)
            result = load_vector(value, 0, lanes) * broadcast(factor, lanes)
            store_vector(self.result, result, row * width + at, lanes)

        emit_vector_loop(width, self.isa.lanes, emit_columns)
