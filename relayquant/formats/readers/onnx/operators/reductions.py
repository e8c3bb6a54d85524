"""ONNX reader: reductions of every opset, and operators along one axis.

Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from tvm import relax

from relayquant.base.axes import shape_along
from relayquant.formats.readers.indices import count_from_start, take_largest
from relayquant.formats.readers.onnx.operators.broadcast import list_sizes
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.frontend import run_frontend
from relayquant.formats.readers.onnx.operators.sizes import emit_item, known_shape, read_sizes
from relayquant.formats.readers.refusal import NotConstant
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

#: (data, axes, keepdims) -> value
Reduce = Callable[..., relax.Expr]
Unary = Callable[[relax.Expr], relax.Expr]


@dataclass(frozen=True)
class Reduction:
    """The function after(reduce(before(x))). Over no axes, only `before` and `after` remain.

    `after` of an integer is rounded to zero.
    """

    reduce: Reduce
    before: Unary | None = None
    after: Unary | None = None


def _square(data: relax.Expr) -> relax.Expr:
    return relax.op.multiply(data, data)


#: ONNX operator -> its function
REDUCTIONS = {
    "ReduceL1": Reduction(relax.op.sum, relax.op.abs),
    "ReduceL2": Reduction(relax.op.sum, _square, relax.op.sqrt),
    "ReduceLogSum": Reduction(relax.op.sum, None, relax.op.log),
    "ReduceMax": Reduction(relax.op.max),
    "ReduceMean": Reduction(relax.op.mean),
    "ReduceMin": Reduction(relax.op.min),
    "ReduceProd": Reduction(relax.op.prod),
    "ReduceSum": Reduction(relax.op.sum),
    "ReduceSumSquare": Reduction(relax.op.sum, _square),
}


def convert_reduction(
    name: str, bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert Reduce* with axes as an attribute, or as an input in later versions.

    Raises:
        Refusal: the axes are computed at run time, so the shape of the result is unknown.
    """
    reduction = REDUCTIONS[name]
    data = inputs[0]
    axes = read_axes(inputs, attrs)
    if reduction.before is not None:
        data = bb.emit(reduction.before(data))
    if axes is None or axes:
        data = bb.emit(reduction.reduce(data, axes, bool(attrs.get("keepdims", 1))))
    if reduction.after is not None:
        data = compute_real(bb, reduction.after, data)
    return data


def compute_real(bb: Builder, function: Unary, data: relax.Expr) -> relax.Expr:
    """Emit a function of real numbers. Integers become float64, and its results of these are
    rounded to zero.
    """
    dtype = tensor_dtype(data)
    if "int" not in dtype:
        return bb.emit(function(data))
    real = bb.emit(relax.op.astype(data, "float64"))
    return bb.emit(relax.op.astype(bb.emit(function(real)), dtype))


def convert_log_sum_exp(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert ReduceLogSumExp to log(sum(exp(x - max))) + max.

    An infinite maximum is not subtracted, because infinity - infinity is NaN.
    """
    data = inputs[0]
    axes = read_axes(inputs, attrs)
    if axes is not None and not axes:
        return data
    keepdims = bool(attrs.get("keepdims", 1))
    return compute_real(bb, lambda real: sum_exponentials(bb, real, axes, keepdims), data)


def sum_exponentials(
    bb: Builder, data: relax.Expr, axes: list[int] | None, keepdims: bool
) -> relax.Expr:
    """Return log(sum(exp(x - max))) + max of floats."""
    top = bb.emit(relax.op.max(data, axes, True))
    zero = relax.const(0.0, str(data.ty.dtype))
    top = bb.emit(relax.op.where(bb.emit(relax.op.isfinite(top)), top, zero))
    raised = bb.emit(relax.op.exp(bb.emit(relax.op.subtract(data, top))))
    total = bb.emit(relax.op.log(bb.emit(relax.op.sum(raised, axes, True))))
    result = bb.emit(relax.op.add(total, top))
    return result if keepdims else relax.op.squeeze(result, axes)


def convert_hardmax(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Hardmax of rows of symbolic length: 1 at the first largest value, else 0. Others are
    left to TVM.

    Before opset 13, everything from the axis on is one row.
    """
    (data,) = inputs
    sizes = list_sizes(data)
    axis = int(attrs.get("axis", -1 if opset >= 13 else 1)) % len(sizes)
    if opset < 13:
        sizes = [prod(sizes[:axis]), prod(sizes[axis:])]
        axis = 1
    if isinstance(sizes[axis], int):
        return None
    rows = bb.emit(relax.op.reshape(data, sizes))
    best = bb.emit(relax.op.argmax(rows, axis, True))
    ramp = bb.emit(relax.op.arange(0, sizes[axis], 1, "int64"))
    places = bb.emit(relax.op.reshape(ramp, (-1, *[1] * (len(sizes) - axis - 1))))
    hot = bb.emit(relax.op.astype(bb.emit(relax.op.equal(places, best)), tensor_dtype(data)))
    return relax.op.reshape(hot, data.ty.shape)


def read_axes(inputs: Sequence[Any], attrs: dict[str, Any]) -> list[int] | None:
    """Read the axes of a reduction. None means all axes, [] means none."""
    if len(inputs) > 1 and inputs[1] is not None:
        found = read_sizes(inputs[1])
        if found is None:
            if tensor_shape(inputs[1]) != (0,):
                raise NotConstant("axes")
            found = []
    else:
        found = list(attrs.get("axes", ()))
    if found:
        return [int(axis) for axis in found]
    return [] if attrs.get("noop_with_empty_axes", 0) else None


def convert_unique(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Unique with TVM's frontend. Without an axis it reads flat data, as then all indices
    have one dimension.
    """
    (data,) = inputs
    if attrs.get("axis") is None:
        data = bb.emit(relax.op.reshape(data, [-1]))
    return run_frontend("Unique", bb, [data], attrs, opset)


def convert_top_k(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert TopK to R.topk. The result is sorted even if it need not be.

    Raises:
        Refusal: k is computed at run time.
    """
    data = inputs[0]
    count = attrs["k"] if opset < 10 else constant_value(inputs[1])
    if count is None:
        raise NotConstant("k")
    count, axis = int(np.asarray(count).item()), int(attrs.get("axis", -1))
    return take_largest(bb, data, count, axis, largest=bool(attrs.get("largest", 1)))


def convert_one_hot(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert OneHot(indices, depth, (off, on)) to where(indices == 0 ... depth - 1, on, off).

    Negative indices count from the end. An index outside the depth gives only `off`. R.one_hot has
    one dtype for everything and needs the two values as constants.

    Raises:
        Refusal: the depth is computed at run time.
    """
    indices, depth, values = inputs
    array = constant_value(depth)
    if array is None:
        raise NotConstant("depth")
    count, rank = int(array.item()), len(known_shape(indices, "indices")) + 1
    axis = int(attrs.get("axis", -1)) % rank
    whole = bb.emit(relax.op.astype(indices, "int64"))
    whole = count_from_start(bb, whole, count)
    places = np.arange(count, dtype="int64").reshape(shape_along(axis, rank))
    ramp = relax.const(places, "int64")
    is_hot = bb.emit(relax.op.equal(bb.emit(relax.op.expand_dims(whole, axis)), ramp))
    off, on = (emit_item(bb, values, at) for at in (0, 1))
    return relax.op.where(is_hot, on, off)
