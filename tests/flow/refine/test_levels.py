"""Levels of effort: what the higher one must not lose, and what is kept if it does."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.outputs import count_differing
from relayquant.config import GuardSettings
from relayquant.data import SpreadSample, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.flow.refine import levels
from relayquant.flow.refine.levels import is_nearer, make_meter, pick_compared


def test_make_meter__a_softmax_is_judged_by_its_logarithm():
    def body(emit, x):
        first = emit.dense("first", x, 4)
        return relax.Tuple([emit("scores", op.nn.softmax(first)), first])

    mod = build_model(body, (2, 25))
    rng = np.random.default_rng(0)
    data = [{"x": rng.normal(size=(2, 25)).astype("float32")} for _ in range(3)]
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    differing, noise = make_meter(prepared, data)(qmod)
    runs = [[rq.reference.run(each, batch) for batch in data] for each in (mod, qmod)]
    (real, real_first), (got, got_first) = (
        (np.stack(each).astype("float64") for each in zip(*run, strict=True)) for run in runs
    )
    expected = [(np.log(got) - np.log(real)) ** 2, (got_first - real_first) ** 2]
    np.testing.assert_allclose(noise, [x.sum(-1).ravel() for x in expected], rtol=1e-3)
    assert differing == sum(
        count_differing(x, y)[0]
        for run in zip(*runs, strict=True)
        for x, y in zip(*run, strict=True)
    )


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1.0, -0.1], True),
        ([1.5, -0.8], False),  # one output loses, whatever the other gains
        ([-0.1, 0.0], False),
        ([0.0, 0.0], True),
        ([-np.inf], False),
    ],
)
def test_is_nearer__no_output_loses(gains, expected):
    base = np.ones((len(gains), 6))
    assert is_nearer(base * 10 ** (-np.array(gains)[:, None] / 10), base) is expected


def test_is_nearer__a_gain_within_its_standard_error_is_chance():
    base, noise = np.ones((1, 6)), np.full((1, 6), 0.9)
    assert is_nearer(noise, base)
    noise[0, :2] = 0.3, 1.5  # the same sum
    assert not is_nearer(noise, base)


@pytest.mark.parametrize("is_near", [True, False])
def test_quantize__best_keeps_the_level_that_follows_better(monkeypatch, is_near):
    mod = build_model(lambda emit, x: emit.dense("z", emit.dense("y", x, 30), 3), (4, 25))
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(4, 25)).astype("float32") for _ in range(4)]
    monkeypatch.setattr(levels, "is_nearer", lambda *_: is_near)
    best = rq.quantize(mod, None, data, effort="best")
    balanced = rq.quantize(mod, None, data)
    ledger = rq.ledger(best)
    assert ledger.to_dict()["effort"] == "best"
    assert ("level" in ledger.choices) is not is_near
    (got,), (expected,) = (rq.reference.run(each, [data[0]]) for each in (best, balanced))
    assert np.array_equal(got, expected) is not is_near


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
