"""ONNX reader: com.microsoft operators on quantized values that are not a QLinear variant of an
ONNX operator.

Integer products with run-time parameters stay integer products. All others become dequantize, float
operators and quantize. Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.frontend import run_frontend
from relayquant.formats.readers.onnx.operators.quantized import (
    convert_dequantize_linear,
    convert_matmul_integer,
    convert_quantize_linear,
    read_weight,
)
from relayquant.formats.readers.onnx.operators.recurrent import (
    LSTM,
    Multiply,
    RecurrentNode,
    convert_recurrent,
)
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.ops.dynamic import multiply_at_run_time, quantize_at_run_time
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype, tensor_shape

#: Added to the scores of masked keys, unless attribute mask_filter_value gives another number.
HIDDEN = -10000.0


def dequantize(bb: Builder, *triple: Any, axis: int = 0) -> relax.Expr:
    """Dequantize (tensor, scale, zero point)."""
    return bb.emit(convert_dequantize_linear(bb, triple, {"axis": axis}, 13))


def convert_qlinear_where(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert QLinearWhere(condition, x, s, z, y, s, z, s, z)."""
    condition, *rest = inputs
    left, right = dequantize(bb, *rest[:3]), dequantize(bb, *rest[3:6])
    value = bb.emit(relax.op.where(condition, left, right))
    return convert_quantize_linear(bb, [value, *rest[6:8]], {}, opset)


# -- products --------------------------------------------------------------------------------------


def convert_matmul_integer_to_float(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert MatMulIntegerToFloat(a, b, a_scale, b_scale, a_zero, b_zero, bias) -> float32.

    With constant parameters and a constant b, this is the product of the dequantized operands.
    Otherwise it is the integer product times the scales.
    """
    left, right, left_scale, right_scale, left_zero, right_zero, bias = (*inputs, *[None] * 3)[:7]
    constants = (right, left_scale, right_scale, left_zero, right_zero)
    if all(each is None or constant_value(each) is not None for each in constants):
        values = (
            dequantize(bb, left, left_scale, left_zero),
            dequantize(bb, right, right_scale, right_zero, axis=right.ty.ndim - 1),
        )
        value = bb.emit(relax.op.matmul(*values))
    else:
        value = multiply_integers(
            bb, left, right, left_scale, right_scale, left_zero, right_zero, opset
        )
    return value if bias is None else relax.op.add(value, bias)


def multiply_integers(
    bb: Builder,
    left: relax.Expr,
    right: relax.Expr,
    left_scale: relax.Expr,
    right_scale: relax.Expr,
    left_zero: relax.Expr | None,
    right_zero: relax.Expr | None,
    opset: int,
) -> relax.Expr:
    """Emit float32(sums of (left - left_zero) * (right - right_zero)) * (left_scale *
    right_scale).
    """
    total = convert_matmul_integer(bb, [left, right, left_zero, right_zero], {}, opset)
    return scale_sums(bb, total, left_scale, right_scale)


def scale_sums(
    bb: Builder, total: relax.Expr, left_scale: relax.Expr, right_scale: relax.Expr
) -> relax.Expr:
    """Emit float32(total) * (left_scale * right_scale)."""
    real = bb.emit(relax.op.astype(bb.emit(total), "float32"))
    return bb.emit(relax.op.multiply(real, bb.emit(relax.op.multiply(left_scale, right_scale))))


def multiply_dynamic(
    bb: Builder,
    opset: int,
    right: relax.Expr,
    right_scale: relax.Expr,
    right_zero: relax.Expr | None,
    data: relax.Expr,
) -> relax.Expr:
    """Emit data quantized to uint8 by its own range (DynamicQuantizeLinear) times a quantized
    weight, float32 (..., N).
    """
    found = quantize_at_run_time(lambda expr, _: bb.emit(expr), data)
    return multiply_integers(
        bb, found.value, right, found.scale, right_scale, found.zero_point, right_zero, opset
    )


def convert_dynamic_quantize_matmul(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert DynamicQuantizeMatMul(a, b, b_scale, b_zero, bias) -> float32."""
    data, right, scale, zero, bias = (*inputs, None, None)[:5]
    value = multiply_dynamic(bb, opset, right, scale, zero, data)
    return value if bias is None else relax.op.add(value, bias)


def convert_dynamic_quantize_lstm(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert DynamicQuantizeLSTM: an LSTM whose inputs, and whose state in each step, are
    quantized by their own range.

    W and R are (directions, inputs, 4 * hidden). A scale and a zero point per direction, or per
    column of a direction. If the length is known at run time only, the steps are not unrolled: it
    becomes an LSTM of the numbers that the weights stand for, whose inputs and state are not
    rounded.

    Raises:
        Refusal: a weight is computed at run time, or shapes do not fit.
    """
    data, weight, recurrence, *others = inputs[:8]
    arrays = [constant_value(each) for each in (weight, recurrence, *inputs[8:12])]
    if any(array is None for array in arrays):
        raise NotConstant("weights, their scales and zero points")
    swapped = [array.swapaxes(1, 2).shape if array.ndim == 3 else None for array in arrays[:2]]  # pyright: ignore[reportOptionalMemberAccess]
    layer = RecurrentNode.of(LSTM, bb, [tensor_shape(data), *swapped], attrs)
    triples = [read_rows(arrays[at], *arrays[2 + 2 * at : 4 + 2 * at]) for at in (0, 1)]  # pyright: ignore[reportArgumentType]
    if static_size(data.ty.shape.values[0]) is None:
        real = [
            relax.const(((np.float32(w) - zero) * scale).swapaxes(1, 2).copy(), "float32")
            for w, scale, zero in triples
        ]
        return convert_recurrent(LSTM, bb, [data, *real, *others], attrs, opset)
    products = [
        tuple(read_product(bb, triple, number) for triple in triples)
        for number in range(len(layer.directions))
    ]
    return layer.unroll_steps((data, *others), [(by, (again,)) for by, again in products])


def read_rows(
    weight: np.ndarray, scale: np.ndarray, zero: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weight (directions, inputs, columns), and its scales and zero points as
    (directions, 1, 1) or (directions, 1, columns).

    Raises:
        Refusal: the parameters are neither per direction nor per column.
    """
    directions, _, columns = weight.shape
    parts = []
    for array in (scale, zero):
        if array.size not in (directions, directions * columns):
            raise Refusal(
                f"its weight has {format_count(array.size, 'parameter')} of one kind; allowed: "
                f"{directions}, one for each direction, or {directions * columns}"
            )
        parts.append(array.reshape(directions, 1, -1))
    return (weight, *parts)


def read_product(
    bb: Builder, triple: tuple[np.ndarray, np.ndarray, np.ndarray], number: int
) -> Multiply:
    """Return the product with the weight of one direction, given what `read_rows` returns.

    All steps share its constants.
    """
    weight, *parts = (array[number] for array in triple)
    scale, zero = (part[0] if part.size > 1 else part.reshape(()) for part in parts)
    shared, factor = read_weight(weight, zero.astype("int32")), relax.const(scale, "float32")

    def emit(expr: relax.Expr, _: str) -> relax.Var:
        return bb.emit(expr)

    def multiply(data: relax.Expr) -> relax.Expr:
        found = quantize_at_run_time(emit, data)
        total = multiply_at_run_time(emit, found.value, found.zero_point, shared)
        return scale_sums(bb, total, found.scale, factor)

    return multiply


# -- transformers ----------------------------------------------------------------------------------


def convert_qembed_layer_normalization(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert QEmbedLayerNormalization(ids, segments, tables ..., mask, scales ..., zero points
    ...) -> (normalized sum of rows of the tables, number of words of each sample).
    """
    ids, segments, word, position, segment, gamma, beta, mask, *parameters = inputs
    tables = [word, position, segment, gamma, beta]
    triples = list(zip(tables, parameters[:5], parameters[5:], strict=True))
    shape = tensor_shape(ids)
    if shape is None or len(shape) != 2:
        raise Refusal(f"its input_ids have the shape {shape}; allowed: (batch, length)")
    length = ids.ty.shape.values[1]
    places = bb.emit(relax.op.arange(0, length, 1, "int64"))
    value = look_up(bb, triples[0], ids)
    value = bb.emit(relax.op.add(value, look_up(bb, triples[1], places)))
    if segments is not None:
        value = bb.emit(relax.op.add(value, look_up(bb, triples[2], segments)))
    scale, bias = (dequantize(bb, *triple) for triple in triples[3:])
    epsilon = float(attrs.get("epsilon", 1e-12))
    value = bb.emit(relax.op.nn.layer_norm(value, scale, bias, axes=-1, epsilon=epsilon))
    counted = ids if mask is None else mask
    count = bb.emit(relax.op.sum(counted, axis=[1]))
    if mask is None:
        count = bb.emit(relax.op.zeros_like(count))
    return relax.Tuple([value, bb.emit(relax.op.astype(count, "int32"))])


def look_up(bb: Builder, triple: Sequence[Any], indices: relax.Expr) -> relax.Expr:
    """Look up rows of a quantized table and dequantize them."""
    table, *parameters = triple
    return dequantize(bb, bb.emit(relax.op.take(table, indices, axis=0)), *parameters)


def convert_attention(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Attention to its first output. TVM's frontend gives a zero for the second one."""
    return run_frontend("Attention", bb, inputs, attrs, opset).fields[0]


def convert_qattention(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert QAttention(x, w, bias, x_scale, w_scale, mask, x_zero, w_zero, past) -> (y, present).

    q, k, v = split(x @ w + bias). For each head, y = softmax(q @ k^T * scale + mask) @ v. A mask is
    (batch, keys), (batch, queries, keys), or the number of keys of each sample: (batch,).

    Raises:
        Refusal: the mask has another shape, or sizes do not fit.
    """
    data, weight, bias, data_scale, weight_scale, mask, *zeros, past = (*inputs, *[None] * 4)[:9]
    heads, sizes = int(attrs["num_heads"]), tensor_shape(weight)
    if sizes is None or len(sizes) != 2 or not isinstance(sizes[1], int) or sizes[1] % (3 * heads):
        raise Refusal(f"its weight has the shape {sizes}; allowed: (K, 3 * {heads} * size)")
    size = sizes[1] // (3 * heads)
    product = convert_matmul_integer_to_float(
        bb, [data, weight, data_scale, weight_scale, *zeros, bias], {}, opset
    )
    batch, length = data.ty.shape.values[:2]
    joint = bb.emit(relax.op.reshape(bb.emit(product), (batch, length, 3, heads, size)))
    joint = bb.emit(relax.op.permute_dims(joint, [2, 0, 3, 1, 4]))
    query, *present = (
        bb.emit(relax.op.squeeze(bb.emit(relax.op.strided_slice(joint, [0], [at], [at + 1])), [0]))
        for at in range(3)
    )
    if past is not None:
        parts = bb.emit(relax.op.split(past, 2, axis=0))
        present = [
            bb.emit(
                relax.op.concat([bb.emit(relax.op.squeeze(bb.emit(parts[at]), [0])), new], axis=2)
            )
            for at, new in enumerate(present)
        ]
    key, value = present
    keys = bb.emit(relax.op.permute_dims(key, [0, 1, 3, 2]))
    scores = bb.emit(relax.op.matmul(query, keys))
    factor = float(attrs.get("scale", 0.0)) or 1 / math.sqrt(size)
    scores = bb.emit(relax.op.multiply(scores, relax.const(factor, "float32")))
    count = key.ty.shape.values[2]
    if mask is not None:
        hidden = float(attrs.get("mask_filter_value", HIDDEN))
        shown = bb.emit(read_mask(bb, mask, count))
        bounds = [relax.const(bound, "float32") for bound in (0.0, hidden)]
        scores = bb.emit(relax.op.add(scores, bb.emit(relax.op.where(shown, *bounds))))
    if attrs.get("unidirectional", 0):
        scores = hide_later(bb, scores, length, count)
    weights = bb.emit(relax.op.nn.softmax(scores, -1))
    mixed = bb.emit(relax.op.permute_dims(bb.emit(relax.op.matmul(weights, value)), [0, 2, 1, 3]))
    result = bb.emit(relax.op.reshape(mixed, (batch, length, heads * size)))
    return relax.Tuple([result, bb.emit(relax.op.stack(present, 0))])


def read_mask(bb: Builder, mask: relax.Expr, count: Any) -> relax.Expr:
    """Return which of `count` keys a mask keeps, broadcastable to (batch, heads, queries, keys)."""
    rank, shape = mask.ty.ndim, tensor_shape(mask)
    axes = {1: [1, 2, 3], 2: [1, 2], 3: [1]}.get(rank)
    if axes is None:
        raise Refusal(
            f"its mask_index has the shape {shape}; supported: (batch,), (batch, keys), "
            "(batch, queries, keys)"
        )
    wide = bb.emit(relax.op.expand_dims(mask, axes))
    if rank > 1:
        return relax.op.greater(wide, relax.const(0, tensor_dtype(mask)))
    places = bb.emit(relax.op.arange(0, count, 1, tensor_dtype(mask)))
    return relax.op.less(places, wide)


def hide_later(bb: Builder, scores: relax.Expr, length: Any, count: Any) -> relax.Expr:
    """Mask scores (..., length, count) of the keys after each query. The last query sees all
    keys.
    """
    places = bb.emit(relax.op.arange(0, count, 1, "int64"))
    behind = bb.emit(relax.op.arange(count - length, count, 1, "int64"))
    is_seen = bb.emit(relax.op.less_equal(places, bb.emit(relax.op.expand_dims(behind, 1))))
    lowest = relax.const(float(np.finfo("float32").min), "float32")
    return bb.emit(relax.op.where(is_seen, scores, lowest))
