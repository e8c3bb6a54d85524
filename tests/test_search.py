"""fallback: few operators back in float, the bound met by the integers themselves, anytime."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.demo import load_digits
from relayquant.runtime import Executor

BROKEN = "conv2/relu"


@pytest.fixture(scope="module")
def digits():
    demo = load_digits()
    mod, params = rq.load(str(demo.model_path))
    return mod, params, [np.concatenate(demo.calibration)[:64]]


def relative_error(expected, got) -> float:
    return -float(np.linalg.norm(expected[0] - got[0]) / np.linalg.norm(expected[0]))


def clip_one(info, samples):
    """A fiftieth of the range for one value: all above it is lost."""
    high = max(float(array.max()) for array in samples)
    low = min(float(array.min()) for array in samples)
    return rq.choose_qparams(low, high / (50 if info.name == BROKEN else 1), info.spec)


def test_fallback__nothing_to_do(digits):
    mod, params, data = digits
    found = rq.fallback(mod, params, data, relative_error, effort="fast", max_drop=0.1)
    assert found.is_met
    assert found.reverted == ()
    assert found.trials == 1
    assert found.float_score == 0.0


def test_fallback__puts_back_what_is_broken(digits):
    mod, params, data = digits
    found = rq.fallback(
        mod, params, data, relative_error, effort="fast", max_drop=0.1, calibration=clip_one
    )
    assert found.is_met
    assert found.reverted == (BROKEN,)
    ledger = rq.ledger(found.mod)
    assert not ledger.row(BROKEN).quantized
    assert ledger.row("conv1/relu").quantized
    (expected,) = Executor(rq.compile(mod)).run("main", data)
    (got,) = Executor(rq.compile(found.mod)).run("main", data)
    assert relative_error([expected], [got]) == pytest.approx(found.score, rel=1e-4)
    # The mapping makes the module again.
    qmod, mapping = found
    again = rq.quantize(
        mod, params, data, qconfig_mapping=mapping, calibration=clip_one, effort="fast"
    )
    (repeated,) = Executor(rq.compile(again)).run("main", data)
    np.testing.assert_array_equal(repeated, got)
    assert qmod is found.mod


def test_fallback__bound_out_of_reach_gives_all_in_float(digits):
    mod, params, data = digits
    found = rq.fallback(mod, params, data, relative_error, effort="fast", max_drop=1e-5)
    assert found.is_met
    assert not rq.ledger(found.mod).quantized


def test_fallback__budget_used_up_gives_the_first_module(digits):
    mod, params, data = digits
    found = rq.fallback(
        mod,
        params,
        data,
        relative_error,
        effort="fast",
        max_drop=0.1,
        calibration=clip_one,
        budget=1e-3,
    )
    assert not found.is_met
    assert found.reverted == ()
    assert found.score < -0.5


@pytest.mark.parametrize("wrong", [{"max_drop": -1}, {"max_drop": float("nan")}, {"budget": 0}])
def test_fallback__wrong_settings_are_errors(digits, wrong):
    mod, params, data = digits
    with pytest.raises(rq.ConfigError, match="allowed are max_drop >= 0"):
        rq.fallback(mod, params, data, relative_error, **wrong)
