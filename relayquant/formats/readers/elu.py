"""Elu and its variants, for all readers."""

from __future__ import annotations

from tvm import relax


def scalar(value: float, like: relax.Expr) -> relax.Expr:
    """Return a constant with the dtype of another value."""
    return relax.const(value, str(like.ty.dtype))


def emit_elu(
    bb: relax.BlockBuilder, x: relax.Expr, alpha: float, input_scale: float = 1.0
) -> relax.Expr:
    """Emit max(x, 0) + alpha * (exp(y) - 1) with y = input_scale * min(x, 0), which does not
    overflow.

    exp(y) - 1 is computed as tanh(y / 2) * (exp(y) + 1), because the difference cancels near 0.
    With input_scale 1 this is Elu. With input_scale 1 / alpha it is Celu.
    """
    below = bb.emit(relax.op.minimum(x, scalar(0.0, x)))
    if input_scale != 1.0:
        below = bb.emit(relax.op.multiply(below, scalar(input_scale, x)))
    half = bb.emit(relax.op.tanh(bb.emit(relax.op.multiply(below, scalar(0.5, x)))))
    power = bb.emit(relax.op.add(bb.emit(relax.op.exp(below)), scalar(1.0, x)))
    scaled = bb.emit(relax.op.multiply(bb.emit(relax.op.multiply(half, power)), scalar(alpha, x)))
    return bb.emit(relax.op.add(bb.emit(relax.op.nn.relu(x)), scaled))
