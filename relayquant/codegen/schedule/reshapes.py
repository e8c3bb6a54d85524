"""Calls of TIR functions that only give data another shape -> R.reshape, which copies nothing."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from relayquant.ir.rewrite.function import add_functions


def rewrite_reshapes(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
    """Rewrite the calls.

    TVM's analysis fails for some sums of symbolic sizes, such as the width behind a convolution.
    Calls of functions that it fails for are left as they are.
    """
    rewrite = relax.transform.RewriteDataflowReshape()
    try:
        return rewrite(mod)
    except tvm.error.InternalError:
        hidden = {gvar: func for gvar, func in mod.functions_items() if is_reshape(func) is None}
    # In place of them stand functions that do nothing.
    hollow = {gvar: func.with_body(tirx.Evaluate(0)) for gvar, func in hidden.items()}
    return add_functions(rewrite(add_functions(mod, hollow)), hidden)


def is_reshape(func: Any) -> bool | None:
    """Return whether a function only gives data another shape. None: TVM cannot say."""
    try:
        return isinstance(func, tirx.PrimFunc) and relax.analysis.has_reshape_pattern(func)
    except tvm.error.InternalError:
        return None


#: The pass.
REWRITE_RESHAPES = tvm.transform.module_pass(
    rewrite_reshapes, opt_level=0, name="relayquant.RewriteReshapes"
)
