"""Rules that remove operators without effect: aliases, projections of tuples, no-op shapes,
dropout, x + 0, x * 1, and what another value has already.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE, QUANTIZE
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.expressions import same_type
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.ir.rewrite.moves import RESHAPES, list_permutation
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.dense import LINEAR
from relayquant.stages.preparation.rules.tensors import is_constant

#: Operators that only move or repeat elements in order: if the type does not change, the values do
#: not either.
ORDER_KEEPING = (*RESHAPES, "relax.broadcast_to", "relax.astype")
SAME_SHAPE = (
    *(*ORDER_KEEPING, "relax.split"),
    *("relax.strided_slice", "relax.nn.pad", "relax.permute_dims"),
)
#: Operators that models repeat: a value is quantized for each reader, a mask is prepared in each
#: layer.
REPEATED = (
    *(QUANTIZE, DEQUANTIZE),
    *("relax.where", "relax.clip", "relax.greater", "relax.astype", "relax.max"),
)
NEUTRAL = {"relax.add": 0, "relax.subtract": 0, "relax.multiply": 1, "relax.divide": 1}


def remove_alias(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """y = x -> use x instead of y."""
    by = editor.values[var]
    kept = editor.is_output(var) and (by not in editor.values or editor.is_output(by))
    kept = kept and not editor.users(var)
    return decline("both names are results of main") if kept else by


def project_tuple(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """(a, b)[1] -> b; dropout(x)[0] -> x. `remove_single_concat` takes concat((x,))."""
    item = editor.values[var]
    source = item.tuple_value
    if isinstance(source, relax.Var) and source in editor.values:
        value = editor.values[source]
        if isinstance(value, relax.Tuple):
            return value.fields[item.index]
        if editor.op_name(source) == "relax.nn.dropout" and item.index == 0:
            return value.args[0]
    elif isinstance(source, relax.Tuple):
        return source.fields[item.index]
    return decline("no tuple is spelled out")


def remove_single_concat(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """concat((x,)) -> x. Parts without elements are left out, such as the state of zero steps."""
    call = editor.call_of(var)
    fields, axis = getattr(call.args[0], "fields", ()), int(call.attrs.axis or 0)
    if len(fields) == 1:
        return fields[0]
    filled = [field for field in fields if (shape := tensor_shape(field)) is None or shape[axis]]
    filled = filled or [*fields[:1]]
    if len(filled) == len(fields):
        return decline("several values are joined")
    return relax.op.concat(filled, axis)


def remove_no_op(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """no_op(x) -> x, for a reshape, broadcast_to, squeeze, pad, strided_slice, permute_dims or
    astype that changes neither shape nor order, and for a split into one part.
    """
    call = editor.call_of(var)
    data, name = call.args[0], editor.op_name(var)
    if not same_type(data, var):
        return decline("the type changes")
    if name == "relax.nn.pad" and any(width != 0 for width in call.attrs.pad_width):
        return decline("it pads here and cuts there")
    if name == "relax.permute_dims" and list_permutation(call) != list(range(data.ty.ndim)):
        return decline("axes change places")
    if name == "relax.strided_slice" and not _has_positive_strides(call):
        return decline("a stride may be negative")
    return data


def _has_positive_strides(call: relax.Expr) -> bool:
    """Whether all strides are positive. A slice with a negative stride may keep the shape but
    reverses the order.
    """
    if len(call.args) < 5:
        return True
    strides = call.args[4]
    if isinstance(strides, GenericConst):
        return bool((strides.value.numpy() > 0).all())
    fields = getattr(strides, "fields", None) or getattr(strides, "values", None)
    values = [getattr(field, "value", None) for field in fields or ()]
    return bool(values) and all(isinstance(value, int) and value > 0 for value in values)


def remove_neutral(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """x + 0, x - 0, x * 1, x / 1 -> x if broadcasting does not change the shape.

    A bias that is 0 in every channel stays: calibration corrects it.
    """
    call = editor.call_of(var)
    array = constant_value(call.args[1])
    if array is None or not isinstance(call.args[0], relax.Var):
        return decline("the second operand is not constant")
    if not same_type(call.args[0], var) or not (array == NEUTRAL[editor.op_name(var)]).all():
        return decline("it changes shape or values")
    if editor.op_name(var) == "relax.add" and array.ndim and editor.op_name(call.args[0]) in LINEAR:
        return decline("it is the bias of a product")
    return call.args[0]


def merge_equal(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """a = quantize(x, s, z); b = quantize(x, s, z) -> a for both. `REPEATED` has the operators."""
    call = editor.call_of(var)
    if editor.is_output(var) or not isinstance(call.args[0], relax.Var):
        return decline("main returns it, or its operand is a constant")
    users = editor.users(call.args[0])
    # The order of all bindings is sought where there is a choice.
    for other in sorted(users, key=editor.order().index) if len(users) > 1 else ():
        if other.same_as(var):
            break
        is_alike = editor.op_name(other) == editor.op_name(var) and same_type(other, var)
        if is_alike and _has_equal_parameters(editor.call_of(other), call):
            return other
    return decline("none before it has equal parameters")


def _has_equal_parameters(left: Call, right: Call) -> bool:
    if not left.args[0].same_as(right.args[0]) or str(left.attrs) != str(right.attrs):
        return False
    for one, two in zip(left.args[1:], right.args[1:], strict=True):
        arrays = constant_value(one), constant_value(two)
        if arrays[0] is None or arrays[1] is None:
            if not one.same_as(two):
                return False
        elif arrays[0].shape != arrays[1].shape or arrays[0].tobytes() != arrays[1].tobytes():
            return False  # bits, as -0.0 and 0.0 are equal numbers
    return True


def choose_side(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """where(c, x, y) -> x if c is true everywhere, y if it is false everywhere."""
    condition, *sides = editor.call_of(var).args
    truths = constant_value(condition)
    if truths is None or not truths.size or truths.min() != truths.max():
        return decline("the condition is not one constant")
    side = sides[0] if truths.flat[0] else sides[1]
    return side if same_type(side, var) else decline("the condition or the other side is wider")


def count_axes_from_front(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """squeeze(x, [-2]) -> squeeze(x, [rank - 2]), and permute_dims alike. TVM's ConvertLayout reads
    negative axes as huge ones.
    """
    call, is_squeeze = editor.call_of(var), editor.op_name(var) == "relax.squeeze"
    axes = call.attrs.axis if is_squeeze else call.attrs.axes
    if axes is None or all(int(axis) >= 0 for axis in axes):
        return decline("no axis is negative")
    rank = call.args[0].ty.ndim
    move = relax.op.squeeze if is_squeeze else relax.op.permute_dims
    return move(call.args[0], [int(axis) % rank for axis in axes])


def split_to_slice(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """split(x)[i] -> strided_slice(x) if the size of the split axis is known."""
    item = editor.values[var]
    source = item.tuple_value
    if not isinstance(source, relax.Var) or editor.op_name(source) != "relax.split":
        return decline("no part of a split")
    call = editor.call_of(source)
    data = call.args[0]
    axis = int(call.attrs.axis) % data.ty.ndim
    shape = tensor_shape(data)
    if shape is None or isinstance(shape[axis], str):
        return decline("the size of the axis is symbolic")
    ends = np.cumsum([int(part.shape.values[axis]) for part in source.ty.fields]).tolist()
    begin = ([0, *ends])[item.index]
    return relax.op.strided_slice(data, [axis], [begin], [ends[item.index]])


def put_constant_second(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """c + x -> x + c if c is a constant or a dequantized constant; the same for multiply,
    maximum, minimum.
    """
    left, right = editor.call_of(var).args
    if not is_constant(editor, left) or is_constant(editor, right):
        return decline("not exactly the first operand is constant")
    return relax.Call(editor.call_of(var).op, [right, left])
