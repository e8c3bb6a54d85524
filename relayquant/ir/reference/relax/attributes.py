"""What the rows of Relax operators read attributes and operands with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
OperatorFunction = Callable[[list[Any], Any], Any]


def to_ints(values: Any) -> tuple[int, ...]:
    """An array of integer attributes as Python ints."""
    return tuple(int(value) for value in values)


def to_axes(values: Any) -> tuple[int, ...] | None:
    """An axis attribute: None (all axes), one integer or an array of them."""
    if values is None:
        return None
    return to_ints(values) if hasattr(values, "__len__") else (int(values),)


def to_dtype(value: Any, default: Any) -> str:
    """A dtype attribute, or the dtype of an array where it is empty."""
    text = "" if value is None else str(value)
    return text if text not in ("", "void") else np.dtype(default).name


def plain(function: Callable[..., Any]) -> OperatorFunction:
    """A row that applies a numpy function to the arguments and needs no attributes."""
    return lambda args, attrs: function(*args)


def widen(array: Array) -> Array:
    """Floats as float32 at least, integers as float64."""
    if array.dtype.kind in "iu":
        return array.astype("float64")
    return array.astype("float32") if array.dtype.itemsize < 4 else array


def widen_factors(left: Array, right: Array) -> tuple[Array, Array]:
    """The operands of a sum of products: floats as float32 at least; integers as float64, which is
    fast, where that is exact for every sum, else as int64, which wraps around.
    """
    if left.dtype.kind in "iu" and left.size and right.size:
        largest = [max(int(each.max()), -int(each.min())) for each in (left, right)]
        if largest[0] * largest[1] * min(left.size, right.size) >= 2**53:
            return left.astype("int64"), right.astype("int64")
    return widen(left), widen(right)


def align(values: Array, axes: Sequence[int], ndim: int) -> Array:
    """Parameters of the given axes, in their order, shaped to broadcast against `ndim` axes."""
    positions = [axis % ndim for axis in axes]
    values = np.transpose(values, np.argsort(positions))
    shape = [1] * ndim
    for position, size in zip(sorted(positions), values.shape, strict=True):
        shape[position] = size
    return values.reshape(shape)
