"""Analysis: how large a model is."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value


def count_constant_bytes(mod: tvm.IRModule) -> int:
    """Bytes of all constants of function main: weights, biases, and quantization parameters.

    A constant that several operators read counts once.
    """
    sizes: dict[Any, int] = {}

    def visit(expr: Any) -> None:
        value = constant_value(expr)
        if value is not None:
            sizes[expr] = value.nbytes

    relax.analysis.post_order_visit(Graph(mod).func, visit)
    return sum(sizes.values())
