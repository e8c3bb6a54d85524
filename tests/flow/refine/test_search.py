"""quantize(metric=): few operators back in float, the bound met by the integers themselves, at any
time.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from float_models import build_model

import relayquant as rq
from relayquant.base.events import CallbackList
from relayquant.base.runtime import Executor
from relayquant.flow.pipeline import search_module
from relayquant.flow.refine.search import (
    make_wide,
    order_alike,
    propose_integers,
    rank_operators,
    search_simulated,
)
from relayquant.flow.refine.search_result import Choice, Trial
from relayquant.flow.refine.search_state import SearchState, trial_key
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import Ledger, SearchResult
from relayquant.ir.plan import OperatorPlan
from relayquant.plots.text import list_findings

BROKEN = "conv2/relu"
#: has the scale of the broken value, and no products: it is cheaper in float
CHEAPEST = "pool"


def relative_error(expected, got) -> float:
    return -float(np.linalg.norm(expected[0] - got[0]) / np.linalg.norm(expected[0]))


def run_search(mod, params, dataset, metric, **settings):
    """What `quantize(metric=)` finds, before it warns."""
    return search_module(mod, params, dataset, metric, QuantizeSettings(metric=metric, **settings))


def clip_one(info, samples):
    """A fiftieth of the range for one value: all above it is lost."""
    high = max(float(array.max()) for array in samples)
    low = min(float(array.min()) for array in samples)
    return rq.choose_qparams(low, high / (50 if info.name == BROKEN else 1), info.spec)


def test_quantize__metric_that_is_met_at_once(digits):
    mod, params, data = digits
    qmod = rq.quantize(mod, params, data, effort="fast", metric=relative_error, max_drop=0.1)
    found = rq.ledger(qmod).search
    assert found.is_met
    assert found.reverted == ()
    assert found.trials == 1
    assert found.float_score == 0.0
    assert -0.1 < found.score < 0
    assert rq.ledger(qmod).guard is None, "the metric takes the guard's place"


@pytest.mark.slow
def test_search__puts_back_what_is_broken(digits, tmp_path):
    mod, params, data = digits
    path = tmp_path / "search.json"
    found = run_search(
        mod,
        params,
        data,
        relative_error,
        effort="fast",
        max_drop=0.1,
        observer=clip_one,
        search_state=path,
    )
    assert found.is_met
    assert found.reverted == (CHEAPEST,)
    ledger = rq.ledger(found.mod)
    assert not ledger.row(CHEAPEST).quantized
    assert ledger.row("conv1/relu").quantized
    (expected,) = Executor(rq.compile(mod)).run("main", data)
    (got,) = Executor(rq.compile(found.mod)).run("main", data)
    assert relative_error([expected], [got]) == pytest.approx(found.score, rel=1e-4)
    qmod, mapping = found.mod, found.mapping
    # The file has all that was measured, and the mapping, which makes the module again.
    state = json.loads(path.read_text())
    assert len(state["trials"]) == found.trials
    assert set(state["ranking"]) >= {BROKEN, "conv1/relu", "logits"}
    assert state["best"]["reverted"] == [CHEAPEST]
    assert ledger.search.mapping == state["best"]["mapping"]
    assert rq.QConfigMapping.from_dict(state["best"]["mapping"]) == mapping
    prepared = rq.prepare(mod, params, data, qconfig_mapping=mapping, effort="fast")
    prepared = rq.calibrate(prepared, data, observer=clip_one)
    again = rq.lower(rq.convert_to_reference(prepared))
    for one, other in zip(rq.reference.run(again, data), rq.reference.run(qmod, data), strict=True):
        np.testing.assert_array_equal(one, other)


def test_search_state__one_search_at_a_time(digits, tmp_path):
    mod, params, data = digits
    path = tmp_path / "search.json"

    def quantize(**options):
        options |= {"metric": relative_error, "max_drop": 0.1, "search_state": path}
        rq.quantize(mod, params, data, effort="fast", **options)

    class Second(rq.Callback):
        def on_stage_start(self, event):
            if path.exists():
                quantize()

    with pytest.raises(rq.ConfigError, match="in use by another search; use a separate file"):
        quantize(callbacks=Second())
    quantize()
    assert {each.name for each in tmp_path.iterdir()} == {"search.json"}


def test_search_state__goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "search.json"
    state = SearchState.open(path, "this")
    assert (state.ranking, state.trials, state.best) == ({}, {}, {})
    assert path.exists(), "that it cannot be written shows before anything is measured"
    state.ranking["a"], state.trials[trial_key(["b", "a"], "int16")] = float("inf"), 0.5
    state.best = {"reverted": ["a"], "mapping": None}
    state.save()
    again = SearchState.open(path, "this")
    assert (again.ranking, again.trials, again.best) == (state.ranking, state.trials, state.best)
    assert again.trials[trial_key(["a", "b"], "int16")] == 0.5
    assert trial_key([], "int16") == trial_key([], "float32")
    keys = {trial_key(*names) for names in (("ab", "x"), ("a", "x", "b"), ("", "x", "ab"))}
    assert len(keys) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["search.json"]
    with pytest.raises(rq.ConfigError, match="search with another model"):
        SearchState.open(path, "other")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "other"}', '{"format": 1', "\0", "[" * 100_000]
)
def test_search_state__damaged_file(tmp_path, text):
    path = tmp_path / "search.json"
    path.write_text(text)
    with pytest.raises(rq.DataError, match=r"search\.json is no search state, or is damaged"):
        SearchState.open(path, "this")


def test_search_state__other_data_or_metric_is_an_error(tmp_path):
    path = tmp_path / "search.json"
    state = SearchState.open(path, "this")
    state.check_basis({"validation data": "a", "scores of the float model": "1"})
    again = SearchState.open(path, "this")
    again.check_basis({"validation data": "a", "scores of the float model": "1"})
    with pytest.raises(rq.ConfigError, match="with other validation data, so its scores"):
        again.check_basis({"validation data": "b", "scores of the float model": "1"})


@pytest.mark.slow
def test_search__goes_on_only_with_the_same_data_and_metric(digits, tmp_path):
    mod, params, data = digits
    path = tmp_path / "search.json"

    def search(samples, metric=relative_error, checks=data):
        settings = {"effort": "fast", "max_drop": 0.5, "search_state": path}
        return run_search(mod, params, samples, metric, validation_dataset=checks, **settings)

    found = search(data)
    assert search(data).score == found.score
    with pytest.raises(rq.ConfigError, match="with other validation data"):
        search(data, checks=[data[0][::-1]])
    with pytest.raises(rq.ConfigError, match="with other calibration data"):
        search([data[0][::-1]])
    with pytest.raises(rq.ConfigError, match="with other scores of the float model"):
        search(data, lambda expected, got: 1 + relative_error(expected, got))


def test_search__metric_without_a_largest_value_is_an_error(digits):
    mod, params, data = digits

    def decibels(expected, got):
        noise = np.square(expected[0] - got[0]).sum()
        return math.inf if noise == 0 else 10 * math.log10(np.square(expected[0]).sum() / noise)

    with pytest.raises(rq.ConfigError, match=r"decibels gives inf where .* min\(decibels, 100"):
        run_search(mod, params, data, decibels, effort="fast")


def test_rank_operators__known_scores_are_not_measured_again():
    operators = [OperatorPlan(name, "relax.matmul", (name,), "dense", True, (("data", "x"),)) for
                 name in "abc"]  # fmt: skip
    mod = build_model(lambda e, x: e.dense("c", e.dense("b", e.dense("a", x, 8), 8), 8), (1, 2))
    asked = []

    class Stub:
        prepared = SimpleNamespace(plan=rq.Plan(tuple(operators), ()), mod=mod)

        def sqnr(self, quantized):
            asked.append(quantized[0].name)
            return 30.0

    state = SearchState(None, "")
    state.ranking |= {"a": 50.0, "c": 10.0}
    assert rank_operators(Stub(), CallbackList(), math.inf, state) == ["c", "b", "a"]
    assert asked == ["b"]
    state.ranking |= {"a": 31.0}  # as sensitive as b, with a quarter of the multiply-adds
    assert rank_operators(Stub(), CallbackList(), math.inf, state) == ["c", "a", "b"]


def test_order_alike__scores_a_little_apart_are_alike_wherever_they_lie():
    for low in np.arange(10.0, 14.0, 0.25):
        scores, work = {"big": low, "small": low + 0.1}, {"big": 9, "small": 1}
        assert order_alike(scores, work) == ["small", "big"]
    # Each is like the next, the first is not like the last.
    scores = {"a": 0.0, "b": 2.0, "c": 4.0, "d": math.inf, "e": -math.inf}
    work = {"a": 3, "b": 2, "c": 1, "d": 0, "e": 9}
    assert order_alike(scores, work) == ["e", "b", "a", "c", "d"]


def test_trial__int16_before_float_and_few_before_many():
    def rank(names, dtype, is_met, score=0.0, widened=""):
        return Trial(Choice(tuple(names), dtype, tuple(widened)), score, is_met).rank

    assert rank("ab", "int16", True) > rank("a", "float32", True) > rank("ab", "float32", True)
    few = [rank("a" * n, "float32", True, widened="b" * (3 - n)) for n in range(4)]
    assert few == sorted(few, reverse=True), "weights of all bits before float"
    assert rank("a", "float32", True, widened="b") < rank("a", "int16", True, widened="b")
    assert rank("a", "float32", True, widened="b") < rank("a", "float32", True)
    assert rank("abc", "float32", True) > rank("a", "int16", False, 0.9)
    assert rank("a", "float32", False, 0.9) > rank("", "float32", False, 0.1)


def test_propose_integers__more_if_short_of_the_bound_fewer_if_within():
    def search(needed, names):
        done = []
        for tried in propose_integers(done, list("abcdefgh"), names, math.inf):
            done.append(Trial(Choice(tuple(tried)), 0.0, needed <= set(tried)))
        return max(done, key=lambda trial: trial.rank)

    assert search({"a", "b"}, ["a"]).choice.reverted == ("a", "b")
    assert search({"a"}, list("abcd")).choice.reverted == ("a",)
    assert not search({"x"}, ["a"]).is_met


def test_make_wide__int16_of_the_backend():
    plan = SimpleNamespace(operator=lambda name: SimpleNamespace(pattern=name))
    prepared = SimpleNamespace(backend=rq.get_backend_config("x86"), plan=plan)
    wide = make_wide(prepared, "conv2d")
    assert wide.activation.spec.dtype == "int16"
    assert wide.weight == rq.get_backend_config("x86").default_qconfig.weight


@pytest.mark.parametrize("promise", [{"strict": True}, {"input_dtypes": {"image": "uint8"}}])
def test_quantize__metric_and_promised_integers_exclude_each_other(digits, promise):
    mod, params, data = digits
    with pytest.raises(rq.ConfigError, match=r"Search without them"):
        rq.quantize(mod, params, data, metric=relative_error, **promise)


@pytest.mark.slow
def test_search__bound_out_of_reach_gives_all_in_float(digits):
    mod, params, data = digits
    found = run_search(mod, params, data, relative_error, effort="fast", max_drop=1e-5)
    assert found.is_met
    assert not rq.ledger(found.mod).quantized


def test_quantize__budget_used_up_gives_the_first_module(digits):
    mod, params, data = digits
    with pytest.warns(rq.AccuracyWarning, match=r"of 0 with 0 operators .* longer budget"):
        qmod = rq.quantize(
            mod,
            params,
            data,
            metric=relative_error,
            effort="fast",
            max_drop=0.1,
            observer=clip_one,
            budget=1e-3,
        )
    found = rq.ledger(qmod).search
    assert not found.is_met
    assert found.reverted == ()
    assert found.score < -0.5
    assert Ledger.from_dict(rq.ledger(qmod).to_dict()) == rq.ledger(qmod)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_drop": -1},
        {"max_drop": float("nan")},
        {"max_drop": "1 %"},
        {"max_drop": None},
        {"budget": 0},
        {"budget": -5.0},
        {"budget": "10"},
        {"budget": True},
    ],
)
def test_search__wrong_settings_are_errors(digits, wrong):
    mod, params, data = digits
    is_number = not isinstance(next(iter(wrong.values())), str | bool | None)
    message = "allowed are max_drop >= 0" if is_number else "allowed: a number"
    with pytest.raises(rq.ConfigError, match=message):
        rq.quantize(mod, params, data, metric=relative_error, **wrong)


def test_search__what_is_wrong_shows_before_the_work(digits, tmp_path):
    mod, params, data = digits

    def fail(info, samples):
        raise AssertionError("calibration began")

    def search(**settings):
        return rq.quantize(mod, params, data, **{"metric": relative_error, **settings},
                           observer=fail)  # fmt: skip

    with pytest.raises(rq.ConfigError, match="metric is 'accuracy'; allowed: a function"):
        search(metric="accuracy")
    with pytest.raises(rq.errors.FileError, match="there is no folder"):
        search(search_state=tmp_path / "none" / "search.json")
    with pytest.raises(rq.DataError, match=r"none\.npz"):
        search(validation_dataset=tmp_path / "none.npz")
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format": 1')
    with pytest.raises(rq.DataError, match="is damaged"):
        search(search_state=damaged)


def test_ledger__search_in_one_line():
    found = SearchResult(0.98, 1.0, True, 5, ("a", "b"), "int16")
    assert str(found) == (
        "search: score 0.98, float 1, within the bound after 5 trials; for that, back in int16: "
        "a, b"
    )
    assert str(replace(found, is_met=False, reverted=())) == (
        "search: score 0.98, float 1, not within the bound after 5 trials"
    )
    assert str(found) in list_findings(Ledger((), search=found))
    found = replace(found, dtype="float32", widened=("c",))
    assert str(found).endswith("; for that, back in float32: a, b; with weights of more bits: c")
    assert str(replace(found, reverted=())).endswith("; for that, with weights of more bits: c")


def test_quantize__search_settings_without_a_metric_are_an_error(digits, tmp_path):
    mod, params, data = digits
    path = tmp_path / "s.json"
    with pytest.raises(rq.ConfigError, match="got budget, search_state but no metric"):
        rq.quantize(mod, params, data, budget=60.0, search_state=path)
    with pytest.raises(rq.ConfigError, match="got max_drop but no metric"):
        rq.quantize(mod, params, data, max_drop=0.02)


@pytest.mark.slow
def test_quantize__bound_that_nothing_meets_asks_for_another_bound(digits):
    mod, params, data = digits
    scores = iter([1.0, *[0.5] * 100])
    with pytest.warns(rq.AccuracyWarning, match="Pass a larger max_drop=; there is nothing left"):
        rq.quantize(mod, params, data, effort="fast", metric=lambda a, b: next(scores))


@pytest.fixture
def simulate(monkeypatch):
    """`search_simulated` of operators of which the score depends on some alone: returns what it
    finds, and the prefixes and sets that were measured, one in each second of its clock.
    """

    def run(count, needed, deadline=math.inf):
        order, measured = [f"o{i}" for i in range(count)], []

        def score(integers):
            names = {*order} - {op.name for op in integers}
            measured.append(names)
            return float({order[i] for i in needed} <= names)

        def plan_without(*_):
            def find(names):
                return [SimpleNamespace(name=each) for each in order if each not in names]

            return find

        monkeypatch.setattr("relayquant.flow.refine.search.plan_without", plan_without)
        clock = SimpleNamespace(monotonic=lambda: float(len(measured)))
        monkeypatch.setattr("relayquant.flow.refine.search.time", clock)
        prepared = SimpleNamespace(source=None, backend=None, integer_outputs=())
        simulation = SimpleNamespace(prepared=prepared, score=score, start_from=lambda _: None)
        found = search_simulated(simulation, None, order, 1.0, deadline, CallbackList())
        return [int(name[1:]) for name in found], [len(names) for names in measured]

    return run


@pytest.mark.parametrize(
    "needed", [(), (0,), (3,), (0, 5), (2, 3, 9), (1, 8, 15), tuple(range(16))]
)
def test_search_simulated__nothing_is_put_back_that_need_not_be(needed, simulate):
    """These are found, whatever their places."""
    found, _ = simulate(16, needed)
    # The shortest prefix is thinned; its last operator is what made it suffice.
    assert found == list(needed or (0,))


def test_search_simulated__few_of_many_are_found_by_doubling(simulate):
    found, measured = simulate(64, (63,))
    assert found == [63]
    assert measured[:7] == [1, 2, 4, 8, 16, 32, 63]
    assert measured[7:] == [63, 61, 57, 49, 33, 1]  # 63 do not suffice; ever more of them go
    found, measured = simulate(64, (20,))
    assert measured[:10] == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]
    assert found == [20]


def test_search_simulated__where_all_are_needed_each_is_tried_once(simulate):
    found, measured = simulate(64, range(16))
    assert len(found) == 16
    assert measured[-15:] == [15] * 15


def test_search_simulated__ends_at_the_deadline_with_what_it_has(simulate):
    _, whole = simulate(64, (3, 40))
    for deadline in range(len(whole) + 3):
        found, measured = simulate(64, (3, 40), deadline)
        assert measured == whole[:deadline], "not one more"
        # Once a prefix sufficed, so does all that is found.
        assert ({3, 40} <= set(found)) == (63 in measured)
    assert found == [3, 40]
    assert simulate(64, (3, 40), 0)[0] == [0]
    assert simulate(64, (3, 40), 3)[0] == [0, 1, 2, 3], "the nearest that was seen"
