"""Rules that compute known values: operators on constants, and shapes."""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.ir.reference.folding import fold_call
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, static_size
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import make_const

#: prefixes of operators that are never folded: a quantized weight must stay quantized
KEPT = ("relax.qnn.", "relax.quantize", "relax.dequantize", "relax.call_")


def fold_constants(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """f(constants) -> constant, or the tuple of its constants. `quantize`, `dequantize` and `qnn`
    operators are never folded.
    """
    if editor.op_name(var).startswith(KEPT):
        return decline("an operator that is never folded")
    result = fold_call(editor.call_of(var))
    return decline(result) if isinstance(result, str) else result


def fold_shapes(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """shape_of(x) -> R.shape([...]); shape_to_tensor of static dimensions -> constant;
    tensor_to_shape(constant) -> R.shape; take(shape_to_tensor(R.shape([n, 3])), 1) -> 3."""
    call, name = editor.call_of(var), editor.op_name(var)
    operand = call.args[0]
    if name == "relax.shape_of":
        shape = operand.ty.shape
        return shape if isinstance(shape, relax.ShapeExpr) else decline("the shape is unknown")
    if name == "relax.tensor_to_shape":
        array = constant_value(operand)
        if array is None or array.ndim != 1:
            return decline("the sizes are computed")
        return relax.ShapeExpr([int(size) for size in array])
    if name == "relax.shape_to_tensor":
        sizes = _static_sizes(operand)
        if sizes is None or any(size is None for size in sizes):
            return decline("a size is symbolic")
        return make_const(np.array(sizes), "int64")
    inner = editor.call_of(operand)
    if inner is None or editor.op_name(operand) != "relax.shape_to_tensor":
        return decline("no sizes of a shape are taken")
    sizes, indices = _static_sizes(inner.args[0]), constant_value(call.args[1])
    if (
        sizes is None
        or indices is None
        or ((indices < -len(sizes)) | (indices >= len(sizes))).any()
    ):
        return decline("the sizes or the indices are unknown")
    picked = [sizes[int(at)] for at in indices.ravel()]
    if any(size is None for size in picked) or editor.is_output(var):
        return decline("a size is symbolic, or main returns it")
    return make_const(np.array(picked).reshape(indices.shape), "int64")


def _static_sizes(shape: relax.Expr) -> list[int | None] | None:
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return [static_size(dim) for dim in shape.values]


def merge_constant_adds(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """(x + c1) + c2 -> x + (c1 + c2) if x + c1 has no other reader and the sum is no larger than
    c1 or c2.
    """
    call = editor.call_of(var)
    inner = editor.call_of(call.args[0])
    if inner is None or editor.op_name(call.args[0]) != "relax.add":
        return decline("no sum before it")
    first, second = constant_value(inner.args[1]), constant_value(call.args[1])
    if first is None or second is None or not editor.has_one_use(call.args[0]):
        return decline("an operand is not constant, or others read the sum before it")
    wide = "float64" if first.dtype.kind == "f" else str(first.dtype)
    try:
        total = first.astype(wide) + second.astype(wide)
    except ValueError:
        return decline("the constants do not broadcast to one another")
    if total.size > max(first.size, second.size):
        return decline("the sum of the constants is larger than both")
    return relax.op.add(inner.args[0], make_const(total, str(first.dtype)))
