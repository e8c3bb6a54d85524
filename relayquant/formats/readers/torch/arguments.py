"""First stage, PyTorch: what conversions of operators read from a node of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

#: node of the program, importer of TVM's frontend -> value
Convert = Callable[[Any, Any], relax.Expr]


def read_arguments(node: Any, *names: str) -> list[Any]:
    """The arguments of an operator by the names that its schema has, with its defaults."""
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    return [given[name] for name in names]
