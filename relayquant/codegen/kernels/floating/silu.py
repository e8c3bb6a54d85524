"""Values in registers -> their silu, which products with a gate compute before they store."""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import constant
from relayquant.codegen.kernels.floating.softmax import emit_exp
from relayquant.codegen.kernels.isa.base import Expr


def emit_silu(x: Expr, lanes: int) -> Expr:
    """Emit x / (1 + e^-x)."""
    x, zero, one = T.bind(x), constant("float32", 0, lanes), constant("float32", 1, lanes)
    power = T.bind(emit_exp(-T.abs(x), lanes))
    return x * T.Select(x < zero, power, one) / (one + power)
