"""Make functions from bindings, change the functions of a module, name new values, and read the
source node of each value.

`BlockBuilder.function` of TVM records each open function in one list per process. If two threads
build at once, one fails, and its record stays in the list. The code here records nothing. It may
run beside other threads, and an exception leaves nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax


def define_function(
    builder: relax.BlockBuilder,
    params: Sequence[relax.Var],
    emit: Callable[[], relax.Expr],
    *,
    attrs: Mapping[str, Any] | None = None,
) -> relax.Function:
    """Make a function of one dataflow block. `emit` adds the bindings to `builder` and returns the
    result.

    The result is a Var that is not a DataflowVar, as returned by `builder.emit_output`, or a tuple
    of them.
    """
    builder.begin_scope(params)
    try:
        builder._begin_dataflow_block()
        try:
            result = emit()
        finally:
            block = builder._end_block()
        blocks = [block] if block.bindings else []
        body = builder.normalize(relax.SeqExpr(blocks, result))
    finally:
        builder.end_scope()
    func: Any = relax.Function(params, body)
    for key, value in (attrs or {}).items():
        func = func.with_attr(key, value)
    return func


def make_main(
    params: Sequence[relax.Var], emit: Callable[[relax.BlockBuilder], relax.Expr]
) -> tvm.IRModule:
    """Make a module with a main that returns the result of `emit`, which is not bound yet.

    The module also holds the TIR functions that `emit` added to the builder.
    """
    builder = relax.BlockBuilder()
    main = define_function(builder, params, lambda: builder.emit_output(emit(builder)))
    mod = builder.finalize()
    mod["main"] = main.with_attr("global_symbol", "main")
    return mod


def take_functions(mod: tvm.IRModule, functions: Mapping[Any, Any]) -> tvm.IRModule:
    """Return the module with only these functions, by their global variables."""
    return tvm.IRModule(dict(functions), attrs=mod.attrs, global_infos=mod.global_infos)


def add_functions(mod: tvm.IRModule, functions: Mapping[Any, Any]) -> tvm.IRModule:
    """Return the module with functions added. One replaces a function of the same variable."""
    return take_functions(mod, {**dict(mod.functions_items()), **functions})


def list_functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, relax.Function]:
    """List the Relax functions of a module by their global variables, sorted by name."""
    return {gvar: func for gvar, func in mod.functions_items() if isinstance(func, relax.Function)}


def map_functions(
    mod: tvm.IRModule, change: Callable[[relax.Function], relax.Function]
) -> tvm.IRModule:
    """Return the module with each Relax function changed, or `mod` itself if none changes."""
    found = list_functions(mod)
    changed = {gvar: change(func) for gvar, func in found.items()}
    changed = {gvar: func for gvar, func in changed.items() if not func.same_as(found[gvar])}
    return add_functions(mod, changed) if changed else mod


def is_one_block(mod: tvm.IRModule) -> bool:
    """Whether main is one dataflow block, as rules require."""
    names = [gv.name_hint for gv in mod.get_global_vars()]
    if "main" not in names or not isinstance(mod["main"], relax.Function):
        return False
    body = mod["main"].body
    if not isinstance(body, relax.SeqExpr) or len(body.blocks) != 1:
        return False
    return isinstance(body.blocks[0], relax.DataflowBlock)


def mutate_functions(mod: tvm.IRModule, mutator: relax.PyExprMutator) -> tvm.IRModule:
    """Return the module with its Relax functions as a mutator of the module makes them, and with
    the functions that the mutator adds to its builder.
    """
    for gvar, func in list_functions(mod).items():
        changed = mutator.visit_expr(func)
        if not changed.same_as(func):
            mutator.builder_.update_func(gvar, changed)
    return mutator.builder_.get()


def find_free_name(base: str, taken: Container[str], joint: str = ".") -> str:
    """Return `base`, or `base.1`, `base.2`, ... if it is taken."""
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}{joint}{number}"
    return name


#: Attribute of main: JSON text, value name -> {"node": name, "op": operator, "constants": names of
#: its weights and biases}. "constants" is absent if there are none.
SOURCES_ATTR = "relayquant.sources"


def read_sources(func: relax.Function) -> dict[str, dict[str, Any]]:
    """Read `SOURCES_ATTR`: value name -> row. Empty if nothing was recorded."""
    attrs = func.attrs
    if attrs is None or SOURCES_ATTR not in attrs:
        return {}
    return json.loads(str(attrs[SOURCES_ATTR]))
