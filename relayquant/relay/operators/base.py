"""Relay operators: what a row of the table says, and what a converter is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.relay.attributes import Attr, AttributeKind
from relayquant.relay.release import WrittenBy

#: A tensor or Relax tuple; a tuple of such; (in arguments) a function.
Value: TypeAlias = Any


class RelayEmitter:
    """Binds values in the function under construction; every name is used once.

    Args:
        limit: Most values; a source that makes more of itself by inlining is refused.
    """

    def __init__(self, limit: int) -> None:
        # Only normalizes: a block left open by an error would make TVM print a warning.
        self._builder = relax.BlockBuilder()
        self._bindings: list[relax.Binding] = []
        self.sources: dict[str, str] = {}  #: value name -> Relay operator that made it
        self._taken: set[str] = set()
        self._left = limit
        self._limit = limit

    def reserve(self, name: str) -> None:
        """Keep a name for a parameter."""
        self._taken.add(name)

    def count_inlined(self) -> None:
        """Count one value against the limit.

        Raises:
            ModelError: the limit is reached.
        """
        self._left -= 1
        if self._left < 0:
            raise ModelError(
                f"inlining its functions makes more than {format_count(self._limit, 'value')}.",
                code="RQ202",
            )

    def emit(self, value: relax.Expr, name: str, op: str, *, is_helper: bool = False) -> relax.Var:
        """A variable bound to `value`, called `name` ("x.1", "x.2", ... if that is taken).

        A helper leaves `name` to the result it is made for.

        Raises:
            ModelError: there are too many values. TVM's own errors: types do not fit.
        """
        self.count_inlined()
        value = self._builder.normalize(value)
        unique, number = name, 0
        while unique in self._taken or (is_helper and not number):
            number += 1
            unique = f"{name}.{number}"
        self._taken.add(unique)
        self.sources[unique] = op
        var = relax.Var(unique, value.ty)
        self._bindings.append(relax.VarBinding(var, value))
        return var

    def finish(self, params: Sequence[relax.Var], result: relax.Expr) -> relax.Function:
        """The function of all values bound so far."""
        block = relax.BindingBlock(self._bindings)
        body = self._builder.normalize(relax.SeqExpr([block], result))
        return relax.Function(list(params), body)


@dataclass(frozen=True, eq=False)
class Site:
    """One call to convert.

    Attributes:
        args: Values of the arguments.
        attrs: All attributes of the row, defaults included.
        written: Names of the attributes that the source writes.
        name: Name that the result will have.
        release: The TVM that wrote the module; None if that is not known.
    """

    op: str
    args: tuple[Value, ...]
    attrs: Mapping[str, Any]
    written: frozenset[str]
    emitter: RelayEmitter
    name: str
    release: WrittenBy | None

    def is_since(self, release: WrittenBy, what: str) -> bool:
        """Whether the module was written by `release` or a later one.

        Raises:
            ModelError: nothing says so; `what` depends on it.
        """
        if self.release is None:
            raise ModelError(
                f"{what} depends on the release of TVM that wrote it, older than {release} or not, "
                "and the shapes do not tell. Name it: relayquant.relay.from_text(text, params, "
                'release="0.12"), or from_json.',
                code="RQ101",
            )
        return self.release >= release

    def emit(self, value: relax.Expr) -> relax.Var:
        """Bind a helper on the way to the result; it is called `name.1`, `name.2`, ..."""
        return self.emitter.emit(value, self.name, self.op, is_helper=True)

    def tensor(self, index: int) -> relax.Expr:
        """Argument `index`, which must be a tensor.

        Raises:
            ModelError: it is a tuple or a function.
        """
        value = self.args[index]
        if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
            raise ModelError(f"argument {index + 1} must be a tensor.", code="RQ202")
        return value

    def tensors(self, index: int) -> list[relax.Expr]:
        """The fields of argument `index`, which must be a tuple of tensors.

        Raises:
            ModelError: it is something else, or empty.
        """
        value = self.args[index]
        if isinstance(value, relax.Expr) and isinstance(value.ty, relax.TupleType):
            value = tuple(
                self.emit(relax.TupleGetItem(value, i)) for i in range(len(value.ty.fields))
            )
        if not isinstance(value, tuple) or not value:
            raise ModelError(f"argument {index + 1} must be a tuple of tensors.", code="RQ202")
        if not all(
            isinstance(field, relax.Expr) and isinstance(field.ty, relax.TensorType)
            for field in value
        ):
            raise ModelError(f"argument {index + 1} must be a tuple of tensors.", code="RQ202")
        return list(value)

    def shape(self, expr: relax.Expr) -> tuple[int, ...]:
        """The shape of a tensor, all dimensions known.

        Raises:
            ModelError: a dimension is known at run time only.
        """
        shape = tensor_shape(expr)
        if shape is None or not all(isinstance(dim, int) for dim in shape):
            raise ModelError(
                f"its operand has shape {shape}; all dimensions must be known.", code="RQ202"
            )
        return tuple(dim for dim in shape if isinstance(dim, int))

    def ndim(self, expr: relax.Expr) -> int:
        return len(self.dims(expr))

    def dims(self, expr: relax.Expr) -> tuple[int | str, ...]:
        """The shape of a tensor, with names for dimensions known at run time only.

        Raises:
            ModelError: not even the rank is known.
        """
        shape = tensor_shape(expr)
        if shape is None:
            raise ModelError("the rank of its operand is not known.", code="RQ202")
        return shape

    def axis(self, value: int, ndim: int) -> int:
        """An axis counted from the front.

        Raises:
            ModelError: there is no such axis.
        """
        if not -ndim <= value < ndim:
            raise ModelError(
                f"axis {value} does not exist in a tensor of {format_count(ndim, 'axis')}.",
                code="RQ202",
            )
        return value % ndim

    def constant(self, index: int) -> np.ndarray:
        """The array of argument `index`, which must be a constant.

        Raises:
            ModelError: it is computed.
        """
        array = constant_value(self.tensor(index))
        if array is None:
            raise ModelError(f"argument {index + 1} must be a constant.", code="RQ202")
        return array

    def reshape(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """`expr` in another shape; a constant stays one."""
        if tuple(tensor_shape(expr) or ()) == tuple(shape) and tensor_shape(expr) is not None:
            return expr
        array = constant_value(expr)
        if array is not None:
            return make_const(array.reshape(shape))
        return self.emit(relax.op.reshape(expr, tuple(shape)))

    def permute(self, expr: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """`expr` with its axes in another order; a constant stays one."""
        if list(axes) == sorted(axes):
            return expr
        array = constant_value(expr)
        if array is not None:
            return make_const(array.transpose(axes))
        return self.emit(relax.op.permute_dims(expr, list(axes)))


Convert: TypeAlias = Callable[[Site], Value]


@dataclass(frozen=True)
class RelayOp:
    """An operator of Relay: how many arguments it has, its attributes, what it becomes."""

    name: str
    min_args: int
    convert: Convert
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    max_args: int = -1  #: -1: as min_args

    def __post_init__(self) -> None:
        if self.max_args < 0:
            object.__setattr__(self, "max_args", self.min_args)


def make_const(array: np.ndarray) -> relax.Expr:
    """A constant of the array's own dtype."""
    array = np.asarray(array, order="C")
    return relax.const(array, str(array.dtype))


def make_scalar(value: float, dtype: str) -> relax.Expr:
    """A constant of rank 0."""
    return make_const(np.array(value, dtype))


def is_integer(expr: relax.Expr) -> bool:
    """Whether a tensor holds integers."""
    return tensor_dtype(expr).startswith(("int", "uint"))


#: Most elements of a constant that a converter makes up; a file of a few bytes may ask for more.
MAX_MADE_UP = 2**24


def check_made_up(count: float) -> None:
    """Raise unless a constant of so many elements is one to make.

    Raises:
        ModelError: it is absurdly large.
    """
    if not count <= MAX_MADE_UP:
        raise ModelError(
            f"it needs a constant of {count:.0f} values; allowed: {MAX_MADE_UP}.", code="RQ202"
        )


def check_positive(name: str, values: Sequence[int]) -> None:
    """Raise unless all values are at least 1.

    Raises:
        ModelError: names the attribute.
    """
    if not values or min(values) < 1:
        raise ModelError(
            f"attribute {name} is {list(values)}; allowed: integers from 1.", code="RQ202"
        )


# -- attributes, shortly ---------------------------------------------------------------------------


def integer(default: int | None = None) -> Attr:
    """A number in place; without a default it is required."""
    return Attr(AttributeKind.INT, default, default is None)


def real(default: float | None = None) -> Attr:
    return Attr(AttributeKind.FLOAT, default, default is None)


def flag(default: bool = False) -> Attr:
    return Attr(AttributeKind.BOOL, default)


def text(default: str | None = None) -> Attr:
    return Attr(AttributeKind.STRING, default, default is None)


def dtype(required: bool = False) -> Attr:
    """A dtype; "" where Relay leaves it to the operands."""
    return Attr(AttributeKind.DTYPE, "", required)


def boxed(default: int | None = None) -> Attr:
    """An integer that may be missing."""
    return Attr(AttributeKind.INTEGER, default)


def integers(*default: int, required: bool = False) -> Attr:
    return Attr(AttributeKind.INTS, default, required)


OPTIONAL_INTEGERS = Attr(AttributeKind.INTS, None)

#: Of an attribute whose value plays no part.
IGNORED = Attr(AttributeKind.ANY)
