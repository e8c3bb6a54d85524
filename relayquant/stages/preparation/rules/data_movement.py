"""Rules for operators that only move elements: check or wrap indices, replace stack by concat."""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import make_const


def bound_indices(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """take(x, i, mode="fast") -> take(x, i, mode="wrap"). A constant i gets its negative entries
    replaced by the positive index.

    Mode "wrap" counts negative indices from the end and stays inside of x. Mode "fast" reads memory
    outside of x if an index is out of range. TVM's frontends write "fast" for every selection, for
    example for `x[:, -1]` in PyTorch.

    Raises:
        ModelError: a constant index is out of range.
    """
    call = editor.call_of(var)
    if str(call.attrs.mode) != "fast":
        return decline("the indices are bounded")
    data, indices = call.args
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    array, shape = constant_value(indices), tensor_shape(data)
    sizes = shape if axis is None or shape is None else (shape[axis],)
    if array is None or sizes is None or any(isinstance(size, str) for size in sizes):
        return relax.op.take(data, indices, axis, "wrap")
    length = int(np.prod(sizes, dtype="int64"))
    if ((array < -length) | (array >= length)).any():
        raise ModelError(
            f"take at {editor.names[var]!r}: the indices reach from {array.min()} to "
            f"{array.max()}, but there are {format_count(length, 'element')}; allowed: "
            f"{-length}..{length - 1}. The model reads outside of its tensor; export it again.",
            code="RQ204",
        )
    inside = make_const(np.where(array < 0, array + length, array), str(array.dtype))
    return relax.op.take(data, inside, axis, "clip")


def stack_to_concat(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """stack((a, b), axis) -> concat((expand_dims(a, axis), expand_dims(b, axis)), axis).

    Backends have a pattern for concat. TVM's ConvertLayout also reads a negative axis of stack as a
    huge one.
    """
    call = editor.call_of(var)
    fields = call.args[0]
    if not isinstance(fields, relax.Tuple):
        return decline("the operands are not a literal tuple")
    axis = int(call.attrs.axis) % var.ty.ndim
    parts = [
        editor.define(var, relax.op.expand_dims(field, axis), f"{editor.names[var]}.{i}")
        for i, field in enumerate(fields.fields)
    ]
    return relax.op.concat(parts, axis)
