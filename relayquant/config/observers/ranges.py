"""Observers of the range: extremes, averages of extremes, and fixed parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from relayquant.base.qtypes import QParams, Role, ValueInfo, check_qparams, choose_qparams
from relayquant.config.observers.base import (
    Float64Array,
    Observer,
    State,
    check_array,
    check_number,
    find_axis,
    find_range,
    merge_info,
    need_data,
    reduce_range,
)
from relayquant.errors import ConfigError


@dataclass(frozen=True, eq=False)
class RangeState(State):
    """Smallest and largest value, float64, shape () or (C,). `count` is the number of updates,
    int64 ().
    """

    low: Float64Array
    high: Float64Array
    count: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MovingState(RangeState):
    """A moving range, and the range of the first array, which has a larger weight."""

    first_low: Float64Array
    first_high: Float64Array


@dataclass(frozen=True, eq=False)
class SumState(State):
    """Sums over samples of each sample's min, max and max `|x|`, float64, shape () or (C,)."""

    low: Float64Array
    high: Float64Array
    magnitude: Float64Array
    count: NDArray[np.int64]  #: samples


@dataclass(frozen=True, eq=False)
class EmptyState(State):
    """State of observers that read no data."""


@dataclass(frozen=True)
class MinMax(Observer[RangeState]):
    """The range from the smallest to the largest observed value. Per-tensor or per-channel."""

    def start(self, info: ValueInfo) -> RangeState:
        return empty_range(info)

    def update(self, state: RangeState, array: NDArray[Any]) -> RangeState:
        array = check_array(state.info, array)
        if array.size == 0:
            return state
        low, high = find_range(state.info, array)
        return RangeState(
            state.info,
            np.minimum(state.low, low),
            np.maximum(state.high, high),
            state.count + np.int64(1),
        )

    def merge(self, a: RangeState, b: RangeState) -> RangeState:
        return RangeState(
            merge_info(a, b),
            np.minimum(a.low, b.low),
            np.maximum(a.high, b.high),
            a.count + b.count,
        )

    def qparams(self, state: RangeState, info: ValueInfo) -> QParams:
        need_data(int(state.count), info)
        return choose_qparams(state.low, state.high, info.spec, info.axis)


@dataclass(frozen=True)
class MovingAverageMinMax(Observer[MovingState]):
    """Exponential moving average of each batch's smallest and largest value.

    Jacob et al. 2018, "Quantization and training of neural networks for efficient
    integer-arithmetic-only inference", section 3.1 (https://arxiv.org/abs/1712.05877).
    After the first batch, range = momentum * range + (1 - momentum) * range of the batch. The
    result depends on the order of the batches. `merge` takes them in the order of its arguments. It
    is associative (up to float64 rounding) but not commutative.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_number("MovingAverageMinMax.momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                f"MovingAverageMinMax.momentum is {self.momentum}; allowed: 0 <= momentum < 1, the "
                "weight of the past (0.9 by default).",
                code="RQ101",
            )

    def start(self, info: ValueInfo) -> MovingState:
        none = empty_range(info)
        return MovingState(info, none.low, none.high, none.count, none.low, none.high)

    def update(self, state: MovingState, array: NDArray[Any]) -> MovingState:
        array = check_array(state.info, array)
        if array.size == 0:
            return state
        low, high = find_range(state.info, array)
        seen = MovingState(state.info, low, high, np.ones((), "int64"), low, high)
        return self.merge(state, seen)

    def merge(self, a: MovingState, b: MovingState) -> MovingState:
        info = merge_info(a, b)
        if a.count == 0 or b.count == 0:
            return b if a.count == 0 else a
        # b = m**(n - 1) * b_first + ... as if b_first were the first batch of all. Behind a, its
        # place is m * a + (1 - m) * b_first, which is m * (a - b_first) more.
        past = self.momentum ** int(b.count)
        return MovingState(
            info,
            np.asarray(b.low + past * (a.low - b.first_low)),
            np.asarray(b.high + past * (a.high - b.first_high)),
            a.count + b.count,
            a.first_low,
            a.first_high,
        )

    def qparams(self, state: MovingState, info: ValueInfo) -> QParams:
        need_data(int(state.count), info)
        return choose_qparams(state.low, state.high, info.spec, info.axis)


@dataclass(frozen=True)
class AverageMax(Observer[SumState]):
    """The mean over samples of max `|x|` (symmetric), or of min and max (affine).

    Source: NNCF's range estimator with ABS_MAX, or MIN and MAX, per sample, aggregated by MEAN
    (https://openvinotoolkit.github.io/nncf/autoapi/nncf/quantization/range_estimator/).

    A sample is an entry of axis 0. A weight, a scalar and a value with channel axis 0 count as one
    sample per array. Per-tensor or per-channel.
    """

    def start(self, info: ValueInfo) -> SumState:
        zero = np.zeros((), "float64")
        return SumState(info, zero, zero, zero, np.zeros((), "int64"))

    def update(self, state: SumState, array: NDArray[Any]) -> SumState:
        info, array = state.info, check_array(state.info, array)
        if array.size == 0:
            return state
        axis = find_axis(info, array)
        if info.role is Role.WEIGHT or array.ndim == 0 or axis == 0:
            low, high = (np.asarray(v)[None] for v in find_range(info, array))
        else:
            axes = tuple(i for i in range(1, array.ndim) if i != axis)
            low, high = reduce_range(info, array, axes)
        return SumState(
            info,
            np.asarray(state.low + low.sum(axis=0)),
            np.asarray(state.high + high.sum(axis=0)),
            np.asarray(state.magnitude + np.maximum(-low, high).sum(axis=0)),
            state.count + np.int64(low.shape[0]),
        )

    def merge(self, a: SumState, b: SumState) -> SumState:
        return SumState(
            merge_info(a, b),
            a.low + b.low,
            a.high + b.high,
            a.magnitude + b.magnitude,
            a.count + b.count,
        )

    def qparams(self, state: SumState, info: ValueInfo) -> QParams:
        need_data(int(state.count), info)
        if info.spec.is_symmetric:
            mean = state.magnitude / state.count
            return choose_qparams(-mean, mean, info.spec, info.axis)
        return choose_qparams(
            state.low / state.count, state.high / state.count, info.spec, info.axis
        )


@dataclass(frozen=True)
class Fixed(Observer[EmptyState]):
    """Fixed parameters from the user: `Fixed(scale, zero_point)`, or `Fixed(low=..., high=...)`.

    It reads no data. Each argument is a number, or a sequence with one number per channel.
    """

    needs_data: ClassVar[bool] = False

    scale: float | tuple[float, ...] | None = None
    zero_point: int | tuple[int, ...] | None = None
    low: float | tuple[float, ...] | None = None
    high: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "zero_point", "low", "high"):
            value = getattr(self, name)
            if value is not None:
                listed = np.asarray(value).tolist()
                object.__setattr__(
                    self, name, tuple(listed) if isinstance(listed, list) else listed
                )
        given = {n for n in ("scale", "zero_point", "low", "high") if getattr(self, n) is not None}
        if given not in ({"scale", "zero_point"}, {"scale"}, {"low", "high"}):
            raise ConfigError(
                f"Fixed got {', '.join(sorted(given)) or 'nothing'}; allowed: scale with or "
                "without zero_point, or low and high.",
                code="RQ102",
            )

    def start(self, info: ValueInfo) -> EmptyState:
        return EmptyState(info)

    def update(self, state: EmptyState, array: NDArray[Any]) -> EmptyState:
        return state

    def merge(self, a: EmptyState, b: EmptyState) -> EmptyState:
        return EmptyState(merge_info(a, b))

    def qparams(self, state: EmptyState, info: ValueInfo) -> QParams:
        if self.scale is None:
            result = choose_qparams(self.low, self.high, info.spec, info.axis)
        else:
            scale = np.asarray(self.scale, "float64")
            zero_point = self.zero_point
            if zero_point is None:
                zero_point = info.spec.symmetric_zero_point if info.spec.is_symmetric else 0
            points = np.asarray(zero_point)
            if scale.ndim and not points.ndim:
                points = np.full(scale.shape, points)
            axis = info.axis if points.ndim else None
            result = QParams(cast(Any, scale), cast(Any, points), info.spec.dtype, axis)
        return check_qparams(result, info, repr(self))


def empty_range(info: ValueInfo) -> RangeState:
    return RangeState(info, np.asarray(math.inf), np.asarray(-math.inf), np.zeros((), "int64"))
