"""Find the model function of a module and name it main, as all stages expect.

`relax.frontend.nn` exports `forward`. A module may also hold functions that the model calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar

from relayquant.base.language import LANGUAGE_FUNCTIONS
from relayquant.errors import ModelError
from relayquant.ir.rewrite.function import add_functions, list_functions

#: Name of the model function inside the package and in its results.
MAIN = "main"


def find_entry(mod: tvm.IRModule) -> str | None:
    """Find the name of the model function, or None if several functions could be the model.

    The model is main, else the only public Relax function, else the only Relax function.
    """
    if any(gvar.name_hint == MAIN for gvar in mod.get_global_vars()):
        return MAIN if isinstance(mod[MAIN], relax.Function) else None  # else a kernel
    functions = {gvar.name_hint: func for gvar, func in list_functions(mod).items()}
    public = [name for name, func in functions.items() if "global_symbol" in (func.attrs or {})]
    names = public or [*functions]
    return names[0] if len(names) == 1 else None


def find_attrs(mod: tvm.IRModule) -> Mapping[str, Any]:
    """Return the attributes of the model function, or of the module if it has no such function."""
    entry = find_entry(mod)
    return (mod.attrs if entry is None else mod[entry].attrs) or {}


def attach_attrs(mod: tvm.IRModule, attrs: Mapping[str, str]) -> tvm.IRModule:
    """Return the module with attributes at its model function.

    If several functions could be the model, the module itself has the attributes.
    """
    entry = find_entry(mod)
    if entry is None:
        return mod.with_attrs(attrs)
    return add_functions(mod, {mod.get_global_var(entry): mod[entry].with_attrs(attrs)})


def name_main(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with its model named main. `mod` is not changed.

    Raises:
        ModelError: Several functions could be the model, or none.
    """
    entry = find_entry(mod)
    if entry == MAIN:
        return mod
    if entry is not None:
        return rename_function(mod, entry, MAIN)
    if is_language_model(mod):
        raise ModelError(
            "The module is a language model: it has the functions prefill and decode, and no main. "
            "`relayquant generate` and relayquant.Generator run it, relayquant.compress_weights "
            "makes it smaller, and relayquant.compile compiles it.",
            code="RQ204",
        )
    names = sorted(gvar.name_hint for gvar in mod.get_global_vars())
    raise ModelError(
        f"The module has no Relax function 'main' (functions: {', '.join(names) or 'none'}), and "
        "no other function is certainly the model; allowed: a function 'main', or exactly one "
        "public Relax function, or exactly one Relax function. Rename the function to quantize to "
        "'main'.",
        code="RQ204",
    )


def is_language_model(mod: tvm.IRModule) -> bool:
    """Return whether a module has the functions of a language model instead of one entry."""
    names = {gvar.name_hint for gvar in mod.get_global_vars()}
    return names >= set(LANGUAGE_FUNCTIONS) and find_entry(mod) is None


def rename_function(mod: tvm.IRModule, old: str, new: str) -> tvm.IRModule:
    """Rename function `old` to `new`, also in its calls. `mod` is not changed.

    The name `new` must be free.
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
