"""Numpy forms of `relax.qnn.rotate`, `update_cache` and `cached_attention`.

Shapes are those of the operators: rows (B, R, H, D), caches (B, G, L, D), positions (B,). Nothing
is written in place. The order of float32 sums is not specified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relayquant.errors import QnnError, format_count

__all__ = ["cached_attention", "rotate", "update_cache"]

Array = np.ndarray[Any, Any]


def rotate(x: Array, cos: Array, sin: Array, positions: Array) -> Array:
    """Rotate the pairs (i, i + r / 2) of rows by the angles of their positions."""
    length, half = np.shape(cos)
    places = np.clip(place_rows(x, positions), 0, length - 1)
    cosines, sines = (np.asarray(table)[places][:, :, None] for table in (cos, sin))
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = (low * cosines - high * sines, high * cosines + low * sines)
    return np.concatenate([*turned, x[..., 2 * half :]], axis=-1).astype("float32")


def update_cache(cache: Array, rows: Array, positions: Array) -> Array:
    """Return a copy of the cache with the rows that fit in their places."""
    result = np.array(cache)
    places = place_rows(rows, positions)
    sequence, row = np.nonzero((places >= 0) & (places < cache.shape[2]))
    result[sequence, :, places[sequence, row]] = rows[sequence, row].astype(cache.dtype)
    return result


def cached_attention(
    query: Array,
    keys: Array,
    key_scale: Any,
    values: Array,
    value_scale: Any,
    positions: Array,
    *,
    scale: float = 1.0,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Sequence[float] = (),
) -> Array:
    """Attend to the keys that each row sees. A row that sees none gives 0. The softmax of head h
    has one more score, sinks[h], if there are sinks.
    """
    groups, length = keys.shape[1:3]
    batch, rows, heads, width = query.shape
    if groups == 0 or heads % groups:
        found = f"query has {format_count(heads, 'head')}"
        raise QnnError(f"{found}; allowed: a multiple of {groups}, as keys has.", code="RQ601")
    split = query.reshape(batch, rows, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    real_keys = keys.astype("float32") * np.asarray(key_scale, "float32")
    real_values = values.astype("float32") * np.asarray(value_scale, "float32")
    last = place_rows(query, positions)[:, None, None, :, None]
    at = np.arange(length)
    is_seen = (at <= last) & ((at > last - window) if window else True)
    # What is not seen may be anything, also NaN.
    read = is_seen.any(axis=(1, 2, 3))[:, None, :, None]
    real_keys, real_values = (np.where(read, array, 0) for array in (real_keys, real_values))
    scores = np.matmul(split, real_keys[:, :, None].swapaxes(-1, -2))
    scores *= np.float32(scale)
    if soft_cap:
        scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
    scores = np.where(is_seen, scores, np.float32(-np.inf))
    largest = scores.max(axis=-1, keepdims=True, initial=np.finfo("float32").min)
    sink = np.reshape(np.array(sinks, "float32"), (groups, -1, 1, 1)) if len(sinks) else -np.inf
    largest = np.maximum(largest, sink)
    scores -= largest
    powers = np.exp(scores, out=scores)
    totals = powers.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    sums = np.matmul(powers, real_values[:, :, None]) / np.where(totals > 0, totals, 1)
    return sums.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype("float32")


def place_rows(rows: Array, positions: Array) -> Array:
    """Return the position of each row -> int64 (B, R)."""
    return np.asarray(positions, "int64")[:, None] + np.arange(rows.shape[1])
