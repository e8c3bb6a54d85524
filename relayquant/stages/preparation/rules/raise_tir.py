"""Rules that raise anonymous loops (`call_tir`) of TVM's ONNX frontend to operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import make_const

#: emits the loops of an operator for given operands, as a frontend would
Lower = Callable[[relax.BlockBuilder, list[relax.Var]], Any]


def recover_call_tir(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """call_tir of topi.maximum, topi.minimum, topi.nn.pad -> maximum, minimum, nn.pad.

    The loops suggest an operator and its constants. The rule lowers this operator for the same
    operands and accepts it only if the result is structurally equal. Otherwise the call stays.
    """
    call = editor.call_of(var)
    func = editor.function(call.args[0])
    operands = call.args[1]
    if not isinstance(func, tirx.PrimFunc) or not isinstance(operands, relax.Tuple):
        return decline("no loops of a literal tuple of operands")
    args = list(operands.fields)
    if len(call.args) != 2 or not args:
        return decline("it has no operands, or other arguments")
    guess = _guess(func, args, var)
    if guess is None:
        return decline("the loops store no maximum, minimum or pad")
    lower, value = guess
    if not _is_same_function(func, args, lower):
        return decline("the loops are not those of the operator that they look like")
    return value


def _guess(
    func: tirx.PrimFunc, args: list[relax.Expr], out: relax.Var
) -> tuple[Lower, relax.Expr] | None:
    """Return (how topi would lower it, the operator) as suggested by the store inside the loops."""
    stmt = func.body
    while not isinstance(stmt, tirx.BufferStore):
        stmt = getattr(stmt, "block", None) or getattr(stmt, "body", None)
        if stmt is None:
            return None
    value = stmt.value
    for kind, lowered, op in (
        (tirx.Max, topi.maximum, relax.op.maximum),
        (tirx.Min, topi.minimum, relax.op.minimum),
    ):
        if not isinstance(value, kind):
            continue
        bound = getattr(value.b, "value", None)
        if len(args) == 2:
            return _lower_binary(lowered, None), op(*args)
        if len(args) == 1 and isinstance(bound, int | float):
            constant = make_const(np.array(bound), tensor_dtype(args[0]))
            return _lower_binary(lowered, bound), op(args[0], constant)
    return _guess_pad(stmt, args, out)


def _lower_binary(lowered: Any, bound: float | None) -> Lower:
    """Emit `lowered` on all operands, or on the one operand and the number `bound`."""
    if bound is None:
        return lambda builder, new: builder.emit_te(lowered, *new)
    return lambda builder, new: builder.emit_te(lowered, new[0], bound)


def _guess_pad(
    store: tirx.BufferStore, args: list[relax.Expr], out: relax.Var
) -> tuple[Lower, relax.Expr] | None:
    """out[i] = if_then_else(inside, data[i - before], fill), the form of topi.nn.pad."""
    value = store.value
    if len(args) != 1 or not isinstance(value, Call) or len(value.args) != 3:
        return None
    load, fill = value.args[1], getattr(value.args[2], "value", None)
    in_shape, out_shape = args[0].ty.shape, out.ty.shape
    if not isinstance(load, TensorLoad) or not isinstance(fill, float):
        return None
    if not isinstance(in_shape, relax.ShapeExpr) or not isinstance(out_shape, relax.ShapeExpr):
        return None
    parts: list[list[Any]] = [
        list(part) for part in (store.indices, load.indices, in_shape.values, out_shape.values)
    ]
    if len({len(part) for part in parts}) != 1:
        return None
    analyzer = Analyzer()
    widths: list[int] = []
    for out_index, in_index, in_size, out_size in zip(*parts, strict=True):
        before = analyzer.simplify(out_index - in_index)
        after = analyzer.simplify(out_size - in_size - before)
        if not isinstance(before, tirx.IntImm) or not isinstance(after, tirx.IntImm):
            return None
        widths += [int(before), int(after)]
    if min(widths) < 0:
        return None
    return (
        lambda builder, new: builder.emit_te(topi.nn.pad, new[0], widths[0::2], widths[1::2], fill),
        relax.op.nn.pad(args[0], widths, "constant", fill),
    )


def _is_same_function(
    func: tirx.PrimFunc,
    args: list[relax.Expr],
    lower: Lower,
) -> bool:
    params = [relax.Var(f"arg{i}", arg.ty) for i, arg in enumerate(args)]
    mod = make_main(params, lambda builder: lower(builder, params))
    made = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    if len(made) != 1:
        return False
    plain = [f.without_attr("global_symbol") if f.attrs else f for f in (func, made[0])]
    return bool(tvm_ffi.structural_equal(*plain, map_free_vars=True))
