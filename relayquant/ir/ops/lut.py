"""Rows for unary functions: a table of 256 entries, or an integer operator.

sigmoid(x), or any chain of elementwise operators on x -> dequantize(qnn.lookup(x, table));
leaky_relu(x) -> dequantize(qnn.leaky_relu(x)); prelu(x, a) -> dequantize(qnn.prelu(x, a)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tvm import relax

from relayquant.base.qtypes import QParams, Rounding
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import (
    NO_PARAMETERS,
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    compute_in_one_dtype,
)
from relayquant.ir.ops.build import check_float, unary_pattern
from relayquant.ir.ops.chain import CHAIN_ATTRIBUTES, ChainPattern, build_chain_table
from relayquant.ir.reference.lookup_table import build_table
from relayquant.ir.reference.unary import RELAX_UNARY
from relayquant.ir.rewrite import Match, Skip
from relayquant.ir.rewrite.attributes import read_attributes
from relayquant.ir.rewrite.graph import constant_value

PRELU = "relax.nn.prelu"


def look_up(
    context: RealizeContext, build: Callable[[QParams, QParams], np.ndarray]
) -> relax.Expr | Skip:
    """Emit dequantize(qnn.lookup(x, table)). `build` makes the table from the parameters of x and
    of the result.
    """
    if context.output is None:
        return Skip(NO_PARAMETERS)
    data = context.operands["data"]
    if data.qparams.dtype not in ("int8", "uint8"):
        return Skip(f"a table needs 8-bit data, the input is {data.qparams.dtype}")
    table = build(data.qparams, context.output)
    value = context.emit(qnn.lookup(data.value, relax.const(table, str(table.dtype))), "int")
    return Quantized(value, context.output).dequantize()


def realize_lookup(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.lookup(x, table)). The table follows from the parameters of x and the
    result.
    """
    call = context.match.graph.values[context.match.root]

    def build(data: QParams, output: QParams) -> np.ndarray:
        function = partial(RELAX_UNARY[call.op.name].tabulate, **read_attributes(call))
        return build_table(function, data, output, Rounding.TONEAREST_EVEN)

    return look_up(context, build)


def check_leaky_relu(match: Match) -> Skip | None:
    """Check as check_float does, and that the slope is in 0..1 as qnn.leaky_relu needs."""
    alpha = float(match.call("relax.nn.leakyrelu").attrs.alpha)
    if not 0 <= alpha <= 1:
        return Skip(f"leaky_relu has alpha={alpha:g}; on integers 0 to 1 is allowed")
    return check_float(match)


def realize_leaky_relu(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.leaky_relu(x)) with the parameters of the result."""
    alpha = float(context.match.call("relax.nn.leakyrelu").attrs.alpha)

    def compute(operands: Sequence[Quantized], result: Quantized) -> relax.Expr:
        (data,) = operands
        return qnn.leaky_relu(
            data.value,
            *data.parameters,
            *result.parameters,
            alpha=alpha,
        )

    return compute_in_one_dtype(context, [context.operands["data"]], compute)


def check_prelu(match: Match) -> Skip | None:
    """Check as check_float does, and that the slopes are finite constants."""
    slopes = constant_value(match.call(PRELU).args[1])
    if slopes is None or not np.isfinite(slopes).all():
        return Skip("its slopes are computed at run time or not finite")
    return check_float(match)


def realize_prelu(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.prelu(x, slopes)) with the parameters of the result."""
    call = context.match.call(PRELU)
    slopes, axis = constant_value(call.args[1]), int(call.attrs.axis)

    def compute(operands: Sequence[Quantized], result: Quantized) -> relax.Expr:
        (data,) = operands
        return qnn.prelu(data.value, *data.parameters, *result.parameters, slopes=slopes, axis=axis)

    return compute_in_one_dtype(context, [context.operands["data"]], compute)


def realize_chain(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.lookup(x, table)). The table is computed by evaluating the chain."""
    return look_up(context, partial(build_chain_table, context.match))


#: comes before all rows of single elementwise operators, so that the longest chain is one table
CHAIN_OPS: tuple[QuantOp, ...] = (
    QuantOp(
        "elementwise_chain", "relax.elementwise_chain", ChainPattern(), (Operand("data"),),
        Kind.CONNECTOR, Output.OWN, realize_chain, check=check_float,
        attributes=CHAIN_ATTRIBUTES,
    ),
)  # fmt: skip

TABLE_OPS: tuple[QuantOp, ...] = tuple(
    QuantOp(
        row.name, op, unary_pattern(op), (Operand("data"),), Kind.CONNECTOR, Output.OWN,
        realize_lookup, check=check_float, attributes=row.attributes,
    )
    for op, row in RELAX_UNARY.items()
    if row.is_table
)  # fmt: skip

#: operators that are computed instead of looked up
SLOPE_OPS: tuple[QuantOp, ...] = (
    QuantOp(
        "leaky_relu", "relax.nn.leakyrelu", unary_pattern("relax.nn.leakyrelu"),
        (Operand("data"),), Kind.CONNECTOR, Output.OWN, realize_leaky_relu, check=check_leaky_relu,
        attributes=("alpha",),
    ),
    QuantOp(
        "prelu", PRELU, unary_pattern(PRELU), (Operand("data"),), Kind.CONNECTOR, Output.OWN,
        realize_prelu, check=check_prelu, attributes=("axis",),
    ),
)  # fmt: skip
