"""ONNX reader: Resize of every opset, and Upsample.

This module reads sizes and attributes. `readers.resize` does the rest. Each function is a `Convert`
as described in `relayquant.formats.readers.onnx.operators.table`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.onnx.graph.symbolic import divide
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import read_sizes
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.formats.readers.resize import (
    SIMPLE,
    Axis,
    Sampling,
    emit_resize,
    emit_resize2d,
    fits_resize2d,
    read_shape,
)
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
        Refusal: its sizes are computed at run time, an axis that is not scaled by an integer has a
            symbolic size, or integer data would be interpolated.
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
    if factors is None or not len(factors):
        wanted = read_sizes(sizes) if sizes is not None else None
        if wanted is None:
            raise NotConstant("sizes")
        policy = _text(attrs, "keep_aspect_ratio_policy", "stretch")
        multiples = _find_multiples(shape, axes, wanted) if policy == "stretch" else None
        if multiples is None:
            found = _axes_of_sizes(shape, axes, wanted, policy)
        else:
            found = _axes_of_scales(data, shape, axes, multiples, sampling)
            if isinstance(found, relax.Expr):
                return found
    else:
        found = _axes_of_scales(data, shape, axes, factors, sampling)
        if isinstance(found, relax.Expr):
            return found
    if sampling.coordinates == "tf_crop_and_resize":
        bounds = read_floats(roi, "roi")
        half = len(bounds) // 2
        found = [
            Axis(one.at, one.size, one.result, one.scale, (bounds[k], bounds[half + k]))
            for k, one in enumerate(found)
        ]
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


def _find_multiples(shape: list[Any], axes: list[int], wanted: list[Any]) -> np.ndarray | None:
    """Return the factors by which sizes grow, if some sizes are symbolic and all factors are
    integers. None otherwise.
    """
    sizes = [shape[at] for at in axes]
    if all(isinstance(size, int) for size in sizes):
        return None
    factors = [divide(*pair) for pair in zip(wanted, sizes, strict=True)]
    if not all(isinstance(factor, int) for factor in factors):
        return None
    return np.array(factors, "float64")


def _axes_of_sizes(shape: list[Any], axes: list[int], wanted: list[Any], policy: str) -> list[Axis]:
    """Compute the axes from sizes. keep_aspect_ratio_policy uses one scale for all axes."""
    sizes = [_fixed(shape, at) for at in axes]
    scales = [result / size for result, size in zip(wanted, sizes, strict=True)]
    if policy == "stretch":
        return [
            Axis(at, size, int(result), scale)
            for at, size, result, scale in zip(axes, sizes, wanted, scales, strict=True)
        ]
    if policy not in ("not_larger", "not_smaller"):
        raise Refusal(
            f"keep_aspect_ratio_policy is {policy!r}; allowed: stretch, not_larger, not_smaller"
        )
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [
        Axis(at, size, math.floor(scale * size + 0.5), scale)
        for at, size in zip(axes, sizes, strict=True)
    ]


def _axes_of_scales(
    data: relax.Expr,
    shape: list[Any],
    axes: list[int],
    factors: np.ndarray,
    sampling: Sampling,
) -> list[Axis] | relax.Expr:
    """Compute the axes from scales. A picture of symbolic size may only grow by integers."""
    moved = [(at, f) for at, f in zip(axes, factors, strict=True) if f != 1.0]
    if any(not isinstance(shape[at], int) for at, _ in moved):
        fake = [Axis(at, 1, int(f), float(f)) for at, f in moved if float(f).is_integer()]
        if len(fake) == len(moved) and fits_resize2d(shape, fake, sampling):
            by = {axis.at: axis.result for axis in fake}
            return emit_resize2d(data, [shape[at] * by.get(at, 1) for at in (2, 3)], sampling)
    return [
        Axis(at, _fixed(shape, at), math.floor(_fixed(shape, at) * f), float(f))
        for at, f in zip(axes, factors, strict=True)
        if f != 1.0 or isinstance(shape[at], int)
    ]


def _fixed(shape: list[Any], at: int) -> int:
    if not isinstance(shape[at], int):
        raise Refusal(
            f"axis {at} has the symbolic size {shape[at]}; fix that dimension with shapes="
        )
    return shape[at]
