"""Dialect: simulated_quantize and simulated_dequantize, which round in float for calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder

from relayquant.base.qtypes import INTEGER_LIMITS, Rounding
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.construct import Operand, Parameter, make_call, rounding_value
from relayquant.ir.dialect.layout import infer_layout_elementwise
from relayquant.ir.dialect.loops import channel_of, make_loops, name_hint
from relayquant.ir.dialect.operands import (
    FLOATS,
    Argument,
    check_modes,
    get_operands,
    make_tensor_type,
    operator_name,
    scale_argument,
    zero_point_argument,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, compute_tensor
from relayquant.ir.rewrite.graph import constant_value

__all__ = ["simulated_dequantize", "simulated_quantize"]

SIMULATED_OPERANDS = (
    Argument("data"),
    Argument("dtype", "int32"),
    scale_argument(),
    zero_point_argument(),
)


@define_attrs("relayquant.attrs.SimulatedQuantizeAttrs")
class SimulatedQuantizeAttrs(Attrs):
    """Attributes of qnn.simulated_quantize."""

    axis: int
    rounding: str


@define_attrs("relayquant.attrs.SimulatedDequantizeAttrs")
class SimulatedDequantizeAttrs(Attrs):
    """Attributes of qnn.simulated_dequantize."""

    axis: int


#: Codes for the `dtype` operand of the simulated operators.
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

_SIMULATED_RANGES = {1: "int8", 2: "uint8", 4: "int4", 5: "int16", 7: "uint16"}


# ---------------------------------------------------------------- constructors


def simulated_quantize(
    data: Operand,
    dtype: Parameter,
    scale: Parameter,
    zero_point: Parameter,
    axis: int = -1,
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
) -> Call:
    """Compute max(min(round(x / s) + z, high), low) in the float dtype of data.

    `dtype` is an int32 code: 0 pass through, 1 int8, 2 uint8, 3 int32, 4 int4, 5 int16, 6 int8 in
    -127..127, 7 uint16. Code, scale and zero point have shape () or (L,) of any length L. Channel c
    along `axis` reads entry c mod L. All three may therefore be variables of a calibration graph.
    """
    name = "simulated_quantize"
    return make_call(
        name,
        SIMULATED_OPERANDS,
        (data, dtype, scale, zero_point),
        SimulatedQuantizeAttrs(int(axis), rounding_value(rounding, name)),
    )


def simulated_dequantize(
    data: Operand, dtype: Parameter, scale: Parameter, zero_point: Parameter, axis: int = -1
) -> Call:
    """Compute (x - z) * s in float, with the operands of simulated_quantize."""
    name = "simulated_dequantize"
    return make_call(
        name,
        SIMULATED_OPERANDS,
        (data, dtype, scale, zero_point),
        SimulatedDequantizeAttrs(int(axis)),
    )


# ---------------------------------------------------------------- types


def _infer_simulated(call: Call) -> Any:
    data, dtype, scale, zero_point = get_operands(call, SIMULATED_OPERANDS)
    data.check_dtype(FLOATS, "Simulated quantization keeps float tensors.")
    data.resolve_axis(call.attrs.axis)
    dtype.check_dtype(("int32",), "Use the codes listed at qnn.simulated_quantize.")
    # Any length is allowed, because the index wraps around. Parameters may be variables of the
    # graph.
    for parameter, allowed in ((dtype, "int32"), (scale, "float32"), (zero_point, "int32")):
        parameter.check_dtype((allowed,))
        if parameter.ndim > 1:
            raise parameter.fail(f"has rank {parameter.ndim}", "allowed: rank 0 or 1")
    value = constant_value(dtype.expr)
    if value is not None and not np.isin(value, tuple(SIMULATED_DTYPES)).all():
        known = ", ".join(f"{code} {name}" for code, name in SIMULATED_DTYPES.items())
        raise dtype.fail(f"holds {value}", f"allowed codes: {known}")
    return make_tensor_type(data, data.dtype or "float32")


def infer_simulated_quantize(call: Call, _builder: Any) -> Any:
    """Infer float data -> the same type."""
    inferred = _infer_simulated(call)
    check_modes(operator_name(call), call.attrs)
    return inferred


def infer_simulated_dequantize(call: Call, _builder: Any) -> Any:
    """Infer float data -> the same type."""
    return _infer_simulated(call)


# ---------------------------------------------------------------- loop nests


def _read_wrapped(tensor: te.Tensor, channel: PrimExpr) -> PrimExpr:
    """Read element `channel` modulo the length, so that any length is allowed."""
    if len(tensor.shape) == 0:
        return tensor()
    return tensor(tirx.floormod(channel, tensor.shape[0]))


def _simulated_limits(code: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Return the float32 limits of the dtype with this code (SIMULATED_DTYPES)."""
    ranges = {code: INTEGER_LIMITS[name] for code, name in _SIMULATED_RANGES.items()}
    ranges[6] = (-127, 127)
    low: PrimExpr = tirx.const(float(-(2**31)), "float32")
    high: PrimExpr = tirx.const(float(2**31), "float32")
    for number, (smallest, largest) in ranges.items():
        is_this = tirx.EQ(code, tirx.const(number, "int32"))
        low = tirx.Select(is_this, tirx.const(float(smallest), "float32"), low)
        high = tirx.Select(is_this, tirx.const(float(largest), "float32"), high)
    return low, high


def _legalize_simulated(
    builder: BlockBuilder,
    call: Call,
    compute: Callable[[PrimExpr, PrimExpr, PrimExpr, PrimExpr], PrimExpr],
) -> Any:
    """Loop over compute(float32 value, code, scale, float32 zero point). Code 0 copies."""
    axis = call.attrs.axis

    def te_simulated(
        source: te.Tensor, codes: te.Tensor, scales: te.Tensor, zero_points: te.Tensor
    ) -> te.Tensor:
        def element(*index: PrimExpr) -> PrimExpr:
            channel = channel_of(index, axis)
            code, value = _read_wrapped(codes, channel), source(*index)
            zero = _read_wrapped(zero_points, channel).astype("float32")
            done = compute(value.astype("float32"), code, _read_wrapped(scales, channel), zero)
            known = max(SIMULATED_DTYPES)
            is_passed = tirx.any(code <= 0, code > known)
            return tirx.Select(is_passed, value, done.astype(source.dtype))

        return compute_tensor(source.shape, element, name=name_hint(call))

    return make_loops(builder, call, te_simulated, call.args)


def legalize_simulated_quantize(builder: BlockBuilder, call: Call) -> Any:
    """Compute max(min(round(x / s) + z, high), low) in float. NaN becomes z.

    Code 0 and codes outside SIMULATED_DTYPES pass x through.
    """
    rounding = Rounding(call.attrs.rounding)

    def compute(value: PrimExpr, code: PrimExpr, scale: PrimExpr, zero: PrimExpr) -> PrimExpr:
        low, high = _simulated_limits(code)
        rounded = fixed_point.round_tir(value / scale, rounding)
        rounded = tirx.Select(tirx.isnan(rounded), tirx.const(0.0, "float32"), rounded)
        return tirx.max(tirx.min(rounded + zero, high), low)

    return _legalize_simulated(builder, call, compute)


def legalize_simulated_dequantize(builder: BlockBuilder, call: Call) -> Any:
    """Compute (x - z) * s. Code 0 passes x through."""
    return _legalize_simulated(
        builder, call, lambda value, _code, scale, zero: (value - zero) * scale
    )


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "simulated_quantize",
        SimulatedQuantizeAttrs,
        SIMULATED_OPERANDS,
        infer_simulated_quantize,
        legalize_simulated_quantize,
        infer_layout_elementwise,
    ),
    Operator(
        "simulated_dequantize",
        SimulatedDequantizeAttrs,
        SIMULATED_OPERANDS,
        infer_simulated_dequantize,
        legalize_simulated_dequantize,
        infer_layout_elementwise,
    ),
)
