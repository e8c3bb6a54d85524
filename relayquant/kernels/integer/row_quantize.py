"""Rows of float32 -> int8 and a scale for each row, in one pass over memory, as TIR.

scale = max(|row|) / 127, or 1 for a row of zeros;  q = rint(x / scale)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    broadcast,
    build_kernel,
    constant,
    emit_vector_loop,
    load_vector,
    store_vector,
    vector,
)
from relayquant.kernels.isa.base import Expr

#: Largest magnitude of a result.
ROW_LIMIT = 127
#: Elements that are worked on at once; LLVM splits them where registers are narrower.
LANES = 16
#: Multiply-adds that take as long as one element.
ELEMENT_COST = 8


@dataclass(frozen=True)
class RowQuantize:
    """Rows of `features`; `leading` are the extents before, None where known at run time."""

    leading: Sequence[int | None]
    features: int


def build_quantize_rows(spec: RowQuantize, name: str = "quantize_rows") -> PrimFunc:
    """PrimFunc(x float32 (*leading, K), q int8 (*leading, K), scale float32 (*leading, 1))."""

    def body() -> None:
        extents = [T.int64() if extent is None else extent for extent in spec.leading]
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
        lanes = min(LANES, 1 << (width.bit_length() - 1))

        def emit_row(row: Expr) -> None:
            (largest,) = alloc_vectors(1, lanes, "float32")
            store_vector(largest, constant("float32", 0, lanes), 0, lanes)

            def compare(at: Expr, count: int) -> None:
                value = T.abs(load_vector(x, row * width + at, count))
                store_vector(largest, T.max(load_vector(largest, 0, lanes), value), 0, lanes)

            emit_vector_loop(width, lanes, compare)
            value = load_vector(largest, 0, lanes)
            if lanes > 1:
                reduction = f"llvm.vector.reduce.fmax.v{lanes}f32"
                value = T.call_llvm_pure_intrin(reduction, value, dtype="float32")
            limit = T.float32(ROW_LIMIT)
            step = T.bind(T.Select(value > T.float32(0), value / limit, T.float32(1)))
            T.buffer_store(scale, step, [row])

            def convert(at: Expr, count: int) -> None:
                level = load_vector(x, row * width + at, count) / broadcast(step, count)
                high = constant("float32", ROW_LIMIT, count)
                level = T.max(T.min(T.nearbyint(level), high), -high)
                integers = T.Cast(vector("int8", count), T.Cast(vector("int32", count), level))
                store_vector(q, integers, row * width + at, count)

            emit_vector_loop(width, lanes, convert)

        with T.If(rows * (width * ELEMENT_COST) >= PARALLEL_THRESHOLD):
            with T.Then(), T.parallel(rows) as row:
                emit_row(row)
            with T.Else(), T.serial(rows) as row:
                emit_row(row)

    return build_kernel(name, body)
