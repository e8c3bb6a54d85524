"""Dialect: the table of all `relax.qnn` operators; adding one means one row and its functions.

A row says everything TVM is told of an operator; `register_operators` tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import Call, Op, register_op_attr
from tvm.relax import BlockBuilder

from relayquant.dialect import attrs, inference, layout, legalize, legalize_linear
from relayquant.dialect.inference import PRELU_OPERANDS, UNARY_OPERANDS, InferFunc
from relayquant.dialect.layout import LayoutFunc
from relayquant.dialect.legalize import LegalizeFunc

#: Value of TMixedPrecisionPolicy that keeps the operand types.
_MIXED_PRECISION_NEVER = 2


@dataclass(frozen=True)
class Operator:
    """One operator: `name` without prefix, attributes type (None: no attributes), operands.

    `infer` gives the type or raises QnnError, `legalize` the loop nest, `layout` says how the
    operator takes part in ConvertLayout.
    """

    name: str
    attrs: type | None
    arguments: tuple[str, ...]
    infer: InferFunc
    legalize: LegalizeFunc
    layout: LayoutFunc | None = None  #: None: operands go back to their original layout

    @property
    def full_name(self) -> str:
        """Name of the operator in the IR."""
        return f"relax.qnn.{self.name}"


_QUANTIZE = ("data", "scale", "zero_point")
_SIMULATED = ("data", "dtype", "scale", "zero_point")
_CONV = (
    "data",
    "weight",
    "input_zero_point",
    "kernel_zero_point",
    "input_scale",
    "kernel_scale",
)
_BATCH_MATMUL = ("x", "y", "x_zero_point", "y_zero_point", "x_scale", "y_scale")
_BINARY = (
    "lhs",
    "rhs",
    "lhs_scale",
    "lhs_zero_point",
    "rhs_scale",
    "rhs_zero_point",
    "output_scale",
    "output_zero_point",
)
_CONCATENATE = (
    "data",
    "input_scales",
    "input_zero_points",
    "output_scale",
    "output_zero_point",
)

OPERATORS: tuple[Operator, ...] = (
    Operator(
        "quantize",
        attrs.QuantizeAttrs,
        _QUANTIZE,
        inference.infer_quantize,
        legalize.legalize_quantize,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "dequantize",
        attrs.DequantizeAttrs,
        _QUANTIZE,
        inference.infer_dequantize,
        legalize.legalize_dequantize,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "requantize",
        attrs.RequantizeAttrs,
        UNARY_OPERANDS,
        inference.infer_requantize,
        legalize.legalize_requantize,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "simulated_quantize",
        attrs.SimulatedQuantizeAttrs,
        _SIMULATED,
        inference.infer_simulated_quantize,
        legalize.legalize_simulated_quantize,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "simulated_dequantize",
        attrs.SimulatedDequantizeAttrs,
        _SIMULATED,
        inference.infer_simulated_dequantize,
        legalize.legalize_simulated_dequantize,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "conv1d",
        attrs.QConv1DAttrs,
        _CONV,
        inference.infer_conv1d,
        legalize_linear.legalize_conv,
        layout.infer_layout_conv,
    ),
    Operator(
        "conv2d",
        attrs.QConv2DAttrs,
        _CONV,
        inference.infer_conv2d,
        legalize_linear.legalize_conv,
        layout.infer_layout_conv,
    ),
    Operator(
        "conv2d_transpose",
        attrs.QConv2DTransposeAttrs,
        _CONV,
        inference.infer_conv2d_transpose,
        legalize_linear.legalize_conv2d_transpose,
        layout.infer_layout_conv,
    ),
    Operator(
        "dense",
        attrs.QMatmulAttrs,
        _CONV,
        inference.infer_dense,
        legalize_linear.legalize_dense,
    ),
    Operator(
        "batch_matmul",
        attrs.QMatmulAttrs,
        _BATCH_MATMUL,
        inference.infer_batch_matmul,
        legalize_linear.legalize_batch_matmul,
    ),
    Operator(
        "add",
        attrs.QBinaryAttrs,
        _BINARY,
        inference.infer_binary,
        legalize.legalize_add,
        layout.infer_layout_binary,
    ),
    Operator(
        "subtract",
        attrs.QBinaryAttrs,
        _BINARY,
        inference.infer_binary,
        legalize.legalize_subtract,
        layout.infer_layout_binary,
    ),
    Operator(
        "mul",
        attrs.QBinaryAttrs,
        _BINARY,
        inference.infer_binary,
        legalize.legalize_mul,
        layout.infer_layout_binary,
    ),
    Operator(
        "concatenate",
        attrs.QConcatenateAttrs,
        _CONCATENATE,
        inference.infer_concatenate,
        legalize.legalize_concatenate,
        layout.infer_layout_concatenate,
    ),
    Operator(
        "avg_pool2d",
        attrs.QAvgPool2DAttrs,
        UNARY_OPERANDS,
        inference.infer_avg_pool2d,
        legalize_linear.legalize_avg_pool2d,
        layout.infer_layout_avg_pool2d,
    ),
    Operator(
        "mean",
        attrs.QMeanAttrs,
        UNARY_OPERANDS,
        inference.infer_mean,
        legalize_linear.legalize_mean,
        layout.infer_layout_mean,
    ),
    Operator(
        "leaky_relu",
        attrs.QLeakyReluAttrs,
        UNARY_OPERANDS,
        inference.infer_leaky_relu,
        legalize.legalize_leaky_relu,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "prelu",
        attrs.QPreluAttrs,
        PRELU_OPERANDS,
        inference.infer_prelu,
        legalize.legalize_prelu,
        layout.infer_layout_elementwise,
    ),
    Operator(
        "lookup",
        None,
        ("data", "table"),
        inference.infer_lookup,
        legalize.legalize_lookup,
        layout.infer_layout_elementwise,
    ),
)


def _legalize_if_known(function: LegalizeFunc) -> LegalizeFunc:
    """Leave the call as it is while a shape is unknown: no loop nest can be written for it."""

    def legalize_known(builder: BlockBuilder, call: Call) -> Any:
        return function(builder, call) if legalize.has_known_shape(call) else call

    return legalize_known


def register_operators(operators: Sequence[Operator]) -> None:
    """Tell TVM of the operators; those it knows already are left as they are."""
    known = set(Op.list_op_names())
    for operator in operators:
        if operator.full_name in known:
            continue
        register_op_attr(operator.full_name, "FInferType", operator.infer)
        register_op_attr(operator.full_name, "FPurity", True)
        register_op_attr(operator.full_name, "TMixedPrecisionPolicy", _MIXED_PRECISION_NEVER)
        register_op_attr(operator.full_name, "FLegalize", _legalize_if_known(operator.legalize))
        if operator.layout is not None:
            register_op_attr(operator.full_name, "FRelaxInferLayout", operator.layout)
        op = Op.get(operator.full_name)
        op.set_num_inputs(len(operator.arguments))
        for argument in operator.arguments:
            op.add_argument(argument, "Tensor", "")
