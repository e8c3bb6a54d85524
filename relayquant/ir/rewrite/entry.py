"""The function of a module that is its model: stages know it as main, whatever the user calls it.

`relax.frontend.nn` exports `forward`; a module may also hold functions that the model calls.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar

from relayquant.errors import ModelError

#: What the model is called within the package, and in what it returns.
MAIN = "main"


def find_entry(mod: tvm.IRModule) -> str | None:
    """Name of the Relax function that is the model: main, or else the only one that is public, or
    that there is; None where that is no one function.
    """
    if any(gvar.name_hint == MAIN for gvar in mod.get_global_vars()):
        return MAIN if isinstance(mod[MAIN], relax.Function) else None  # else that of a kernel
    functions = {
        gvar.name_hint: func
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function)
    }
    public = [name for name, func in functions.items() if "global_symbol" in (func.attrs or {})]
    names = public or [*functions]
    return names[0] if len(names) == 1 else None


def name_main(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with its model called main; `mod` is not changed.

    Raises:
        ModelError: it has several functions that could be the model, or none.
    """
    entry = find_entry(mod)
    if entry == MAIN:
        return mod
    if entry is not None:
        return rename_function(mod, entry, MAIN)
    names = sorted(gvar.name_hint for gvar in mod.get_global_vars())
    raise ModelError(
        f"The module has no Relax function 'main' (functions: {', '.join(names) or 'none'}), and "
        "not exactly one other that could be the model: one Relax function that is public, or one "
        "in all. Rename the function to quantize to 'main'.",
        code="RQ204",
    )


def rename_function(mod: tvm.IRModule, old: str, new: str) -> tvm.IRModule:
    """The module with function `old` called `new`, also where it is called; `mod` is not changed.
    No function is called `new` yet.
    """
    before, after = mod.get_global_var(old), GlobalVar(new)
    functions: dict[GlobalVar, Any] = {}
    for gvar, func in mod.functions_items():
        changed: Any = tvm_ffi.structural_map(
            func, (GlobalVar, lambda var: after if var.same_as(before) else var)
        )
        if gvar.same_as(before):
            gvar = after
            if "global_symbol" in (func.attrs or {}):
                changed = changed.with_attr("global_symbol", new)
        functions[gvar] = changed
    return tvm.IRModule(functions, attrs=mod.attrs)
