"""float32 sums along rows in one stated order: the floats of a norm decide the integers behind it,
which are the same in compiled code and in numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Partial sums of a row.
SUM_LANES = 32

Array = np.ndarray[Any, Any]


def sum_rows(data: Array) -> Array:
    """float32 (..., K) -> (..., 1).

    Lane l of 32 adds up the elements l, l + 32, ...; then halves are added to halves (16, 8, 4, 2,
    1), and what is left of the row follows, one by one.
    """
    data = np.asarray(data, "float32")
    whole = data.shape[-1] // SUM_LANES * SUM_LANES
    total = np.zeros((*data.shape[:-1], 1), "float32")
    if whole:
        lanes = data[..., :SUM_LANES]
        for start in range(SUM_LANES, whole, SUM_LANES):
            lanes = lanes + data[..., start : start + SUM_LANES]
        while lanes.shape[-1] > 1:
            low, high = np.split(lanes, 2, axis=-1)
            lanes = low + high
        total = lanes
    for at in range(whole, data.shape[-1]):
        total = total + data[..., at : at + 1]
    return total


def mean_along(data: Array, axes: tuple[int, ...]) -> Array:
    """The mean along `axes`, which stay with extent 1: of float32 along the last axis alone
    `sum_rows` divided by its extent, else in no stated order.
    """
    is_row = len(axes) == 1 and axes[0] % data.ndim == data.ndim - 1
    if data.dtype == np.float32 and is_row:
        return sum_rows(data) / np.float32(data.shape[-1])
    return np.mean(data, axis=axes, keepdims=True)
