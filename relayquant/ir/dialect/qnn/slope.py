"""Dialect: leaky_relu and prelu, which scale values below 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import QnnError
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.construct import (
    Operand,
    Parameter,
    arithmetic_value,
    make_call,
    rounding_value,
)
from relayquant.ir.dialect.layout import infer_layout_elementwise
from relayquant.ir.dialect.loops import channel_of, compute_elementwise, divide, read_modes
from relayquant.ir.dialect.operands import (
    NARROW,
    UNARY_OPERANDS,
    Argument,
    check_modes,
    check_parameter,
    check_scalar_pairs,
    get_operands,
    make_tensor_type,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, Reader
from relayquant.ir.reference.fixed_point import get_fixed_point_multiplier
from relayquant.ir.rewrite.graph import constant_value

__all__ = ["leaky_relu", "prelu"]


@define_attrs("relayquant.attrs.QLeakyReluAttrs")
class QLeakyReluAttrs(Attrs):
    """Attributes of qnn.leaky_relu. `alpha` is the slope of negative values."""

    alpha: float
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.QPreluAttrs")
class QPreluAttrs(Attrs):
    """Attributes of qnn.prelu. `axis` is the channel axis of the slopes."""

    axis: int


PRELU_OPERANDS = (*UNARY_OPERANDS, Argument("slopes", "float32"))


# ---------------------------------------------------------------- constructors


def leaky_relu(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    alpha: float = 0.01,
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Compute x if x >= z_in, else alpha * x, on int8, uint8 or int16. The dtype stays.

    Parameters: (). The default requantizes once, with m = s_in / s_out. Below z_in, m = s_in *
    alpha / s_out. Both are computed in float64. UPWARD and TONEAREST multiply by alpha after
    requantizing, as Relay does.
    """
    name = "leaky_relu"
    return make_call(
        name,
        UNARY_OPERANDS,
        (data, input_scale, input_zero_point, output_scale, output_zero_point),
        QLeakyReluAttrs(
            float(alpha), rounding_value(rounding, name), arithmetic_value(compute_dtype, name)
        ),
    )


def prelu(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    slopes: Operand,
    axis: int = 1,
) -> Call:
    """Compute x if x >= z_in, else slopes * x, on int8, uint8 or int16. The dtype stays.

    Parameters: (). Slopes are float32, () or (C,), with one entry per index of `axis`. The result
    is rounded once, half to even, as in `leaky_relu`: m = s_in / s_out and, below z_in, m = s_in *
    slope / s_out, both computed in float64. There is no choice of arithmetic, because Relay does
    not have this operator.
    """
    return make_call(
        "prelu",
        PRELU_OPERANDS,
        (data, input_scale, input_zero_point, output_scale, output_zero_point, slopes),
        QPreluAttrs(int(axis)),
    )


# ---------------------------------------------------------------- types


def infer_leaky_relu(call: Call, _builder: Any) -> Any:
    """Integer data -> the same type."""
    data, *parameters = get_operands(call, UNARY_OPERANDS)
    data.check_dtype(NARROW)
    check_modes(data.operator, call.attrs)
    check_scalar_pairs(parameters, data.dtype)
    if not 0.0 <= call.attrs.alpha <= 1.0:
        raise QnnError(
            f"{data.operator}: alpha={call.attrs.alpha} is not allowed; allowed: 0..1. "
            "Use qnn.lookup for another slope.",
            code="RQ601",
        )
    return make_tensor_type(data, data.dtype or "int8")


def infer_prelu(call: Call, _builder: Any) -> Any:
    """Integer data -> the same type."""
    data, *parameters, slopes = get_operands(call, PRELU_OPERANDS)
    data.check_dtype(NARROW)
    check_scalar_pairs(parameters, data.dtype)
    axis = call.attrs.axis
    channels = data.dimension(data.resolve_axis(axis, "axis"))
    slopes.check_dtype(("float32",), "Convert it to float32.")
    check_parameter(slopes, channels, True, f"index of axis {axis} of '{data.name}'")
    value = constant_value(slopes.expr)
    if value is not None and not np.isfinite(value).all():
        raise slopes.fail(f"holds {value[~np.isfinite(value)].flat[0]}", "allowed: finite numbers")
    return make_tensor_type(data, data.dtype or "int8")


# ---------------------------------------------------------------- loop nests


def legalize_leaky_relu(builder: BlockBuilder, call: Call) -> Any:
    """Requantize with s_in / s_out, times alpha below the input zero point.

    UPWARD and TONEAREST follow Relay. The result is the requantized value R. Below the zero point
    it is alpha * R + (1 - alpha) * z_out, where each product is an UPWARD fixed-point multiply.
    """
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    rounding, arithmetic = modes = read_modes(call)
    dtype = str(call.ty.dtype)
    alpha = float(attrs.alpha)
    read_multiplier = reader.add_multiplier((in_scale, out_scale), divide, arithmetic)
    read_negative = reader.add_multiplier(
        (in_scale, out_scale), lambda s_in, s_out: s_in * alpha / s_out, arithmetic
    )
    read_in_zero, read_out_zero = reader.add(in_zero), reader.add(out_zero)
    slopes = [
        [tirx.const(int(v), "int32") for v in get_fixed_point_multiplier(slope)]
        for slope in (alpha, 1.0 - alpha)
    ]

    def element(value: PrimExpr, _index: Sequence[PrimExpr]) -> PrimExpr:
        zero, out = read_in_zero(0), read_out_zero(0)
        value = value.astype("int32")
        multiplier = read_multiplier((0, 0))
        if rounding is Rounding.TONEAREST_EVEN:
            negative = read_negative((0, 0))
            chosen = tuple(
                tirx.Select(value < zero, n, p) for n, p in zip(negative, multiplier, strict=True)
            )
            return fixed_point.requantize_tir(value, zero, chosen, out, dtype, *modes)
        moved = fixed_point.requantize_tir(value, zero, multiplier, out, "int32", *modes)
        scaled = fixed_point.multiply_fixed_point_tir(moved, *slopes[0], Rounding.UPWARD)
        offset = fixed_point.multiply_fixed_point_tir(out, *slopes[1], Rounding.UPWARD)
        chosen = tirx.Select(value < zero, scaled + offset, moved)
        return fixed_point.clip_integer_tir(chosen, dtype)

    return compute_elementwise(builder, call, data, reader, element)


def legalize_prelu(builder: BlockBuilder, call: Call) -> Any:
    """Requantize with s_in / s_out, times the channel's slope below the input zero point.

    Rounding is half to even in float32, as in reference.qnn.prelu.
    """
    data, in_scale, in_zero, out_scale, out_zero, slopes = call.args
    reader, modes = Reader(), (Rounding.TONEAREST_EVEN, Arithmetic.FLOAT32)
    dtype = str(call.ty.dtype)
    read_positive = reader.add_multiplier((in_scale, out_scale), divide, Arithmetic.FLOAT32)
    read_negative = reader.add_multiplier(
        (in_scale, slopes, out_scale),
        lambda s_in, slope, s_out: s_in * slope / s_out,
        Arithmetic.FLOAT32,
    )
    read_in_zero, read_out_zero = reader.add(in_zero), reader.add(out_zero)

    def element(value: PrimExpr, index: Sequence[PrimExpr]) -> PrimExpr:
        zero, out = read_in_zero(0), read_out_zero(0)
        value = value.astype("int32")
        channel = channel_of(index, call.attrs.axis)
        pairs = zip(read_negative((0, channel, 0)), read_positive((0, 0)), strict=True)
        chosen = tuple(tirx.Select(value < zero, n, p) for n, p in pairs)
        return fixed_point.requantize_tir(value, zero, chosen, out, dtype, *modes)

    return compute_elementwise(builder, call, data, reader, element)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "leaky_relu",
        QLeakyReluAttrs,
        UNARY_OPERANDS,
        infer_leaky_relu,
        legalize_leaky_relu,
        infer_layout_elementwise,
        lambda call, data: relax.op.nn.leakyrelu(data, call.attrs.alpha),
        is_elementwise=True,
    ),
    Operator(
        "prelu",
        QPreluAttrs,
        PRELU_OPERANDS,
        infer_prelu,
        legalize_prelu,
        infer_layout_elementwise,
        lambda call, data: relax.op.nn.prelu(data, call.args[5], call.attrs.axis),
        is_elementwise=True,
    ),
)
