"""TensorFlow Lite reader: operators that read or write elements by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.operators.reading import find_shape, operands, read_constant
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype


def check_indices(index: relax.Expr, sizes: Sequence[int]) -> None:
    """Raise Refusal for constant indices that TFLite's kernels reject at run time.

    Args:
        index: Indices. Their last axis has one entry per axis in `sizes`.
        sizes: Sizes of the axes that they select from.
    """
    array = constant_value(index)
    if array is not None and array.size and not ((array >= 0) & (array < np.array(sizes))).all():
        raise Refusal(f"its indices are {array.min()} to {array.max()}, for axes of {list(sizes)}")


def clamp_starts(converter: Any, starts: relax.Expr, last: Sequence[int]) -> relax.Expr:
    """Move starts along the axes of their last axis into 0 to `last`."""
    dtype, emit = tensor_dtype(starts), converter.bb.emit
    starts = emit(relax.op.maximum(starts, relax.const(0, dtype)))
    return emit(relax.op.minimum(starts, relax.const(np.array(last, dtype), dtype)))


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


def convert_stablehlo_gather(converter: Any, op: Any) -> relax.Expr:
    """Convert STABLEHLO_GATHER. A start outside of the axis moves to its nearest end; to TVM, it
    is an error.
    """
    data, index = converter.get_input_tensors(op)
    axes = np.atleast_1d(read_options(op, "StablehloGatherOptions").StartIndexMapAsNumpy())
    value, shape = converter.get_tensor_expr(index), find_shape(converter.get_tensor_expr(data))
    last = [shape[axis] - 1 for axis in axes.tolist()]
    with converter.replaced(index, clamp_starts(converter, value, last)):
        return converter._convert_stablehlo_gather(op)


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
    place = clamp_starts(converter, bb.emit(relax.op.astype(start, "int64")), last)
    grid = np.moveaxis(np.indices(sizes, "int64"), 0, -1)
    index = bb.emit(relax.op.add(relax.const(grid, "int64"), place))
    return relax.op.scatter_nd(data, index, update, "update")


def convert_embedding_lookup(converter: Any, op: Any) -> relax.Expr:
    """Convert EMBEDDING_LOOKUP(indices, table), with the operands in this order."""
    index, table = operands(converter, op)
    check_indices(index, find_shape(table)[:1])
    return relax.op.take(table, index, axis=0, mode="fast")


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
