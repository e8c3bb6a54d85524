"""Attention of several new rows for each sequence -> its kernel, block by block (Dao et al. 2022).

A task is a block of query rows of one head of the cache. It goes over blocks of the keys that any
of its rows sees, and keeps for each row the largest score m, the sum of powers and the weighted sum
of values. Both sums are scaled by e^(m - m') when a block raises m to m'.

    powers = e^(keys @ query^T - m);  sum += powers;  result^T += values^T @ powers

Query rows are the columns of all products: vectors hold one number of neighbouring rows, and no
sum goes over the lanes of a vector. All query heads of one head of the cache share its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.attention.halves import load_numbers
from relayquant.codegen.kernels.attention.one_row import (
    LOWEST,
    Attention,
    declare_operands,
    finish_scores,
)
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
    load_vector,
    name_extents,
    settle,
    store_vector,
)
from relayquant.codegen.kernels.floating.softmax import emit_exp
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa, emit_tile

#: Query rows of a block, and about as many keys.
BLOCK = 64
#: Keys, or numbers of a value, of a register tile.
TILE = 6


def make_attention_blocks(spec: Attention, isa: FloatIsa) -> PrimFunc:
    """Make PrimFunc(query, keys[, scale], values[, scale], positions[, sinks], result)."""
    return build_kernel(
        "attention_blocks", lambda: BlockAttention(declare_attention(spec), isa).emit()
    )


@dataclass(frozen=True)
class AttentionOperands:
    """Operands of the kernel as flat views.

    Attributes:
        extents: Of the query (B, R, H, D).
        caches: Keys and values, each with its scales or None.
    """

    spec: Attention
    extents: list[Expr]
    query: Buffer
    caches: tuple[list[Buffer], list[Buffer]]
    positions: Buffer
    sinks: Buffer | None
    result: Buffer


def declare_attention(spec: Attention) -> AttentionOperands:
    """Declare the arguments of the kernel."""
    extents = name_extents(spec.extents)
    query, *caches, positions, sinks, result = declare_operands(spec, extents)
    caches = caches[:2], caches[2:]
    return AttentionOperands(spec, extents, query, caches, positions, sinks, result)


class BlockAttention:
    """Statements of the kernel. `block`: query rows of a task."""

    block = BLOCK

    def __init__(self, operands: AttentionOperands, isa: FloatIsa) -> None:
        self.spec, self.isa, self.operands = operands.spec, isa, operands
        self.query, self.caches, self.result = operands.query, operands.caches, operands.result
        self.positions, (self.batch, self.rows) = operands.positions, operands.extents[:2]
        self.vectors = isa.accumulators // TILE
        #: rows whose tiles are computed together
        self.panel = self.vectors * isa.lanes
        self.keys = TILE * (BLOCK // TILE + 1)

    def emit(self) -> None:
        """Emit all blocks of query rows."""
        spec, batch, block = self.spec, self.batch, self.block
        most = alloc_workspace(1, "int64")
        T.buffer_store(most, T.int64(0), [0])
        with T.serial(batch) as sequence:
            place = T.Cast("int64", self.positions[sequence])
            T.buffer_store(most, T.max(most[0], place), [0])
        blocks = T.bind(ceil_div(self.rows * spec.share, block))
        tasks = batch * blocks * spec.groups
        macs = batch * self.rows * (most[0] + self.rows) * (spec.extents[2] * spec.width)
        is_worth = T.And(tasks > 1, macs >= PARALLEL_THRESHOLD)
        emit_shared_loop(tasks, is_worth, partial(self.emit_task, blocks))

    def emit_task(self, blocks: Expr, task: Expr) -> None:
        """Emit one block of query rows."""
        spec, share = self.spec, self.spec.share
        head, index = T.bind(T.floordiv(task, blocks)), T.bind(T.floormod(task, blocks))
        # Early and late blocks in turn: late ones see more keys, and threads get neighbours.
        half = T.floordiv(index, 2)
        block = T.if_then_else(T.floormod(index, 2) == 0, half, blocks - 1 - half)
        sequence = T.floordiv(head, spec.groups)
        position = T.Cast("int64", self.positions[sequence])
        first_row = T.bind(T.Cast("int64", block) * self.block)
        last_row = T.bind(T.min(first_row + self.block, self.rows * share) - 1)
        start = T.int64(0)
        if spec.window:
            start = T.max(position + T.floordiv(first_row, share) - (spec.window - 1), start)
        end = T.min(position + T.floordiv(last_row, share) + 1, T.int64(spec.length))
        self.first, self.count, self.origin, start, size, line = settle(
            first_row,
            last_row - first_row + 1,
            (sequence * self.rows * spec.groups + T.floormod(head, spec.groups)) * share,
            start,
            T.max(end - start, T.int64(0)),
            head * spec.length,
        )
        self.emit_block(position, start, size, line)

    def emit_block(self, position: Expr, start: Expr, size: Expr, line: Expr) -> None:
        """Emit a block of query rows for `size` keys from `start` on, behind row `line`."""
        width, keys = self.spec.width, self.keys
        query = alloc_workspace(width * BLOCK, "float32")
        key_block, value_block = (alloc_workspace(keys * width, "float32") for _ in range(2))
        powers = alloc_workspace(keys * BLOCK, "float32")
        sums = alloc_workspace(width * BLOCK, "float32")
        #: of each row: largest score, sum of powers, factor of earlier sums, and position
        largest, totals, factors = (alloc_workspace(BLOCK, "float32") for _ in range(3))
        places = alloc_workspace(BLOCK, "int32")
        self.emit_start(query, sums, largest, totals, places, position)
        with T.serial(ceil_div(size, keys)) as step:
            key, count = settle(start + step * keys, T.min(size - step * keys, T.int64(keys)))
            for (cache, scale), copy in zip(self.caches, (key_block, value_block), strict=True):
                self.emit_copy(cache, scale, line + key, count, copy)
            self.emit_scores(key_block, query, count, powers)
            self.emit_powers(powers, largest, totals, factors, places, key, count)
            self.emit_values(value_block, powers, count, factors, sums)
        self.emit_result(sums, totals)

    def each_vector(self, emit: Callable[[Expr], None]) -> None:
        """Emit a loop of emit(first row of a vector) over the rows of a block."""
        with T.serial(BLOCK // self.isa.lanes) as index:
            emit(index * self.isa.lanes)

    def each_row(self, count: Expr, emit: Callable[[Expr, Expr, Expr], None]) -> None:
        """Emit emit(row of the block, its first element in memory, its token) for `count` rows."""
        spec, share = self.spec, self.spec.share
        with T.serial(count) as row:
            own = T.bind(self.first + T.min(row, self.count - 1))
            token = T.bind(T.floordiv(own, share))
            at = self.origin + token * spec.extents[2] + T.floormod(own, share)
            (start,) = settle(at * spec.width)
            emit(row, start, token)

    def emit_start(
        self,
        query: Buffer,
        sums: Buffer,
        largest: Buffer,
        totals: Buffer,
        places: Buffer,
        position: Expr,
    ) -> None:
        """Transpose the query rows; those that are missing repeat the last one."""

        def copy(row: Expr, start: Expr, token: Expr) -> None:
            T.buffer_store(places, T.Cast("int32", position + token), [row])
            self.emit_sink(largest, totals, row)
            with T.serial(self.spec.width) as k:
                T.buffer_store(query, self.query[start + k], [k * BLOCK + row])

        self.each_row(T.int64(BLOCK), copy)
        lanes = self.isa.lanes
        with T.serial(self.spec.width * BLOCK // lanes) as step:
            store_vector(sums, constant("float32", 0, lanes), step * lanes, lanes)

    def emit_sink(self, largest: Buffer, totals: Buffer, row: Expr, factor: float = 1.0) -> None:
        """Store the largest score and the sum of powers of a row that has seen no key. `factor`: of
        all scores.
        """
        sinks, share = self.operands.sinks, self.spec.share
        if sinks is None:
            T.buffer_store(largest, T.float32(LOWEST), [row])
            T.buffer_store(totals, T.float32(0), [row])
            return
        # a block has rows of one head of the cache: of its query heads
        own = self.first + T.min(row, self.count - 1)
        head = T.floormod(self.origin, self.spec.extents[2]) + T.floormod(own, share)
        T.buffer_store(largest, sinks[head] * T.float32(factor), [row])
        T.buffer_store(totals, T.float32(1), [row])

    def emit_copy(
        self, cache: Buffer, scale: Buffer | None, line: Expr, count: Expr, copy: Buffer
    ) -> None:
        """Convert rows of the cache to float32."""
        width = self.spec.width
        with T.serial(count) as key:

            def convert(at: Expr, lanes: int) -> None:
                value = load_numbers(cache, (line + key) * width + at, lanes, self.isa)
                if scale is not None:
                    value = value * broadcast(scale[line + key], lanes)
                store_vector(copy, value, key * width + at, lanes)

            emit_vector_loop(width, self.isa.lanes, convert)

    def each_tile(self, rows: Expr, emit: Callable[[Expr, int, Expr], None], rest: int = 0) -> None:
        """Emit emit(first row of a tile, rows, first column of a panel) for all tiles."""
        with T.serial(BLOCK // self.panel) as panel:
            column = panel * self.panel
            with T.serial(rows) as index:
                emit(index * TILE, TILE, column)
            if rest:
                emit(rows * TILE, rest, column)

    def emit_scores(self, keys: Buffer, query: Buffer, count: Expr, scores: Buffer) -> None:
        """Store keys @ query^T. Tiles with too many keys write what nothing reads."""
        lanes, width = self.isa.lanes, self.spec.width

        def emit(first: Expr, rows: int, column: Expr) -> None:
            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(width) as k:
                    step(k, lambda v: k * BLOCK + column + v * lanes)

            def finish(row: int, v: int, value: Expr) -> None:
                store_vector(scores, value, (first + row) * BLOCK + column + v * lanes, lanes)

            places = [(first + row) * width for row in range(rows)]
            self.emit_tile(places, keys, query, reduce, finish)

        self.each_tile(ceil_div(count, TILE), emit)

    def emit_tile(
        self,
        rows: list[Expr],
        image: Buffer,
        columns: Buffer,
        reduce: Callable[[Callable[[Expr, Callable[[int], Expr]], None]], None],
        finish: Callable[[int, int, Expr], None],
    ) -> None:
        """Emit a register tile that starts at 0."""
        emit_tile(
            self.isa,
            rows,
            self.vectors,
            image,
            columns,
            reduce,
            finish,
            prefetch=False,
        )

    def emit_powers(
        self,
        powers: Buffer,
        largest: Buffer,
        totals: Buffer,
        factors: Buffer,
        places: Buffer,
        first: Expr,
        count: Expr,
    ) -> None:
        """Replace scores by their powers, and keys that a row does not see by 0."""
        lanes, window = self.isa.lanes, self.spec.window
        low = constant("float32", float("-inf"), lanes)

        def emit(row: Expr) -> None:
            found, total = alloc_vectors(2, lanes, "float32")
            (last,) = alloc_vectors(1, lanes, "int32")
            store_vector(found, load_vector(largest, row, lanes), 0, lanes)
            store_vector(last, load_vector(places, row, lanes), 0, lanes)
            with T.serial(count) as key:
                at = key * BLOCK + row
                place = broadcast(T.Cast("int32", first + key), lanes)
                end = load_vector(last, 0, lanes)
                is_seen = place <= end
                if window:
                    after = place > end - constant("int32", window, lanes)
                    is_seen = T.bitwise_and(is_seen, after)
                score = finish_scores(self.spec, load_vector(powers, at, lanes), lanes)
                score = T.bind(T.Select(is_seen, score, low))
                store_vector(powers, score, at, lanes)
                store_vector(found, T.max(load_vector(found, 0, lanes), score), 0, lanes)
            factor = load_vector(largest, row, lanes) - load_vector(found, 0, lanes)
            factor = T.bind(emit_exp(factor, lanes))
            store_vector(factors, factor, row, lanes)
            store_vector(largest, load_vector(found, 0, lanes), row, lanes)
            store_vector(total, load_vector(totals, row, lanes) * factor, 0, lanes)
            with T.serial(count) as key:
                at = key * BLOCK + row
                power = load_vector(powers, at, lanes) - load_vector(found, 0, lanes)
                power = T.bind(emit_exp(power, lanes))
                store_vector(powers, power, at, lanes)
                store_vector(total, load_vector(total, 0, lanes) + power, 0, lanes)
            store_vector(totals, load_vector(total, 0, lanes), row, lanes)

        self.each_vector(emit)

    def emit_values(
        self, values: Buffer, powers: Buffer, count: Expr, factors: Buffer, sums: Buffer
    ) -> None:
        """Emit sums = sums * factors + values^T @ powers."""
        lanes, width = self.isa.lanes, self.spec.width

        def emit(first: Expr, rows: int, column: Expr) -> None:
            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(count) as key:
                    step(key * width, lambda v: key * BLOCK + column + v * lanes)

            def finish(row: int, v: int, value: Expr) -> None:
                at = (first + row) * BLOCK + column + v * lanes
                before = load_vector(sums, at, lanes)
                before = before * load_vector(factors, column + v * lanes, lanes)
                store_vector(sums, before + value, at, lanes)

            self.emit_tile([first + row for row in range(rows)], values, powers, reduce, finish)

        self.each_tile(T.int64(width // TILE), emit, width % TILE)

    def emit_result(self, sums: Buffer, totals: Buffer) -> None:
        """Divide by the sums of powers. A row that sees no key gives 0."""

        def store(row: Expr, start: Expr, _: Expr) -> None:
            total = T.bind(totals[row])
            factor = T.Select(total > T.float32(0), T.float32(1) / total, T.float32(0))
            factor = T.bind(factor)
            with T.serial(self.spec.width) as k:
                T.buffer_store(self.result, sums[k * BLOCK + row] * factor, [start + k])

        self.each_row(self.count, store)
