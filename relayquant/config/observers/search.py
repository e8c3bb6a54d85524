"""Search of the range with the smallest divergence or error, for observers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from relayquant.base.qtypes import QSpec, choose_qparams
from relayquant.config.observers.histogram import Histogram

Float64Array = NDArray[np.float64]


def search_kl_range(
    histogram: Histogram, spec: QSpec, candidates: int = 256
) -> tuple[float, float]:
    """Search (low, high) with the smallest KL divergence, over clipping at +-threshold."""
    full = min(histogram.low, 0.0), max(histogram.high, 0.0)
    if not histogram.counts.any():
        return full
    edges, integer_counts = histogram.occupied()
    counts = integer_counts.astype("float64")
    zero = int(np.searchsorted(edges, 0.0))
    reach = max(zero, counts.size - zero)
    middles = (edges[:-1] + edges[1:]) / 2
    best, best_range = math.inf, full
    for threshold in np.unique(np.geomspace(16, max(reach, 16), candidates).astype(int)):
        first, last = max(zero - threshold, 0), min(zero + threshold, counts.size)
        whole = threshold >= reach
        low, high = full if whole else (max(edges[first], full[0]), min(edges[last], full[1]))
        scale = float(choose_qparams(low, high, spec).scale)
        if scale < histogram.width:
            continue
        inside = counts[first:last]
        true = inside.copy()
        true[0] += counts[:first].sum()
        true[-1] += counts[last:].sum()
        level = np.rint(middles[first:last] / scale).astype("int64")
        level -= level[0]
        used = true > 0
        mass = np.bincount(level, inside)
        shared = np.bincount(level, used)
        approximate = np.where(used, mass[level] / np.maximum(shared[level], 1), 0.0)
        divergence = _kl_divergence(true[used], approximate[used])
        if divergence <= best:
            best, best_range = divergence, (float(low), float(high))
    return best_range


def _kl_divergence(true: Float64Array, approximate: Float64Array) -> float:
    """Return the KL divergence in nats of two unnormalized histograms. `true` is positive
    everywhere.
    """
    p = true / true.sum()
    if not approximate.any():
        return math.inf
    q = approximate / approximate.sum()
    empty = q == 0
    if empty.any():
        # TVM and MXNet smooth the same way: each empty entry gets 1e-4, taken evenly from the
        # others.
        q = np.where(empty, 1e-4, q - 1e-4 * empty.sum() / (~empty).sum())
        q = np.maximum(q, 1e-12)
    return float(np.sum(p * np.log(p / q)))


def search_mse_range(histogram: Histogram, spec: QSpec) -> tuple[float, float]:
    """Search (low, high) with the smallest expected squared quantization error of a histogram."""
    edges, integer_counts = histogram.occupied()
    counts = integer_counts.astype("float64")

    def errors(lows: Float64Array, highs: Float64Array) -> Float64Array:
        return expected_squared_errors(edges, counts, lows[:, 0], highs[:, 0], spec)[:, None]

    low, high = np.array([histogram.low]), np.array([histogram.high])
    lows, highs = search_ranges(low, high, spec, errors, floor=2.0**-10, steps=96)
    return float(lows[0]), float(highs[0])


def expected_squared_errors(
    edges: Float64Array, counts: Float64Array, lows: Float64Array, highs: Float64Array, spec: QSpec
) -> Float64Array:
    """Sum the squared error of quantizing a histogram, for each of K ranges: shape (K,).

    Values are uniform within a bin. With t = x / scale, n = clip(rint(t), quant_min - z, quant_max
    - z) the error is scale**2 * (t - n)**2, whose antiderivative in t is n / 12 + (t - n)**3 / 3
    (continuous: each whole step contributes 1 / 12), so each bin's integral is exact however wide
    it is.
    """
    qparams = choose_qparams(lows, highs, spec, axis=0)
    scale = qparams.scale.astype("float64")[:, None]
    zero_point = qparams.zero_point.astype("float64")[:, None]
    quant_min, quant_max = spec.limits
    t = edges[None, :] / scale
    n = np.clip(np.rint(t), quant_min - zero_point, quant_max - zero_point)
    t -= n
    primitive = n / 12 + t * t * t / 3
    width = edges[1] - edges[0]
    return (np.diff(primitive, axis=1) @ counts) * (scale[:, 0] ** 3 / width)


def search_weight_mse_range(
    rows: NDArray[np.float32], spec: QSpec
) -> tuple[Float64Array, Float64Array]:
    """Search (low, high), each (C,), with the smallest squared error of each row of `rows` (C,
    n).
    """

    def errors(lows: Float64Array, highs: Float64Array) -> Float64Array:
        return sum_squared_errors(rows, lows, highs, spec)

    low, high = rows.min(axis=1).astype("float64"), rows.max(axis=1).astype("float64")
    return search_ranges(low, high, spec, errors, floor=2.0**-5, steps=48)


def sum_squared_errors(
    rows: NDArray[np.float32], lows: Float64Array, highs: Float64Array, spec: QSpec
) -> Float64Array:
    """Sum the squared error of quantizing rows (C, n), for each of K ranges (K, C): shape (K,
    C).
    """
    trials, channels = lows.shape
    qparams = choose_qparams(lows.reshape(-1), highs.reshape(-1), spec, axis=0)
    scale = qparams.scale.reshape(trials, channels, 1)
    offset = qparams.zero_point.reshape(trials, channels, 1).astype("float32")
    quant_min, quant_max = (np.float32(limit) for limit in spec.limits)
    result = np.zeros((trials, channels))
    # Blocks stay in cache, because the same values are quantized once per trial.
    columns = min(rows.shape[1], 1 << 15)
    height = max(1, (1 << 15) // columns)
    for top in range(0, channels, height):
        part = slice(top, top + height)
        for left in range(0, rows.shape[1], columns):
            block = rows[part, left : left + columns]
            q = np.empty(block.shape, "float32")
            for trial in range(trials):
                s, z = scale[trial, part], offset[trial, part]
                np.divide(block, s, out=q)
                np.rint(q, out=q)
                np.clip(q, quant_min - z, quant_max - z, out=q)
                q *= s
                q -= block
                result[trial, part] += np.einsum("ij,ij->i", q, q)
    return result


def search_ranges(
    low: Float64Array,
    high: Float64Array,
    spec: QSpec,
    errors: Callable[[Float64Array, Float64Array], Float64Array],
    floor: float,
    steps: int,
) -> tuple[Float64Array, Float64Array]:
    """Search ranges within [low, high], each (C,), that minimize `errors`((K, C), (K, C)) -> (K,
    C).

    First, both ends are clipped at a common threshold, from the largest magnitude down to `floor`
    times this magnitude. If both ends are free (affine, data on both sides of zero), each end is
    then moved alone.
    """
    low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    top = np.maximum(-low, high)

    def clip_both(factors: Float64Array) -> tuple[Float64Array, Float64Array]:
        return np.maximum(low, -factors * top), np.minimum(high, factors * top)

    factor, error = _search_factor(lambda f: errors(*clip_both(f)), low.size, floor, steps)
    lows, highs = clip_both(factor)
    if spec.is_symmetric or not ((low < 0) & (high > 0)).any():
        return lows, highs
    for _ in range(2):
        for side in ("high", "low"):

            def move(
                factors: Float64Array,
                side: str = side,
                lows: Float64Array = lows,
                highs: Float64Array = highs,
            ) -> tuple[Float64Array, Float64Array]:
                if side == "high":
                    return np.broadcast_to(lows, factors.shape), factors * high
                return factors * low, np.broadcast_to(highs, factors.shape)

            factor, moved = _search_factor(
                lambda f, m=move: errors(*m(f)), low.size, floor, steps // 2
            )
            new_lows, new_highs = move(factor)
            better = moved < error
            error = np.where(better, moved, error)
            lows, highs = np.where(better, new_lows, lows), np.where(better, new_highs, highs)
        if not better.any():  # the lower end: the next round would search the same ranges again
            break
    return lows, highs


def _search_factor(
    errors: Callable[[Float64Array], Float64Array], channels: int, floor: float, steps: int
) -> tuple[Float64Array, Float64Array]:
    """Search the factor in [floor, 1] with the smallest error per channel. Return both, each (C,).

    A geometric series is tried, then twice eight values between the neighbours of the best.
    """
    factors = np.repeat(np.geomspace(1.0, floor, steps)[:, None], channels, axis=1)
    ratio = floor ** (1 / (steps - 1))
    everywhere = np.arange(channels)
    values = errors(factors)
    # Of equal errors, argmin takes the first: the widest range.
    index = values.argmin(axis=0)
    best, least = factors[index, everywhere], values[index, everywhere]
    for _ in range(2):
        exponents = np.linspace(1, -1, 10)[1:-1]
        factors = np.minimum(best[None, :] * (ratio**-exponents)[:, None], 1.0)
        values = errors(factors)
        index = values.argmin(axis=0)
        found, value = factors[index, everywhere], values[index, everywhere]
        better = value < least
        best, least = np.where(better, found, best), np.where(better, value, least)
        ratio = ratio ** (2 / 9)
    return best, least
