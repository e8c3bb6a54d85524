"""Legalized module -> the same module, where calls that have to stay apart are not fused, and fused
module -> the same module, where sizes come before what has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, GlobalVar, PrimType
from tvm.relax.analysis import tir_vars_in_type

from relayquant.codegen.lowering.engine import mark_opaque
from relayquant.ir.dialect.loops import INJECTIVE, OPAQUE
from relayquant.ir.rewrite.expressions import list_bindings, list_reads
from relayquant.ir.rewrite.function import list_functions, map_functions


def keep_apart(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark the functions that these rules find as opaque, one rule after the other."""
    functions = list(list_functions(mod).values())
    for find in (find_sized, find_numbered, find_stored):
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

    They have it in their types but not among their arguments. FuseOps knows arguments alone: fused
    with a call before the size, one would come before the size is computed.
    """
    defined = find_casts(func)
    for result, name, call in list_calls(func) if defined else ():
        if any(size in defined for size in list_sizes(result, call)):
            yield name


def find_numbered(func: relax.Function) -> Iterator[str]:
    """Calls with a size as a number among their arguments, as of R.shape_to_tensor.

    FuseTIR fails on a function that has one size as a number and another in a shape.
    """
    for _, name, call in list_calls(func):
        operands = call.args[1].fields if len(call.args) > 1 else ()
        if any(isinstance(each.ty, PrimType) for each in operands):
            yield name


def find_casts(func: relax.Function) -> dict[tirx.Var, relax.MatchCast]:
    """Return the R.match_cast that defines each size which is not one of the parameters."""
    given = {var for param in func.params for var in tir_vars_in_type(param.ty)}
    casts = [each for each in list_bindings(func) if isinstance(each, relax.MatchCast)]
    return {
        var: cast
        for cast in reversed(casts)
        for var in tir_vars_in_type(cast.ty)
        if var not in given
    }


def list_sizes(result: relax.Var, value: relax.Expr) -> Iterator[tirx.Var]:
    """List the symbolic sizes in the types of a bound value and of its operands."""
    operands = value.args if isinstance(value, Call) else ()
    for each in (result, *operands):
        yield from tir_vars_in_type(each.ty)


def put_sizes_first(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Put each R.match_cast that defines a size, and what it reads, before the calls that have it.

    FuseOps orders calls by their arguments alone, so the cast may come last.
    """
    return map_functions(mod, sort_sizes)


def sort_sizes(func: relax.Function) -> relax.Function:
    """Put sizes first in a function of one block."""
    casts = find_casts(func)
    if not casts or len(func.body.blocks) > 1:
        return func
    bindings = {binding.var: binding for binding in list_bindings(func)}
    placed: dict[relax.Var, relax.Binding] = {}

    def place(binding: relax.Binding) -> None:
        sizes = (casts.get(size, binding) for size in list_sizes(binding.var, binding.value))
        for var in (*list_reads(binding.value), *(cast.var for cast in sizes)):
            if var in bindings and var not in placed and var != binding.var:
                place(bindings[var])
        placed[binding.var] = binding

    for binding in bindings.values():
        if binding.var not in placed:
            place(binding)
    block = type(func.body.blocks[0])(list(placed.values()))
    body = relax.SeqExpr([block], func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


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


#: `keep_apart` and `put_sizes_first` as passes.
KEEP_APART = tvm.transform.module_pass(keep_apart, opt_level=0, name="relayquant.keep_apart")
SIZES_FIRST = tvm.transform.module_pass(put_sizes_first, opt_level=0, name="relayquant.sizes_first")
