"""Relay writer: the interface of a row in the export table."""

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

#: words reserved by TVM's tokenizer, also after a % (v0.19, relay/parser/tokenizer.h)
KEYWORDS = frozenset(
    ("let", "fn", "def", "if", "else", "type", "match", "extern", "free_var", "ref", "ref_read",
     "ref_write")
)  # fmt: skip
#: words that the tokenizer reads as a number if a name begins with them
INFINITY = "inff"


class Statements:
    """The body under construction: numbered values, and constants as parameters."""

    def __init__(self, taken: Sequence[str]) -> None:
        self.statements: list[syntax.Statement] = []
        self.params: dict[str, np.ndarray] = {}
        self._taken = set(taken)
        self._known: dict[tuple[Any, ...], syntax.Expr] = {}

    def bind(self, value: syntax.Expr) -> syntax.Expr:
        """Return a name for a value. A name or literal is unchanged."""
        if isinstance(value, syntax.Ref | syntax.Constant):
            return value
        name = str(len(self.statements))
        self.statements.append(syntax.Bind(name, value))
        return syntax.Ref(name)

    def call_of(self, value: syntax.Expr) -> syntax.OpCall | None:
        """Return the call whose result is a numbered value."""
        if not isinstance(value, syntax.Ref) or not value.name.isdecimal():
            return None
        statement = self.statements[int(value.name)]
        found = statement.value if isinstance(statement, syntax.Bind) else None
        return found if isinstance(found, syntax.OpCall) else None

    def constant(self, array: np.ndarray, hint: str) -> syntax.Expr:
        """Return a literal, or a parameter named after `hint`. Equal constants share one
        parameter.
        """
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
        """Return `hint` as an unused name that Relay's parser accepts."""
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
        name: Name of the value it computes.
        args: Its operands in Relay. A tuple is replaced by its fields.
        exact: Whether to avoid Relay operators that round differently.
        release: TVM release that will read the text.
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
        """Add a Relay call as a numbered value. Attributes with their default value are left out.

        Raises:
            ModelError: the release lacks the operator, or the value of an attribute.
        """
        written = choose_attributes(self.release, name, attrs)
        return self.out.bind(syntax.OpCall(name, args, written))

    def tuple_of(self, fields: Sequence[syntax.Expr]) -> syntax.Expr:
        return self.out.bind(syntax.TupleExpr(tuple(fields)))

    def number(self, value: float, dtype: str) -> syntax.Expr:
        """Make a literal."""
        return syntax.Constant(np.array(value, dtype))

    def constant(self, array: np.ndarray, role: str) -> syntax.Expr:
        return self.out.constant(array, f"{self.name}_{role}")

    def dims(self, expr: relax.Expr) -> tuple[int | str, ...]:
        """Return the shape of a Relax value, with names for dimensions known at run time only.

        Raises:
            ModelError: the rank is unknown.
        """
        shape = tensor_shape(expr)
        if shape is None:
            raise ModelError("its rank is not known before run time", code="RQ203")
        return shape

    def shape(self, expr: relax.Expr) -> tuple[int, ...]:
        """Return the shape of a Relax value.

        Raises:
            ModelError: a dimension is known at run time only.
        """
        shape = self.dims(expr)
        if not all(isinstance(dim, int) for dim in shape):
            raise ModelError(f"shape {shape} is not known before run time", code="RQ203")
        return tuple(dim for dim in shape if isinstance(dim, int))

    def type_shape(self, kind: relax.TensorType) -> tuple[int, ...]:
        """Return the shape of a type, like `shape`."""
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
        """Return the array of a constant operand.

        Raises:
            ModelError: it is computed at run time.
        """
        value = constant_value(self.call.args[index])
        if value is None:
            raise ModelError(f"operand {index + 1} is not a constant", code="RQ203")
        return value

    def fields(self, index: int) -> list[np.ndarray]:
        """Return the arrays of a tuple of constants.

        Raises:
            ModelError: one is computed at run time.
        """
        found = [constant_value(field) for field in getattr(self.call.args[index], "fields", ())]
        if not found or any(array is None for array in found):
            raise ModelError(f"operand {index + 1} is not a tuple of constants", code="RQ203")
        return [array for array in found if array is not None]

    def reshape(self, value: syntax.Expr, dims: Sequence[int | str]) -> syntax.Expr:
        """Reshape a value. One dimension may be known at run time only.

        Raises:
            ModelError: several dimensions are known at run time only.
        """
        sizes = tuple(dim if isinstance(dim, int) else -1 for dim in dims)
        if sizes.count(-1) > 1:
            raise ModelError(
                f"shape {tuple(dims)} leaves more than one dimension open", code="RQ203"
            )
        return self.op("reshape", value, newshape=sizes)


Export: TypeAlias = Callable[[ExportSite], syntax.Expr]
Exports: TypeAlias = Mapping[str, Export]


@dataclass(frozen=True)
class ExportRow:
    """An operator of Relax that is written.

    Attributes:
        export: What writes it.
        attributes: Those that are written. All others must have their defaults.
    """

    export: Export
    attributes: str = ""


def ints(values: Any) -> tuple[int, ...]:
    """Return an attribute of Relax as a tuple of integers."""
    return tuple(int(value) for value in values)
