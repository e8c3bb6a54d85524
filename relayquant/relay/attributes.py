"""Relay: the kinds of attributes that operators have, how each is written in JSON, and checked."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relayquant.errors import ModelError, suggest_name
from relayquant.relay.metadata import NodeGraph

#: Attributes hold sizes and axes; beyond this they are nonsense. Slices say "to the end" with
#: the largest int64.
MAX_INTEGER = 2**63 - 1


class AttributeKind(enum.Enum):
    """What an attribute holds. A JSON file has the numbers of INT, FLOAT and BOOL and the text of
    DTYPE in place, all else in nodes of their own.
    """

    INT = "an integer"
    FLOAT = "a number"
    BOOL = "True or False"
    STRING = "a text"
    DTYPE = "a dtype"
    INTEGER = "an integer or None"  #: boxed in some release: Integer, IndexExpr
    INTS = "a list of integers or None"
    NESTED = "a list of lists of integers"
    SECTIONS = "an integer or a list of integers"
    FLOATS = "a list of numbers or None"
    ANY = "anything"


@dataclass(frozen=True)
class Attr:
    """Kind and default of an attribute. `required` ones have no default in Relay."""

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

#: How the text of an attribute in place is read.
_IN_PLACE: Mapping[AttributeKind, Callable[[str], Any]] = {
    AttributeKind.INT: int,
    AttributeKind.FLOAT: float,
    AttributeKind.BOOL: int,
    AttributeKind.DTYPE: str,
}


def complete_attrs(known: Attrs, written: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all attributes: those written, checked, and the defaults of the others.

    Raises:
        ModelError: an attribute is unknown or missing, or a value is of another kind.
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
    """An integer in a node of its own, or in place: `stack.axis` is a node before TVM 0.11 and in
    place later. Node 0 is null; the first nodes, whose numbers an axis might be, are the module and
    its types.
    """
    number = int(text)
    if 0 <= number < len(graph):
        key = graph.key(number)
        if not key or key in ("IntImm", "runtime.BoxInt", "runtime.BoxBool"):
            return graph.value(number)
    return number


def read_json_attrs(known: Attrs, graph: NodeGraph, node: int) -> dict[str, Any]:
    """The attributes in a node, as the text reader would give them; of those that are not known
    only the text, since they are refused later.

    Raises:
        ModelError: the text of an attribute is no number, or its node is missing.
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
                values[name] = text  # a std::string is in place, a tvm::String is not
            else:
                values[name] = graph.value(graph.child(node, name))
        except ValueError as error:
            if isinstance(error, ModelError):
                raise
            raise graph.fail(
                node, f"attribute {name!r} is {text!r}; allowed: {attr.kind.value}."
            ) from error
    return values
