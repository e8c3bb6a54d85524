"""ONNX reader: normalizations with all their outputs.

R.nn.layer_norm and R.nn.rms_norm have one result, and their scale has the normalized shape. Other
cases are written as reductions. Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from relayquant.base import _tvm
from relayquant.formats.readers.onnx.graph.outputs import NOT_COMPUTED
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape

#: Value of stash_type for statistics in float32.
STASH_FLOAT = 1


def convert_layer_normalization(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr | None:
    """Convert LayerNormalization(x, scale, bias) -> (y, mean, 1 / standard deviation).

    mean = R.mean(x); d = x - mean; inv = R.rsqrt(R.mean(d * d) + epsilon)
    y = d * inv * scale + bias

    With one output and a scale of the normalized shape, it is left to TVM: R.nn.layer_norm.
    """
    data, scale, bias = (*inputs, None)[:3]
    axes = _normalized_axes(data, attrs)
    if attrs["tvm_custom"]["num_outputs"] == 1 and _is_plain(data, scale, bias, axes):
        return None
    dtype = str(data.ty.dtype)
    value = _widen(bb, data, attrs)
    mean = bb.emit(relax.op.mean(value, axes, keepdims=True))
    centered = bb.emit(relax.op.subtract(value, mean))
    inverse = _inverse_deviation(bb, centered, axes, attrs)
    result = _cast(bb, bb.emit(relax.op.multiply(centered, inverse)), dtype)
    result = bb.emit(relax.op.multiply(result, scale))
    if bias is not None:
        result = bb.emit(relax.op.add(result, bias))
    return relax.Tuple([result, mean, inverse])


def convert_skip_layer_normalization(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert com.microsoft.SkipLayerNormalization(x, skip, scale, shift, bias) -> (y, mean, 1 /
    standard deviation, sum).

    y is LayerNormalization over the last axis of sum = x + skip + bias.
    """
    data, skip, scale, shift, bias = (*inputs, None, None)[:5]
    total = bb.emit(relax.op.add(data, skip))
    if bias is not None:
        total = bb.emit(relax.op.add(total, bias))
    epsilon = float(attrs.get("epsilon", 1e-12))
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return _make_layer_norm(total, scale, shift, epsilon)
    form = {"epsilon": epsilon, "axis": -1, "tvm_custom": {"num_outputs": 3}}
    full = convert_layer_normalization(bb, [total, scale, shift], form, opset)
    return relax.Tuple([*full.fields, total])


def convert_embed_layer_normalization(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert com.microsoft.EmbedLayerNormalization(ids, segments, words, positions, kinds, scale,
    shift, mask, places) -> (y, counts, sum).

    y is LayerNormalization of sum = words[ids] + positions[places] + kinds[segments]. counts are
    the sums of the mask per row, 0 without a mask.
    """
    ids, segments, words, positions, kinds, scale, shift, mask, places = (*inputs, *[None] * 4)[:9]
    batch, length = ids.ty.shape.values
    if places is None:
        places = bb.emit(relax.op.arange(0, length, 1, "int64"))
    total = bb.emit(relax.op.take(words, ids, axis=0))
    total = bb.emit(relax.op.add(total, bb.emit(relax.op.take(positions, places, axis=0))))
    if segments is not None:
        total = bb.emit(relax.op.add(total, bb.emit(relax.op.take(kinds, segments, axis=0))))
    value = _make_layer_norm(total, scale, shift, float(attrs.get("epsilon", 1e-12)))
    if mask is None:
        counts = relax.op.full((batch,), relax.const(0, "int32"), "int32")
    else:
        counts = relax.op.sum(bb.emit(relax.op.astype(mask, "int32")), 1)
    return relax.Tuple([bb.emit(value), bb.emit(counts), total])


def _make_layer_norm(
    data: relax.Expr, scale: relax.Expr, shift: relax.Expr | None, epsilon: float
) -> relax.Expr:
    """Make R.nn.layer_norm over the last axis, also without a shift."""
    if shift is None:
        (size,) = known_shape(scale, "scale")
        shift = relax.const(np.zeros(int(size)), tensor_dtype(scale))
    return relax.op.nn.layer_norm(data, scale, shift, axes=-1, epsilon=epsilon)


def convert_rms_normalization(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr | None:
    """Convert RMSNormalization to x * R.rsqrt(R.mean(x * x) + epsilon) * scale.

    Used if all axes are normalized, because TVM's kernel does not compile then, and if the scale is
    broadcast. Other cases are left to TVM: R.nn.rms_norm.
    """
    data, scale = inputs
    axes = _normalized_axes(data, attrs)
    if axes[0] > 0 and _is_plain(data, scale, None, axes):
        return None
    value = _widen(bb, data, attrs)
    inverse = _inverse_deviation(bb, value, axes, attrs)
    result = _cast(bb, bb.emit(relax.op.multiply(value, inverse)), str(data.ty.dtype))
    return relax.op.multiply(result, scale)


def _normalized_axes(data: relax.Expr, attrs: dict[str, Any]) -> list[int]:
    """Return the axes from attribute axis to the last."""
    rank = len(known_shape(data))
    return list(range(int(attrs.get("axis", -1)) % rank, rank))


def _is_plain(
    data: relax.Expr, scale: relax.Expr, bias: relax.Expr | None, axes: list[int]
) -> bool:
    """Return whether scale and bias have exactly the normalized shape."""
    shape = known_shape(data)
    wanted = tuple(shape[axis] for axis in axes)
    return all(tensor_shape(value) == wanted for value in (scale, bias) if value is not None)


def _widen(bb: Builder, data: relax.Expr, attrs: dict[str, Any]) -> relax.Expr:
    """Cast the data to the dtype that stash_type requires for statistics."""
    if attrs.get("stash_type", STASH_FLOAT) != STASH_FLOAT or str(data.ty.dtype) == "float32":
        return data
    return bb.emit(relax.op.astype(data, "float32"))


def _cast(bb: Builder, value: relax.Expr, dtype: str) -> relax.Expr:
    if str(value.ty.dtype) == dtype:
        return value
    return bb.emit(relax.op.astype(value, dtype))


def _inverse_deviation(
    bb: Builder, value: relax.Expr, axes: list[int], attrs: dict[str, Any]
) -> relax.Expr:
    """Emit 1 / sqrt(mean(value^2) + epsilon)."""
    square = bb.emit(relax.op.multiply(value, value))
    power = bb.emit(relax.op.mean(square, axes, keepdims=True))
    epsilon = relax.const(float(attrs.get("epsilon", 1e-5)), str(value.ty.dtype))
    return bb.emit(relax.op.rsqrt(bb.emit(relax.op.add(power, epsilon))))


def convert_lp_normalization(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert LpNormalization, which TVM lacks, to x / norm, and 0 where the norm is 0."""
    (data,) = inputs
    axis, order = int(attrs.get("axis", -1)), int(attrs.get("p", 2))
    if order not in (1, 2):
        raise Refusal(f"p is {order}; allowed: 1, 2")
    size = bb.emit(relax.op.abs(data) if order == 1 else relax.op.multiply(data, data))
    norm = bb.emit(relax.op.sum(size, [axis], keepdims=True))
    if order == 2:
        norm = bb.emit(relax.op.sqrt(norm))
    zero, one = (relax.const(value, str(data.ty.dtype)) for value in (0.0, 1.0))
    is_zero = bb.emit(relax.op.equal(norm, zero))
    # The numerator is 0 there as well.
    return relax.op.divide(data, bb.emit(relax.op.where(is_zero, one, norm)))


def convert_batch_normalization(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert BatchNormalization. Only training computes the outputs after the first one.

    TVM's momentum is the weight of the batch, ONNX's is the weight of the running statistics.
    Since opset 15, scale, bias and statistics may have other float types than the data. To data of
    float32 or float64 they are cast, and results of training are cast back.
    """
    dtype, *given = map(tensor_dtype, inputs)
    if dtype in ("float32", "float64"):
        inputs = [_cast(bb, value, dtype) for value in inputs]
    convert = _tvm.load_onnx_frontend().BatchNormalization._impl_v15
    attrs = {**attrs, "momentum": 1.0 - float(attrs.get("momentum", 0.9))}
    result = convert(bb, inputs, attrs, [{}, {}])
    if attrs.get("training_mode", 0):
        y, *running = (bb.emit(field) for field in result.fields)
        return relax.Tuple([y, *map(partial(_cast, bb), running, given[2:])])
    return relax.Tuple([result.fields[0], *[NOT_COMPUTED] * (len(result.fields) - 1)])
