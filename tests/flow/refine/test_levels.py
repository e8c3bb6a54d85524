"""Levels of effort: what the higher one must not lose, and what is kept if it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float_models import build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.outputs import count_differing
from relayquant.config import Guard, GuardSettings
from relayquant.data import SpreadSample, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.flow.refine import levels
from relayquant.flow.refine.levels import Distance, find_flaw, make_meter, pick_compared


@pytest.mark.parametrize("requested", ["", "int8"])
def test_make_meter__a_softmax_is_judged_by_its_logarithm_unless_it_is_integer(requested):
    def body(emit, x):
        first = emit.dense("first", x, 4)
        return relax.Tuple([first, emit("scores", op.nn.softmax(first))])

    mod = build_model(body, (2, 25))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(2, 25)).astype("float32")} for _ in range(3)]
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    first, scores = prepared.outputs
    asked = replace(prepared, outputs=(first, replace(scores, requested=requested)))
    found = make_meter(asked, data)(qmod)
    runs = [[rq.reference.run(each, batch) for batch in data] for each in (mod, qmod)]
    (real_first, real), (got_first, got) = (
        (np.stack(each).astype("float64") for each in zip(*run, strict=True)) for run in runs
    )
    judged = (got, real) if requested else (np.log(got), np.log(real))
    expected = [(got_first - real_first) ** 2, np.subtract(*judged) ** 2]
    np.testing.assert_allclose(found.noise, [x.sum(-1).ravel() for x in expected], rtol=1e-3)
    assert found.differing == sum(
        count_differing(x, y)[0]
        for run in zip(*runs, strict=True)
        for x, y in zip(*run, strict=True)
    )


def test_make_meter__what_an_output_joins_is_judged_apart():
    """Places of a large range hide the noise of scores that stand beside them."""

    def body(emit, x):
        places = emit("places", op.multiply(emit.dense("first", x, 8), relax.const(100.0)))
        scores = emit("scores", op.sigmoid(emit.dense("second", x, 8)))
        return emit("both", op.concat([places, scores], 1))

    mod = build_model(body, (2, 25))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(2, 25)).astype("float32")} for _ in range(3)]
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    found = make_meter(prepared, data)(qmod)
    real, got = (
        np.concatenate([rq.reference.run(each, batch)[0] for batch in data]).astype("float64")
        for each in (mod, qmod)
    )
    energy = np.square(got - real)
    expected = [energy[:, :8].sum(1), energy[:, 8:].sum(1)]
    np.testing.assert_allclose(found.noise, expected, rtol=1e-3)
    assert (found.noise[0] > 100 * found.noise[1]).all()


def test_make_meter__of_batches_of_other_numbers_of_samples_whose_rows_are_mixed():
    """One sample alone would have parts."""

    def body(emit, x):
        joined = op.concat([emit.dense("first", x, 2), emit.dense("second", x, 2)], 1)
        columns = emit("columns", op.permute_dims(emit("joined", joined)))
        return emit("mixed", op.reshape(columns, (-1, 4)))

    mod = build_model(body, ("n", 25))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(n, 25)).astype("float32")} for n in (2, 1)]
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    assert make_meter(prepared, data)(qmod).noise.shape == (1, 3)


FARTHER = "is farther from the float model"
LOSES = "may lose more than 0.2 dB at an output"
CHANCE = "gains less than its standard error"
FEW = "is compared on fewer than 4 samples"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1.0, -0.1], ""),
        ([1.5, -0.8], LOSES),  # whatever the other gains
        ([-0.1, 0.0], FARTHER),
        ([0.0, 0.0], ""),
        ([-np.inf], FARTHER),
        ([], ""),
    ],
)
def test_find_flaw__no_output_loses(gains, expected):
    base = np.ones((len(gains), 6))
    noise = base * 10 ** (-np.array(gains)[:, None] / 10)
    assert find_flaw(Distance(0, noise), Distance(0, base)) == expected


def test_find_flaw__a_gain_within_its_standard_error_is_chance():
    base, noise = Distance(0, np.ones((1, 6))), np.full((1, 6), 0.9)
    assert not find_flaw(Distance(0, noise), base)
    noise[0, :2] = 0.3, 1.5  # the same sum
    assert find_flaw(Distance(0, noise), base) == CHANCE


@pytest.mark.parametrize(("count", "expected"), [(1, FEW), (3, FEW), (4, "")])
def test_find_flaw__few_samples_have_no_standard_error(count, expected):
    base = np.ones((2, count))
    assert find_flaw(Distance(0, base / 2), Distance(0, base)) == expected


@pytest.mark.parametrize(("differing", "is_flaw"), [(0, False), (2, False), (3, True)])
def test_find_flaw__no_more_answers_differ(differing, is_flaw):
    base = np.ones((1, 6))
    flaw = find_flaw(Distance(differing, base / 2), Distance(2, base))
    assert flaw == ("has more different answers" if is_flaw else "")


@pytest.mark.parametrize("flaw", ["", "differs"])
def test_quantize__best_is_kept_without_a_flaw(monkeypatch, flaw):
    mod = build_model(lambda emit, x: emit.dense("z", emit.dense("y", x, 30), 3), (4, 25))
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(4, 25)).astype("float32") for _ in range(4)]
    monkeypatch.setattr(levels, "find_flaw", lambda *_: flaw)
    best = rq.quantize(mod, None, data, effort="best")
    balanced = rq.quantize(mod, None, data)
    ledger = rq.ledger(best)
    assert ledger.to_dict()["effort"] == "best"
    assert ledger.choices.get("level") == ("balanced: best differs" if flaw else None)
    (got,), (expected,) = (rq.reference.run(each, [data[0]]) for each in (best, balanced))
    assert np.array_equal(got, expected) is bool(flaw)


@pytest.mark.parametrize("flaw", ["", "differs"])
def test_quantize__best_and_the_level_below_are_compared_as_the_guard_leaves_them(
    monkeypatch, flaw
):
    mod = build_model(lambda emit, x: emit.dense("z", emit.dense("y", x, 30), 3), (4, 25))
    rng, seen = np.random.default_rng(0), []
    data = [rng.normal(size=(4, 25)).astype("float32") for _ in range(4)]
    guard = GuardSettings(Guard.REVERT, min_sqnr=90, target_sqnr=90)
    monkeypatch.setattr(levels, "make_meter", lambda *_: seen.append)
    monkeypatch.setattr(levels, "find_flaw", lambda *_: flaw)
    with pytest.warns(rq.AccuracyWarning) as caught:
        best = rq.quantize(mod, None, data, effort="best", guard=guard)
    assert len(caught) == 1
    assert [bool(rq.ledger(each).guard.reverted) for each in seen] == [True, True]
    assert str(caught[0].message).count(rq.ledger(best).guard.describe()) == 1
    same = seen[1] if flaw else seen[0]
    assert rq.ledger(best).guard == rq.ledger(same).guard
    assert rq.ledger(best).to_dict()["effort"] == "best"


@pytest.mark.parametrize("is_off", [False, True])
@pytest.mark.filterwarnings("ignore:Nothing is quantized")
def test_quantize__best_compares_nothing_where_nothing_is_quantized(is_off):
    mod = build_model(lambda emit, x: emit("y", op.nn.relu(x)), (4, 25))
    mapping = None
    if is_off:
        mod = build_model(lambda emit, x: emit.dense("y", x, 3), (4, 25))
        mapping = rq.QConfigMapping().set_global(None)
    data = [np.random.default_rng(i).normal(size=(4, 25)).astype("float32") for i in range(2)]
    qmod = rq.quantize(mod, None, data, effort="best", qconfig_mapping=mapping)
    assert "level" not in rq.ledger(qmod).choices
    (got,), (expected,) = (rq.reference.run(each, [data[0]]) for each in (qmod, mod))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("length", [47, 48])
def test_pick_compared__held_back_samples_alone_where_there_are_enough(length):
    mod = build_model(lambda emit, x: emit.dense("z", x, 3), (1, 25))
    prepared = rq.prepare(mod, None)
    inputs = describe_inputs(prepared.mod)
    sample = SpreadSample(inputs, 64, holds_back=True)
    data = [np.full((1, 25), place, "float32") for place in range(length)]
    read = [int(batch["x"][0, 0]) for batch in sample.watch(open_dataset(data, inputs))]
    found = [int(batch["x"][0, 0]) for batch in pick_compared(prepared, sample, GuardSettings())]
    assert set(found) == {23, 31, 39, 47} if length == 48 else set(found) < set(read)
