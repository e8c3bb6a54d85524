"""Float matrix products, with constant weights or of two values -> calls of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from relayquant.codegen.kernels.floating.bf16 import read_bf16_dense
from relayquant.codegen.kernels.floating.bf16_matmul import (
    Bf16Matmul,
    make_bf16_matmul,
    read_bf16_matmul,
)
from relayquant.codegen.kernels.floating.gemm import FloatDense, FloatMatmul, pack_dense
from relayquant.codegen.kernels.floating.matmul_transposed_b import FEW_ROWS, FloatDots
from relayquant.codegen.kernels.floating.tile import FEWEST_CHANNELS
from relayquant.codegen.lowering.curve import follow_curve
from relayquant.codegen.lowering.engine import Kernel, Lowered
from relayquant.codegen.lowering.floating.context import FloatContext, call_bf16, call_product
from relayquant.ir.rewrite.expressions import (
    is_float32,
    op_name,
    same_extents,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.graph import static_size
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import Skip, decline


def lower_matmul(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower matmul, with constant weights or of two values."""
    call = context.block.values[root]
    data, weight = call.args
    if not all(is_float32(e) for e in (data, weight, root)):
        return decline("not float32 of known rank")
    shape, other = shape_of(data), shape_of(weight)
    if len(shape) < 2 or len(other) < 2:
        return decline("vectors")
    if any(static_size(extent) == 0 for extent in (*shape, *other)):
        return decline("no elements")
    dots = read_dots(context, shape, weight)
    if dots is not None:
        spec, stored = dots
        return Lowered((root,), context.make_kernel("float_dots", spec), (data, stored))
    outputs = static_sizes(other[-1:])
    if outputs is None or outputs[0] < FEWEST_CHANNELS:
        return decline("a symbolic number of channels, or too few")
    leading = tuple(context.symbol(extent) for extent in shape[:-1])
    inner = context.symbol(shape[-1])
    if len(other) == 2 and isinstance(weight, GenericConst):
        chain = context.follow(root, outputs[0])
        concat, epilogue = context.choose_epilogue(chain)
        # The run time checks that a symbolic depth is the depth of the weights.
        spec = FloatDense((*leading, int(other[0])), outputs[0], epilogue)
        narrow = read_bf16_dense(spec)
        if context.bf16 is not None and narrow is not None:
            taps = np.ascontiguousarray(weight.value.numpy().T)
            return call_bf16(context, chain, narrow, data, taps, concat)
        spec = replace(spec, schedule=context.choose_schedule(spec, context.isa))
        packed = pack_dense(weight.value.numpy().T, spec, context.isa)
        kernel = context.make_kernel("float_dense", spec)
        return call_product(chain, kernel, data, packed, concat)
    shared = len(other) == 2
    if not shared and not same_extents(shape[:-2], other[:-2]):
        return decline("batch dimensions are broadcast")
    matmul = FloatMatmul(leading[:-1], leading[-1], inner, outputs[0], shared)
    narrow = None if context.bf16 is None else read_bf16_matmul(matmul, context.bf16)
    if narrow is not None:
        return call_bf16_matmul(context, root, narrow, data, weight)
    return Lowered((root,), context.make_kernel("float_batch_matmul", matmul), (data, weight))


def read_dots(
    context: FloatContext, shape: list[Any], weight: relax.Expr
) -> tuple[FloatDots, relax.Expr] | None:
    """Read x @ permute_dims(w) as dot products along the last axes of x and w.

    Returns:
        The specification and w. None if there is no such transposition, or if there are many rows
            and their number is known: then the transposition is worth its time.
    """
    call = context.block.call_of(weight)
    if call is None or op_name(call) != "relax.permute_dims":
        return None
    stored, ndim = call.args[0], len(shape)
    order, other = list_permutation(call), shape_of(weight)
    if len(order) != ndim or order[-2] != ndim - 1 or not is_float32(stored):
        return None
    if not same_extents(shape[:-2], other[:-2]) or static_sizes(shape[-1:]) is None:
        return None
    rows, outputs = context.symbol(shape[-2]), context.symbol(other[-1])
    if isinstance(rows, int) and isinstance(outputs, int) and rows > FEW_ROWS:
        return None
    batch = tuple(context.symbol(extent) for extent in shape[:-2])
    return FloatDots(batch, rows, int(shape[-1]), outputs, tuple(order)), stored


def call_bf16_matmul(
    context: FloatContext, root: relax.Var, spec: Bf16Matmul, data: relax.Expr, weight: relax.Expr
) -> Lowered:
    """Call the kernel of a product of two values, with operands of bfloat16, and a curve."""
    isa, name = context.bf16, "bf16_batch_matmul"
    assert isa is not None
    inside, curve = follow_curve(context.block, root)
    axes = [read_axes(context, operand) for operand in (data, weight)]
    spec = replace(spec, curve=curve).permute(*axes, isa)
    operands = (
        operand if used is None else context.block.call_of(operand).args[0]
        for operand, used in ((data, spec.x_axes), (weight, spec.w_axes))
    )
    kernel = Kernel(name, repr(spec), lambda: make_bf16_matmul(spec, isa, name))
    return Lowered((root, *inside), kernel, tuple(operands))


def read_axes(context: FloatContext, operand: relax.Expr) -> tuple[int, ...] | None:
    """Read the axes of a permute_dims that only one value reads. None for any other operand."""
    call = context.block.call_of(operand)
    if call is None or op_name(call) != "relax.permute_dims":
        return None
    is_read_once = context.block.only_user(operand) is not None
    return tuple(list_permutation(call)) if is_read_once else None
