"""Rows of float32 -> kernel that makes int8 and a scale for each row, in one pass over memory.

    scale = max(|row|) / 127;  q = rint(x / scale)

The scale is 1 if this quotient is 0: for a row of zeros, or of numbers so small that float32 has
no 127th of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    broadcast,
    build_kernel,
    constant,
    emit_shared_loop,
    emit_vector_loop,
    fold_lanes,
    load_vector,
    name_extents,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr

#: Largest magnitude of a result.
ROW_LIMIT = 127
#: Elements that are processed at once. LLVM splits them if registers are narrower.
LANES = 16
#: Multiply-adds that take as long as one element.
ELEMENT_COST = 8

#: read(position in the row, elements) returns a vector of float32
ReadVector = Callable[[Expr, int], Expr]


@dataclass(frozen=True)
class RowQuantize:
    """Quantization of rows of `features`.

    `leading` are the extents before, None if known at run time.
    """

    leading: Sequence[int | None]
    features: int


def build_quantize_rows(spec: RowQuantize) -> PrimFunc:
    """Make PrimFunc(x float32 (*leading, K), q int8 (*leading, K), scale float32 (*leading, 1))."""

    def body() -> None:
        extents = name_extents(spec.leading)
        rows, width = prod(extents), spec.features
        arguments = [
            T.arg("x", T.Buffer((*extents, width), "float32")),
            T.arg("q", T.Buffer((*extents, width), "int8")),
            T.arg("scale", T.Buffer((*extents, 1), "float32")),
        ]
        x, q, scale = (
            T.decl_buffer((rows * size,), buffer.dtype, data=buffer.data)
            for buffer, size in zip(arguments, (width, width, 1), strict=True)
        )
        lanes = choose_lanes(width)

        def emit_row(row: Expr) -> None:
            start = row * width

            def read(at: Expr, count: int) -> Expr:
                return load_vector(x, start + at, count)

            step = emit_scale(emit_extreme(read, width, lanes), scale, row)
            emit_codes(read, width, lanes, step, q, start)

        emit_shared_loop(rows, rows * (width * ELEMENT_COST) >= PARALLEL_THRESHOLD, emit_row)

    return build_kernel("quantize_rows", body)


def choose_lanes(width: int) -> int:
    """Choose how many elements of a row are processed at once."""
    return min(LANES, 1 << (width.bit_length() - 1))


def emit_extreme(read: ReadVector, width: int, lanes: int) -> Expr:
    """Emit max(|row|). `read` is called for each element of a row at least once."""
    (largest,) = alloc_vectors(1, lanes, "float32")
    store_vector(largest, constant("float32", 0, lanes), 0, lanes)

    def compare(at: Expr, count: int) -> None:
        value = T.abs(read(at, count))
        store_vector(largest, T.max(load_vector(largest, 0, lanes), value), 0, lanes)

    emit_vector_loop(width, lanes, compare)
    # Not llvm.vector.reduce.fmax, which handles NaN and therefore takes one lane after the other.
    return T.bind(fold_lanes(load_vector(largest, 0, lanes), lanes, T.max))


def emit_scale(largest: Expr, scale: Buffer, row: Expr) -> Expr:
    """Store the scale of a row, and return it."""
    quotient = T.bind(largest / T.float32(ROW_LIMIT))
    step = T.bind(T.Select(quotient > T.float32(0), quotient, T.float32(1)))
    T.buffer_store(scale, step, [row])
    return step


def emit_codes(
    read: ReadVector, width: int, lanes: int, step: Expr, q: Buffer, start: Expr
) -> None:
    """Store the integers of a row from `start` on."""

    def convert(at: Expr, count: int) -> None:
        level = read(at, count) / broadcast(step, count)
        high = constant("float32", ROW_LIMIT, count)
        level = T.max(T.min(T.nearbyint(level), high), -high)
        integers = T.Cast(vector("int8", count), T.Cast(vector("int32", count), level))
        store_vector(q, integers, start + at, count)

    emit_vector_loop(width, lanes, convert)
