"""Fused TIR functions without a kernel -> scheduled TIR functions: a generic CPU schedule.

TVM's default pipeline leaves fused functions as serial scalar loop nests. Here they are inlined,
tiled, vectorized and made parallel by rules that look only at loops and accesses, without any
tuning.

A schedule may reassociate and contract float reductions. It must not change integer results, or the
rounding of float arithmetic between two operators. LLVM contracts a product and a sum in one
expression to a fused multiply-add. So a product that is inlined into its consumer is fenced
(`llvm.arithmetic.fence`) and is rounded separately.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.target import Target

from relayquant.codegen.kernels.emit import IS_SCHEDULED
from relayquant.codegen.schedule.block_analysis import Unschedulable, is_float
from relayquant.codegen.schedule.scheduler import FunctionScheduler, split_sections
from relayquant.ir.rewrite.function import add_functions

logger = logging.getLogger("relayquant.codegen")


@dataclass(frozen=True)
class ScheduleReport:
    """Result of `schedule_with_report`: scheduled functions, and the others with reasons."""

    scheduled: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]


def schedule_with_report(mod: IRModule, target: Target) -> tuple[IRModule, ScheduleReport]:
    """Schedule every TIR function of `mod` that has no schedule, and report the others.

    Works on static and symbolic shapes. A function stays as it is if
    - it has the attribute `tirx.is_scheduled`
    - it has no blocks to schedule (a handwritten kernel)
    - a scheduling primitive rejects it. The logger `relayquant.codegen` gets the reason at level
    debug.
    """
    scheduled: list[str] = []
    skipped: list[tuple[str, str]] = []
    functions = {}
    for name, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or (func.attrs and func.attrs.get(IS_SCHEDULED)):
            continue
        hint = name.name_hint
        try:
            functions[name] = schedule_function(func, target)
            scheduled.append(hint)
        except Unschedulable as reason:
            skipped.append((hint, str(reason)))
        except RuntimeError as error:
            # A primitive raises on loops it cannot transform. The unscheduled function is correct.
            message = str(error).strip().splitlines() or [type(error).__name__]
            skipped.append((hint, f"{type(error).__name__}: {message[-1]}"))
    for hint, reason in skipped:
        logger.debug("left unscheduled: %s: %s", hint, reason)
    return add_functions(mod, functions), ScheduleReport(tuple(scheduled), tuple(skipped))


def schedule_functions(mod: IRModule, target: Target) -> IRModule:
    """Schedule functions as `schedule_with_report` does, without the report."""
    return schedule_with_report(mod, target)[0]


def create_schedule_pass(target: Target) -> Any:
    """Make `schedule_functions` a module pass. It has to run after FuseTIR."""

    def schedule(mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        return schedule_functions(mod, target)

    return tvm.transform.module_pass(schedule, opt_level=0, name="relayquant.ScheduleFunctions")


def schedule_function(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Return one function with a schedule.

    Raises:
        Unschedulable: There is nothing to schedule.
        ScheduleError: A scheduling primitive of TVM rejects the loops.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        raise Unschedulable("has no root block")
    if target.kind.name == "llvm":
        func = fence_products(func)
    schedule = s_tir.Schedule(
        IRModule({"main": func}), debug_mask="none", error_render_level="fast", seed=1
    )
    FunctionScheduler(schedule, target).run()
    return split_sections(schedule.mod["main"].with_attr(IS_SCHEDULED, True))


def fence_products(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep the rounding of float products that one block passes to another through a buffer.

    Products that are written to the function's output stay: nothing can be contracted with them.
    """

    def fence(store: tirx.BufferStore) -> tirx.BufferStore:
        value = store.value
        if not isinstance(value, tirx.Mul) or not is_float(store.buffer.dtype):
            return store
        if any(store.buffer.same_as(param) for param in func.params):
            return store
        dtype = str(store.buffer.dtype)
        fenced = tirx.call_llvm_pure_intrin(dtype, "llvm.arithmetic.fence", value)
        return tirx.BufferStore(store.buffer, fenced, store.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.BufferStore, fence)))
