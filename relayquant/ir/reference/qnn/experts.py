"""Numpy forms of `relax.qnn` products whose weights each row of the data chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.ir.reference.qnn.grouped import grouped_dense

__all__ = ["expert_dense", "grouped_expert_dense"]

Array = np.ndarray[Any, Any]


def expert_dense(data: Array, chosen: Array, weight: Array, *, experts: int = 1) -> Array:
    """Multiply each row by the weight of its expert.

    data (..., S or 1, K), chosen (..., S), weight (E * N, K) -> float32 (..., S, N). A choice is
    taken modulo E.
    """
    weight = np.asarray(weight, "float32")
    each = weight.reshape(experts, -1, weight.shape[1])

    def multiply(expert: int, slots: Any) -> Array:
        return np.asarray(data, "float32")[slots] @ each[expert].T

    return choose(np.asarray(data), chosen, experts, each.shape[1], multiply)


def grouped_expert_dense(
    data: Array,
    data_scale: Any,
    chosen: Array,
    weight: Array,
    weight_scale: Array,
    weight_zero_point: Any,
    *,
    bits: int = 4,
    group_size: int = 32,
    features: int = 0,
    experts: int = 1,
    levels: Sequence[int] = (),
) -> Array:
    """Multiply each row by the grouped weight of its expert, as `grouped_dense` does.

    data (..., S or 1, K), chosen (..., S), a weight of E * N rows -> float32 (..., S, N).
    """
    data, step = np.asarray(data), np.asarray(data_scale, "float32")
    parts = [np.asarray(each) for each in (weight, weight_scale, weight_zero_point)]
    units = len(parts[0]) // experts

    def multiply(expert: int, slots: Any) -> Array:
        own = [each[expert * units : (expert + 1) * units] if each.ndim else each for each in parts]
        return grouped_dense(
            data[slots], step[slots] if step.ndim else step, *own,
            bits=bits, group_size=group_size, features=features, levels=levels,
        )  # fmt: skip

    return choose(data, chosen, experts, units, multiply)


def choose(
    data: Array, chosen: Array, experts: int, units: int, multiply: Callable[[int, Any], Array]
) -> Array:
    """Return the results of `multiply(expert, index of rows)` for all rows, (..., S, N)."""
    numbers = np.asarray(chosen) % experts
    found = np.zeros((*numbers.shape, units), "float32")
    for expert in np.unique(numbers):
        place = np.nonzero(numbers == expert)
        slot = np.zeros_like(place[-1]) if data.shape[-2] == 1 else place[-1]
        found[place] = multiply(int(expert), (*place[:-1], slot))
    return found
