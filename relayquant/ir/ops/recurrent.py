"""Rows for lstm, gru and rnn: the weight that multiplies the hidden state becomes int8.

lstm(gates, w) -> lstm(gates, w as int8, scales). The operator quantizes the hidden state in each
step. Gates and states are float32 before and after.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.qtypes import Role
from relayquant.ir.dialect.qnn.recurrent import CELLS
from relayquant.ir.ops.base import Kind, Operand, Output, QuantOp, RealizeContext
from relayquant.ir.ops.build import check_constant
from relayquant.ir.rewrite import Match, Pattern, Skip
from relayquant.ir.rewrite.graph import tensor_dtype

#: Attributes that only one operator has.
OWN_ATTRIBUTES = {"lstm": ("input_forget", "cell_clip"), "gru": ("linear_before_reset",), "rnn": ()}


def unit_axis(match: Match) -> int:
    """Return the axis of the gates in the weight (hidden, gates * hidden)."""
    return 1


def check_weight(match: Match) -> Skip | None:
    """Check for a constant weight that is not quantized yet."""
    dtype = tensor_dtype(match.parts["weight"])
    if dtype != "float32":
        return Skip(f"the weight is {dtype}")
    return check_constant(match, "weight")


def realize_recurrent(context: RealizeContext) -> relax.Expr | Skip:
    """Replace the weight and its scale in the call."""
    weight, call = context.operands["weight"], context.match.graph.call_of(context.match.root)
    if call is None or weight.qparams.dtype != "int8" or weight.qparams.zero_point.any():
        return Skip("the weight is not int8 with zero point 0")
    others = [context.emitter.get(operand) for operand in call.args]
    return Call(call.op, [others[0], weight.value, weight.scale, *others[3:]], call.attrs)


def build_recurrent_ops() -> tuple[QuantOp, ...]:
    rows = []
    for name, cell in CELLS.items():
        operands = [wildcard() for _ in cell.operands]
        rows.append(
            QuantOp(
                name,
                f"relax.qnn.{name}",
                Pattern(is_op(f"relax.qnn.{name}")(*operands), {"weight": operands[1]}),
                (Operand("weight", Role.WEIGHT, unit_axis),),
                Kind.ANCHOR,
                Output.WHEN_WANTED,
                realize_recurrent,
                check=check_weight,
                feeds_back=True,
                attributes=("activations", "clip", "is_reversed", *OWN_ATTRIBUTES[name]),
            )
        )
    return tuple(rows)


RECURRENT_OPS: tuple[QuantOp, ...] = build_recurrent_ops()
