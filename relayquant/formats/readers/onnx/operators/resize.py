"""ONNX reader: Resize of every opset, and Upsample.

This module reads sizes and attributes. `readers.resize` does the rest. Each function is a `Convert`
as described in `relayquant.formats.readers.onnx.operators.table`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import read_sizes
from relayquant.formats.readers.open_resize import OpenAxis, emit_open_resize, scale_axis
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.formats.readers.resize import SIMPLE, Axis, Sampling, emit_resize, read_shape
from relayquant.ir.rewrite.graph import constant_value


def convert_upsample(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Upsample (opset 7 and 9): Resize of opset 10 with scales of at least 1."""
    scales = attrs.get("scales")
    if scales is None:
        return convert_resize(bb, inputs[:2], attrs, 10)
    return convert_resize(bb, [inputs[0], relax.const(list(scales), "float32")], attrs, 10)


def convert_resize(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Resize to R.image.resize2d, or to R.take and R.matmul along each axis.

    Opset 10 has neither roi nor sizes. Its coordinates are asymmetric and its nearest_mode is
    `SIMPLE`.

    Raises:
        Refusal: its sizes are data of the model, integer data would be interpolated, or a symbolic
            size is resized in a way that `emit_open_resize` refuses.
    """
    data = inputs[0]
    if opset < 11:
        scales = inputs[1]
        roi = sizes = None
        sampling = Sampling(_text(attrs, "mode", "nearest"), "asymmetric", SIMPLE)
    else:
        roi, scales, sizes = (*inputs[1:], None, None, None)[:3]
        sampling = Sampling(
            _text(attrs, "mode", "nearest"),
            _text(attrs, "coordinate_transformation_mode", "half_pixel"),
            _text(attrs, "nearest_mode", "round_prefer_floor"),
            float(attrs.get("cubic_coeff_a", -0.75)),
            bool(attrs.get("exclude_outside", 0)),
            float(attrs.get("extrapolation_value", 0.0)),
            bool(attrs.get("antialias", 0)),
        )
    shape = read_shape(data)
    axes = [int(axis) % len(shape) for axis in attrs.get("axes", range(len(shape)))]
    factors = read_floats(scales, "scales") if sizes is None else None
    wanted, policy = None, _text(attrs, "keep_aspect_ratio_policy", "stretch")
    if factors is None or not len(factors):
        wanted = read_sizes(sizes) if sizes is not None else None
        if wanted is None:
            raise NotConstant("sizes")
    opened = _open_axes(shape, axes, factors, wanted)
    if policy == "stretch" and any(axis.is_moved and axis.is_open for axis in opened):
        return emit_open_resize(bb, data, opened, sampling)
    if wanted is not None and policy != "stretch":
        found = _keep_aspect_ratio(shape, axes, wanted, policy)
    else:
        found = [Axis(one.at, one.size, one.result, one.scale) for one in opened if not one.is_open]
    if sampling.coordinates == "tf_crop_and_resize":
        bounds = read_floats(roi, "roi").reshape(2, -1)
        parts = dict(zip(axes, bounds.T, strict=True))
        found = [replace(one, roi=(*map(float, parts[one.at]),)) for one in found]
    return emit_resize(bb, data, found, sampling)


def read_floats(value: Any, what: str) -> np.ndarray:
    """Read a constant operand of floats.

    Raises:
        Refusal: it is computed at run time.
    """
    if value is None:
        return np.zeros(0)
    array = constant_value(value)
    if array is None:
        raise NotConstant(what)
    return array.astype("float64").ravel()


def _text(attrs: dict[str, Any], name: str, default: str) -> str:
    value = attrs.get(name, default)
    return value.decode() if isinstance(value, bytes) else value


def _open_axes(
    shape: list[Any], axes: list[int], factors: np.ndarray | None, wanted: list[Any] | None
) -> list[OpenAxis]:
    """List the axes, with numbers or symbolic sizes, that are resized by `factors` or to the
    `wanted` sizes.
    """
    if wanted is None:
        pairs = zip(axes, () if factors is None else factors, strict=True)
        return [scale_axis(at, shape[at], float(factor)) for at, factor in pairs]
    return [OpenAxis(at, shape[at], result) for at, result in zip(axes, wanted, strict=True)]


def _keep_aspect_ratio(
    shape: list[Any], axes: list[int], wanted: list[Any], policy: str
) -> list[Axis]:
    """Compute the axes from sizes, with one scale for all axes."""
    if policy not in ("not_larger", "not_smaller"):
        raise Refusal(
            f"keep_aspect_ratio_policy is {policy!r}; allowed: stretch, not_larger, not_smaller"
        )
    sizes = [_fixed(shape, at) for at in axes]
    scales = [result / size for result, size in zip(wanted, sizes, strict=True)]
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [
        Axis(at, size, math.floor(scale * size + 0.5), scale)
        for at, size in zip(axes, sizes, strict=True)
    ]


def _fixed(shape: list[Any], at: int) -> int:
    if not isinstance(shape[at], int):
        raise Refusal(
            f"axis {at} has the symbolic size {shape[at]}; fix that dimension with shapes="
        )
    return shape[at]
