"""PyTorch reader: arguments of a node, for the conversions of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

#: (node of the program, importer of TVM's frontend) -> value
Convert = Callable[[Any, Any], relax.Expr]


def read_arguments(node: Any, *names: str) -> list[Any]:
    """Read the arguments of an operator by the names in its schema, with defaults."""
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    return [given[name] for name in names]
