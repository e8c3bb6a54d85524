"""Dialect: type inference of the `relax.qnn` operators, and the messages for operands it rejects.

Every function here has TVM's signature `FInferType(call, builder) -> Type`. Shapes may be known,
symbolic, or unknown but for their rank; what cannot be known is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.sym import Analyzer

from relayquant.errors import QnnError, form_plural, format_count
from relayquant.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.rewrite.graph import static_size

#: TVM's signature of FInferType.
InferFunc = Callable[[Call, Any], Any]

#: Operands of requantize and of what works like it on one tensor.
UNARY_OPERANDS = (
    "data",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)
PRELU_OPERANDS = (*UNARY_OPERANDS, "slopes")

_QUANTIZED = ("int8", "uint8", "int16", "uint16", "int32")
#: dtypes of operands that may be sums of products
_SUMS = (*_QUANTIZED, "int64")
_NARROW = ("int8", "uint8", "int16")
_BYTES = ("int8", "uint8")
_FLOATS = ("float32", "float16")


def operator_name(call: Call) -> str:
    """Name as a user writes it: qnn.conv2d."""
    return call.op.name.removeprefix("relax.")


@dataclass(frozen=True)
class Operand:
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
            f"{self.operator}: operand '{self.name}' {what}; {allowed}. {advice}".rstrip()
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
                f"{self.ndim}; allowed: {-self.ndim}..{self.ndim - 1}."
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


def get_operands(call: Call, names: Sequence[str]) -> list[Operand]:
    """The operands of `call` as tensors; raises when their number or kind is wrong."""
    operator = operator_name(call)
    if len(call.args) != len(names):
        raise QnnError(
            f"{operator}: got {format_count(len(call.args), 'operand')}; it takes {len(names)}: "
            f"{', '.join(names)}."
        )
    operands = []
    for name, argument in zip(names, call.args, strict=True):
        ty = argument.ty
        if not isinstance(ty, relax.TensorType):
            raise QnnError(
                f"{operator}: operand '{name}' is {ty}; allowed: a tensor. "
                "Pick the tensor out of the tuple first, or pass an array."
            )
        operands.append(Operand(operator, name, ty, argument))
    return operands


def make_tensor_type(operand: Operand, dtype: str) -> relax.TensorType:
    """Type of an elementwise result: the shape of `operand`, another dtype."""
    if operand.ty.shape is not None:
        return relax.TensorType(operand.ty.shape, dtype, operand.ty.vdevice)
    return relax.TensorType(None, dtype, operand.ty.vdevice, operand.ndim)


# ---------------------------------------------------------------- parameters and attributes


def is_single(ty: Any) -> bool:
    """Whether a parameter of this type holds one value: shape () or (1,)."""
    shape = ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return ty.ndim == 0
    return all(static_size(size) == 1 for size in shape.values[:])


def check_parameter(
    parameter: Operand, channels: Any | None, allows_channels: bool, dimension_text: str = ""
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
            f"has length {_show_dimension(length)}",
            f"allowed: a scalar, or {_show_count(channels, 'value')}, one per " + dimension_text,
            "Check the axis, or pass a scalar.",
        )


def get_constant(expr: Any) -> np.ndarray | None:
    """Value of a constant expression, None for anything else."""
    if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
        return expr.value.numpy()
    return None


def check_scale(
    scale: Operand, channels: Any | None = None, allows_channels: bool = False, what: str = ""
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
    zero_point: Operand,
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
        raise QnnError(f"{operator}: {name}={value!r} is not allowed; allowed: {listed}.")


def check_modes(operator: str, attrs: Any) -> None:
    """Rounding and, where present, arithmetic are names of their enums."""
    check_attribute(operator, "rounding", attrs.rounding, [v.value for v in Rounding])
    if hasattr(attrs, "compute_dtype"):
        check_attribute(
            operator, "compute_dtype", attrs.compute_dtype, [v.value for v in Arithmetic]
        )


def _check_channel_pair(
    data: Operand, scale: Operand, zero_point: Operand, axis: int, dtype: str | None, label: str
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


# ---------------------------------------------------------------- elementwise


def infer_quantize(call: Call, _builder: Any) -> Any:
    """float data -> out_dtype, same shape."""
    data, scale, zero_point = get_operands(call, ("data", "scale", "zero_point"))
    operator, attrs = data.operator, call.attrs
    data.check_dtype(_FLOATS, "An integer tensor changes its parameters through qnn.requantize.")
    check_attribute(operator, "out_dtype", attrs.out_dtype, _QUANTIZED)
    check_modes(operator, attrs)
    _check_channel_pair(data, scale, zero_point, attrs.axis, attrs.out_dtype, "axis")
    return make_tensor_type(data, attrs.out_dtype)


def infer_dequantize(call: Call, _builder: Any) -> Any:
    """Integer data -> out_dtype, same shape."""
    data, scale, zero_point = get_operands(call, ("data", "scale", "zero_point"))
    data.check_dtype(_SUMS, "Quantize it first.")
    check_attribute(data.operator, "out_dtype", call.attrs.out_dtype, _FLOATS)
    _check_channel_pair(data, scale, zero_point, call.attrs.axis, data.dtype, "axis")
    return make_tensor_type(data, call.attrs.out_dtype)


def infer_requantize(call: Call, _builder: Any) -> Any:
    """Integer data -> out_dtype, same shape."""
    data, scale, zero_point, out_scale, out_zero_point = get_operands(call, UNARY_OPERANDS)
    attrs = call.attrs
    data.check_dtype(_SUMS, "A float tensor is quantized with qnn.quantize.")
    check_attribute(data.operator, "out_dtype", attrs.out_dtype, _QUANTIZED)
    check_modes(data.operator, attrs)
    _check_channel_pair(data, scale, zero_point, attrs.axis, data.dtype, "axis")
    check_scale(out_scale)
    check_zero_point(out_zero_point, attrs.out_dtype)
    return make_tensor_type(data, attrs.out_dtype)


def _infer_simulated(call: Call) -> Any:
    data, dtype, scale, zero_point = get_operands(call, ("data", "dtype", "scale", "zero_point"))
    data.check_dtype(_FLOATS, "Simulated quantization keeps float tensors.")
    data.resolve_axis(call.attrs.axis)
    dtype.check_dtype(("int32",), "Its values are the codes listed for qnn.simulated_quantize.")
    # Any length serves, because the index wraps around: parameters may be variables of the graph.
    for parameter, allowed in ((dtype, "int32"), (scale, "float32"), (zero_point, "int32")):
        parameter.check_dtype((allowed,))
        if parameter.ndim > 1:
            raise parameter.fail(f"has rank {parameter.ndim}", "allowed: rank 0 or 1")
    value = get_constant(dtype.expr)
    if value is not None and not np.isin(value, tuple(SIMULATED_DTYPES)).all():
        known = ", ".join(f"{code} {name}" for code, name in SIMULATED_DTYPES.items())
        raise dtype.fail(f"holds {value}", f"allowed codes: {known}")
    return make_tensor_type(data, data.dtype or "float32")


#: Codes of the `dtype` operand of the simulated operators.
SIMULATED_DTYPES: dict[int, str] = {
    0: "pass through",
    1: "int8",
    2: "uint8",
    3: "int32",
    4: "int4",
    5: "int16",
    6: "int8 in -127..127",
    7: "uint16",
}


def infer_simulated_quantize(call: Call, _builder: Any) -> Any:
    """Float data -> the same type."""
    inferred = _infer_simulated(call)
    check_modes(operator_name(call), call.attrs)
    return inferred


def infer_simulated_dequantize(call: Call, _builder: Any) -> Any:
    """Float data -> the same type."""
    return _infer_simulated(call)


def infer_leaky_relu(call: Call, _builder: Any) -> Any:
    """Integer data -> the same type."""
    data, *parameters = get_operands(call, UNARY_OPERANDS)
    data.check_dtype(_NARROW)
    check_modes(data.operator, call.attrs)
    _check_scalar_pairs(parameters, data.dtype)
    if not 0.0 <= call.attrs.alpha <= 1.0:
        raise QnnError(
            f"{data.operator}: alpha={call.attrs.alpha} is not allowed; allowed: 0..1. "
            "Use qnn.lookup for another slope."
        )
    return make_tensor_type(data, data.dtype or "int8")


def infer_prelu(call: Call, _builder: Any) -> Any:
    """Integer data -> the same type."""
    data, *parameters, slopes = get_operands(call, PRELU_OPERANDS)
    data.check_dtype(_NARROW)
    _check_scalar_pairs(parameters, data.dtype)
    axis = call.attrs.axis
    channels = data.dimension(data.resolve_axis(axis, "axis"))
    slopes.check_dtype(("float32",), "Convert it to float32.")
    check_parameter(slopes, channels, True, f"index of axis {axis} of '{data.name}'")
    value = get_constant(slopes.expr)
    if value is not None and not np.isfinite(value).all():
        raise slopes.fail(f"holds {value[~np.isfinite(value)].flat[0]}", "allowed: finite numbers")
    return make_tensor_type(data, data.dtype or "int8")


def _check_scalar_pairs(parameters: Sequence[Operand], *dtypes: str | None) -> None:
    """(input scale, input zero point, output scale, output zero point), all scalar."""
    in_dtype, out_dtype = dtypes[0], dtypes[-1]
    check_scale(parameters[0])
    check_zero_point(parameters[1], in_dtype)
    check_scale(parameters[2])
    check_zero_point(parameters[3], out_dtype)


def infer_lookup(call: Call, _builder: Any) -> Any:
    """Integer data (8 bit) and a table of 256 -> dtype of the table, shape of data."""
    data, table = get_operands(call, ("data", "table"))
    data.check_dtype(_BYTES, "A table is indexed by 8 bits.")
    table.check_rank(1)
    if is_known_different(table.dimension(0), tirx.IntImm("int64", 256)):
        raise table.fail(
            f"has length {_show_dimension(table.dimension(0))}",
            "allowed: 256 entries, entry i for the bit pattern i of data as uint8",
        )
    return make_tensor_type(data, table.dtype or "int8")


# ---------------------------------------------------------------- binary and concatenate


def broadcast_shapes(operator: str, left: Operand, right: Operand) -> list[Any] | None:
    """Shape of two tensors broadcast as in numpy; None when one is unknown."""
    if left.shape is None or right.shape is None:
        return None
    return _broadcast_dims(operator, (left, left.shape), (right, right.shape))


def _broadcast_dims(
    operator: str, left: tuple[Operand, list[Any]], right: tuple[Operand, list[Any]]
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
                f"{operator}: operands '{left[0].name}' {_show(left[1])} and '{right[0].name}' "
                f"{_show(right[1])} do not broadcast; allowed: dimensions that are equal or 1."
            )
        else:
            # Neither can be proved: a fixed dimension is the better guess of the two.
            result.append(b if isinstance(b, tirx.IntImm) else a)
    return result


def _show_dimension(size: Any) -> str:
    """A number, or the symbolic expression as it is printed."""
    return str(size if static_size(size) is None else static_size(size))


def _show_count(size: Any, noun: str) -> str:
    """As `format_count`; of a symbolic size the plural."""
    known = static_size(size)
    return f"{size} {form_plural(noun)}" if known is None else format_count(known, noun)


def _show(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(_show_dimension, shape))})"


def infer_binary(call: Call, _builder: Any) -> Any:
    """Integer lhs and rhs, broadcast -> out_dtype."""
    names = ("lhs", "rhs", "lhs_scale", "lhs_zero_point", "rhs_scale", "rhs_zero_point")
    operands = get_operands(call, (*names, "output_scale", "output_zero_point"))
    lhs, rhs, lhs_scale, lhs_zero, rhs_scale, rhs_zero, out_scale, out_zero = operands
    operator, attrs = lhs.operator, call.attrs
    for operand in (lhs, rhs):
        operand.check_dtype(_SUMS, "Quantize a float operand first.")
    check_attribute(operator, "out_dtype", attrs.out_dtype, ("", *_QUANTIZED))
    check_modes(operator, attrs)
    _check_channel_pair(lhs, lhs_scale, lhs_zero, attrs.lhs_axis, lhs.dtype, "lhs_axis")
    _check_channel_pair(rhs, rhs_scale, rhs_zero, attrs.rhs_axis, rhs.dtype, "rhs_axis")
    out_dtype = attrs.out_dtype or lhs.dtype or "int8"
    check_scale(out_scale)
    check_attribute(operator, "out_dtype", out_dtype, _QUANTIZED)
    check_zero_point(out_zero, out_dtype)
    shape = broadcast_shapes(operator, lhs, rhs)
    if shape is not None:
        return relax.TensorType(shape, out_dtype, lhs.ty.vdevice)
    ndim = -1 if -1 in (lhs.ndim, rhs.ndim) else max(lhs.ndim, rhs.ndim)
    return relax.TensorType(None, out_dtype, lhs.ty.vdevice, ndim)


def _get_tuple(call: Call, position: int, name: str, each: str) -> list[Operand]:
    """Tensors of a tuple operand."""
    operator, argument = operator_name(call), call.args[position]
    if not isinstance(argument.ty, relax.TupleType):
        raise QnnError(
            f"{operator}: operand '{name}' is {argument.ty}; allowed: a tuple of tensors."
        )
    types = argument.ty.fields
    fields = argument.fields if isinstance(argument, relax.Tuple) else [None] * len(types)
    operands = []
    for i, ty in enumerate(types):
        if not isinstance(ty, relax.TensorType):
            raise QnnError(f"{operator}: {name}[{i}] is {ty}; allowed: a tensor, {each}.")
        operands.append(Operand(operator, f"{name}[{i}]", ty, fields[i]))
    return operands


def infer_concatenate(call: Call, _builder: Any) -> Any:
    """Tuple of tensors of one integer dtype -> the same dtype, joined along axis."""
    operator, attrs = operator_name(call), call.attrs
    names = ("data", "input_scales", "input_zero_points", "output_scale", "output_zero_point")
    if len(call.args) != len(names):
        raise QnnError(
            f"{operator}: got {format_count(len(call.args), 'operand')}; it takes {len(names)}: "
            f"{', '.join(names)}."
        )
    tensors = _get_tuple(call, 0, "data", "one to join")
    scales = _get_tuple(call, 1, "input_scales", "one scale per tensor")
    zero_points = _get_tuple(call, 2, "input_zero_points", "one zero point per tensor")
    if not tensors or not len(tensors) == len(scales) == len(zero_points):
        raise QnnError(
            f"{operator}: got {format_count(len(tensors), 'tensor')}, "
            f"{format_count(len(scales), 'scale')} and "
            f"{format_count(len(zero_points), 'zero point')}; allowed: as many of each, at "
            "least one."
        )
    out_scale, out_zero = (
        Operand(operator, names[i], call.args[i].ty, call.args[i]) for i in (3, 4)
    )
    check_modes(operator, attrs)
    first = tensors[0]
    for tensor, scale, zero_point in zip(tensors, scales, zero_points, strict=True):
        tensor.check_dtype(_QUANTIZED, "Quantize it first.")
        if None not in (tensor.dtype, first.dtype) and tensor.dtype != first.dtype:
            raise tensor.fail(
                f"has dtype {tensor.dtype}",
                f"allowed: {first.dtype}, as {first.name} has",
                "Requantize it to that dtype first.",
            )
        if first.ndim >= 0:
            tensor.check_rank(first.ndim)
        check_scale(scale)
        check_zero_point(zero_point, tensor.dtype)
    check_scale(out_scale)
    check_zero_point(out_zero, first.dtype)
    tensors[0].check_min_rank(1)
    axis = first.resolve_axis(attrs.axis)
    dtype = first.dtype or "int8"
    shapes = [tensor.shape for tensor in tensors]
    if axis is None or any(shape is None for shape in shapes):
        return relax.TensorType(None, dtype, first.ty.vdevice, first.ndim)
    known = [shape for shape in shapes if shape is not None]
    for tensor, shape in zip(tensors, known, strict=True):
        for i, (a, b) in enumerate(zip(known[0], shape, strict=True)):
            if i != axis and is_known_different(a, b):
                raise tensor.fail(
                    f"has shape {_show(shape)}",
                    f"allowed: that of {first.name}, {_show(known[0])}, but for axis {axis}",
                )
    total = known[0][axis]
    for shape in known[1:]:
        total = total + shape[axis]
    result = list(known[0])
    result[axis] = Analyzer().simplify(total)
    return relax.TensorType(result, dtype, first.ty.vdevice)


# ---------------------------------------------------------------- reductions


def _check_integers(
    operator: str, name: str, values: Sequence[Any], length: int, low: int
) -> list[int]:
    numbers = [int(v) for v in values]
    if len(numbers) != length or any(v < low for v in numbers):
        raise QnnError(
            f"{operator}: {name}={numbers} is not allowed; allowed: "
            f"{format_count(length, 'integer')} >= {low}."
        )
    return numbers


def check_layout(operator: str, name: str, layout: str, letters: str) -> None:
    """Raise unless `layout` is an order of `letters`."""
    if sorted(layout) != sorted(letters):
        raise QnnError(
            f"{operator}: {name}={layout!r} is not allowed; allowed: the letters {letters} in any "
            f"order, such as {letters}."
        )


def infer_avg_pool2d(call: Call, _builder: Any) -> Any:
    """Integer data -> the same dtype, pooled."""
    data, *parameters = get_operands(call, UNARY_OPERANDS)
    operator, attrs = data.operator, call.attrs
    data.check_dtype(_QUANTIZED, "Quantize it first.")
    check_modes(operator, attrs)
    check_layout(operator, "layout", attrs.layout, "NCHW")
    pool = _check_integers(operator, "pool_size", attrs.pool_size, 2, 1)
    strides = _check_integers(operator, "strides", attrs.strides, 2, 1)
    dilation = _check_integers(operator, "dilation", attrs.dilation, 2, 1)
    padding = _check_integers(operator, "padding", attrs.padding, 4, 0)
    data.check_rank(4, attrs.layout)
    _check_scalar_pairs(parameters, data.dtype)
    if data.shape is None:
        return relax.TensorType(None, data.dtype or "int8", data.ty.vdevice, 4)
    result = list(data.shape)
    for i, letter in enumerate("HW"):
        axis = attrs.layout.index(letter)
        size, stride = result[axis], strides[i]
        span = size + (padding[i] + padding[i + 2] - dilation[i] * (pool[i] - 1) - 1)
        if not attrs.ceil_mode:
            result[axis] = _window_count(data, letter, span, stride)
            continue
        result[axis] = _window_count(data, letter, span + (stride - 1), stride)
        if drops_outer_windows(attrs):
            last = result[axis] - 1
            result[axis] = _choose(last * stride >= size + padding[i], last, last + 1)
    return relax.TensorType(result, data.dtype or "int8", data.ty.vdevice)


def drops_outer_windows(attrs: Any) -> bool:
    """Whether ceil mode drops a last window that starts beyond data and left padding.

    So do relax.nn.avg_pool2d and our default; TVM 0.19, and hence its rounding modes, keep it.
    """
    return attrs.rounding == Rounding.TONEAREST_EVEN.value


def _choose(condition: Any, true_value: Any, false_value: Any) -> Any:
    """One of two dimensions; an expression where the condition is open."""
    analyzer = Analyzer()
    if analyzer.can_prove(condition):
        return analyzer.simplify(true_value)
    if analyzer.can_prove(tirx.Not(condition)):
        return analyzer.simplify(false_value)
    return tirx.if_then_else(condition, true_value, false_value)


def _window_count(data: Operand, letter: str, span: Any, stride: int) -> Any:
    """span // stride + 1, raising when the window is larger than the padded data."""
    analyzer = Analyzer()
    if analyzer.can_prove(span < 0):
        raise data.fail(
            f"has shape {_show(data.shape or [])}",
            f"its padded {letter} is smaller than the (dilated) window",
            "Use a smaller window or more padding.",
        )
    return analyzer.simplify(tirx.floordiv(span, stride) + 1)


def infer_mean(call: Call, _builder: Any) -> Any:
    """Integer data -> out_dtype, reduced over the axes."""
    data, *parameters = get_operands(call, UNARY_OPERANDS)
    attrs = call.attrs
    data.check_dtype(_QUANTIZED, "Quantize it first.")
    check_attribute(data.operator, "out_dtype", attrs.out_dtype, ("", *_QUANTIZED))
    check_modes(data.operator, attrs)
    dtype = attrs.out_dtype or data.dtype or "int8"
    _check_scalar_pairs(parameters, data.dtype, dtype)
    if data.ndim < 0:
        return relax.TensorType(None, dtype, data.ty.vdevice, -1)
    axes = resolve_axes(data, attrs.axes)
    if data.shape is None:
        ndim = data.ndim if attrs.keepdims else data.ndim - len(axes)
        return relax.TensorType(None, dtype, data.ty.vdevice, ndim)
    one = tirx.IntImm("int64", 1)
    kept = [one if i in axes else v for i, v in enumerate(data.shape)]
    if not attrs.keepdims:
        kept = [v for i, v in enumerate(data.shape) if i not in axes]
    return relax.TensorType(kept, dtype, data.ty.vdevice)


def resolve_axes(data: Operand, axes: Sequence[Any]) -> tuple[int, ...]:
    """Axes counted from the front, sorted; none means all. Raises on a repeated axis."""
    if not len(axes):
        return tuple(range(data.ndim))
    resolved = [data.resolve_axis(int(axis), "axes") for axis in axes]
    known = sorted(axis for axis in resolved if axis is not None)
    if len(set(known)) != len(known):
        raise QnnError(f"{data.operator}: axes={[int(a) for a in axes]} name one axis twice.")
    return tuple(known)


# ---------------------------------------------------------------- convolution and products

_LINEAR_OPERANDS = (
    "data",
    "weight",
    "input_zero_point",
    "kernel_zero_point",
    "input_scale",
    "kernel_scale",
)


def _get_linear(
    call: Call, names: Sequence[str] = _LINEAR_OPERANDS
) -> tuple[Operand, Operand, list[Operand]]:
    data, weight, *parameters = get_operands(call, names)
    data.check_dtype(_NARROW, "Quantize it to 8 or 16 bits first.")
    weight.check_dtype(_NARROW, "Quantize it to 8 or 16 bits first.")
    check_attribute(data.operator, "out_dtype", call.attrs.out_dtype, ("int32", "int64"))
    return data, weight, parameters


def _check_linear_parameters(
    data: Operand,
    weight: Operand,
    parameters: Sequence[Operand],
    channels: Any | None,
    allows_channels: bool,
) -> None:
    input_zero, kernel_zero, input_scale, kernel_scale = parameters
    what = "output channel"
    check_zero_point(input_zero, data.dtype)
    check_zero_point(kernel_zero, weight.dtype, channels, allows_channels, what)
    check_scale(input_scale)
    check_scale(kernel_scale, channels, allows_channels, what)


def _check_conv_attributes(
    call: Call, spatial: str, kernel_letters: str
) -> tuple[list[int], list[int], list[int], int]:
    operator, attrs = operator_name(call), call.attrs
    rank = len(spatial)
    check_layout(operator, "data_layout", attrs.data_layout, "NC" + spatial)
    check_layout(operator, "kernel_layout", attrs.kernel_layout, kernel_letters)
    strides = _check_integers(operator, "strides", attrs.strides, rank, 1)
    padding = _check_integers(operator, "padding", attrs.padding, 2 * rank, 0)
    dilation = _check_integers(operator, "dilation", attrs.dilation, rank, 1)
    if attrs.groups < 1:
        raise QnnError(f"{operator}: groups={attrs.groups} is not allowed; allowed: 1 or more.")
    return strides, padding, dilation, int(attrs.groups)


def _make_infer_conv(spatial: str) -> InferFunc:
    def infer_conv(call: Call, _builder: Any) -> Any:
        """8 or 16 bit data and weight -> int32 or int64."""
        attrs = call.attrs
        data, weight, parameters = _get_linear(call)
        kernel_letters = "OI" + spatial
        strides, padding, dilation, groups = _check_conv_attributes(call, spatial, kernel_letters)
        data.check_rank(2 + len(spatial), attrs.data_layout)
        weight.check_rank(2 + len(spatial), attrs.kernel_layout)
        outputs = weight.dimension(attrs.kernel_layout.index("O"))
        _check_linear_parameters(data, weight, parameters, outputs, True)
        if data.shape is None or weight.shape is None:
            return relax.TensorType(None, attrs.out_dtype, data.ty.vdevice, 2 + len(spatial))
        inputs = data.shape[attrs.data_layout.index("C")]
        per_group = weight.shape[attrs.kernel_layout.index("I")]
        if is_known_different(inputs, per_group * groups):
            raise weight.fail(
                f"takes {_show_count(per_group, 'input channel')} in each of "
                f"{format_count(groups, 'group')}",
                f"'data' has {_show_count(inputs, 'channel')}; allowed: groups * weight channels",
                "Check data_layout, kernel_layout and groups.",
            )
        if is_known_different(tirx.floormod(outputs, groups), tirx.IntImm("int64", 0)):
            raise weight.fail(
                f"has {_show_count(outputs, 'output channel')}",
                f"allowed: a multiple of groups={groups}",
            )
        result = list(data.shape)
        result[attrs.data_layout.index("C")] = outputs
        for i, letter in enumerate(spatial):
            size = weight.shape[attrs.kernel_layout.index(letter)]
            axis = attrs.data_layout.index(letter)
            pads = padding[i] + padding[i + len(spatial)]
            span = result[axis] + pads - dilation[i] * (size - 1) - 1
            result[axis] = _window_count(data, letter, span, strides[i])
        return relax.TensorType(result, attrs.out_dtype, data.ty.vdevice)

    return infer_conv


infer_conv1d = _make_infer_conv("W")
infer_conv2d = _make_infer_conv("HW")


def infer_conv2d_transpose(call: Call, _builder: Any) -> Any:
    """8 or 16 bit data and weight -> int32 or int64; O of the weight counts those of one group."""
    attrs = call.attrs
    data, weight, parameters = _get_linear(call)
    strides, padding, dilation, groups = _check_conv_attributes(call, "HW", "IOHW")
    extra = _check_integers(data.operator, "output_padding", attrs.output_padding, 2, 0)
    for i in range(2):
        if extra[i] >= max(strides[i], dilation[i]):
            raise QnnError(
                f"{data.operator}: output_padding={extra} is not allowed; allowed: less than the "
                f"stride or the dilation, strides={strides}, dilation={dilation}."
            )
    data.check_rank(4, attrs.data_layout)
    weight.check_rank(4, attrs.kernel_layout)
    per_group = weight.dimension(attrs.kernel_layout.index("O"))
    outputs = None if per_group is None else Analyzer().simplify(per_group * groups)
    _check_linear_parameters(data, weight, parameters, outputs, True)
    if data.shape is None or weight.shape is None or outputs is None:
        return relax.TensorType(None, attrs.out_dtype, data.ty.vdevice, 4)
    inputs = data.shape[attrs.data_layout.index("C")]
    weight_inputs = weight.shape[attrs.kernel_layout.index("I")]
    if is_known_different(inputs, weight_inputs):
        raise weight.fail(
            f"takes {_show_count(weight_inputs, 'input channel')}",
            f"'data' has {_show_dimension(inputs)}; allowed: the same number",
            "Check data_layout and kernel_layout.",
        )
    if is_known_different(tirx.floormod(inputs, groups), tirx.IntImm("int64", 0)):
        raise data.fail(
            f"has {_show_count(inputs, 'channel')}", f"allowed: a multiple of groups={groups}"
        )
    result = list(data.shape)
    result[attrs.data_layout.index("C")] = outputs
    for i, letter in enumerate("HW"):
        size = weight.shape[attrs.kernel_layout.index(letter)]
        axis = attrs.data_layout.index(letter)
        reach = dilation[i] * (size - 1) + 1
        pads = padding[i] + padding[i + 2]
        total: Any = Analyzer().simplify((result[axis] - 1) * strides[i] + reach - pads + extra[i])
        if Analyzer().can_prove(total <= 0):
            raise data.fail(
                f"has shape {_show(data.shape)}",
                f"padding={padding} leaves nothing of its {letter}",
                "Use less padding.",
            )
        result[axis] = total
    return relax.TensorType(result, attrs.out_dtype, data.ty.vdevice)


def infer_dense(call: Call, _builder: Any) -> Any:
    """data (..., K), weight (N, K) -> int32 or int64 (..., N)."""
    data, weight, parameters = _get_linear(call)
    data.check_min_rank(1)
    weight.check_rank(2)
    units = weight.dimension(0)
    _check_linear_parameters(data, weight, parameters, units, True)
    if data.shape is None or units is None:
        return relax.TensorType(None, call.attrs.out_dtype, data.ty.vdevice, data.ndim)
    if is_known_different(data.shape[-1], weight.dimension(1)):
        raise weight.fail(
            f"has shape {_show(weight.shape or [])}",
            f"allowed: (units, {_show_dimension(data.shape[-1])}), as 'data' is "
            + _show(data.shape),
            "The weight is (units, inputs), as in torch.nn.Linear.",
        )
    return relax.TensorType([*data.shape[:-1], units], call.attrs.out_dtype, data.ty.vdevice)


def infer_batch_matmul(call: Call, _builder: Any) -> Any:
    """x (..., M, K), y (..., N, K) -> int32 or int64 (..., M, N)."""
    names = ("x", "y", "x_zero_point", "y_zero_point", "x_scale", "y_scale")
    x, y, parameters = _get_linear(call, names)
    x.check_min_rank(2)
    y.check_min_rank(2)
    _check_linear_parameters(x, y, parameters, None, False)
    if x.shape is None or y.shape is None:
        ndim = -1 if -1 in (x.ndim, y.ndim) else max(x.ndim, y.ndim)
        return relax.TensorType(None, call.attrs.out_dtype, x.ty.vdevice, ndim)
    if is_known_different(x.shape[-1], y.shape[-1]):
        raise y.fail(
            f"has shape {_show(y.shape)}",
            f"allowed: (..., N, {_show_dimension(x.shape[-1])}), because 'x' is {_show(x.shape)}",
            "The last two axes of y are transposed: (..., N, K).",
        )
    batch = _broadcast_dims(x.operator, (x, x.shape[:-2]), (y, y.shape[:-2]))
    return relax.TensorType([*batch, x.shape[-2], y.shape[-2]], call.attrs.out_dtype, x.ty.vdevice)
