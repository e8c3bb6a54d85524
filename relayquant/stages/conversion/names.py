"""Last step of convert: each integer value takes the name of the float value that it represents.

v.acc, v.sum, ... -> v.acc, v. So the ledger's v is found as v in the integer module, unless v is
still there in float. Accumulators keep their names, because they are not in units of v.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import tvm
from tvm import relax

from relayquant.ir.ledger import find_ledger
from relayquant.ir.ops.base import NARROW, SHIFTED, TOTALS
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.graph import tensor_dtype

#: last part of an accumulator's name
ACCUMULATORS = (*TOTALS, NARROW, SHIFTED)


def name_integers(mod: tvm.IRModule) -> tvm.IRModule:
    """Rename the module's integer values. Without a ledger the module stays as it is."""
    ledger = find_ledger(mod)
    if ledger is None:
        return mod
    graph = Graph(mod)
    names = find_names(graph, {value: row.dtype for row in ledger.rows for value in row.values})
    if not names:
        return mod

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        value = emitter.get(binding.value)
        if binding.var not in names:
            return value
        return emitter.emit(value, names[binding.var])

    return rewrite_main(mod, visit)


def find_names(graph: Graph, values: Mapping[str, str]) -> dict[relax.Var, str]:
    """Map variables to new names: each value that is no longer bound gives its name to the last
    integers made for it. `values`: value -> the dtype of its integers. A callback of a row may make
    others on the way.
    """
    last: dict[str, relax.Var] = {}
    for binding in graph.bindings:
        owner = find_owner(binding.var.name, values.keys())
        if owner not in graph.vars and tensor_dtype(binding.var) == values.get(owner):
            last[owner] = binding.var
    return {
        var: owner for owner, var in last.items() if var.name.rsplit(".", 1)[-1] not in ACCUMULATORS
    }


def find_owner(name: str, values: Set[str]) -> str:
    """Return the value that `name` was made for: the longest of `values` that is its prefix; ""
    for none.
    """
    while "." in name:
        name = name.rsplit(".", 1)[0]
        if name in values:
            return name
    return ""
