"""Specification of a norm of float32 rows -> its kernel, with the integers if a product reads them.

    root mean square   y = x * (1 / sqrt(mean(x * x) + epsilon)) * weight
    layer norm         y = c * (1 / sqrt(mean(c * c) + epsilon)) * weight + bias,  c = x - mean(x)

x may be the sum of two tensors, which is stored if others read it too. With `divides` it is
c / sqrt(...), as in the model. q and the scale are defined in
`integer.row_quantize`. The floats determine the integers, so their arithmetic is specified exactly.
Each operation is rounded separately: products are fenced, or LLVM would contract them on some
targets. A sum along a row has the same order on all targets, the order of
`reference.row_arithmetic`: lane l of `SUM_LANES` adds up the elements l, l + SUM_LANES, ...; then
halves are added to halves; then the remaining elements follow, one by one.
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
    ceil_div,
    emit_shared_loop,
    emit_vector_loop,
    fold_lanes,
    load_vector,
    name_extents,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr
from relayquant.codegen.kernels.integer.row_quantize import (
    ReadVector,
    choose_lanes,
    emit_codes,
    emit_extreme,
    emit_scale,
)
from relayquant.codegen.kernels.isa.base import fence

#: Partial sums of a row.
SUM_LANES = 32
#: Most rows that are processed together, and most elements of them.
MOST_ROWS, BLOCK_ELEMENTS = 16, 1024
#: Multiply-adds that take as long as one element.
NORM_COST = 40


@dataclass(frozen=True)
class RowNorm:
    """Norms along rows of `features`.

    Attributes:
        leading: The extents before the last axis, None for an extent known only at run time.
        features: Elements of a row.
        epsilon: Number that is added to the mean of the squares.
        is_centred: Whether the mean is subtracted, as a layer norm does.
        divides: Whether to divide by the root instead of multiplying by its inverse.
        weight: Whether results are multiplied by a weight (features,).
        bias: Whether a bias (features,) is added.
        is_sum: Whether x is the sum of two tensors.
        keeps_sum: Whether this sum is stored.
        keeps_result: Whether the floats are stored.
        rows: The leading extents of the integers, if rows are quantized. The number of rows is the
            same as in x.
    """

    leading: tuple[int | None, ...]
    features: int
    epsilon: float
    is_centred: bool = False
    divides: bool = False
    weight: bool = True
    bias: bool = False
    is_sum: bool = False
    keeps_sum: bool = False
    keeps_result: bool = True
    rows: tuple[int | None, ...] | None = None

    @property
    def block_rows(self) -> int:
        """Number of rows that are processed together. They stay in the first-level cache."""
        return max(1, min(MOST_ROWS, BLOCK_ELEMENTS // self.features))


def make_row_norm(spec: RowNorm, name: str = "row_norm") -> PrimFunc:
    """Make PrimFunc(x (*leading, K)[, addend (*leading, K)][, weight (K,)][, bias (K,)][, sum
    (*leading, K)][, y (*leading, K)][, q int8 (*rows, K), scale float32 (*rows, 1)]).

    Arguments that the specification does not have are left out.
    """

    def body() -> None:
        width = spec.features
        extents = name_extents(spec.leading)
        count = prod(extents)

        def declare(name: str, shape: list[Expr], size: Expr, dtype: str = "float32") -> Buffer:
            buffer = T.arg(name, T.Buffer(tuple(shape), dtype))
            return buffer, size

        def view(declared: tuple[Buffer, Expr] | None) -> Buffer:
            if declared is None:
                return None
            buffer, size = declared
            return T.decl_buffer((size,), buffer.dtype, data=buffer.data)

        def declare_rows(name: str, is_there: bool) -> tuple[Buffer, Expr] | None:
            return declare(name, [*extents, width], count * width) if is_there else None

        data, addend = declare_rows("x", True), declare_rows("addend", spec.is_sum)
        weight = declare("weight", [width], width) if spec.weight else None
        bias = declare("bias", [width], width) if spec.bias else None
        total = declare_rows("sum", spec.keeps_sum)
        result = declare_rows("y", spec.keeps_result)
        codes = scale = None
        if spec.rows is not None:
            outer = extents
            if spec.rows != spec.leading:
                outer = name_extents(spec.rows)
            codes = declare("q", [*outer, width], count * width, "int8")
            scale = declare("scale", [*outer, 1], count)
        rows = Rows(spec, *map(view, (data, addend, weight, bias, total, result, codes, scale)))
        block = spec.block_rows

        def emit(index: Expr) -> None:
            first = T.bind(index * block)
            rows.emit_block(first, T.bind(T.min(count - first, block)))

        blocks = ceil_div(count, block)
        emit_shared_loop(blocks, count * (width * NORM_COST) >= PARALLEL_THRESHOLD, emit)

    return build_kernel(name, body)


@dataclass(frozen=True, eq=False)
class Rows:
    """Flat views of a kernel's arguments. None for arguments that the kernel does not have."""

    spec: RowNorm
    x: Buffer
    addend: Buffer | None
    weight: Buffer | None
    bias: Buffer | None
    sum: Buffer | None
    y: Buffer | None
    q: Buffer | None
    scale: Buffer | None

    def emit_block(self, first: Expr, count: Expr) -> None:
        """Emit `count` rows from `first` on, step by step.

        While a row waits for its sums, its root and its scale, the processor works on the next row.
        Floats that are not stored are computed twice: for the scale, and for the codes.
        """
        spec, size = self.spec, self.spec.block_rows
        width, lanes = spec.features, choose_lanes(spec.features)
        centres, factors, steps = alloc_vectors(3, size, "float32")

        def read_first(row: Expr, at: Expr, count: int) -> Expr:
            start = (first + row) * width + at
            value = load_vector(self.x, start, count)
            if self.addend is not None:
                value = T.bind(value + load_vector(self.addend, start, count))
            if self.sum is not None:
                store_vector(self.sum, value, start, count)
            return value

        def read(row: Expr, at: Expr, count: int) -> Expr:
            if self.sum is None:
                value = read_first(row, at, count)
            else:
                value = load_vector(self.sum, (first + row) * width + at, count)
            return value - broadcast(centres[row], count) if spec.is_centred else value

        def read_square(row: Expr, at: Expr, count: int) -> Expr:
            value = (read if spec.is_centred else read_first)(row, at, count)
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
                T.buffer_store(centres, emit_mean(partial(read_first, row), width), [row])
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
    """Emit the mean of a row.

    It is fenced: LLVM turns a division by a power of two into a product, and would contract it with
    a sum after it.
    """
    return T.bind(fence(emit_row_sum(read, width) / T.float32(width), 1))


def emit_row_sum(read: ReadVector, width: int) -> Expr:
    """Emit the sum of a row, in the specified order."""
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
