"""Convolution of integers over images whose size is known only at run time -> its kernel.

    y[m] = epilogue(bias + window[m] @ w)          m = all places of all images

The other kernels are planned for one height and width. Here the windows of some places are copied
next to one another, and multiplied as the rows of a dense layer. The copies stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_THRESHOLD,
    alloc_workspace,
    build_kernel,
    declare_argument,
    flat_view,
)
from relayquant.codegen.kernels.integer.dynamic_rows import (
    declare_constants,
    emit_known_rows,
    plan_rows,
)
from relayquant.codegen.kernels.integer.operands import Operands
from relayquant.codegen.kernels.integer.specs import Dense
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.unit_permission import ask_permission
from relayquant.codegen.kernels.windows import ConvWindows, WindowParts, declare_windows


@dataclass(frozen=True)
class FreeConv2d:
    """x (N, H, W, C), weights (O, KH * KW * C) of `dense` -> y (N, OH, OW, O).

    `dense.rows` does not matter.
    """

    windows: ConvWindows
    dense: Dense


def build_free_conv2d(spec: FreeConv2d, isa: Isa, name: str) -> PrimFunc:
    """Make PrimFunc(x, weight, bias[, multiplier][, residual], y). `pack_dense_rows` makes weight,
    bias and multiplier.
    """
    plan = plan_rows(spec.dense, isa)
    full, epilogue, outputs = plan.full, spec.dense.epilogue, spec.dense.out_features

    def body() -> None:
        x = declare_windows(spec.windows)
        constants, residual = declare_constants(full), None
        shape = (*spec.windows.places, outputs)
        if epilogue.residual:
            residual = declare_argument("residual", shape, epilogue.residual.dtype)
        y = declare_argument("y", shape, epilogue.dtype)
        may_use = False if plan.tiled is None else ask_permission(plan.tiled.unit)
        parts = WindowParts.of(spec.windows, x, y)
        rows = spec.windows.part_rows

        def emit_part(first: Expr, count: Expr) -> None:
            copy = alloc_workspace(rows * spec.windows.row + COPY_BYTES, spec.windows.dtype)
            parts.emit_copies(first, count, copy)
            operands = Operands(
                copy,
                *constants,
                None if residual is None else view_rows(residual, first * outputs),
                view_rows(y, first * outputs),
            )
            emit_known_rows(plan, operands, count, may_use)

        parts.emit(rows, spec.windows.row * outputs, PARALLEL_THRESHOLD, emit_part)

    return build_kernel(name, body)


def view_rows(buffer: Buffer, start: Expr) -> Buffer:
    """The elements of a buffer from `start` on."""
    flat = flat_view(buffer)
    return T.decl_buffer(flat.shape, buffer.dtype, data=buffer.data, elem_offset=start)
