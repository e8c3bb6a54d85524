"""Levels of effort: what the higher one must not lose, and what is kept if it does."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model

import relayquant as rq
from relayquant.analysis.outputs import OutputGap
from relayquant.config import GuardSettings
from relayquant.data import SpreadSample, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.flow.refine import levels
from relayquant.flow.refine.levels import is_as_near, pick_compared


@pytest.mark.parametrize(
    ("higher", "lower", "expected"),
    [
        ([22.0, 32.8], [21.0, 32.9], True),
        ([22.8, 32.1], [21.3, 32.9], False),  # one output loses, whatever the other gains
        ([20.9, 32.9], [21.0, 32.9], False),
        ([np.inf, 30.0], [np.inf, 30.0], True),
        ([-np.inf], [20.0], False),
    ],
)
def test_is_as_near__no_output_loses(higher, lower, expected):
    assert is_as_near([*map(OutputGap, higher)], [*map(OutputGap, lower)]) is expected


def test_is_as_near__clearly_other_answers_decide():
    assert not is_as_near([OutputGap(40.0, 1, 32)], [OutputGap(20.0, 0, 32)])


@pytest.mark.parametrize("is_near", [True, False])
def test_quantize__best_keeps_the_level_that_follows_better(monkeypatch, is_near):
    mod = build_model(lambda emit, x: emit.dense("z", emit.dense("y", x, 30), 3), (4, 25))
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(4, 25)).astype("float32") for _ in range(4)]
    monkeypatch.setattr(levels, "is_as_near", lambda *_: is_near)
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
