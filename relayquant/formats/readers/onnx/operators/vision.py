"""ONNX reader: boxes, regions and blocks of pixels.

Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import emit_shape
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import constant_value


def convert_space_to_depth(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr | None:
    """Convert SpaceToDepth in mode CRD (opset 28): channels outermost, the reverse of
    DepthToSpace.
    """
    mode = attrs.get("mode", b"DCR")
    if mode == b"DCR":
        return None
    if mode != b"CRD":
        raise Refusal(f"mode is {mode.decode()!r}; allowed: DCR, CRD")
    (data,) = inputs
    block = int(attrs["blocksize"])
    batch, channels, height, width = data.ty.shape.values
    rows, columns = height // block, width // block
    split = bb.emit(relax.op.reshape(data, (batch, channels, rows, block, columns, block)))
    moved = bb.emit(relax.op.permute_dims(split, [0, 1, 3, 5, 2, 4]))
    return relax.op.reshape(moved, (batch, channels * block * block, rows, columns))


def convert_roi_align(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert RoiAlign(x, regions, images) to R.vision.roi_align, whose `aligned` only allows
    regions of less than a pixel. "half_pixel" also moves them by half a pixel of x; TVM's frontend
    moves them before they are scaled. A region that is not wider or higher than 0 has no samples if
    their number follows from its size, and then only zeros.

    Raises:
        Refusal: mode is max. ONNX takes the maximum of the weighted neighbours of a sample, TVM the
            maximum of the interpolated samples.
    """
    mode = attrs.get("mode", b"avg")
    if mode != b"avg":
        raise Refusal(f"mode is {mode.decode()!r}; supported: avg")
    data, regions, images = inputs
    scale, dtype = float(attrs.get("spatial_scale", 1.0)), str(regions.ty.dtype)
    default = b"half_pixel" if opset >= 16 else b"output_half_pixel"
    place = attrs.get("coordinate_transformation_mode", default)
    if place not in (b"half_pixel", b"output_half_pixel"):
        raise Refusal(
            f"coordinate_transformation_mode is {place.decode()!r}; allowed: half_pixel, "
            "output_half_pixel"
        )
    is_moved = place == b"half_pixel"
    if is_moved:
        regions = bb.emit(relax.op.subtract(regions, relax.const(0.5 / scale, dtype)))
    samples, is_filled = int(attrs.get("sampling_ratio", 0)), None
    if is_moved and samples <= 0:
        starts, ends = (
            bb.emit(relax.op.strided_slice(regions, [1], [at], [at + 2])) for at in (0, 2)
        )
        is_filled = bb.emit(relax.op.min(bb.emit(relax.op.greater(ends, starts)), 1, True))
        regions = bb.emit(relax.op.where(is_filled, regions, relax.const([0, 0, 1, 1], dtype)))
    images = bb.emit(relax.op.astype(bb.emit(relax.op.expand_dims(images, 1)), dtype))
    value = relax.op.vision.roi_align(
        data,
        bb.emit(relax.op.concat([images, regions], 1)),
        (int(attrs.get("output_height", 1)), int(attrs.get("output_width", 1))),
        scale,
        samples,
        aligned=is_moved,
    )
    if is_filled is None:
        return value
    mask = bb.emit(relax.op.expand_dims(is_filled, [2, 3]))
    return relax.op.where(mask, bb.emit(value), relax.const(0.0, dtype))


def convert_non_max_suppression(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert NonMaxSuppression to R.vision.all_class_non_max_suppression. Its first `count` rows
    are the selected boxes.

    Raises:
        Refusal: a limit is computed at run time.
    """
    boxes, scores, most, overlap, least = (*inputs, None, None, None)[:5]
    limits = []
    for name, operand, default in (
        ("max_output_boxes_per_class", most, 0),
        ("iou_threshold", overlap, 0.0),
        ("score_threshold", least, -np.inf),
    ):
        value = default if operand is None else constant_value(operand)
        if value is None:
            raise Refusal(f"its {name} is computed at run time; supported: constants")
        limits.append(np.asarray(value).item())
    if attrs.get("center_point_box", 0):
        center = bb.emit(relax.op.strided_slice(boxes, [2], [0], [2]))
        size = bb.emit(relax.op.strided_slice(boxes, [2], [2], [4]))
        half = bb.emit(relax.op.multiply(size, relax.const(0.5, str(boxes.ty.dtype))))
        corners = [bb.emit(op(center, half)) for op in (relax.op.subtract, relax.op.add)]
        boxes = bb.emit(relax.op.concat(corners, axis=2))
    else:
        # Two opposite corners in any order -> the lower and the upper corner.
        one = bb.emit(relax.op.strided_slice(boxes, [2], [0], [2]))
        other = bb.emit(relax.op.strided_slice(boxes, [2], [2], [4]))
        corners = [bb.emit(op(one, other)) for op in (relax.op.minimum, relax.op.maximum)]
        boxes = bb.emit(relax.op.concat(corners, axis=2))
    found = bb.emit(
        relax.op.vision.all_class_non_max_suppression(
            boxes,
            scores,
            relax.const(int(limits[0]), "int64"),
            # TVM drops boxes whose overlap equals the threshold, ONNX only those above it.
            relax.const(float(np.nextafter(np.float32(limits[1]), np.float32(2))), "float32"),
            relax.const(float(max(limits[2], np.finfo("float32").min)), "float32"),
            output_format="onnx",
        )
    )
    rows, count = (bb.emit(relax.TupleGetItem(found, at)) for at in (0, 1))
    (symbol,) = emit_shape(bb, count, 1).values
    return relax.op.take(rows, bb.emit(relax.op.arange(0, symbol, 1, "int64")), axis=0)
