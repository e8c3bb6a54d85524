"""From calibration batches to quantization parameters: observers stream values in O(1) memory.

An observer holds settings only. What it has seen is an explicit state that `update` and `merge`
return anew; a state becomes arrays with `to_arrays`, so that states may be saved, and merged across
processes:

    state = observer.start(info)
    for array in arrays:
        state = observer.update(state, array)
    qparams = observer.qparams(state, info)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from relayquant.calibrate.histogram import Histogram
from relayquant.errors import ConfigError, DataError
from relayquant.qtypes import QParams, QSpec, Role, ValueInfo, check_qparams, choose_qparams
from relayquant.settings import NamedSettings

Float64Array = NDArray[np.float64]


# --- States -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class State:
    """What an observer has seen of one value. By convention nobody writes into its arrays."""

    info: ValueInfo

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything but `info`, as arrays for an .npz file."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "info"}

    @classmethod
    def from_arrays(cls: type[StateT], info: ValueInfo, arrays: Mapping[str, Any]) -> StateT:
        """The state of the value `info` that `to_arrays` wrote.

        Raises:
            DataError: an array is missing.
        """
        names = [f.name for f in fields(cls) if f.name != "info"]
        return cls(info, *require_arrays(cls, info, arrays, names))


def require_arrays(
    kind: type, info: ValueInfo, arrays: Mapping[str, Any], names: Sequence[str]
) -> list[NDArray[Any]]:
    """The named arrays of a saved state of the class `kind`.

    Raises:
        DataError: one is missing.
    """
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"The saved {kind.__name__} of value {info.name!r} lacks {', '.join(missing)}; "
            "was it written by another observer?"
        )
    return [np.asarray(arrays[name]) for name in names]


StateT = TypeVar("StateT", bound=State)


@dataclass(frozen=True, eq=False)
class RangeState(State):
    """Smallest and largest value, float64, shape () or (C,); `count` updates, int64, shape ()."""

    low: Float64Array
    high: Float64Array
    count: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MovingState(RangeState):
    """A moving range, and the range of the first array, which weighs more than the others."""

    first_low: Float64Array
    first_high: Float64Array


@dataclass(frozen=True, eq=False)
class SumState(State):
    """Sums over samples of each sample's min, max and max |x|, float64, shape () or (C,)."""

    low: Float64Array
    high: Float64Array
    magnitude: Float64Array
    count: NDArray[np.int64]  #: samples


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
    """The weight itself, float32, shape (C, n), one row per channel (one row per tensor)."""

    rows: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class EmptyState(State):
    """For observers that look at nothing."""


# --- The contract -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Observer(NamedSettings, ABC, Generic[StateT]):
    """Streams the arrays of one value and picks its quantization parameters.

    Subclasses are frozen dataclasses whose fields are the settings. `merge` is associative, and
    commutative unless the class says otherwise; merging the states of two parts of the data equals
    having seen both parts.
    """

    needs_data: ClassVar[bool] = True  #: False: `qparams` works on a state that has seen nothing

    @property
    def name(self) -> str:
        """For reports and messages."""
        return type(self).__name__

    @abstractmethod
    def start(self, info: ValueInfo) -> StateT:
        """The state before any data.

        Raises:
            ConfigError: this observer cannot serve `info` (per channel, for instance).
        """

    @abstractmethod
    def update(self, state: StateT, array: NDArray[Any]) -> StateT:
        """The state after one more batch: a float array of the value, any shape.

        Raises:
            DataError: the array holds NaN or infinity, or is not numeric; names the value.
        """

    @abstractmethod
    def merge(self, a: StateT, b: StateT) -> StateT:
        """The state of the data of both."""

    @abstractmethod
    def qparams(self, state: StateT, info: ValueInfo) -> QParams:
        """Parameters for what was seen. A value that was always 0 gets scale 1.

        Raises:
            DataError: the state has seen no data.
        """

    def restore(self, info: ValueInfo, arrays: Mapping[str, Any]) -> StateT:
        """The state that `state.to_arrays()` wrote; DataError if it is of another kind."""
        return type(self.start(info)).from_arrays(info, arrays)

    def observe(self, info: ValueInfo, arrays: Iterable[NDArray[Any]]) -> QParams:
        """Start, update with every array, and pick parameters."""
        state = self.start(info)
        for array in arrays:
            state = self.update(state, array)
        return self.qparams(state, info)


# --- Observers of the range -------------------------------------------------------------------


@dataclass(frozen=True)
class MinMax(Observer[RangeState]):
    """The range from the smallest to the largest value ever seen. Per tensor or per channel."""

    def start(self, info: ValueInfo) -> RangeState:
        return _empty_range(info)

    def update(self, state: RangeState, array: NDArray[Any]) -> RangeState:
        array = _check_array(state.info, array)
        if array.size == 0:
            return state
        low, high = _find_range(state.info, array)
        return RangeState(
            state.info,
            np.minimum(state.low, low),
            np.maximum(state.high, high),
            state.count + np.int64(1),
        )

    def merge(self, a: RangeState, b: RangeState) -> RangeState:
        return RangeState(
            _merge_info(a, b),
            np.minimum(a.low, b.low),
            np.maximum(a.high, b.high),
            a.count + b.count,
        )

    def qparams(self, state: RangeState, info: ValueInfo) -> QParams:
        _need_data(int(state.count), info)
        return choose_qparams(state.low, state.high, info.spec, info.axis)


@dataclass(frozen=True)
class MovingAverageMinMax(Observer[MovingState]):
    """Exponential moving average of each batch's smallest and largest value.

    Jacob et al. 2018, "Quantization and training of neural networks for efficient
    integer-arithmetic-only inference", section 3.1 (https://arxiv.org/abs/1712.05877).
    After the first batch, range = momentum * range + (1 - momentum) * range of the batch. The
    result depends on the order of the batches; `merge` takes them in the order of its arguments,
    and is associative (up to float64 rounding) but not commutative.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_number("MovingAverageMinMax.momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                f"MovingAverageMinMax.momentum is {self.momentum}; allowed: 0 <= momentum < 1, the "
                "weight of the past (0.9 by default)."
            )

    def start(self, info: ValueInfo) -> MovingState:
        none = _empty_range(info)
        return MovingState(info, none.low, none.high, none.count, none.low, none.high)

    def update(self, state: MovingState, array: NDArray[Any]) -> MovingState:
        array = _check_array(state.info, array)
        if array.size == 0:
            return state
        low, high = _find_range(state.info, array)
        seen = MovingState(state.info, low, high, np.ones((), "int64"), low, high)
        return self.merge(state, seen)

    def merge(self, a: MovingState, b: MovingState) -> MovingState:
        info = _merge_info(a, b)
        if a.count == 0 or b.count == 0:
            return b if a.count == 0 else a
        # b = m**(n - 1) * b_first + ... as if b_first were the first of all; behind a it stands for
        # m * a + (1 - m) * b_first instead, which is m * (a - b_first) more.
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
        _need_data(int(state.count), info)
        return choose_qparams(state.low, state.high, info.spec, info.axis)


@dataclass(frozen=True)
class AverageMax(Observer[SumState]):
    """Means over samples: of each sample's max |x| (symmetric), or of its min and its max (affine).

    A sample is an entry of axis 0. A weight, a scalar, and a value whose channel axis is 0 count as
    one sample per array. Per tensor or per channel.
    """

    def start(self, info: ValueInfo) -> SumState:
        zero = np.zeros((), "float64")
        return SumState(info, zero, zero, zero, np.zeros((), "int64"))

    def update(self, state: SumState, array: NDArray[Any]) -> SumState:
        info, array = state.info, _check_array(state.info, array)
        if array.size == 0:
            return state
        axis = _find_axis(info, array)
        if info.role is Role.WEIGHT or array.ndim == 0 or axis == 0:
            low, high = (np.asarray(v)[None] for v in _find_range(info, array))
        else:
            axes = tuple(i for i in range(1, array.ndim) if i != axis)
            low, high = _reduce_range(info, array, axes)
        return SumState(
            info,
            np.asarray(state.low + low.sum(axis=0)),
            np.asarray(state.high + high.sum(axis=0)),
            np.asarray(state.magnitude + np.maximum(-low, high).sum(axis=0)),
            state.count + np.int64(low.shape[0]),
        )

    def merge(self, a: SumState, b: SumState) -> SumState:
        return SumState(
            _merge_info(a, b),
            a.low + b.low,
            a.high + b.high,
            a.magnitude + b.magnitude,
            a.count + b.count,
        )

    def qparams(self, state: SumState, info: ValueInfo) -> QParams:
        _need_data(int(state.count), info)
        if info.spec.is_symmetric:
            mean = state.magnitude / state.count
            return choose_qparams(-mean, mean, info.spec, info.axis)
        return choose_qparams(
            state.low / state.count, state.high / state.count, info.spec, info.axis
        )


@dataclass(frozen=True)
class Fixed(Observer[EmptyState]):
    """Parameters given by the user: `Fixed(scale, zero_point)`, or `Fixed(low=..., high=...)`.

    Looks at no data. Numbers, or sequences with one number per channel.
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
                "without zero_point, or low and high."
            )

    def start(self, info: ValueInfo) -> EmptyState:
        return EmptyState(info)

    def update(self, state: EmptyState, array: NDArray[Any]) -> EmptyState:
        return state

    def merge(self, a: EmptyState, b: EmptyState) -> EmptyState:
        return EmptyState(_merge_info(a, b))

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


# --- Observers of the distribution ------------------------------------------------------------


class _HistogramObserver(Observer[HistogramState]):
    """Shared streaming of the observers that look at one histogram per tensor."""

    bins: int

    def start(self, info: ValueInfo) -> HistogramState:
        _refuse_per_channel(self.name, info)
        return HistogramState(info, Histogram.empty(self.bins))

    def update(self, state: HistogramState, array: NDArray[Any]) -> HistogramState:
        return _update_histogram(state, array)

    def merge(self, a: HistogramState, b: HistogramState) -> HistogramState:
        return HistogramState(_merge_info(a, b), a.histogram.merge(b.histogram))


@dataclass(frozen=True)
class Percentile(_HistogramObserver):
    """The range that keeps `percentile` percent of the values; what lies outside is clipped.

    Affine: from the (100 - percentile)-th to the percentile-th percentile. Symmetric: the
    percentile-th percentile of |x|. Accurate to one bin (at most 2 / bins of the largest
    magnitude).

    Wu et al. 2020, "Integer quantization for deep learning inference: principles and empirical
    evaluation", section 5 (https://arxiv.org/abs/2004.09602), which takes 99.9 to 99.9999.
    """

    percentile: float = 99.99
    bins: int = 4096

    def __post_init__(self) -> None:
        _check_number("Percentile.percentile", self.percentile)
        if 0 <= self.percentile <= 1:
            raise ConfigError(
                f"Percentile.percentile is {self.percentile}, which looks like a fraction; "
                f"percentages are meant: write {self.percentile * 100:g}."
            )
        if not 50 <= self.percentile <= 100:
            raise ConfigError(
                f"Percentile.percentile is {self.percentile}; allowed: 50 to 100 percent, for "
                "instance 99.99."
            )
        Histogram.empty(self.bins)

    def qparams(self, state: HistogramState, info: ValueInfo) -> QParams:
        histogram = state.histogram
        _need_data(histogram.total, info)
        keep = self.percentile / 100
        if info.spec.is_symmetric:
            high = histogram.find_magnitude_quantile(keep)
            return choose_qparams(-high, high, info.spec)
        low = histogram.low if keep >= 1 else histogram.find_quantile(1 - keep)
        return choose_qparams(low, histogram.find_quantile(keep), info.spec)


@dataclass(frozen=True)
class KLDivergence(_HistogramObserver):
    """The clipping threshold whose quantized distribution is nearest to the true one, by KL.

    After TensorRT (Migacz, "8-bit inference with TensorRT", GTC 2017) and `kl` of TVM v0.19's
    relay.quantize, with these differences: bins are grouped by the levels of the actual parameters,
    so affine and one-sided ranges work; exact zeros are left out, since they are exact with any
    parameters and otherwise pull the threshold down after a ReLU; thresholds are taken from a
    geometric series of `candidates`. A range with fewer bins than levels says nothing of the
    rounding, so such thresholds are not tried (none is for int16: the full range is taken).
    """

    bins: int = 8192
    candidates: int = 256

    def __post_init__(self) -> None:
        Histogram.empty(self.bins)
        if not isinstance(self.candidates, int) or self.candidates < 2:
            raise ConfigError(
                f"KLDivergence.candidates is {self.candidates!r}; allowed: an integer >= 2."
            )

    def qparams(self, state: HistogramState, info: ValueInfo) -> QParams:
        _need_data(state.histogram.total, info)
        low, high = search_kl_range(state.histogram, info.spec, self.candidates)
        return choose_qparams(low, high, info.spec)


@dataclass(frozen=True)
class MSE(Observer[Any]):
    """The range with the least expected squared error of rounding and clipping together.

    Activations: from a histogram, per tensor; values are taken as uniform within a bin, and the
    integral of the squared error over each bin is exact, so bins may be wider than a quantization
    step. Weights (role WEIGHT): from the values themselves, per tensor or per channel; the state
    then holds the weight.

    Choukroun et al. 2019, "Low-bit quantization of neural networks for efficient inference"
    (https://arxiv.org/abs/1902.06822), section 3.1: the minimum of the mean squared error.
    """

    bins: int = 4096

    def __post_init__(self) -> None:
        Histogram.empty(self.bins)

    def start(self, info: ValueInfo) -> HistogramState | WeightState:
        if info.role is Role.WEIGHT:
            return WeightState(info, np.zeros((0, 0), "float32"))
        _refuse_per_channel(self.name, info)
        return HistogramState(info, Histogram.empty(self.bins))

    def update(
        self, state: HistogramState | WeightState, array: NDArray[Any]
    ) -> HistogramState | WeightState:
        if isinstance(state, HistogramState):
            return _update_histogram(state, array)
        array = _check_array(state.info, array)
        if array.size == 0:
            return state
        _find_range(state.info, array)
        axis = _find_axis(state.info, array)
        rows = array.reshape(1, -1) if axis is None else np.moveaxis(array, axis, 0)
        rows = rows.reshape(rows.shape[0], -1).astype("float32", copy=False)
        return self.merge(state, WeightState(state.info, rows))

    def merge(
        self, a: HistogramState | WeightState, b: HistogramState | WeightState
    ) -> HistogramState | WeightState:
        info = _merge_info(a, b)
        if isinstance(a, HistogramState) and isinstance(b, HistogramState):
            return HistogramState(info, a.histogram.merge(b.histogram))
        if isinstance(a, WeightState) and isinstance(b, WeightState):
            if a.rows.size == 0 or b.rows.size == 0:
                return b if a.rows.size == 0 else a
            # A weight is a constant: seeing it again adds nothing.
            if a.rows.shape == b.rows.shape and np.array_equal(a.rows, b.rows):
                return a
            if a.rows.shape[0] == b.rows.shape[0]:
                return WeightState(info, np.concatenate([a.rows, b.rows], axis=1))
        raise DataError(
            f"The states of value {info.name!r} do not fit together: one holds a weight and one a "
            "histogram, or their channels differ."
        )

    def qparams(self, state: HistogramState | WeightState, info: ValueInfo) -> QParams:
        if isinstance(state, HistogramState):
            _need_data(state.histogram.total, info)
            low, high = search_mse_range(state.histogram, info.spec)
            return choose_qparams(low, high, info.spec)
        _need_data(state.rows.size, info)
        lows, highs = search_weight_mse_range(state.rows, info.spec)
        if not info.spec.is_per_channel:
            return choose_qparams(lows[0], highs[0], info.spec)
        return choose_qparams(lows, highs, info.spec, info.axis)


#: Any observer, whatever its state is.
AnyObserver = Observer[Any]


# --- Searches ---------------------------------------------------------------------------------


def search_kl_range(
    histogram: Histogram, spec: QSpec, candidates: int = 256
) -> tuple[float, float]:
    """(low, high) with the least KL divergence over clipping at +-threshold."""
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
    """KL divergence in nats of two unnormalized histograms; `true` is positive everywhere."""
    p = true / true.sum()
    if not approximate.any():
        return math.inf
    q = approximate / approximate.sum()
    empty = q == 0
    if empty.any():
        # TVM and MXNet smooth the same way: 1e-4 to each empty entry, taken from the others evenly.
        q = np.where(empty, 1e-4, q - 1e-4 * empty.sum() / (~empty).sum())
        q = np.maximum(q, 1e-12)
    return float(np.sum(p * np.log(p / q)))


def search_mse_range(histogram: Histogram, spec: QSpec) -> tuple[float, float]:
    """(low, high) with the least expected squared quantization error over the histogram."""
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
    """Summed squared error of quantizing a histogram with each of K ranges, shape (K,).

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
    """(low, high), each (C,), with the least squared error of each row of `rows`, (C, n)."""

    def errors(lows: Float64Array, highs: Float64Array) -> Float64Array:
        return sum_squared_errors(rows, lows, highs, spec)

    low, high = rows.min(axis=1).astype("float64"), rows.max(axis=1).astype("float64")
    return search_ranges(low, high, spec, errors, floor=2.0**-5, steps=48)


def sum_squared_errors(
    rows: NDArray[np.float32], lows: Float64Array, highs: Float64Array, spec: QSpec
) -> Float64Array:
    """Summed squared error of quantizing rows (C, n) with each of K ranges (K, C); shape (K, C)."""
    trials, channels = lows.shape
    qparams = choose_qparams(lows.reshape(-1), highs.reshape(-1), spec, axis=0)
    scale = qparams.scale.reshape(trials, channels, 1)
    offset = qparams.zero_point.reshape(trials, channels, 1).astype("float32")
    quant_min, quant_max = (np.float32(limit) for limit in spec.limits)
    result = np.zeros((trials, channels))
    # Blocks that stay in cache: the same values are quantized once for each trial.
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
    """Ranges within [low, high] (each (C,)) that minimize `errors` ((K, C), (K, C)) -> (K, C).

    First both ends are clipped at a common threshold, from the largest magnitude down to `floor`
    times it; where both ends are free (affine, data on both sides of zero) each is then moved
    alone.
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
    return lows, highs


def _search_factor(
    errors: Callable[[Float64Array], Float64Array], channels: int, floor: float, steps: int
) -> tuple[Float64Array, Float64Array]:
    """Per channel, the factor in [floor, 1] with the least error, and that error; each shape (C,).

    A geometric series, then twice eight trials between the neighbours of the best.
    """
    factors = np.repeat(np.geomspace(1.0, floor, steps)[:, None], channels, axis=1)
    ratio = floor ** (1 / (steps - 1))
    everywhere = np.arange(channels)
    values = errors(factors)
    # argmin takes the first of equals: the widest range.
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


# --- Checks and ranges ------------------------------------------------------------------------


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigError(f"{name} is {value!r}; allowed: a number.")


def _check_array(info: ValueInfo, array: NDArray[Any]) -> NDArray[Any]:
    """`array` as a float array; its values are checked where their range is found."""
    array = np.asarray(array)
    if array.dtype.kind == "f":
        return array
    # bfloat16 and the float8 types are extension dtypes of kind V, which numpy cannot reduce.
    if array.dtype.kind in "biu" or array.dtype.name.startswith(("bfloat", "float")):
        return array.astype("float64" if array.dtype.itemsize >= 4 else "float32")
    raise DataError(
        f"Value {info.name!r} was given an array of dtype {array.dtype}; observers take real "
        "numbers."
    )


def _find_axis(info: ValueInfo, array: NDArray[Any]) -> int | None:
    """The channel axis as a non-negative number, None when the spec is per tensor."""
    if not info.spec.is_per_channel:
        return None
    if info.axis is None or not -array.ndim <= info.axis < array.ndim:
        raise DataError(
            f"Value {info.name!r} is quantized per channel along axis {info.axis}, but was given "
            f"an array of shape {array.shape}."
        )
    return info.axis % array.ndim


def _find_range(info: ValueInfo, array: NDArray[Any]) -> tuple[Float64Array, Float64Array]:
    """Smallest and largest value, shape () or (C,); DataError on NaN or infinity."""
    axis = _find_axis(info, array)
    return _reduce_range(info, array, tuple(i for i in range(array.ndim) if i != axis))


def _reduce_range(
    info: ValueInfo, array: NDArray[Any], axes: tuple[int, ...]
) -> tuple[Float64Array, Float64Array]:
    # Adding 0.0 makes 0.0 of -0.0: which of them min picks depends on the order.
    low = np.asarray(array.min(axis=axes), "float64") + 0.0
    high = np.asarray(array.max(axis=axes), "float64") + 0.0
    # NaN propagates through min and max, infinities are extremes: no pass over the data is needed.
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        nan, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        raise DataError(
            f"Value {info.name!r} holds {nan} NaN and {infinite} infinite of {array.size} elements "
            "during calibration. Check that the float model gives finite results on these samples, "
            "and the preprocessing of the data set (scaling, division by zero, float16 overflow)."
        )
    return low, high


def _empty_range(info: ValueInfo) -> RangeState:
    return RangeState(info, np.asarray(math.inf), np.asarray(-math.inf), np.zeros((), "int64"))


def _update_histogram(state: HistogramState, array: NDArray[Any]) -> HistogramState:
    array = _check_array(state.info, array)
    if array.size == 0:
        return state
    _find_range(state.info, array)
    return HistogramState(state.info, state.histogram.add(array))


def _merge_info(a: State, b: State) -> ValueInfo:
    if a.info.name != b.info.name:
        raise DataError(
            f"States of different values cannot be merged: {a.info.name!r} and {b.info.name!r}."
        )
    return a.info


def _need_data(count: int, info: ValueInfo) -> None:
    if count == 0:
        raise DataError(
            f"Value {info.name!r} has seen no data: the calibration data set is empty, or no "
            "sample reaches this value."
        )


def _refuse_per_channel(observer: str, info: ValueInfo) -> None:
    if info.spec.is_per_channel:
        raise ConfigError(
            f"{observer} picks one range per tensor, but value {info.name!r} ({info.role.value}) "
            "is to be quantized per channel; use MinMax(), AverageMax(), or for weights MSE(), or "
            "a QSpec with Granularity.PER_TENSOR."
        )
