"""Relay reader: the rows of the operator table, and the interface of a converter."""

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

#: A tensor or Relax tuple, a tuple of these, or (in arguments) a function.
Value: TypeAlias = Any


class RelayEmitter:
    """Binds values in the function under construction. Every name is used once.

    Args:
        limit: Largest number of values. A source with more after inlining is refused.
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
        """Reserve a name for a parameter."""
        self._taken.add(name)

    def count_inlined(self) -> None:
        """Count one value towards the limit.

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
        """Bind `value` to a variable named `name` ("x.1", "x.2", ... if it is taken).

        A helper leaves `name` free for the result that it is a part of.

        Raises:
            ModelError: there are too many values.
            TVM's own errors: types do not fit.
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
        """Return the function of all values bound so far."""
        block = relax.BindingBlock(self._bindings)
        body = self._builder.normalize(relax.SeqExpr([block], result))
        return relax.Function(list(params), body)


@dataclass(frozen=True, eq=False)
class Site:
    """One call to convert.

    Attributes:
        args: Values of the arguments.
        attrs: All attributes of the row, defaults included.
        written: Names of the attributes in the source.
        name: Name for the result.
        release: TVM release that wrote the module. None if unknown.
    """

    op: str
    args: tuple[Value, ...]
    attrs: Mapping[str, Any]
    written: frozenset[str]
    emitter: RelayEmitter
    name: str
    release: WrittenBy | None

    def is_since(self, release: WrittenBy, what: str) -> bool:
        """Return whether the module was written by `release` or a later one.

        Raises:
            ModelError: the release is unknown. `what` depends on it.
        """
        if self.release is None:
            raise ModelError(
                f"{what} depends on the release of TVM that wrote it (before {release} or not), "
                "and the shapes do not show it. Give it: relayquant.relay.from_text(text, params, "
                'release="0.12"), or use from_json.',
                code="RQ101",
            )
        return self.release >= release

    def emit(self, value: relax.Expr) -> relax.Var:
        """Bind a helper value of the result. It is named `name.1`, `name.2`, ..."""
        return self.emitter.emit(value, self.name, self.op, is_helper=True)

    def tensor(self, index: int) -> relax.Expr:
        """Return argument `index`, which must be a tensor.

        Raises:
            ModelError: it is a tuple or a function.
        """
        value = self.args[index]
        if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
            raise ModelError(f"argument {index + 1} must be a tensor.", code="RQ202")
        return value

    def tensors(self, index: int) -> list[relax.Expr]:
        """Return the fields of argument `index`, which must be a tuple of tensors.

        Raises:
            ModelError: it is not a tuple of tensors, or empty.
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
        """Return the shape of a tensor with known dimensions.

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
        """Return the shape of a tensor, with names for dimensions known at run time only.

        Raises:
            ModelError: the rank is unknown.
        """
        shape = tensor_shape(expr)
        if shape is None:
            raise ModelError("the rank of its operand is not known.", code="RQ202")
        return shape

    def axis(self, value: int, ndim: int) -> int:
        """Return an axis counted from the front.

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
        """Return the array of argument `index`, which must be a constant.

        Raises:
            ModelError: it is computed at run time.
        """
        array = constant_value(self.tensor(index))
        if array is None:
            raise ModelError(f"argument {index + 1} must be a constant.", code="RQ202")
        return array

    def reshape(self, expr: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Reshape `expr`. A constant stays a constant."""
        if tuple(tensor_shape(expr) or ()) == tuple(shape) and tensor_shape(expr) is not None:
            return expr
        array = constant_value(expr)
        if array is not None:
            return make_const(array.reshape(shape))
        return self.emit(relax.op.reshape(expr, tuple(shape)))

    def permute(self, expr: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """Reorder the axes of `expr`. A constant stays a constant."""
        if list(axes) == sorted(axes):
            return expr
        array = constant_value(expr)
        if array is not None:
            return make_const(array.transpose(axes))
        return self.emit(relax.op.permute_dims(expr, list(axes)))


Convert: TypeAlias = Callable[[Site], Value]


@dataclass(frozen=True)
class RelayOp:
    """An operator of Relay: its number of arguments, its attributes, and its converter."""

    name: str
    min_args: int
    convert: Convert
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    max_args: int = -1  #: -1: equal to min_args

    def __post_init__(self) -> None:
        if self.max_args < 0:
            object.__setattr__(self, "max_args", self.min_args)


def make_const(array: np.ndarray) -> relax.Expr:
    """Make a constant with the array's own dtype."""
    array = np.asarray(array, order="C")
    return relax.const(array, str(array.dtype))


def make_scalar(value: float, dtype: str) -> relax.Expr:
    """Make a constant of rank 0."""
    return make_const(np.array(value, dtype))


def is_integer(expr: relax.Expr) -> bool:
    """Return whether a tensor holds integers."""
    return tensor_dtype(expr).startswith(("int", "uint"))


#: Largest constant that a converter creates, in elements. A file of a few bytes may ask for more.
MAX_MADE_UP = 2**24


def check_made_up(count: float) -> None:
    """Raise unless a constant of `count` elements is small enough to create.

    Raises:
        ModelError: it is too large.
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
    """Declare an inline number. Without a default, it is required."""
    return Attr(AttributeKind.INT, default, default is None)


def real(default: float | None = None) -> Attr:
    return Attr(AttributeKind.FLOAT, default, default is None)


def flag(default: bool = False) -> Attr:
    return Attr(AttributeKind.BOOL, default)


def text(default: str | None = None) -> Attr:
    return Attr(AttributeKind.STRING, default, default is None)


def dtype(required: bool = False) -> Attr:
    """Declare a dtype. "" means that Relay takes it from the operands."""
    return Attr(AttributeKind.DTYPE, "", required)


def boxed(default: int | None = None) -> Attr:
    """Declare an integer that may be missing."""
    return Attr(AttributeKind.INTEGER, default)


def integers(*default: int, required: bool = False) -> Attr:
    return Attr(AttributeKind.INTS, default, required)


OPTIONAL_INTEGERS = Attr(AttributeKind.INTS, None)

#: Declare an attribute whose value does not matter.
IGNORED = Attr(AttributeKind.ANY)
