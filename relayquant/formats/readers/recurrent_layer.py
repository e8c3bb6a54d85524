"""Readers: one direction of a recurrent layer -> a product of all inputs and one operator.

gates = matmul(x, w) + b         (T, B, G * H)
y = qnn.lstm(gates, r, ...)      last states, then the hidden state of each step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.ir import Call


def emit_layer(
    bb: relax.BlockBuilder,
    layer: Callable[..., Call],
    data: relax.Expr,
    weights: tuple[relax.Expr, relax.Expr, relax.Expr | None],
    states: int,
    first: relax.Expr | None = None,
    **settings: Any,
) -> tuple[relax.Expr, list[relax.Expr]]:
    """Emit one direction of a layer. Returns (hidden state of each step, last states).

    Args:
        bb: The builder.
        layer: Constructor of the dialect.
        data: (T, B, inputs).
        weights: Of the inputs (inputs, G * H), of the state (H, G * H), and the bias or None, with
            the gates in ONNX's order.
        states: Number of states. Each has the shape (1, B, H).
        first: Added to the gates of the first step that is computed, (B, G * H).
        settings: Other operands and attributes of the constructor.
    """
    own, state, bias = weights
    gates = bb.emit(relax.op.matmul(data, own))
    if bias is not None:
        gates = bb.emit(relax.op.add(gates, bias))
    if first is not None:
        row, rest = bb.emit(relax.op.expand_dims(first, [0])), int(data.ty.shape.values[0]) - 1
        steps = [rest, 0] if settings.get("is_reversed") else [0, rest]
        gates = bb.emit(relax.op.add(gates, bb.emit(relax.op.nn.pad(row, [*steps, 0, 0, 0, 0]))))
    values = bb.emit(layer(gates, state, **settings))
    end = data.ty.shape.values[0] + states

    def take(first: Any, last: Any) -> relax.Expr:
        # TVM infers a condition for the size of a slice that may reach out of symbolic steps.
        cut = relax.op.strided_slice(values, [0], [first], [last], [1], assume_inbound=True)
        return bb.emit(cut)

    last = [take(i, i + 1) for i in range(states)]
    return take(states, end), last
