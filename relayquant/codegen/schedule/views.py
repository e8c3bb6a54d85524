"""Legalized module -> the same module, where reshapes are not fused with data movement.

A separate reshape after a permutation is a view and costs nothing. A fused loop has to divide its
positions and runs element by element.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.codegen.lowering.engine import OPAQUE, mark_opaque
from relayquant.ir.rewrite.expressions import list_bindings, op_name

#: relax::OpPatternKind::kInjective: each element is computed from elements at any positions.
INJECTIVE = 2


def keep_views(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark reshapes that read the result of a data movement as opaque, so they are not fused.

    A reshape between two data movements is not marked: all three are fused.
    """
    views: set[str] = set()
    between: set[str] = set()
    for func in mod.functions.values():
        if not isinstance(func, relax.Function):
            continue
        kernels: dict[relax.Var, str] = {}
        for binding in list_bindings(func):
            value = binding.value
            if not isinstance(value, Call) or op_name(value) != "relax.call_tir":
                continue
            name, operands = value.args[0].name_hint, list(value.args[1].fields)
            kernels[binding.var] = name
            source = kernels.get(operands[0]) if len(operands) == 1 else None
            if source is None:
                continue
            if is_view(mod[name]) and is_move(mod[source]):
                views.add(name)
            elif is_move(mod[name]):
                between.add(source)
    return mark_opaque(mod, views - between)


def is_view(func: Any) -> bool:
    """Whether a function copies its argument in memory order."""
    return isinstance(func, tirx.PrimFunc) and relax.analysis.has_reshape_pattern(func)


def is_move(func: Any) -> bool:
    """Whether a function moves the elements of its only argument to other positions."""
    if not isinstance(func, tirx.PrimFunc) or len(func.params) != 2 or is_view(func):
        return False
    return int((func.attrs or {}).get("op_pattern", OPAQUE)) == INJECTIVE


#: `keep_views` as a pass.
KEEP_VIEWS = tvm.transform.module_pass(keep_views, opt_level=0, name="relayquant.keep_views")
