"""Numpy form of `relax.qnn.gated_delta`. The order of float32 sums is not specified."""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.errors import QnnError, format_count

__all__ = ["gated_delta"]

Array = np.ndarray[Any, Any]


def gated_delta(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    strength: Array,
    state: Array,
    positions: Array,
    counts: Array,
    *,
    is_tiled: bool = False,
) -> tuple[Array, Array]:
    """Apply the gated delta rule, row by row. Rows behind `counts` change nothing and give 0."""
    groups, heads = key.shape[2], value.shape[2]
    if groups == 0 or heads % groups:
        found = f"value has {format_count(heads, 'head')}"
        raise QnnError(f"{found}; allowed: a multiple of {groups}, as key has.", code="RQ601")
    places = np.arange(heads)
    places = places % groups if is_tiled else places // (heads // groups)
    goes_on = (np.asarray(positions) > 0)[:, None, None, None]
    now = np.where(goes_on, state, np.float32(0))
    result = np.zeros(value.shape, "float32")
    for row in range(value.shape[1]):
        q, k = (each[:, row][:, places, None, :] for each in (query, key))
        kept, share = (each[:, row, :, None, None] for each in (decay, strength))
        error = value[:, row, :, None, :] - kept * np.matmul(k, now)
        new = kept * now + k.swapaxes(-1, -2) * (share * error)
        is_given = (row < np.asarray(counts))[:, None, None, None]
        now = np.where(is_given, new, now).astype("float32")
        read = np.where(is_given, np.matmul(q, now), 0)
        result[:, row] = read[:, :, 0]
    return result, now
