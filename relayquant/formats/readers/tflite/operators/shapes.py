"""TensorFlow Lite reader: operators that move, join, cut or repeat elements; and shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.operators.reading import find_shape, operands, read_constant
from relayquant.formats.readers.tflite.options import read_options

#: Largest constant that FILL makes, in elements.
MAX_FILLED = 2**28


def convert_shape(converter: Any, op: Any) -> relax.Expr:
    """Convert SHAPE(x) to a constant."""
    (data,), (result,) = converter.get_input_tensors(op), converter.get_output_tensors(op)
    shape = find_shape(converter.get_tensor_expr(data))
    dtype = converter.get_tensor_type_str(result.tensor.Type())
    return relax.const(np.array(shape, dtype), dtype)


def convert_squeeze(converter: Any, op: Any) -> relax.Expr:
    """Convert SQUEEZE along the given axes, or along all axes of size 1 if none is given.

    A complex number is a pair along one more axis, the last, which the file does not count.
    """
    (data,) = operands(converter, op)
    axes = np.array([], "int32")
    if op.BuiltinOptions() is not None:
        axes = np.atleast_1d(read_options(op, "SqueezeOptions").SqueezeDimsAsNumpy())
    has_none = axes.dtype != np.int32 or not axes.size
    (tensor,) = converter.get_input_tensors(op)
    rank = tensor.tensor.ShapeLength()
    return relax.op.squeeze(data, None if has_none else [*{int(axis) % rank for axis in axes}])


def convert_expand_dims(converter: Any, op: Any) -> relax.Expr:
    """Convert EXPAND_DIMS to R.expand_dims. TVM calls it with one argument too many."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    return relax.op.expand_dims(data, int(read_constant(converter, op, 1).item()))


def convert_split(converter: Any, op: Any) -> relax.Expr:
    """Convert SPLIT(axis, x) to equal parts, one per output."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[1])
    axis = int(read_constant(converter, op, 0).item())
    return split(data, [1] * op.OutputsLength(), axis, is_share=True)


def convert_split_v(converter: Any, op: Any) -> relax.Expr:
    """Convert SPLIT_V(x, sizes, axis). One size may be -1, for the rest."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    sizes = read_constant(converter, op, 1).ravel().tolist()
    return split(data, sizes, int(read_constant(converter, op, 2).item()))


def split(data: relax.Expr, sizes: list[int], axis: int, is_share: bool = False) -> relax.Expr:
    """Split a value along an axis, with given sizes or into equal parts."""
    shape = find_shape(data)
    if not -len(shape) <= axis < len(shape):
        raise Refusal(f"its axis is {axis}; supported: {-len(shape)} to {len(shape) - 1}")
    whole = shape[axis]
    if is_share:
        sizes = [whole // len(sizes)] * len(sizes)
    rest = whole - sum(size for size in sizes if size >= 0)
    sizes = [rest if size == -1 else size for size in sizes]
    if sum(sizes) != whole or min(sizes) < 0:
        raise Refusal(
            f"its parts are {sizes} of an axis of {whole}; supported: parts that add up to it"
        )
    if len(sizes) == 1:
        return data
    return relax.op.split(data, np.cumsum(sizes)[:-1].tolist(), axis)


def convert_unpack(converter: Any, op: Any) -> relax.Expr:
    """Convert UNPACK(x) to the elements along an axis, without the axis."""
    axis = read_options(op, "UnpackOptions").Axis()
    (data,) = operands(converter, op)
    parts = converter.bb.emit(split(data, [1] * op.OutputsLength(), axis))
    if op.OutputsLength() == 1:
        return relax.op.squeeze(parts, [axis])
    return relax.Tuple([relax.op.squeeze(parts[i], [axis]) for i in range(op.OutputsLength())])


def convert_broadcast_to(converter: Any, op: Any) -> relax.Expr:
    """Convert BROADCAST_TO(x, shape)."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    return relax.op.broadcast_to(data, read_constant(converter, op, 1).tolist())


def convert_fill(converter: Any, op: Any) -> relax.Expr:
    """Convert FILL with a known size and value to a constant. TVM looks them up among the run-time
    values.
    """
    sizes, value = converter.get_input_tensors(op)
    if converter.has_expr(sizes.tensor_idx):
        return converter.convert_fill(op)
    shape = [int(size) for size in converter.get_tensor_value(sizes)]
    if converter.has_expr(value.tensor_idx):
        return relax.op.broadcast_to(converter.get_tensor_expr(value), shape)
    if math.prod(shape) > MAX_FILLED:
        raise Refusal(f"its result has the shape {shape}; supported: up to {MAX_FILLED:,}")
    filled = np.full(shape, converter.get_tensor_value(value).item())
    dtype = converter.get_tensor_type_str(value.tensor.Type())
    return relax.const(filled.astype(dtype), dtype)


def convert_select(converter: Any, op: Any) -> relax.Expr:
    """Convert SELECT(c, a, b). A vector as the condition selects rows."""
    condition, yes, no = operands(converter, op)
    if converter.get_op_code_str(op) == "SELECT":
        rank, rows = len(find_shape(yes)), find_shape(condition)
        if len(rows) == 1 and rank > 1:
            condition = converter.bb.emit(relax.op.reshape(condition, [*rows, *[1] * (rank - 1)]))
    return relax.op.where(condition, yes, no)


def convert_pad(converter: Any, op: Any) -> relax.Expr:
    """Convert PAD and PADV2 with known pads. PAD fills with the zero point of its result."""
    value = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    (result,) = converter.get_output_tensors(op)
    fill = 0
    if op.InputsLength() > 2:
        fill = read_constant(converter, op, 2).item()
    elif result.qnn_params:
        fill = result.qnn_params["zero_point"].value.numpy().item()
    return relax.op.nn.pad(value, read_constant(converter, op, 1).ravel().tolist(), pad_value=fill)


def convert_mirror_pad(converter: Any, op: Any) -> relax.Expr:
    """Convert MIRROR_PAD that repeats the edge to R.take along each axis. R.nn.pad cannot repeat
    the edge.
    """
    from tflite import MirrorPadMode

    if read_options(op, "MirrorPadOptions").Mode() != MirrorPadMode.SYMMETRIC:
        return converter.convert_mirror_pad(op)
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    for axis, pads in enumerate(read_constant(converter, op, 1).tolist()):
        if any(pads):
            index = np.pad(np.arange(find_shape(data)[axis], dtype="int32"), pads, "symmetric")
            data = converter.bb.emit(relax.op.take(data, relax.const(index, "int32"), axis=axis))
    return data


def convert_reshape(converter: Any, op: Any) -> relax.Expr:
    """Convert RESHAPE to a known shape."""
    if op.InputsLength() > 1:
        read_constant(converter, op, 1)
    return converter.convert_reshape(op)


def convert_reverse(converter: Any, op: Any) -> relax.Expr:
    """Convert REVERSE_V2(x, axes)."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    for axis in read_constant(converter, op, 1).ravel().tolist():
        data = converter.bb.emit(relax.op.flip(data, axis))
    return data


def convert_space_to_batch(converter: Any, op: Any) -> relax.Expr:
    """Convert SPACE_TO_BATCH_ND(x, blocks, pads): positions in a block become batches.

    [N, a*h, b*w, C] -> [N, h, a, w, b, C] -> [a, b, N, h, w, C] -> [a*b*N, h, w, C]
    """
    (data, *_), bb = converter.get_input_tensors(op), converter.bb
    value = converter.get_tensor_expr(data)
    blocks = read_constant(converter, op, 1).tolist()
    pads = read_constant(converter, op, 2)
    rank, count = len(find_shape(value)), len(blocks)
    if pads.any():
        zero = data.qnn_params["zero_point"].value.numpy().item() if data.qnn_params else 0
        width = [0, 0, *pads.ravel().tolist(), *[0, 0] * (rank - count - 1)]
        value = bb.emit(relax.op.nn.pad(value, width, pad_value=zero))
    batch, *sizes = find_shape(value)
    sizes, rest = sizes[:count], sizes[count:]
    sizes = [size // block for size, block in zip(sizes, blocks, strict=True)]
    pairs = [n for pair in zip(sizes, blocks, strict=True) for n in pair]
    value = bb.emit(relax.op.reshape(value, [batch, *pairs, *rest]))
    inner, outer = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    axes = [*inner, 0, *outer, *range(2 * count + 1, 2 * count + 1 + len(rest))]
    value = bb.emit(relax.op.permute_dims(value, axes))
    return relax.op.reshape(value, [batch * math.prod(blocks), *sizes, *rest])


def convert_batch_to_space(converter: Any, op: Any) -> relax.Expr:
    """Convert BATCH_TO_SPACE_ND(x, blocks, crops): batches become positions in a block.

    [a*b*N, h, w, C] -> [a, b, N, h, w, C] -> [N, h, a, w, b, C] -> [N, a*h, b*w, C]
    """
    bb, value = converter.bb, converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    blocks = read_constant(converter, op, 1).tolist()
    crops = read_constant(converter, op, 2)
    count = len(blocks)
    batch, *sizes = find_shape(value)
    sizes, rest = sizes[:count], sizes[count:]
    batch //= math.prod(blocks)
    value = bb.emit(relax.op.reshape(value, [*blocks, batch, *sizes, *rest]))
    pairs = [n for i in range(count) for n in (count + 1 + i, i)]
    axes = [count, *pairs, *range(2 * count + 1, 2 * count + 1 + len(rest))]
    value = bb.emit(relax.op.permute_dims(value, axes))
    full = [size * block for size, block in zip(sizes, blocks, strict=True)]
    value = bb.emit(relax.op.reshape(value, [batch, *full, *rest]))
    if not crops.any():
        return value
    first = crops[:, 0].tolist()
    last = [size - crop for size, crop in zip(full, crops[:, 1].tolist(), strict=True)]
    return relax.op.strided_slice(value, list(range(1, count + 1)), first, last)
