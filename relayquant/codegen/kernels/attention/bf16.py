"""Attention of many new rows for each sequence -> its kernel with products of bfloat16.

As `blocks` does it, block after block. `bf16_products` has the products, on tiles or
on vectors.

Query, keys, values and powers are rounded to bfloat16, after their scales. Sums and powers are
float32. A block of keys and values is rounded once for all rows of a task. Only keys behind the
first row of a vector are compared with the position of each row.

A process that may not use tiles runs the kernel of `blocks`.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.attention.bf16_products import (
    LANES,
    SIDE,
    TILE,
    RoundedBlocks,
    TileProducts,
    VectorProducts,
)
from relayquant.codegen.kernels.attention.blocks import (
    AttentionOperands,
    BlockAttention,
    declare_attention,
)
from relayquant.codegen.kernels.attention.halves import load_numbers
from relayquant.codegen.kernels.attention.one_row import Attention
from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    import_code,
    load_vector,
    settle,
    store_vector,
)
from relayquant.codegen.kernels.floating.softmax import LOG2_E, MANTISSA_BITS, ROUND_TO_EXPONENT
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa
from relayquant.codegen.kernels.isa.base import fence
from relayquant.codegen.kernels.isa.bf16 import TILES_BF16, Bf16Isa, join_pairs
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.codegen.kernels.permutation import transpose_vectors
from relayquant.codegen.kernels.unit_permission import ask_permission, emit_if

#: Query rows of a task, and keys of a block.
ROWS, KEYS = 256, 256
#: Coefficients of a polynomial for 2^r, |r| <= 1/2, highest power first, fitted to minimize the
#: largest relative error, 1.0e-4, with the value 1 at 0. Rounding to bfloat16 adds up to 2^-9.
POWER_COEFFICIENTS = (0.055008934, 0.24221097, 0.69328293, 1.0)
#: 2^-127 and less is 0.
LOWEST_EXPONENT = -127.0
#: Keys that a vector looks through together for the largest score.
UNROLL = 4


def takes_tiles(spec: Attention) -> bool:
    """Whether the kernel takes heads of this width, and scores without a bound."""
    return spec.width % SIDE == 0 and not spec.soft_cap


def make_attention_bf16(spec: Attention, isa: FloatIsa, bf16: Bf16Isa = TILES_BF16) -> PrimFunc:
    """Make PrimFunc(query, keys[, key_scale], values[, value_scale], positions[, sinks], result).

    `spec` is one that `takes_tiles`. `isa` has vectors of 16.
    """
    assert takes_tiles(spec)
    assert isa.lanes == LANES

    def body() -> None:
        operands = declare_attention(spec)
        rounded, plain = RoundedAttention(operands, isa, bf16), BlockAttention(operands, isa)
        if bf16.unit is None:
            import_code(bf16.code)
            rounded.emit()
        else:
            emit_if(ask_permission(bf16.unit), rounded.emit, plain.emit)

    return build_kernel("attention_bf16", body)


class RoundedAttention(BlockAttention):
    """Statements of the kernel. Rows that are missing in a task repeat its last one."""

    block = ROWS

    def __init__(self, operands: AttentionOperands, isa: FloatIsa, bf16: Bf16Isa) -> None:
        super().__init__(operands, isa)
        self.bf16 = bf16
        self.steps = self.spec.width // SIDE

    def emit_block(self, position: Expr, start: Expr, size: Expr, line: Expr) -> None:
        """Emit a block of query rows for `size` keys from `start` on, behind row `line`."""
        width = self.spec.width
        query = alloc_workspace(ROWS * width, BF16_BITS)
        keys, values = (alloc_workspace(KEYS * width, BF16_BITS) for _ in range(2))
        self.scores = alloc_workspace(KEYS * SIDE, "float32")
        self.powers = alloc_workspace(KEYS * SIDE, BF16_BITS)
        self.sums = alloc_workspace(ROWS * width, "float32")
        #: of each row: largest score, sum of powers, position, and first element in memory
        self.largest, self.totals = (alloc_workspace(ROWS, "float32") for _ in range(2))
        self.places, self.starts = (alloc_workspace(ROWS, dtype) for dtype in ("int32", "int64"))
        self.emit_rows(position, query)
        blocks = RoundedBlocks(width, query, keys, values, self.scores, self.powers, self.sums)
        products = (TileProducts if self.bf16.unit else VectorProducts)(self.bf16, blocks)
        with T.serial(ceil_div(size, KEYS)) as step:
            key, count = settle(start + step * KEYS, T.min(size - step * KEYS, T.int64(KEYS)))
            self.emit_keys(line + key, count, keys)
            self.emit_transposed_values(line + key, count, values)
            with T.serial(ceil_div(self.count, SIDE)) as part:
                last = T.Cast("int64", self.places[part * SIDE + (SIDE - 1)])
                (seen,) = settle(T.min(last + 1 - key, count))
                with T.If(seen > 0), T.Then():
                    steps = T.bind(ceil_div(seen, SIDE))
                    products.emit_scores(part, steps)
                    with T.serial(SIDE // LANES) as half:
                        self.emit_vector(part, half * LANES, key, seen)
                    products.emit_values(part, steps)
        products.finish()
        self.emit_rows_of_result()

    # --- Operands -------------------------------------------------------------------------------

    def emit_rows(self, position: Expr, query: Buffer) -> None:
        """Round the query rows, scaled, to pairs. Powers are of 2."""

        def start(row: Expr, start: Expr, token: Expr) -> None:
            T.buffer_store(self.places, T.Cast("int32", position + token), [row])
            T.buffer_store(self.starts, start, [row])
            self.emit_sink(self.largest, self.totals, row, LOG2_E)

        self.each_row(T.int64(ROWS), start)
        with T.serial(ROWS * self.spec.width // LANES) as at:
            store_vector(self.sums, constant("float32", 0, LANES), at * LANES, LANES)
        with T.grid(ROWS // LANES, self.steps) as (tile, step):

            def load(row: int) -> Expr:
                at = T.bind(self.starts[tile * LANES + row] + step * SIDE)
                scale = constant("float32", self.spec.scale * LOG2_E, LANES)
                halves = [
                    self.round(load_vector(self.query, at + i, LANES) * scale) for i in (0, LANES)
                ]
                joined = T.Shuffle(halves, [T.int32(i) for i in range(SIDE)])
                return T.reinterpret(f"int32x{LANES}", joined)

            self.store_words(query, tile * self.steps + step, map(load, range(LANES)))

    def round(self, value: Expr) -> Expr:
        return self.bf16.round(value, LANES)

    def load_cache(self, number: int, row: Expr, at: Expr) -> Expr:
        """Round a vector of keys (0) or values (1)."""
        cache, scale = self.caches[number]
        value = load_numbers(cache, row * self.spec.width + at, LANES, self.isa)
        if scale is not None:
            value = value * broadcast(scale[row], LANES)
        return self.round(value)

    def emit_keys(self, line: Expr, count: Expr, keys: Buffer) -> None:
        """Round rows of keys."""
        with T.grid(count, self.spec.width // LANES) as (key, part):
            value = self.load_cache(0, line + key, part * LANES)
            store_vector(keys, value, key * self.spec.width + part * LANES, LANES)

    def emit_transposed_values(self, line: Expr, count: Expr, values: Buffer) -> None:
        """Round values to tiles of 16 numbers x 32 keys. Missing keys repeat the last one."""
        tiles = self.spec.width // LANES
        with T.grid(ceil_div(count, SIDE), tiles) as (step, tile):

            def load(pair: int) -> Expr:
                keys = [T.min(step * SIDE + 2 * pair + i, count - 1) for i in range(2)]
                rows = [self.load_cache(1, line + key, tile * LANES) for key in keys]
                return self.bf16.interleave(rows)

            self.store_words(values, step * tiles + tile, map(load, range(LANES)))

    def store_words(self, buffer: Buffer, tile: Expr, words: map) -> None:
        """Store a tile of pairs, transposed."""
        # TVM would put the value of a name into all that reads it, and names of bfloat16 fail.
        held = alloc_vectors(LANES, LANES, "int32")
        for each, value in zip(held, words, strict=True):
            store_vector(each, value, 0, LANES)
        for i, value in enumerate(
            transpose_vectors([load_vector(each, 0, LANES) for each in held], LANES)
        ):
            value = T.reinterpret(f"{BF16_BITS}x{SIDE}", value)
            store_vector(buffer, value, tile * TILE + i * SIDE, SIDE)

    # --- Powers ---------------------------------------------------------------------------------

    def emit_vector(self, part: Expr, column: Expr, key: Expr, count: Expr) -> None:
        """Emit the powers of 16 rows for `count` keys from `key` on, and scale earlier sums."""
        row = part * SIDE + column
        *found, last = [*alloc_vectors(UNROLL, LANES, "float32"), *alloc_vectors(1, LANES, "int32")]
        (total,) = alloc_vectors(1, LANES, "float32")
        for each in found:
            store_vector(each, load_vector(self.largest, row, LANES), 0, LANES)
        store_vector(last, load_vector(self.places, row, LANES), 0, LANES)
        ends = [T.Cast("int64", self.places[row + i]) + 1 - key for i in (0, LANES - 1)]
        clear, seen = settle(*(T.max(T.min(end, count), T.int64(0)) for end in ends))
        # all rows see what is before `free`, and none what is from `pairs` pairs on
        free = T.bind(T.int64(0) if self.spec.window else T.floordiv(clear, UNROLL))
        pairs = T.bind(T.floordiv(seen + 1, 2))

        def locate(at: Expr) -> Expr:
            return at * SIDE + column

        def compare(into: Buffer, score: Expr) -> None:
            store_vector(into, T.max(load_vector(into, 0, LANES), score), 0, LANES)

        with T.serial(free) as step:
            for i, each in enumerate(found):
                compare(each, load_vector(self.scores, locate(step * UNROLL + i), LANES))
        with T.serial(pairs * 2 - free * UNROLL) as index:
            at = T.bind(free * UNROLL + index)
            score = load_vector(self.scores, locate(at), LANES)
            score = T.bind(self.hide(score, T.Cast("int32", key + at), last))
            store_vector(self.scores, score, locate(at), LANES)
            compare(found[0], score)
        for each in found[1:]:
            compare(found[0], load_vector(each, 0, LANES))
        factor = load_vector(self.largest, row, LANES) - load_vector(found[0], 0, LANES)
        factor = T.bind(emit_power(factor))
        store_vector(self.largest, load_vector(found[0], 0, LANES), row, LANES)
        with T.serial(self.spec.width) as number:
            at = (part * self.spec.width + number) * SIDE + column
            store_vector(self.sums, load_vector(self.sums, at, LANES) * factor, at, LANES)
        store_vector(total, load_vector(self.totals, row, LANES) * factor, 0, LANES)
        with T.serial(pairs) as pair:
            powers = []
            for i in range(2):
                score = load_vector(self.scores, locate(pair * 2 + i), LANES)
                power = T.bind(emit_power(score - load_vector(found[0], 0, LANES)))
                store_vector(total, load_vector(total, 0, LANES) + power, 0, LANES)
                powers.append(power)
            store_vector(self.powers, join_pairs(*powers, LANES), locate(pair) * 2, SIDE)
        with T.serial(ceil_div(count, SIDE) * LANES - pairs) as index:
            zero = constant(BF16_BITS, 0, SIDE)
            store_vector(self.powers, zero, locate(pairs + index) * 2, SIDE)
        store_vector(self.totals, load_vector(total, 0, LANES), row, LANES)

    def hide(self, score: Expr, place: Expr, last: Buffer) -> Expr:
        """Replace scores of a key that rows, with their positions, do not see."""
        place, end = broadcast(place, LANES), load_vector(last, 0, LANES)
        is_seen = place <= T.min(end, constant("int32", self.spec.length - 1, LANES))
        if self.spec.window:
            after = place > end - constant("int32", self.spec.window, LANES)
            is_seen = T.bitwise_and(is_seen, after)
        return T.Select(is_seen, score, constant("float32", float("-inf"), LANES))

    # --- Result ---------------------------------------------------------------------------------

    def emit_rows_of_result(self) -> None:
        """Divide by the sums of powers. A row that sees no key gives 0."""
        width = self.spec.width
        with T.grid(ceil_div(self.count, LANES), width // LANES) as (tile, step):
            total = T.bind(load_vector(self.totals, tile * LANES, LANES))
            zero, one = (constant("float32", value, LANES) for value in (0, 1))
            factor = T.bind(T.Select(total > zero, one / total, zero))
            part, column = T.floordiv(tile, 2), T.floormod(tile, 2) * LANES

            def load(number: int, part: Expr = part, column: Expr = column) -> Expr:
                at = (part * width + step * LANES + number) * SIDE + column
                return T.bind(load_vector(self.sums, at, LANES) * factor)

            for row, value in enumerate(transpose_vectors([load(i) for i in range(LANES)], LANES)):
                start = self.starts[tile * LANES + row] + step * LANES
                store_vector(self.result, value, start, LANES)


def emit_power(value: Expr) -> Expr:
    """Emit 2^value for numbers up to 0, as `emit_exp` with fewer operations. NaN gives NaN."""

    def number(value: float) -> Expr:
        return constant("float32", value, LANES)

    value, low = T.bind(value), number(LOWEST_EXPONENT)
    value = T.bind(T.Select(value < low, low, value))
    exponent = T.bind(fence(value + number(ROUND_TO_EXPONENT), LANES))
    rest = T.bind(value - (exponent - number(ROUND_TO_EXPONENT)))
    power = number(POWER_COEFFICIENTS[0])
    for coefficient in POWER_COEFFICIENTS[1:]:
        power = power * rest + number(coefficient)
    bits = T.reinterpret(f"int32x{LANES}", exponent)
    scale = T.shift_left(bits, constant("int32", MANTISSA_BITS, LANES))
    return power * T.reinterpret(f"float32x{LANES}", scale)
