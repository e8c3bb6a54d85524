"""Ranges by what they do to the outputs: the choice, what it rests on, and what the ledger says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from drawing import count_examples
from float_models import MAP, build_model, draw_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.qtypes import QSpec, Role, ValueInfo, choose_qparams
from relayquant.ir.rewrite import Graph
from relayquant.stages.calibration import observer_selection
from relayquant.stages.calibration.observer_selection import (
    CANDIDATES,
    FIRST_JUDGED,
    JUDGED_WORK,
    LEAST_JUDGED,
    MINMAX,
    MOST_JUDGED,
    RELATIVE,
    SHARES,
    TOLERANCE,
    CandidateNoise,
    OutputJudge,
    OutputSQNR,
    Section,
    choose_candidates,
    compare_noise,
    find_probabilities,
    find_sections,
    is_as_near,
    is_clearly_nearer,
    measure_noise,
    split_looks,
    take_logarithms,
)

TRUNK = Section(("a", "b"), frozenset({0, 1}))
HEADS = (Section(("c",), frozenset({0})), Section(("d",), frozenset({1})))
SECTIONS = (TRUNK, *HEADS)


class Costs:
    """Noise at two outputs on n samples: the sum of what each value that reaches them adds."""

    def __init__(self, **costs: dict[str, object]) -> None:
        self.costs, self.runs = costs, 0

    def __call__(self, names: dict[str, str]) -> CandidateNoise:
        self.runs += 1
        return CandidateNoise(lambda: self.add(names))

    def add(self, names: dict[str, str]) -> np.ndarray:
        outputs = {key: section.outputs for section in SECTIONS for key in section.keys}
        noise = np.zeros((2, 16))
        for key, name in names.items():
            for i in outputs[key]:
                noise[i] += self.costs.get(key, {}).get(name, 1.0)
        return noise


def test_choose__the_first_candidate_where_none_is_better():
    assert set(choose_candidates([TRUNK], Costs()).values()) == {RELATIVE}


def test_choose__the_first_that_is_allowed_and_one_run_to_see_that_the_next_is_not_better():
    costs = Costs()
    choose_candidates(SECTIONS, costs)
    assert costs.runs == 3
    costs = Costs(a=dict.fromkeys(CANDIDATES[:-1], 2.0))
    assert choose_candidates([TRUNK], costs) == {"a": MINMAX, "b": MINMAX}
    assert costs.runs == len(CANDIDATES)


def test_choose__a_range_between_where_the_narrowest_costs_an_output():
    """The second output clips with the narrowest range; both gain with the ranges between."""
    costs = Costs(a={MINMAX: 4.0}, c={RELATIVE: 0.5}, d={RELATIVE: 9.0})
    between = CANDIDATES[1]
    expected = {"a": between, "b": between, "c": RELATIVE, "d": between}
    assert choose_candidates(SECTIONS, costs) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.5, CANDIDATES[1]), (1.0, RELATIVE)])
def test_choose__a_wider_range_only_if_its_gain_is_no_chance(factor, expected):
    """The gain is 3 dB, or what the samples' deviation makes of none."""
    noise = factor * np.resize([0.5, 1.5], 16)
    rows = np.ones(16), noise, np.full(16, 2.0), np.full(16, 4.0)
    costs = Costs(a=dict(zip(CANDIDATES, rows, strict=True)), b=dict.fromkeys(CANDIDATES, 0.0))
    assert choose_candidates([TRUNK], costs) == {"a": expected, "b": expected}


def test_choose__no_output_pays_for_another():
    """As above, with a choice for the trunk and then for both heads in the same runs."""
    costs = Costs(c={RELATIVE: 0.0, MINMAX: 30.0}, d=dict.fromkeys(CANDIDATES[:-1], 3.0))
    chosen = choose_candidates(SECTIONS, costs)
    assert (chosen["c"], chosen["d"]) == (RELATIVE, MINMAX)
    others = len(CANDIDATES) - 1
    assert costs.runs == len(CANDIDATES) + others + others


def test_choose__what_one_sample_gains_is_chance():
    """All of the gain comes from a single sample, the others lose a little."""
    base, lucky = np.ones(16), np.full(16, 1.1)
    base[3], lucky[3] = 10.0, 1.0
    assert lucky.sum() < 0.8 * base.sum()
    ratio, error = compare_noise(lucky, base)
    assert ratio < 0 < TOLERANCE < ratio + error
    costs = Costs(a=dict.fromkeys(CANDIDATES, lucky) | {MINMAX: base})
    assert set(choose_candidates([Section(("a",), frozenset({0}))], costs).values()) == {MINMAX}


@pytest.mark.parametrize(("largest", "expected"), [(16.0, RELATIVE), (20.0, MINMAX)])
def test_choose__one_sample_hides_no_gain_of_the_others_unless_the_sum_is_worse(largest, expected):
    """15 samples of 16 gain 8 dB. The largest loses so much that the sum's gain is chance."""
    base, noise = np.ones(16), np.full(16, 0.16)
    base[3], noise[3] = 5.0, largest
    costs = Costs(a=dict.fromkeys(CANDIDATES, noise) | {MINMAX: base})
    found = choose_candidates([Section(("a",), frozenset({0}))], costs)
    assert found == {"a": expected}


def run_until_clear(noise: np.ndarray, base: np.ndarray, rule) -> tuple[bool, int]:
    """Return what a rule says of one output's noise, and the samples that it ran on."""
    trials = []
    for values in (noise, base):
        first, others = np.split(values[None], [FIRST_JUDGED], axis=1)
        trials.append(CandidateNoise(lambda part=first: part, lambda part=others: part))
    verdict = trials[0].passes(rule, trials[1])
    assert ("whole" in vars(trials[0])) == ("whole" in vars(trials[1]))
    return verdict, MOST_JUDGED if "whole" in vars(trials[0]) else FIRST_JUDGED


@pytest.mark.parametrize(
    ("gain", "spread", "rule", "expected"),
    [
        (3.0, 0.1, is_as_near, (True, FIRST_JUDGED)),
        (-3.0, 0.1, is_as_near, (False, FIRST_JUDGED)),
        (1.0, 0.9, is_as_near, (True, MOST_JUDGED)),
        (-0.7, 0.9, is_as_near, (False, MOST_JUDGED)),
        (3.0, 0.1, is_clearly_nearer, (True, FIRST_JUDGED)),
        (0.0, 0.1, is_clearly_nearer, (False, FIRST_JUDGED)),
        (1.0, 0.36, is_clearly_nearer, (True, MOST_JUDGED)),
        (1.0, 0.5, is_clearly_nearer, (False, MOST_JUDGED)),
    ],
)
def test_candidate_noise__runs_on_few_samples_if_they_leave_no_doubt(gain, spread, rule, expected):
    """The noise of half of the samples is 1 + spread times what the gain in dB makes of 1."""
    noise = np.resize([1 + spread, 1 - spread], MOST_JUDGED) * 10 ** (-gain / 10)
    assert run_until_clear(noise, np.ones(MOST_JUDGED), rule) == expected


def test_candidate_noise__few_samples_with_rare_errors_ahead_decide_nothing():
    """The first samples gain 3 dB with a standard error of 0.8 dB, and all lose."""
    noise = np.resize([0.8, 0.2], MOST_JUDGED)
    noise[FIRST_JUDGED:] = 2.0
    assert run_until_clear(noise, np.ones(MOST_JUDGED), is_as_near) == (False, MOST_JUDGED)


def test_candidate_noise__a_verdict_of_few_samples_is_that_of_all():
    """Of 400 draws of noise that differ by up to 6 dB, one of the two rules turns in few."""
    rng = np.random.default_rng(0)
    turned, few = 0, 0
    for gain in rng.uniform(-6, 6, 400):
        noise, base = rng.lognormal(0, 0.5, (2, MOST_JUDGED))
        noise *= 10 ** (-gain / 10)
        for rule in (is_as_near, is_clearly_nearer):
            verdict, samples = run_until_clear(noise, base, rule)
            turned += verdict != rule(noise[None], base[None])
            few += samples == FIRST_JUDGED
    assert few > 400
    assert turned < 24


def test_split_looks__evenly_spread():
    batches = [SimpleNamespace(number=i) for i in range(2 * FIRST_JUDGED)]
    first, others = split_looks(batches)
    assert [batch.number for batch in first] == [*range(0, 16, 2)]
    assert [batch.number for batch in others] == [*range(1, 16, 2)]
    assert split_looks(batches[1:]) == [batches[1:]]


def test_compare_noise__a_gain_within_its_error_is_judged_by_samples_that_count_alike():
    """The mean of the samples' dB and its standard error, against SciPy."""
    from scipy import stats

    base, noise = np.ones(16), np.linspace(0.1, 0.2, 16)
    noise[3] = 12.0
    each = 10 * np.log10(noise / base)
    assert compare_noise(noise, base) == pytest.approx((each.mean(), stats.sem(each)))


@settings(max_examples=count_examples(60), deadline=None)
@given(arrays("float64", (4, len(CANDIDATES), 16), elements=st.floats(1e-3, 1e3)))
def test_choose__never_worse_than_minmax_at_any_output(table):
    names = dict(zip("abcd", table, strict=True))
    costs = Costs(**{k: dict(zip(CANDIDATES, rows, strict=True)) for k, rows in names.items()})
    chosen = choose_candidates(SECTIONS, costs)
    found, base = (
        costs.add(picks).sum(axis=1) for picks in (chosen, dict.fromkeys("abcd", MINMAX))
    )
    assert (10 * np.log10(found / base) <= TOLERANCE + 1e-9).all()


@pytest.mark.parametrize(
    ("decibels", "base", "expected"),
    [
        ([22.0, 32.8], [21.0, 32.9], True),
        ([22.8, 32.1], [21.3, 32.9], False),  # one output loses, whatever the other gains
        ([20.9, 32.9], [21.0, 32.9], False),
        ([np.inf, 30.0], [np.inf, 30.0], True),
        ([-np.inf], [20.0], False),
    ],
)
def test_is_as_near__no_output_loses(decibels, base, expected):
    tiny = np.finfo("float64").tiny
    noise, other = (
        np.outer(10 ** (-np.array(x) / 10) + tiny, np.ones(6)) for x in (decibels, base)
    )
    assert is_as_near(noise, other) is expected


def test_is_as_near__a_gain_within_its_standard_error_is_chance():
    base, noise = np.ones((1, 6)), np.full((1, 6), 0.98)
    assert is_as_near(noise, base)
    noise[0, :2] = 0.4, 1.56  # the same sum
    assert not is_as_near(noise, base)


def test_compare_noise__standard_error_is_that_of_the_jackknife():
    """Against the definition (Efron 1982): n - 1 times the variance of the n estimates that leave
    one sample out.
    """
    rng = np.random.default_rng(0)
    noise, base = rng.uniform(1, 5, (2, 9)) * [[3], [1]]  # far more than the error
    without = [
        10 * math.log10(np.delete(noise, i).sum() / np.delete(base, i).sum()) for i in range(9)
    ]
    mean = sum(without) / 9
    expected = math.sqrt(8 / 9 * sum((each - mean) ** 2 for each in without))
    assert compare_noise(noise, base) == pytest.approx(
        (10 * math.log10(noise.sum() / base.sum()), expected)
    )


def test_compare_noise__what_breaks_is_worse_than_anything():
    fine, broken = np.ones(4), np.array([1.0, np.inf, 1.0, 1.0])
    assert compare_noise(broken, fine)[0] == math.inf
    assert compare_noise(fine, broken)[0] == 0.0


def test_measure_noise__by_sample_integers_and_what_is_not_finite():
    real = np.array([[1.0, 2.0], [3.0, np.nan]], "float32")
    got = np.array([[1.5, 2.0], [3.0, 7.0]], "float32")
    answers = np.array([1, 2]), np.array([1, 3])
    noise = measure_noise([real, answers[0]], [got, answers[1]], 2)
    assert noise == pytest.approx(np.array([[0.25, 0.0], [0.5, 1.5]]), abs=1e-9)
    got[0, 0] = np.inf
    assert measure_noise([real], [got], 2)[0].tolist()[0] == math.inf
    assert measure_noise([real, answers[0][:1]], [got, answers[1][:1]], 2).shape == (2, 1)


def two_heads():
    """Two outputs of one trunk. The second reads one channel, which is hardly ever large."""

    def body(emit, x):
        a = emit("a", op.nn.relu(emit.dense("a.d", x, 16)))
        first = emit.dense("first", emit("b", op.nn.relu(emit.dense("b.d", a, 8))), 4)
        second = emit.dense("second", emit("c", op.nn.relu(emit.dense("c.d", a, 8))), 3)
        return relax.Tuple([first, second])

    return build_model(body, ("n", 12))


def draw_rare(count: int, seed: int = 0) -> list[np.ndarray]:
    """Small samples; one in 32 is fifty times as large."""
    x = np.random.default_rng(seed).standard_normal((count, 1, 12)).astype("float32")
    x[::32] *= 50
    return list(x)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("low", [-2.0, 0.0])
def test_find_range__between_lies_at_its_share_of_the_octaves(low, dtype):
    """A range from -1/2 to 1, and a full range from -2 to 16."""
    info, observer = ValueInfo("x", Role.ACTIVATION, QSpec(dtype), (1, 2)), OutputSQNR()
    relative = choose_qparams(low / 4, 1.0, info.spec)
    state = observer.update(observer.start(info), np.array([[low, 16.0]], "float32"))
    for name, share in SHARES.items():
        found = observer.find_range(name, relative, state, info)
        expected = choose_qparams(low / 4 * 4**share, 16.0**share, info.spec)
        assert float(found.scale) == pytest.approx(float(expected.scale), rel=0.02)
        assert abs(int(found.zero_point) - int(expected.zero_point)) <= 1


def test_find_sections__by_the_outputs_that_values_reach():
    prepared = rq.prepare(two_heads())
    sections = find_sections(prepared.graph, {"x", "a", "b", "c"}, ("first", "second"))
    assert [(set(s.keys), set(s.outputs)) for s in sections] == [
        ({"x", "a"}, {0, 1}),
        ({"b"}, {0}),
        ({"c"}, {1}),
    ]


def test_find_probabilities__a_softmax_also_behind_a_reshape():
    def body(emit, x):
        first = emit.dense("first", x, 4)
        return relax.Tuple([first, emit("b", op.reshape(emit("a", op.nn.softmax(first)), (4, 2)))])

    view = Graph(rq.prepare(build_model(body, (2, 8))).graph.mod)
    results = (view.vars[name] for name in ("first", "a", "b"))
    assert find_probabilities(view, results) == [False, True, True]


def hardswish_between(*, has_other_reader: bool):
    """A convolution, hardswish and a convolution; the operand of hardswish may be a result too."""

    def body(emit, x):
        first = emit.conv_bias("first", x, 8)
        shifted = emit("shifted", op.clip(op.add(first, relax.const(3.0, "float32")), 0, 6))
        scaled = emit("scaled", op.multiply(shifted, relax.const(1 / 6, "float32")))
        last = emit.conv("last", emit("swish", op.multiply(first, scaled)), 4)
        return relax.Tuple([last, first]) if has_other_reader else last

    return build_model(body, (1, 4, 6, 6))


@pytest.mark.parametrize("has_other_reader", [False, True])
def test_calibrate__the_operand_of_a_function_is_clipped_where_that_is_flat(has_other_reader):
    mod = hardswish_between(has_other_reader=has_other_reader)
    data = [4 * batch["x"] for batch in draw_batches(mod, 16)]
    prepared = rq.calibrate(rq.prepare(mod), data)
    low = min(float(rq.reference.run(prepared.mod, [x])[-1].min()) for x in data)
    qparams = prepared.parameters["first"]
    found = float((0 - qparams.zero_point) * qparams.scale)
    if has_other_reader:
        assert found == pytest.approx(low, rel=0.02)
    else:
        assert -3.5 < found <= -2.5


@pytest.mark.slow
def test_quantize__rare_outputs_are_not_worse_than_with_minmax_and_the_ledger_says_why():
    mod, data, other = two_heads(), draw_rare(128), [np.concatenate(draw_rare(64, seed=1))]
    guard = rq.config.Guard.OFF

    def noise(qmod) -> np.ndarray:
        total = np.zeros(2)
        for x in other:
            pairs = zip(rq.reference.run(mod, [x]), rq.reference.run(qmod, [x]), strict=True)
            total += [np.square(a - b, dtype="float64").sum() for a, b in pairs]
        return total

    default, full, relative = (
        rq.quantize(mod, None, data, observer=calibration, guard=guard)
        for calibration in (None, rq.observers.MinMax(), rq.observers.RelativeMSE())
    )
    worse = 10 * np.log10(noise(relative) / noise(full))
    assert worse.max() > 3  # what the rows usually are says nothing of the rare ones
    assert (10 * np.log10(noise(default) / noise(full)) < 0.5).all()
    choices, rows = rq.ledger(default).choices, rq.ledger(default).rows
    assert choices["activations"] == "OutputSQNR()"
    assert "MinMax of" in choices["ranges"]
    assert {row.name: row.observer for row in rows if row.scale}.keys() >= {"a", "b", "c"}
    assert all((row.observer in CANDIDATES) == bool(row.scale) for row in rows)


def test_calibrate__an_observer_that_the_user_names_is_taken_as_it_is():
    prepared = rq.prepare(two_heads())
    prepared = rq.calibrate(prepared, draw_rare(16), observer=rq.observers.Percentile(99.0))
    assert set(prepared.observers.values()) == {"Percentile"}
    prepared = rq.calibrate(prepared, draw_rare(16), order=rq.config.Order.TOPOLOGICAL)
    assert set(prepared.observers.values()) <= {RELATIVE, MINMAX}
    assert prepared.observers["a"] == RELATIVE  # in this order there are no outputs to look at


#: how an input becomes the (1, 8, 6, 6) of a convolution, and the same in numpy, backwards
LAYOUTS = {
    "as it is": (lambda x: x, lambda a: a),
    "permuted": (
        lambda x: op.permute_dims(x, [0, 3, 1, 2]),
        lambda a: a.transpose(0, 2, 3, 1),
    ),
    "reshaped": (lambda x: op.reshape(x, (1, 8, 6, 6)), lambda a: a.reshape(8, 36)),
    "permuted, reshaped": (
        lambda x: op.reshape(op.permute_dims(x, [1, 0]), (1, 8, 6, 6)),
        lambda a: a.reshape(8, 36).T,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calibrate__a_range_is_chosen_by_channels_whatever_moves_them(layout):
    forward, back = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    # Rare large channels: which numbers share a row, and what the weights make of it, counts.
    data = [np.float32(rng.standard_t(2, (1, 8, 6, 6)) * 2.0 ** np.arange(8)[:, None, None])] * 4
    moved = [np.ascontiguousarray(back(a)) for a in data]

    def body(emit, x):
        return emit.conv("last", emit("read", forward(x)), 4)

    def choose(shape, arrays):
        observer = rq.observers.RelativeMSE()
        prepared = rq.calibrate(rq.prepare(build_model(body, shape)), arrays, observer=observer)
        return prepared.parameters["x"]

    expected = rq.calibrate(
        rq.prepare(build_model(lambda emit, x: emit.conv("last", x, 4), (1, 8, 6, 6))),
        data,
        observer=rq.observers.RelativeMSE(),
    ).parameters["x"]
    assert choose(moved[0].shape, moved) == expected


def test_calibrate__a_value_whose_channels_a_reshape_splits_is_observed_too():
    def body(emit, x):
        rows, weight = emit("rows", op.reshape(x, (2, 8, 6, 4))), emit.constant(4, 4, 3, 3)
        layouts = {"data_layout": "NHWC", "kernel_layout": "OIHW"}
        return emit("last", op.nn.conv2d(rows, weight, **layouts))

    mod = build_model(body, (2, 192))  # no axis of x is the channels' axis, 3
    data = [batch["x"] for batch in draw_batches(mod, 8)]
    qmod = rq.quantize(mod, None, data, callbacks=())
    assert rq.ledger(qmod).guard.sqnr > 30


@pytest.mark.parametrize(("batch", "is_known"), [(1, True), (3, False)])
def test_calibrate__ranges_are_judged_by_the_results_of_the_float_pass(
    batch, is_known, monkeypatch
):
    """The judge runs the float model itself only where it uses parts of batches."""
    mod = two_heads()
    data = [np.concatenate(draw_rare(batch, seed)) for seed in range(70)]
    choose, runs, seen, trials = OutputJudge.choose, [], [], []

    def watch(judge, parameters, keys, find, batches):
        def load(split):
            functions = judge_load(split)
            return SimpleNamespace(run=lambda *args: runs.append(args) or functions.run(*args))

        judge_load, judge.load_module = judge.load_module, load
        seen.extend(batches)
        return choose(judge, parameters, keys, find, batches)

    def try_candidates(sections, measure):
        return choose_candidates(
            sections, lambda names: trials.append(measure(names)) or trials[-1]
        )

    monkeypatch.setattr(OutputJudge, "choose", watch)
    monkeypatch.setattr(observer_selection, "choose_candidates", try_candidates)
    rq.calibrate(rq.prepare(mod), data)
    assert len(seen) == MOST_JUDGED
    assert {len(array) for each in seen for array in each.inputs.values()} == {1}
    counts = [MOST_JUDGED if "whole" in vars(trial) else FIRST_JUDGED for trial in trials]
    assert {*counts} == {MOST_JUDGED, FIRST_JUDGED}
    assert len(runs) == sum(counts) + (not is_known) * MOST_JUDGED
    for each in seen:
        assert bool(each.results) == is_known
        expected = rq.reference.run(mod, [each.inputs["x"]])
        for got, want in zip(each.results.values(), expected, strict=False):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@pytest.mark.slow
def test_calibrate__the_choice_is_the_same_however_the_run_is_cut(tmp_path, monkeypatch):
    mod, data = two_heads(), draw_rare(64)
    found = []
    for threads, options in (("1", {}), ("2", {}), ("2", {"checkpoint": tmp_path / "kept"})):
        monkeypatch.setenv("TVM_NUM_THREADS", threads)
        prepared = rq.calibrate(rq.prepare(mod), data, **options)
        found.append((prepared.observers, {k: v.to_dict() for k, v in prepared.parameters.items()}))
    assert found[0] == found[1] == found[2]


def test_prepared__observers_are_kept_in_its_file(tmp_path):
    prepared = rq.calibrate(rq.prepare(two_heads()), draw_rare(16))
    rq.save_prepared(prepared, tmp_path / "model.zip")
    assert rq.load_prepared(tmp_path / "model.zip").observers == prepared.observers


@pytest.mark.parametrize(("dtype", "least"), [("float16", 2.0**-24), ("float32", 1e-20)])
def test_take_logarithms__of_zero_is_that_of_the_least_that_counts(dtype, least):
    (got,) = take_logarithms([np.array([0.0, 1.0], dtype)], [True])
    np.testing.assert_allclose(got, [np.log(least), 0.0], rtol=1e-3)


@pytest.mark.parametrize("batch", [1, 8, "n"])
def test_output_judge__fewer_samples_of_a_model_that_takes_long(batch):
    def count(side: int) -> int:
        mod = build_model(lambda e, x: e.conv("b", e.conv("a", x)), (batch, MAP[1], side, side))
        return OutputJudge(rq.prepare(mod).graph, pytest.fail).samples

    pixel = 2 * MAP[1] * MAP[1] * 3 * 3  # multiply-adds of two convolutions
    assert count(12) == MOST_JUDGED
    assert count(int((JUDGED_WORK / pixel / 7.5) ** 0.5)) == 7
    assert count(int((JUDGED_WORK / pixel) ** 0.5)) == LEAST_JUDGED
