"""New rows of attention -> kernels: rotary positions, and the rows' places in a cache.

Rows are (B, R, heads, D), a cache is (B, heads, L, D). Row t of sequence b stands at position
positions[b] + t. R may be known only at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.attention.halves import store_numbers
from relayquant.codegen.kernels.emit import (
    PARALLEL_BYTES,
    build_kernel,
    emit_shared_loop,
    emit_vector_loop,
    flat_view,
    load_vector,
    name_extents,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa

#: Extents of rows (B, R, heads, D), None if known at run time. Heads and D are known.
Extents = tuple[int | None, int | None, int, int]


@dataclass(frozen=True)
class Rotate:
    """Rotation of the first 2 * `half` elements of rows.

    `length` is the number of positions of the tables.
    """

    extents: Extents
    length: int
    half: int


@dataclass(frozen=True)
class UpdateCache:
    """Rows that are written into a cache of `length` rows for each sequence and head.

    `in_place`: whether the cache is changed. Otherwise the result is a changed copy.
    """

    extents: Extents
    length: int
    dtype: str
    in_place: bool


def make_rotate(spec: Rotate, isa: FloatIsa) -> PrimFunc:
    """Make PrimFunc(x (B, R, H, D), cos (L, half), sin (L, half), positions (B,), y as x)."""

    def body() -> None:
        batch, rows, heads, width = extents = name_extents(spec.extents)
        table = (spec.length, spec.half)
        arguments = [
            T.arg("x", T.Buffer(tuple(extents), "float32")),
            T.arg("cos", T.Buffer(table, "float32")),
            T.arg("sin", T.Buffer(table, "float32")),
            T.arg("positions", T.Buffer((batch,), "int32")),
            T.arg("y", T.Buffer(tuple(extents), "float32")),
        ]
        x, cos, sin, positions, y = map(flat_view, arguments)

        def emit_row(index: Expr) -> None:
            place = place_row(positions, index, rows)
            place = T.bind(T.max(T.min(place, T.int64(spec.length - 1)), T.int64(0)))
            with T.serial(heads) as head:
                start = (index * heads + head) * width
                emit_rotation(x, start, y, start, cos, sin, place, spec.half, isa)
                copy = copy_numbers(x, start + 2 * spec.half, y, start + 2 * spec.half)
                if width > 2 * spec.half:
                    emit_vector_loop(width - 2 * spec.half, isa.lanes, copy)

        is_worth = batch * rows * (heads * width * 4) >= PARALLEL_BYTES
        emit_shared_loop(batch * rows, is_worth, emit_row)

    return build_kernel("rotate", body)


def place_row(positions: Buffer, index: Expr, rows: Expr) -> Expr:
    """Emit the position of row `index` of all sequences' rows: int64."""
    first = T.Cast("int64", positions[T.floordiv(index, rows)])
    return T.bind(first + T.Cast("int64", T.floormod(index, rows)))


def copy_numbers(x: Buffer, start: Expr, y: Buffer, first: Expr) -> Callable[[Expr, int], None]:
    """Return what copies elements, for `emit_vector_loop`."""

    def copy(at: Expr, lanes: int) -> None:
        store_vector(y, load_vector(x, start + at, lanes), first + at, lanes)

    return copy


def emit_rotation(
    x: Buffer,
    start: Expr,
    y: Buffer,
    first: Expr,
    cos: Buffer,
    sin: Buffer,
    place: Expr,
    half: int,
    isa: FloatIsa,
) -> None:
    """Emit the rotation of 2 * `half` elements at `start` of x by the angles of a position."""

    def rotate(at: Expr, lanes: int) -> None:
        low, high = (T.bind(load_vector(x, start + k + at, lanes)) for k in (0, half))
        cosine, sine = (T.bind(load_vector(t, place * half + at, lanes)) for t in (cos, sin))
        store_vector(y, low * cosine - high * sine, first + at, lanes)
        store_vector(y, high * cosine + low * sine, first + half + at, lanes)

    if half:
        emit_vector_loop(half, isa.lanes, rotate)


def make_update_cache(spec: UpdateCache, isa: FloatIsa) -> PrimFunc:
    """Make PrimFunc(rows, positions, cache), or PrimFunc(rows, positions, cache, y).

    The last argument (B, heads, L, D) gets the rows. Without `in_place` it gets the cache before.
    """

    def body() -> None:
        batch, rows, heads, width = extents = name_extents(spec.extents)
        shape, kind = (batch, heads, spec.length, width), spec.dtype
        arguments = [
            T.arg("rows", T.Buffer(tuple(extents), "int8" if kind == "int8" else "float32")),
            T.arg("positions", T.Buffer((batch,), "int32")),
            T.arg("cache", T.Buffer(shape, kind)),
        ]
        if not spec.in_place:
            arguments.append(T.arg("y", T.Buffer(shape, kind)))
        x, positions, cache, *others = map(flat_view, arguments)
        target = others[0] if others else cache
        size = spec.length * width
        if others:

            def emit_copy(line: Expr) -> None:
                copy = copy_numbers(cache, line * size, target, line * size)
                emit_vector_loop(size, isa.lanes, copy)

            emit_shared_loop(batch * heads, batch * (heads * size) >= PARALLEL_BYTES, emit_copy)

        def emit_row(index: Expr) -> None:
            place = place_row(positions, index, rows)
            sequence = T.floordiv(index, rows)
            is_inside = T.And(place >= T.int64(0), place < T.int64(spec.length))
            with T.If(is_inside), T.Then(), T.serial(heads) as head:
                start = (index * heads + head) * width
                first = ((sequence * heads + head) * spec.length + place) * width
                emit_stores(x, start, target, first, width, isa)

        is_worth = batch * rows * (heads * width * 4) >= PARALLEL_BYTES
        emit_shared_loop(batch * rows, is_worth, emit_row)

    return build_kernel("update_cache", body)


def emit_stores(
    x: Buffer, start: Expr, cache: Buffer, first: Expr, width: int, isa: FloatIsa
) -> None:
    """Emit the copy of one row of a head into a cache, rounded to its dtype."""

    def store(at: Expr, lanes: int) -> None:
        store_numbers(cache, load_vector(x, start + at, lanes), first + at, lanes, isa)

    emit_vector_loop(width, isa.lanes, store)
