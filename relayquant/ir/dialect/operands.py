"""Dialect: checks of operands during type inference, and their messages.

A shape may be known or symbolic, or only its rank is known. Unknown facts are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.errors import QnnError, form_plural, format_count
from relayquant.ir.rewrite.graph import constant_value, static_size


@dataclass(frozen=True)
class Argument:
    """A declared operand: a tensor, or a parameter of a fixed `dtype`."""

    name: str
    dtype: str = ""  #: "" for a tensor: type inference checks its dtype
    is_tuple: bool = False


def scale_argument(name: str = "scale", *, is_tuple: bool = False) -> Argument:
    """Declare a scale: float32."""
    return Argument(name, "float32", is_tuple)


def zero_point_argument(name: str = "zero_point", *, is_tuple: bool = False) -> Argument:
    """Declare a zero point: int32."""
    return Argument(name, "int32", is_tuple)


def affine_arguments(prefix: str) -> tuple[Argument, Argument]:
    """Declare the scale and zero point of one operand or of the result."""
    return scale_argument(f"{prefix}_scale"), zero_point_argument(f"{prefix}_zero_point")


#: Operands of requantize and of other operators on one tensor.
UNARY_OPERANDS = (Argument("data"), *affine_arguments("input"), *affine_arguments("output"))

QUANTIZED = ("int8", "uint8", "int16", "uint16", "int32")

#: dtypes of operands that may be accumulators
SUMS = (*QUANTIZED, "int64")

NARROW = ("int8", "uint8", "int16")

BYTES = ("int8", "uint8")

FLOATS = ("float32", "float16")


def operator_name(call: Call) -> str:
    """Return the name as a user writes it: qnn.conv2d."""
    return call.op.name.removeprefix("relax.")


@dataclass(frozen=True)
class CheckedOperand:
    """One tensor operand: its place, for messages, and its type as far as it is known."""

    operator: str
    name: str
    ty: Any
    expr: Any

    @property
    def dtype(self) -> str | None:
        """The dtype, or None if it is unknown."""
        return None if self.ty.dtype is None else str(self.ty.dtype)

    @property
    def ndim(self) -> int:
        """The rank, or -1 if it is unknown."""
        return int(self.ty.ndim)

    @cached_property
    def shape(self) -> list[Any] | None:
        """The dimensions, or None if they are unknown."""
        shape = self.ty.shape
        # A slice is faster: iteration over a TVM array checks each index.
        return shape.values[:] if isinstance(shape, relax.ShapeExpr) else None

    def fail(self, what: str, allowed: str, advice: str = "") -> QnnError:
        """Make the error for this operand. The caller raises it."""
        return QnnError(
            f"{self.operator}: operand '{self.name}' {what}; {allowed}. {advice}".rstrip(),
            code="RQ601",
        )

    def check_dtype(self, allowed: Sequence[str], advice: str = "") -> None:
        if self.dtype is not None and self.dtype not in allowed:
            raise self.fail(f"has dtype {self.dtype}", f"allowed: {', '.join(allowed)}", advice)

    def check_rank(self, rank: int, layout: str = "") -> None:
        if self.ndim not in (-1, rank):
            suffix = f" ({layout})" if layout else ""
            raise self.fail(
                f"has rank {self.ndim}",
                f"allowed: rank {rank}{suffix}",
                "Reshape it, or pass the layout that it has." if layout else "",
            )

    def check_min_rank(self, rank: int) -> None:
        if 0 <= self.ndim < rank:
            raise self.fail(f"has rank {self.ndim}", f"allowed: rank {rank} or more")

    def resolve_axis(self, axis: int, attribute: str = "axis") -> int | None:
        """Return `axis` as a non-negative number, or None if the rank is unknown. Scalars have axis
        0.
        """
        if self.ndim < 0:
            return axis if axis >= 0 else None
        if self.ndim == 0 and axis in (0, -1):
            return 0
        if not -self.ndim <= axis < self.ndim:
            raise QnnError(
                f"{self.operator}: {attribute}={axis} is outside operand '{self.name}' of rank "
                f"{self.ndim}; allowed: {-self.ndim}..{self.ndim - 1}.",
                code="RQ601",
            )
        return axis % self.ndim

    def dimension(self, axis: int | None) -> Any | None:
        """Return the size along `axis`, or None if it is unknown."""
        if axis is None or self.shape is None or axis >= len(self.shape):
            return None
        return self.shape[axis]


def is_known_different(left: Any, right: Any) -> bool:
    """Whether two dimensions provably differ. Symbolic dimensions usually do not."""
    if left is None or right is None:
        return False
    difference = Analyzer().simplify(left - right)
    return isinstance(difference, tirx.IntImm) and int(difference) != 0


def check_count(call: Call, arguments: Sequence[Argument]) -> None:
    """Raise unless `call` has the declared number of operands."""
    if len(call.args) != len(arguments):
        raise QnnError(
            f"{operator_name(call)}: got {format_count(len(call.args), 'operand')}; it takes "
            f"{len(arguments)}: {', '.join(argument.name for argument in arguments)}.",
            code="RQ601",
        )


def get_operands(call: Call, arguments: Sequence[Argument]) -> list[CheckedOperand]:
    """Return the tensor operands of `call`. Raise if their number or kind is wrong."""
    check_count(call, arguments)
    operator = operator_name(call)
    operands = []
    for name, argument in zip((each.name for each in arguments), call.args[:], strict=True):
        ty = argument.ty
        if not isinstance(ty, relax.TensorType):
            raise QnnError(
                f"{operator}: operand '{name}' is {ty}; allowed: a tensor. "
                "Pick the tensor out of the tuple first, or pass an array.",
                code="RQ601",
            )
        operands.append(CheckedOperand(operator, name, ty, argument))
    return operands


def make_tensor_type(operand: CheckedOperand, dtype: str) -> relax.TensorType:
    """Return the type of an elementwise result: the shape of `operand` with another dtype."""
    if operand.ty.shape is not None:
        return relax.TensorType(operand.ty.shape, dtype, operand.ty.vdevice)
    return relax.TensorType(None, dtype, operand.ty.vdevice, operand.ndim)


def is_single(ty: Any) -> bool:
    """Whether a parameter of this type holds one value: shape () or (1,)."""
    shape = ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return ty.ndim == 0
    return all(static_size(size) == 1 for size in shape.values[:])


def check_parameter(
    parameter: CheckedOperand, channels: Any | None, allows_channels: bool, dimension_text: str
) -> None:
    """Check a parameter's shape: (), (1,) or, if `allows_channels`, (channels,).

    `dimension_text` describes a channel in messages.
    """
    if parameter.ndim in (-1, 0) or is_single(parameter.ty):
        return
    if not allows_channels:
        raise parameter.fail(
            f"has rank {parameter.ndim}",
            "allowed: a scalar (rank 0)",
            "This operator takes one value per tensor here.",
        )
    if parameter.ndim != 1:
        raise parameter.fail(
            f"has rank {parameter.ndim}",
            "allowed: rank 0 (one per tensor) or rank 1 (one per channel)",
        )
    length = parameter.dimension(0)
    if is_known_different(length, channels):
        raise parameter.fail(
            f"has length {show_dimension(length)}",
            f"allowed: a scalar, or {show_count(channels, 'value')}, one per " + dimension_text,
            "Check the axis, or pass a scalar.",
        )


def check_scale(
    scale: CheckedOperand,
    channels: Any | None = None,
    allows_channels: bool = False,
    what: str = "",
) -> None:
    """Check a scale: float32, shape () or (C,). A constant must be finite and > 0."""
    scale.check_dtype(("float32",), "Convert it to float32.")
    check_parameter(scale, channels, allows_channels, what)
    value = constant_value(scale.expr)
    if value is not None and not (np.isfinite(value).all() and (value > 0).all()):
        bad = value[~(np.isfinite(value) & (value > 0))].flat[0]
        raise scale.fail(
            f"holds {bad}",
            "allowed: finite numbers > 0",
            "For a tensor of zeros, use any scale, such as 1.",
        )


def check_zero_point(
    zero_point: CheckedOperand,
    dtype: str | None,
    channels: Any | None = None,
    allows_channels: bool = False,
    what: str = "",
) -> None:
    """Check a zero point: int32, shape () or (C,). A constant must be in the range of `dtype`."""
    zero_point.check_dtype(("int32",), "Convert it to int32.")
    check_parameter(zero_point, channels, allows_channels, what)
    value = constant_value(zero_point.expr)
    if value is None or dtype not in INTEGER_LIMITS:
        return
    low, high = INTEGER_LIMITS[dtype]
    outside = (value < low) | (value > high)
    if outside.any():
        raise zero_point.fail(
            f"holds {value[outside].flat[0]}", f"allowed for {dtype}: {low}..{high}"
        )


def check_attribute(operator: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise unless an attribute has one of the allowed values."""
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise QnnError(
            f"{operator}: {name}={value!r} is not allowed; allowed: {listed}.", code="RQ601"
        )


def check_modes(operator: str, attrs: Any) -> None:
    """Check that rounding and, if present, arithmetic are values of their enums."""
    check_attribute(operator, "rounding", attrs.rounding, [v.value for v in Rounding])
    if hasattr(attrs, "compute_dtype"):
        check_attribute(
            operator, "compute_dtype", attrs.compute_dtype, [v.value for v in Arithmetic]
        )


def check_channel_pair(
    data: CheckedOperand,
    scale: CheckedOperand,
    zero_point: CheckedOperand,
    axis: int,
    dtype: str | None,
    label: str,
) -> None:
    """Check the scale and zero point of `data` along `axis`."""
    resolved = data.resolve_axis(axis, label)
    channels = data.dimension(resolved)
    what = f"index of axis {axis} of '{data.name}'"
    if data.ndim == 0:
        for parameter in (scale, zero_point):
            if not is_single(parameter.ty):
                raise parameter.fail(
                    f"has rank {parameter.ndim}",
                    f"allowed: a scalar, because '{data.name}' has no axis",
                )
    check_scale(scale, channels, True, what)
    check_zero_point(zero_point, dtype, channels, True, what)


def check_scalar_pairs(parameters: Sequence[CheckedOperand], *dtypes: str | None) -> None:
    """Check the scalars (input scale, input zero point, output scale, output zero point)."""
    in_dtype, out_dtype = dtypes[0], dtypes[-1]
    check_scale(parameters[0])
    check_zero_point(parameters[1], in_dtype)
    check_scale(parameters[2])
    check_zero_point(parameters[3], out_dtype)


def broadcast_dims(
    operator: str, left: tuple[CheckedOperand, list[Any]], right: tuple[CheckedOperand, list[Any]]
) -> list[Any]:
    analyzer = Analyzer()
    shapes = [list(left[1]), list(right[1])]
    rank = max(map(len, shapes))
    one = tirx.IntImm("int64", 1)
    first, second = ([one] * (rank - len(s)) + s for s in shapes)
    result = []
    for a, b in zip(first, second, strict=True):
        if analyzer.can_prove_equal(a, b) or analyzer.can_prove_equal(b, one):
            result.append(a)
        elif analyzer.can_prove_equal(a, one):
            result.append(b)
        elif is_known_different(a, b):
            raise QnnError(
                f"{operator}: operands '{left[0].name}' {show_shape(left[1])} and "
                f"'{right[0].name}' {show_shape(right[1])} do not broadcast; allowed: dimensions "
                "that are equal or 1.",
                code="RQ601",
            )
        else:
            # Nothing can be proved. Assume that the fixed dimension is the right one.
            result.append(b if isinstance(b, tirx.IntImm) else a)
    return result


def show_dimension(size: Any) -> str:
    """Return the number, or the symbolic expression as text."""
    return str(size if static_size(size) is None else static_size(size))


def show_count(size: Any, noun: str) -> str:
    """Format a count as `format_count` does. A symbolic size takes the plural."""
    known = static_size(size)
    return f"{size} {form_plural(noun)}" if known is None else format_count(known, noun)


def show_shape(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(show_dimension, shape))})"


def check_integers(
    operator: str, name: str, values: Sequence[Any], length: int, low: int
) -> list[int]:
    numbers = [int(v) for v in values]
    if len(numbers) != length or any(v < low for v in numbers):
        raise QnnError(
            f"{operator}: {name}={numbers} is not allowed; allowed: "
            f"{format_count(length, 'integer')} >= {low}.",
            code="RQ601",
        )
    return numbers


def check_layout(operator: str, name: str, layout: str, letters: str) -> None:
    """Raise unless `layout` is a permutation of `letters`."""
    if sorted(layout) != sorted(letters):
        raise QnnError(
            f"{operator}: {name}={layout!r} is not allowed; allowed: the letters {letters} in any "
            f"order, such as {letters}.",
            code="RQ601",
        )


def count_windows(data: CheckedOperand, letter: str, span: Any, stride: int) -> Any:
    """Return span // stride + 1. Raise if the window is larger than the padded data."""
    analyzer = Analyzer()
    if analyzer.can_prove(span < 0):
        raise data.fail(
            f"has shape {show_shape(data.shape or [])}",
            f"its padded {letter} is smaller than the (dilated) window",
            "Use a smaller window or more padding.",
        )
    return analyzer.simplify(tirx.floordiv(span, stride) + 1)
