"""Relay, first step: a Relay module as plain values, as in its text.

Both readers (text, JSON) and `to_text` use it. A function body is a block: statements that name
values, then the result. A value that is used twice has a name, so the tree never shares nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Location:
    """Place in the source, for messages: "line 3, column 7" of a text, "node 17" of a JSON file."""

    line: int = 0
    column: int = 0
    node: int | None = None

    def __str__(self) -> str:
        if self.node is not None:
            return f"node {self.node}"
        return f"line {self.line}, column {self.column}"


NOWHERE = Location()


# -- types -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorType:
    """A tensor type. A dimension that is None is known at run time only."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        if not self.shape:
            return self.dtype
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"Tensor[({dims}), {self.dtype}]"


@dataclass(frozen=True)
class TupleType:
    fields: tuple[Type, ...]

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.fields))
        return f"({inner},)" if len(self.fields) == 1 else f"({inner})"


@dataclass(frozen=True)
class OpaqueType:
    """A type that is not checked: of a function, `_`, or a data type of the module."""

    text: str

    def __str__(self) -> str:
        return self.text


Type: TypeAlias = TensorType | TupleType | OpaqueType


# -- expressions -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ref:
    """A value by name: a parameter, a `let`, or a numbered value ("3" for `%3`)."""

    name: str
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class GlobalRef:
    """A function of the module."""

    name: str
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor. Rank 0 for a literal."""

    value: np.ndarray
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class OpCall:
    """A call of an operator. `attrs` are the attributes in the source."""

    op: str
    args: tuple[Expr, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A call of a function: of the module, or one that is a value."""

    function: Expr
    args: tuple[Expr, ...]
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class TupleExpr:
    fields: tuple[Expr, ...]
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class GetItem:
    """A field of a tuple."""

    tuple_value: Expr
    index: int
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class If:
    condition: Expr
    then: Block
    otherwise: Block
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class Block:
    """Statements in order, then the result."""

    statements: tuple[Statement, ...]
    result: Expr
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class Function:
    params: tuple[Param, ...]
    body: Block
    result_type: Type | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    where: Location = NOWHERE


Expr: TypeAlias = (
    Ref | GlobalRef | Constant | OpCall | FunctionCall | TupleExpr | GetItem | If | Block | Function
)


# -- statements and modules ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Param:
    name: str
    type: Type | None
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class Bind:
    """`%3 = expr;` or `let %x: type = expr;`."""

    name: str
    value: Expr
    is_let: bool = False
    type: Type | None = None
    where: Location = NOWHERE


@dataclass(frozen=True, eq=False)
class FreeVar:
    """`free_var %x: type;`: an input that no function declares."""

    param: Param


Statement: TypeAlias = Bind | FreeVar


@dataclass(frozen=True, eq=False)
class Module:
    """Functions by name. If the text is one expression, it is the body of "main"."""

    functions: dict[str, Function]


def children(expr: Expr) -> tuple[Expr, ...]:
    """Return the expressions directly inside one, in the order of their computation."""
    if isinstance(expr, OpCall):
        return expr.args
    if isinstance(expr, FunctionCall):
        return (expr.function, *expr.args)
    if isinstance(expr, TupleExpr):
        return expr.fields
    if isinstance(expr, GetItem):
        return (expr.tuple_value,)
    if isinstance(expr, If):
        return (expr.condition, expr.then, expr.otherwise)
    if isinstance(expr, Function):
        return (expr.body,)
    if isinstance(expr, Block):
        bound = tuple(each.value for each in expr.statements if isinstance(each, Bind))
        return (*bound, expr.result)
    return ()
