"""Rows for add, subtract and multiply, with an optional activation.

relu(a + b) -> relu(dequantize(qnn.add(a, b))) with the parameters of the result. One operand may be
a constant.
"""

from __future__ import annotations

from tvm import relax

from relayquant.base.qtypes import Role
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import (
    NO_PARAMETERS,
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    repeat_activation,
)
from relayquant.ir.ops.build import (
    ACTIVATION_SUFFIXES,
    binary_pattern,
    check_float,
    first_skip,
    source_constant,
)
from relayquant.ir.rewrite import Match, Skip

#: Relax operator -> integer operator
BINARY = {"relax.add": "add", "relax.subtract": "subtract", "relax.multiply": "mul"}

KINDS = {
    "relax.add": Kind.CONNECTOR,
    "relax.subtract": Kind.CONNECTOR,
    "relax.multiply": Kind.CONNECTOR,
}


def realize_binary(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.op(lhs, rhs)) with the output's parameters, then the activation."""
    if context.output is None:
        return Skip(NO_PARAMETERS)
    lhs, rhs, out = context.operands["lhs"], context.operands["rhs"], context.output
    name = next(BINARY[op] for op in BINARY if context.match.find_call(op) is not None)
    result = Quantized(lhs.value, out)
    value = getattr(qnn, name)(
        lhs.value,
        rhs.value,
        *lhs.parameters,
        *rhs.parameters,
        *result.parameters,
        out_dtype=out.dtype,
    )
    value = context.emit(value, "int")
    return repeat_activation(context, Quantized(value, out).dequantize())


def check_binary(match: Match) -> Skip | None:
    """Check for float32 and at most one constant operand."""
    constants = [n for n in match.parts if source_constant(match.graph, match.parts[n]) is not None]
    if len(constants) == len(match.parts):
        return Skip("both operands are constants")
    return first_skip(check_float(match))


def build_binary_ops() -> tuple[QuantOp, ...]:
    """Build a row for each operator, activation and side of a constant operand, the longest first.

    A constant operand uses the weight configuration (symmetric, per-tensor) and is not observed. In
    commutative operators it is the second operand: prepare puts it there.
    """
    rows = []
    for suffix, activation in ACTIVATION_SUFFIXES:
        for op, name in BINARY.items():
            for constant in ("", "lhs", "rhs") if op == "relax.subtract" else ("", "rhs"):
                operands = tuple(
                    Operand(side, Role.WEIGHT if side == constant else Role.ACTIVATION)
                    for side in ("lhs", "rhs")
                )
                rows.append(
                    QuantOp(
                        name + suffix + (f"_constant_{constant}" if constant else ""), op,
                        binary_pattern(op, activation), operands, KINDS[op], Output.OWN,
                        realize_binary, check=_check_sides(constant),
                    )
                )  # fmt: skip
    return tuple(rows)


def _check_sides(constant: str):
    """Check as check_binary does, and that exactly the operand named `constant` is a constant."""

    def check(match: Match) -> Skip | None:
        skip = check_binary(match)
        if skip is not None:
            return skip
        for side, expr in match.parts.items():
            is_constant = source_constant(match.graph, expr) is not None
            if is_constant != (side == constant):
                return Skip(f"operand {side} is {'a' if is_constant else 'no'} constant")
        return None

    return check


BINARY_OPS: tuple[QuantOp, ...] = build_binary_ops()
