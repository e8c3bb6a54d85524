"""Norms of rows of float32, and their integers behind them if a product reads those, as TIR.

    root mean square   y = x * (1 / sqrt(mean(x * x) + epsilon)) * weight
    layer norm         y = c * (1 / sqrt(mean(c * c) + epsilon)) * weight + bias,  c = x - mean(x)

With `divides` it is c / sqrt(...), as a model spells it. q and the scale are those of
`integer.row_quantize`. The floats decide the integers, so that their arithmetic is stated: each
operation is rounded by itself (products are fenced, or LLVM would contract them on some targets),
and a sum along a row has one order on all of them, that of `reference.row_arithmetic`: lane l of
`SUM_LANES` adds up the elements l, l + SUM_LANES, ...; then halves are added to halves; what is
left of the row follows, one by one.
"""

from __future__ import annotations

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
    emit_shared_loop,
    emit_vector_loop,
    fold_lanes,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr
from relayquant.codegen.kernels.integer.row_quantize import (
    ELEMENT_COST,
    ReadVector,
    choose_lanes,
    emit_codes,
    emit_extreme,
    emit_scale,
)

#: Partial sums of a row.
SUM_LANES = 32
#: Rows that are worked on together, at most, and elements of them.
MOST_ROWS, BLOCK_ELEMENTS = 16, 1024


@dataclass(frozen=True)
class RowNorm:
    """Norms along rows of `features`.

    Attributes:
        leading: The extents before, None where known at run time.
        features: Elements of a row.
        epsilon: What is added to the mean of the squares.
        is_centred: Whether the mean is taken off, as a layer norm does.
        divides: By the root, instead of a product with one over it.
        weight: Whether results are multiplied by a weight (features,).
        bias: Whether a bias (features,) is added.
        keeps_result: Whether the floats are stored.
        rows: The leading extents of the integers, if rows are quantized; as many rows as of x.
    """

    leading: tuple[int | None, ...]
    features: int
    epsilon: float
    is_centred: bool = False
    divides: bool = False
    weight: bool = True
    bias: bool = False
    keeps_result: bool = True
    rows: tuple[int | None, ...] | None = None

    @property
    def block_rows(self) -> int:
        """Rows that are worked on together: they stay in the first-level cache."""
        return max(1, min(MOST_ROWS, BLOCK_ELEMENTS // self.features))


def make_row_norm(spec: RowNorm, name: str = "row_norm") -> PrimFunc:
    """PrimFunc(x (*leading, K)[, weight (K,)][, bias (K,)][, y (*leading, K)][, q int8 (*rows, K),
    scale float32 (*rows, 1)]); what is not said to be there is left out.
    """

    def body() -> None:
        width = spec.features
        extents = [T.int64() if extent is None else extent for extent in spec.leading]
        count = prod(extents)

        def declare(name: str, shape: list[Expr], size: Expr, dtype: str = "float32") -> Buffer:
            buffer = T.arg(name, T.Buffer(tuple(shape), dtype))
            return buffer, size

        def view(declared: tuple[Buffer, Expr] | None) -> Buffer:
            if declared is None:
                return None
            buffer, size = declared
            return T.decl_buffer((size,), buffer.dtype, data=buffer.data)

        data = declare("x", [*extents, width], count * width)
        weight = declare("weight", [width], width) if spec.weight else None
        bias = declare("bias", [width], width) if spec.bias else None
        result = declare("y", [*extents, width], count * width) if spec.keeps_result else None
        codes = scale = None
        if spec.rows is not None:
            outer = extents
            if spec.rows != spec.leading:
                outer = [T.int64() if extent is None else extent for extent in spec.rows]
            codes = declare("q", [*outer, width], count * width, "int8")
            scale = declare("scale", [*outer, 1], count)
        rows = Rows(spec, *map(view, (data, weight, bias, result, codes, scale)))
        block = spec.block_rows

        def emit(index: Expr) -> None:
            first = T.bind(index * block)
            rows.emit_block(first, T.bind(T.min(count - first, block)))

        blocks = T.floordiv(count + (block - 1), block)
        emit_shared_loop(blocks, count * (width * ELEMENT_COST) >= PARALLEL_THRESHOLD, emit)

    return build_kernel(name, body)


@dataclass(frozen=True, eq=False)
class Rows:
    """Flat views of what a kernel is called with; None of what is not there."""

    spec: RowNorm
    x: Buffer
    weight: Buffer | None
    bias: Buffer | None
    y: Buffer | None
    q: Buffer | None
    scale: Buffer | None

    def emit_block(self, first: Expr, count: Expr) -> None:
        """`count` rows from `first` on, step after step: a row waits for its sums, its root and its
        scale, and the processor works on the next meanwhile.

        Floats that are not stored are computed twice: for the scale, and for the codes.
        """
        spec, size = self.spec, self.spec.block_rows
        width, lanes = spec.features, choose_lanes(spec.features)
        centres, factors, steps = alloc_vectors(3, size, "float32")

        def read(row: Expr, at: Expr, count: int) -> Expr:
            value = load_vector(self.x, (first + row) * width + at, count)
            return value - broadcast(centres[row], count) if spec.is_centred else value

        def read_square(row: Expr, at: Expr, count: int) -> Expr:
            value = read(row, at, count)
            return fence(value * value, count)

        def compute(row: Expr, at: Expr, count: int) -> Expr:
            value, factor = read(row, at, count), broadcast(factors[row], count)
            value = value / factor if spec.divides else value * factor
            if self.weight is not None:
                value = value * load_vector(self.weight, at, count)
            if self.bias is not None:
                value = fence(value, count) + load_vector(self.bias, at, count)
            return value

        def compute_and_store(row: Expr, at: Expr, count: int) -> Expr:
            start = (first + row) * width + at
            store_vector(self.y, compute(row, at, count), start, count)
            return load_vector(self.y, start, count)

        if spec.is_centred:
            with T.serial(count) as row:
                T.buffer_store(centres, T.float32(0), [row])
                T.buffer_store(centres, emit_mean(partial(read, row), width), [row])
        with T.serial(count) as row:
            square = emit_mean(partial(read_square, row), width)
            root = T.bind(T.sqrt(square + T.float32(spec.epsilon)))
            T.buffer_store(factors, root if spec.divides else T.float32(1) / root, [row])
        if self.q is None:
            with T.serial(count) as row:
                emit_vector_loop(width, lanes, partial(compute_and_store, row))
            return
        floats = compute if self.y is None else compute_and_store
        with T.serial(count) as row:
            largest = emit_extreme(partial(floats, row), width, lanes)
            T.buffer_store(steps, emit_scale(largest, self.scale, first + row), [row])

        def read_again(row: Expr, at: Expr, count: int) -> Expr:
            if self.y is None:
                return compute(row, at, count)
            return load_vector(self.y, (first + row) * width + at, count)

        with T.serial(count) as row:
            start = (first + row) * width
            emit_codes(partial(read_again, row), width, lanes, steps[row], self.q, start)


def emit_mean(read: ReadVector, width: int) -> Expr:
    """The mean of a row. What divides by a power of two is a product to LLVM, which it would
    contract with a sum behind it.
    """
    return T.bind(fence(emit_row_sum(read, width) / T.float32(width), 1))


def emit_row_sum(read: ReadVector, width: int) -> Expr:
    """The sum of a row, in the stated order."""
    lanes, whole = SUM_LANES, width // SUM_LANES
    value: Expr = T.float32(0)
    if whole:
        (total,) = alloc_vectors(1, lanes, "float32")
        store_vector(total, read(0, lanes), 0, lanes)
        if whole > 1:
            with T.serial(whole - 1) as step:
                added = load_vector(total, 0, lanes) + read((step + 1) * lanes, lanes)
                store_vector(total, added, 0, lanes)
        value = fold_lanes(load_vector(total, 0, lanes), lanes, add)
    for at in range(whole * lanes, width):
        value = T.bind(value + read(at, 1))
    return value


def fence(value: Expr, lanes: int) -> Expr:
    """The same, rounded before it goes on: LLVM contracts no product behind it."""
    suffix = "f32" if lanes == 1 else f"v{lanes}f32"
    name = f"llvm.arithmetic.fence.{suffix}"
    return T.call_llvm_pure_intrin(name, value, dtype=vector("float32", lanes))
