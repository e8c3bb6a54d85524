"""Dialect: the shared parts of convolutions and matrix products: operands, checks, products of
values minus zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te
from tvm.ir import Call

from relayquant.ir.dialect.operands import (
    NARROW,
    Argument,
    CheckedOperand,
    check_attribute,
    check_scale,
    check_zero_point,
    get_operands,
    scale_argument,
    zero_point_argument,
)
from relayquant.ir.dialect.parameters import PrimExpr, compute_tensor
from relayquant.ir.rewrite.graph import tensor_dtype

LINEAR_OPERANDS = (
    Argument("data"),
    Argument("weight"),
    zero_point_argument("input_zero_point"),
    zero_point_argument("kernel_zero_point"),
    scale_argument("input_scale"),
    scale_argument("kernel_scale"),
)


def get_linear(
    call: Call, arguments: Sequence[Argument] = LINEAR_OPERANDS
) -> tuple[CheckedOperand, CheckedOperand, list[CheckedOperand]]:
    data, weight, *parameters = get_operands(call, arguments)
    data.check_dtype(NARROW, "Quantize it to 8 or 16 bits first.")
    weight.check_dtype(NARROW, "Quantize it to 8 or 16 bits first.")
    check_attribute(data.operator, "out_dtype", call.attrs.out_dtype, ("int32", "int64"))
    return data, weight, parameters


def check_linear_parameters(
    data: CheckedOperand,
    weight: CheckedOperand,
    parameters: Sequence[CheckedOperand],
    channels: Any | None,
    allows_channels: bool,
) -> None:
    input_zero, kernel_zero, input_scale, kernel_scale = parameters
    what = "output channel"
    check_zero_point(input_zero, data.dtype)
    check_zero_point(kernel_zero, weight.dtype, channels, allows_channels, what)
    check_scale(input_scale)
    check_scale(kernel_scale, channels, allows_channels, what)


def make_multiply(call: Call) -> Callable[[PrimExpr, PrimExpr], PrimExpr]:
    """Multiply two int32 values minus zero points, in the accumulator dtype of `call`.

    If one value has 8 bits, the product fits int32. The product of two 16-bit values may not.
    """
    dtype = str(call.attrs.out_dtype)
    is_narrow = any(tensor_dtype(factor) in ("int8", "uint8") for factor in call.args[:2])

    def multiply(left: PrimExpr, right: PrimExpr) -> PrimExpr:
        if is_narrow:
            return (left * right).astype(dtype)
        return left.astype(dtype) * right.astype(dtype)

    return multiply


def subtract_zero_point(
    tensor: te.Tensor, zero_point: Callable[..., PrimExpr], name: str
) -> te.Tensor:
    """Make a stage that computes int32(tensor) - zero_point(*index)."""
    return compute_tensor(
        tensor.shape, lambda *i: tensor(*i).astype("int32") - zero_point(*i), name=name
    )
