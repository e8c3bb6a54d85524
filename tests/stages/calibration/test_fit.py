"""Fitting one operator: error of the result, bias, scales, limits, determinism."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from relayquant.base.qtypes import Granularity, QParams, QSpec, Scheme, choose_qparams
from relayquant.base.runtime import limit_blas
from relayquant.config import (
    AdaRoundSettings,
    BiasCorrection,
    FitSettings,
    ReconstructionSettings,
    WeightRounding,
)
from relayquant.errors import ConfigError
from relayquant.stages.calibration.weights import fit
from relayquant.stages.calibration.weights.adaround import learn_rounding
from relayquant.stages.calibration.weights.fit import (
    FittedWeight,
    LeastSquares,
    fit_operator,
    round_bias,
    round_rows,
)
from relayquant.stages.calibration.weights.patches import LinearView
from relayquant.stages.calibration.weights.statistics import InputStatistics
from relayquant.stages.calibration.weights.target import find_target

DENSE = LinearView(None, (1, 0))
INT8 = QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=-127)
INT4 = QSpec("int4", Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=-7)
DATA = QSpec("uint8")
INT4_TENSOR = QSpec("int4", Scheme.SYMMETRIC, Granularity.PER_TENSOR, quant_min=-7)
NEAREST = FitSettings(WeightRounding.NEAREST, BiasCorrection.NONE)
OPTIMAL = FitSettings(WeightRounding.OPTIMAL, BiasCorrection.NONE)


def make_inputs(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Correlated, positive on average, as values behind a relu are."""
    mixed = rng.standard_normal((rows, columns)) @ rng.standard_normal((columns, columns))
    return np.maximum(mixed + 1, 0).astype("float32")


def observe(
    view: LinearView, *batches: np.ndarray, rows: int = 10**6, most: int | None = None
) -> InputStatistics:
    groups, _, columns = view.sample_rows(batches[:1], 1, np.random.default_rng(0)).shape
    statistics = InputStatistics.empty(groups, columns, with_gram=True, most=most)
    for batch in batches:
        statistics = statistics.add(view, [batch], rows, np.random.default_rng(0))
    return statistics


def weight_qparams(weight: np.ndarray, spec: QSpec) -> QParams:
    if spec.is_per_channel:
        top = np.abs(weight).max(axis=0)
        return choose_qparams(-top, top, spec, 1)
    return choose_qparams(-np.abs(weight).max(), np.abs(weight).max(), spec)


def output_error(x: np.ndarray, weight: np.ndarray, fitted: np.ndarray) -> float:
    return float(np.square(x.astype("float64") @ (weight.astype("float64") - fitted)).sum())


@pytest.mark.parametrize("spec", [INT8, INT4, INT4_TENSOR], ids=["int8", "int4", "int4 tensor"])
def test_fit_operator__beats_nearest_in_output_error(spec: QSpec) -> None:
    rng = np.random.default_rng(1)
    x = make_inputs(rng, 500, 40)
    weight = rng.standard_normal((40, 12)).astype("float32")
    qparams, statistics = weight_qparams(weight, spec), observe(DENSE, x)
    nearest = fit_operator(DENSE, statistics, weight, None, qparams, spec, NEAREST)
    optimal = fit_operator(DENSE, statistics, weight, None, qparams, spec, OPTIMAL)
    assert output_error(x, weight, optimal.weight) < 0.6 * output_error(x, weight, nearest.weight)


@pytest.mark.parametrize("size", [1e-18, 1e17])
def test_fit_operator__of_data_whose_sums_of_squares_float32_hardly_holds(size: float) -> None:
    """The weights are those for data of usual size."""
    rng = np.random.default_rng(1)
    x, weight = make_inputs(rng, 500, 40), rng.standard_normal((40, 12)).astype("float32")
    qparams, loud = weight_qparams(weight, INT4), (x * size).astype("float32")
    errors = [
        output_error(
            x,
            weight,
            fit_operator(DENSE, observe(DENSE, data), weight, None, qparams, INT4, OPTIMAL).weight,
        )
        for data in (x, loud)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_fit_operator__nearest_is_nearest() -> None:
    weight = np.random.default_rng(2).standard_normal((6, 4)).astype("float32")
    qparams = weight_qparams(weight, INT8)
    fitted = fit_operator(
        DENSE, observe(DENSE, np.eye(6, dtype="float32")), weight, None, qparams, INT8, NEAREST
    )
    expected = np.rint(weight / qparams.scale) * qparams.scale
    assert np.array_equal(fitted.weight, expected.astype("float32"))


def test_round_rows__near_brute_force_on_three_weights() -> None:
    rng = np.random.default_rng(3)
    equal, ratios = 0, []
    one = np.ones((1, 1))
    for _ in range(60):
        x = rng.standard_normal((50, 3)) @ rng.standard_normal((3, 3))
        hessian = x.T @ x
        weight = rng.uniform(-2, 2, (1, 1, 3))
        problem = LeastSquares.of(hessian[None], 1e-9)
        levels = problem.restore(
            round_rows(problem, problem.permute(weight), one, -4 * one, 4 * one)
        )

        def error(q: np.ndarray, w: np.ndarray = weight, h: np.ndarray = hessian) -> float:
            return float((w - q)[0, 0] @ h @ (w - q)[0, 0])

        grid = itertools.product(range(-4, 5), repeat=3)
        best = min(error(np.array(q, "float64").reshape(1, 1, 3)) for q in grid)
        ratios.append(error(levels) / best)
        equal += ratios[-1] < 1 + 1e-9
    assert min(ratios) > 1 - 1e-9
    assert equal > 40
    assert np.median(ratios) < 1 + 1e-9


def test_least_squares__the_factor_is_of_the_inverse():
    """U^T U (H + damping) is one, for several matrices; one is of an input that is zero, and what
    they are made from stays.
    """
    rng = np.random.default_rng(3)
    data = rng.normal(size=(3, 200, 40)) * rng.lognormal(size=(3, 1, 40))
    data[2] = 0
    gram = np.einsum("gnk,gnl->gkl", data, data)
    before = gram.copy()
    problem = LeastSquares.of(gram, 0.01)
    np.testing.assert_array_equal(gram, before)
    np.testing.assert_array_equal(np.tril(problem.factor, -1), 0)
    for found, matrix, order in zip(problem.factor, gram, problem.order, strict=True):
        damping = 0.01 * (np.diagonal(matrix).mean() or 1.0)
        hessian = matrix[order][:, order] + damping * np.eye(40)
        assert (np.diff(np.diagonal(hessian)) <= 0).all()
        np.testing.assert_allclose(found.T @ found @ hessian, np.eye(40), atol=1e-9)


def test_round_rows__two_weights_share_an_error() -> None:
    # Both inputs are always equal: only the sum of the weights counts, 0.4 + 0.4 = 0.8 is nearest
    # to 1.
    x = np.repeat(np.arange(1, 9, dtype="float32")[:, None], 2, axis=1)
    weight = np.array([[0.4], [0.4]], "float32")
    qparams = QParams(np.ones(1, "float32"), np.zeros(1, "int32"), "int8", 1)
    fitted = fit_operator(DENSE, observe(DENSE, x), weight, None, qparams, INT8, OPTIMAL)
    assert fitted.weight.sum() == 1


@given(st.integers(0, 2**32 - 1), st.sampled_from([INT8, INT4, INT4_TENSOR]), st.integers(1, 9))
@settings(max_examples=count_examples(30), deadline=None)
def test_fit_operator__integers_within_limits_and_on_grid(
    seed: int, spec: QSpec, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((columns, 3)).astype("float32")
    # A scale that is too small: much is clipped.
    qparams = weight_qparams(weight * np.float32(rng.uniform(0.3, 1)), spec)
    x = make_inputs(rng, 20, columns)
    fitted = fit_operator(DENSE, observe(DENSE, x), weight, None, qparams, spec, OPTIMAL)
    levels = fitted.weight / fitted.qparams.scale
    assert np.abs(levels - np.rint(levels)).max() < 1e-3
    assert spec.limits[0] <= np.rint(levels).min()
    assert np.rint(levels).max() <= spec.limits[1]


def test_fit_operator__bias_takes_the_mean_error() -> None:
    rng = np.random.default_rng(4)
    x = make_inputs(rng, 300, 10)
    weight = rng.standard_normal((10, 5)).astype("float32")
    bias = rng.standard_normal((1, 5)).astype("float32")
    qparams = weight_qparams(weight, INT4)
    fitted = fit_operator(
        DENSE, observe(DENSE, x[:100], x[100:]), weight, bias, qparams, INT4,
        FitSettings(WeightRounding.NEAREST, BiasCorrection.WEIGHT),
    )  # fmt: skip
    assert fitted.bias is not None
    assert fitted.bias.shape == bias.shape
    before = (x @ weight).mean(axis=0) - (x @ fitted.weight).mean(axis=0)
    after = (x @ weight + bias).mean(axis=0) - (x @ fitted.weight + fitted.bias).mean(axis=0)
    assert np.abs(before).max() > 1e-2
    assert np.abs(after).max() < 1e-4


def test_round_bias__is_in_units_of_the_accumulator() -> None:
    """But for the second channel, whose sum no data changes."""
    weight = np.array([[1, 0, -1], [2, 0, 3]], "float32")
    scale = np.array([0.5, 0.25, 0.125], "float32")
    parameters = QParams(scale, np.zeros(3, "int32"), "int8", 1)
    bias = np.array([[0.7, 0.07, -0.49]], "float32")
    fitted = FittedWeight(weight, parameters, bias)
    data = QParams(np.array(0.5, "float32"), np.array(0, "int32"), "int8")
    rounded = round_bias(fitted, DENSE, data)
    np.testing.assert_array_equal(rounded, np.array([[0.75, 0.07, -0.5]], "float32"))
    rows = QParams(np.ones(4, "float32"), np.zeros(4, "int32"), "int8", 0)
    np.testing.assert_array_equal(round_bias(fitted, DENSE, rows), bias)


def test_fit_operator__bias_shared_by_channels_is_kept() -> None:
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((4, 3)).astype("float32")
    x = make_inputs(rng, 20, 4)
    fitted = fit_operator(
        DENSE, observe(DENSE, x), weight, np.array([2], "float32"),
        weight_qparams(weight, INT8), INT8, FitSettings(),
    )  # fmt: skip
    assert fitted.bias is not None
    assert fitted.bias.tolist() == [2]


@pytest.mark.parametrize("spec", [INT4, INT4_TENSOR], ids=["channel", "tensor"])
def test_fit_operator__scale_search_never_hurts(spec: QSpec) -> None:
    rng = np.random.default_rng(6)
    x = make_inputs(rng, 200, 16)
    weight = rng.standard_normal((16, 6)).astype("float32")
    qparams, statistics = weight_qparams(weight, spec), observe(DENSE, x)
    searched = FitSettings(
        WeightRounding.OPTIMAL, BiasCorrection.NONE, scale_factors=(1.0, 0.9, 0.8, 0.7)
    )
    plain = fit_operator(DENSE, statistics, weight, None, qparams, spec, OPTIMAL)
    better = fit_operator(DENSE, statistics, weight, None, qparams, spec, searched)
    assert better.qparams.scale.shape == qparams.scale.shape
    assert (better.qparams.scale <= qparams.scale).all()
    assert (better.qparams.scale < qparams.scale).any()
    assert output_error(x, weight, better.weight) < output_error(x, weight, plain.weight)


def test_fit_operator__one_scale_clips_a_channel_that_hardly_counts() -> None:
    rng = np.random.default_rng(10)
    view = LinearView((0, 2, 3, 1), (0, 2, 3, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 4)
    x = rng.uniform(0, 1, (8, 4, 3, 3)).astype("float32")
    x[:, 2] *= 1e-4
    weight = np.array([0.5, -0.3, 200, 0.4], "float32").reshape(4, 1, 1, 1)
    spec = QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_TENSOR, quant_min=-127)
    statistics = observe(view, x)
    fitted = fit_operator(
        view, statistics, weight, None, weight_qparams(weight, spec), spec, OPTIMAL
    )
    assert float(fitted.qparams.scale) < 0.2
    assert abs(float(fitted.weight[0, 0, 0, 0]) - 0.5) < 0.1


def test_fit_operator__input_always_zero_is_rounded_to_nearest() -> None:
    rng = np.random.default_rng(7)
    x = make_inputs(rng, 50, 5)
    x[:, 2] = 0
    weight = rng.standard_normal((5, 3)).astype("float32")
    qparams = weight_qparams(weight, INT8)
    fitted = fit_operator(DENSE, observe(DENSE, x), weight, None, qparams, INT8, OPTIMAL)
    expected = np.rint(weight[2] / qparams.scale) * qparams.scale
    assert np.allclose(fitted.weight[2], expected, atol=1e-6)


def test_fit_operator__all_inputs_zero() -> None:
    weight = np.random.default_rng(8).standard_normal((5, 3)).astype("float32")
    qparams = weight_qparams(weight, INT8)
    statistics = observe(DENSE, np.zeros((9, 5), "float32"))
    fitted = fit_operator(DENSE, statistics, weight, None, qparams, INT8, OPTIMAL)
    assert np.abs(fitted.weight - weight).max() <= qparams.scale.max() / 2 * 1.001


def test_fit_operator__wide_matrices_cross_blocks() -> None:
    rng = np.random.default_rng(9)
    x = make_inputs(rng, 600, 300)
    weight = rng.standard_normal((300, 4)).astype("float32")
    qparams, statistics = weight_qparams(weight, INT4), observe(DENSE, x)
    nearest = fit_operator(DENSE, statistics, weight, None, qparams, INT4, NEAREST)
    optimal = fit_operator(DENSE, statistics, weight, None, qparams, INT4, OPTIMAL)
    assert output_error(x, weight, optimal.weight) < 0.6 * output_error(x, weight, nearest.weight)


@pytest.mark.parametrize(
    "settings_",
    [
        {"scale_factors": ()},
        {"scale_factors": (1.0, 0.0)},
        {"tensor_factors": ()},
        {"damping": 0.0},
        {"optimal_columns": -1},
        {"samples": 0},
        {"rounding": "nearer"},
    ],
)
def test_fit_settings__refuses(settings_: dict) -> None:
    with pytest.raises(ConfigError, match="FitSettings"):
        FitSettings(**settings_)


def test_fit_operator__blocks_of_columns_stand_for_a_wide_matrix() -> None:
    """Each block is fitted for itself: better than nearest, not as good as all columns at once."""
    rng = np.random.default_rng(11)
    x = make_inputs(rng, 400, 50)
    weight = rng.standard_normal((50, 6)).astype("float32")
    qparams = weight_qparams(weight, INT4)
    settings_ = FitSettings(
        WeightRounding.OPTIMAL, BiasCorrection.NONE, scale_factors=(1.0, 0.9, 0.8)
    )

    def error(statistics: InputStatistics, chosen: FitSettings) -> float:
        fitted = fit_operator(DENSE, statistics, weight, None, qparams, INT4, chosen)
        return output_error(x, weight, fitted.weight)

    split = observe(DENSE, x[:150], x[150:], most=20)
    assert split.settle().gram.shape == (3, 17, 17)
    whole, nearest = error(observe(DENSE, x), settings_), error(split, NEAREST)
    assert whole < error(split, settings_) < 0.8 * nearest


@pytest.mark.parametrize("spec", [INT8, INT4_TENSOR], ids=["int8", "int4 tensor"])
def test_fit_operator__blocks_of_unrelated_columns_give_the_closed_form_of_the_whole(
    spec: QSpec,
) -> None:
    """Where no input of one block has to do with one of another, nothing is lost."""
    rng = np.random.default_rng(13)
    x = np.zeros((90, 60), "float32")
    for i in range(3):
        part = slice(20 * i, 20 * i + 20)
        x[30 * i : 30 * i + 30, part] = make_inputs(rng, 30, 20)
        # One mean of the diagonal: the same damping.
        x[:, part] /= np.linalg.norm(x[:, part])
    weight = rng.standard_normal((60, 7)).astype("float32")
    qparams = weight_qparams(weight, spec)
    chosen = FitSettings(bias=BiasCorrection.NONE, scale_factors=(1.0, 0.9, 0.8), sweeps=1)
    whole, split = (
        fit_operator(DENSE, observe(DENSE, x, most=most), weight, None, qparams, spec, chosen)
        for most in (None, 20)
    )
    assert np.array_equal(whole.weight, split.weight)
    assert np.array_equal(whole.qparams.scale, split.qparams.scale)


@pytest.mark.parametrize("rounding", WeightRounding)
def test_fit_operator__parts_of_the_outputs_give_what_all_at_once_do(
    rounding: WeightRounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(14)
    x = make_inputs(rng, 90, 40)
    weight, bias = rng.standard_normal((40, 23)).astype("float32"), np.zeros(23, "float32")
    qparams, statistics = weight_qparams(weight, INT4), observe(DENSE, x, most=15)
    chosen = FitSettings(rounding, scale_factors=(1.0, 0.9), sweeps=1)
    found = []
    for most in (fit.MOST_WEIGHTS, 100):
        monkeypatch.setattr(fit, "MOST_WEIGHTS", most)
        found.append(fit_operator(DENSE, statistics, weight, bias, qparams, INT4, chosen))
    for name in ("weight", "bias"):
        assert np.allclose(getattr(found[0], name), getattr(found[1], name), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [INT8, INT4_TENSOR], ids=["int8", "int4 tensor"])
def test_fit_operator__memory_of_a_wide_layer_is_that_of_its_weights(
    spec: QSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a dozen float64 copies of them, nor the second moments of all blocks at once."""
    monkeypatch.setattr(fit, "MOST_WEIGHTS", 1 << 12)
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    rng = np.random.default_rng(15)
    x = np.maximum(rng.standard_normal((16, 3000), "float32"), 0)
    weight = rng.standard_normal((3000, 100), "float32")
    qparams, statistics = weight_qparams(weight, spec), observe(DENSE, x, most=150)
    bias, chosen = np.zeros(100, "float32"), FitSettings(tensor_factors=(1.0, 0.9))
    tracemalloc.start()
    with limit_blas():
        fit_operator(DENSE, statistics, weight, bias, qparams, spec, chosen)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * weight.nbytes


def observe_both(x: np.ndarray, y: np.ndarray, parts: int = 1, **options: int) -> InputStatistics:
    """Statistics of a quantized input and of the float model's input to the same operator."""
    start = InputStatistics.empty(1, x.shape[1], with_gram=True, with_real=True, **options)
    merged = start
    for own, real in zip(np.array_split(x, parts), np.array_split(y, parts), strict=True):
        found = start.add(DENSE, [own], 10**6, np.random.default_rng(0), real=[real])
        merged = merged.merge(found)
    return merged


@pytest.mark.parametrize("with_bias", [False, True])
def test_find_target__is_the_ridge_regression(with_bias: bool) -> None:
    """The same weight as scipy's least squares with rows for the ridge."""
    rng = np.random.default_rng(20)
    y = make_inputs(rng, 200, 12)
    x = y + rng.normal(0.3, 0.5, y.shape).astype("float32")
    weight = rng.standard_normal((1, 5, 12))
    found = find_target(observe_both(x, y, 3), weight, 0.3, with_bias=with_bias)
    own, real = (a.astype("float64") - with_bias * a.mean(axis=0) for a in (x, y))
    ridge = (0.3 + 12 / 200) * np.square(own).sum() / 12
    left = np.concatenate([own, np.sqrt(ridge) * np.eye(12)])
    right = np.concatenate([real @ weight[0].T, np.sqrt(ridge) * weight[0].T])
    expected = scipy.linalg.lstsq(left, right)[0].T
    assert np.allclose(found.rows[0], expected, atol=1e-5)
    assert np.allclose(found.statistics.find_gram(0)[0], own.T @ own, rtol=1e-4, atol=1e-3)


def test_fit_operator__after_the_float_model_near_brute_force_on_three_weights() -> None:
    """Of all levels, those whose sums come nearest to the float model's, with the best bias."""
    rng, ratios = np.random.default_rng(21), []
    spec = QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_TENSOR, quant_min=-4, quant_max=4)
    one = QParams(np.float32(1), np.int32(0), "int8", None)
    chosen = FitSettings(
        tensor_factors=(1.0,),
        damping=1e-6,
        sweeps=2,
        reconstruction=ReconstructionSettings(ridge=1e-6, scale_factors=(1.0,)),
    )
    grid = np.array([*itertools.product(range(-4, 5), repeat=3)], "float64")
    for _ in range(40):
        y = rng.standard_normal((400, 3)).astype("float32")
        x = (y @ (np.eye(3) + 0.1 * rng.standard_normal((3, 3))) + 1).astype("float32")
        weight, bias = rng.uniform(-2, 2, (3, 1)).astype("float32"), np.zeros(1, "float32")
        got = fit_operator(DENSE, observe_both(x, y), weight, bias, one, spec, chosen)
        missing = (y @ weight).astype("float64") - x @ grid.T
        best = np.square(missing - missing.mean(axis=0)).sum(axis=0).min()
        assert got.bias is not None
        error = np.square(y @ weight - x @ got.weight.astype("float64") - got.bias).sum()
        ratios.append(error / best)
    assert min(ratios) > 1 - 1e-3
    assert np.median(ratios) < 1 + 1e-3
    assert np.mean(np.array(ratios) < 1 + 1e-3) > 0.6


@pytest.mark.parametrize("most", [None, 4])
def test_input_statistics__of_both_inputs_are_equal_whatever_the_batches(most: int | None) -> None:
    rng = np.random.default_rng(22)
    y = make_inputs(rng, 301, 7)
    x = y + rng.standard_normal(y.shape).astype("float32")
    options = {} if most is None else {"most": most}
    start = InputStatistics.empty(1, 7, with_gram=True, with_real=True, **options)
    kept = start.restore(observe_both(x, y, 9, **options).to_arrays())
    whole, parts = (observe_both(x, y, count, **options) for count in (1, 9))
    settled = observe_both(x, y, 9, **options).settle()
    for statistics in (whole, kept, parts, settled):
        for number, columns in enumerate(statistics.cut_columns()):
            own, real = (a[:, columns].astype("float64") for a in (x, y))
            assert np.allclose(statistics.find_cross(number)[0], own.T @ real, rtol=1e-4, atol=0.1)
            assert np.allclose(statistics.find_gram(number)[0], own.T @ own, rtol=1e-4, atol=0.1)
        assert np.allclose(statistics.real_mean[0], y.mean(axis=0, dtype="float64"))


def test_input_statistics__equal_whatever_the_batches() -> None:
    rng = np.random.default_rng(12)
    x = make_inputs(rng, 301, 7)
    parts = observe(DENSE, *np.array_split(x, 9)).settle()
    exact = x.astype("float64")
    assert parts.rows == 301
    assert np.allclose(parts.gram[0], exact.T @ exact, rtol=1e-5)
    assert np.allclose(parts.mean[0], exact.mean(axis=0))


def test_fit_settings__rows_are_bounded_by_the_columns() -> None:
    chosen = FitSettings(samples=1000, max_columns=500, optimal_columns=None)
    found = [chosen.count_rows(n, INT8, DATA) for n in (1, 10, 300, 500, 5000)]
    assert found == [128, 1000, 1200, 2000, 2000]
    nearest = FitSettings(rounding=WeightRounding.NEAREST)
    assert [nearest.count_rows(n, INT8, DATA) for n in (1, 8, 5000)] == [128, 1024, 1024]


@pytest.mark.parametrize(
    ("settings", "weight", "data", "expected"),
    [
        (FitSettings(), INT8, DATA, [True, False]),
        (FitSettings(optimal_columns=None), INT8, DATA, [True, True]),
        (FitSettings(optimal_columns=0), INT8, DATA, [False, False]),
        (FitSettings(), INT8, None, [True, True]),  # the weight's error is the only one
        (FitSettings(), INT8, QSpec("int16"), [True, True]),
        (FitSettings(), INT4, DATA, [True, True]),
        (FitSettings(), QSpec("int8", quant_min=-63, quant_max=63), DATA, [True, True]),
        (FitSettings(), replace(INT8, granularity=Granularity.PER_TENSOR), DATA, [True, True]),
        (FitSettings(WeightRounding.ADAPTIVE), INT8, DATA, [True, True]),
        (FitSettings(WeightRounding.NEAREST), INT4, None, [False, False]),
    ],
)
def test_fit_settings__moments_where_they_gain_most(settings, weight, data, expected) -> None:
    assert [settings.needs_moments(n, weight, data) for n in (800, 801)] == expected


ADAPTIVE = FitSettings(WeightRounding.ADAPTIVE, BiasCorrection.NONE)


@pytest.mark.parametrize("spec", [INT8, INT4, INT4_TENSOR], ids=["int8", "int4", "int4 tensor"])
def test_adaround__layer_error_is_below_that_of_nearest(spec: QSpec) -> None:
    rng = np.random.default_rng(21)
    x = make_inputs(rng, 500, 40)
    weight = rng.standard_normal((40, 12)).astype("float32")
    qparams, statistics = weight_qparams(weight, spec), observe(DENSE, x)
    nearest = fit_operator(DENSE, statistics, weight, None, qparams, spec, NEAREST)
    learned = fit_operator(DENSE, statistics, weight, None, qparams, spec, ADAPTIVE)
    again = fit_operator(DENSE, statistics, weight, None, qparams, spec, ADAPTIVE)
    assert np.array_equal(learned.weight, again.weight)
    assert output_error(x, weight, learned.weight) < 0.6 * output_error(x, weight, nearest.weight)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=count_examples(10), deadline=None)
def test_learn_rounding__up_or_down_within_limits_and_never_worse(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((20, columns))
    hessian, rows = (x.T @ x)[None], rng.uniform(-4, 4, (1, 3, columns))
    one = np.ones((1, 1))
    levels = learn_rounding(hessian, rows, one, -3 * one, 3 * one, AdaRoundSettings(steps=40))
    nearest = np.clip(np.rint(rows), -3, 3)
    assert set(np.unique(levels - np.clip(np.floor(rows), -3, 3))) <= {0.0, 1.0}
    problem = LeastSquares.of(hessian, 1e-9)
    assert np.all(
        problem.errors(problem.permute(rows - levels))
        <= problem.errors(problem.permute(rows - nearest)) * (1 + 1e-6) + 1e-9
    )


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"rate": 0.0}, {"warm_up": 1.0}])
def test_adaround_settings__refuse(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="AdaRoundSettings"):
        AdaRoundSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"bits": -1}, {"ridge": 0.0}, {"scale_factors": ()}])
def test_reconstruction_settings__wrong_ones_are_named(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="ReconstructionSettings"):
        ReconstructionSettings(**wrong)


def test_fit_settings__reconstruction_is_for_few_bits_that_are_not_rounded_to_nearest() -> None:
    assert OPTIMAL.reconstructs(INT4)
    assert not OPTIMAL.reconstructs(INT8)
    assert not NEAREST.reconstructs(INT4)
    assert OPTIMAL.for_spec(INT8) is OPTIMAL
    assert OPTIMAL.for_spec(INT4).sweeps == OPTIMAL.reconstruction.sweeps
