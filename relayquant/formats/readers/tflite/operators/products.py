"""TensorFlow Lite reader: matrix products."""

from __future__ import annotations

from typing import Any

from tvm import relax

from relayquant.formats.readers.tflite.operators.reading import find_shape, operands
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import tensor_shape


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
