"""lower_integer: QNN module -> calls of kernels.

Operators without a kernel are left for exact legalization.

The rules are tried at every value, in order. A rule also takes the following values that its kernel
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm
from tvm.target import Target

from relayquant.codegen.kernels.integer.lookup import ByteShuffle
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa, select_shuffle
from relayquant.codegen.kernels.isa.target import may_use_system
from relayquant.codegen.lowering.engine import BlockView, Lowered, lower_functions
from relayquant.codegen.lowering.integer.elementwise import ELEMENTWISE_RULES
from relayquant.codegen.lowering.integer.linear import LINEAR_RULES
from relayquant.codegen.lowering.kernel_call import IntegerRule, KernelContext
from relayquant.codegen.lowering.shared_kernels import share_kernels
from relayquant.codegen.tuning.tuner import ChooseSchedule, keep_estimate
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.ir.rewrite.function import is_one_block
from relayquant.ir.rewrite.walker import tidy_module

KERNEL_RULES: tuple[IntegerRule, ...] = (*LINEAR_RULES, *ELEMENTWISE_RULES)


def lower_integer(
    mod: tvm.IRModule, target: Target, choose_schedule: ChooseSchedule = keep_estimate
) -> tvm.IRModule:
    """Replace integer operators of main, in the layout of the kernels, by kernels for the target.

    A module is returned unchanged if its main is not a Relax function of one dataflow block, or if
    the target is not an LLVM CPU.
    """
    if target.kind.name != "llvm" or not has_integer_main(mod):
        return mod
    isa, shuffle = time_module(target, mod), select_shuffle(target)
    return call_kernels(mod, isa, shuffle, choose_schedule=choose_schedule)


def time_module(target: Target, mod: tvm.IRModule) -> Isa:
    """Return the target's instruction set with its timing for a module: for its bytes of constants,
    and for what its kernels may ask the system.
    """
    isa = select_isa(target)
    timing = replace(isa.timing, counts_threads=may_use_system(target, mod))
    if timing.winograd.last_bytes is not None:
        timing = timing.for_constants(count_constant_bytes(mod))
    return isa if timing == isa.timing else isa.with_timing(timing)


def has_integer_main(mod: tvm.IRModule) -> bool:
    """Whether main is in normal form and holds an operator of the QNN dialect."""
    if not is_one_block(mod):
        return False
    graph = Graph(mod)
    return any(graph.op_name(binding.var).startswith("relax.qnn.") for binding in graph.bindings)


def call_kernels(
    mod: tvm.IRModule,
    isa: Isa,
    shuffle: ByteShuffle | None = None,
    rules: Sequence[IntegerRule] = KERNEL_RULES,
    choose_schedule: ChooseSchedule = keep_estimate,
) -> tvm.IRModule:
    """Replace every chain that a rule takes by one `call_tir`."""
    graph = Graph(mod)

    def make_context(block: BlockView) -> KernelContext:
        return KernelContext(graph, block, isa, shuffle, choose_schedule)

    def share(calls: list[Lowered], _: BlockView) -> list[Lowered]:
        # Only products take long to compile. The others are faster if LLVM knows the numbers.
        products = [call for call in calls if any(count_macs(graph.call_of(v)) for v in call.vars)]
        shared = dict(zip(products, share_kernels(products), strict=True))
        return [shared.get(call, call) for call in calls]

    lowered = lower_functions(graph.mod, rules, make_context, refine=share, only="main")
    return tidy_module(lowered)
