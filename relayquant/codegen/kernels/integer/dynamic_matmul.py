"""Specification of a batched product of activations of run-time sizes -> its kernel, as TIR.

    y[b, m, n] = epilogue(sum_k (x[b, m, k] - z_x) * (w[b, n, k] - z_w))

Batch, rows, columns and the inner extent may all be unknown, as in the attention of a transformer
that takes texts of any length. A product is made of blocks of known columns and inner extent, which
the kernel of a dense layer computes for any number of rows (`dynamic_rows`), on a matrix unit where
there is one. Each block is copied, filled up with zero points, which add nothing to a sum, and
packed (`matmul`). Threads share the images and their chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_THRESHOLD,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    declare_argument,
    emit_shared_loop,
    emit_sum,
    emit_vector_loop,
    flat_view,
    load_vector,
    settle,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.dynamic_rows import RowsPlan, emit_known_rows, plan_rows
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, emit_packed_operand
from relayquant.codegen.kernels.integer.operands import Operands
from relayquant.codegen.kernels.integer.specs import Dense
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.unit_permission import ask_permission

#: Rows of a chunk, which share the packed blocks.
CHUNK_ROWS = 256
#: Columns and inner extent of a block where they are unknown or more than `MOST_COLS`,
#: `MOST_INNER`.
BLOCK_COLS, BLOCK_INNER = 64, 128
MOST_COLS, MOST_INNER = 128, 512

SUMS = Epilogue(Store.ACCUMULATOR, "int32")


@dataclass(frozen=True)
class DynamicMatmul:
    """x (B, M, K) times the transpose of w (B, N, K), as `BatchMatmul`; None: of the run time."""

    cols: int | None
    inner: int | None
    x_dtype: str = "uint8"
    x_zero_point: int = 0
    w_dtype: str = "int8"
    w_zero_point: int = 0
    multiplier: float = 1.0
    epilogue: Epilogue = field(default_factory=Epilogue)
    w_heads: int | None = None  #: as in `BatchMatmul`
    sum_dtype: str = "int32"  #: or int64: those of a block fit int32, those of all may not

    def __post_init__(self) -> None:
        if self.epilogue.residual is not None:
            raise ValueError("DynamicMatmul: the epilogue has a residual; allowed: none.")
        if self.sum_dtype not in ("int32", "int64"):
            raise ValueError(
                f"DynamicMatmul: sum_dtype is {self.sum_dtype!r}; allowed: int32, int64."
            )

    @property
    def block(self) -> BatchMatmul:
        """One block, whose sums are stored."""
        is_narrow = self.cols is not None and self.cols <= MOST_COLS
        is_short = self.inner is not None and self.inner <= MOST_INNER
        return BatchMatmul(
            batch=1,
            rows=CHUNK_ROWS,
            cols=self.cols if is_narrow and self.cols else BLOCK_COLS,
            inner=self.inner if is_short and self.inner else BLOCK_INNER,
            x_dtype=self.x_dtype,
            x_zero_point=self.x_zero_point,
            w_dtype=self.w_dtype,
            w_zero_point=self.w_zero_point,
            epilogue=SUMS,
            w_heads=None if self.w_heads is None else 1,
        )


@dataclass(frozen=True)
class Sizes:
    """Extents of the operands: constants, or of the run time."""

    batch: Expr
    rows: Expr
    cols: Expr
    inner: Expr


def build_dynamic_matmul(
    spec: DynamicMatmul,
    isa: Isa,
    name: str,
    x_shape: Sequence[int | None],
    w_shape: Sequence[int | None],
    y_shape: Sequence[int | None],
) -> PrimFunc:
    """Make PrimFunc(x, w, y) for shapes (*, M, K), as `BatchMatmul.w_shape`, (*, M, N).

    None is an extent of the run time.
    """

    def body() -> None:
        arguments = [
            declare_argument(*each)
            for each in (
                ("x", x_shape, spec.x_dtype),
                ("w", w_shape, spec.w_dtype),
                ("y", y_shape, spec.epilogue.dtype),
            )
        ]
        x, w, out = (flat_view(buffer) for buffer in arguments)
        x_sizes, y_sizes = list(arguments[0].shape), list(arguments[2].shape)
        sizes = Sizes(prod(x_sizes[:-2]), x_sizes[-2], y_sizes[-1], x_sizes[-1])
        block = spec.block
        dense = Dense(CHUNK_ROWS, block.inner, block.cols, spec.x_dtype, spec.x_zero_point, SUMS)
        plan = plan_rows(dense, isa, packs_later=True)
        may_use = False if plan.tiled is None else ask_permission(plan.tiled.unit)
        batch, rows, cols, inner = settle(sizes.batch, sizes.rows, sizes.cols, sizes.inner)
        sizes = Sizes(
            batch,
            rows,
            cols if spec.cols is None else T.int64(spec.cols),
            inner if spec.inner is None else T.int64(spec.inner),
        )
        (chunks,) = settle(ceil_div(rows, CHUNK_ROWS))

        def emit_chunk(index: Expr) -> None:
            image, chunk = settle(T.floordiv(index, chunks), T.floormod(index, chunks))
            (first,) = settle(chunk * CHUNK_ROWS)
            (count,) = settle(T.min(T.int64(CHUNK_ROWS), rows - first))
            emit_blocks(Chunk(spec, sizes, plan, may_use, x, w, out, image, first, count))

        macs = batch * rows * sizes.cols * sizes.inner
        emit_shared_loop(batch * chunks, macs >= PARALLEL_THRESHOLD, emit_chunk)

    return build_kernel(name, body)


@dataclass(frozen=True)
class Chunk:
    """Some rows of one image, from `first` on, and what computes them."""

    spec: DynamicMatmul
    sizes: Sizes
    plan: RowsPlan
    may_use: Expr | bool  #: the matrix unit
    x: Buffer
    w: Buffer
    out: Buffer
    image: Expr
    first: Expr
    count: Expr


def emit_blocks(chunk: Chunk) -> None:
    """Emit all blocks of columns of a chunk, each with all blocks of the inner extent."""
    spec, sizes, block = chunk.spec, chunk.sizes, chunk.spec.block
    width, depth = block.cols, block.inner
    sums = alloc_workspace(CHUNK_ROWS * width, spec.sum_dtype)
    # An inner extent of 0, as of an empty context, is one block of zero points: the sums are 0.
    col_blocks, inner_blocks = settle(
        ceil_div(sizes.cols, width),
        ceil_div(T.max(sizes.inner, T.int64(1)), depth),
    )
    is_one = spec.inner == depth and spec.sum_dtype == "int32"
    part = sums if is_one else alloc_workspace(CHUNK_ROWS * width, "int32")
    with T.serial(col_blocks) as col_block, T.serial(inner_blocks) as inner_block:
        left, start = settle(col_block * width, inner_block * depth)
        rows = emit_rows_copy(chunk, start)
        weight, bias = emit_packed_operand(
            block, chunk.plan.full, emit_weight_copy(chunk, left, start), threads=False
        )
        operands = Operands(rows, weight, bias, None, None, part)
        emit_known_rows(chunk.plan, operands, chunk.count, chunk.may_use)
        emit_row_terms(chunk, rows, part)
        if part is not sums:
            with T.If(inner_block == 0):
                with T.Then():
                    emit_moved(chunk, part, sums, adds=False)
                with T.Else():
                    emit_moved(chunk, part, sums, adds=True)
        with T.If(inner_block == inner_blocks - 1), T.Then():
            emit_block_results(chunk, sums, left)


def emit_rows_copy(chunk: Chunk, start: Expr) -> Buffer:
    """Emit a copy of the chunk's rows of x, from element `start` of each on."""
    sizes, depth = chunk.sizes, chunk.spec.block.inner
    copy = alloc_workspace(CHUNK_ROWS * depth + COPY_BYTES, chunk.x.dtype)
    with T.serial(chunk.count) as row:
        source = (chunk.image * sizes.rows + chunk.first + row) * sizes.inner + start
        emit_line(
            chunk.x, source, copy, row * depth, depth, sizes.inner - start, chunk.spec.x_zero_point
        )
    return copy


def emit_weight_copy(chunk: Chunk, left: Expr, start: Expr) -> Buffer:
    """Emit a copy of the block of w from channel `left` and element `start` on."""
    spec, sizes, block = chunk.spec, chunk.sizes, chunk.spec.block
    zero = spec.w_zero_point
    copy = alloc_workspace(block.cols * block.inner, chunk.w.dtype)
    if spec.w_heads is None:
        lines, width, known = block.cols, block.inner, sizes.inner - start

        def locate(line: Expr) -> Expr:
            return (chunk.image * sizes.cols + left + line) * sizes.inner + start

        (end,) = settle(sizes.cols - left)
    else:
        lines, width, known = block.inner, block.cols, sizes.cols - left
        heads = spec.w_heads
        outer, head = settle(T.floordiv(chunk.image, heads), T.floormod(chunk.image, heads))

        def locate(line: Expr) -> Expr:
            row = (outer * sizes.inner + start + line) * heads + head
            return row * sizes.cols + left

        (end,) = settle(sizes.inner - start)
    with T.serial(lines) as line, T.If(line < end):
        with T.Then():
            emit_line(chunk.w, locate(line), copy, line * width, width, known, zero)
        with T.Else():
            emit_fill(copy, line * width, width, zero)
    return copy


def emit_line(
    source: Buffer, begin: Expr, copy: Buffer, at: Expr, width: int, known: Expr, zero: int
) -> None:
    """Emit a copy of `width` bytes, of which `known` exist. The others become `zero`."""

    def move(offset: Expr, lanes: int) -> None:
        store_vector(copy, load_vector(source, begin + offset, lanes), at + offset, lanes)

    with T.If(known >= width):
        with T.Then():
            emit_vector_loop(width, COPY_BYTES, move)
        with T.Else():
            emit_fill(copy, at, width, zero)
            with T.serial(known) as i:
                move(i, 1)


def emit_fill(copy: Buffer, at: Expr, width: int, zero: int) -> None:
    """Emit `width` bytes of the zero point."""

    def store(offset: Expr, lanes: int) -> None:
        store_vector(copy, constant(copy.dtype, zero, lanes), at + offset, lanes)

    emit_vector_loop(width, COPY_BYTES, store)


def emit_row_terms(chunk: Chunk, rows: Buffer, sums: Buffer) -> None:
    """Emit -z_w * sum_k x[m, k], added to all sums of a row of the block.

    Bytes that the dot product takes with the top bit flipped are shifted by 128.
    """
    spec, block, plan = chunk.spec, chunk.spec.block, chunk.plan.full
    zero = spec.w_zero_point - (128 if spec.w_dtype == "uint8" else 0)
    if not zero:
        return
    with T.serial(chunk.count) as row:
        total = emit_sum(rows, row * block.inner, block.inner)
        term = T.bind((total + T.int32(block.inner * plan.shift)) * T.int32(-zero))

        def add(offset: Expr, lanes: int, row: Expr = row, term: Expr = term) -> None:
            at = row * block.cols + offset
            value = load_vector(sums, at, lanes) + broadcast(term, lanes)
            store_vector(sums, value, at, lanes)

        emit_apart(block.cols, plan.isa.lanes, add)


def emit_moved(chunk: Chunk, part: Buffer, sums: Buffer, *, adds: bool) -> None:
    """Emit sums = part, or sums += part, of all rows of the chunk."""
    width, lanes = chunk.spec.block.cols, chunk.plan.full.isa.lanes
    with T.serial(chunk.count) as row:

        def move(offset: Expr, lanes: int, row: Expr = row) -> None:
            at = row * width + offset
            value = T.Cast(vector(sums.dtype, lanes), load_vector(part, at, lanes))
            if adds:
                value = value + load_vector(sums, at, lanes)
            store_vector(sums, value, at, lanes)

        # Neighbours must not overlap: what is added twice is wrong.
        emit_apart(width, lanes, move)


def emit_apart(size: int, lanes: int, body: Callable[[Expr, int], None]) -> None:
    """Call `body(offset, lanes)` so that it covers 0 .. size once."""
    offset = 0
    while lanes and offset < size:
        count = (size - offset) // lanes
        if count:
            with T.serial(count) as i:
                body(offset + i * lanes, lanes)
            offset += count * lanes
        lanes //= 2


def emit_block_results(chunk: Chunk, sums: Buffer, left: Expr) -> None:
    """Emit the store of the sums of a block through the epilogue."""
    spec, sizes, width = chunk.spec, chunk.sizes, chunk.spec.block.cols
    (known,) = settle(T.min(T.int64(width), sizes.cols - left))
    with T.serial(chunk.count) as row:
        (target,) = settle((chunk.image * sizes.rows + chunk.first + row) * sizes.cols + left)

        def store(offset: Expr, lanes: int, row: Expr = row, target: Expr = target) -> None:
            factors = []
            if spec.epilogue.has_multiplier:
                factors = [constant("float32", spec.multiplier, lanes)]
            value = load_vector(sums, row * width + offset, lanes)
            store_vector(
                chunk.out, spec.epilogue.emit(value, factors, None, lanes), target + offset, lanes
            )

        with T.If(known == width):
            with T.Then():
                emit_vector_loop(width, chunk.plan.full.isa.lanes, store)
            with T.Else(), T.serial(known) as i:
                store(i, 1)
