"""Relax module of calls of kernels -> the same with memory that values share.

One step of `passes`. A function with branches is left as it is: each of its values has memory of
its own. TVM 0.27 gives values behind an If memory that only one branch allocates, and the process
ends where the other is taken.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import add_functions, list_functions


def plan_memory(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Plan the memory of functions without branches."""
    branching = {
        gv: func
        for gv, func in list_functions(mod).items()
        if any(isinstance(binding.value, relax.If) for binding in list_bindings(func))
    }
    return add_functions(relax.transform.StaticPlanBlockMemory()(mod), branching)


PLAN_MEMORY = tvm.transform.module_pass(plan_memory, opt_level=0, name="relayquant.plan_memory")
