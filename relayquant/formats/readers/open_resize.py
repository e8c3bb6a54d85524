"""Resizing of sizes that are known at run time only, for all readers; `resize` has fixed sizes.

A linear or cubic resize of images by the quotient of their sizes becomes R.image.resize2d. Any
other is done axis by axis, as R.take with indices that the model computes, and linear between two
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tvm import relax, tirx
from tvm.sym import Analyzer

from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.resize import (
    RESIZE2D_MODES,
    SIMPLE,
    Sampling,
    emit_resize2d,
    repeats_elements,
)
from relayquant.ir.rewrite.expressions import same_extents
from relayquant.ir.rewrite.graph import static_size, tensor_dtype

#: largest denominator of a factor by which a size is multiplied
MOST_PARTS = 1 << 16

#: nearest_mode of ONNX -> k of the element (2 a + k) // (2 b) that is nearest to a / b >= 0, of b
ROUNDINGS: Mapping[str, Callable[[Any], Any]] = {
    "floor": lambda b: 0,
    "ceil": lambda b: 2 * b - 2,
    "round_prefer_floor": lambda b: b - 1,
    "round_prefer_ceil": lambda b: b,
}


@dataclass(frozen=True)
class OpenAxis:
    """How an axis is resized. Its sizes are numbers or expressions of symbolic sizes.

    Attributes:
        at: The axis.
        size: Size before.
        result: Size after.
        factor: Result size per element of the data. None: `result / size`.
    """

    at: int
    size: Any
    result: Any
    factor: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a size is symbolic."""
        return not (isinstance(self.size, int) and isinstance(self.result, int))

    @property
    def is_moved(self) -> bool:
        """Whether the axis changes."""
        return not same_extents([self.size], [self.result]) or self.factor not in (None, 1)

    @property
    def scale(self) -> float:
        """The factor of known sizes."""
        return self.result / self.size if self.factor is None else self.factor

    @property
    def fraction(self) -> Fraction | None:
        """The factor if it is known: the model gives it, or it is an integer for all sizes. None:
        it is the quotient of the sizes.
        """
        if self.factor is not None:
            return Fraction(self.factor)
        if not self.is_open:
            return Fraction(self.result, self.size)
        quotient = Analyzer().simplify(tirx.floordiv(self.result, self.size))
        found = static_size(quotient)
        is_exact = found is not None and same_extents([self.size * found], [self.result])
        return Fraction(found) if is_exact else None

    @property
    def is_whole(self) -> bool:
        """Whether the factor is exactly the quotient of the sizes."""
        if self.factor is None or float(self.factor).is_integer():
            return True
        return not self.is_open and self.size * self.factor == self.result


def scale_axis(at: int, size: Any, factor: float) -> OpenAxis:
    """Return the axis whose size is floor(size * factor) after."""
    if isinstance(size, int):
        return OpenAxis(at, size, math.floor(size * factor), factor)
    exact = Fraction(factor)
    result = Analyzer().simplify(size * exact.numerator // exact.denominator)
    return OpenAxis(at, size, result, factor)


def emit_open_resize(
    bb: relax.BlockBuilder, data: relax.Expr, axes: Sequence[OpenAxis], sampling: Sampling
) -> relax.Expr:
    """Emit a resize of symbolic sizes.

    Raises:
        Refusal: integers would be interpolated, the sampling is one of fixed sizes, or a factor is
            no quotient of small integers.
    """
    changed = [axis for axis in axes if axis.is_moved]
    for axis in changed:
        if axis.factor is not None and Fraction(axis.factor).denominator > MOST_PARTS:
            raise Refusal(
                f"it scales a symbolic size, and the size {axis.size} by {axis.factor}; supported: "
                f"quotients of integers up to {MOST_PARTS} such as 1.5, or fix all with shapes="
            )
    is_nearest, dtype = sampling.mode == "nearest", tensor_dtype(data)
    if not is_nearest and not dtype.startswith("float"):
        raise Refusal(f"mode {sampling.mode!r} of {dtype} data; supported: floats")
    if sampling.coordinates not in RESIZE2D_MODES or sampling.antialias or sampling.exclude_outside:
        raise Refusal(
            f"it resizes a symbolic size with coordinates {sampling.coordinates!r}, antialias "
            f"{sampling.antialias} and exclude_outside {sampling.exclude_outside}; supported: "
            f"{', '.join(RESIZE2D_MODES)} without the others, or fix the dimension with shapes="
        )
    if sampling.coordinates == "align_corners" and not all(axis.is_whole for axis in changed):
        raise Refusal("align_corners of a symbolic size and a factor that is no integer")
    is_picture = data.ty.ndim == 4 and all(axis.at >= 2 and axis.is_whole for axis in changed)
    if is_nearest:
        factors = [axis.fraction for axis in changed]
        is_picture &= all(factor and factor.denominator == 1 for factor in factors)
        is_picture &= repeats_elements(sampling)
    if is_picture:
        results = {axis.at: axis.result for axis in changed}
        size = [results.get(at, data.ty.shape.values[at]) for at in (2, 3)]
        return bb.emit(emit_resize2d(data, size, sampling))
    if is_nearest:
        for axis in changed:
            places = find_places(bb, axis, sampling)
            data = bb.emit(relax.op.take(data, places, axis.at))
        return data
    if sampling.mode != "linear":
        raise Refusal(
            f"mode {sampling.mode!r} of a symbolic size that is not multiplied by an integer; "
            "supported: sizes, or fix the dimension with shapes="
        )
    for axis in changed:
        data = emit_linear(bb, data, axis, sampling)
    return data


def find_places(bb: relax.BlockBuilder, axis: OpenAxis, sampling: Sampling) -> relax.Expr:
    """Emit the indices, int64 (result,), of the nearest elements. They are exact."""
    rule = sampling.nearest_mode
    if rule == SIMPLE:
        rule = "floor" if axis.factor is None or axis.factor >= 1 else "ceil"
    if rule not in ROUNDINGS:
        raise Refusal(f"nearest_mode is {rule!r}; allowed: {', '.join(ROUNDINGS)}")
    above, below = find_coordinates(bb, axis, sampling.coordinates)
    doubled = bb.emit(relax.op.multiply(above, emit_size(bb, 2)))
    lifted = bb.emit(relax.op.add(doubled, emit_size(bb, ROUNDINGS[rule](below))))
    places = bb.emit(relax.op.floor_divide(lifted, emit_size(bb, 2 * below)))
    return bb.emit(relax.op.minimum(places, emit_size(bb, axis.size - 1)))


def emit_linear(
    bb: relax.BlockBuilder, data: relax.Expr, axis: OpenAxis, sampling: Sampling
) -> relax.Expr:
    """Emit a linear resize of one axis: first + (second - first) * share."""
    above, below = find_coordinates(bb, axis, sampling.coordinates)
    dividend = bb.emit(relax.op.astype(above, "float32"))
    divisor = bb.emit(relax.op.astype(emit_size(bb, below), "float32"))
    last = bb.emit(relax.op.astype(emit_size(bb, axis.size - 1), "float32"))
    exact = bb.emit(relax.op.minimum(bb.emit(relax.op.divide(dividend, divisor)), last))
    whole = bb.emit(relax.op.floor(exact))
    at = bb.emit(relax.op.astype(whole, "int64"))
    behind = bb.emit(relax.op.add(at, emit_size(bb, 1)))
    behind = bb.emit(relax.op.minimum(behind, emit_size(bb, axis.size - 1)))
    share = bb.emit(relax.op.astype(bb.emit(relax.op.subtract(exact, whole)), tensor_dtype(data)))
    form = [axis.result if k == axis.at else 1 for k in range(data.ty.ndim)]
    share = bb.emit(relax.op.reshape(share, form))
    first, second = (bb.emit(relax.op.take(data, each, axis.at)) for each in (at, behind))
    step = bb.emit(relax.op.multiply(bb.emit(relax.op.subtract(second, first)), share))
    return bb.emit(relax.op.add(first, step))


def find_coordinates(bb: relax.BlockBuilder, axis: OpenAxis, mode: str) -> tuple[relax.Expr, Any]:
    """Emit the coordinates a / b in the data as (a, int64 (result,), b), both exact; a >= 0.

    Formulas: ONNX, operator Resize, attribute coordinate_transformation_mode.
    """
    at = bb.emit(relax.op.arange(0, axis.result, 1, "int64"))
    above, below = axis.size, axis.result
    if mode == "align_corners":
        above, below = above - 1, larger(below - 1, 1)
    elif axis.fraction is not None:
        above, below = axis.fraction.denominator, axis.fraction.numerator
    if mode in ("asymmetric", "align_corners"):
        return bb.emit(relax.op.multiply(at, emit_size(bb, above))), below
    middle = bb.emit(relax.op.multiply(at, emit_size(bb, 2)))
    middle = bb.emit(relax.op.add(middle, emit_size(bb, 1)))
    scaled = bb.emit(relax.op.multiply(middle, emit_size(bb, above)))
    shifted = bb.emit(relax.op.subtract(scaled, emit_size(bb, below)))
    if mode == "pytorch_half_pixel":  # a single element is the first one
        several = emit_size(bb, smaller(axis.result - 1, 1))
        shifted = bb.emit(relax.op.multiply(shifted, several))
    return bb.emit(relax.op.maximum(shifted, emit_size(bb, 0))), 2 * below


def larger(one: Any, other: int) -> Any:
    """Return the maximum of a size and a number."""
    return max(one, other) if isinstance(one, int) else tirx.max(one, other)


def smaller(one: Any, other: int) -> Any:
    """Return the minimum of a size and a number."""
    return min(one, other) if isinstance(one, int) else tirx.min(one, other)


def emit_size(bb: relax.BlockBuilder, size: Any) -> relax.Expr:
    """Emit a size as an int64 tensor (1,)."""
    if isinstance(size, int):
        return relax.const([size], "int64")
    return bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([Analyzer().simplify(size)])))
