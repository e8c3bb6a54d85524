"""ONNX reader: gathers, scatters and slices.

Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from relayquant.formats.readers.indices import count_from_start, gather_elements, scatter_elements
from relayquant.formats.readers.onnx.operators.broadcast import is_same, list_sizes
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.grouped import gather_rows
from relayquant.formats.readers.onnx.operators.sizes import (
    emit_item,
    emit_sizes,
    known_shape,
    slice_value,
)
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype


def convert_gather(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Gather with constant indices to R.take. Negative indices are counted from the end
    here, not at run time. For rows of a grouped weight, only these rows are read.
    """
    grouped = gather_rows(bb, inputs, attrs)
    if grouped is not None:
        return grouped
    data, indices = inputs[0], constant_value(inputs[1])
    if indices is None or isinstance(data, GenericConst | relax.ShapeExpr):
        return None
    shape = known_shape(data)
    axis = int(attrs.get("axis", 0)) % len(shape)
    size = shape[axis]
    if isinstance(size, str):
        if (indices < 0).any():
            return None
    elif ((indices < -size) | (indices >= size)).any():
        raise Refusal(f"indices {indices.tolist()} leave axis {axis} of size {size}")
    else:
        indices = np.where(indices < 0, indices + size, indices)
    return relax.op.take(data, relax.const(indices.astype("int64"), "int64"), axis)


def convert_slice(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Slice. Below opset 10, where bounds are attributes, they become inputs."""
    if opset >= 10:
        return slice_value(bb, inputs)
    axes = attrs.get("axes", range(len(attrs["starts"])))
    rows = (attrs["starts"], attrs["ends"], axes)
    bounds = (relax.const(np.array(list(row), "int64"), "int64") for row in rows)
    return slice_value(bb, [inputs[0], *bounds])


def convert_gather_elements(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert GatherElements. Its index may be smaller than the data along the other axes."""
    data, index = inputs
    axis = int(attrs.get("axis", 0)) % data.ty.ndim
    return gather_elements(bb, data, count_along(bb, data, index, axis), axis)


def convert_scatter_elements(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr | None:
    """Convert ScatterElements with fewer indices than elements along another axis, where TVM writes
    to wrong places. Equal sizes are left to TVM.
    """
    data, index, updates = inputs
    axis = int(attrs.get("axis", 0)) % data.ty.ndim
    sizes = list_sizes(index)
    pairs = enumerate(zip(list_sizes(data), sizes, strict=True))
    if all(is_same(*pair) for at, pair in pairs if at != axis):
        return None
    kind = attrs.get("reduction", b"none").decode()
    index = count_along(bb, data, index, axis)
    reduction = "update" if kind == "none" else kind
    return scatter_elements(bb, data, index, sizes, updates, axis, reduction)


def count_along(bb: Builder, data: relax.Expr, index: relax.Expr, axis: int) -> relax.Expr:
    """Count an index from the start of an axis of the data, also of symbolic size."""
    size = list_sizes(data)[axis]
    if not isinstance(size, int):
        dtype = tensor_dtype(index)
        size = bb.emit(relax.op.astype(emit_item(bb, emit_sizes(bb, data), axis), dtype))
    return count_from_start(bb, index, size)


def convert_reverse_sequence(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert ReverseSequence: of each sequence, the first `length` steps are taken backwards."""
    data, lengths = inputs
    batch, time = int(attrs.get("batch_axis", 1)), int(attrs.get("time_axis", 0))
    if sorted((batch, time)) != [0, 1]:
        raise Refusal(f"its batch_axis is {batch}, its time_axis {time}; allowed: 0 and 1")
    order = [batch, time, *range(2, data.ty.ndim)]
    data = bb.emit(relax.op.permute_dims(data, order))
    steps = bb.emit(relax.op.arange(0, data.ty.shape.values[1], 1, "int64"))
    lengths = bb.emit(relax.op.expand_dims(lengths, 1))
    mirrored = bb.emit(
        relax.op.subtract(lengths, bb.emit(relax.op.add(steps, relax.const(1, "int64"))))
    )
    is_inside = bb.emit(relax.op.less(steps, lengths))
    places = bb.emit(relax.op.where(is_inside, mirrored, steps))
    places = bb.emit(relax.op.expand_dims(places, 2))
    value = bb.emit(relax.op.gather_nd(data, places, batch_dims=1))
    return relax.op.permute_dims(value, order)
