"""Dialect: what type inference checks of operands, and the messages for those it rejects.

Shapes may be known, symbolic, or unknown but for their rank; what cannot be known is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.sym import Analyzer

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.errors import QnnError, form_plural, format_count
from relayquant.ir.rewrite.graph import static_size


@dataclass(frozen=True)
class Argument:
    """One operand as it is declared: a tensor, or a parameter of a fixed `dtype`."""

    name: str
    dtype: str = ""  #: "": a tensor, whose dtypes the inference of types checks
    is_tuple: bool = False


def scale_argument(name: str = "scale", *, is_tuple: bool = False) -> Argument:
    """A scale: float32."""
    return Argument(name, "float32", is_tuple)


def zero_point_argument(name: str = "zero_point", *, is_tuple: bool = False) -> Argument:
    """A zero point: int32."""
    return Argument(name, "int32", is_tuple)


def affine_arguments(prefix: str) -> tuple[Argument, Argument]:
    """(scale, zero point) of one operand or of the result."""
    return scale_argument(f"{prefix}_scale"), zero_point_argument(f"{prefix}_zero_point")


#: Operands of requantize and of what works like it on one tensor.
UNARY_OPERANDS = (Argument("data"), *affine_arguments("input"), *affine_arguments("output"))

QUANTIZED = ("int8", "uint8", "int16", "uint16", "int32")

#: dtypes of operands that may be sums of products
SUMS = (*QUANTIZED, "int64")

NARROW = ("int8", "uint8", "int16")

BYTES = ("int8", "uint8")

FLOATS = ("float32", "float16")


def operator_name(call: Call) -> str:
    """Name as a user writes it: qnn.conv2d."""
    return call.op.name.removeprefix("relax.")


@dataclass(frozen=True)
class CheckedOperand:
    """One tensor operand: where it stands, for messages, and what is known of its type."""

    operator: str
    name: str
    ty: Any
    expr: Any

    @property
    def dtype(self) -> str | None:
        """None when unknown."""
        return None if self.ty.dtype is None else str(self.ty.dtype)

    @property
    def ndim(self) -> int:
        """-1 when unknown."""
        return int(self.ty.ndim)

    @cached_property
    def shape(self) -> list[Any] | None:
        """Dimensions, None when unknown."""
        shape = self.ty.shape
        # A slice: to iterate over an array of TVM checks each index.
        return shape.values[:] if isinstance(shape, relax.ShapeExpr) else None

    def fail(self, what: str, allowed: str, advice: str = "") -> QnnError:
        """The error for this operand; raise it."""
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
                "Reshape it, or give the layout it really has." if layout else "",
            )

    def check_min_rank(self, rank: int) -> None:
        if 0 <= self.ndim < rank:
            raise self.fail(f"has rank {self.ndim}", f"allowed: rank {rank} or more")

    def resolve_axis(self, axis: int, attribute: str = "axis") -> int | None:
        """`axis` counted from the front; None when the rank is unknown. Scalars have axis 0."""
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
        """Size along `axis`, None when unknown."""
        if axis is None or self.shape is None or axis >= len(self.shape):
            return None
        return self.shape[axis]


def is_known_different(left: Any, right: Any) -> bool:
    """Whether two dimensions can be proved to differ; symbolic ones usually cannot."""
    if left is None or right is None:
        return False
    difference = Analyzer().simplify(left - right)
    return isinstance(difference, tirx.IntImm) and int(difference) != 0


def check_count(call: Call, arguments: Sequence[Argument]) -> None:
    """Raise unless `call` has as many operands as are declared."""
    if len(call.args) != len(arguments):
        raise QnnError(
            f"{operator_name(call)}: got {format_count(len(call.args), 'operand')}; it takes "
            f"{len(arguments)}: {', '.join(argument.name for argument in arguments)}.",
            code="RQ601",
        )


def get_operands(call: Call, arguments: Sequence[Argument]) -> list[CheckedOperand]:
    """The operands of `call` as tensors; raises when their number or kind is wrong."""
    check_count(call, arguments)
    operator = operator_name(call)
    operands = []
    for name, argument in zip((each.name for each in arguments), call.args, strict=True):
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
    """Type of an elementwise result: the shape of `operand`, another dtype."""
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
    parameter: CheckedOperand, channels: Any | None, allows_channels: bool, dimension_text: str = ""
) -> None:
    """Shape () or (1,) or, where allowed, (channels,); `dimension_text` says what those are."""
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


def get_constant(expr: Any) -> np.ndarray | None:
    """Value of a constant expression, None for anything else."""
    if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
        return expr.value.numpy()
    return None


def check_scale(
    scale: CheckedOperand,
    channels: Any | None = None,
    allows_channels: bool = False,
    what: str = "",
) -> None:
    """float32, shape () or (C,), and > 0 and finite where it is a constant."""
    scale.check_dtype(("float32",), "Convert it to float32.")
    check_parameter(scale, channels, allows_channels, what)
    value = get_constant(scale.expr)
    if value is not None and not (np.isfinite(value).all() and (value > 0).all()):
        bad = value[~(np.isfinite(value) & (value > 0))].flat[0]
        raise scale.fail(
            f"holds {bad}",
            "allowed: finite numbers > 0",
            "A tensor that is all zero may take any scale, such as 1.",
        )


def check_zero_point(
    zero_point: CheckedOperand,
    dtype: str | None,
    channels: Any | None = None,
    allows_channels: bool = False,
    what: str = "",
) -> None:
    """int32, shape () or (C,), and within `dtype` where it is a constant."""
    zero_point.check_dtype(("int32",), "Convert it to int32.")
    check_parameter(zero_point, channels, allows_channels, what)
    value = get_constant(zero_point.expr)
    if value is None or dtype not in INTEGER_LIMITS:
        return
    low, high = INTEGER_LIMITS[dtype]
    outside = (value < low) | (value > high)
    if outside.any():
        raise zero_point.fail(
            f"holds {value[outside].flat[0]}", f"allowed for {dtype}: {low}..{high}"
        )


def check_attribute(operator: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise unless an attribute holds one of the allowed values."""
    if value not in allowed:
        listed = ", ".join(map(str, allowed))
        raise QnnError(
            f"{operator}: {name}={value!r} is not allowed; allowed: {listed}.", code="RQ601"
        )


def check_modes(operator: str, attrs: Any) -> None:
    """Rounding and, where present, arithmetic are names of their enums."""
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
    """Scale and zero point of `data` along `axis`."""
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
    """(input scale, input zero point, output scale, output zero point), all scalar."""
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
            # Neither can be proved: a fixed dimension is the better guess of the two.
            result.append(b if isinstance(b, tirx.IntImm) else a)
    return result


def show_dimension(size: Any) -> str:
    """A number, or the symbolic expression as it is printed."""
    return str(size if static_size(size) is None else static_size(size))


def show_count(size: Any, noun: str) -> str:
    """As `format_count`; of a symbolic size the plural."""
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
    """Raise unless `layout` is an order of `letters`."""
    if sorted(layout) != sorted(letters):
        raise QnnError(
            f"{operator}: {name}={layout!r} is not allowed; allowed: the letters {letters} in any "
            f"order, such as {letters}.",
            code="RQ601",
        )


def count_windows(data: CheckedOperand, letter: str, span: Any, stride: int) -> Any:
    """span // stride + 1, raising when the window is larger than the padded data."""
    analyzer = Analyzer()
    if analyzer.can_prove(span < 0):
        raise data.fail(
            f"has shape {show_shape(data.shape or [])}",
            f"its padded {letter} is smaller than the (dilated) window",
            "Use a smaller window or more padding.",
        )
    return analyzer.simplify(tirx.floordiv(span, stride) + 1)
