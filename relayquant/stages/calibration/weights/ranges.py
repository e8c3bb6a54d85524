"""Observer of activation ranges: sampled rows + consumers' weights -> the range that changes the
consumers' results least.

The few largest values dominate a plain squared error. Here the error of each row of channels (a
pixel, a token, a frame) is divided by the row's size, and each channel has the importance that the
consumers' weights give it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.qtypes import QParams, QSpec, ValueInfo, choose_qparams
from relayquant.config.observers import Observer
from relayquant.config.observers.base import NotFiniteError, State, require_arrays
from relayquant.config.observers.search import search_ranges
from relayquant.errors import ConfigError, DataError
from relayquant.stages.calibration.weights.curves import Slopes, ValueCurve
from relayquant.stages.calibration.weights.statistics import round_to_grid

Float64Array = NDArray[np.float64]

#: share of the rows, the smallest first, that define the usual size of a row
USUAL = 0.95

#: Added to the size of every row, in units of the usual size. The larger it is, the more large rows
#: count. Chosen by the error of whole models (convolutional networks, transformers): 1 and 16 are
#: worse on most.
FLOOR = 4.0

#: number of float32 values of which several copies fit the second-level cache
CACHED = 1 << 15

#: number of levels up to which a quantizer's error is computed level by level, not value by value
MOST_LEVELS = 1 << 12

#: Bins per level of the full range. A search clips up to a 128th of it, where a level has two.
BINS = 1 << 8

#: minimum values, and minimum rows, of an array that determine which rows are drawn
SEED_VALUES, SEED_ROWS = 1 << 11, 4


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Rows (n, C) float32, padded with zeros behind their `channels` (n,), and their priorities
    (n,), float64.
    """

    values: NDArray[np.float32]
    channels: NDArray[np.int64]
    priorities: Float64Array

    @staticmethod
    def join(parts: Sequence[SampledRows]) -> SampledRows:
        """Join all parts. Values of one group may differ in their channels: a concat and its
        inputs.
        """
        if len(parts) == 1:
            return parts[0]
        width = max((part.values.shape[1] for part in parts), default=0)
        values = np.zeros((sum(len(part.values) for part in parts), width), "float32")
        at = 0
        for part in parts:
            count, channels = part.values.shape
            values[at : at + count, :channels] = part.values
            at += count
        empty = np.zeros(0)
        return SampledRows(
            values,
            np.concatenate([empty.astype("int64"), *(part.channels for part in parts)]),
            np.concatenate([empty, *(part.priorities for part in parts)]),
        )

    def select(self, index: NDArray[np.int64]) -> SampledRows:
        """Return some of the rows."""
        return SampledRows(self.values[index], self.channels[index], self.priorities[index])

    def take(self, limit: int) -> SampledRows:
        """Return the rows of the `limit` smallest priorities, in their order."""
        keep = np.argsort(self.priorities, kind="stable")[:limit]
        return self.select(keep)


@dataclass(frozen=True, eq=False)
class RowState(State):
    """The range, float64 (), and a random sample of rows in the parts in which it was drawn.

    The sample is the rows with the smallest priorities. If it becomes too large, all rows of
    priority `most`, float64 (), or more are dropped.
    """

    low: Float64Array
    high: Float64Array
    parts: tuple[SampledRows, ...]
    most: Float64Array
    count: NDArray[np.int64]  #: number of arrays seen

    @property
    def drawn(self) -> int:
        """Number of rows in the state."""
        return sum(len(part.priorities) for part in self.parts)

    @property
    def width(self) -> int:
        """Largest number of channels of a row."""
        return max((part.values.shape[1] for part in self.parts), default=0)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        rows = SampledRows.join(self.parts)
        return {
            "low": self.low,
            "high": self.high,
            "rows": rows.values,
            "channels": rows.channels,
            "priorities": rows.priorities,
            "most": self.most,
            "count": self.count,
        }

    @classmethod
    def from_arrays(cls, info: ValueInfo, arrays: Mapping[str, Any]) -> RowState:
        names = ("low", "high", "rows", "channels", "priorities", "most", "count")
        low, high, *rows, most, count = require_arrays(cls, info, arrays, names)
        return cls(info, low, high, (SampledRows(*rows),), most, count)


@dataclass(frozen=True)
class RelativeMSE(Observer[RowState]):
    """The range with the smallest mean of error / size over rows, both as the consumers read them.

    With importance a_c of channel c and row x: error = sum of a_c (x_c - x^_c)^2, size = sum of a_c
    x_c^2 plus the mean of this sum over the usual rows (all but the largest 5 %). Activations only,
    per tensor. The rows are a bounded random sample, which is the same for the same data. The
    largest and the smallest value are exact.

    Attributes:
        values: Numbers that the sample of rows may hold.
        axis: Channel axis of the observed arrays.
        importance: One weight per channel (as a tuple) for each consumer, in practice the summed
            squares of its weights. () counts all channels alike. Calibration takes it from the
            model.
        share: Share of all data that one state sees before it is merged with the other parts. The
            state then draws little more than this share of the sample. Calibration sets it.
        arrays: Number of arrays in this share, all about equally long. 0: not known.
        curve: Function that the only consumer computes of each number. Errors are then those of
            its results, and `importance` says how much the results' consumers weigh them. None:
            the consumers are products. Calibration takes it from the model; `to_dict` has no
            curve.
    """

    values: int = 1 << 17
    axis: int = -1
    importance: tuple[tuple[float, ...], ...] = ()
    share: float = 1.0
    arrays: int = 0
    curve: ValueCurve | Slopes | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, int) or self.values < 1:
            raise ConfigError(
                f"RelativeMSE.values is {self.values!r}; allowed: an integer >= 1, for instance "
                "131072.",
                code="RQ101",
            )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() if self.curve is None else replace(self, curve=None).to_dict()

    def start(self, info: ValueInfo) -> RowState:
        if info.spec.is_per_channel:
            raise ConfigError(
                f"RelativeMSE picks one range per tensor, but value {info.name!r} is to be "
                "quantized per channel; use MinMax() or MSE().",
                code="RQ102",
            )
        end, count = np.asarray(math.inf), np.zeros((), "int64")
        return RowState(info, end, -end, (), end, count)

    def update(self, state: RowState, array: NDArray[Any]) -> RowState:
        return self.update_all(state, [array])

    def update_all(self, state: RowState, arrays: Sequence[NDArray[Any]]) -> RowState:
        found = [np.asarray(array) for array in arrays]
        moved = [
            array.reshape(1, -1) if array.ndim < 2 else np.moveaxis(array, self.axis, -1)
            for array in found
            if array.size
        ]
        if not moved:
            return state
        lows, highs = [[float(end(a)) for a in moved] for end in (np.min, np.max)]
        if not all(map(math.isfinite, (*lows, *highs))):
            raise NotFiniteError(
                f"Value {state.info.name!r} holds NaN or infinity during calibration. Check that "
                "the float model gives finite results on these samples, and the preprocessing of "
                "the data set.",
                state.info.name,
                code="RQ302",
            )
        share = self.share * min(len(moved) / self.arrays, 1.0) if self.arrays else self.share
        limit = self._limit(max(state.width, *(array.shape[-1] for array in moved)), share)
        rows = sum(array.size // array.shape[-1] for array in moved)
        parts = [
            part
            for _, same in groupby(moved, key=lambda array: array.shape[-1])
            for part in [draw_rows(list(same), float(state.most), limit, rows)]
            if len(part.priorities)
        ]
        return self._bound(
            RowState(
                state.info,
                np.minimum(state.low, min(lows)),
                np.maximum(state.high, max(highs)),
                (*state.parts, *parts),
                state.most,
                state.count + len(moved),
            ),
            self.share,
        )

    def merge(self, a: RowState, b: RowState) -> RowState:
        return self._bound(
            RowState(
                a.info,
                np.minimum(a.low, b.low),
                np.maximum(a.high, b.high),
                (*a.parts, *b.parts),
                np.minimum(a.most, b.most),
                a.count + b.count,
            )
        )

    def _bound(self, state: RowState, share: float = 1.0) -> RowState:
        """Drop rows beyond the limit if there are more than 1.5 times the limit."""
        limit = self._limit(state.width, share)
        if state.drawn <= 1.5 * limit:
            return state
        rows = SampledRows.join(state.parts)
        keep = np.argpartition(rows.priorities, limit)[: limit + 1]
        most = np.asarray(rows.priorities[keep].max())
        rows = rows.select(np.sort(keep[rows.priorities[keep] < most]))
        return replace(state, parts=(rows,), most=np.minimum(state.most, most))

    def qparams(self, state: RowState, info: ValueInfo) -> QParams:
        if not state.count:
            raise DataError(
                f"Value {info.name!r} has seen no data: the calibration data set is empty.",
                code="RQ303",
            )
        low, high, curve = float(state.low), float(state.high), self.curve
        if not isinstance(curve, ValueCurve) or curve.holds(low, high):
            rows = SampledRows.join(state.parts).take(self._limit(state.width))
            low, high = search_relative_range(
                rows.values, low, high, info.spec, self.importance, rows.channels, curve
            )
        return choose_qparams(low, high, info.spec)

    def for_part(self, share: float, arrays: int) -> RelativeMSE:
        return replace(self, share=share, arrays=arrays)

    def _limit(self, channels: int, share: float = 1.0) -> int:
        """Return the number of rows in the sample, or the number that a part of the data may add.

        Each part has about its share of the rows with the smallest priorities, with a deviation of
        a few standard deviations at most. The limit is doubled, because parts may be longer than
        others.
        """
        rows = max(self.values // max(channels, 1), 1)
        usual = share * rows
        return min(rows, math.ceil(2 * usual + 4 * math.sqrt(usual)) + 8)


def draw_rows(arrays: Sequence[NDArray[Any]], most: float, limit: int, total: int) -> SampledRows:
    """Draw random rows along the last axis of arrays with equally many channels.

    Of the rows drawn below `most`, return at least those with the `limit` smallest of `total`
    priorities.
    """
    counts = [array.size // array.shape[-1] for array in arrays]
    # The seed depends on the values, so the sample depends on neither the order of the data nor its
    # split over processes.
    seed, seen = 0, max(SEED_VALUES // arrays[0].shape[-1], SEED_ROWS)
    for array, count in zip(arrays, counts, strict=True):
        seed = zlib.crc32(take_rows(array, spread_rows(count, seen)).astype("float32"), seed)
    drawn = np.random.default_rng(seed).random(sum(counts))
    # This bound is nearly always enough; below `most` there are no more rows.
    bound = (limit + 4 * math.sqrt(limit)) / total
    keep = np.flatnonzero(drawn < min(most, bound))
    if bound < most and len(keep) < min(limit, len(drawn)):
        keep = np.sort(np.argpartition(drawn, min(limit, len(drawn)) - 1)[:limit])
        keep = keep[drawn[keep] < most]
    starts = np.cumsum([0, *counts])
    cuts = np.searchsorted(keep, starts)
    rows = [
        take_rows(array, keep[a:b] - start)
        for array, start, a, b in zip(arrays, starts, cuts, cuts[1:], strict=False)
    ]
    joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
    channels = np.full(len(keep), joined.shape[1])
    return SampledRows(joined.astype("float32", copy=False), channels, drawn[keep])


@lru_cache(maxsize=64)
def spread_rows(count: int, wanted: int) -> NDArray[np.int64]:
    """Return up to `wanted` of `count` row indices, evenly spread."""
    return np.linspace(0, count - 1, min(wanted, count)).astype("int64")


def take_rows(array: NDArray, index: NDArray[np.int64]) -> NDArray:
    """Return rows along the last axis, numbered over all other axes: (n, C)."""
    if array.flags.c_contiguous:
        return array.reshape(-1, array.shape[-1])[index]
    return array[np.unravel_index(index, array.shape[:-1])]


def search_relative_range(
    rows: NDArray[np.float32],
    low: float,
    high: float,
    spec: QSpec,
    importance: Sequence[Sequence[float]] = (),
    channels: NDArray[np.int64] | None = None,
    curve: ValueCurve | Slopes | None = None,
) -> tuple[float, float]:
    """Return (low, high) within the given range with the smallest mean relative error of rows (n,
    C), or of their results by `curve`.

    `importance` holds one weight per channel for each consumer. A consumer applies to the rows that
    have as many `channels` (n,) as its weights; None means that all rows have C channels.
    """
    if channels is None:
        channels = np.full(rows.shape[0], rows.shape[1])
    flat = rows.reshape(-1)
    order = order_values(flat) if isinstance(curve, ValueCurve) else None
    exact = rows if curve is None else curve(rows, order)
    results = exact.astype("float32", copy=False)
    factors, unit = np.zeros(rows.shape, "float32"), max(-low, high, 0.0) ** 2
    counts = np.unique(channels)
    for count in counts:
        part = slice(None) if len(counts) == 1 else channels == count
        weights = [np.asarray(a, "float64") for a in importance if len(a) == count]
        found = relative_weights(results[part, :count], weights or [np.ones(count)])
        # Any unit is correct. This one keeps float32 from overflowing if values are tiny.
        factors[part, :count] = found * unit
    if isinstance(curve, Slopes):  # rounding keeps signs, so errors are scaled by one slope
        factors *= np.square(curve.find_slopes(rows))
        curve = None
    factors = factors.reshape(-1)
    sums, levels = None, spec.limits[1] - spec.limits[0] + 1
    if levels <= MOST_LEVELS:
        used, bins = slice(None) if order is None else order, levels * BINS
        sums = BinnedSums.of(flat[used], factors[used], bins, curve, exact.reshape(-1)[used])

    def errors(lows: Float64Array, highs: Float64Array) -> Float64Array:
        if sums is not None:
            return sums.errors(choose_qparams(lows[:, 0], highs[:, 0], spec, 0), spec)[:, None]
        trials = [choose_qparams(*ends, spec) for ends in zip(lows[:, 0], highs[:, 0], strict=True)]
        found = [weighted_error(flat, factors, qparams, spec) for qparams in trials]
        return np.array(found)[:, None]

    lows, highs = search_ranges(
        np.array([low]), np.array([high]), spec, errors, floor=2.0**-7, steps=24
    )
    return float(lows[0]), float(highs[0])


def relative_weights(rows: NDArray[np.float32], importance: Sequence[Float64Array]) -> Float64Array:
    """Return the weight of the squared error of each value of rows (n, C), for all consumers
    together, (n, C).

    error / size is linear in the squared errors, so one number per value is enough.
    """
    result = np.zeros(rows.shape)
    squares = np.square(rows, dtype="float64")
    for weight in importance:
        size = squares @ weight
        usual = np.sort(size)[: math.ceil(USUAL * size.size)].mean()
        floor = FLOOR * float(usual if usual > 0 else size.mean())
        if floor > 0:
            result += weight[None, :] / (size + floor)[:, None]
    return result


@dataclass(frozen=True, eq=False)
class BinnedSums:
    """Sums over weighted values in bins of equal width, and over all bins before each edge.

    With weight w of value x and y = curve(x), or x without a curve, `sums` (2, bins + 1) are the
    sums of w and w * y over the values before each edge, and `square` is the sum of w * y^2 over
    all values. The error of a quantizer then takes one step per level, for any number of values.
    The bound between two levels counts as the nearest edge: the values between both are about as
    far from one level as from the other. `ends` are the smallest and the largest y: results of
    levels stay within them, as the result is quantized, too. A logarithm is infinite at level 0,
    but its integers are not.
    """

    start: float
    width: float
    sums: Float64Array
    square: float
    curve: ValueCurve | None = None
    ends: tuple[float, float] = (-math.inf, math.inf)

    @staticmethod
    def of(
        values: NDArray[np.float32],
        weights: NDArray[np.float32],
        bins: int,
        curve: ValueCurve | None = None,
        results: Float64Array | None = None,
    ) -> BinnedSums:
        """Make the sums from values and weights (n,), and the curve's `results` if they are
        known.
        """
        y = values if curve is None else curve(values) if results is None else results
        start, end = (float(x) for x in (values.min(initial=0), values.max(initial=0)))
        width = (end - start) / bins or 1e-60  # narrower than any level if all values are 0
        place = np.subtract(values, start, dtype="float64")
        place *= 1 / width
        index = np.minimum(place.astype("int64"), bins - 1)
        term = np.multiply(weights, y, dtype="float64")
        sums = np.zeros((2, bins + 1))
        for row, each in zip(sums, (weights, term), strict=True):
            np.cumsum(np.bincount(index, each, bins), out=row[1:])
        square = float(np.dot(term, y))
        if curve is None or not y.size:
            return BinnedSums(start, width, sums, square)
        return BinnedSums(start, width, sums, square, curve, (float(y.min()), float(y.max())))

    def errors(self, qparams: QParams, spec: QSpec) -> Float64Array:
        """Return the sum of weights * (value - quantized value)^2 for each of K parameters, (K,);
        with a curve, of the results.
        """
        low, high = spec.limits
        scale = qparams.scale[:, None]
        levels = np.arange(low, high + 1) - qparams.zero_point[:, None]
        real = (levels.astype("float32") * scale).astype("float64")
        between = (levels[:, :-1] + 0.5) * scale.astype("float64")
        last = self.sums.shape[1] - 1
        at = np.zeros((len(levels), levels.shape[1] + 1), "int64")
        at[:, 1:-1] = np.rint((between - self.start) / self.width).clip(0, last)
        at[:, -1] = last
        weight, first = np.diff(self.sums.take(at, axis=1), axis=2)
        if self.curve is not None:
            real = np.where(weight > 0, self.curve(real).clip(*self.ends), 0)
        return self.square + (real * (real * weight - 2 * first)).sum(axis=1)


def order_values(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the indices of the values (n,) that are not 0, in the rising order of the values."""
    used = np.flatnonzero(values)
    return used[sort_floats(values[used])]


def sort_floats(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return indices that sort float32 values (n,), n < 2^32. Equal values keep their order.

    The index is a part of the sort key. numpy sorts these keys several times as fast as it sorts
    stably.
    """
    bits = values.view("uint32")
    # As integers, the bits of floats are in order once those of negative values are inverted.
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype("uint64")
    keys = (ordered << np.uint64(32)) | np.arange(values.size, dtype="uint64")
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype("int64")


def weighted_error(
    values: NDArray[np.float32], weights: NDArray[np.float32], qparams: QParams, spec: QSpec
) -> float:
    """Return the sum of weights * (value - quantized value)^2."""
    # In blocks that stay in cache, because a hundred trials use the same values.
    total = 0.0
    for start in range(0, len(values), CACHED):
        part = values[start : start + CACHED]
        error = round_to_grid(part, qparams, spec)
        error -= part
        error *= error
        total += float(np.dot(error, weights[start : start + CACHED]))
    return total
