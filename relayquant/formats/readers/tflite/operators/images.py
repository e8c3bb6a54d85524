"""TensorFlow Lite reader: images of another size, and boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.tflite.operators.reading import (
    find_shape,
    read_constant,
    read_real,
    store_real,
)
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import tensor_dtype


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
    value, emit = read_real(converter, converter.get_input_tensors(op)[0]), converter.bb.emit
    wide = tuple(max(2, size) for size in sizes)
    value = emit(relax.op.image.resize2d(value, wide, None, "NHWC", "linear", "align_corners", ""))
    value = emit(relax.op.strided_slice(value, [1, 2], [0, 0], sizes))
    return store_real(converter, op, value)


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
