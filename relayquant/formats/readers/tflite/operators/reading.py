"""TensorFlow Lite reader: operands and result of an operator, their constants and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.ir.rewrite.graph import tensor_shape


def operands(converter: Any, op: Any) -> list[relax.Expr]:
    """Return all operands of an operator."""
    return [converter.get_tensor_expr(tensor) for tensor in converter.get_input_tensors(op)]


def read_real(converter: Any, tensor: Any) -> relax.Expr:
    """Return the numbers that a tensor stands for: dequantized if it has a scale."""
    value = converter.get_tensor_expr(tensor)
    return converter.bb.emit(converter.dequantize(value, tensor)) if tensor.qnn_params else value


def store_real(converter: Any, op: Any, value: relax.Expr) -> relax.Expr:
    """Return the numbers as the only result of an operator: quantized if it has a scale."""
    (result,) = converter.get_output_tensors(op)
    return converter.quantize(value, result) if result.qnn_params else value


def read_constant(converter: Any, op: Any, at: int) -> np.ndarray:
    """Return the value of operand `at`. Refusal if it is known at run time only."""
    return converter.get_tensor_value(converter.get_input_tensors(op)[at])


def find_shape(value: relax.Expr) -> list[int]:
    """Return the shape of a value. Refusal if it is known at run time only."""
    shape = tensor_shape(value)
    if shape is None:
        raise Refusal("the shape of its operand depends on values; supported: fixed shapes")
    if not all(isinstance(size, int) for size in shape):
        text = ", ".join(map(str, shape))
        raise Refusal(f"its operand has the symbolic shape ({text}); supported: numbers", FIX_SIZES)
    return [int(size) for size in shape]
