"""Finished kernels -> TVM's lowering, without what those laid out by hand do not need."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tvm.ir.transform import PassContext

#: Passes that find nothing to do in kernels whose loops, vectors and buffers are laid out by hand:
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


def lower_by_hand() -> AbstractContextManager[PassContext]:
    """A context in which TVM leaves those passes out; all else is as in the context around it."""
    current = PassContext.current()
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=[*current.disabled_pass, *NEEDLESS_PASSES],
        instruments=list(current.instruments),
        config=dict(current.config),
    )
