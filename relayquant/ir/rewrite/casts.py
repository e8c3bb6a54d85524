"""Passes of TVM that canonicalize bindings, beside every R.match_cast that compares sizes.

CanonicalizeBindings takes two sizes as one where a match_cast compares them, and drops the
match_cast, also where both are sizes of inputs. Then inputs of other sizes would be read as if they
had these. So a match_cast is hidden from it:

    y = match_cast(x, type)  ->  y = call_pure_packed("relayquant.match_cast", x, ty_args=type)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Op

from relayquant.ir.rewrite.expressions import list_bindings, op_name, same_extents
from relayquant.ir.rewrite.function import list_functions, map_functions
from relayquant.ir.rewrite.inline import list_dimensions

CALL_PACKED = "relax.call_pure_packed"
#: Name of the packed function that stands for a match_cast.
HIDDEN = "relayquant.match_cast"


def canonicalize_bindings(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove bindings that only name another value, and names that a match_cast gives to sizes
    that have one. A match_cast that compares sizes stays as it is.

    main(x: (n, 4)): y = match_cast(x, (k, 4)); z = f(y)  ->  main(x: (n, 4)): z = f(x)
    """
    return run_beside_casts(relax.transform.CanonicalizeBindings(), find_renames, mod)


def run_beside_casts(
    run: tvm.transform.Pass,
    find_shown: Callable[[relax.Function], set[relax.Var]],
    mod: tvm.IRModule,
) -> tvm.IRModule:
    """Run a pass, and hide each match_cast from it but those that `find_shown` finds."""
    shown = {var for func in list_functions(mod).values() for var in find_shown(func)}

    def hide(cast: relax.MatchCast) -> relax.Binding:
        if cast.var in shown:
            return cast
        return relax.VarBinding(cast.var, hide_cast(cast))

    def show(binding: relax.VarBinding) -> relax.Binding:
        return show_cast(binding) or binding

    hidden = map_bindings(mod, relax.MatchCast, hide)
    if hidden is mod:
        return run(mod)
    result = run(relax.transform.Normalize()(hidden))
    return map_bindings(result, relax.VarBinding, show)


def beside_casts(run: tvm.transform.Pass) -> tvm.transform.Pass:
    """Return a pass of TVM from which each match_cast is hidden that compares sizes alone. FuseTIR
    and KillAfterLastUse canonicalize bindings, and end the process where sizes such as n // 2 * 2
    and n become one. They also remove what no value reads, so a match_cast that binds a size stays.
    """

    def apply(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return run_beside_casts(run, find_definitions, mod)

    return tvm.transform.module_pass(apply, opt_level=0, name=f"relayquant.{run.info.name}")  # pyright: ignore[reportReturnType]


def find_definitions(func: relax.Function) -> set[relax.Var]:
    """Find what is bound by a match_cast that gives a size a new name, or compares nothing."""
    names = relax.analysis.definable_tir_vars_in_type
    defining = (cast for cast, known in list_casts(func) if not known.issuperset(names(cast.ty)))
    return find_renames(func).union(cast.var for cast in defining)


def find_renames(func: relax.Function) -> set[relax.Var]:
    """Find what is bound by a match_cast that compares nothing: its sizes are new or the same."""
    return {
        cast.var
        for cast, known in list_casts(func)
        if only_renames(list_dimensions(cast.value.ty), list_dimensions(cast.ty), known)
    }


def list_casts(func: relax.Function) -> Iterator[tuple[relax.MatchCast, Set[tirx.Var]]]:
    """Yield each match_cast, and the sizes that have a name before it."""
    names = relax.analysis.definable_tir_vars_in_type
    known = {size for param in func.params for size in names(param.ty)}
    for cast in list_bindings(func):
        if isinstance(cast, relax.MatchCast):
            yield cast, frozenset(known)
            known.update(names(cast.ty))


def only_renames(given: list, wanted: list, known: Set[tirx.Var]) -> bool:
    """Whether sizes become the wanted ones by names that are not known yet."""
    changed = [
        new for old, new in zip(given, wanted, strict=False) if not same_extents([old], [new])
    ]
    return (
        len(given) == len(wanted) > 0
        and all(isinstance(size, tirx.Var) for size in changed)
        and len(known.union(changed)) == len(known) + len(changed)
    )


def map_bindings(mod: tvm.IRModule, kind: type, change: Callable[[Any], Any]) -> tvm.IRModule:
    """Change each binding of a kind, also in branches. Return `mod` itself if none changes."""
    return map_functions(mod, lambda func: tvm_ffi.structural_map(func, (kind, change)))


def hide_cast(cast: relax.MatchCast) -> Call:
    """Make the call that stands for a cast. It has no type until a pass normalizes the module."""
    return Call(Op.get(CALL_PACKED), [relax.ExternFunc(HIDDEN), cast.value], None, [cast.ty])


def show_cast(binding: relax.Binding) -> relax.MatchCast | None:
    """Return the cast for which a binding stands. None: it is no `hide_cast`."""
    call = binding.value
    callee = call.args[0] if op_name(call) == CALL_PACKED else None
    if not isinstance(callee, relax.ExternFunc) or callee.global_symbol != HIDDEN:
        return None
    return relax.MatchCast(binding.var, call.args[1], call.ty_args[0])
