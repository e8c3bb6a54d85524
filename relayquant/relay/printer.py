"""Relay writer: `relay.syntax` -> the text that TVM prints and parses, without metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from relayquant.errors import ModelError
from relayquant.relay import syntax

#: Suffixes of literals. Constants of other dtypes must be parameters.
SUFFIXES = {
    "float32": "f",
    "float16": "f16",
    "float64": "f64",
    "int32": "",
    "int64": "i64",
    "int16": "i16",
}


def print_module(module: syntax.Module) -> str:
    """Print a module.

    Raises:
        ModelError: a constant has no literal.
    """
    functions = [
        f"def @{name}{print_function(function, 0)}\n" for name, function in module.functions.items()
    ]
    return '#[version = "0.0.5"]\n' + "\n".join(functions)


def print_function(function: syntax.Function, indent: int) -> str:
    """Print a function: `(%x: type, key=value) -> type { ... }`."""
    params = [
        f"%{param.name}" + (f": {print_type(param.type)}" if param.type else "")
        for param in function.params
    ]
    attrs = [f"{key}={print_value(value)}" for key, value in function.attrs.items()]
    result = f" -> {print_type(function.result_type)}" if function.result_type else ""
    return f"({', '.join(params + attrs)}){result} {print_block(function.body, indent)}"


def print_block(block: syntax.Block, indent: int) -> str:
    """Print a block: `{`, one line per statement, the result, `}`."""
    lines = [*print_statements(block, indent + 2), print_expr(block.result, indent + 2)]
    margin = "\n" + " " * (indent + 2)
    return "{" + margin + margin.join(lines) + "\n" + " " * indent + "}"


def print_statements(block: syntax.Block, indent: int) -> Iterator[str]:
    for statement in block.statements:
        if isinstance(statement, syntax.FreeVar):
            kind = statement.param.type
            yield f"free_var %{statement.param.name}{f': {print_type(kind)}' if kind else ''};"
            continue
        head = f"let %{statement.name}" if statement.is_let else f"%{statement.name}"
        kind = f": {print_type(statement.type)}" if statement.type else ""
        yield f"{head}{kind} = {print_expr(statement.value, indent)};"


def print_type(kind: syntax.Type) -> str:
    return str(kind)


def print_expr(expr: syntax.Expr, indent: int) -> str:
    """Print an expression. Inner blocks start at `indent`."""
    if isinstance(expr, syntax.Ref):
        return f"%{expr.name}"
    if isinstance(expr, syntax.GlobalRef):
        return f"@{expr.name}"
    if isinstance(expr, syntax.Constant):
        return print_literal(expr.value)
    if isinstance(expr, syntax.OpCall):
        args = [print_expr(arg, indent) for arg in expr.args]
        args += [f"{key}={print_value(value)}" for key, value in expr.attrs.items()]
        return f"{expr.op}({', '.join(args)})"
    if isinstance(expr, syntax.FunctionCall):
        args = [print_expr(arg, indent) for arg in expr.args]
        return f"{print_expr(expr.function, indent)}({', '.join(args)})"
    if isinstance(expr, syntax.TupleExpr):
        inner = ", ".join(print_expr(field, indent) for field in expr.fields)
        return f"({inner},)" if len(expr.fields) == 1 else f"({inner})"
    if isinstance(expr, syntax.GetItem):
        return f"{print_expr(expr.tuple_value, indent)}.{expr.index}"
    if isinstance(expr, syntax.Function):
        return f"fn {print_function(expr, indent)}"
    if isinstance(expr, syntax.If):
        then, otherwise = print_block(expr.then, indent), print_block(expr.otherwise, indent)
        return f"if ({print_expr(expr.condition, indent)}) {then} else {otherwise}"
    lines = [*print_statements(expr, indent + 2), print_expr(expr.result, indent + 2)]
    margin = "\n" + " " * (indent + 2)
    return "(" + margin + margin.join(lines) + "\n" + " " * indent + ")"


def has_literal(array: np.ndarray) -> bool:
    """Return whether a constant can be a literal.

    TVM parses digits and sign separately, so the smallest int64 overflows.
    """
    if array.ndim or (array.dtype == np.int64 and array == np.iinfo("int64").min):
        return False
    return str(array.dtype) in SUFFIXES or array.dtype == bool


def print_literal(array: np.ndarray) -> str:
    """Print a number with all its digits. TVM prints six, but reads more.

    Raises:
        ModelError: it is not a number, or its dtype has no literals.
    """
    if not has_literal(array):
        raise ModelError(
            f"A constant of shape {array.shape} and dtype {array.dtype} has no literal in Relay: "
            "it must be a parameter.",
            code="RQ203",
        )
    if array.dtype == bool:
        return str(bool(array))
    suffix = SUFFIXES[str(array.dtype)]
    if array.dtype.kind == "i":
        return f"{int(array)}{suffix}"
    return f"{shortest(array)}{suffix}"


def shortest(number: Any) -> str:
    """Return the shortest digits that are read back as the same number: 0.1, 2, 1e-05, inf."""
    text = str(np.asarray(number)[()])
    return text[:-2] if text.endswith(".0") else text


def print_value(value: Any) -> str:
    """Print an attribute."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{shortest(np.float64(value))}f"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(print_value, value))}]"
    return str(value)
