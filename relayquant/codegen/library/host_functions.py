"""Kernels of a lowered module -> functions for LLVM; for `compilation`.

This is TVM's own pipeline without passes and argument checks that kernels do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import BaseFunc, GlobalVar
from tvm.ir.transform import PassContext
from tvm.tirx.compilation_pipeline import get_tir_pipeline, register_tir_pipeline

from relayquant.codegen.library.falling_positions import turn_positions
from relayquant.codegen.library.position_divisions import divide_positions
from relayquant.ir.dialect.cost import MACS_ATTR
from relayquant.ir.rewrite.function import take_functions

#: Marks a PrimFunc whose arguments are all known to be valid.
IS_INNER = "relayquant.is_inner"

#: Name of the pipeline. TVM accepts a pipeline of kernels only by name.
KERNEL_PIPELINE = "relayquant"

#: TVM's search for common subexpressions. LLVM does the same, and for all types: TVM names a
#: product of floats that depends on a symbolic size, and fails at a later pass on this name.
SUBEXPRESSIONS = "tirx.CommonSubexprElim"

#: Passes that change nothing in kernels whose loops, vectors and buffers are written out. Without
#: these passes a kernel is lowered in two thirds of the time and is as fast.
NEEDLESS_PASSES = (
    "s_tir.CompactBufferAllocation",
    "s_tir.HoistIfThenElse",
    "s_tir.StmtSimplify",
    "s_tir.LoopPartition",
    "s_tir.RenormalizeSplitPattern",
    "tirx.RemoveNoOp",
    SUBEXPRESSIONS,
)


def name_kernel_pipeline() -> str:
    """Register the pipeline with TVM and return its name, for `tvm.compile(tir_pipeline=)`."""
    register_tir_pipeline(KERNEL_PIPELINE, make_kernel_pipeline)
    return KERNEL_PIPELINE


def make_kernel_pipeline() -> tuple[tvm.transform.Pass, Any, Any]:
    """Make TVM's default pipeline of kernels in its three stages.

    The first one is run by `lower_kernels`.
    """
    parts: Any = get_tir_pipeline("default")
    default, finish_host, finish_device = parts

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return lower_kernels(mod, default)

    lowering: Any = tvm.transform.module_pass(run, opt_level=0, name="relayquant.lower_kernels")
    return lowering, finish_host, finish_device


def lower_kernels(mod: tvm.IRModule, default: tvm.transform.Pass) -> tvm.IRModule:
    """Lower PrimFuncs to host functions.

    Kernels with a schedule go through the passes they need, all others through `default`. Positions
    are divided as `falling_positions` and `position_divisions` say. Argument checks are dropped
    from the functions that `checks.inputs` marks.
    """
    turned = {gv: turn_positions(func) for gv, func in mod.functions.items()}
    mod = take_functions(mod, turned)
    scheduled, others = split_functions(mod, lambda func: MACS_ATTR in (func.attrs or {}))
    with disable_passes(NEEDLESS_PASSES):
        lowered = dict(default(take_functions(mod, scheduled)).functions)
    with disable_passes([SUBEXPRESSIONS]):
        lowered.update(default(take_functions(mod, others)).functions)
    inner, outer = split_functions(
        take_functions(mod, lowered), lambda func: IS_INNER in (func.attrs or {})
    )
    checked = tirx.transform.SkipAssert()(take_functions(mod, inner))
    functions = {**checked.functions, **outer}
    functions = {gv: divide_positions(func) for gv, func in functions.items()}
    if len(functions) > 1:  # in a module with a single function, TVM marks it as the entry
        functions = {gv: drop_entry(func) for gv, func in functions.items()}
    return take_functions(mod, functions)


def split_functions(
    mod: tvm.IRModule, belongs: Callable[[BaseFunc], bool]
) -> tuple[dict[GlobalVar, BaseFunc], dict[GlobalVar, BaseFunc]]:
    """Split the functions of a module into those for which `belongs` is true and the others."""
    chosen, others = {}, {}
    for gv, func in mod.functions.items():
        (chosen if belongs(func) else others)[gv] = func
    return chosen, others


def drop_entry(func: BaseFunc) -> BaseFunc:
    """Remove the mark that makes a function the unnamed entry of a library."""
    return func.without_attr("tirx.is_entry_func")


def disable_passes(names: Iterable[str]) -> AbstractContextManager[PassContext]:
    """Make a pass context without some passes. All else is as in the current context."""
    current = PassContext.current()
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=[*current.disabled_pass, *names],
        instruments=list(current.instruments),
        config=dict(current.config),
    )
