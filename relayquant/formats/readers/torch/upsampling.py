"""PyTorch reader: upsampling, which PyTorch also calls interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.open_resize import OpenAxis, emit_open_resize, scale_axis
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.resize import (
    Axis,
    Sampling,
    emit_resize,
    find_coordinates,
    find_weights,
    read_shape,
)
from relayquant.formats.readers.torch.arguments import read_arguments
from relayquant.ir.rewrite.graph import tensor_dtype

#: operator of PyTorch -> (mode of Resize, antialias)
UPSAMPLES = {
    "upsample_nearest2d.vec": ("nearest", False),
    "upsample_bilinear2d.vec": ("linear", False),
    "upsample_bicubic2d.vec": ("cubic", False),
    "_upsample_bilinear2d_aa.default": ("linear", True),
    "_upsample_bicubic2d_aa.default": ("cubic", True),
}
#: the same, of operators that PyTorch decomposes where all sizes are fixed
OPEN_UPSAMPLES = {
    **{f"upsample_nearest{n}d.vec": ("nearest", False) for n in (1, 3)},
    **{f"_upsample_nearest_exact{n}d.vec": ("nearest", False) for n in (1, 2, 3)},
    "upsample_linear1d.vec": ("linear", False),
    "upsample_trilinear3d.vec": ("linear", False),
}


def convert_upsample(node: Any, importer: Any) -> relax.Expr:
    """Convert upsample_{nearest, bilinear, bicubic}2d(x, size or scales) and their like in the same
    way as ONNX's Resize.

    A given scale is used for the coordinates, not the ratio of the rounded sizes. An antialiased
    kernel ends at the border, and its cubic parameter is a = -0.5, without antialias a = -0.75.

    Bytes are interpolated with integer weights, see `resize_bytes`.

    Raises:
        Refusal: align_corners is set with antialias, or a symbolic size is resized in a way that
            `emit_open_resize` refuses.
    """
    name = str(node.target).removeprefix("aten.")
    mode, is_antialiased = (UPSAMPLES | OPEN_UPSAMPLES)[name]
    names = [argument.name for argument in node.target._schema.arguments]
    operand, sizes = read_arguments(node, names[0], "output_size")
    if "scale_factors" in names:
        (factors,) = read_arguments(node, "scale_factors")
    else:
        factors = read_arguments(node, "scales_h", "scales_w")
    aligned = "align_corners" in names and read_arguments(node, "align_corners")[0]
    if aligned and is_antialiased:
        raise Refusal(f"{node.name} has antialias and align_corners; supported: one of them")
    data = importer.env[operand]
    axes = []
    for k, size in enumerate(read_shape(data)[2:]):
        factor = factors[k] if factors else None
        if sizes:
            given = importer.env[sizes[k]] if hasattr(sizes[k], "meta") else int(sizes[k])
            axis = OpenAxis(k + 2, size, given, factor)
        else:
            axis = scale_axis(k + 2, size, float(factor or 1.0))
        axes.append(replace(axis, factor=None) if aligned else axis)
    is_first = mode == "nearest" and "exact" not in name
    sampling = Sampling(
        mode,
        "align_corners" if aligned else "asymmetric" if is_first else "half_pixel",
        "floor" if is_first else "round_prefer_ceil",
        -0.5 if is_antialiased else -0.75,
        is_antialiased,
        antialias=is_antialiased,
    )
    if any(axis.is_moved and axis.is_open for axis in axes):
        return emit_open_resize(importer.block_builder, data, axes, sampling)
    fixed = [Axis(one.at, one.size, one.result, one.scale) for one in axes if not one.is_open]
    if mode != "nearest" and tensor_dtype(data) == "uint8":
        return resize_bytes(importer.block_builder, data, fixed, sampling)
    return emit_resize(importer.block_builder, data, fixed, sampling)


def resize_bytes(
    bb: relax.BlockBuilder, data: relax.Expr, axes: Sequence[Axis], sampling: Sampling
) -> relax.Expr:
    """Emit a linear or cubic resize of uint8 data, with PyTorch's bits: the width first, then the
    height.

    Along each axis the weights are integers of 16 bits, `weight * 2**bits`, with as many bits as
    fit. The result is rounded half up and clipped to a byte (PyTorch, UpSampleKernel.cpp).
    """
    for axis in reversed(axes):
        if axis.size == axis.result:
            continue
        coordinates, _ = find_coordinates(axis, sampling.coordinates)
        weights = find_weights(axis, coordinates, sampling)
        bits = next(
            n for n in range(23) if n == 22 or round_up(weights.max() * 2 ** (n + 1)) >= 2**15
        )
        scaled = weights * 2**bits
        matrix = np.where(scaled < 0, -round_up(-scaled), round_up(scaled)).astype("int32")
        last = [*(at for at in range(data.ty.ndim) if at != axis.at), axis.at]
        moved = bb.emit(relax.op.permute_dims(bb.emit(relax.op.astype(data, "int32")), last))
        total = bb.emit(
            relax.op.matmul(moved, relax.const(np.ascontiguousarray(matrix.T), "int32"))
        )
        half = bb.emit(relax.op.add(total, relax.const(2 ** (bits - 1), "int32")))
        value = bb.emit(relax.op.right_shift(half, relax.const(bits, "int32")))
        back = [int(at) for at in np.argsort(last)]
        value = bb.emit(relax.op.permute_dims(bb.emit(relax.op.clip(value, 0, 255)), back))
        data = bb.emit(relax.op.astype(value, "uint8"))
    return data


def round_up(value: np.ndarray) -> np.ndarray:
    """Round half up."""
    return np.floor(value + 0.5)
