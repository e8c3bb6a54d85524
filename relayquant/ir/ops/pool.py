"""Rows for avg_pool2d and mean. The result is rounded and has separate parameters.

mean(x) -> dequantize(qnn.mean(x)) with the parameters of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import (
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    compute_in_one_dtype,
)
from relayquant.ir.ops.build import check_float, unary_pattern
from relayquant.ir.rewrite import Skip


def realize_mean(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.mean(x)) over the same axes."""
    if context.output is None:
        return Skip("the mean has no parameters, since no quantized operator consumes it")
    attrs = context.match.call("relax.mean").attrs
    data = context.operands["data"]
    result = Quantized(data.value, context.output)
    rank = data.value.ty.ndim
    axes = range(rank) if attrs.axis is None else attrs.axis
    value = qnn.mean(
        data.value,
        *data.parameters,
        *result.parameters,
        axes=[int(axis) % rank for axis in axes],
        keepdims=bool(attrs.keepdims),
        out_dtype=context.output.dtype,
    )
    return Quantized(context.emit(value, "int"), context.output).dequantize()


def realize_avg_pool2d(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.avg_pool2d(x)) with the same window."""
    if context.output is None:
        return Skip("the pool has no parameters, since no quantized operator consumes it")
    attrs = context.match.call("relax.nn.avg_pool2d").attrs

    def compute(operands: Sequence[Quantized], result: Quantized) -> relax.Expr:
        (data,) = operands
        return qnn.avg_pool2d(
            data.value,
            *data.parameters,
            *result.parameters,
            pool_size=[int(i) for i in attrs.pool_size],
            strides=[int(i) for i in attrs.strides],
            dilation=[int(i) for i in attrs.dilation],
            padding=[int(i) for i in attrs.padding],
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
            layout=str(attrs.layout),
        )

    return compute_in_one_dtype(context, [context.operands["data"]], compute)


#: out_layout is not among them
POOL_ATTRIBUTES = (
    "pool_size", "strides", "padding", "dilation", "ceil_mode", "count_include_pad", "layout",
)  # fmt: skip

POOL_OPS: tuple[QuantOp, ...] = (
    QuantOp(
        "mean", "relax.mean", unary_pattern("relax.mean"), (Operand("data"),), Kind.FOLLOWER,
        Output.OWN, realize_mean, check=check_float, attributes=("axis", "keepdims"),
    ),
    QuantOp(
        "avg_pool2d", "relax.nn.avg_pool2d", unary_pattern("relax.nn.avg_pool2d"),
        (Operand("data"),), Kind.FOLLOWER, Output.OWN, realize_avg_pool2d, check=check_float,
        attributes=POOL_ATTRIBUTES,
    ),
)  # fmt: skip
