"""Values of element types that no code computes -> an error; for `compilation`."""

from __future__ import annotations

import tvm

from relayquant.errors import ModelError
from relayquant.ir.rewrite.element_types import ELEMENT_TYPES, is_too_narrow, list_dtypes
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.graph import free_vars


def check_element_types(mod: tvm.IRModule) -> None:
    """Raise ModelError for the first value of such a type that depends on an input. Names it.

    Values of constants alone are computed before the model is compiled.
    """
    for func in list_functions(mod).values():
        late = set(func.params)
        for binding in list_bindings(func):
            if not late.isdisjoint(free_vars(binding.value)):
                late.add(binding.var)
        for var in (*func.params, *(binding.var for binding in list_bindings(func))):
            dtype = next(filter(is_too_narrow, list_dtypes(var.ty)), "")
            if dtype and var in late:
                raise ModelError(
                    f"Value {var.name!r} has elements of {dtype}; allowed: {ELEMENT_TYPES}. Cast "
                    "to one of these: int8 and uint8 hold all integers of fewer bits.",
                    code="RQ206",
                )
