"""Functions: made of bindings, names of new values, and the source file's node of each value.

Functions are made without the stack of open functions that TVM's builder shares.

`BlockBuilder.function` notes each function that is being built in one list for the whole process:
of two threads that build at once one fails, and what it noted stays there. Nothing here notes
anything, so it may run beside any other thread, and an exception leaves nothing behind.
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
    """A function of one dataflow block: `emit` emits its bindings to `builder` and returns its
    result.

    The result is a variable that is no DataflowVar, as `builder.emit_output` gives it, or a tuple
    of such.
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
    """A module of a main whose one result is what `emit` returns, not bound yet, and of the TIR
    functions that were added to the builder on the way.
    """
    builder = relax.BlockBuilder()
    main = define_function(builder, params, lambda: builder.emit_output(emit(builder)))
    mod = builder.finalize()
    mod["main"] = main.with_attr("global_symbol", "main")
    return mod


def find_free_name(base: str, taken: Container[str], joint: str = ".") -> str:
    """`base`, or `base.1`, `base.2`, ... where it is taken."""
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}{joint}{number}"
    return name


#: Attribute of main: JSON text, value name -> {"node": name, "op": operator, "constants": names of
#: its weights and biases}; "constants" is absent where it has none.
SOURCES_ATTR = "relayquant.sources"


def read_sources(func: relax.Function) -> dict[str, dict[str, Any]]:
    """Value name -> its row of `SOURCES_ATTR`; empty where nothing was recorded."""
    attrs = func.attrs
    if attrs is None or SOURCES_ATTR not in attrs:
        return {}
    return json.loads(str(attrs[SOURCES_ATTR]))
