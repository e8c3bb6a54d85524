"""Kernels of a lowered module -> functions as LLVM takes them, for `compilation`: TVM's own
pipeline, without what would be done, or checked, for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import BaseFunc, GlobalVar
from tvm.ir.transform import PassContext
from tvm.tirx.compilation_pipeline import get_tir_pipeline, register_tir_pipeline

from relayquant.codegen.input_checks import IS_INNER
from relayquant.ir.dialect.cost import MACS_ATTR

#: What the pipeline is called: TVM takes those of kernels by name alone.
KERNEL_PIPELINE = "relayquant"

#: Passes that find nothing to do in kernels whose loops, vectors and buffers are written out:
#: without them a kernel is lowered in two thirds of the time and is as fast.
NEEDLESS_PASSES = (
    "s_tir.CompactBufferAllocation",
    "s_tir.HoistIfThenElse",
    "s_tir.StmtSimplify",
    "s_tir.LoopPartition",
    "s_tir.RenormalizeSplitPattern",
    "tirx.RemoveNoOp",
    "tirx.CommonSubexprElim",
)


def name_kernel_pipeline() -> str:
    """The name under which TVM knows the pipeline from now on, for `tvm.compile(tir_pipeline=)`."""
    register_tir_pipeline(KERNEL_PIPELINE, make_kernel_pipeline)
    return KERNEL_PIPELINE


def make_kernel_pipeline() -> tuple[tvm.transform.Pass, Any, Any]:
    """TVM's default pipeline of kernels in its three parts, of which the first is `lower_kernels`
    around the original.
    """
    parts: Any = get_tir_pipeline("default")
    default, finish_host, finish_device = parts

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return lower_kernels(mod, default)

    lowering: Any = tvm.transform.module_pass(run, opt_level=0, name="relayquant.lower_kernels")
    return lowering, finish_host, finish_device


def lower_kernels(mod: tvm.IRModule, default: tvm.transform.Pass) -> tvm.IRModule:
    """PrimFuncs -> host functions: kernels that have their schedule by the passes they need, all
    others by `default`; and the checks of arguments dropped where `input_checks` says so.
    """
    scheduled, others = split_functions(mod, lambda func: MACS_ATTR in (func.attrs or {}))
    with lower_prescheduled():
        lowered = dict(default(take_functions(mod, scheduled)).functions)
    lowered.update(default(take_functions(mod, others)).functions)
    inner, outer = split_functions(
        take_functions(mod, lowered), lambda func: IS_INNER in (func.attrs or {})
    )
    checked = tirx.transform.SkipAssert()(take_functions(mod, inner))
    functions = {**checked.functions, **outer}
    if len(functions) > 1:  # of each part that has one function TVM made it the entry of a library
        functions = {gv: drop_entry(func) for gv, func in functions.items()}
    return take_functions(mod, functions)


def split_functions(
    mod: tvm.IRModule, belongs: Callable[[BaseFunc], bool]
) -> tuple[dict[GlobalVar, BaseFunc], dict[GlobalVar, BaseFunc]]:
    """The functions of a module that `belongs` is true of, and the others."""
    chosen, others = {}, {}
    for gv, func in mod.functions.items():
        (chosen if belongs(func) else others)[gv] = func
    return chosen, others


def take_functions(mod: tvm.IRModule, functions: Mapping[GlobalVar, BaseFunc]) -> tvm.IRModule:
    """The module with these functions alone."""
    return tvm.IRModule(dict(functions), attrs=mod.attrs, global_infos=mod.global_infos)


def drop_entry(func: BaseFunc) -> BaseFunc:
    """The function, no longer the one that a library is called by without a name."""
    return func.without_attr("tirx.is_entry_func")


def lower_prescheduled() -> AbstractContextManager[PassContext]:
    """A context in which TVM leaves those passes out; all else is as in the context around it."""
    current = PassContext.current()
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=[*current.disabled_pass, *NEEDLESS_PASSES],
        instruments=list(current.instruments),
        config=dict(current.config),
    )
