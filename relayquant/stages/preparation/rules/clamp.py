"""Rules for clamps: relu, clip, maximum and minimum with a constant become one relu or clip. A
prelu written as several operators becomes one prelu, or a leaky relu if it has one slope.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.rewrite.editor import Clamp, Editor
from relayquant.ir.rewrite.expressions import same_type
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.channel_folding import read_joined
from relayquant.stages.preparation.rules.tensors import (
    channel_values,
    is_float,
    make_const,
    scalar_value,
)

CLAMPS = ("relax.nn.relu", "relax.clip", "relax.maximum", "relax.minimum")


def canonicalize_clamp(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """Merge clamps: maximum(x, 0) -> relu(x); minimum(maximum(x, lo), hi), minimum(relu(x), hi),
    relu(clip(x, lo, hi)), ... -> one clip(x, lo, hi), or relu(x) if the bounds are [0, inf);
    clip(x, -inf, inf) -> x.

    Floats only. An inner clamp is merged if it has no other reader. A single maximum or minimum
    with another constant stays, because it is not an activation.
    """
    outer = _read_clamp(editor, var)
    if outer is None:
        return decline("no clamp of floats by numbers")
    data, low, high = outer
    parts, merged = list_clamps(editor, var, outer), False
    while isinstance(data, relax.Var) and editor.has_one_use(data):
        inner = _read_clamp(editor, data)
        if inner is None:
            break
        # A clamp of a clamp is a clamp: its bounds are those of the inner one, clamped by the
        # outer.
        parts = (*list_clamps(editor, data, inner), *parts)
        data, low, high = inner[0], _clamp(inner[1], low, high), _clamp(inner[2], low, high)
        merged = True
    if merged:
        editor.clamps[editor.names[var]] = parts
    if low == -math.inf and high == math.inf:
        return data
    name = editor.op_name(var)
    if low == 0 and high == math.inf:
        if name == "relax.nn.relu" and not merged:
            return decline("it is canonical")
        return relax.op.nn.relu(data)
    if not merged:
        return decline("it clamps no clamp")
    return relax.op.clip(data, low, high)


def clamp_inside_concat(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """relu(concat(conv(x, v), conv(y, w))) -> concat(relu(conv(x, v)), relu(conv(y, w))), and so
    for clip, if nothing else reads one of the products.

    The kernel of a product clamps its results, and their ranges need not hold what is cut off.
    """
    call = editor.call_of(var)
    if editor.op_name(var) not in ("relax.nn.relu", "relax.clip") or not is_float(var):
        return decline("no relu or clip of floats")
    (data, *bounds), joined = call.args, []
    parts = read_joined(editor, data) if isinstance(data, relax.Var) else []
    if not parts:
        return decline("no joined products that nothing else reads")
    for part in parts:
        clamped = Call(call.op, [part.last, *bounds], call.attrs)
        name = f"{editor.names[part.last]}.clamped"
        joined.append(editor.define(part.last, clamped, name, origin=part.last))
    return relax.op.concat(joined, parts[0].axis)


def list_clamps(
    editor: Editor, var: relax.Var, read: tuple[relax.Expr, float, float]
) -> tuple[Clamp, ...]:
    """List the clamps of the model that a value stands for, in the order that they are computed."""
    name = editor.names[var]
    return editor.clamps.get(name) or (Clamp(name, editor.op_name(var), *read[1:]),)


def where_to_prelu(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """where(x > 0, x, x * a) -> prelu(x, a) if a is constant along one axis, or leakyrelu(x, a)
    if a is one number. PyTorch decomposes its PReLU into this form.
    """
    condition, data, product = editor.call_of(var).args
    compared, scaled = editor.call_of(condition), editor.call_of(product)
    if compared is None or scaled is None or not same_type(data, var):
        return decline("no comparison and product of the data")
    names = editor.op_name(condition), editor.op_name(product)
    if names != ("relax.greater", "relax.multiply"):
        return decline("no comparison and product of the data")
    if not compared.args[0].same_as(data) or not scaled.args[0].same_as(data):
        return decline("no comparison and product of the data")
    slopes = constant_value(scaled.args[1])
    if scalar_value(compared.args[1], data) != 0 or slopes is None or slopes.size == 0:
        return decline("the data is not compared with 0, or the slopes are not constant")
    if slopes.size == 1:
        return relax.op.nn.leakyrelu(data, float(slopes.item()))
    rank = data.ty.ndim
    axis = rank - slopes.ndim + int(np.argmax(slopes.shape))
    if channel_values(scaled.args[1], rank, axis, slopes.size) is None:
        return decline("the slopes are not along one axis")
    flat = make_const(slopes.ravel(), str(slopes.dtype))
    return relax.op.nn.prelu(data, flat, axis)


def prelu_to_leaky_relu(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """prelu(x, a) -> leakyrelu(x, a) if all slopes are equal."""
    data, slopes = editor.call_of(var).args
    array = constant_value(slopes)
    if array is None or array.size == 0 or (array != array.flat[0]).any():
        return decline("the slopes differ, or are not constant")
    return relax.op.nn.leakyrelu(data, float(array.flat[0]))


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _read_clamp(editor: Editor, var: relax.Var) -> tuple[relax.Expr, float, float] | None:
    """Return (x, low, high) of a value min(max(x, low), high)."""
    name = editor.op_name(var)
    if name not in CLAMPS or not is_float(var):
        return None
    call = editor.call_of(var)
    data = call.args[0]
    if not same_type(data, var):
        return None
    if name == "relax.nn.relu":
        return data, 0.0, math.inf
    if name == "relax.clip":
        bounds = [getattr(arg, "value", None) for arg in call.args[1:]]
        if not all(isinstance(bound, int | float) for bound in bounds):
            return None
        low, high = float(bounds[0]), float(bounds[1])
        return (data, low, high) if low <= high else None
    bound = scalar_value(call.args[1], data)
    if bound is None or math.isnan(bound):
        return None
    return (data, bound, math.inf) if name == "relax.maximum" else (data, -math.inf, bound)
