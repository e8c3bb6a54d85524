"""Observers of the distribution: percentiles, KL divergence, squared error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.qtypes import QParams, Role, ValueInfo, choose_qparams
from relayquant.config.observers.base import (
    Observer,
    State,
    check_array,
    check_number,
    find_axis,
    find_range,
    merge_info,
    need_data,
    refuse_per_channel,
)
from relayquant.config.observers.histogram import Histogram
from relayquant.config.observers.search import (
    search_kl_range,
    search_mse_range,
    search_weight_mse_range,
)
from relayquant.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class HistogramState(State):
    """A histogram of the whole tensor."""

    histogram: Histogram

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return self.histogram.to_arrays()

    @classmethod
    def from_arrays(cls, info: ValueInfo, arrays: Mapping[str, Any]) -> HistogramState:
        return cls(info, Histogram.from_arrays(arrays))


@dataclass(frozen=True, eq=False)
class WeightState(State):
    """The weight, float32 (C, n): one row per channel, or one row for a per-tensor spec."""

    rows: NDArray[np.float32]


class _HistogramObserver(Observer[HistogramState]):
    """Base of the observers with one histogram per tensor."""

    bins: int

    def start(self, info: ValueInfo) -> HistogramState:
        refuse_per_channel(self.name, info)
        return HistogramState(info, Histogram.empty(self.bins))

    def update(self, state: HistogramState, array: NDArray[Any]) -> HistogramState:
        return _update_histogram(state, array)

    def merge(self, a: HistogramState, b: HistogramState) -> HistogramState:
        return HistogramState(merge_info(a, b), a.histogram.merge(b.histogram))


@dataclass(frozen=True)
class Percentile(_HistogramObserver):
    """The range of `percentile` percent of the values. Other values are clipped.

    Affine: from the (100 - percentile)-th to the percentile-th percentile. Symmetric: the
    percentile-th percentile of `|x|`. Accurate to one bin (at most 2 / bins of the largest
    magnitude).

    Wu et al. 2020, "Integer quantization for deep learning inference: principles and empirical
    evaluation", section 5 (https://arxiv.org/abs/2004.09602), which takes 99.9 to 99.9999.
    """

    percentile: float = 99.99
    bins: int = 4096

    def __post_init__(self) -> None:
        check_number("Percentile.percentile", self.percentile)
        if 0 <= self.percentile <= 1:
            raise ConfigError(
                f"Percentile.percentile is {self.percentile}, which looks like a fraction; "
                f"percentages are meant: write {self.percentile * 100:g}.",
                code="RQ101",
            )
        if not 50 <= self.percentile <= 100:
            raise ConfigError(
                f"Percentile.percentile is {self.percentile}; allowed: 50 to 100 percent, for "
                "instance 99.99.",
                code="RQ101",
            )
        Histogram.empty(self.bins)

    def qparams(self, state: HistogramState, info: ValueInfo) -> QParams:
        histogram = state.histogram
        need_data(histogram.total, info)
        keep = self.percentile / 100
        if info.spec.is_symmetric:
            high = histogram.find_magnitude_quantile(keep)
            return choose_qparams(-high, high, info.spec)
        low = histogram.low if keep >= 1 else histogram.find_quantile(1 - keep)
        return choose_qparams(low, histogram.find_quantile(keep), info.spec)


@dataclass(frozen=True)
class KLDivergence(_HistogramObserver):
    """The clipping threshold with the smallest KL divergence of the quantized distribution.

    After TensorRT (Migacz, "8-bit inference with TensorRT", GTC 2017) and `kl` of TVM v0.19's
    relay.quantize, with these differences:

    - Bins are grouped by the levels of the actual parameters, so that affine and one-sided ranges
      work.
    - Exact zeros are left out. They are exact with any parameters, and after a ReLU they would
      lower the threshold.
    - Thresholds come from a geometric series of `candidates`.

    A range with fewer bins than levels does not show the rounding and is not tried. For int16 this
    leaves the full range.
    """

    bins: int = 8192
    candidates: int = 256

    def __post_init__(self) -> None:
        Histogram.empty(self.bins)
        if not isinstance(self.candidates, int) or self.candidates < 2:
            raise ConfigError(
                f"KLDivergence.candidates is {self.candidates!r}; allowed: an integer >= 2.",
                code="RQ101",
            )

    def qparams(self, state: HistogramState, info: ValueInfo) -> QParams:
        need_data(state.histogram.total, info)
        low, high = search_kl_range(state.histogram, info.spec, self.candidates)
        return choose_qparams(low, high, info.spec)


@dataclass(frozen=True)
class MSE(Observer[Any]):
    """The range with the smallest expected squared error of rounding and clipping.

    Activations use a histogram, per-tensor. Values are assumed uniform within a bin, and the
        integral of the squared error over each bin is exact. Bins may therefore be wider than a
        quantization step. Weights (role WEIGHT) use the values, per-tensor or per-channel. The
        state then holds the weight.

    Choukroun et al. 2019, "Low-bit quantization of neural networks for efficient inference"
    (https://arxiv.org/abs/1902.06822), section 3.1: the minimum of the mean squared error.
    """

    bins: int = 4096

    def __post_init__(self) -> None:
        Histogram.empty(self.bins)

    def start(self, info: ValueInfo) -> HistogramState | WeightState:
        if info.role is Role.WEIGHT:
            return WeightState(info, np.zeros((0, 0), "float32"))
        refuse_per_channel(self.name, info)
        return HistogramState(info, Histogram.empty(self.bins))

    def update(
        self, state: HistogramState | WeightState, array: NDArray[Any]
    ) -> HistogramState | WeightState:
        if isinstance(state, HistogramState):
            return _update_histogram(state, array)
        array = check_array(state.info, array)
        if array.size == 0:
            return state
        find_range(state.info, array)
        axis = find_axis(state.info, array)
        rows = array.reshape(1, -1) if axis is None else np.moveaxis(array, axis, 0)
        rows = rows.reshape(rows.shape[0], -1).astype("float32", copy=False)
        return self.merge(state, WeightState(state.info, rows))

    def merge(
        self, a: HistogramState | WeightState, b: HistogramState | WeightState
    ) -> HistogramState | WeightState:
        info = merge_info(a, b)
        if isinstance(a, HistogramState) and isinstance(b, HistogramState):
            return HistogramState(info, a.histogram.merge(b.histogram))
        if isinstance(a, WeightState) and isinstance(b, WeightState):
            if a.rows.size == 0 or b.rows.size == 0:
                return b if a.rows.size == 0 else a
            # A weight is constant: a second batch adds nothing.
            if a.rows.shape == b.rows.shape and np.array_equal(a.rows, b.rows):
                return a
            if a.rows.shape[0] == b.rows.shape[0]:
                return WeightState(info, np.concatenate([a.rows, b.rows], axis=1))
        raise DataError(
            f"The states of value {info.name!r} do not match: one holds a weight and the other a "
            "histogram, or their channels differ.",
            code="RQ105",
        )

    def qparams(self, state: HistogramState | WeightState, info: ValueInfo) -> QParams:
        if isinstance(state, HistogramState):
            need_data(state.histogram.total, info)
            low, high = search_mse_range(state.histogram, info.spec)
            return choose_qparams(low, high, info.spec)
        need_data(state.rows.size, info)
        lows, highs = search_weight_mse_range(state.rows, info.spec)
        if not info.spec.is_per_channel:
            return choose_qparams(lows[0], highs[0], info.spec)
        return choose_qparams(lows, highs, info.spec, info.axis)


def _update_histogram(state: HistogramState, array: NDArray[Any]) -> HistogramState:
    array = check_array(state.info, array)
    if array.size == 0:
        return state
    find_range(state.info, array)
    return HistogramState(state.info, state.histogram.add(array))
