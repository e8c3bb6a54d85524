"""Observers: streaming, merging, and the quality of what they pick."""

from __future__ import annotations

import inspect
import io
import itertools
from dataclasses import FrozenInstanceError, dataclass, replace

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from relayquant.base.qtypes import (
    Granularity,
    QParams,
    QSpec,
    Role,
    Scheme,
    ValueInfo,
    choose_qparams,
)
from relayquant.config.observers import (
    MSE,
    AverageMax,
    Fixed,
    KLDivergence,
    MinMax,
    MovingAverageMinMax,
    Percentile,
)
from relayquant.config.observers.base import call_observer
from relayquant.config.observers.search import (
    expected_squared_errors,
    search_kl_range,
    sum_squared_errors,
)
from relayquant.errors import ConfigError, DataError
from relayquant.stages.calibration.parameters import (
    CallableCalibration,
    ValueSamples,
    resolve_observer,
)

AFFINE = ValueInfo("relu_1", Role.ACTIVATION, QSpec("int8"), ("n", 4))
SYMMETRIC = replace(AFFINE, spec=QSpec("int8", Scheme.SYMMETRIC))
PER_CHANNEL = replace(
    AFFINE,
    spec=QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL),
    shape=("n", 3, 5),
    axis=1,
)
WEIGHT = ValueInfo(
    "conv_1:weight",
    Role.WEIGHT,
    QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=-127),
    (4, 500),
    axis=0,
)

OBSERVERS = [MinMax(), MovingAverageMinMax(), AverageMax(), Percentile(), KLDivergence(), MSE()]
#: Observers whose merging does not depend on the order.
COMMUTATIVE = [o for o in OBSERVERS if not isinstance(o, MovingAverageMinMax)]

name_of = lambda value: getattr(value, "name", None)  # noqa: E731

BATCHES = arrays(
    "float32", st.tuples(st.integers(0, 4), st.just(4)), elements=st.floats(-1e4, 1e4, width=32)
)


def state_of(observer, info, *batches):
    state = observer.start(info)
    for batch in batches:
        state = observer.update(state, batch)
    return state


def assert_same_state(a, b, tolerance=1e-9):
    left, right = a.to_arrays(), b.to_arrays()
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_allclose(left[key], right[key], rtol=tolerance, atol=1e-9, err_msg=key)


def quantize(data, qparams, spec, shape=()):
    scale = qparams.scale.astype("float64").reshape(shape or qparams.scale.shape)
    zero_point = qparams.zero_point.reshape(shape or qparams.zero_point.shape).astype("float64")
    q = np.clip(np.rint(data / scale) + zero_point, *spec.limits)
    return (q - zero_point) * scale


def mean_squared_error(data, qparams, spec):
    return float(np.mean((quantize(data.astype("float64"), qparams, spec) - data) ** 2))


def covered(qparams, spec):
    """Real range that the parameters represent."""
    scale, zero_point = float(qparams.scale), int(qparams.zero_point)
    return scale * (spec.limits[0] - zero_point), scale * (spec.limits[1] - zero_point)


# --- The contract, for all --------------------------------------------------------------------


@pytest.mark.parametrize("observer", COMMUTATIVE, ids=name_of)
@settings(max_examples=count_examples(25), deadline=None)
@given(BATCHES, BATCHES, BATCHES)
def test_merge__equals_having_seen_all(observer, a, b, c):
    x, y, z = (state_of(observer, AFFINE, part) for part in (a, b, c))
    whole = state_of(observer, AFFINE, a, b, c)
    states = [
        observer.merge(observer.merge(x, y), z),
        observer.merge(x, observer.merge(y, z)),
        observer.merge(observer.merge(z, y), x),
    ]
    if isinstance(observer, AverageMax):  # sums of floats
        for state in states:
            assert_same_state(state, whole, 1e-6)
    else:
        exact = {k: v.tobytes() for k, v in whole.to_arrays().items() if k != "count"}
        for state in states:
            assert {k: v.tobytes() for k, v in state.to_arrays().items() if k != "count"} == exact


@settings(max_examples=count_examples(50))
@given(BATCHES, BATCHES, BATCHES)
def test_merge__moving_average_is_associative_and_weighted_by_counts(a, b, c):
    observer = MovingAverageMinMax()
    x, y, z = (state_of(observer, AFFINE, part, part) for part in (a, b, c))
    left = observer.merge(observer.merge(x, y), z)
    right = observer.merge(x, observer.merge(y, z))
    assert_same_state(left, right, 1e-6)
    assert left.count == x.count + y.count + z.count


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
@pytest.mark.parametrize("info", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
def test_qparams__survive_saving_the_state(observer, info):
    data = np.random.default_rng(1).normal(size=(3, 8, 4)).astype("float32")
    state = state_of(observer, info, *data)
    file = io.BytesIO()
    np.savez(file, **state.to_arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as saved:
        again = observer.restore(info, saved)
    assert observer.qparams(again, info) == observer.qparams(state, info)
    assert observer.qparams(state, info) == observer.observe(info, data)


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
def test_restore__refuses_what_another_observer_wrote(observer):
    with pytest.raises(DataError, match="lacks"):
        observer.restore(AFFINE, {"something": np.zeros(3)})


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
@pytest.mark.parametrize("info", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
def test_qparams__constant_zero_has_scale_one(observer, info):
    qparams = observer.observe(info, [np.zeros((2, 4), "float32")])
    assert qparams.scale == 1


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
@pytest.mark.parametrize("value", [7.0, -7.0, 1e-30, 1e30])
def test_qparams__constant_value_is_represented(observer, value):
    data = np.full((2, 4), value, "float32")
    qparams = observer.observe(AFFINE, [data])
    np.testing.assert_allclose(quantize(data, qparams, AFFINE.spec), data, rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
def test_qparams__without_data(observer):
    with pytest.raises(DataError, match=r"'relu_1' has seen no data"):
        observer.observe(AFFINE, [])
    with pytest.raises(DataError, match=r"'relu_1' has seen no data"):
        observer.observe(AFFINE, [np.zeros((0, 4), "float32")])


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
@pytest.mark.parametrize("info", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
def test_update__refuses_what_is_not_finite(observer, info):
    data = np.array([[1, np.nan, np.inf, -np.inf]], "float32")
    with pytest.raises(DataError, match=r"'relu_1' holds 1 NaN and 2 infinite of 4") as caught:
        observer.observe(info, [data])
    assert "preprocessing" in str(caught.value)
    with pytest.raises(DataError, match=r"0 NaN and 1 infinite"):
        observer.observe(info, [data[:, [0, 2]]])


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
def test_update__leaves_the_state_alone(observer):
    first = state_of(observer, AFFINE, np.ones((2, 4), "float32"))
    before = {k: v.copy() for k, v in first.to_arrays().items()}
    observer.update(first, np.full((2, 4), 9.0, "float32"))
    for key, value in first.to_arrays().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
def test_update__takes_other_dtypes_and_refuses_objects(observer):
    expected = observer.observe(AFFINE, [np.array([[-3.0, 0.0, 2.0, 5.0]], "float32")])
    for dtype in ("float16", "float64", "int32"):
        assert observer.observe(AFFINE, [np.array([[-3, 0, 2, 5]], dtype)]) == expected
    with pytest.raises(DataError, match=r"'relu_1' was given an array of dtype object"):
        observer.observe(AFFINE, [np.array([None])])


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
def test_merge__refuses_states_of_different_values(observer):
    with pytest.raises(DataError, match=r"'relu_1' and 'relu_2'"):
        observer.merge(observer.start(AFFINE), observer.start(replace(AFFINE, name="relu_2")))


@pytest.mark.parametrize("observer", OBSERVERS, ids=name_of)
def test_state__does_not_grow_with_the_data(observer):
    small = state_of(observer, AFFINE, np.ones((1, 4), "float32")).to_arrays()
    data = np.random.default_rng(0).normal(size=(50, 100, 4)).astype("float32")
    big = state_of(observer, AFFINE, *data).to_arrays()
    assert {k: v.nbytes for k, v in small.items()} == {k: v.nbytes for k, v in big.items()}


def test_settings__are_frozen():
    with pytest.raises(FrozenInstanceError):
        Percentile().percentile = 5  # pyright: ignore


# --- Ranges -----------------------------------------------------------------------------------


def test_minmax__range_of_everything():
    data = [np.array([[1.0, 2, 3, 4]]), np.array([[-5.0, 0, 0, 1]])]
    assert MinMax().observe(AFFINE, data) == choose_qparams(-5, 4, AFFINE.spec)


def test_minmax__per_channel():
    data = np.random.default_rng(0).normal(size=(2, 7, 3, 5)) * np.array([1, 10, 100])[:, None]
    expected = choose_qparams(
        data.min(axis=(0, 1, 3)), data.max(axis=(0, 1, 3)), PER_CHANNEL.spec, axis=1
    )
    assert MinMax().observe(PER_CHANNEL, data) == expected
    assert expected.scale.shape == (3,)
    negative = replace(PER_CHANNEL, axis=-2)
    assert MinMax().observe(negative, data) == expected.with_axis(-2)
    with pytest.raises(DataError, match=r"along axis 1, but was given an array of shape \(4,\)"):
        MinMax().observe(PER_CHANNEL, [np.ones(4)])


def test_moving_average__recurrence():
    data = [np.array([[-1.0, 10.0]]), np.array([[-3.0, 20.0]]), np.array([[0.0, 0.0]])]
    state = state_of(MovingAverageMinMax(momentum=0.75), AFFINE, *data)
    assert state.low == (-1 * 0.75 + -3 * 0.25) * 0.75
    assert state.high == (10 * 0.75 + 20 * 0.25) * 0.75
    assert state.count == 3


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 2, float("nan"), "0.9", True])
def test_moving_average__refuses_momentum(momentum):
    with pytest.raises(ConfigError, match=r"MovingAverageMinMax\.momentum is .*allowed"):
        MovingAverageMinMax(momentum)


def test_average_max__means_over_samples():
    data = np.array([[-1.0, 2, 0, 0], [-8.0, 4, 0, 0]])
    affine = AverageMax().observe(AFFINE, [data[:1], data[1:]])
    assert affine == choose_qparams(-4.5, 3.0, AFFINE.spec)
    assert affine == AverageMax().observe(AFFINE, [data])
    assert AverageMax().observe(SYMMETRIC, [data]) == choose_qparams(-5, 5, SYMMETRIC.spec)


def test_average_max__per_channel_and_weights():
    data = np.random.default_rng(0).normal(size=(6, 3, 5))
    top = np.abs(data).max(axis=2).mean(axis=0)
    expected = choose_qparams(-top, top, PER_CHANNEL.spec, axis=1)
    found = AverageMax().observe(PER_CHANNEL, [data[:2], data[2:]])
    np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-6)
    weight = np.random.default_rng(0).normal(size=(4, 500))
    top = np.abs(weight).max(axis=1)
    assert AverageMax().observe(WEIGHT, [weight]) == choose_qparams(-top, top, WEIGHT.spec, 0)


# --- Fixed ------------------------------------------------------------------------------------


def test_fixed__looks_at_no_data():
    assert not Fixed.needs_data
    assert Fixed(0.5, 3).observe(AFFINE, []) == QParams(0.5, 3, "int8")
    assert Fixed(0.5).observe(SYMMETRIC, [np.array([np.nan])]) == QParams(0.5, 0, "int8")
    assert Fixed(low=-1, high=1).observe(AFFINE, []) == choose_qparams(-1, 1, AFFINE.spec)
    uint8 = replace(SYMMETRIC, spec=QSpec("uint8", Scheme.SYMMETRIC))
    assert Fixed(0.5).observe(uint8, []) == QParams(0.5, 128, "uint8")
    found = Fixed([0.5, 1.0, 2.0]).observe(PER_CHANNEL, [])
    assert found == QParams([0.5, 1.0, 2.0], [0, 0, 0], "int8", 1)
    assert hash(Fixed([0.5, 1.0])) == hash(Fixed((0.5, 1.0)))


@pytest.mark.parametrize(
    "settings_",
    [{}, {"low": 1}, {"zero_point": 1}, {"scale": 1.0, "low": 0, "high": 1}],
)
def test_fixed__refuses_incomplete_settings(settings_):
    with pytest.raises(ConfigError, match=r"Fixed got .*; allowed: scale with or without"):
        Fixed(**settings_)


def test_fixed__refuses_what_the_value_does_not_take():
    with pytest.raises(ConfigError, match=r"Fixed\(scale=0.5, zero_point=3.*the symmetric scheme"):
        Fixed(0.5, 3).observe(SYMMETRIC, [])
    with pytest.raises(ConfigError, match=r"shape \(3,\)"):
        Fixed([0.5, 1.0]).observe(PER_CHANNEL, [])
    with pytest.raises(ConfigError, match="outside int8"):
        Fixed(0.5, 300).observe(AFFINE, [])


# --- Percentile -------------------------------------------------------------------------------


@pytest.mark.parametrize("percentile", [90, 99, 99.9, 99.99, 100])
def test_percentile__agrees_with_numpy(percentile):
    data = np.random.default_rng(0).standard_t(4, size=(10, 50_000)).astype("float32")
    observer = Percentile(percentile)
    state = state_of(observer, AFFINE, *data)
    low, high = np.percentile(data, [100 - percentile, percentile])
    # One bin, and at the far end the gap between neighbouring samples.
    expected = choose_qparams(low, high, AFFINE.spec).scale
    slack = 2 * state.histogram.width / (high - low) + (2e-2 if percentile > 99.9 else 2e-3)
    np.testing.assert_allclose(observer.qparams(state, AFFINE).scale, expected, rtol=slack)
    top = np.percentile(np.abs(data), percentile)
    expected = choose_qparams(-top, top, SYMMETRIC.spec).scale
    np.testing.assert_allclose(observer.qparams(state, SYMMETRIC).scale, expected, rtol=slack)


def test_percentile__one_outlier_is_clipped():
    data = np.random.default_rng(0).uniform(0, 1, 100_000)
    data[77] = 300.0
    low, high = covered(Percentile(99.9).observe(AFFINE, [data]), AFFINE.spec)
    assert low == 0
    assert 0.85 < high < 1.15


@pytest.mark.parametrize("value", [0.9999, 0.5, 1, 0])
def test_percentile__fractions_are_explained(value):
    with pytest.raises(ConfigError, match=r"looks like a fraction; percentages are meant: write"):
        Percentile(value)


@pytest.mark.parametrize("value", [-1, 1.5, 49, 100.1])
def test_percentile__out_of_range(value):
    with pytest.raises(ConfigError, match=r"allowed: 50 to 100 percent"):
        Percentile(value)


@pytest.mark.parametrize("value", ["99", None, float("nan"), True])
def test_percentile__not_a_number(value):
    with pytest.raises(ConfigError, match=r"allowed: a number"):
        Percentile(value)


# --- KL ---------------------------------------------------------------------------------------

SHAPES = {
    "uniform": lambda g, n: g.uniform(-1, 1, n),
    "uniform_positive": lambda g, n: g.uniform(0, 1, n),
    "gaussian": lambda g, n: g.normal(size=n),
    "laplace": lambda g, n: g.laplace(size=n),
    "relu": lambda g, n: np.maximum(g.normal(size=n), 0),
    "sparse_relu": lambda g, n: np.maximum(g.normal(size=n) - 1.5, 0),
    "minus_relu": lambda g, n: np.minimum(g.normal(size=n), 0),
    "relu6": lambda g, n: np.clip(3 * g.normal(size=n), 0, 6),
    "shifted": lambda g, n: g.normal(size=n) + 3,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("info", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
@pytest.mark.parametrize("bins", [2048, 8192])
def test_kl__does_not_clip_well_behaved_data(kind, info, bins):
    data = SHAPES[kind](np.random.default_rng(0), 200_000).astype("float32")
    qparams = KLDivergence(bins=bins).observe(info, [data])
    low, high = covered(qparams, info.spec)
    clipped = ((data < low - float(qparams.scale)) | (data > high + float(qparams.scale))).mean()
    assert clipped < 2e-3
    reference = MinMax().observe(info, [data])
    # Never much worse than the full range: 6 dB is one bit.
    ratio = mean_squared_error(data, qparams, info.spec) / mean_squared_error(
        data, reference, info.spec
    )
    assert ratio < 4


def kl_by_definition(counts, zero, threshold, levels):
    """KL divergence in nats of clipping symmetrically at `threshold` bins, as Migacz defines it."""
    inside = counts[zero - threshold : zero + threshold]
    true = inside.astype("float64")
    true[0] += counts[: zero - threshold].sum()
    true[-1] += counts[zero + threshold :].sum()
    scale = 2 * threshold / levels
    approximate = np.zeros(2 * threshold)
    groups = [round((i + 0.5 - threshold) / scale) for i in range(2 * threshold)]
    for group in set(groups):
        members = [i for i, other in enumerate(groups) if other == group]
        used = [i for i in members if true[i] > 0]
        for i in used:
            approximate[i] = inside[members].sum() / len(used)
    used = true > 0
    approximate = approximate[used] / approximate.sum()
    empty = approximate == 0
    # Smoothed as in TVM and MXNet, where only clipped values are in a bin.
    approximate[~empty] -= 1e-4 * empty.sum() / (~empty).sum()
    approximate[empty] = 1e-4
    return float(stats.entropy(true[used], np.maximum(approximate, 1e-12)))


@pytest.mark.slow
def test_kl__near_brute_force_over_all_thresholds():
    data = np.random.default_rng(1).standard_t(4, 60_000)
    data = np.concatenate([data, -data])
    state = state_of(KLDivergence(bins=1024), SYMMETRIC, data)
    edges, counts = state.histogram.occupied()
    zero = int(np.searchsorted(edges, 0.0))
    reach = min(zero, counts.size - zero)
    # Fewer bins than levels are not tried.
    divergences = {t: kl_by_definition(counts, zero, t, 254) for t in range(127, reach, 4)}
    best = min(divergences, key=divergences.__getitem__)
    # As many candidates as there are thresholds.
    _, high = search_kl_range(state.histogram, SYMMETRIC.spec, candidates=20_000)
    found = round(high / state.histogram.width)
    assert 127 < best < reach - 1, "the best one clips"
    assert 127 < found < reach - 1
    assert kl_by_definition(counts, zero, found, 254) <= divergences[best]


@pytest.mark.parametrize("info", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
def test_kl__clips_outliers(info):
    generator = np.random.default_rng(0)
    data = generator.normal(size=500_000)
    data[:5] = 60.0
    qparams = KLDivergence().observe(info, [data])
    _, high = covered(qparams, info.spec)
    assert 2.5 < high < 15
    body = data[5:]
    assert mean_squared_error(body, qparams, info.spec) < 0.2 * mean_squared_error(
        body, MinMax().observe(info, [data]), info.spec
    )


def test_kl__ignores_how_many_exact_zeros_there_are():
    data = np.abs(np.random.default_rng(0).normal(size=100_000))
    many = np.concatenate([data, np.zeros(900_000)])
    assert KLDivergence().observe(AFFINE, [data]) == KLDivergence().observe(AFFINE, [many])


def test_kl__int16_takes_the_full_range():
    info = replace(SYMMETRIC, spec=QSpec("int16", Scheme.SYMMETRIC))
    data = np.random.default_rng(0).normal(size=10_000)
    assert KLDivergence().observe(info, [data]) == MinMax().observe(info, [data])


def test_kl__ranges_with_fewer_bins_than_levels_are_not_tried():
    data = np.random.default_rng(0).lognormal(0, 1.5, 50_000)
    state = state_of(KLDivergence(bins=512), AFFINE, data)
    _, high = search_kl_range(state.histogram, AFFINE.spec)
    assert high >= 255 * state.histogram.width


@pytest.mark.parametrize("candidates", [0, 1, 2.5])
def test_kl__refuses_candidates(candidates):
    with pytest.raises(ConfigError, match=r"KLDivergence\.candidates is"):
        KLDivergence(candidates=candidates)


@pytest.mark.parametrize("observer", [Percentile, KLDivergence, MSE])
def test_histogram_observers__refuse_bins(observer):
    with pytest.raises(ConfigError, match="power of two"):
        observer(bins=1000)


@pytest.mark.parametrize("observer", [Percentile(), KLDivergence(), MSE()], ids=name_of)
def test_histogram_observers__refuse_per_channel_activations(observer):
    with pytest.raises(ConfigError, match=r"one range per tensor, but value 'relu_1' \(activation"):
        observer.start(PER_CHANNEL)


# --- MSE --------------------------------------------------------------------------------------


def find_best_error(data, spec, low_factors, high_factors):
    """Least error over a grid of ranges, on the data itself."""
    low, high = min(data.min(), 0.0), max(data.max(), 0.0)
    return min(
        mean_squared_error(data, choose_qparams(low * a, high * b, spec), spec)
        for a, b in itertools.product(low_factors, high_factors)
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("scheme", Scheme)
def test_mse__near_brute_force(kind, dtype, scheme):
    data = SHAPES[kind](np.random.default_rng(3), 20_000)
    spec = QSpec(dtype, scheme)
    qparams = MSE().observe(replace(AFFINE, spec=spec), [data])
    found = mean_squared_error(data, qparams, spec)
    factors = np.linspace(1.0, 0.3, 24)
    if scheme is Scheme.SYMMETRIC or data.min() >= 0 or data.max() <= 0:
        top = np.abs(data).max()
        low, high = min(data.min(), 0.0), max(data.max(), 0.0)
        best = min(
            mean_squared_error(
                data, choose_qparams(max(low, -f * top), min(high, f * top), spec), spec
            )
            for f in np.linspace(1.0, 0.2, 300)
        )
    else:
        best = find_best_error(data, spec, factors, factors)
    assert found <= best * 1.05


@pytest.mark.parametrize("info", [AFFINE, SYMMETRIC], ids=["affine", "symmetric"])
def test_mse__beats_minmax_on_outliers(info):
    data = np.random.default_rng(0).normal(size=400_000)
    data[:3] = [40.0, -25.0, 33.0]
    mse = mean_squared_error(data, MSE().observe(info, [data]), info.spec)
    minmax = mean_squared_error(data, MinMax().observe(info, [data]), info.spec)
    assert mse < 0.8 * minmax


def test_mse__outlier_on_one_side_is_cut_on_that_side():
    data = np.random.default_rng(0).uniform(-1, 1, size=1_000_000)
    data[0] = 30.0
    low, high = covered(MSE().observe(AFFINE, [data]), AFFINE.spec)
    assert -1.1 < low < -0.97
    assert 0.97 < high < 29


@settings(max_examples=count_examples(40), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["int4", "int8", "uint8", "int16"]),
    st.sampled_from(list(Scheme)),
    st.floats(0.1, 1.2),
    st.floats(0.1, 1.2),
)
def test_expected_squared_errors__integral_is_exact(seed, dtype, scheme, a, b):
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 5, 16).astype("float64")
    edges = (np.arange(17) - generator.integers(0, 17)) * 0.25
    spec = QSpec(dtype, scheme)
    low, high = min(edges[0], 0) * a, max(edges[-1], 0) * b
    found = expected_squared_errors(edges, counts, np.array([low]), np.array([high]), spec)
    # The same expectation by sampling each bin evenly.
    samples = 20_000 if dtype == "int16" else 4000
    inside = edges[:-1, None] + (np.arange(samples) + 0.5) / samples * 0.25
    qparams = choose_qparams(low, high, spec)
    squared = (quantize(inside, qparams, spec) - inside) ** 2
    expected = float(counts @ squared.mean(axis=1))
    np.testing.assert_allclose(found[0], expected, rtol=2e-2, atol=1e-12)


def test_mse__weights_per_channel_are_searched_on_the_values():
    generator = np.random.default_rng(0)
    weight = generator.laplace(size=(4, 500)) * np.array([[1], [10], [0.1], [0]])
    weight[1, 3] = 400.0
    for dtype in ("int8", "int4"):
        low = -127 if dtype == "int8" else -7
        spec = QSpec(dtype, Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=low)
        info = replace(WEIGHT, spec=spec)
        qparams = MSE().observe(info, [weight])
        assert qparams.scale.shape == (4,)
        assert qparams.scale[3] == 1  # all zero
        for row in range(3):
            values = weight[row]
            one = replace(spec, granularity=Granularity.PER_TENSOR)
            found = mean_squared_error(values, QParams(qparams.scale[row], 0, dtype), one)
            top = np.abs(values).max()
            best = min(
                mean_squared_error(values, choose_qparams(-f * top, f * top, one), one)
                for f in np.linspace(0.05, 1, 400)
            )
            assert found <= best * 1.03
            assert found <= mean_squared_error(values, choose_qparams(-top, top, one), one)


def test_mse__weights_on_another_axis_and_affine():
    weight = np.random.default_rng(0).normal(size=(3, 6, 50)) + np.arange(6)[:, None]
    spec = QSpec("uint8", Scheme.AFFINE, Granularity.PER_CHANNEL)
    info = replace(WEIGHT, spec=spec, shape=weight.shape, axis=1)
    found = MSE().observe(info, [weight])
    assert found.scale.shape == (6,)
    assert found.axis == 1
    minmax = MinMax().observe(info, [weight])
    errors = [
        ((quantize(weight, q, spec, (1, 6, 1)) - weight) ** 2).mean(axis=(0, 2))
        for q in (found, minmax)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-9)).all()
    assert errors[0].sum() < errors[1].sum()


def test_average_max__a_channel_axis_of_0_is_no_axis_of_samples():
    """One sample for each array, and of it one range for each entry of axis 0."""
    info = replace(PER_CHANNEL, shape=(3, "n"), axis=0)
    batches = [np.random.default_rng(i).normal(size=(3, 5 + i)).astype("float32") for i in range(4)]
    tops = [[max(abs(value) for value in row) for row in batch.tolist()] for batch in batches]
    top = np.array([sum(column) / len(column) for column in zip(*tops, strict=True)])
    found = AverageMax().observe(info, batches)
    wanted = choose_qparams(-top, top, info.spec, 0)
    np.testing.assert_allclose(found.scale, wanted.scale, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 70_000), (70_000, 2), (3, 1 << 15), (1, 1)])
def test_sum_squared_errors__as_float64_sums_it(shape):
    """Rows longer and channels more than one block of the sum, one value at a time."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=shape).astype("float32")
    lows = rows.min(axis=1) * np.array([[1.0], [0.7], [0.3]])
    highs = rows.max(axis=1) * np.array([[1.0], [0.8], [0.2]])
    highs = np.maximum(highs, lows + 1e-3)
    spec = QSpec("int8", Scheme.AFFINE, Granularity.PER_CHANNEL)
    wanted = np.empty(lows.shape)
    for trial, (low, high) in enumerate(zip(lows, highs, strict=True)):
        qparams = choose_qparams(low, high, spec, axis=0)
        scale = qparams.scale.astype("float64")[:, None]
        zero = qparams.zero_point.astype("float64")[:, None]
        q = np.clip(np.rint(rows / scale) + zero, -128, 127)
        wanted[trial] = ((rows - (q - zero) * scale) ** 2).sum(axis=1)
    got = sum_squared_errors(rows, lows, highs, spec)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-9)


def test_mse__weight_seen_twice_changes_nothing():
    weight = np.random.default_rng(0).normal(size=(4, 500)).astype("float32")
    state = state_of(MSE(), WEIGHT, weight, weight)
    assert state.rows.shape == (4, 500)
    again = MSE().restore(WEIGHT, state.to_arrays())
    assert MSE().qparams(again, WEIGHT) == MSE().observe(WEIGHT, [weight])
    with pytest.raises(DataError, match=r"'conv_1:weight' do not match"):
        MSE().update(state, weight[:3])
    with pytest.raises(DataError, match=r"constant 'conv_1:weight' of the model holds 1 NaN"):
        MSE().observe(WEIGHT, [np.where(weight == weight[0, 0], np.nan, weight)])


def test_mse__weights_per_tensor():
    info = replace(WEIGHT, spec=QSpec("int8", Scheme.SYMMETRIC), axis=None)
    weight = np.random.default_rng(0).normal(size=(4, 500))
    qparams = MSE().observe(info, [weight])
    assert not qparams.is_per_channel
    assert mean_squared_error(weight, qparams, info.spec) <= mean_squared_error(
        weight, MinMax().observe(info, [weight]), info.spec
    )


# --- Callables --------------------------------------------------------------------------------


class Samples:
    """What the calibration runner hands to a callable."""

    def __init__(self, info, arrays_):
        self.info, self.arrays = info, arrays_

    def __iter__(self):
        return iter(self.arrays)


def pick_twice_the_range(info, samples):
    top = max(float(np.abs(a).max()) for a in samples)
    assert top == max(float(np.abs(a).max()) for a in samples)  # iterable again
    return choose_qparams(-2 * top, 2 * top, info.spec, info.axis)


def test_callable__is_asked_and_checked():
    calibration = resolve_observer(pick_twice_the_range)
    assert isinstance(calibration, CallableCalibration)
    assert calibration.name == "pick_twice_the_range"
    samples = Samples(SYMMETRIC, [np.ones((1, 4)), -3 * np.ones((1, 4))])
    assert isinstance(samples, ValueSamples)
    assert calibration.qparams(samples) == choose_qparams(-6, 6, SYMMETRIC.spec)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (0.5, "returned float; return a QParams"),
        (QParams(1.0, 0, "uint8"), "of dtype uint8; the plan says int8"),
        (QParams([1.0], [0], "int8", 0), "one per tensor"),
        (QParams(1.0, 5, "int8"), "symmetric scheme"),
    ],
)
def test_callable__wrong_result_names_value_and_callable(result, message):
    def rule(info, samples):
        return result

    with pytest.raises(ConfigError, match=message) as caught:
        resolve_observer(rule).qparams(Samples(SYMMETRIC, []))
    assert "rule" in str(caught.value)
    assert "'relu_1'" in str(caught.value)


def test_callable__that_raises_is_named_with_the_value():
    def rule(info, samples):
        return 1 // 0

    with pytest.raises(ConfigError, match=r"rule raised ZeroDivisionError for value 'relu_1': "):
        resolve_observer(rule).qparams(Samples(SYMMETRIC, []))


class Faulty(MinMax):
    """An observer of a user, with one method that is wrong."""

    def start(self, info):
        return 1 // 0

    def update_all(self, state, arrays):
        return None

    def qparams(self, state, info):
        return QParams(1.0, 0, "uint8")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("start", r"Observer Faulty: start raised ZeroDivisionError for value 'relu_1'"),
        (
            "update_all",
            r"Observer Faulty: update_all returned NoneType for value 'relu_1'; ",
        ),
        ("qparams", r"Observer Faulty picked parameters for value 'relu_1' of dtype uint8; the"),
    ],
)
def test_call_observer__names_the_observer_and_the_value(method, message):
    observer, state = Faulty(), MinMax().start(SYMMETRIC)
    arguments = {"start": (SYMMETRIC,), "update_all": (state, []), "qparams": (state, SYMMETRIC)}
    with pytest.raises(ConfigError, match=message):
        call_observer(getattr(observer, method), SYMMETRIC, *arguments[method])


@dataclass(frozen=True)
class Careless(MinMax):
    """Its update writes into the array, or forgets to return a state."""

    writes: bool = False

    def update(self, state, array):
        if self.writes:
            array *= 2


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        (True, r"Careless: update raised ValueError for value 'relu_1': .*read-only"),
        (False, r"Careless: update returned NoneType for value 'relu_1'"),
    ],
)
def test_observer__an_update_that_is_wrong_is_named_and_leaves_the_array(writes, message):
    """Also in `update_all`, which calibration calls, and in `observe`, for weights."""
    observer, array = Careless(writes=writes), np.ones((2, 4), "float32")
    state = MinMax().start(SYMMETRIC)
    with pytest.raises(ConfigError, match=message):
        call_observer(observer.update_all, SYMMETRIC, state, [array])
    with pytest.raises(ConfigError, match=message):
        observer.observe(SYMMETRIC, iter([array]))
    assert (array == 1).all()
    array *= 2  # the caller may still write into its own array


def test_call_observer__errors_of_this_package_stay():
    with pytest.raises(DataError, match="NaN"):
        call_observer(
            MinMax().update, SYMMETRIC, MinMax().start(SYMMETRIC), np.full(3, np.nan, "float32")
        )


@pytest.mark.parametrize(
    ("function", "wants"),
    [
        (lambda info, samples: None, False),
        (lambda info, samples, third: third, True),
        (lambda info, samples, context=None: context, True),
        (lambda info, samples, *, context: context, True),
        (lambda info, samples, bins=7: bins, False),
        (lambda *args: args[2] if len(args) > 2 else None, False),
    ],
)
def test_callable__gets_the_context_if_it_takes_a_third_parameter(function, wants):
    seen = []

    def see(*args, **named):
        seen.append(function(*args, **named))
        return choose_qparams(-1, 1, SYMMETRIC.spec)

    see.__signature__ = inspect.signature(function)
    resolve_observer(see).qparams(Samples(SYMMETRIC, []), "the context")
    assert (seen == ["the context"]) == wants


def test_resolve_observer__passes_observers_through():
    for observer in OBSERVERS:
        assert resolve_observer(observer) is observer
    bound = CallableCalibration(pick_twice_the_range)
    assert resolve_observer(bound) is bound


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (MinMax, r"is the class MinMax, not an instance: write MinMax\(\)\."),
        (dict, r"is the class dict; allowed: an observer"),
        ("minmax", r"is 'minmax'; allowed: an observer, for instance MinMax\(\)"),
        (None, r"is None; allowed"),
        (QParams(1.0, 0, "int8"), r"write Fixed\(scale, zero_point\)"),
        (lambda info: None, r"cannot be called with two or three positional arguments"),
        (lambda a, b, c, d: None, r"cannot be called with two or three positional arguments"),
    ],
)
def test_resolve_observer__messages(wrong, message):
    with pytest.raises(ConfigError, match=message):
        resolve_observer(wrong)
