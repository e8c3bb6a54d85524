"""Resizing as ONNX defines it, for all readers.

A resize that R.image.resize2d computes becomes this operator. Any other is done axis by axis:
nearest as R.take with constant indices, linear and cubic as a product with a constant matrix of the
weights of each output position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx

from relayquant.formats.readers.refusal import Refusal

#: Coordinate modes of R.image.resize2d, for results whose size is exactly size times scale.
RESIZE2D_MODES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")

#: nearest_mode of ONNX -> position of the element for a coordinate
NEAREST = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}

#: Mode of opset 10: upsampling repeats elements, downsampling takes the next element.
SIMPLE = "simple"


@dataclass(frozen=True)
class Axis:
    """How one axis is resized.

    Attributes:
        at: The axis.
        size: Size before.
        result: Size after.
        scale: Result size per element of the data, about `result / size`.
        roi: The part that is resized, as fractions of the axis (tf_crop_and_resize).
    """

    at: int
    size: int
    result: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Sampling:
    """The attributes of Resize that define positions, with ONNX's names."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    extrapolation_value: float = 0.0
    antialias: bool = False


def emit_resize(
    bb: relax.BlockBuilder, data: relax.Expr, axes: Sequence[Axis], sampling: Sampling
) -> relax.Expr:
    """Emit R.image.resize2d if it computes this resize, else R.take and R.matmul along each axis.

    Raises:
        Refusal: integer data would be interpolated.
    """
    shape = read_shape(data)
    changed = [
        axis
        for axis in axes
        if axis.size != axis.result or axis.roi != (0.0, 1.0) or axis.scale != 1.0
    ]
    if not changed:
        return data
    if fits_resize2d(shape, changed, sampling):
        results = {axis.at: axis.result for axis in changed}
        return emit_resize2d(data, [results.get(at, shape[at]) for at in (2, 3)], sampling)
    return resize_axes(bb, data, changed, sampling)


def read_shape(data: relax.Expr) -> list[int | Any]:
    """Return the sizes of a tensor. A size that is known at run time only is an expression."""
    return [int(size) if isinstance(size, tirx.IntImm) else size for size in data.ty.shape.values]


def fits_resize2d(shape: Sequence[Any], axes: list[Axis], sampling: Sampling) -> bool:
    """Return whether R.image.resize2d computes exactly this resize."""
    if sampling.antialias or sampling.exclude_outside or sampling.coordinates not in RESIZE2D_MODES:
        return False
    if len(shape) != 4:
        return False
    if any(axis.at < 2 or axis.size * axis.scale != axis.result for axis in axes):
        return False
    if sampling.coordinates == "align_corners":
        # Its formula divides by (result size - 1) on both axes.
        results = {axis.at: axis.result for axis in axes}
        sizes = [results.get(at, shape[at]) for at in (2, 3)]
        if any(not isinstance(size, int) or size == 1 for size in sizes):
            return False
    if sampling.mode == "nearest":
        return repeats_elements(sampling) and all(axis.scale.is_integer() for axis in axes)
    return sampling.mode == "linear"


def repeats_elements(sampling: Sampling) -> bool:
    """Return whether the nearest elements for integer scales are each one repeated: the centres of
    the copies lie within half an element of the original.
    """
    if sampling.coordinates == "asymmetric":
        return sampling.nearest_mode in ("floor", SIMPLE)
    is_middle = sampling.coordinates in ("half_pixel", "pytorch_half_pixel")
    return is_middle and sampling.nearest_mode.startswith("round_")


def emit_resize2d(data: relax.Expr, size: list[Any], sampling: Sampling) -> relax.Expr:
    """Make an R.image.resize2d to `size` (height, width). Requires `fits_resize2d`, or a linear or
    cubic resize by the quotient of the sizes.
    """
    is_nearest = sampling.mode == "nearest"
    return relax.op.image.resize2d(
        data,
        size=relax.ShapeExpr(size),
        roi=[0.0, 0.0, 0.0, 0.0],
        layout="NCHW",
        method="nearest_neighbor" if is_nearest else sampling.mode,
        coordinate_transformation_mode="asymmetric" if is_nearest else sampling.coordinates,
        rounding_method="floor" if is_nearest else "",
        cubic_alpha=sampling.cubic_coeff_a,
    )


def resize_axes(
    bb: relax.BlockBuilder, data: relax.Expr, axes: list[Axis], sampling: Sampling
) -> relax.Expr:
    """Resize one axis after the other."""
    dtype = str(data.ty.dtype)
    if sampling.mode != "nearest" and not dtype.startswith("float"):
        raise Refusal(f"mode {sampling.mode!r} of {dtype} data; supported: floats")
    rank = len(data.ty.shape)
    for axis in axes:
        coordinates, outside = find_coordinates(axis, sampling.coordinates)
        if sampling.mode == "nearest":
            # Snap coordinates that are a rounding error away from a tie or an element.
            exact = np.round(coordinates * 2**20) / 2**20
            rule = sampling.nearest_mode
            if rule == SIMPLE:
                rule = "floor" if axis.scale >= 1 else "ceil"
            picked = np.clip(NEAREST[rule](exact), 0, axis.size - 1)
            data = bb.emit(
                relax.op.take(data, relax.const(picked.astype("int64"), "int64"), axis.at)
            )
        else:
            weights = find_weights(axis, coordinates, sampling)
            last = [at for at in range(rank) if at != axis.at] + [axis.at]
            moved = data if axis.at == rank - 1 else bb.emit(relax.op.permute_dims(data, last))
            matrix = relax.const(np.ascontiguousarray(weights.T.astype(dtype)), dtype)
            data = bb.emit(relax.op.matmul(moved, matrix))
            if axis.at != rank - 1:
                back = [*range(axis.at), rank - 1, *range(axis.at, rank - 1)]
                data = bb.emit(relax.op.permute_dims(data, back))
        if outside.any():
            form = [1] * rank
            form[axis.at] = axis.result
            mask = relax.const(outside.reshape(form), "bool")
            fill = relax.const(sampling.extrapolation_value, dtype)
            data = bb.emit(relax.op.where(mask, fill, data))
    return data


def find_coordinates(axis: Axis, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (coordinate in the data, whether it is outside the data) of each position of the
    result.

    Formulas: ONNX, operator Resize, attribute coordinate_transformation_mode.
    """
    at = np.arange(axis.result, dtype="float64")
    # The reference evaluator uses the size of the result before it is rounded.
    exact = axis.scale * axis.size
    outside = np.zeros(axis.result, bool)
    if mode == "asymmetric":
        return at / axis.scale, outside
    if mode == "align_corners":
        step = 0.0 if exact == 1 else (axis.size - 1) / (exact - 1)
        return at * step, outside
    if mode == "tf_crop_and_resize":
        begin, end = axis.roi
        last = axis.size - 1
        if exact == 1:
            found = np.full(axis.result, (end - begin) * last / 2)
        else:
            found = at * (end - begin) * last / (exact - 1)
        found = found + begin * last
        return found, (found < 0) | (found > last)
    half = (at + 0.5) / axis.scale - 0.5
    if mode == "half_pixel":
        return half, outside
    if mode == "pytorch_half_pixel":
        return (half if exact != 1 else np.full(axis.result, -0.5)), outside
    if mode == "half_pixel_symmetric":
        return half + axis.size / 2 * (1 - axis.result / exact), outside
    allowed = (*RESIZE2D_MODES, "half_pixel_symmetric", "tf_crop_and_resize")
    raise Refusal(f"coordinate_transformation_mode is {mode!r}; allowed: {', '.join(allowed)}")


def find_weights(axis: Axis, coordinates: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the weights, float64 [result, size]: how much each element of the data counts for each
    position.

    Elements outside the data repeat the first or last element. With exclude_outside they do not
    count. With antialias, shrinking stretches the kernel by 1 / scale.
    """
    if sampling.mode not in ("linear", "cubic"):
        raise Refusal(f"mode is {sampling.mode!r}; allowed: nearest, linear, cubic")
    reach = 1.0 if sampling.mode == "linear" else 2.0
    scale = min(axis.scale, 1.0) if sampling.antialias else 1.0
    first = np.floor(coordinates - reach / scale).astype("int64")
    window = np.arange(math.ceil(2 * reach / scale) + 2)
    elements = first[:, None] + window
    distance = np.abs(elements - coordinates[:, None]) * scale
    if sampling.mode == "linear":
        weights = np.clip(1 - distance, 0, None)
    else:
        weights = evaluate_cubic(distance, sampling.cubic_coeff_a)
    if sampling.exclude_outside:
        weights = np.where((elements < 0) | (elements >= axis.size), 0, weights)
    if sampling.exclude_outside or sampling.antialias:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    matrix = np.zeros((axis.result, axis.size))
    rows = np.broadcast_to(np.arange(axis.result)[:, None], elements.shape)
    np.add.at(matrix, (rows, np.clip(elements, 0, axis.size - 1)), weights)
    return matrix


def evaluate_cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Evaluate the kernel of cubic convolution (Keys 1981) with parameter a."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))
