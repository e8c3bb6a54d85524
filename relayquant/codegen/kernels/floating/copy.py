"""Copies of float values into some columns of a wider tensor: a part of a concatenation."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_BYTES,
    build_kernel,
    emit_vector_loop,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import FloatIsa, declare_arguments, static


@dataclass(frozen=True)
class FloatCopy:
    """A copy of `shape` (..., C) into `columns` (first, count) of a tensor of `count` columns; the
    leading extents may be symbolic.
    """

    shape: tuple[Any, ...]
    columns: tuple[int, int]


def make_copy(spec: FloatCopy, isa: FloatIsa, name: str = "float_copy") -> PrimFunc:
    """PrimFunc(x, y), callable through `call_tir`; other columns of y stay as they are."""
    (*leading, width), (first, pitch) = spec.shape, spec.columns
    rows: Any = 1
    for extent in leading:
        known = static(extent)
        rows = rows * (extent if known is None else known)

    def body() -> None:
        x, y = declare_arguments(("x", spec.shape), ("y", (*leading, pitch)))
        size = prod(static(extent) or 1 for extent in spec.shape)
        with (T.parallel if size * 4 >= PARALLEL_BYTES else T.serial)(rows) as row:
            emit_vector_loop(
                width,
                isa.lanes,
                lambda at, lanes: store_vector(
                    y, load_vector(x, row * width + at, lanes), row * pitch + first + at, lanes
                ),
            )

    return build_kernel(name, body)
