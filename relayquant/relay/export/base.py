"""Relay, writing: what a row of the export table is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.ir.rewrite.function import find_free_name
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.relay import syntax
from relayquant.relay.export.releases import Release, choose_attributes
from relayquant.relay.printer import has_literal

#: words that TVM's tokenizer takes for themselves, behind a % too (v0.19, relay/parser/tokenizer.h)
KEYWORDS = frozenset(
    ("let", "fn", "def", "if", "else", "type", "match", "extern", "free_var", "ref", "ref_read",
     "ref_write")
)  # fmt: skip
#: and what it takes for a number wherever a word begins so
INFINITY = "inff"


class Statements:
    """The body under construction: numbered values, and constants as parameters."""

    def __init__(self, taken: Sequence[str]) -> None:
        self.statements: list[syntax.Statement] = []
        self.params: dict[str, np.ndarray] = {}
        self._taken = set(taken)
        self._known: dict[tuple[Any, ...], syntax.Expr] = {}

    def bind(self, value: syntax.Expr) -> syntax.Expr:
        """The name of a value; what is a name or literal already is left as it is."""
        if isinstance(value, syntax.Ref | syntax.Constant):
            return value
        name = str(len(self.statements))
        self.statements.append(syntax.Bind(name, value))
        return syntax.Ref(name)

    def call_of(self, value: syntax.Expr) -> syntax.OpCall | None:
        """The call whose result a numbered value is."""
        if not isinstance(value, syntax.Ref) or not value.name.isdecimal():
            return None
        statement = self.statements[int(value.name)]
        found = statement.value if isinstance(statement, syntax.Bind) else None
        return found if isinstance(found, syntax.OpCall) else None

    def constant(self, array: np.ndarray, hint: str) -> syntax.Expr:
        """A literal, or a parameter called after `hint`; equal constants are one."""
        array = np.asarray(array, order="C")
        if has_literal(array) and (array.dtype.kind != "f" or np.isfinite(array)):
            return syntax.Constant(array)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            name = self.unique(hint)
            self.params[name] = array
            self._known[key] = syntax.Ref(name)
        return self._known[key]

    def unique(self, hint: str) -> str:
        """`hint` as a name that Relay's parser takes, not used before."""
        base = re.sub(r"\W", "_", hint, flags=re.ASCII)
        is_name = re.match(r"[A-Za-z_]", base) and base not in KEYWORDS
        base = base if is_name and not base.startswith(INFINITY) else f"v{base}"
        name = find_free_name(base, self._taken, "_")
        self._taken.add(name)
        return name


@dataclass(frozen=True, eq=False)
class ExportSite:
    """One Relax call to write in Relay.

    Attributes:
        name: Of the value it computes.
        args: Its operands in Relay; of a tuple, the fields.
        exact: Whether Relay operators that round otherwise are to be avoided.
        release: Of TVM, which is to read the text.
    """

    call: Call
    name: str
    args: tuple[Any, ...]
    out: Statements
    exact: bool
    release: Release

    @property
    def attrs(self) -> Any:
        return self.call.attrs

    def op(self, name: str, *args: syntax.Expr, **attrs: Any) -> syntax.Expr:
        """A Relay call as a numbered value; attributes that equal the default are left out.

        Raises:
            ModelError: the release has not the operator, or not what an attribute asks for.
        """
        written = choose_attributes(self.release, name, attrs)
        return self.out.bind(syntax.OpCall(name, args, written))

    def tuple_of(self, fields: Sequence[syntax.Expr]) -> syntax.Expr:
        return self.out.bind(syntax.TupleExpr(tuple(fields)))

    def number(self, value: float, dtype: str) -> syntax.Expr:
        """A literal."""
        return syntax.Constant(np.array(value, dtype))

    def constant(self, array: np.ndarray, role: str) -> syntax.Expr:
        return self.out.constant(array, f"{self.name}_{role}")

    def dims(self, expr: relax.Expr) -> tuple[int | str, ...]:
        """The shape of a Relax value, with names for dimensions known at run time only.

        Raises:
            ModelError: not even the rank is known.
        """
        shape = tensor_shape(expr)
        if shape is None:
            raise ModelError("its rank is not known before run time", code="RQ203")
        return shape

    def shape(self, expr: relax.Expr) -> tuple[int, ...]:
        """The shape of a Relax value.

        Raises:
            ModelError: a dimension is known at run time only.
        """
        shape = self.dims(expr)
        if not all(isinstance(dim, int) for dim in shape):
            raise ModelError(f"shape {shape} is not known before run time", code="RQ203")
        return tuple(dim for dim in shape if isinstance(dim, int))

    def type_shape(self, kind: relax.TensorType) -> tuple[int, ...]:
        """The shape of a type, as for `shape`."""
        return self.shape(relax.Var("field", kind))

    def in_shape(self, index: int) -> tuple[int, ...]:
        return self.shape(self.call.args[index])

    def in_dims(self, index: int) -> tuple[int | str, ...]:
        return self.dims(self.call.args[index])

    def out_dims(self) -> tuple[int | str, ...]:
        return self.dims(self.call)

    def dtype(self, index: int) -> str:
        return tensor_dtype(self.call.args[index])

    def array(self, index: int) -> np.ndarray:
        """The constant that an operand is.

        Raises:
            ModelError: it is computed.
        """
        value = constant_value(self.call.args[index])
        if value is None:
            raise ModelError(f"operand {index + 1} is not a constant", code="RQ203")
        return value

    def fields(self, index: int) -> list[np.ndarray]:
        """The constants of a tuple operand.

        Raises:
            ModelError: one is computed.
        """
        found = [constant_value(field) for field in getattr(self.call.args[index], "fields", ())]
        if not found or any(array is None for array in found):
            raise ModelError(f"operand {index + 1} is not a tuple of constants", code="RQ203")
        return [array for array in found if array is not None]

    def reshape(self, value: syntax.Expr, dims: Sequence[int | str]) -> syntax.Expr:
        """A value in another shape; one dimension may be known at run time only.

        Raises:
            ModelError: several dimensions are.
        """
        sizes = tuple(dim if isinstance(dim, int) else -1 for dim in dims)
        if sizes.count(-1) > 1:
            raise ModelError(
                f"shape {tuple(dims)} leaves more than one dimension open", code="RQ203"
            )
        return self.op("reshape", value, newshape=sizes)


Export: TypeAlias = Callable[[ExportSite], syntax.Expr]
Exports: TypeAlias = Mapping[str, Export]


def ints(values: Any) -> tuple[int, ...]:
    """An attribute of Relax as a tuple of integers."""
    return tuple(int(value) for value in values)
