"""Specification of a softmax along an axis of float32 -> its kernel.

It also writes integers if one scale quantizes the results.

    e = exp(x - max(x));  y = e * (1 / sum(e))

The floats determine the integers after them, so their arithmetic is specified as in `row_norm`:
each operation is rounded separately, and the sum has the order of `reference.row_arithmetic`. The
exponential of numbers up to 0 is defined as in `reference.row_softmax`:

    n = rne(t / ln 2);  r = t - n * ln 2;  e^t = 2^n * P(r)

ln 2 is split in two parts (Cody and Waite 1980), short enough that their products with n are exact,
fused or not. P has degree 5 and P(0) = 1, and is fitted to minimize the largest relative error,
9.2e-8. Results below 2^-126.5 are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import add

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    emit_shared_loop,
    emit_vector_loop,
    fold_lanes,
    load_vector,
    name_extents,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.row_norm import SUM_LANES, emit_row_sum
from relayquant.codegen.kernels.integer.elementwise import Quantize, emit_quantized
from relayquant.codegen.kernels.isa.base import Buffer, Expr, fence

#: Coefficients of P, highest power first.
EXP_COEFFICIENTS = (0.008290272, 0.041898163, 0.16667639, 0.49999148, 0.9999997, 1.0)
LOG2_E = 1.44269504088896341
#: ln(2) in two parts of 17 bits each.
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428605173714459e-06
#: -127 ln(2): the exponential of smaller numbers is 0 too.
EXP_LOW = -88.0296919311
#: Added to a number of at most 2^22, it rounds to an integer n, and the lowest bits are n + 127.
ROUND_TO_EXPONENT = 1.5 * 2**23 + 127
MANTISSA_BITS = 23

#: Elements that are processed at once. LLVM splits them if registers are narrower.
LANES = 16
#: Registers of powers that are computed at once. One waits some 50 cycles for its own steps, and
#: steps that wait fill the processor's queue: in the order of registers it would hold few of them.
POWER_REGISTERS = 4
#: Most rows that are processed together, and most elements of them; number of rows of unknown
#: length.
MOST_ROWS, BLOCK_ELEMENTS, ROWS_OF_ANY_LENGTH = 16, 1024, 4
#: Columns that are processed together.
COLUMNS = 64
#: Multiply-adds that take as long as one element.
ELEMENT_COST = 64


@dataclass(frozen=True)
class Softmax:
    """A softmax along one axis.

    Attributes:
        shape: The extents, None for an extent known only at run time.
        axis: At least 0.
        factor: A positive number that multiplies x first, or None. Only along the last axis.
        quantized: Quantization of the results, with any `shape`, or None if the floats are stored.
            Only along a last axis of known length.
    """

    shape: tuple[int | None, ...]
    axis: int
    factor: float | None = None
    quantized: Quantize | None = None

    def __post_init__(self) -> None:
        is_plain = self.factor is None and self.quantized is None
        if not is_plain and self.axis != len(self.shape) - 1:
            raise ValueError(
                f"Softmax: a factor or quantized results along axis {self.axis} of "
                f"{len(self.shape)}; allowed: along the last one.",
            )
        if self.quantized is not None and self.shape[-1] is None:
            raise ValueError(
                "Softmax: quantized results of rows whose length is known only at run time; "
                "allowed: float results, or a known length.",
            )


def make_softmax(spec: Softmax, name: str = "softmax", isa_lanes: int = 1) -> PrimFunc:
    """Make PrimFunc(x float32, y), both of the shape. y is float32, or integers if quantized.

    `isa_lanes`: float32 numbers of a register of the target. It changes no result.
    """

    def body() -> None:
        extents = name_extents(spec.shape)
        dtype = "float32" if spec.quantized is None else spec.quantized.out.dtype
        arguments = [
            T.arg("x", T.Buffer(tuple(extents), "float32")),
            T.arg("y", T.Buffer(tuple(extents), dtype)),
        ]
        count = prod(extents)
        x, y = (T.decl_buffer((count,), each.dtype, data=each.data) for each in arguments)
        outer, width = prod(extents[: spec.axis]), extents[spec.axis]
        inner = prod(extents[spec.axis + 1 :])
        is_worth = count * ELEMENT_COST >= PARALLEL_THRESHOLD
        if isinstance(inner, int) and inner == 1:
            SoftmaxRows(spec, x, y, width, isa_lanes).emit(outer, is_worth)
        else:
            SoftmaxColumns(spec, x, y, width, inner).emit(outer, is_worth)

    return build_kernel(name, body)


@dataclass(frozen=True, eq=False)
class SoftmaxRows:
    """A softmax along rows of `width`, in flat views of the arguments.

    `isa_lanes`: see `make_softmax`.
    """

    spec: Softmax
    x: Buffer
    y: Buffer
    width: Expr
    isa_lanes: int

    def emit(self, count: Expr, is_worth: Expr) -> None:
        """Emit the softmax of `count` rows."""
        size, width = ROWS_OF_ANY_LENGTH, self.width
        if isinstance(width, int):
            size = max(1, min(MOST_ROWS, BLOCK_ELEMENTS // max(1, width)))

        def emit_block(index: Expr) -> None:
            first = T.bind(index * size)
            self.emit_block(first, T.bind(T.min(count - first, size)), size)

        emit_shared_loop(ceil_div(count, size), is_worth, emit_block)

    def emit_block(self, first: Expr, count: Expr, size: int) -> None:
        """Emit `count` rows of at most `size`, from `first` on, step by step.

        While a row waits for its largest element and its sum, the processor works on the next row.
        """
        width, quantized = self.width, self.spec.quantized
        lanes = min(LANES, 1 << (width.bit_length() - 1)) if isinstance(width, int) else LANES
        largest, factors = alloc_vectors(2, size, "float32")
        powers, start = self.y, first * width
        if quantized is not None:
            powers, start = T.alloc_buffer((size * width,), "float32"), 0

        with T.serial(count) as row:
            T.buffer_store(largest, self.emit_largest((first + row) * width, lanes), [row])
        with T.serial(count) as row:

            def compute(at: Expr, lanes: int) -> None:
                value = self.read((first + row) * width + at, lanes)
                power = T.bind(emit_exp(value - broadcast(largest[row], lanes), lanes))
                # As the sum reads them. Of a larger vector LLVM would pass on number by number.
                for done in range(0, lanes, SUM_LANES):
                    piece = min(lanes - done, SUM_LANES)
                    part = power
                    if piece < lanes:
                        part = T.Shuffle([power], [T.int32(done + i) for i in range(piece)])
                    store_vector(powers, part, start + row * width + at + done, piece)

            emit_loop(width, self.count_powers(lanes), compute)
            total = emit_positive_sum(powers, start + row * width, width)
            T.buffer_store(factors, T.float32(1) / total, [row])
        with T.serial(count) as row:

            def normalize(at: Expr, lanes: int) -> None:
                value = load_vector(powers, start + row * width + at, lanes)
                value = value * broadcast(factors[row], lanes)
                if quantized is not None:
                    value = emit_quantized(T.bind(fence(value, lanes)), quantized, lanes)
                store_vector(self.y, value, (first + row) * width + at, lanes)

            emit_loop(width, lanes, normalize, overlaps=quantized is not None)

    def count_powers(self, lanes: int) -> int:
        """Count the powers that are computed at once: more than `lanes` if they divide a row."""
        width = self.width
        while isinstance(width, int) and lanes < POWER_REGISTERS * self.isa_lanes:
            if width % (2 * lanes):
                break
            lanes *= 2
        return lanes

    def read(self, at: Expr, lanes: int) -> Expr:
        value = load_vector(self.x, at, lanes)
        if self.spec.factor is None:
            return value
        return fence(value * constant("float32", self.spec.factor, lanes), lanes)

    def emit_largest(self, start: Expr, lanes: int) -> Expr:
        """Emit the maximum of the row from `start` on.

        NaN may be lost: it reappears in the exponential.
        """
        (found,) = alloc_vectors(1, lanes, "float32")
        store_vector(found, constant("float32", float("-inf"), lanes), 0, lanes)

        def compare(at: Expr, lanes: int) -> None:
            value = load_vector(self.x, start + at, lanes)
            store_vector(found, T.max(load_vector(found, 0, lanes), value), 0, lanes)

        emit_loop(self.width, lanes, compare)
        value = fold_lanes(load_vector(found, 0, lanes), lanes, T.max)
        if self.spec.factor is not None:  # rounding keeps the order
            value = fence(value * T.float32(self.spec.factor), 1)
        return T.bind(value)


@dataclass(frozen=True, eq=False)
class SoftmaxColumns:
    """A softmax of `width` elements that are `inner` apart, in flat views of the arguments."""

    spec: Softmax
    x: Buffer
    y: Buffer
    width: Expr
    inner: Expr

    def emit(self, outer: Expr, is_worth: Expr) -> None:
        """Emit the softmax of `outer` times `inner` columns, some vectors of them at a time."""
        inner, lanes, vectors = self.inner, LANES, 1
        if isinstance(inner, int):
            lanes = min(LANES, 1 << (inner - 1).bit_length())
            vectors = max(1, min(COLUMNS, inner) // lanes)
        block = lanes * vectors
        blocks, rest = inner // block, inner % block

        def emit_block(index: Expr) -> None:
            at = T.floordiv(index, blocks) * (self.width * inner)
            self.emit_columns(
                T.bind(at + T.floormod(index, blocks) * block), lanes, [lanes] * vectors
            )

        def emit_rest(index: Expr) -> None:
            at = T.bind(index * (self.width * inner) + (inner - rest))
            if isinstance(rest, int):
                whole, last = divmod(rest, lanes)
                self.emit_columns(at, lanes, [lanes] * whole + [last] * bool(last))
                return
            with T.serial(rest) as column:
                self.emit_columns(at + column, 1, [1])

        if not isinstance(blocks, int) or blocks:
            emit_shared_loop(outer * blocks, is_worth, emit_block)
        if not isinstance(rest, int) or rest:
            emit_shared_loop(outer, is_worth, emit_rest)

    def emit_columns(self, start: Expr, lanes: int, counts: list[int]) -> None:
        """Emit neighbouring vectors of columns from `start` on.

        `counts` are the valid columns of each.

        They are copied: the elements of a column are often a power of two apart, and then no cache
        holds them together.
        """
        size = self.width * lanes
        copies = [T.alloc_buffer((size,), "float32") for _ in counts]
        found = alloc_vectors(len(counts), lanes, "float32")
        for each in found:
            store_vector(each, constant("float32", float("-inf"), lanes), 0, lanes)
        with T.serial(self.width) as k:
            for i, (copy, largest, count) in enumerate(zip(copies, found, counts, strict=True)):
                at = start + k * self.inner + i * lanes
                emit_loop(count, lanes, partial(self.move, self.x, at, copy, k * lanes), False)
                value = T.max(load_vector(largest, 0, lanes), load_vector(copy, k * lanes, lanes))
                store_vector(largest, value, 0, lanes)
        for copy, largest in zip(copies, found, strict=True):
            with T.serial(self.width) as k:
                value = load_vector(copy, k * lanes, lanes) - load_vector(largest, 0, lanes)
                store_vector(copy, emit_exp(value, lanes), k * lanes, lanes)
            factor = constant("float32", 1, lanes) / self.emit_sum(copy, lanes)
            store_vector(largest, factor, 0, lanes)
        with T.serial(self.width) as k:
            for i, (copy, factor, count) in enumerate(zip(copies, found, counts, strict=True)):
                value = load_vector(copy, k * lanes, lanes) * load_vector(factor, 0, lanes)
                store_vector(self.y, value, start + k * self.inner + i * lanes, lanes, count)

    def move(
        self, source: Buffer, start: Expr, target: Buffer, first: Expr, at: Expr, lanes: int
    ) -> None:
        store_vector(target, load_vector(source, start + at, lanes), first + at, lanes)

    def emit_sum(self, copy: Buffer, lanes: int) -> Expr:
        """Emit the sums of columns, in the same order as the sums of rows."""
        totals = T.alloc_buffer((SUM_LANES * lanes,), "float32")
        whole = self.width // SUM_LANES

        def add_to(at: Expr, value: Expr) -> None:
            store_vector(totals, load_vector(totals, at * lanes, lanes) + value, at * lanes, lanes)

        with T.serial(SUM_LANES) as lane:
            store_vector(totals, constant("float32", 0, lanes), lane * lanes, lanes)
            with T.serial(whole) as step:
                add_to(lane, load_vector(copy, (step * SUM_LANES + lane) * lanes, lanes))
        half = SUM_LANES
        while half > 1:
            half //= 2
            with T.serial(half) as lane:
                add_to(lane, load_vector(totals, (lane + half) * lanes, lanes))
        with T.serial(self.width - whole * SUM_LANES) as k:
            add_to(0, load_vector(copy, (whole * SUM_LANES + k) * lanes, lanes))
        return load_vector(totals, 0, lanes)


def emit_loop(
    width: Expr, lanes: int, body: Callable[[Expr, int], None], overlaps: bool = True
) -> None:
    """Call `body(offset, lanes)` so that it covers 0 .. width, known now or at run time.

    With `overlaps`, some elements may be covered twice.
    """
    if isinstance(width, int) and overlaps:
        emit_vector_loop(width, lanes, body)
        return
    whole = width // lanes
    with T.serial(whole) as index:
        body(index * lanes, lanes)
    if isinstance(width, int):
        done = whole * lanes
        while done < width:
            piece = 1 << ((width - done).bit_length() - 1)
            body(done, piece)
            done += piece
        return
    rest = T.bind(width - whole * lanes)
    if not overlaps:
        emit_each(width, rest, body)
        return
    with T.If(T.And(whole > 0, rest > 0)):
        with T.Then():
            body(width - lanes, lanes)
        with T.Else():
            emit_each(width, rest, body)


def emit_each(width: Expr, rest: Expr, body: Callable[[Expr, int], None]) -> None:
    """Call `body` for the last `rest` elements, one by one."""
    with T.serial(rest) as index:
        body(width - rest + index, 1)


def emit_positive_sum(buffer: Buffer, start: Expr, width: Expr) -> Expr:
    """Emit the sum of a row without negative numbers, in the specified order."""
    if isinstance(width, int):
        return emit_row_sum(lambda at, lanes: load_vector(buffer, start + at, lanes), width)
    (totals,) = alloc_vectors(1, SUM_LANES, "float32")
    (total,) = alloc_vectors(1, 1, "float32")
    whole = width // SUM_LANES
    store_vector(totals, constant("float32", 0, SUM_LANES), 0, SUM_LANES)
    with T.serial(whole) as step:
        value = load_vector(buffer, start + step * SUM_LANES, SUM_LANES)
        store_vector(totals, load_vector(totals, 0, SUM_LANES) + value, 0, SUM_LANES)
    T.buffer_store(total, fold_lanes(load_vector(totals, 0, SUM_LANES), SUM_LANES, add), [0])
    with T.serial(width - whole * SUM_LANES) as index:
        value = load_vector(buffer, start + whole * SUM_LANES + index, 1)
        T.buffer_store(total, total[0] + value, [0])
    return total[0]


def emit_exp(value: Expr, lanes: int) -> Expr:
    """Emit e^value for numbers up to 0. NaN gives NaN."""

    def number(value: float) -> Expr:
        return constant("float32", value, lanes)

    # Not T.max, which may return either operand if one is NaN.
    value = T.bind(value)
    low = number(EXP_LOW)
    value = T.bind(T.Select(value < low, low, value))
    exponent = fence(value * number(LOG2_E), lanes) + number(ROUND_TO_EXPONENT)
    exponent = T.bind(fence(exponent, lanes))  # or the subtraction below would cancel it
    n = T.bind(exponent - number(ROUND_TO_EXPONENT))
    r = T.bind(value - n * number(LN2_HIGH) - n * number(LN2_LOW))
    power = number(EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        power = fence(power * r, lanes) + number(coefficient)
    bits = T.reinterpret(vector("int32", lanes), exponent)
    # The product is exact, except for subnormal results.
    scale = T.shift_left(bits, constant("int32", MANTISSA_BITS, lanes))
    return fence(power * T.reinterpret(vector("float32", lanes), scale), lanes)
