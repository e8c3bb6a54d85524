"""quiet_outputs: an output between known bounds is judged by a tenth of them at least."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.analysis.outputs import PartMeter, compute_results, measure_gaps
from relayquant.analysis.quiet_outputs import find_least_energies
from relayquant.analysis.sensitivity import Simulation, find_rounding_operators
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.stages.preparation import prepare_module

UNITS, WIDTH, SHIFT = 16, 1024, 40.0


def bounded(emit, x):
    """Results of operators with bounds, the first two behind moves of their elements, and of two
    without.
    """
    op = relax.op
    sigmoid, tanh = emit("sigmoid", op.sigmoid(x)), emit("tanh", op.tanh(x))
    moved = [emit("flat", op.reshape(sigmoid, (-1, 4))), emit("turned", op.permute_dims(tanh))]
    others = [op.clip(x, 0, 1), op.clip(x, -1, 6), op.nn.relu(x)]
    return relax.Tuple([*moved, *(emit(f"y{i}", value) for i, value in enumerate(others))])


def test_find_least_energies__where_an_operator_bounds_the_result():
    assert find_least_energies(build_model(bounded, (2, UNITS))) == [0.01, 0.01, 0.01, 0, 0]


def detect(emit, x):
    """Places, and the chance that there is anything: almost 0, and of few dB."""
    hidden = emit("hidden", relax.op.nn.relu(emit.dense("first", x, WIDTH)))
    logit = emit.dense("logit", hidden, 1)
    shifted = emit("shifted", relax.op.subtract(logit, relax.const(np.float32([SHIFT]))))
    return relax.Tuple(
        [emit.dense("places", hidden, UNITS), emit("chance", relax.op.sigmoid(shifted))]
    )


@pytest.fixture(scope="module")
def detector():
    """(module, samples)."""
    mod = build_model(detect, (1, UNITS))
    return mod, draw_batches(mod, 32)


def test_guard__an_output_that_is_almost_zero_reverts_nothing(detector):
    mod, data = detector
    qmod = rq.quantize(mod, None, data)
    ledger = rq.ledger(qmod)
    results = [
        np.concatenate([batch[1] for batch in compute_results(each, data)]) for each in (mod, qmod)
    ]
    largest, error = results[0].max(), results[1] - results[0]
    assert largest < 1e-3
    assert 10 * np.log10(np.square(results[0]).sum() / np.square(error).sum()) < 15
    assert not ledger.guard.reverted
    assert ledger.guard.sqnr > 20


def sum_noise(expected, got, result: int) -> float:
    pairs = zip(expected, got, strict=True)
    return sum(np.square(y[result] - x[result], dtype="float64").sum() for x, y in pairs)


def test_sqnr__has_a_hundredth_as_the_signal_of_each_quiet_sample(detector):
    mod, data = detector
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    noise = sum_noise(*(compute_results(each, data) for each in (prepared.mod, qmod)), 1)
    wanted = pytest.approx(10 * np.log10(len(data) * 0.01 / noise), abs=0.01)
    gap = measure_gaps(prepared.mod, qmod, data)[1]
    assert gap.sqnr == wanted
    assert np.mean(10 ** (-np.array(gap.each) / 10)) == pytest.approx(10 ** (-gap.sqnr / 10), 1e-3)
    assert rq.compare(mod, None, qmod, data).outputs[1].sqnr == wanted


def test_simulation__has_the_same_signal(detector):
    data = detector[1]
    chance = build_model(lambda emit, x: detect(emit, x).fields[1], (1, UNITS))
    prepared = rq.calibrate(rq.prepare(chance, None), data)
    simulation = Simulation(prepared, open_dataset(data, describe_inputs(prepared.mod)))
    operators = find_rounding_operators(prepared)
    noise = sum_noise(simulation.expected, simulation.run(operators), 0)
    wanted = 10 * np.log10(len(data) * 0.01 / noise)
    assert simulation.sqnr(operators) == pytest.approx(wanted, abs=0.01)


def test_part_meter__a_quiet_part_has_it_too():
    def body(emit, x):
        places, chance = emit("places", relax.op.negative(x)), emit("chance", relax.op.sigmoid(x))
        return emit("joined", relax.op.concat([places, chance], axis=1))

    mod = prepare_module(build_model(body, (1, UNITS)))
    batch = {"x": np.full((1, UNITS), -20, "float32")}
    meter, (expected,) = PartMeter(mod), compute_results(mod, [batch])
    meter.measure(batch, expected, [expected[0] + np.float32(1e-4)])
    wanted = 10 * np.log10(0.01 / (UNITS * 1e-8))
    assert meter.gaps["chance"].sqnr == pytest.approx(wanted, abs=0.01)
