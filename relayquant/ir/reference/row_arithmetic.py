"""float32 sums and softmax along rows, in one fixed order of operations.

Compiled code and numpy use the same order. Integers that are computed from the results are
therefore the same too. `kernels.floating.softmax` names the sources of softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Number of partial sums of a row.
SUM_LANES = 32

Array = np.ndarray[Any, Any]


def sum_rows(data: Array) -> Array:
    """Sum rows: float32 (..., K) -> (..., 1).

    Lane l of 32 adds the elements l, l + 32, ... The lanes are then added in halves (16, 8, 4, 2,
    1). The rest of the row is added last, one element at a time.
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
    """Return the mean along `axes`, which keep size 1.

    For float32 along the last axis, it is `sum_rows` divided by the size. In other cases the order
    is unspecified.
    """
    is_row = len(axes) == 1 and axes[0] % data.ndim == data.ndim - 1
    if data.dtype == np.float32 and is_row:
        return sum_rows(data) / np.float32(data.shape[-1])
    return np.mean(data, axis=axes, keepdims=True)


F32 = np.float32

#: Coefficients of e^r on -ln(2)/2 .. ln(2)/2, the highest power first.
POWERS = tuple(map(F32, (0.008290272, 0.041898163, 0.16667639, 0.49999148, 0.9999997, 1.0)))
LN2_HIGH, LN2_LOW = F32(0.693145751953125), F32(1.428605173714459e-06)
LOG2_E, LOWEST = F32(1.44269504088896341), F32(-88.0296919311)
ROUND_TO_EXPONENT = F32(1.5 * 2**23 + 127)


def exponentiate(data: Array) -> Array:
    """Compute e^x of float32 values <= 0, with each operation rounded to float32.

    The relative error is within 2e-7.

    Results below 2^-126.5 are 0. NaN gives NaN.
    """
    data = np.where(data < LOWEST, LOWEST, data).astype("float32")
    exponent = data * LOG2_E + ROUND_TO_EXPONENT
    n = exponent - ROUND_TO_EXPONENT
    rest = data - n * LN2_HIGH - n * LN2_LOW
    power = np.full_like(rest, POWERS[0])
    for coefficient in POWERS[1:]:
        power = power * rest + coefficient
    return power * (exponent.view("int32") << 23).view("float32")


def softmax_along(data: Array, axis: int) -> Array:
    """Compute float32 softmax along an axis: e^(x - max) * (1 / sum), with the sum of `sum_rows`.

    A row with NaN or +infinity, or with only -infinity, is NaN.
    """
    rows = np.moveaxis(np.asarray(data, "float32"), axis, -1)
    with np.errstate(invalid="ignore", under="ignore"):
        powers = exponentiate(rows - rows.max(axis=-1, keepdims=True))
        result = powers * (F32(1) / sum_rows(powers))
    return np.ascontiguousarray(np.moveaxis(result, -1, axis))
