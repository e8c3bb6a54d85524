"""Legalized module -> the same module, where calls that have to stay apart are not fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, GlobalVar
from tvm.relax.analysis import tir_vars_in_type

from relayquant.codegen.lowering.engine import mark_opaque
from relayquant.ir.dialect.loops import INJECTIVE, OPAQUE
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import list_functions


def keep_apart(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark the functions that these rules find as opaque, one rule after the other."""
    functions = list(list_functions(mod).values())
    for find in (find_sized, find_stored):
        mod = mark_opaque(mod, {name for func in functions for name in find(func)})
    return mark_opaque(mod, find_views(mod, functions))


def list_calls(func: relax.Function) -> Iterator[tuple[relax.Var, str, Call]]:
    """(result, name of the called PrimFunc, call) in order."""
    for binding in list_bindings(func):
        call = binding.value
        if isinstance(call, Call) and call.args and isinstance(call.args[0], GlobalVar):
            yield binding.var, call.args[0].name_hint, call


def find_sized(func: relax.Function) -> Iterator[str]:
    """Calls with a size that R.match_cast defines.

    They have it in their types but not among their arguments. FuseOps orders fused calls by their
    arguments alone, so it may put one before the size is computed.
    """
    given = {var for param in func.params for var in tir_vars_in_type(param.ty)}
    casts = [each for each in list_bindings(func) if isinstance(each, relax.MatchCast)]
    defined = {var for cast in casts for var in tir_vars_in_type(cast.ty)} - given
    for result, name, call in list_calls(func) if defined else ():
        types = [result.ty, *(operand.ty for operand in call.args[1:])]
        if any(var in defined for ty in types for var in tir_vars_in_type(ty)):
            yield name


def find_stored(func: relax.Function) -> Iterator[str]:
    """Calls with a result in bfloat16.

    TVM computes bfloat16 in float32 and rounds where a tensor is stored. In a fused loop a value
    stays in a register, and would not be rounded at all.
    """
    return (name for result, name, _ in list_calls(func) if holds_bfloat16(result.ty))


def holds_bfloat16(ty: tvm.ir.Type) -> bool:
    """Whether a value of this type is or has a tensor of bfloat16."""
    if isinstance(ty, relax.TupleType):
        return any(map(holds_bfloat16, ty.fields))
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == "bfloat16"


def find_views(mod: tvm.IRModule, functions: Sequence[relax.Function]) -> set[str]:
    """Reshapes that read the result of a data movement.

    Such a reshape alone is a view and costs nothing. A fused loop has to divide its positions and
    runs element by element. A reshape between two data movements is not found: all three are fused.
    """
    views: set[str] = set()
    between: set[str] = set()
    for func in functions:
        names: dict[relax.Var, str] = {}
        for result, name, call in list_calls(func):
            names[result] = name
            operands = list(call.args[1].fields)
            source = names.get(operands[0]) if len(operands) == 1 else None
            if source is None:
                continue
            if is_view(mod[name]) and is_move(mod[source]):
                views.add(name)
            elif is_move(mod[name]):
                between.add(source)
    return views - between


def is_view(func: Any) -> bool:
    """Whether a function copies its argument in memory order."""
    return isinstance(func, tirx.PrimFunc) and relax.analysis.has_reshape_pattern(func)


def is_move(func: Any) -> bool:
    """Whether a function moves the elements of its only argument to other positions."""
    if not isinstance(func, tirx.PrimFunc) or len(func.params) != 2 or is_view(func):
        return False
    return int((func.attrs or {}).get("op_pattern", OPAQUE)) == INJECTIVE


#: `keep_apart` as a pass.
KEEP_APART = tvm.transform.module_pass(keep_apart, opt_level=0, name="relayquant.keep_apart")
