"""lower_integer: QNN module -> calls of kernels; what no kernel takes is left for exact
legalization.

The rules are tried at every value, in order; a rule takes the values behind it that its kernel
computes too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from relayquant.codegen.floating import OPAQUE
from relayquant.codegen.kernels.integer.lookup import ByteShuffle
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa, select_shuffle
from relayquant.codegen.layout import is_one_block
from relayquant.codegen.rules.elementwise import ELEMENTWISE_RULES, is_fused
from relayquant.codegen.rules.kernel_call import KernelCall, KernelContext, KernelRule
from relayquant.codegen.rules.linear import LINEAR_RULES
from relayquant.codegen.shared_kernels import share_kernels
from relayquant.codegen.tuning import ChooseForm, keep_estimate
from relayquant.ir.dialect.cost import MACS_ATTR, count_macs
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.rule import OnSkip, fire_first, log_skip, select_rules

logger = logging.getLogger("relayquant.codegen")

KERNEL_RULES: tuple[KernelRule, ...] = (*LINEAR_RULES, *ELEMENTWISE_RULES)


def lower_integer(
    mod: tvm.IRModule, target: Target, choose_form: ChooseForm = keep_estimate
) -> tvm.IRModule:
    """Replace integer operators of main, in the layout of the kernels, by kernels for the target's
    instruction set.

    Modules without a Relax function main in one dataflow block, and targets that are no LLVM CPUs,
    are returned as they are.
    """
    if target.kind.name != "llvm" or not has_integer_main(mod):
        return mod
    isa, shuffle = select_isa(target), select_shuffle(target)
    return call_kernels(mod, isa, shuffle, choose_form=choose_form)


def has_integer_main(mod: tvm.IRModule) -> bool:
    """Whether main is in normal form and holds an operator of the dialect."""
    if not is_one_block(mod):
        return False
    graph = Graph(mod)
    return any(graph.op_name(binding.var).startswith("relax.qnn.") for binding in graph.bindings)


def call_kernels(
    mod: tvm.IRModule,
    isa: Isa,
    shuffle: ByteShuffle | None = None,
    rules: Sequence[KernelRule] = KERNEL_RULES,
    on_skip: OnSkip = log_skip,
    choose_form: ChooseForm = keep_estimate,
) -> tvm.IRModule:
    """The module with every chain that a rule takes computed by one `call_tir`; `on_skip` hears why
    the others are not, and where a chain ends.
    """
    graph = Graph(mod)
    calls = find_calls(KernelContext(graph, isa, shuffle, choose_form, on_skip), rules)
    inner = {var for call in calls.values() for var in call.vars[:-1]}

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr | None:
        if binding.var in inner:
            return None
        call = calls.get(binding.var)
        if call is None:
            return emitter.get(binding.value)
        return emit_call(emitter, call, count_call_macs(graph, call))

    return rewrite_main(mod, visit)


def find_calls(context: KernelContext, rules: Sequence[KernelRule]) -> dict[relax.Var, KernelCall]:
    """Result variable -> kernel call, each value in at most one."""
    calls: list[KernelCall] = []
    taken: set[relax.Var] = set()
    for binding in context.graph.bindings:
        var = binding.var
        if var in taken:
            continue
        if is_fused(context.graph, var, taken):
            logger.debug("no kernel for %s: few values, fused with its neighbours", var.name)
            continue
        tried = ((rule, var) for rule in select_rules(rules, context.graph.op_name(var)))
        found = fire_first(tried, context, var.name, context.on_skip)
        if found is not None:
            calls.append(found[1])
            taken.update(found[1].vars)
    # Only products take long to compile; the others are faster where LLVM knows the numbers.
    products = [call for call in calls if count_call_macs(context.graph, call)]
    shared = zip(products, share_kernels(products), strict=True)
    replaced = {call.vars[-1]: new for call, new in shared}
    return {call.vars[-1]: replaced.get(call.vars[-1], call) for call in calls}


def count_call_macs(graph: Graph, call: KernelCall) -> int:
    """Multiply-adds of one call."""
    return sum(count_macs(graph.call_of(var)) for var in call.vars)


def emit_call(emitter: Emitter, call: KernelCall, macs: int) -> relax.Expr:
    """call_tir of the kernel, `macs` multiply-adds; equal kernels are added to the module once."""
    name = str(call.func.attrs["global_symbol"])
    func = call.func.without_attr("global_symbol").with_attrs(
        {"op_pattern": OPAQUE, MACS_ATTR: macs}
    )
    function = emitter.builder.add_func(func, name)
    operands = [
        relax.const(operand, str(operand.dtype))
        if isinstance(operand, np.ndarray)
        else emitter.get(operand)
        for operand in call.operands
    ]
    return relax.call_tir(function, relax.Tuple(operands), call.vars[-1].ty)
