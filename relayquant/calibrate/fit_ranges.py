"""Calibrate, activations: the range that changes the results of the consumers least, row by row.

A plain squared error is ruled by the few largest values. Here each row of channels (a pixel, a
token, a frame) is judged by its error relative to its own size, and each channel counts as much as
the consumers' weights let it count.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.calibrate.fit_statistics import round_to_grid
from relayquant.calibrate.observers import Observer, State, search_ranges
from relayquant.errors import ConfigError, DataError
from relayquant.qtypes import QParams, QSpec, ValueInfo, choose_qparams

Float64Array = NDArray[np.float64]

#: share of the rows, the smallest first, that say how large a row usually is
USUAL = 0.95

#: what is added to the size of every row, in usual sizes: the larger, the more the large rows
#: count. Chosen by the error of whole models (convolutional networks, transformers): 1 and 16 are
#: worse on most.
FLOOR = 4.0

#: rows of an array that the choice of its rows depends on
SEED_ROWS = 64


@dataclass(frozen=True, eq=False)
class RowState(State):
    """The range, float64 (), and a random sample of rows (n, C) float32, filled up with zeros
    behind their `channels` (n,), with their priorities (n,).
    """

    low: Float64Array
    high: Float64Array
    rows: NDArray[np.float32]
    channels: NDArray[np.int64]
    priorities: Float64Array
    count: NDArray[np.int64]  #: arrays seen


@dataclass(frozen=True)
class RelativeMSE(Observer[RowState]):
    """The range with the least mean of error / size over rows, both as the consumers see them.

    With importance a_c of channel c and row x: error = sum of a_c (x_c - x^_c)^2, size = sum of a_c
    x_c^2 plus the mean of that over the usual rows (all but the largest 5 %). Activations only, per
    tensor. Rows are a bounded random sample, the same for the same data; the largest and smallest
    value are exact.

    Attributes:
        values: Numbers that the sample of rows may hold.
        axis: Channel axis of the observed arrays.
        importance: For each consumer, one weight per channel (as a tuple), in practice the summed
            squares of its weights; () counts all channels alike. Calibration fills it from the
            model.
    """

    values: int = 1 << 18
    axis: int = -1
    importance: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.values, int) or self.values < 1:
            raise ConfigError(
                f"RelativeMSE.values is {self.values!r}; allowed: an integer >= 1, for instance "
                "262144."
            )

    def start(self, info: ValueInfo) -> RowState:
        if info.spec.is_per_channel:
            raise ConfigError(
                f"RelativeMSE picks one range per tensor, but value {info.name!r} is to be "
                "quantized per channel; "
                "use MinMax() or MSE()."
            )
        return RowState(
            info,
            np.asarray(math.inf),
            np.asarray(-math.inf),
            np.zeros((0, 0), "float32"),
            np.zeros(0, "int64"),
            np.zeros(0),
            np.zeros((), "int64"),
        )

    def update(self, state: RowState, array: NDArray[Any]) -> RowState:
        array = np.asarray(array)
        if array.size == 0:
            return state
        low, high = np.asarray(array.min(), "float64"), np.asarray(array.max(), "float64")
        if not (np.isfinite(low) and np.isfinite(high)):
            raise DataError(
                f"Value {state.info.name!r} holds NaN or infinity during calibration. Check that "
                "the float "
                "model gives finite results on these samples, and the preprocessing of the data "
                "set."
            )
        moved = array.reshape(1, -1) if array.ndim < 2 else np.moveaxis(array, self.axis, -1)
        count, channels = math.prod(moved.shape[:-1]), moved.shape[-1]
        # The seed is taken from the values: the sample depends on neither the order of the data nor
        # how it was split over processes.
        some = np.linspace(0, count - 1, SEED_ROWS).astype("int64")
        seed = zlib.crc32(moved[np.unravel_index(some, moved.shape[:-1])].astype("float32"))
        drawn = np.random.default_rng(seed).random(count)
        limit = self._limit(channels)
        # Once the sample is full, only rows that push another one out are looked at.
        most = state.priorities[limit - 1] if len(state.priorities) >= limit else math.inf
        keep = np.flatnonzero(drawn < most)
        if len(keep) > limit:
            keep = keep[np.argpartition(drawn[keep], limit)[:limit]]
        if not len(keep):
            return replace(
                state,
                low=np.minimum(state.low, low),
                high=np.maximum(state.high, high),
                count=state.count + 1,
            )
        keep = keep[np.argsort(drawn[keep], kind="stable")]
        rows = moved[np.unravel_index(keep, moved.shape[:-1])]
        seen = RowState(
            state.info,
            low,
            high,
            rows.astype("float32", copy=False),
            np.full(len(rows), channels),
            drawn[keep],
            np.asarray(1),
        )
        return self.merge(state, seen)

    def merge(self, a: RowState, b: RowState) -> RowState:
        if not a.count or not b.count:
            return b if not a.count else a
        # Values of one group may differ in their channels: a concat and its inputs.
        width = max(a.rows.shape[1], b.rows.shape[1])
        priorities = np.concatenate([a.priorities, b.priorities])
        keep = np.argsort(priorities, kind="stable")[: self._limit(width)]
        rows = np.zeros((len(priorities), width), "float32")
        rows[: len(a.rows), : a.rows.shape[1]] = a.rows
        rows[len(a.rows) :, : b.rows.shape[1]] = b.rows
        return RowState(
            a.info,
            np.minimum(a.low, b.low),
            np.maximum(a.high, b.high),
            rows[keep],
            np.concatenate([a.channels, b.channels])[keep],
            priorities[keep],
            a.count + b.count,
        )

    def qparams(self, state: RowState, info: ValueInfo) -> QParams:
        if not state.count:
            raise DataError(
                f"Value {info.name!r} has seen no data: the calibration data set is empty."
            )
        low, high = search_relative_range(
            state.rows,
            float(state.low),
            float(state.high),
            info.spec,
            self.importance,
            state.channels,
        )
        return choose_qparams(low, high, info.spec)

    def _limit(self, channels: int) -> int:
        """Rows of the sample."""
        return max(self.values // max(channels, 1), 1)


def search_relative_range(
    rows: NDArray[np.float32],
    low: float,
    high: float,
    spec: QSpec,
    importance: Sequence[Sequence[float]] = (),
    channels: NDArray[np.int64] | None = None,
) -> tuple[float, float]:
    """(low, high) within the given range with the least mean relative error of rows (n, C).

    `importance` holds one weight per channel for each consumer; those of another length than a
    row's `channels` (n,) (all C if None) do not speak of that row.
    """
    if channels is None:
        channels = np.full(rows.shape[0], rows.shape[1])
    factors, unit = np.zeros(rows.shape, "float32"), max(-low, high, 0.0) ** 2
    for count in np.unique(channels):
        part = channels == count
        weights = [np.asarray(a, "float64") for a in importance if len(a) == count]
        found = relative_weights(rows[part, :count], weights or [np.ones(count)])
        # Any unit does; this one keeps float32 from overflowing where values are tiny.
        factors[part, :count] = found * unit
    flat, factors = rows.reshape(-1), factors.reshape(-1)

    def errors(lows: Float64Array, highs: Float64Array) -> Float64Array:
        result = np.empty(lows.shape)
        for trial, (a, b) in enumerate(zip(lows[:, 0], highs[:, 0], strict=True)):
            result[trial, 0] = weighted_error(flat, factors, choose_qparams(a, b, spec), spec)
        return result

    lows, highs = search_ranges(
        np.array([low]), np.array([high]), spec, errors, floor=2.0**-7, steps=24
    )
    return float(lows[0]), float(highs[0])


def relative_weights(rows: NDArray[np.float32], importance: Sequence[Float64Array]) -> Float64Array:
    """What one squared error of each value of rows (n, C) counts, for all consumers together, (n,
    C).

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


def weighted_error(
    values: NDArray[np.float32], weights: NDArray[np.float32], qparams: QParams, spec: QSpec
) -> float:
    """Sum of weights * (value - quantized value)^2."""
    rounded = round_to_grid(values, qparams, spec)
    rounded -= values
    rounded *= rounded
    return float(np.dot(rounded, weights))
