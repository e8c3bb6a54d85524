"""TensorFlow Lite reader: operators that TVM's frontend does not convert, or not as TFLite computes
them.

Each function takes the converter and the operator, and returns the value. "TFLite" here means the
kernels of its interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.fourier import emit_transform
from relayquant.formats.readers.indices import take_largest
from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.formats.readers.tflite.options import read_options
from relayquant.formats.readers.tflite.strided import convert_strided_slice
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype, tensor_shape

#: Largest constant that FILL makes, in elements.
MAX_FILLED = 2**28


def operands(converter: Any, op: Any) -> list[relax.Expr]:
    """Return all operands of an operator."""
    return [converter.get_tensor_expr(tensor) for tensor in converter.get_input_tensors(op)]


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


def convert_shape(converter: Any, op: Any) -> relax.Expr:
    """Convert SHAPE(x) to a constant."""
    (data,), (result,) = converter.get_input_tensors(op), converter.get_output_tensors(op)
    shape = find_shape(converter.get_tensor_expr(data))
    dtype = converter.get_tensor_type_str(result.tensor.Type())
    return relax.const(np.array(shape, dtype), dtype)


def convert_softmax(converter: Any, op: Any) -> relax.Expr:
    """Convert SOFTMAX to softmax(beta * x). TVM ignores beta."""
    beta = read_options(op, "SoftmaxOptions").Beta()
    if beta == 1:
        return converter.convert_softmax(op)
    (data,), (result,) = converter.get_input_tensors(op), converter.get_output_tensors(op)
    value = converter.get_tensor_expr(data)
    if data.qnn_params:
        value = converter.dequantize(value, data)
    value = relax.op.multiply(value, relax.const(beta, "float32"))
    value = relax.op.nn.softmax(value, axis=-1)
    return converter.quantize(value, result) if result.qnn_params else value


def convert_gelu(converter: Any, op: Any) -> relax.Expr:
    """Convert GELU with tanh if the option says so, else with erf. TVM always uses erf."""
    (data,) = operands(converter, op)
    is_approximate = (
        op.BuiltinOptions() is not None and read_options(op, "GeluOptions").Approximate()
    )
    return relax.op.nn.gelu_tanh(data) if is_approximate else relax.op.nn.gelu(data)


def convert_bucketize(converter: Any, op: Any) -> relax.Expr:
    """Convert BUCKETIZE: count the boundaries that are not larger. TVM counts the smaller ones."""
    (data,) = operands(converter, op)
    boundaries = np.atleast_1d(read_options(op, "BucketizeOptions").BoundariesAsNumpy())
    return relax.op.bucketize(data, relax.const(boundaries, "float32"), out_int32=True, right=True)


def convert_arg(find: Callable[..., relax.Expr], converter: Any, op: Any) -> relax.Expr:
    """Convert ARG_MAX and ARG_MIN, with the integer type of the result."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    axis = int(read_constant(converter, op, 1).item())
    (result,) = converter.get_output_tensors(op)
    dtype = converter.get_tensor_type_str(result.tensor.Type())
    return relax.op.astype(converter.bb.emit(find(data, axis)), dtype)


def convert_cumsum(converter: Any, op: Any) -> relax.Expr:
    """Convert CUMSUM, from the end if the option says so."""
    options = read_options(op, "CumsumOptions")
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    axis = int(read_constant(converter, op, 1).item())
    if options.Reverse():
        data = converter.bb.emit(relax.op.flip(data, axis))
    made = relax.op.cumsum(data, axis, tensor_dtype(data), bool(options.Exclusive()))
    return relax.op.flip(converter.bb.emit(made), axis) if options.Reverse() else made


def convert_reduce(reduce: Callable[..., relax.Expr], converter: Any, op: Any) -> relax.Expr:
    """Convert MEAN, SUM, REDUCE_ALL and others along axes, each taken once however often it is
    named.
    """
    data, axes = converter.get_input_tensors(op)
    rank = converter.get_tensor_expr(data).ty.ndim
    given = converter.get_tensor_value(axes).ravel().tolist()
    if not all(-rank <= axis < rank for axis in given):
        raise Refusal(f"its axes are {given}; supported: {-rank} to {rank - 1}")
    once = np.array([*dict.fromkeys(axis % rank for axis in given)], "int32")
    is_boolean = converter.kind in ("REDUCE_ALL", "REDUCE_ANY")
    convert = converter._convert_reduce_bool if is_boolean else converter._convert_reduce
    with converter.replaced(axes, relax.const(once, "int32")):
        return convert(reduce, op)


def convert_shift(converter: Any, op: Any) -> relax.Expr:
    """Convert RIGHT_SHIFT by 0 bits at least, and by one less than the type has at most."""
    data, bits = operands(converter, op)
    dtype, emit = tensor_dtype(bits), converter.bb.emit
    most = 8 * np.dtype(dtype).itemsize - 1
    bits = emit(relax.op.maximum(bits, relax.const(0, dtype)))
    bits = emit(relax.op.minimum(bits, relax.const(most, dtype)))
    return relax.op.right_shift(data, bits)


# -- shapes and indices ----------------------------------------------------------------------------


def convert_cast(converter: Any, op: Any) -> relax.Expr:
    """Convert CAST. As TFLite's kernel does, it takes the real part of complex numbers, and the
    nearest integer that the type has for floats out of its range, the largest one for NaN.
    """
    (source,), (result,) = converter.get_input_tensors(op), converter.get_output_tensors(op)
    if converter.is_complex(result):
        raise Refusal("its result is complex; supported: real numbers")
    data = (
        converter.convert_real(op) if converter.is_complex(source) else operands(converter, op)[0]
    )
    dtype, source_dtype = converter.get_tensor_type_str(result.tensor.Type()), tensor_dtype(data)
    if not source_dtype.startswith("float") or np.dtype(dtype).kind not in "iu":
        return relax.op.astype(data, dtype)
    return saturate(converter.bb, data, dtype)


def saturate(bb: relax.BlockBuilder, data: relax.Expr, dtype: str) -> relax.Expr:
    """Truncate floats to integers; out of the integers' range R.astype gives any number."""
    limits, wide = np.iinfo(dtype), tensor_dtype(data)
    if wide == "float16":  # has no number behind the range of int32
        data, wide = bb.emit(relax.op.astype(data, "float32")), "float32"
    # One behind the largest integer is a power of 2, hence a float; the largest may be none.
    is_less = bb.emit(relax.op.less(data, relax.const(float(limits.max + 1), wide)))
    held = bb.emit(relax.op.where(is_less, data, relax.const(0.0, wide)))
    held = bb.emit(relax.op.maximum(held, relax.const(float(limits.min), wide)))
    largest = relax.const(np.array(limits.max, dtype), dtype)
    return relax.op.where(is_less, bb.emit(relax.op.astype(held, dtype)), largest)


def convert_rfft2d(converter: Any, op: Any) -> relax.Expr:
    """Convert RFFT2D along the last two axes, of which the last is onesided. TVM writes out every
    step of a transform, and needs as many numbers as the file says.
    """
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    height, width = read_constant(converter, op, 1).tolist()
    rank = len(data.ty.shape)
    shape = [*data.ty.shape.values, 1]
    value = converter.bb.emit(relax.op.reshape(data, shape))
    value = emit_transform(converter.bb, value, rank - 1, width, onesided=True)
    if height == 1 == static_size(shape[-3]):
        return value
    return emit_transform(converter.bb, converter.bb.emit(value), rank - 2, height)


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


def check_indices(index: relax.Expr, sizes: Sequence[int]) -> None:
    """Raise Refusal for constant indices that TFLite's kernels reject at run time.

    Args:
        index: Indices. Their last axis has one entry per axis in `sizes`.
        sizes: Sizes of the axes that they select from.
    """
    array = constant_value(index)
    if array is not None and array.size and not ((array >= 0) & (array < np.array(sizes))).all():
        raise Refusal(f"its indices are {array.min()} to {array.max()}, for axes of {list(sizes)}")


def convert_gather(converter: Any, op: Any) -> relax.Expr:
    """Convert GATHER(x, indices) along an axis, after the batch axes that both have.

    With batch axes, R.gather_nd takes the rows of each batch.
    """
    data, index = operands(converter, op)
    options = read_options(op, "GatherOptions")
    shape, batch = find_shape(data), options.BatchDims()
    rank = len(find_shape(index))
    axis = options.Axis() + (len(shape) if options.Axis() < 0 else 0)
    batch += rank if batch < 0 else 0
    if not 0 <= batch <= min(axis, rank) or not axis < len(shape):
        raise Refusal(
            f"its axis is {options.Axis()} and its batch_dims {options.BatchDims()}; supported: "
            f"an axis of {len(shape)}, after the batch axes"
        )
    check_indices(index, [shape[axis]])
    if not batch:
        return relax.op.take(data, index, axis=axis, mode="fast")
    if axis != batch:
        raise Refusal(f"its axis is {axis} and its batch_dims {batch}; supported: the same")
    last = converter.bb.emit(relax.op.expand_dims(relax.op.astype(index, "int64"), [-1]))
    return relax.op.gather_nd(data, last, batch)


def convert_gather_nd(converter: Any, op: Any) -> relax.Expr:
    """Convert GATHER_ND(x, indices). The indices of an element are along the last axis."""
    data, index = operands(converter, op)
    shape = find_shape(data)
    check_indices(index, shape[: find_shape(index)[-1]])
    return relax.op.gather_nd(data, converter.bb.emit(relax.op.astype(index, "int64")))


def convert_scatter_nd(converter: Any, op: Any) -> relax.Expr:
    """Convert SCATTER_ND(indices, updates, shape). Rows for the same place are added up."""
    index, updates = operands(converter, op)[:2]
    shape = read_constant(converter, op, 2).tolist()
    check_indices(index, shape[: find_shape(index)[-1]])
    zeros = relax.op.zeros(shape, tensor_dtype(updates))
    return relax.op.scatter_nd(converter.bb.emit(zeros), index, updates, "add")


#: Operators that reduce the rows of a segment: the reduction of R.scatter_nd.
SEGMENTS = {
    "SEGMENT_SUM": "add",
    "UNSORTED_SEGMENT_MAX": "max",
    "UNSORTED_SEGMENT_MIN": "min",
    "UNSORTED_SEGMENT_PROD": "mul",
    "UNSORTED_SEGMENT_SUM": "add",
}


def convert_segments(converter: Any, op: Any) -> relax.Expr:
    """Convert SEGMENT_SUM(x, segments) and the UNSORTED_SEGMENT operators(x, segments, count).

    As in TFLite's kernel, a row of a negative segment is left out, and so is one behind the last,
    where the kernel stops the run.
    """
    data, segments = operands(converter, op)[:2]
    dtype, emit = tensor_dtype(segments), converter.bb.emit
    shape, rows = find_shape(data), find_shape(segments)
    if shape[: len(rows)] != rows:
        raise Refusal(f"its segments have shape {rows}; supported: the first axes of {shape}")
    if converter.kind == "SEGMENT_SUM":
        array = read_constant(converter, op, 1)
        count = int(array.max(initial=-1)) + 1
        check_indices(segments, [count])
    else:
        count = int(read_constant(converter, op, 2).item())
    # Rows that are left out go to one more segment, which is cut off.
    is_negative = emit(relax.op.less(segments, relax.const(0, dtype)))
    places = emit(relax.op.where(is_negative, relax.const(count, dtype), segments))
    places = emit(relax.op.minimum(places, relax.const(count, dtype)))
    places = emit(relax.op.expand_dims(places, [len(rows)]))
    reduction, kind, rest = SEGMENTS[converter.kind], tensor_dtype(data), shape[len(rows) :]
    empty = converter._get_segment_scatter_base([count + 1, *rest], kind, reduction)
    value = emit(relax.op.scatter_nd(emit(empty), places, data, reduction))
    return relax.op.strided_slice(value, [0], [0], [count], [1], assume_inbound=True)


def convert_update(converter: Any, op: Any) -> relax.Expr:
    """Convert DYNAMIC_UPDATE_SLICE(x, update, start): a part of x is replaced.

    A start too close to the end moves back until the update fits.
    """
    (data, update, start), bb = operands(converter, op), converter.bb
    shape, sizes = find_shape(data), find_shape(update)
    last = np.subtract(shape, sizes)
    if len(sizes) != len(shape) or (last < 0).any():
        raise Refusal(
            f"its update has shape {sizes}; supported: up to {shape}, the shape of its operand"
        )
    place = bb.emit(relax.op.astype(start, "int64"))
    place = bb.emit(relax.op.maximum(place, relax.const(0, "int64")))
    place = bb.emit(relax.op.minimum(place, relax.const(last.astype("int64"), "int64")))
    grid = np.moveaxis(np.indices(sizes, "int64"), 0, -1)
    index = bb.emit(relax.op.add(relax.const(grid, "int64"), place))
    return relax.op.scatter_nd(data, index, update, "update")


def convert_embedding_lookup(converter: Any, op: Any) -> relax.Expr:
    """Convert EMBEDDING_LOOKUP(indices, table), with the operands in this order."""
    index, table = operands(converter, op)
    check_indices(index, find_shape(table)[:1])
    return relax.op.take(table, index, axis=0, mode="fast")


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


def refuse_where(converter: Any, op: Any) -> relax.Expr:
    """Raise Refusal: WHERE(c) lists the positions that are true."""
    raise Refusal("its result has as many rows as the run time finds; supported: fixed shapes")


def convert_reverse(converter: Any, op: Any) -> relax.Expr:
    """Convert REVERSE_V2(x, axes)."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    for axis in read_constant(converter, op, 1).ravel().tolist():
        data = converter.bb.emit(relax.op.flip(data, axis))
    return data


def convert_topk(converter: Any, op: Any) -> relax.Expr:
    """Convert TOPK_V2(x, k) to values and indices along the last axis."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    count = int(read_constant(converter, op, 1).item())
    return take_largest(converter.bb, data, count, -1, dtype="int32")


def convert_sparse_to_dense(converter: Any, op: Any) -> relax.Expr:
    """Convert SPARSE_TO_DENSE(indices, shape, values, default)."""
    index, _, values, default = operands(converter, op)
    shape = read_constant(converter, op, 1).tolist()
    if len(find_shape(index)) < 2:
        count = math.prod(find_shape(index))
        check_indices(index, shape)
        index = converter.bb.emit(relax.op.reshape(index, [count, 1]))
    else:
        check_indices(index, shape)
    count = find_shape(index)[0]
    values = converter.bb.emit(relax.op.broadcast_to(values, [count]))
    dense = converter.bb.emit(relax.op.broadcast_to(default, shape))
    return relax.op.scatter_nd(dense, index, values, "update")


def convert_matrix_diag(converter: Any, op: Any) -> relax.Expr:
    """Convert MATRIX_DIAG(x): x on the diagonal of a matrix of zeros."""
    (data,) = operands(converter, op)
    size, dtype = find_shape(data)[-1], tensor_dtype(data)
    wide = converter.bb.emit(relax.op.expand_dims(data, [-1]))
    zero = relax.const(np.zeros((), dtype), dtype)
    return relax.op.where(relax.const(np.eye(size, dtype=bool), "bool"), wide, zero)


def convert_matrix_set_diag(converter: Any, op: Any) -> relax.Expr:
    """Convert MATRIX_SET_DIAG(x, d): d replaces the diagonal."""
    data, diagonal = operands(converter, op)
    *_, rows, columns = find_shape(data)
    mask = relax.const(np.eye(rows, columns, dtype=bool), "bool")
    if rows > columns:
        pads = [0] * (2 * len(find_shape(diagonal)) - 1) + [rows - columns]
        diagonal = converter.bb.emit(relax.op.nn.pad(diagonal, pads))
    wide = converter.bb.emit(relax.op.expand_dims(diagonal, [-1]))
    return relax.op.where(mask, wide, data)


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


def convert_resize_nearest(converter: Any, op: Any) -> relax.Expr:
    """Convert RESIZE_NEAREST_NEIGHBOR. With aligned corners, TFLite rounds halves up and TVM does
    not.
    """
    options = read_options(op, "ResizeNearestNeighborOptions")
    if not options.AlignCorners():
        return converter.convert_resize_nearest_neighbor(op)
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    for axis, size in zip((1, 2), read_constant(converter, op, 1).tolist(), strict=True):
        count = find_shape(data)[axis]
        scale = np.float32((count - 1) / (size - 1) if size > 1 else count / size)
        half = 0.5 if options.HalfPixelCenters() else 0
        at = (np.arange(size, dtype="float32") + np.float32(half)) * scale
        index = np.clip(np.floor(at + np.float32(0.5)), 0, count - 1).astype("int32")
        data = converter.bb.emit(relax.op.take(data, relax.const(index, "int32"), axis=axis))
    return data


def convert_resize_bilinear(converter: Any, op: Any) -> relax.Expr:
    """Convert RESIZE_BILINEAR. With aligned corners, TVM divides by the size less 1. Where that is
    0, TFLite takes the first element, which is also the first of two aligned ones.
    """
    sizes = read_constant(converter, op, 1).tolist()
    if 1 not in sizes or not read_options(op, "ResizeBilinearOptions").AlignCorners():
        return converter.convert_resize_bilinear(op)
    (data, _), (result,) = converter.get_input_tensors(op), converter.get_output_tensors(op)
    value, emit = converter.get_tensor_expr(data), converter.bb.emit
    if data.qnn_params:
        value = emit(converter.dequantize(value, data))
    wide = tuple(max(2, size) for size in sizes)
    value = emit(relax.op.image.resize2d(value, wide, None, "NHWC", "linear", "align_corners", ""))
    value = emit(relax.op.strided_slice(value, [1, 2], [0, 0], sizes))
    return converter.quantize(value, result) if result.qnn_params else value


def convert_suppression(converter: Any, op: Any) -> relax.Expr:
    """Convert NON_MAX_SUPPRESSION_V4 and V5. After the selected boxes come zeros, in TVM -1."""
    bb, is_fourth = converter.bb, converter.kind == "NON_MAX_SUPPRESSION_V4"
    results = bb.emit(converter.convert_nms_v4(op) if is_fourth else converter.convert_nms_v5(op))
    *rows, number = [bb.emit(results[at]) for at in range(op.OutputsLength())]
    places = relax.const(np.arange(find_shape(rows[0])[0], dtype="int32"), "int32")
    is_row = bb.emit(relax.op.less(places, number))
    zeros = [relax.const(0, tensor_dtype(row)) for row in rows]
    rows = [relax.op.where(is_row, row, zero) for row, zero in zip(rows, zeros, strict=True)]
    return relax.Tuple([*(bb.emit(row) for row in rows), number])


def convert_dequantize(converter: Any, op: Any) -> relax.Expr:
    """Convert DEQUANTIZE: float16 -> float32, and integers -> dequantize.

    float16 constants become constants, also those made by DENSIFY. Dequantize of an integer
    constant stays an operator. TVM expects float16 to be a plain constant, and integers to be a
    run-time value.
    """
    (data,) = converter.get_input_tensors(op)
    value = converter.get_tensor_expr(data)
    if converter.get_tensor_type_str(data.tensor.Type()) != "float16":
        return converter.dequantize(value, data)
    array = constant_value(value)
    if array is None:
        return relax.op.astype(value, "float32")
    return relax.const(array.astype("float32"), "float32")


def convert_prelu(converter: Any, op: Any) -> relax.Expr:
    """Convert PRELU.

    One slope per channel becomes R.nn.prelu(x, slopes) along its axis, where TVM flattens all
    values. One slope becomes R.nn.leakyrelu. Other slopes become max(x, 0) + a * min(x, 0).
    """
    data, slopes = operands(converter, op)
    array = constant_value(slopes)
    wide = [] if array is None else [at for at, n in enumerate(array.shape[::-1]) if n > 1]
    if array is not None and not wide:
        return relax.op.nn.leakyrelu(data, float(array.item()))
    if array is not None and len(wide) == 1:
        row = relax.const(array.ravel(), str(array.dtype))
        return relax.op.nn.prelu(data, row, data.ty.ndim - 1 - wide[0])
    bb, zero = converter.bb, relax.const(0.0, str(data.ty.dtype))
    below = bb.emit(relax.op.multiply(bb.emit(relax.op.minimum(data, zero)), slopes))
    return relax.op.add(bb.emit(relax.op.nn.relu(data)), below)


def refuse_random(converter: Any, op: Any) -> relax.Expr:
    """Raise Refusal: no two runs would have the same result."""
    raise Refusal("it draws random numbers", "Make them an input of the model")


#: Converts an operator, given the converter and the operator.
CUSTOM_OPERATORS: dict[str, Callable[[Any, Any], relax.Expr | None]] = {
    "Convolution2DTransposeBias": convert_transpose_conv_bias,
}

OPERATORS: dict[str, Callable[[Any, Any], relax.Expr | None]] = {
    "ARG_MAX": partial(convert_arg, relax.op.argmax),
    "ARG_MIN": partial(convert_arg, relax.op.argmin),
    "BATCH_MATMUL": convert_batch_matmul,
    "BATCH_TO_SPACE_ND": convert_batch_to_space,
    "BROADCAST_TO": convert_broadcast_to,
    "BUCKETIZE": convert_bucketize,
    "CAST": convert_cast,
    "CUMSUM": convert_cumsum,
    "DEQUANTIZE": convert_dequantize,
    "DYNAMIC_UPDATE_SLICE": convert_update,
    "EMBEDDING_LOOKUP": convert_embedding_lookup,
    "EXPAND_DIMS": convert_expand_dims,
    "FILL": convert_fill,
    "FULLY_CONNECTED": convert_fully_connected,
    "GATHER": convert_gather,
    "GATHER_ND": convert_gather_nd,
    "GELU": convert_gelu,
    **{
        kind: partial(convert_reduce, reduce)
        for kind, reduce in {
            "MEAN": relax.op.mean,
            "REDUCE_ALL": relax.op.min,
            "REDUCE_ANY": relax.op.max,
            "REDUCE_MAX": relax.op.max,
            "REDUCE_MIN": relax.op.min,
            "REDUCE_PROD": relax.op.prod,
            "SUM": relax.op.sum,
        }.items()
    },
    **dict.fromkeys(SEGMENTS, convert_segments),
    "MATRIX_DIAG": convert_matrix_diag,
    "MATRIX_SET_DIAG": convert_matrix_set_diag,
    "MIRROR_PAD": convert_mirror_pad,
    "MULTINOMIAL": refuse_random,
    "NON_MAX_SUPPRESSION_V4": convert_suppression,
    "NON_MAX_SUPPRESSION_V5": convert_suppression,
    "PAD": convert_pad,
    "PADV2": convert_pad,
    "PRELU": convert_prelu,
    "RANDOM_STANDARD_NORMAL": refuse_random,
    "RANDOM_UNIFORM": refuse_random,
    "RESHAPE": convert_reshape,
    "RESIZE_BILINEAR": convert_resize_bilinear,
    "RESIZE_NEAREST_NEIGHBOR": convert_resize_nearest,
    "REVERSE_V2": convert_reverse,
    "RFFT2D": convert_rfft2d,
    "RIGHT_SHIFT": convert_shift,
    "SCATTER_ND": convert_scatter_nd,
    "SELECT": convert_select,
    "SELECT_V2": convert_select,
    "SHAPE": convert_shape,
    "SOFTMAX": convert_softmax,
    "SPACE_TO_BATCH_ND": convert_space_to_batch,
    "SPARSE_TO_DENSE": convert_sparse_to_dense,
    "SPLIT": convert_split,
    "SPLIT_V": convert_split_v,
    "SQUEEZE": convert_squeeze,
    "STRIDED_SLICE": convert_strided_slice,
    "TOPK_V2": convert_topk,
    "TRANSPOSE_CONV": convert_transpose_conv,
    "UNPACK": convert_unpack,
    "WHERE": refuse_where,
    **CUSTOM_OPERATORS,
}
