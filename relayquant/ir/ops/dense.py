"""Rows for dense (constant weight, data of any rank) and batch_matmul (two activations).

matmul(x, w) + b -> dequantize(qnn.dense(x, w^T) + b_int32).

With run-time parameters: dequantize(qnn.dense(x, w^T) - x_zero * sums) + b.

matmul(x, y) -> dequantize(qnn.batch_matmul(x, y^T)).
"""

from __future__ import annotations

from dataclasses import replace

from tvm import relax
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.qtypes import Role
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import (
    DynamicContext,
    GroupedContext,
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    accumulator_qparams,
    make_product,
    repeat_activation,
)
from relayquant.ir.ops.build import (
    check_activation,
    check_constant,
    check_float,
    first_skip,
    weighted_patterns,
)
from relayquant.ir.ops.conv import check_channel_bias
from relayquant.ir.ops.dynamic import IntegerWeight, multiply_at_run_time, multiply_groups
from relayquant.ir.rewrite import Match, Pattern, Skip
from relayquant.ir.rewrite.graph import constant_value

MATMUL = "relax.matmul"


def weight_axis(match: Match) -> int:
    """Return the axis of the output units in the weight (K, N)."""
    return 1


def output_axis(match: Match) -> int:
    """Return the axis of the output units in the product: the last."""
    return match.root.ty.ndim - 1


def realize_dense(context: RealizeContext) -> relax.Expr:
    """Emit dequantize(qnn.dense(x, permute_dims(w)) + b), then the activation.

    The fold stage transposes the constant.
    """
    data, weight = context.operands["data"], context.operands["weight"]
    transposed = context.emit(relax.op.permute_dims(weight.value, [1, 0]), "weight")
    multiply = make_product(qnn.dense, data, replace(weight, value=transposed))
    array = constant_value(weight.value)
    total = context.accumulate(multiply, None if array is None else array.T)
    qparams = accumulator_qparams(data.qparams, weight.qparams, output_axis(context.match))
    return repeat_activation(context, Quantized(total, qparams).dequantize())


def realize_dynamic_dense(context: DynamicContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.dense(x, w) - zero point of x * sums of w) + b, then the activation.

    The scale is the scale of x times the scales of w, float32 (N,), computed at run time. The bias
    is added in float32, because as an integer it would depend on the scale of x.
    """
    data, weight = context.data, context.weight
    array = constant_value(weight.value)
    if array is None:
        return Skip("the weight is not a constant")
    shared = IntegerWeight.of(array, weight.qparams.zero_point)
    accumulator = multiply_at_run_time(
        context.emit, data.value, data.zero_point, shared, is_exact=True
    )
    value = context.dequantize(accumulator, output_axis(context.match))
    return repeat_activation(context, value)


def realize_grouped_dense(context: GroupedContext) -> relax.Expr:
    """Emit qnn.grouped_dense(x, codes, scales, zero points) + b, then the activation."""
    weight = context.weight
    parts = [relax.const(part) for part in (weight.codes, weight.scale, weight.zero_point)]
    value = multiply_groups(context.emit, context.data, weight, parts)
    if context.bias is not None:
        value = relax.op.add(context.emit(value, "product"), context.bias)
    return repeat_activation(context, value)


def check_dense(match: Match) -> Skip | None:
    """Check for float32, a constant weight of rank 2 and a constant bias per unit."""
    constants = tuple(n for n in match.parts if n in ("weight", "bias"))
    skip = first_skip(
        check_float(match), check_activation(match, "data"), check_constant(match, *constants)
    )
    if skip is not None:
        return skip
    if match.parts["weight"].ty.ndim != 2:
        return Skip(f"the weight has rank {match.parts['weight'].ty.ndim}, dense needs 2")
    if "bias" in match.parts:
        return check_channel_bias(match, match.parts["bias"], output_axis(match))
    return None


def realize_batch_matmul(context: RealizeContext) -> relax.Expr:
    """Emit dequantize(qnn.batch_matmul(x, y with the last two axes transposed))."""
    lhs, rhs = context.operands["lhs"], context.operands["rhs"]
    rank = rhs.value.ty.ndim
    axes = [*range(rank - 2), rank - 1, rank - 2]
    transposed = context.emit(relax.op.permute_dims(rhs.value, axes), "rhs")
    multiply = make_product(qnn.batch_matmul, lhs, replace(rhs, value=transposed))
    qparams = accumulator_qparams(lhs.qparams, rhs.qparams, None)
    return Quantized(context.accumulate(multiply), qparams).dequantize()


def check_batch_matmul(match: Match) -> Skip | None:
    """Check for float32 and two computed operands of rank 2 or more."""
    skip = first_skip(check_float(match), check_activation(match, "lhs", "rhs"))
    if skip is not None:
        return skip
    ranks = [match.parts[name].ty.ndim for name in ("lhs", "rhs")]
    if min(ranks) < 2:
        return Skip(f"operands of ranks {ranks}; batch_matmul needs matrices")
    return None


def build_dense_ops() -> tuple[QuantOp, ...]:
    """Build the rows for dense and batch_matmul, the longest pattern first."""
    rows = []
    for suffix, pattern in weighted_patterns(MATMUL):
        operands = [Operand("data"), Operand("weight", Role.WEIGHT, weight_axis)]
        if "bias" in pattern.parts:
            operands.append(Operand("bias", Role.BIAS))
        rows.append(
            QuantOp(
                "dense" + suffix, MATMUL, pattern, tuple(operands), Kind.ANCHOR,
                Output.WHEN_WANTED, realize_dense, check=check_dense,
                accumulator_axis=output_axis, realize_dynamic=realize_dynamic_dense,
                realize_grouped=realize_grouped_dense,
            )
        )  # fmt: skip
    lhs, rhs = wildcard(), wildcard()
    pattern = Pattern(is_op(MATMUL)(lhs, rhs), {"lhs": lhs, "rhs": rhs})
    rows.append(
        QuantOp(
            "batch_matmul", MATMUL, pattern, (Operand("lhs"), Operand("rhs")), Kind.ANCHOR,
            Output.WHEN_WANTED, realize_batch_matmul, check=check_batch_matmul,
            accumulator_axis=lambda match: None,
        )
    )  # fmt: skip
    return tuple(rows)


DENSE_OPS: tuple[QuantOp, ...] = build_dense_ops()
