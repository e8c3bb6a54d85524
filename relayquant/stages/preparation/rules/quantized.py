"""Rules for models that already hold quantized values: one quantize per value and set of
parameters, and weights in the layout of their operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.dense import LINEAR
from relayquant.stages.preparation.rules.tensors import make_const


def move_inside_dequantize(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """permute_dims(dequantize(w)) -> dequantize(permuted w) for a constant w; the same for
    reshapes.

    The rule declines if the channels of w would not keep a separate axis.
    """
    call = editor.call_of(var)
    inner = editor.call_of(call.args[0])
    if inner is None or editor.op_name(call.args[0]) != DEQUANTIZE or editor.is_output(var):
        return decline("no dequantize before it, or main returns it")
    array, shape = constant_value(inner.args[0]), tensor_shape(var)
    if array is None or shape is None or any(isinstance(size, str) for size in shape):
        return decline("no constant is dequantized")
    axis = int(inner.attrs.axis) % max(array.ndim, 1)
    if editor.op_name(var) == "relax.permute_dims":
        order = list_permutation(call)
        moved, new_axis = np.transpose(array, order), order.index(axis) if order else 0
    else:
        moved = array.reshape(shape)
        new_axis = _find_axis(array.shape, shape, axis)
    if any(expr.ty.ndim for expr in inner.args[1:]) and new_axis is None:
        return decline("the channels lose their axis")
    integers = make_const(moved, str(array.dtype))
    return qnn.dequantize(integers, *inner.args[1:], axis=new_axis or 0)


def _find_axis(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Return the axis of a reshaped array that holds the elements of `axis` in the same order."""
    for i, size in enumerate(after):
        if size == before[axis] and math.prod(after[:i]) == math.prod(before[:axis]):
            return i
    return None


def center_weight(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """dequantize(w uint8, s, z) -> dequantize(w - 128 int8, s, z - 128) if only products read
    the constant w. Kernels take signed weights.
    """
    call = editor.call_of(var)
    array, zero_point = constant_value(call.args[0]), constant_value(call.args[2])
    if array is None or zero_point is None or array.dtype != np.uint8:
        return decline("no constant of uint8 is dequantized")
    users = editor.users(var)
    if not users or any(
        editor.op_name(user) not in LINEAR or not editor.call_of(user).args[1].same_as(var)
        for user in users
    ):
        return decline("it is not the weight of products alone")
    centred = (array.astype("int16") - 128).astype("int8")
    return qnn.dequantize(
        make_const(centred, "int8"),
        call.args[1],
        make_const(zero_point - 128, "int32"),
        axis=int(call.attrs.axis),
    )


def name_dialect(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """R.quantize, R.dequantize, as TVM's frontends write them -> R.qnn.quantize, R.qnn.dequantize.

    Zero points of any integer type become int32. 8-bit floats and float16 stay as they are.
    """
    call = editor.call_of(var)
    data, scale, zero_point = call.args
    dtypes = tensor_dtype(data), tensor_dtype(var)
    is_quantize = editor.op_name(var) == "relax.quantize"
    real, integer = dtypes if is_quantize else reversed(dtypes)
    zero = constant_value(zero_point)
    if real != "float32" or integer not in INTEGER_LIMITS or tensor_dtype(scale) != "float32":
        return decline("the dialect has not these dtypes")
    if zero is not None:
        zero_point = make_const(zero.astype("int32"), "int32")
    elif tensor_dtype(zero_point) != "int32":
        return decline("the zero point is computed, and not int32")
    axis = int(call.attrs.axis)
    if is_quantize:
        return qnn.quantize(data, scale, zero_point, axis=axis, out_dtype=integer)
    return qnn.dequantize(data, scale, zero_point, axis=axis)
