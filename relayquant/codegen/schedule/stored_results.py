"""Legalized module -> the same module, where results in bfloat16 are not fused with their readers.

TVM computes bfloat16 in float32 and rounds where a tensor is stored. In a fused loop a value stays
in a register, and would not be rounded at all.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.codegen.lowering.engine import mark_opaque
from relayquant.ir.rewrite.expressions import list_bindings, op_name


def keep_stored(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark kernels with a result in bfloat16 as opaque."""
    stored = {
        binding.value.args[0].name_hint
        for func in mod.functions.values()
        if isinstance(func, relax.Function)
        for binding in list_bindings(func)
        if isinstance(binding.value, Call)
        and op_name(binding.value) == "relax.call_tir"
        and holds_bfloat16(binding.var.ty)
    }
    return mark_opaque(mod, stored)


def holds_bfloat16(ty: tvm.ir.Type) -> bool:
    """Whether a value of this type is or has a tensor of bfloat16."""
    if isinstance(ty, relax.TupleType):
        return any(map(holds_bfloat16, ty.fields))
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == "bfloat16"


#: `keep_stored` as a pass.
KEEP_STORED = tvm.transform.module_pass(keep_stored, opt_level=0, name="relayquant.keep_stored")
