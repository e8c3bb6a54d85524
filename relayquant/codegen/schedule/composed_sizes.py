"""Fused TIR with composed sizes -> the same with a variable for each size; for `passes`.

    f(x: ((n + 7) // 8, 8)): x[i, j] for i < (n + 7) // 8   ->   f(x: (k, 8)): x[i, j] for i < k

LLVM takes minutes for loops over sizes that are nested divisions. A function's arguments have their
sizes when it is called, so they need not be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from relayquant.codegen.schedule.reshapes import is_reshape
from relayquant.ir.rewrite.function import add_functions

#: Operators after which LLVM does not see how a size is bounded.
DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Max, tirx.Min)

#: A size, and the variable or the expression of variables that stands for it.
Name = tuple[Any, Any]


def name_sizes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Name the composed sizes of a function's arguments. Loops have their simplified form.

    A function that only gives data another shape stays: TVM sees that from the sizes.
    """
    found: list[Any] = []
    for param in func.params:
        for size in getattr(param.ty, "shape", ()):
            if is_composed(size) and not any(tvm_ffi.structural_equal(size, x) for x in found):
                found.append(size)
    if not found or is_reshape(func):
        return func
    names: list[Name] = []
    for size in sorted(found, key=count_nodes):
        named = replace_sizes(size, names)  # a product of sizes that have names is no new one
        if is_composed(named):
            named = tirx.Var(f"size_{len(names)}", str(size.ty))
        names = [(size, named), (Analyzer().simplify(size), named), *names]
    return replace_sizes(func, names)


def replace_sizes(node: Any, names: Sequence[Name]) -> Any:
    """Replace the sizes by their names, the largest first."""
    if not names:
        return node

    def replace(part: Any) -> Any:
        return next((name for size, name in names if tvm_ffi.structural_equal(size, part)), part)

    kinds = {type(size) for size, _ in names}
    return tvm_ffi.structural_map(node, *[[(kind, replace) for kind in kinds]], order="pre")


def list_parts(size: Any) -> list[Any]:
    """List the operands of a size."""
    return [getattr(size, part) for part in ("a", "b") if hasattr(size, part)]


def is_composed(size: Any) -> bool:
    """Whether there is a division, a minimum or a maximum in a size."""
    return isinstance(size, DIVISIONS) or any(map(is_composed, list_parts(size)))


def count_nodes(size: Any) -> int:
    """Return the number of operators, numbers and variables of a size."""
    return 1 + sum(map(count_nodes, list_parts(size)))


def name_all(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Name the sizes of all functions."""
    found = {gv: func for gv, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    named = {gv: name_sizes(func) for gv, func in found.items()}
    changed = {gv: func for gv, func in named.items() if not func.same_as(found[gv])}
    return add_functions(mod, changed) if changed else mod


#: `name_all` as a pass.
NAME_SIZES = tvm.transform.module_pass(name_all, opt_level=0, name="relayquant.name_sizes")
