"""The operators that a model calls."""

from __future__ import annotations

from collections import Counter

import tvm

from relayquant.ir.rewrite.graph import Graph


def list_operators(mod: tvm.IRModule) -> list[str]:
    """Operators that main calls, in order, without the "relax." in front."""
    graph = Graph(mod)
    names = [graph.op_name(binding.var) for binding in graph.bindings]
    return [name.removeprefix("relax.") for name in names if name]


def count_operators(mod: tvm.IRModule) -> Counter[str]:
    """How often main calls each operator."""
    return Counter(list_operators(mod))
