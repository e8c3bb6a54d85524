"""Ranges by relative error: rare large rows, importance of channels, merging, bounds of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drawing import count_examples
from float_models import build_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.qtypes import Granularity, QSpec, Role, ValueInfo, choose_qparams
from relayquant.config.observers import MinMax
from relayquant.errors import ConfigError, DataError
from relayquant.stages.calibration.weights import ranges as fit_ranges
from relayquant.stages.calibration.weights.curves import Slopes, tabulate
from relayquant.stages.calibration.weights.ranges import (
    BINS,
    FLOOR,
    BinnedSums,
    RelativeMSE,
    RowState,
    SampledRows,
    search_relative_range,
    sort_floats,
    weighted_error,
)

SPEC = QSpec("uint8")
INFO = ValueInfo("v", Role.ACTIVATION, SPEC, ("n", 8))


def test_relative_mse__a_rare_huge_row_does_not_rule() -> None:
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (2000, 8)).astype("float32")
    rows[7] = 500
    scale = float(RelativeMSE().observe(INFO, [rows]).scale)
    assert float(MinMax().observe(INFO, [rows]).scale) > 1.9
    assert scale < 0.2


def test_relative_mse__keeps_the_range_of_uniform_values() -> None:
    rows = np.random.default_rng(1).uniform(-1, 1, (2000, 8)).astype("float32")
    scale = float(RelativeMSE().observe(INFO, [rows]).scale)
    assert scale == pytest.approx(2 / 255, rel=0.05)


def test_relative_mse__a_channel_that_nobody_reads_is_clipped() -> None:
    rng = np.random.default_rng(2)
    rows = rng.uniform(-1, 1, (500, 8)).astype("float32")
    rows[:, 3] *= 100
    ignoring = RelativeMSE(importance=((1, 1, 1, 1e-9, 1, 1, 1, 1),))
    assert float(ignoring.observe(INFO, [rows]).scale) < 0.01
    assert float(RelativeMSE().observe(INFO, [rows]).scale) > 0.1


def test_relative_mse__channel_axis() -> None:
    rng = np.random.default_rng(3)
    images = rng.uniform(-1, 1, (4, 8, 5, 6)).astype("float32")
    importance = (tuple(rng.uniform(0, 1, 8)),)
    last = RelativeMSE(importance=importance).observe(INFO, [np.moveaxis(images, 1, -1)])
    assert RelativeMSE(axis=1, importance=importance).observe(INFO, [images]) == last


def test_relative_mse__values_of_a_group_may_differ_in_channels() -> None:
    rng = np.random.default_rng(4)
    parts = [rng.uniform(-1, 1, (50, c)).astype("float32") for c in (8, 4, 12)]
    qparams = RelativeMSE(importance=((1,) * 4,)).observe(INFO, parts)
    assert float(qparams.scale) == pytest.approx(2 / 255, rel=0.1)


def test_relative_mse__memory_is_bounded() -> None:
    observer = RelativeMSE(values=800)
    state = observer.start(INFO)
    for seed in range(20):
        rows = np.random.default_rng(seed).uniform(-1, 1, (300, 8)).astype("float32")
        state = observer.update(state, rows)
        assert state.drawn <= 200
    assert state.count == 20


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
@settings(max_examples=count_examples(20), deadline=None)
def test_relative_mse__the_sample_is_that_of_the_smallest_priorities(seed: int, limit: int) -> None:
    """However the data is split: it is what keeping all rows and sorting them once gives."""
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-1, 1, (n, 8)).astype("float32") for n in rng.integers(1, 90, 9)]
    bounded, everything = RelativeMSE(values=8 * limit), RelativeMSE()

    def seen(observer: RelativeMSE, part: list) -> RowState:
        state = observer.start(INFO)
        for array in part:
            state = observer.update(state, array)
        return state

    whole = SampledRows.join(seen(everything, arrays).parts).take(limit)
    for cut in (0, 4, 9):
        state = bounded.merge(seen(bounded, arrays[:cut]), seen(bounded, arrays[cut:]))
        sample = SampledRows.join(state.parts).take(limit)
        np.testing.assert_array_equal(sample.priorities, whole.priorities)
        np.testing.assert_array_equal(sample.values, whole.values)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=count_examples(20), deadline=None)
def test_search_relative_range__never_worse_than_the_full_range(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((60, 8)) ** 3).astype("float32")
    low, high = float(rows.min()), float(rows.max())
    found = search_relative_range(rows, low, high, SPEC)
    assert low <= found[0] <= found[1] <= high
    size = np.square(rows.astype("float64")).sum(axis=1)
    usual = np.sort(size)[:57].mean()
    weights = np.repeat(1 / (size + FLOOR * usual), 8).astype("float32")

    def error(range_: tuple[float, float]) -> float:
        return weighted_error(rows.reshape(-1), weights, choose_qparams(*range_, SPEC), SPEC)

    assert error(found) <= error((low, high)) * (1 + 1e-5)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["uint8", "int8", "int4"]),
    st.floats(-2, 0),
    st.floats(0.01, 2),
)
@settings(max_examples=count_examples(50), deadline=None)
def test_binned_sums__err_by_what_lies_between_edges_and_bounds_of_levels(
    seed: int, dtype: str, low: float, high: float
) -> None:
    """Such a value may go to the second nearest level, never with a smaller error than value by
    value.
    """
    rng, spec = np.random.default_rng(seed), QSpec(dtype)
    values = rng.choice([0.0, 1e-3, 1.0, 3.0], 400) * rng.standard_normal(400)
    values, weights = values.astype("float32"), rng.random(400).astype("float32")
    lows, highs = np.array([low, low / 2, 0.0]), np.array([high, high * 2, high])
    bins = (spec.limits[1] - spec.limits[0] + 1) * BINS
    sums = BinnedSums.of(values, weights, bins)
    assert sums.width == pytest.approx((max(*values, 0) - min(*values, 0)) / bins)
    found = sums.errors(choose_qparams(lows, highs, spec, 0), spec)
    for error, ends in zip(found, zip(lows, highs, strict=True), strict=True):
        qparams = choose_qparams(*ends, spec)
        scale = float(qparams.scale)
        is_beside = np.abs(values / scale % 1 - 0.5) * scale < sums.width
        most = scale * sums.width * float(weights[is_beside].sum())
        expected = weighted_error(values, weights, qparams, spec)
        assert expected * (1 - 1e-4) - 1e-9 <= error <= expected * (1 + 1e-4) + 1e-9 + most


@pytest.mark.parametrize("count", [0, 9])
def test_binned_sums__of_nothing_but_zeros(count: int) -> None:
    sums = BinnedSums.of(np.zeros(count, "float32"), np.ones(count, "float32"), 256 * BINS)
    np.testing.assert_array_equal(sums.errors(choose_qparams([-1.0], [1.0], SPEC, 0), SPEC), [0])


def test_search_relative_range__wide_and_narrow_specs_agree(monkeypatch) -> None:
    rows = np.random.default_rng(3).standard_t(2, (90, 8)).astype("float32")
    ends = float(rows.min()), float(rows.max())
    narrow = search_relative_range(rows, *ends, SPEC)
    monkeypatch.setattr(fit_ranges, "MOST_LEVELS", 0)
    assert search_relative_range(rows, *ends, SPEC) == pytest.approx(narrow, rel=1e-6)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=60))
def test_sort_floats__rising_and_stable(numbers: list[float]) -> None:
    values = np.array(numbers, "float32")
    order = sort_floats(values)
    # -0.0 stands in front of 0.0.
    expected = sorted(range(len(values)), key=lambda i: (values[i], not np.signbit(values[i]), i))
    assert order.tolist() == expected


def test_relative_mse__several_arrays_at_once() -> None:
    rng, observer = np.random.default_rng(2), RelativeMSE(values=400)
    arrays = [rng.uniform(-1, 1, (n, 8)).astype("float32") for n in (40, 1, 90)]
    states = [observer.update_all(observer.start(INFO), arrays) for _ in range(2)]
    samples = [SampledRows.join(state.parts) for state in states]
    np.testing.assert_array_equal(samples[0].values, samples[1].values)
    rows = {row.tobytes() for array in arrays for row in array}
    assert {row.tobytes() for row in samples[0].values} <= rows
    assert states[0].count == 3
    assert float(states[0].high) == max(float(array.max()) for array in arrays)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(DataError, match="NaN or infinity"):
            observer.update_all(observer.start(INFO), [arrays[0], np.full((2, 8), bad), arrays[2]])


def test_relative_mse__several_arrays_of_other_widths() -> None:
    rng = np.random.default_rng(6)
    arrays = [rng.uniform(-1, 1, (30, c)).astype("float32") for c in (8, 4, 4, 8)]
    observer = RelativeMSE()
    state = observer.update_all(observer.start(INFO), arrays)
    rows = SampledRows.join(state.parts)
    assert sorted(set(rows.channels.tolist())) == [4, 8]
    assert len(rows.values) == 120


def test_relative_mse__restores_its_state() -> None:
    observer, rng = RelativeMSE(), np.random.default_rng(5)
    state = observer.update(observer.start(INFO), rng.uniform(-1, 1, (9, 8)))
    restored = observer.restore(INFO, state.to_arrays())
    assert observer.qparams(restored, INFO) == observer.qparams(state, INFO)


def test_relative_mse__refuses() -> None:
    with pytest.raises(ConfigError, match="values"):
        RelativeMSE(values=0)
    per_channel = QSpec("int8", granularity=Granularity.PER_CHANNEL)
    with pytest.raises(ConfigError, match="per channel"):
        RelativeMSE().start(ValueInfo("v", Role.ACTIVATION, per_channel, (4, 8), 1))
    with pytest.raises(DataError, match="'v'"):
        RelativeMSE().observe(INFO, [np.array([[np.nan] * 8])])
    with pytest.raises(DataError, match="no data"):
        RelativeMSE().observe(INFO, [])


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x.astype("float64")))


def hardswish(x: np.ndarray) -> np.ndarray:
    return x * np.clip(x + 3, 0, 6) / 6


def round_by_numpy(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """uint8 and back, with the zero point on a level."""
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


@pytest.mark.parametrize(("function", "gain"), [(silu, 3.0), (hardswish, 4.0)])
def test_search_relative_range__flat_parts_of_a_function_take_no_levels(function, gain) -> None:
    rows = np.random.default_rng(0).normal(-2, 4, (500, 16)).astype("float32")
    ends = float(rows.min()), float(rows.max())

    def noise(curve) -> float:
        found = search_relative_range(rows, *ends, SPEC, curve=curve)
        assert ends[0] <= found[0] <= found[1] <= ends[1]
        return float(np.square(function(round_by_numpy(rows, *found)) - function(rows)).sum())

    assert 10 * np.log10(noise(None) / noise(tabulate("reader", function))) > gain


def test_binned_sums__with_a_function_equal_the_error_of_its_results() -> None:
    rng = np.random.default_rng(1)
    values, weights = rng.normal(-1, 3, 300).astype("float32"), rng.random(300).astype("float32")
    curve, ends = tabulate("reader", silu), (-4.0, 6.0)
    qparams = choose_qparams([ends[0]], [ends[1]], SPEC, 0)
    (found,) = BinnedSums.of(values, weights, 256 * BINS, curve).errors(qparams, SPEC)
    error = silu(round_by_numpy(values, *ends)) - silu(values)
    assert found == pytest.approx(float((weights * np.square(error)).sum()), rel=1e-3)


def test_relative_mse__a_curve_that_is_not_finite_keeps_the_range() -> None:
    with np.errstate(all="ignore"):
        curve = tabulate("reader", lambda x: np.log(x))
    observer = RelativeMSE(curve=curve)
    rows = np.random.default_rng(2).normal(0, 1, (40, 8)).astype("float32")
    state = observer.update(observer.start(INFO), rows)
    expected = choose_qparams(float(rows.min()), float(rows.max()), SPEC)
    assert observer.qparams(state, INFO).scale == expected.scale
    assert observer.to_dict() == RelativeMSE().to_dict()


@pytest.mark.parametrize("high", [5.0, 88.7], ids=["known", "beyond"])
def test_relative_mse__a_function_that_is_infinite_beside_the_values_cuts_none_off(high) -> None:
    """log(0) and the largest float32 exp: the result's own range holds what is finite."""
    with np.errstate(all="ignore"):
        function = np.exp if high > 5 else np.log
        curve = tabulate("reader", lambda x: function(x.astype("float32")))
    rows = np.random.default_rng(4).uniform(1e-3, high, (200, 8)).astype("float32")
    rows[0, 0] = high
    found = RelativeMSE(curve=curve).observe(INFO, [rows])
    full = choose_qparams(float(rows.min()), high, SPEC)
    assert float(found.scale) > 0.9 * float(full.scale)


def test_slopes__errors_below_zero_count_as_much_as_they_reach_the_result() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 1, (400, 4)).astype("float32")
    rows[:, :2] = np.where(rows[:, :2] < 0, 8 * rows[:, :2], rows[:, :2])
    slopes = np.array([0.0, 0.02, 0.25, 0.25])
    ends = float(rows.min()), float(rows.max())

    def noise(curve) -> float:
        found = search_relative_range(rows, *ends, SPEC, curve=curve)
        difference = [np.where(x < 0, x * slopes, x) for x in (round_by_numpy(rows, *found), rows)]
        return float(np.square(difference[0] - difference[1]).sum())

    assert 10 * np.log10(noise(None) / noise(Slopes("reader", slopes))) > 2


#: name -> x (64, 8) with its channels in reverse order
REVERSALS = {
    "flip": lambda x: op.flip(x, 1),
    "indices": lambda x: op.take(x, relax.const(np.arange(8)[::-1].copy(), "int64"), 1),
    "steps": lambda x: op.strided_slice(x, [1], [7], [-9], [-1]),
}


@pytest.mark.parametrize("name", REVERSALS)
def test_relative_mse__of_channels_in_another_order_than_their_reader_has(name) -> None:
    """The large channel is the first one; the reader hardly weighs its own first one, which is the
    last.
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 16)).astype("float32")
    weight[0] *= 1e-3
    batch = rng.standard_normal((64, 8)).astype("float32")
    batch[:, 0] *= 50

    def body(emit, x):
        return emit("y", op.matmul(emit("r", REVERSALS[name](x)), relax.const(weight)))

    qconfig = rq.get_backend_config("generic").default_qconfig
    spec = rq.TensorConfig(rq.QSpec("int8"), RelativeMSE())
    mapping = rq.QConfigMapping().set_global(replace(qconfig, activation=spec))
    prepared = rq.prepare(
        build_model(body, (64, 8)), None, qconfig_mapping=mapping, backend="generic"
    )
    parameters = rq.calibrate(prepared, [(batch,)]).parameters
    (found,) = (parameters[key] for key in ("x", "r") if key in parameters)
    assert float(found.scale.max()) * 255 > 0.9 * np.ptp(batch)
