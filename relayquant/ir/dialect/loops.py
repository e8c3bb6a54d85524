"""Dialect: shared loop nests of the legalizations.

Each float operation is rounded once, and no pair of operations is left that LLVM could contract.
All targets therefore give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, s_tir, te, tirx
from tvm.ir import Call
from tvm.relax import BlockBuilder
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.ir.dialect.operands import operator_name
from relayquant.ir.dialect.parameters import PrimExpr, Reader, compute_tensor

#: relax::OpPatternKind: how FuseOps treats a loop nest that says it itself. It leaves opaque ones,
#: such as those that read packed bytes, alone. Injective: an element is computed from elements at
#: any positions.
BROADCAST, INJECTIVE, OPAQUE = 1, 2, 8


def has_known_shape(call: Call) -> bool:
    """Whether all tensor operands have a shape, which may be symbolic. A loop nest needs it."""

    def is_known(ty: Any) -> bool:
        if isinstance(ty, relax.TupleType):
            return all(is_known(inner) for inner in ty.fields)
        return isinstance(ty.shape, relax.ShapeExpr)

    return all(is_known(argument.ty) for argument in call.args)


def read_modes(call: Call) -> tuple[Rounding, Arithmetic]:
    return Rounding(call.attrs.rounding), Arithmetic(call.attrs.compute_dtype)


def name_hint(call: Call) -> str:
    return operator_name(call).replace(".", "_")


def channel_of(index: Sequence[PrimExpr], axis: int) -> PrimExpr:
    return index[axis % len(index)] if index else 0


def emit_loops(name: str, emit: Callable[[], None]) -> tirx.PrimFunc:
    """Build a function whose arguments and loops `emit` emits, and which FuseOps leaves alone.

    Relax passes expect a root SBlock around the body of a PrimFunc.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "op_pattern": OPAQUE})
        emit()
    func = builder.get()
    root = s_tir.SBlock([], [], [], "root", func.body)
    return func.with_body(s_tir.SBlockRealize([], True, root))


def make_loops(
    builder: BlockBuilder,
    call: Call,
    compute: Callable[..., Any],
    operands: Sequence[relax.Expr],
    reader: Reader | None = None,
    pattern: int | None = None,
) -> Any:
    """Make the loop nest compute(*tensors of the operands), with the name of the operator.

    Args:
        builder, call: As of every legalization.
        compute: Returns the resulting tensor or tensors.
        operands: The tensors that `compute` takes.
        reader: Gives all other operands to `compute`.
        pattern: How FuseOps treats the loop nest. None: as TVM finds out.
    """
    reader, count = reader or Reader(), len(operands)

    def te_compute(*tensors: te.Tensor) -> Any:
        reader.tensors = tensors[count:]
        return compute(*tensors[:count])

    return builder.call_te(
        te_compute,
        *operands,
        *reader.operands,
        primfunc_name_hint=name_hint(call),
        primfunc_attrs=None if pattern is None else {"op_pattern": pattern},
    )


def compute_elementwise(
    builder: BlockBuilder,
    call: Call,
    data: relax.Expr,
    reader: Reader,
    element: Callable[[PrimExpr, Sequence[PrimExpr]], PrimExpr],
) -> Any:
    """Make one loop nest over `data` that computes element(value, index)."""

    def compute(source: te.Tensor) -> te.Tensor:
        return compute_tensor(source.shape, lambda *i: element(source(*i), i), name=name_hint(call))

    return make_loops(builder, call, compute, [data], reader)


def divide(numerator: Any, denominator: Any) -> Any:
    return numerator / denominator


def zero() -> PrimExpr:
    return tirx.const(0, "int32")


def pad_zeros(data: te.Tensor, axes: Sequence[int], padding: Sequence[int]) -> te.Tensor:
    """Pad `axes` of int32 data with zeros.

    `padding` holds the widths before each axis, then the widths after each axis.
    """
    if not any(padding):
        return data
    rank = len(axes)
    shape = list(data.shape)
    for i, axis in enumerate(axes):
        shape[axis] = shape[axis] + padding[i] + padding[i + rank]

    def element(*index: PrimExpr) -> PrimExpr:
        moved, inside = list(index), []
        for i, axis in enumerate(axes):
            moved[axis] = index[axis] - padding[i]
            inside += [moved[axis] >= 0, moved[axis] < data.shape[axis]]
        return tirx.if_then_else(tirx.all(*inside), data(*moved), zero())

    return compute_tensor(shape, element, name="padded")


def to_integers(values: Sequence[Any]) -> list[int]:
    return [int(v) for v in values]
