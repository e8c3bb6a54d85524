"""One value for each index of an axis -> a shape that broadcasts against an array."""

from __future__ import annotations


def shape_along(axis: int, ndim: int, size: int = -1) -> list[int]:
    """Return the shape in which values along one axis broadcast against an array of `ndim` axes.

    It is `size` at `axis`, which may count from the end, and 1 elsewhere. -1 fits any number of
    values in numpy and PyTorch; Relax needs the number.
    """
    shape = [1] * ndim
    shape[axis] = size
    return shape
