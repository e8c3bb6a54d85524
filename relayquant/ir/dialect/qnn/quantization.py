"""Dialect: quantize, dequantize and requantize: between real and affine space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder

from relayquant.base.qtypes import Arithmetic, Rounding
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
    FLOATS,
    QUANTIZED,
    SUMS,
    UNARY_OPERANDS,
    Argument,
    check_attribute,
    check_channel_pair,
    check_modes,
    check_scale,
    check_zero_point,
    get_operands,
    make_tensor_type,
    scale_argument,
    zero_point_argument,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, Reader

__all__ = ["dequantize", "quantize", "requantize"]

#: names of both operators in the IR, for stages that look for them
QUANTIZE = "relax.qnn.quantize"
DEQUANTIZE = "relax.qnn.dequantize"

QUANTIZE_OPERANDS = (Argument("data"), scale_argument(), zero_point_argument())


@define_attrs("relayquant.attrs.QuantizeAttrs")
class QuantizeAttrs(Attrs):
    """Attributes of qnn.quantize. `axis` is the channel axis of per-channel parameters."""

    axis: int
    out_dtype: str
    rounding: str


@define_attrs("relayquant.attrs.DequantizeAttrs")
class DequantizeAttrs(Attrs):
    """Attributes of qnn.dequantize. `axis` is the channel axis of per-channel parameters."""

    axis: int
    out_dtype: str


@define_attrs("relayquant.attrs.RequantizeAttrs")
class RequantizeAttrs(Attrs):
    """Attributes of qnn.requantize. `axis` is the channel axis of per-channel input parameters."""

    axis: int
    out_dtype: str
    rounding: str
    compute_dtype: str


# ---------------------------------------------------------------- constructors


def quantize(
    data: Operand,
    scale: Parameter,
    zero_point: Parameter,
    axis: int = -1,
    out_dtype: str = "int8",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
) -> Call:
    """Quantize float32 or float16 -> int8, uint8, int16, uint16 or int32, with saturation.

    Scale and zero point: () or (C,) along `axis`.
    """
    name = "quantize"
    return make_call(
        name,
        QUANTIZE_OPERANDS,
        (data, scale, zero_point),
        QuantizeAttrs(int(axis), out_dtype, rounding_value(rounding, name)),
    )


def dequantize(
    data: Operand,
    scale: Parameter,
    zero_point: Parameter,
    axis: int = -1,
    out_dtype: str = "float32",
) -> Call:
    """Dequantize int8, uint8, int16, uint16, int32 or int64 -> float32 or float16.

    Scale and zero point: () or (C,) along `axis`. A float16 result is clipped to +-65504.
    """
    name = "dequantize"
    return make_call(
        name, QUANTIZE_OPERANDS, (data, scale, zero_point), DequantizeAttrs(int(axis), out_dtype)
    )


def requantize(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    axis: int = -1,
    out_dtype: str = "int8",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Convert integers to another affine space, with saturation.

    Input parameters: () or (C,) along `axis`. Output parameters: (). int64 data is cast to int32,
    except by TONEAREST_EVEN with FLOAT32 (the default) or FLOAT64.
    """
    name = "requantize"
    return make_call(
        name,
        UNARY_OPERANDS,
        (data, input_scale, input_zero_point, output_scale, output_zero_point),
        RequantizeAttrs(
            int(axis),
            out_dtype,
            rounding_value(rounding, name),
            arithmetic_value(compute_dtype, name),
        ),
    )


# ---------------------------------------------------------------- types


def infer_quantize(call: Call, _builder: Any) -> Any:
    """Infer float data -> out_dtype, same shape."""
    data, scale, zero_point = get_operands(call, QUANTIZE_OPERANDS)
    operator, attrs = data.operator, call.attrs
    data.check_dtype(FLOATS, "Change the parameters of an integer tensor with qnn.requantize.")
    check_attribute(operator, "out_dtype", attrs.out_dtype, QUANTIZED)
    check_modes(operator, attrs)
    check_channel_pair(data, scale, zero_point, attrs.axis, attrs.out_dtype, "axis")
    return make_tensor_type(data, attrs.out_dtype)


def infer_dequantize(call: Call, _builder: Any) -> Any:
    """Integer data -> out_dtype, same shape."""
    data, scale, zero_point = get_operands(call, QUANTIZE_OPERANDS)
    data.check_dtype(SUMS, "Quantize it first.")
    check_attribute(data.operator, "out_dtype", call.attrs.out_dtype, FLOATS)
    check_channel_pair(data, scale, zero_point, call.attrs.axis, data.dtype, "axis")
    return make_tensor_type(data, call.attrs.out_dtype)


def infer_requantize(call: Call, _builder: Any) -> Any:
    """Integer data -> out_dtype, same shape."""
    data, scale, zero_point, out_scale, out_zero_point = get_operands(call, UNARY_OPERANDS)
    attrs = call.attrs
    data.check_dtype(SUMS, "Quantize a float tensor with qnn.quantize.")
    check_attribute(data.operator, "out_dtype", attrs.out_dtype, QUANTIZED)
    check_modes(data.operator, attrs)
    check_channel_pair(data, scale, zero_point, attrs.axis, data.dtype, "axis")
    check_scale(out_scale)
    check_zero_point(out_zero_point, attrs.out_dtype)
    return make_tensor_type(data, attrs.out_dtype)


# ---------------------------------------------------------------- loop nests


def legalize_quantize(builder: BlockBuilder, call: Call) -> Any:
    """Compute q = saturate(round(x / s)) + z with a true float32 division. NaN becomes z."""
    data, scale, zero_point = call.args
    attrs, reader = call.attrs, Reader()
    # Even a constant scale is read from memory. A division by an immediate may be simplified to a
    # multiplication by its reciprocal, which rounds differently.
    read_scale, read_zero = reader.add_tensor(scale), reader.add(zero_point)
    rounding = Rounding(attrs.rounding)

    def element(value: PrimExpr, index: Sequence[PrimExpr]) -> PrimExpr:
        channel = channel_of(index, attrs.axis)
        zero = read_zero(channel)
        real = value.astype("float32") / read_scale(channel)
        rounded = fixed_point.round_tir(real, rounding)
        if rounding is Rounding.TONEAREST_EVEN:
            return fixed_point.saturate_tir(rounded, zero, attrs.out_dtype, may_be_nan=True)
        # Relay adds the zero point as a float32. This differs only beyond 2^24.
        rounded = tirx.Select(tirx.isnan(rounded), tirx.const(0.0, "float32"), rounded)
        moved = rounded + zero.astype("float32")
        return fixed_point.saturate_tir(moved, tirx.const(0, "int32"), attrs.out_dtype)

    return compute_elementwise(builder, call, data, reader, element)


def legalize_dequantize(builder: BlockBuilder, call: Call) -> Any:
    """Compute float32(q - z) * s, with q in int32 or int64. Clip to the finite range of float16."""
    data, scale, zero_point = call.args
    attrs, reader = call.attrs, Reader()
    read_scale, read_zero = reader.add(scale), reader.add(zero_point)

    def element(value: PrimExpr, index: Sequence[PrimExpr]) -> PrimExpr:
        channel = channel_of(index, attrs.axis)
        centred = fixed_point.subtract_zero_point_tir(value, read_zero(channel))
        real = centred.astype("float32") * read_scale(channel)
        if attrs.out_dtype == "float32":
            return real
        limit = tirx.const(65504.0, "float32")
        return tirx.max(tirx.min(real, limit), -limit).astype(attrs.out_dtype)

    return compute_elementwise(builder, call, data, reader, element)


def legalize_requantize(builder: BlockBuilder, call: Call) -> Any:
    """Make one loop over the data with `fixed_point.requantize_tir`."""
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    modes = read_modes(call)
    read_multiplier = reader.add_multiplier((in_scale, out_scale), divide, modes[1])
    read_in_zero, read_out_zero = reader.add(in_zero), reader.add(out_zero)

    def element(value: PrimExpr, index: Sequence[PrimExpr]) -> PrimExpr:
        channel = channel_of(index, attrs.axis)
        return fixed_point.requantize_tir(
            value,
            read_in_zero(channel),
            read_multiplier((channel, channel)),
            read_out_zero(channel),
            attrs.out_dtype,
            *modes,
        )

    return compute_elementwise(builder, call, data, reader, element)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "quantize",
        QuantizeAttrs,
        QUANTIZE_OPERANDS,
        infer_quantize,
        legalize_quantize,
        infer_layout_elementwise,
        is_elementwise=True,
    ),
    Operator(
        "dequantize",
        DequantizeAttrs,
        QUANTIZE_OPERANDS,
        infer_dequantize,
        legalize_dequantize,
        infer_layout_elementwise,
        is_elementwise=True,
    ),
    Operator(
        "requantize",
        RequantizeAttrs,
        UNARY_OPERANDS,
        infer_requantize,
        legalize_requantize,
        infer_layout_elementwise,
        is_elementwise=True,
    ),
)
