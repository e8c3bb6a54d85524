"""Relay reader: the kinds of operator attributes, their form in JSON, and their checks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relayquant.errors import ModelError, suggest_name
from relayquant.relay.metadata import NodeGraph

#: Attributes hold sizes and axes, so larger numbers are invalid. Slices use the largest int64 for
#: "to the end".
MAX_INTEGER = 2**63 - 1


class AttributeKind(enum.Enum):
    """The type of an attribute. A JSON file holds numbers of INT, FLOAT and BOOL and the text of
    DTYPE inline. All other kinds are in separate nodes.
    """

    INT = "an integer"
    FLOAT = "a number"
    BOOL = "True or False"
    STRING = "a text"
    DTYPE = "a dtype"
    INTEGER = "an integer or None"  #: boxed in some releases: Integer, IndexExpr
    INTS = "a list of integers or None"
    NESTED = "a list of lists of integers"
    SECTIONS = "an integer or a list of integers"
    FLOATS = "a list of numbers or None"
    ANY = "anything"


@dataclass(frozen=True)
class Attr:
    """Kind and default of an attribute. `required` attributes have no default in Relay."""

    kind: AttributeKind
    default: Any = None
    required: bool = False


Attrs = Mapping[str, Attr]


def _to_int(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise ValueError(value)
    return int(value)


def _to_ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise ValueError(value)
    return tuple(_to_int(item) for item in value)


def _to_float(value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(value)
    return float(value)


def _to_bool(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(value)
    return bool(value)


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _to_dtype(value: Any) -> str:
    return "" if value in (None, "void", "handle") else _to_text(value)


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


_CHECKS: Mapping[AttributeKind, Callable[[Any], Any]] = {
    AttributeKind.INT: _to_int,
    AttributeKind.FLOAT: _to_float,
    AttributeKind.BOOL: _to_bool,
    AttributeKind.STRING: _to_text,
    AttributeKind.DTYPE: _to_dtype,
    AttributeKind.INTEGER: _optional(_to_int),
    AttributeKind.INTS: _optional(
        lambda value: (value,) if isinstance(value, int) else _to_ints(value)
    ),
    AttributeKind.NESTED: lambda value: tuple(_to_ints(item) for item in value),
    AttributeKind.SECTIONS: lambda value: (
        _to_ints(value) if isinstance(value, tuple) else _to_int(value)
    ),
    AttributeKind.ANY: lambda value: value,
    AttributeKind.FLOATS: _optional(lambda value: tuple(_to_float(item) for item in value)),
}

#: Readers of the text of an inline attribute.
_IN_PLACE: Mapping[AttributeKind, Callable[[str], Any]] = {
    AttributeKind.INT: int,
    AttributeKind.FLOAT: float,
    AttributeKind.BOOL: int,
    AttributeKind.DTYPE: str,
}


def complete_attrs(known: Attrs, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all attributes: checked values from the source, and defaults for the
    others.

    Raises:
        ModelError: an attribute is unknown or missing, or the kind of a value is wrong.
    """
    for name in written:
        if name not in known:
            raise ModelError(
                f"it has no attribute {name!r}. {suggest_name(name, known)}", code="RQ202"
            )
    values: dict[str, Any] = {}
    for name, attr in known.items():
        if name not in written:
            if attr.required:
                raise ModelError(f"attribute {name!r} is missing.", code="RQ202")
            values[name] = attr.default
            continue
        try:
            values[name] = _CHECKS[attr.kind](written[name])
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(
                f"attribute {name} is {written[name]!r}; allowed: {attr.kind.value}.", code="RQ202"
            ) from error
    return values


def _read_boxed(graph: NodeGraph, text: str) -> int | None:
    """Read an integer that is inline or in a separate node.

    `stack.axis` is a node before TVM 0.11 and inline later. Node 0 is null. The first nodes, whose
    numbers could be an axis, are the module and its types.
    """
    number = int(text)
    if 0 <= number < len(graph):
        key = graph.key(number)
        if not key or key in ("IntImm", "runtime.BoxInt", "runtime.BoxBool"):
            return graph.value(number)
    return number


def read_json_attrs(known: Attrs, graph: NodeGraph, node: int) -> dict[str, Any]:
    """Read the attributes of a node, with the values that the text reader would return. Unknown
    attributes keep their text, because they are refused later.

    Raises:
        ModelError: the text of an attribute is not a number, or its node is missing.
    """
    values: dict[str, Any] = {
        name: graph.attr(node, name) for name in graph.attr_names(node) if name not in known
    }
    for name, attr in known.items():
        if not graph.has_attr(node, name):
            continue
        text = graph.attr(node, name)
        try:
            if attr.kind in _IN_PLACE:
                values[name] = _IN_PLACE[attr.kind](text)
            elif attr.kind is AttributeKind.INTEGER:
                values[name] = _read_boxed(graph, text)
            elif attr.kind is AttributeKind.STRING and not text.isdecimal():
                values[name] = text  # std::string is inline, tvm::String is not
            else:
                values[name] = graph.value(graph.child(node, name))
        except ValueError as error:
            if isinstance(error, ModelError):
                raise
            raise graph.fail(
                node, f"attribute {name!r} is {text!r}; allowed: {attr.kind.value}."
            ) from error
    return values
