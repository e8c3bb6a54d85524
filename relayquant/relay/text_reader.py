"""Relay reader: text -> a module of `relay.syntax`.

The grammar is `grammar.lark`. This module does not know the meaning of operators.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lark
import numpy as np
from lark import Token, v_args
from lark.exceptions import LarkError, UnexpectedCharacters, UnexpectedInput, VisitError
from lark.visitors import Transformer_NonRecursive

from relayquant.errors import ModelError
from relayquant.relay import syntax
from relayquant.relay.attributes import Attrs, read_json_attrs
from relayquant.relay.metadata import Metadata, NodeGraph
from relayquant.relay.syntax import Location

#: Heading of the metadata section, which extends to the end of the text.
METADATA = re.compile(r"^[ \t]*#\[metadata\]", re.MULTILINE)

#: Tokens for comment removal: a string (may contain comment signs), the begin and end of a comment,
#: and a line comment.
_COMMENT_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/\*|\*/|//[^\n]*')

NO_OPERATORS: Mapping[str, Attrs] = {}

#: Infix operators of the old syntax.
INFIX = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}

#: Largest dimension. TVM's own are 32 bits wide.
MAX_DIM = 2**31 - 1

#: Suffix of a literal -> dtype.
_SUFFIXES = {"": "", "f": "float32", "f16": "float16", "f32": "float32", "f64": "float64"} | {
    f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}


def parse_text(text: str, operators: Mapping[str, Attrs] = NO_OPERATORS) -> syntax.Module:
    """Parse a Relay text to a module.

    A text that is one expression (from `astext` of an expression) becomes the body of "main". If
    the expression is a function, it becomes main.

    Args:
        operators: Attributes of the known operators, for calls whose attributes are an entry of the
            metadata section.

    Raises:
        ModelError: the text is not Relay. Names line and column.
    """
    heading = METADATA.search(text)
    section = text[heading.end() :] if heading else None
    program = remove_comments(text[: heading.start()] if heading else text)
    try:
        tree = _parser().parse(program)
        return _Builder(Metadata(section), operators).transform(tree)
    except UnexpectedInput as error:
        raise ModelError(_describe(error, text), code="RQ502") from error
    except VisitError as error:
        if isinstance(error.orig_exc, ModelError):
            raise error.orig_exc from None
        raise ModelError(
            f"The Relay text cannot be read: {error.orig_exc}", code="RQ502"
        ) from error
    except LarkError as error:
        raise ModelError(f"The Relay text cannot be read: {error}", code="RQ502") from error


@functools.cache
def _parser() -> lark.Lark:
    return lark.Lark.open("grammar.lark", rel_to=__file__, parser="lalr", maybe_placeholders=False)


def remove_comments(text: str) -> str:
    """Replace comments by blanks (`/* */` nests), so that positions stay the same.

    Raises:
        ModelError: a comment does not end.
    """
    kept: list[str] = []
    depth = done = start = 0
    for match in _COMMENT_PARTS.finditer(text):
        part = match.group()
        if part == "/*":
            if depth == 0:
                kept.append(text[done : match.start()])
                start = match.start()
            depth += 1
        elif part == "*/" and depth:
            depth -= 1
            if depth == 0:
                done = match.end()
                kept.append(re.sub(r"[^\n]", " ", text[start:done]))
        elif part.startswith("//") and not depth:
            kept += [text[done : match.start()], " " * len(part)]
            done = match.end()
    if depth:
        line = text.count("\n", 0, start) + 1
        raise ModelError(
            f"The Relay text ends inside a comment that starts in line {line}.", code="RQ502"
        )
    kept.append(text[done:])
    return "".join(kept)


def _describe(error: UnexpectedInput, text: str) -> str:
    line, column = getattr(error, "line", -1), getattr(error, "column", -1)
    found = "a character that is not part of Relay"
    if isinstance(error, lark.exceptions.UnexpectedToken):
        token = error.token
        found = "the end of the text" if token.type == "$END" else repr(str(token))
    elif isinstance(error, UnexpectedCharacters):
        found = repr(error.char)
    if line is None or line < 1:
        lines = text.rstrip().splitlines() or [""]
        line, column = len(lines), len(lines[-1]) + 1
    shown = text.splitlines()[line - 1][max(column - 41, 0) : column + 39] if text else ""
    return (
        f"The Relay text cannot be read at line {line}, column {column}: {found} is not expected "
        f"here. It reads: {shown.strip()!r}."
    )


def _location(token: Token) -> Location:
    return Location(token.line or 0, token.column or 0)


def _error(token: Token, message: str) -> ModelError:
    return ModelError(f"The Relay text is wrong at {_location(token)}: {message}", code="RQ502")


def parse_number(token: Token) -> tuple[int | float, str]:
    """Return (value, dtype) of a literal. The dtype is "" for an integer without a suffix.

    Raises:
        ModelError: the suffix is unknown, or the number is too long.
    """
    match = re.fullmatch(r"(-?(?:inf|nan|[\d.]+(?:[eE][+-]?\d+)?))([fiu]\d*)?", str(token))
    body, suffix = match.groups() if match else (str(token), "?")
    dtype = _SUFFIXES.get(suffix or "")
    if dtype is None:
        raise _error(token, f"the literal {str(token)!r} has an unknown suffix.")
    if dtype.startswith("float") or re.search(r"[.eEn]", body):
        return float(body), dtype or "float32"
    if len(body) > 25:
        raise _error(token, f"the integer {body[:25]}... is too long.")
    return int(body), dtype


@dataclass(frozen=True, eq=False)
class _Attributes(syntax.OpCall):
    """`meta[relay.attrs.InitOpAttrs][0]`: all attributes of the call that it is an argument of.

    TVM prints them this way if an operator does not name their type. Anywhere else it is an unknown
    operator.
    """

    graph: NodeGraph | None = None
    node: int = 0


@v_args(inline=True)
class _Builder(Transformer_NonRecursive):
    """Builds `relay.syntax` from the parse tree, bottom-up."""

    def __init__(self, metadata: Metadata, operators: Mapping[str, Attrs]) -> None:
        super().__init__()
        self.metadata = metadata
        self.operators = operators

    # -- modules and functions ---------------------------------------------------------------------

    def start(self, *parts: Any) -> syntax.Module:
        parts = tuple(part for part in parts if part is not None and not isinstance(part, Token))
        if isinstance(parts[0], syntax.Block):
            block = parts[0]
            if isinstance(block.result, syntax.Function) and not block.statements:
                return syntax.Module({"main": block.result})
            return syntax.Module({"main": syntax.Function((), block)})
        functions: dict[str, syntax.Function] = {}
        for token, function in parts:
            name = str(token)[1:]
            if name in functions:
                raise _error(token, f"function @{name} is defined twice.")
            functions[name] = function
        return syntax.Module(functions)

    def definition(self, name: Token, function: syntax.Function) -> tuple[Token, syntax.Function]:
        return name, function

    def type_params(self, *_names: Token) -> None:
        return None

    def type_definition(self, *_parts: Any) -> None:
        return None

    def function(self, *parts: Any) -> syntax.Function:
        params = tuple(part for part in parts if isinstance(part, syntax.Param))
        attrs = dict(part for part in parts if isinstance(part, tuple))
        result = [p for p in parts if isinstance(p, syntax.Type)]
        body = parts[-1]
        return syntax.Function(params, body, result[0] if result else None, attrs, body.where)

    def param(self, name: Token, *rest: Any) -> syntax.Param:
        types = [part for part in rest if part is not None]
        return syntax.Param(str(name)[1:], types[0] if types else None, _location(name))

    def device(self, _attribute: Any) -> None:
        return None

    # -- blocks ------------------------------------------------------------------------------------

    def block(self, *parts: Any) -> syntax.Block:
        return syntax.Block(tuple(parts[:-1]), parts[-1], parts[-1].where)

    def bind_number(self, name: Token, value: Any) -> syntax.Bind:
        return syntax.Bind(str(name)[1:], value, where=_location(name))

    def bind_let(self, name: Token, *rest: Any) -> syntax.Bind:
        types = [part for part in rest[:-1] if part is not None]
        kind = types[0] if types else None
        return syntax.Bind(str(name)[1:], rest[-1], True, kind, _location(name))

    def free_var(self, param: syntax.Param) -> syntax.FreeVar:
        return syntax.FreeVar(param)

    # -- expressions -------------------------------------------------------------------------------

    def variable(self, name: Token) -> syntax.Ref:
        return syntax.Ref(str(name)[1:], _location(name))

    def global_function(self, name: Token) -> syntax.GlobalRef:
        return syntax.GlobalRef(str(name)[1:], _location(name))

    def literal(self, token: Token) -> syntax.Constant:
        number, dtype = parse_number(token)
        dtype = dtype or "int32"
        if isinstance(number, int):
            info = np.iinfo(dtype)
            if not info.min <= number <= info.max:
                raise _error(token, f"{number} does not fit into {dtype}.")
        with np.errstate(over="ignore"):
            return syntax.Constant(np.array(number, dtype), _location(token))

    def literal_bool(self, token: Token) -> syntax.Constant:
        return syntax.Constant(np.array(str(token) == "True"), _location(token))

    def constant(self, reference: tuple[Token, str, int]) -> syntax.Expr:
        token, key, position = reference
        graph, node = self._lookup(reference)
        if graph.key(node).startswith("relay.attrs."):
            where = _location(token)
            return _Attributes(f"meta[{key}][{position}]", (), {}, where, graph, node)
        if graph.key(node) != "relay.Constant":
            raise _error(token, f"meta[{key}][{position}] is not a constant.")
        return syntax.Constant(graph.tensor(node), _location(token))

    def call_operator(self, name: Token, *arguments: Any) -> syntax.OpCall:
        known = self.operators.get(str(name), {})
        attrs: dict[str, Any] = {}
        args: list[Any] = []
        for part in arguments:
            if isinstance(part, tuple):
                attrs[part[0]] = part[1]
            elif isinstance(part, _Attributes) and part.graph is not None:
                attrs |= read_json_attrs(known, part.graph, part.node)
            else:
                args.append(part)
        return syntax.OpCall(str(name), tuple(args), attrs, _location(name))

    def call_function(self, function: Any, *args: Any) -> syntax.FunctionCall:
        return syntax.FunctionCall(function, args, function.where)

    def tuple(self, left: Token, *fields: Any) -> syntax.TupleExpr:
        return syntax.TupleExpr(fields, _location(left))

    def project(self, value: Any, projection: Token) -> syntax.GetItem:
        number, _ = parse_number(Token.new_borrow_pos("NUMBER", str(projection)[1:], projection))
        return syntax.GetItem(value, int(number), _location(projection))

    def infix(self, left: Any, operator: Token, right: Any) -> syntax.OpCall:
        return syntax.OpCall(INFIX[str(operator)], (left, right), {}, _location(operator))

    def inner_function(self, _fn: Token, function: syntax.Function) -> syntax.Function:
        return function

    def bare_constructor(self, name: Token) -> syntax.OpCall:
        """A constructor of a data type. There is no operator of this name, so the builder raises an
        error if it is used.
        """
        return syntax.OpCall(f"{name}, which is not called", (), {}, _location(name))

    def match(self, token: Token, subject: Any, *_clauses: Any) -> syntax.OpCall:
        """Like `bare_constructor`."""
        return syntax.OpCall("match", (subject,), {}, _location(token))

    def branch(self, token: Token, condition: Any, then: Any, otherwise: Any) -> syntax.If:
        return syntax.If(condition, then, otherwise, _location(token))

    # -- attribute values --------------------------------------------------------------------------

    def attribute(self, name: Token, value: Any) -> Any:
        return str(name), value

    def string(self, token: Token) -> str:
        try:
            return str(json.loads(str(token), strict=False))
        except ValueError:
            return str(token)[1:-1]

    def number(self, token: Token) -> int | float:
        return parse_number(token)[0]

    def boolean(self, token: Token) -> bool:
        return str(token) == "True"

    def none(self) -> None:
        return None

    def name(self, token: Token) -> str:
        return str(token)

    def opaque(self, name: Token, *_attributes: Any) -> str:
        return str(name)

    def list(self, *values: Any) -> Any:
        return values

    def meta(self, key: Token, position: Token) -> tuple[Token, str, int]:
        return key, str(key), int(parse_number(position)[0])

    def meta_value(self, reference: tuple[Token, str, int]) -> Any:
        graph, node = self._lookup(reference)
        return graph.value(node)

    def _lookup(self, reference: Any) -> Any:
        token, key, position = reference
        try:
            return self.metadata.node(key, position)
        except ModelError as error:
            raise _error(token, str(error)) from error

    # -- types -------------------------------------------------------------------------------------

    def tensor_type(self, *parts: Any) -> syntax.TensorType:
        return syntax.TensorType(tuple(parts[:-1]), str(parts[-1]))

    def named_type(self, name: Token) -> syntax.Type:
        if re.fullmatch(r"bool|(?:bfloat|float|int|uint)\d+", str(name)):
            return syntax.TensorType((), str(name))
        return syntax.OpaqueType(str(name))

    def applied_type(self, name: Token, *_arguments: Any) -> syntax.OpaqueType:
        return syntax.OpaqueType(f"{name}[...]")

    def unknown_type(self) -> syntax.OpaqueType:
        return syntax.OpaqueType("?")

    def tuple_type(self, *fields: Any) -> syntax.TupleType:
        return syntax.TupleType(fields)

    def function_type(self, *_parts: Any) -> syntax.OpaqueType:
        return syntax.OpaqueType("fn (...)")

    def known_dim(self, token: Token) -> int:
        number, _ = parse_number(token)
        if not isinstance(number, int) or not 0 <= number <= MAX_DIM:
            raise _error(token, f"a dimension is {token}; allowed: 0 to {MAX_DIM}.")
        return number

    def unknown_dim(self, *_token: Token) -> None:
        return None

    def meta_dim(self, reference: tuple[Token, str, int]) -> int | None:
        value = self.meta_value(reference)
        return value if isinstance(value, int) and 0 <= value <= MAX_DIM else None
