"""TensorFlow Lite reader: matrix products and transposed convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.operators.reading import find_shape, operands
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import tensor_shape

# -- networks --------------------------------------------------------------------------------------


def convert_fully_connected(converter: Any, op: Any) -> relax.Expr:
    """Convert FULLY_CONNECTED of rows. Without KeepNumDims, a value of higher rank is reshaped to
    rows first.
    """
    data, weight = converter.get_input_tensors(op)[:2]
    value = converter.get_tensor_expr(data)
    width = find_shape(converter.get_tensor_expr(weight))[-1]
    is_kept = read_options(op, "FullyConnectedOptions").KeepNumDims()
    shape = tensor_shape(value) or find_shape(value)
    if is_kept or (len(shape) == 2 and shape[-1] == width):
        return converter.convert_fully_connected(op)
    rows = converter.bb.emit(relax.op.reshape(value, [-1, width]))
    with converter.replaced(data, rows):
        return converter.convert_fully_connected(op)


def convert_batch_matmul(converter: Any, op: Any) -> relax.Expr:
    """Convert BATCH_MATMUL to R.matmul, which broadcasts as TFLite does."""
    options = read_options(op, "BatchMatMulOptions")
    left, right = operands(converter, op)
    if options.AdjX():
        left = transpose_last(converter, left)
    if options.AdjY():
        right = transpose_last(converter, right)
    return relax.op.matmul(left, right)


def transpose_last(converter: Any, value: relax.Expr) -> relax.Expr:
    """Swap the last two axes."""
    *axes, last, first = range(len(find_shape(value)))
    return converter.bb.emit(relax.op.permute_dims(value, [*axes, first, last]))


def convert_transpose_conv(converter: Any, op: Any) -> relax.Expr:
    """Convert TRANSPOSE_CONV with its fused activation, which TVM ignores."""
    function = read_options(op, "TransposeConvOptions").FusedActivationFunction()
    value = converter.convert_transpose_conv(op)
    (result,) = converter.get_output_tensors(op)
    if result.qnn_params and function:
        raise Refusal("it is quantized and has a fused activation; supported: one of the two")
    return converter.convert_fused_activation_function(value, function)


def convert_transpose_conv_bias(converter: Any, op: Any) -> relax.Expr:
    """Convert MediaPipe's transposed convolution with a bias. Its options are a struct of C:
    padding (1: SAME, 2: VALID), horizontal and vertical stride.
    """
    raw = op.CustomOptionsAsNumpy()
    if not isinstance(raw, np.ndarray) or raw.size < 12:
        raise Refusal("it lacks its options (padding, stride_width, stride_height)")
    padding, *strides = np.frombuffer(raw.tobytes()[:12], "<i4").tolist()
    if padding not in (1, 2) or min(strides) < 1:
        raise Refusal(
            f"its padding is {padding}, its strides are {strides}; allowed: 1 (SAME) and 2 "
            "(VALID), and strides from 1 on"
        )
    data, weight, bias = operands(converter, op)
    before, after = [], []
    for axis, stride in zip((1, 2), reversed(strides), strict=True):
        kernel, size = find_shape(weight)[axis], find_shape(data)[axis]
        cut = max(0, kernel - (size - 1) % stride - 1) if padding == 1 else 0
        before.append(cut // 2)
        after.append(cut - cut // 2)
    value = relax.op.nn.conv2d_transpose(
        data,
        converter.bb.emit(relax.op.permute_dims(weight, [3, 0, 1, 2])),
        strides=strides[::-1],
        padding=(*before, *after),
        data_layout="NHWC",
        kernel_layout="IOHW",
    )
    return relax.op.add(converter.bb.emit(value), bias)
