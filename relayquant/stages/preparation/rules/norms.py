"""Rules for norms: a batch norm that no operator absorbs is a multiply and an add; other norms have
both of their factors.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.base.axes import shape_along
from relayquant.ir.rewrite.attributes import find_constructor, read_attributes
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import is_float, make_const

#: norms whose attributes can leave out the factor and the shift
NORMS = ("relax.nn.layer_norm", "relax.nn.instance_norm", "relax.nn.group_norm")


def canonicalize_batch_norm(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """batch_norm(x) -> x * s + t, with constants of shape [1, C, 1, 1], if no operator before it
    can absorb the batch norm.
    """
    norm = read_batch_norm(editor, var)
    if norm is None:
        return decline("not a batch norm with constant statistics whose other results are unused")
    call, axis, scale, shift = norm
    data = call.args[0]
    dtype = tensor_dtype(var)
    shape = shape_along(axis, data.ty.ndim)
    if not (fits(scale, dtype) and fits(shift, dtype)):
        return decline("a factor is infinite")
    scaled = editor.define(
        var,
        relax.op.multiply(data, make_const(scale.reshape(shape), dtype)),
        f"{editor.names[var]}.scaled",
    )
    return relax.op.add(scaled, make_const(shift.reshape(shape), dtype))


def fill_norm_factors(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """layer_norm(x, g, b, center=False) -> layer_norm(x, g, 0), scale=False -> layer_norm(x, 1, b).
    The same for instance_norm and group_norm.

    TVM's generated code ignores the two attributes: it always multiplies by g and adds b.
    """
    call = editor.call_of(var)
    make, attributes = find_constructor(call), read_attributes(call)
    if make is None or (attributes["scale"] and attributes["center"]):
        return decline("it multiplies and adds")
    factors = []
    for given, name, neutral in zip(call.args[1:], ("scale", "center"), (1, 0), strict=True):
        shape = tensor_shape(given)
        if attributes[name]:
            factors.append(given)
        elif shape is None or any(isinstance(size, str) for size in shape):
            return decline("the shape of a factor is symbolic")
        else:
            filled = np.full([int(size) for size in shape], neutral)
            factors.append(make_const(filled, tensor_dtype(given)))
    attributes |= {"scale": True, "center": True}
    return make(call.args[0], *factors, **attributes)


def find_batch_norm(editor: Editor, var: relax.Var) -> Call | None:
    """Return the inference batch_norm whose first result is `var`, if its other results are not
    used.
    """
    item = editor.values.get(var)
    if not isinstance(item, relax.TupleGetItem) or item.index != 0:
        return None
    source = item.tuple_value
    if editor.op_name(source) != "relax.nn.batch_norm":
        return None
    call = editor.call_of(source)
    if call.attrs.training or not is_float(var) or not editor.has_one_use(source):
        return None
    return call


def read_batch_norm(
    editor: Editor, var: relax.Var
) -> tuple[Call, int, np.ndarray, np.ndarray] | None:
    """Return (call, axis, scale, shift) of a batch norm with constant statistics, in float64."""
    call = find_batch_norm(editor, var)
    if call is None:
        return None
    arrays = [constant_value(arg) for arg in call.args[1:]]
    if any(array is None for array in arrays):
        return None
    gamma, beta, mean, variance = (array.astype("float64") for array in arrays)
    if not call.attrs.scale:
        gamma = np.ones_like(gamma)
    if not call.attrs.center:
        beta = np.zeros_like(beta)
    spread = variance + call.attrs.epsilon
    if not (spread > 0).all():
        return None
    scale = gamma / np.sqrt(spread)
    return call, int(call.attrs.axis) % call.args[0].ty.ndim, scale, beta - mean * scale


def fits(values: np.ndarray, dtype: str) -> bool:
    """Whether float64 values stay finite in `dtype`."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(dtype)).all())
