"""Specification of a product with a transposed second operand -> its kernel.

Attention scores are products of this kind.

    y[b, m, n] = sum_k x[b, m, k] * w[b, n, k]

Both operands are read along k in place. Each result is a dot product in vectors; nothing is
transposed or packed. M, N and b may be symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    build_kernel,
    constant,
    emit_shared_loop,
    fold_lanes,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import (
    PARALLEL_MACS,
    Buffer,
    Expr,
    FloatIsa,
    declare_arguments,
    static,
)

#: Rows and columns of a tile: each step loads 8 vectors for 16 products; with few registers 6 for
#: 8.
TILE, SMALL_TILE = (4, 4), (2, 4)
#: Columns of a tile with a single row.
ROW_COLUMNS = 8
#: For a static number of rows up to this, no tile of several rows is generated.
FEW_ROWS = 1


@dataclass(frozen=True)
class FloatDots:
    """Product of x (*batch, M, K) and w, whose axes in the order `order` are (*batch, K, N).

    K is the last axis of w in memory.
    """

    batch: tuple[Any, ...]
    rows: Any
    inner: int
    outputs: Any
    order: tuple[int, ...]

    @property
    def weight_shape(self) -> tuple[Any, ...]:
        """Extents of w in memory order."""
        extents = (*self.batch, self.inner, self.outputs)
        return tuple(extents[self.order.index(axis)] for axis in range(len(extents)))

    @property
    def strides(self) -> tuple[Any, ...]:
        """Strides of w in elements along (*batch, K, N)."""
        steps: list[Any] = [1]
        for extent in reversed(self.weight_shape[1:]):
            steps.insert(0, steps[0] * extent)
        return tuple(steps[axis] for axis in self.order)

    @property
    def count(self) -> Any:
        """Number of products: the batch extents multiplied."""
        total: Any = 1
        for extent in self.batch:
            total = total * extent
        return total


def make_dots(spec: FloatDots, isa: FloatIsa, name: str = "float_dots") -> PrimFunc:
    """Make PrimFunc(x, w, y)."""
    isa = isa.narrow(spec.inner)
    rows, inner, outputs = spec.rows, spec.inner, spec.outputs
    *batch_strides, _, column_stride = spec.strides
    known = static(rows)
    height, width = TILE if isa.accumulators >= 24 else SMALL_TILE
    if known is not None and known <= FEW_ROWS:
        height, width = known, ROW_COLUMNS

    def body() -> None:
        x, weight, y = declare_arguments(
            ("x", (*spec.batch, rows, inner)),
            ("w", spec.weight_shape),
            ("y", (*spec.batch, rows, outputs)),
        )

        def emit_product(batch: Expr) -> None:
            base = find_start(batch, spec.batch, batch_strides)

            def emit_rows(first_row: Expr, count: int) -> None:
                members = [T.bind(batch * rows + (first_row + row)) for row in range(count)]

                def emit_columns(first: Expr, columns: int) -> None:
                    starts = [base + (first + c) * column_stride for c in range(columns)]
                    emit_dots(
                        isa,
                        inner,
                        (x, [row * inner for row in members]),
                        (weight, starts),
                        (y, [row * outputs + first for row in members]),
                    )

                loop_over_blocks(outputs, width, emit_columns)

            loop_over_blocks(rows, height, emit_rows)

        macs = spec.count * rows * outputs * inner
        emit_shared_loop(spec.count, macs >= PARALLEL_MACS, emit_product)

    return build_kernel(name, body)


def find_start(index: Expr, extents: tuple[Any, ...], strides: list[Any]) -> Expr:
    """Return the offset of product `index`, in C order, of a batch whose axes have `strides`."""
    start: Any = 0
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        start = start + T.floormod(index, extent) * stride
        index = T.floordiv(index, extent)
    return T.bind(start) if extents else 0


def loop_over_blocks(total: Any, size: int, emit: Callable[[Expr, int], None]) -> None:
    """Call emit(first, count) for blocks of `size` members, then for the rest one by one."""
    known = static(total)
    blocks = T.floordiv(total, size) if known is None else known // size
    if known is None or known >= size:
        with T.serial(blocks) as block:
            emit(block * size, size)
    if size > 1 and (known is None or known % size):
        with T.serial(total - blocks * size) as rest:
            emit(blocks * size + rest, 1)


def emit_dots(
    isa: FloatIsa,
    inner: int,
    left: tuple[Buffer, list[Expr]],
    right: tuple[Buffer, list[Expr]],
    target: tuple[Buffer, list[Expr]],
) -> None:
    """Emit dot products of rows at offsets of `left` with rows at offsets of `right`.

    The results of a row of `left` are stored next to each other from an offset of `target` on.
    """
    lanes, (x, rows), (w, columns), (y, results) = isa.lanes, left, right, target
    slots = [(r, c) for r in range(len(rows)) for c in range(len(columns))]
    sums = alloc_vectors(len(slots), lanes, "float32")
    for total in sums:
        store_vector(total, constant("float32", 0, lanes), 0, lanes)
    whole = inner // lanes
    with T.serial(whole) as step:
        for total, (r, c) in zip(sums, slots, strict=True):
            product = load_vector(x, rows[r] + step * lanes, lanes) * load_vector(
                w, columns[c] + step * lanes, lanes
            )
            store_vector(total, load_vector(total, 0, lanes) + product, 0, lanes)
    for total, (r, c) in zip(sums, slots, strict=True):
        value = fold_lanes(load_vector(total, 0, lanes), lanes, add)
        for k in range(whole * lanes, inner):
            value = value + x[rows[r] + k] * w[columns[c] + k]
        T.buffer_store(y, value, [results[r] + c])
