"""Legalized module -> the same module, where calls with sizes known only at run time are not fused.

R.match_cast defines a symbolic size. Later calls have this size in their types but not among their
arguments. FuseOps orders fused calls by their arguments alone, so it may put one before the size is
computed.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.codegen.lowering.engine import mark_opaque
from relayquant.ir.rewrite.expressions import list_bindings


def keep_sized_calls(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark kernels opaque if a size in the types of a call is defined by a match_cast."""
    sized: set[str] = set()
    for func in mod.functions.values():
        if not isinstance(func, relax.Function):
            continue
        bindings = list(list_bindings(func))
        given = {var for param in func.params for var in list_symbols(param.ty)}
        defined = {
            var
            for binding in bindings
            if isinstance(binding, relax.MatchCast)
            for var in list_symbols(binding.ty)
        } - given
        if not defined:
            continue
        for binding in bindings:
            call = binding.value
            if not isinstance(call, Call) or not call.args:
                continue
            kernel = call.args[0]
            types = [binding.var.ty, *(operand.ty for operand in call.args[1:])]
            if isinstance(kernel, tvm.ir.GlobalVar) and any(
                var in defined for ty in types for var in list_symbols(ty)
            ):
                sized.add(kernel.name_hint)
    return mark_opaque(mod, sized)


def list_symbols(ty: tvm.ir.Type) -> list[tirx.Var]:
    """List the symbolic sizes in a type."""
    if isinstance(ty, relax.TupleType):
        return [var for field in ty.fields for var in list_symbols(field)]
    shape = ty.shape if isinstance(ty, relax.TensorType) else ty
    if not isinstance(shape, relax.ShapeExpr | relax.ShapeType) or shape.values is None:
        return []
    sizes = [size for size in shape.values if not isinstance(size, tirx.IntImm)]
    return [var for size in sizes for var in tirx.analysis.undefined_vars(size)]


#: `keep_sized_calls` as a pass.
KEEP_SIZED_CALLS = tvm.transform.module_pass(
    keep_sized_calls, opt_level=0, name="relayquant.keep_sized_calls"
)
