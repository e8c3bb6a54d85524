"""Dialect: concatenate: affine tensors joined in one affine space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax, te, topi
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder
from tvm.sym import Analyzer

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import QnnError, format_count
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.construct import (
    Operand,
    Parameter,
    arithmetic_value,
    make_call,
    rounding_value,
)
from relayquant.ir.dialect.layout import (
    current_letters,
    decide,
    decide_untouched,
    initial_letters,
    is_plain,
    keep_untouched,
    make_output,
    move_axis,
)
from relayquant.ir.dialect.loops import divide, make_loops, read_modes
from relayquant.ir.dialect.operands import (
    QUANTIZED,
    Argument,
    CheckedOperand,
    affine_arguments,
    check_count,
    check_modes,
    check_scale,
    check_zero_point,
    is_known_different,
    operator_name,
    scale_argument,
    show_shape,
    zero_point_argument,
)
from relayquant.ir.dialect.operator import Operator, define_attrs, replace_attrs
from relayquant.ir.dialect.parameters import Reader, compute_tensor
from relayquant.ir.rewrite.graph import constant_value

__all__ = ["concatenate"]

CONCATENATE_OPERANDS = (
    Argument("data", is_tuple=True),
    scale_argument("input_scales", is_tuple=True),
    zero_point_argument("input_zero_points", is_tuple=True),
    *affine_arguments("output"),
)


@define_attrs("relayquant.attrs.QConcatenateAttrs")
class QConcatenateAttrs(Attrs):
    """Attributes of qnn.concatenate; `axis` is the axis along which the tensors are joined."""

    axis: int
    rounding: str
    compute_dtype: str


# ---------------------------------------------------------------- constructor


def concatenate(
    data: Operand | Sequence[Operand],
    input_scales: Parameter | Sequence[Parameter],
    input_zero_points: Parameter | Sequence[Parameter],
    output_scale: Parameter,
    output_zero_point: Parameter,
    axis: int = 0,
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Requantize tensors of one integer dtype to the output parameters and join them along `axis`.

    Each tensor has a scale () and a zero point (). Output parameters: ().
    """
    name = "concatenate"
    return make_call(
        name,
        CONCATENATE_OPERANDS,
        (data, input_scales, input_zero_points, output_scale, output_zero_point),
        QConcatenateAttrs(
            int(axis), rounding_value(rounding, name), arithmetic_value(compute_dtype, name)
        ),
    )


# ---------------------------------------------------------------- type


def _get_tuple(call: Call, position: int, name: str, each: str) -> list[CheckedOperand]:
    """Return the tensors of a tuple operand."""
    operator, argument = operator_name(call), call.args[position]
    if not isinstance(argument.ty, relax.TupleType):
        raise QnnError(
            f"{operator}: operand '{name}' is {argument.ty}; allowed: a tuple of tensors.",
            code="RQ601",
        )
    types = argument.ty.fields
    fields = argument.fields if isinstance(argument, relax.Tuple) else [None] * len(types)
    operands = []
    for i, ty in enumerate(types):
        if not isinstance(ty, relax.TensorType):
            raise QnnError(
                f"{operator}: {name}[{i}] is {ty}; allowed: a tensor, {each}.", code="RQ601"
            )
        operands.append(CheckedOperand(operator, f"{name}[{i}]", ty, fields[i]))
    return operands


def infer_concatenate(call: Call, _builder: Any) -> Any:
    """Infer a tuple of tensors of one integer dtype -> the same dtype, joined along axis."""
    operator, attrs = operator_name(call), call.attrs
    check_count(call, CONCATENATE_OPERANDS)
    tensors = _get_tuple(call, 0, "data", "one to join")
    scales = _get_tuple(call, 1, "input_scales", "one scale per tensor")
    zero_points = _get_tuple(call, 2, "input_zero_points", "one zero point per tensor")
    if not tensors or not len(tensors) == len(scales) == len(zero_points):
        raise QnnError(
            f"{operator}: got {format_count(len(tensors), 'tensor')}, "
            f"{format_count(len(scales), 'scale')} and "
            f"{format_count(len(zero_points), 'zero point')}; allowed: the same number "
            "of each, at least 1.",
            code="RQ601",
        )
    out_scale, out_zero = (
        CheckedOperand(operator, argument.name, given.ty, given)
        for argument, given in zip(CONCATENATE_OPERANDS[3:], call.args[3:], strict=True)
    )
    check_modes(operator, attrs)
    first = tensors[0]
    for tensor, scale, zero_point in zip(tensors, scales, zero_points, strict=True):
        tensor.check_dtype(QUANTIZED, "Quantize it first.")
        if None not in (tensor.dtype, first.dtype) and tensor.dtype != first.dtype:
            raise tensor.fail(
                f"has dtype {tensor.dtype}",
                f"allowed: {first.dtype}, the dtype of {first.name}",
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
                    f"has shape {show_shape(shape)}",
                    f"allowed: that of {first.name}, {show_shape(known[0])}, but for axis {axis}",
                )
    total = known[0][axis]
    for shape in known[1:]:
        total = total + shape[axis]
    result = list(known[0])
    result[axis] = Analyzer().simplify(total)
    return relax.TensorType(result, dtype, first.ty.vdevice)


# ---------------------------------------------------------------- loop nest


def legalize_concatenate(builder: BlockBuilder, call: Call) -> Any:
    """Requantize each tensor with other parameters than the output, then join."""
    tensors, scales, zero_points = (_get_fields(builder, argument) for argument in call.args[:3])
    out_scale, out_zero = call.args[3:]
    modes = read_modes(call)
    axis = int(call.attrs.axis) % call.ty.ndim
    dtype, reader = str(call.ty.dtype), Reader()
    plans = []
    for scale, zero_point in zip(scales, zero_points, strict=True):
        if _is_same_constant(scale, out_scale) and _is_same_constant(zero_point, out_zero):
            plans.append(None)
            continue
        multiplier = reader.add_multiplier((scale, out_scale), divide, modes[1])
        plans.append((multiplier, reader.add(zero_point), reader.add(out_zero)))

    def te_concatenate(*sources: te.Tensor) -> te.Tensor:
        def convert(source: te.Tensor, plan: Any) -> te.Tensor:
            if plan is None:
                return source
            read_multiplier, read_zero, read_out = plan
            return compute_tensor(
                source.shape,
                lambda *i: fixed_point.requantize_tir(
                    source(*i), read_zero(0), read_multiplier((0, 0)), read_out(0), dtype, *modes
                ),
                name="requantize",
            )

        converted = [convert(s, plan) for s, plan in zip(sources, plans, strict=True)]
        return topi.concatenate(converted, axis)

    return make_loops(builder, call, te_concatenate, tensors, reader)


def _get_fields(builder: BlockBuilder, argument: Any) -> list[Any]:
    """Return the elements of a tuple operand, which may be a variable."""
    if isinstance(argument, relax.Tuple):
        return list(argument.fields)
    return [builder.emit(relax.TupleGetItem(argument, i)) for i in range(len(argument.ty.fields))]


def _is_same_constant(left: Any, right: Any) -> bool:
    a, b = constant_value(left), constant_value(right)
    return a is not None and b is not None and np.array_equal(a, b)


# ---------------------------------------------------------------- layout


def infer_layout_concatenate(
    call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> Any:
    """Give all tensors the first layout that was changed. `axis` is adapted."""
    data = call.args[0]
    if not isinstance(data, relax.Tuple):
        return keep_untouched(call)
    letters = [current_letters(field, layouts) for field in data.fields]
    if any(text is None or not is_plain(text) for text in letters):
        return keep_untouched(call)
    initial = initial_letters(data.fields[0])
    chosen = next((text for text in letters if text != initial), initial) or ""
    attrs = replace_attrs(call.attrs, axis=move_axis(int(call.attrs.axis), chosen))
    tensors = tvm_ffi.Array([decide(chosen) for _ in letters])
    return make_output([tensors, *map(decide_untouched, call.args[1:])], chosen, attrs)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "concatenate",
        QConcatenateAttrs,
        CONCATENATE_OPERANDS,
        infer_concatenate,
        legalize_concatenate,
        infer_layout_concatenate,
    ),
)
