"""Averages and sums: avg_pool2d, mean, sum. Their result is rounded, so it has parameters of its
own.

mean(x) -> dequantize(qnn.mean(x)) in the parameters of the result; sum(x) -> the same, in units
that are as many times smaller as values are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.dialect import qnn
from relayquant.ops.base import (
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    compute_in_one_dtype,
)
from relayquant.ops.build import check_float, unary_pattern
from relayquant.rewrite import Skip
from relayquant.rewrite.graph import tensor_shape


def realize_mean(context: RealizeContext) -> relax.Expr | Skip:
    """dequantize(qnn.mean(x)) over the same axes."""
    if context.output is None:
        return Skip("the mean has no parameters, since no quantized operator consumes it")
    return emit_mean(context, context.match.call("relax.mean"), context.output.scale)


def realize_sum(context: RealizeContext) -> relax.Expr | Skip:
    """dequantize(qnn.mean(x)): a sum of n values in steps of s has the integers of their mean in
    steps of s / n.
    """
    if context.output is None:
        return Skip("the sum has no parameters, since no quantized operator consumes it")
    call = context.match.call("relax.sum")
    shape = tensor_shape(context.match.parts["data"]) or ()
    summed = [shape[axis] for axis in find_axes(call)]
    if not summed or any(isinstance(size, str) for size in summed):
        return Skip("the number of summed values is not known before the model runs")
    count = math.prod(int(size) for size in summed)
    return emit_mean(context, call, np.float32(context.output.scale / count))


def find_axes(call: Call) -> list[int]:
    """The axes that a reduction goes over."""
    rank = call.args[0].ty.ndim
    axes = range(rank) if call.attrs.axis is None else call.attrs.axis
    return [int(axis) % rank for axis in axes]


def emit_mean(context: RealizeContext, call: Call, scale: np.ndarray | np.float32) -> relax.Expr:
    """dequantize(qnn.mean(x)), the mean in steps of `scale`, over the axes of the reduction
    `call`.
    """
    if context.output is None:
        raise ValueError(f"no output parameters for the value {context.match.name!r}")
    data = context.operands["data"]
    value = qnn.mean(
        data.value,
        data.scale,
        data.zero_point,
        relax.const(scale, "float32"),
        relax.const(context.output.zero_point, "int32"),
        axes=find_axes(call),
        keepdims=bool(call.attrs.keepdims),
        out_dtype=context.output.dtype,
    )
    return Quantized(context.emit(value, "int"), context.output).dequantize()


def realize_avg_pool2d(context: RealizeContext) -> relax.Expr | Skip:
    """dequantize(qnn.avg_pool2d(x)) with the same window."""
    if context.output is None:
        return Skip("the pool has no parameters, since no quantized operator consumes it")
    attrs = context.match.call("relax.nn.avg_pool2d").attrs

    def compute(operands: Sequence[Quantized], result: Quantized) -> relax.Expr:
        (data,) = operands
        return qnn.avg_pool2d(
            data.value,
            data.scale,
            data.zero_point,
            result.scale,
            result.zero_point,
            pool_size=[int(i) for i in attrs.pool_size],
            strides=[int(i) for i in attrs.strides],
            dilation=[int(i) for i in attrs.dilation],
            padding=[int(i) for i in attrs.padding],
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
            layout=str(attrs.layout),
        )

    return compute_in_one_dtype(context, [context.operands["data"]], compute)


POOL_OPS: tuple[QuantOp, ...] = (
    QuantOp(
        "mean", "relax.mean", unary_pattern("relax.mean"), (Operand("data"),), Kind.FOLLOWER,
        Output.OWN, realize_mean, check=check_float,
    ),
    QuantOp(
        "sum", "relax.sum", unary_pattern("relax.sum"), (Operand("data"),), Kind.FOLLOWER,
        Output.OWN, realize_sum, check=check_float,
    ),
    QuantOp(
        "avg_pool2d", "relax.nn.avg_pool2d", unary_pattern("relax.nn.avg_pool2d"),
        (Operand("data"),), Kind.FOLLOWER, Output.OWN, realize_avg_pool2d, check=check_float,
    ),
)  # fmt: skip
