"""Numpy forms of `relax.qnn` operators on grouped weights: integer rows, products, gathers.

`relayquant.base.packing` describes how codes are packed in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relayquant.base.packing import (
    count_bytes,
    count_groups,
    read_levels,
    spread_groups,
    unpack_codes,
)
from relayquant.errors import QnnError, format_count
from relayquant.ir.reference.fixed_point import fma_float32

__all__ = ["grouped_dense", "grouped_take", "quantize_rows"]

Array = np.ndarray[Any, Any]

#: Largest magnitude of an integer in a row.
ROW_LIMIT = 127


def quantize_rows(data: Array) -> tuple[Array, Array]:
    """Quantize each row: float32 (..., K) -> int8 (..., K) and row scales, float32 (..., 1).

    scale = max(|row|) / 127. If this is 0 in float32, the scale is 1. The float32 quotients are
    rounded half to even.
    """
    data = np.asarray(data, "float32")
    largest = np.abs(data).max(axis=-1, keepdims=True, initial=np.float32(0))
    limit = np.float32(ROW_LIMIT)
    step = largest / limit
    scale = np.where(step > 0, step, np.float32(1)).astype("float32")
    rounded = np.clip(np.rint(data / scale), -limit, limit)
    return np.nan_to_num(rounded).astype("int8"), scale


def subtract_zero_points(
    weight: Array, zero_point: Array, bits: int, group_size: int, k: int, levels: Sequence[int]
) -> Array:
    """Subtract zero points from codes -> int16 (N, k). Offsets are left to the caller."""
    if weight.ndim != 2 or weight.shape[1] != count_bytes(k, bits):
        raise QnnError(
            f"weight has shape {weight.shape}; allowed: (N, {count_bytes(k, bits)}), rows of "
            f"{format_count(k, 'code')} of {bits} bits.",
            code="RQ601",
        )
    codes = read_levels(unpack_codes(weight, bits, k), levels).astype("int16")
    if read_offsets(zero_point) is not None:
        return codes
    zero_point = np.asarray(zero_point)
    zeros = spread_groups(zero_point, group_size, k) if zero_point.ndim else zero_point
    return codes - zeros.astype("int16")


def read_offsets(zero_point: Any) -> Array | None:
    """Return the offsets of groups, float32 (N, G). None if the operand has zero points."""
    array = np.asarray(zero_point)
    return None if array.dtype == np.uint8 else array.astype("float32")


def grouped_dense(
    data: Array,
    data_scale: Any,
    weight: Array,
    weight_scale: Array,
    weight_zero_point: Any,
    *,
    bits: int = 4,
    group_size: int = 32,
    features: int = 0,
    levels: Sequence[int] = (),
) -> Array:
    """Multiply data (..., K) by a grouped weight -> float32 (..., N), with K = `features`.

    For int8 data, the sum of each group is exact. total = fma(float32(sum), scale, total) runs over
    the groups in order, from 0. With offsets, total = fma(float32(sum of the data), offset, total)
    follows for each group. The total is then multiplied by the row scale. With a data scale for
    each group, (..., G), scale and sum of the data are multiplied by it before, and the total is
    the result. For float32 data, the sums of a group are float32, in unspecified order.
    """
    data, weight = np.asarray(data), np.asarray(weight)
    offsets = read_offsets(weight_zero_point)
    form = bits, group_size, features, levels
    values = subtract_zero_points(weight, weight_zero_point, *form)
    scales = np.asarray(weight_scale).astype("float32")
    is_float = data.dtype == np.float32
    # 8-bit products: float64 holds the sum of any group exactly.
    kind = "float32" if is_float else "float64"
    rows = data.reshape(-1, features).astype(kind)
    total = np.zeros((len(rows), len(weight)), "float32")

    def add(sums: Array, factors: Array) -> Array:
        if is_float:
            return total + sums * factors
        return fma_float32(sums.astype("float32"), factors, total)

    groups = count_groups(features, group_size)
    steps = np.atleast_1d(np.asarray(data_scale, "float32"))
    count = steps.shape[-1]  # no -1 below: of no rows it is not known
    steps = np.broadcast_to(steps, (*data.shape[:-1], count)).reshape(len(rows), count)
    has_group_scales = steps.shape[1] == groups > 1
    for group in range(groups):
        part = slice(group * group_size, (group + 1) * group_size)
        own = steps[:, group, None] if has_group_scales else np.float32(1)
        total = add(rows[:, part] @ values[:, part].astype(kind).T, scales[:, group] * own)
        if offsets is not None:
            sums = rows[:, part].sum(axis=1, keepdims=True).astype("float32")
            total = add(sums * own, offsets[:, group])
    if not is_float and not has_group_scales:
        total = total * steps
    return np.asarray(total, "float32").reshape(*data.shape[:-1], len(weight))


def grouped_take(
    indices: Array,
    weight: Array,
    weight_scale: Array,
    weight_zero_point: Any,
    *,
    bits: int = 4,
    group_size: int = 32,
    features: int = 0,
    levels: Sequence[int] = (),
) -> Array:
    """Gather rows of a grouped weight -> float32 (*indices.shape, K).

    A value is float32(code - zero point) * scale, or fma(float32(code), scale, offset). An index is
    taken modulo the number of rows: -1 is the last row.
    """
    rows = np.asarray(indices).reshape(-1) % len(weight)
    zero_point = np.asarray(weight_zero_point)
    zero_point = zero_point[rows] if zero_point.ndim else zero_point
    form = bits, group_size, features, levels
    values = subtract_zero_points(np.asarray(weight)[rows], zero_point, *form)
    scales = spread_groups(np.asarray(weight_scale)[rows].astype("float32"), group_size, features)
    offsets = read_offsets(zero_point)
    if offsets is None:
        found = values.astype("float32") * scales
    else:
        found = fma_float32(values, scales, spread_groups(offsets, group_size, features))
    return found.reshape(*np.shape(indices), features)
