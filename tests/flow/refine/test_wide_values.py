"""wide_values: operators without products whose values 8 bits cannot hold stay in float."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax

import relayquant as rq
from relayquant.analysis.own_error import measure_own_errors
from relayquant.base.runtime import Executor
from relayquant.config import Guard

INPUTS, UNITS = 512, 64


def magnitude(emit, x):
    """The magnitude of two projections, as of a Fourier transform, and a product that reads it."""
    real, imaginary = (emit.dense(name, x, UNITS) for name in ("real", "imaginary"))
    squares = [emit(f"{v.name}_square", relax.op.multiply(v, v)) for v in (real, imaginary)]
    energy = emit("energy", relax.op.add(*squares))
    return emit.dense("out", emit("magnitude", relax.op.sqrt(energy)), 32)


@pytest.fixture(scope="module")
def model():
    """(module, samples of loudness 0.01 to 1)."""
    rng = np.random.default_rng(0)
    loud = 10 ** rng.uniform(-2, 0, (40, 1, 1))
    data = (rng.standard_normal((40, 8, INPUTS)) * loud).astype("float32")
    return build_model(magnitude, (8, INPUTS)), [{"x": x} for x in data]


def round_by(value: np.ndarray, row) -> np.ndarray:
    (scale,), (zero,) = row.scale, row.zero_point
    return (np.clip(np.rint(value / np.float32(scale)) + zero, 0, 255) - zero) * scale


def decibels(real: np.ndarray, got: np.ndarray) -> float:
    return float(10 * np.log10(np.square(real).sum() / np.square(real - got).sum()))


def test_own_error__is_that_of_rounding_in_numpy(model):
    mod, data = model
    prepared = rq.calibrate(rq.prepare(mod, None, effort="fast"), data[:32])
    found = {error.name: error for error in measure_own_errors(prepared, data[:4])}
    ledger = rq.ledger(rq.convert_to_reference(prepared))
    real, got, result = [], [], []
    for batch in data[:4]:
        values = rq.reference.run_values(prepared.mod, batch)
        real.append(values["magnitude"])
        energy = round_by(values["energy"], ledger.row("energy"))
        got.append(round_by(np.sqrt(energy), ledger.row("magnitude")))
        result.append(round_by(real[-1], ledger.row("magnitude")))
    assert found["magnitude"].rounded == pytest.approx(decibels(*map(np.stack, (real, got))), 1e-3)
    # A product reads the result, which rounds it in any case.
    exact = decibels(*map(np.stack, (real, result)))
    assert found["magnitude"].floating == pytest.approx(exact, 1e-3)
    assert found["energy"].floating == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_quantize__magnitudes_stay_in_float_and_the_ledger_says_why(model, effort):
    mod, data = model
    qmod = rq.quantize(mod, None, data[:32], effort=effort, guard=Guard.OFF)
    ledger = rq.ledger(qmod)
    kept = {row.name for row in ledger.floating}
    assert kept == {"real_square", "imaginary_square", "energy", "magnitude"}
    assert "the range of its values: its result has" in ledger.row("magnitude").reason
    assert all(ledger.row(name).reason.startswith("kept in float by") for name in kept)
    real, got = (
        np.stack([Executor(rq.compile(m)).run("main", [b["x"]])[0] for b in data[32:]])
        for m in (mod, qmod)
    )
    assert decibels(real, got) > 30


@pytest.mark.slow
def test_quantize__asked_for_by_type_stays_on_integers(model):
    mod, data = model
    qconfig = rq.get_backend_config().default_qconfig
    mapping = rq.QConfigMapping().set_global(qconfig).set_object_type("sqrt", qconfig)
    qmod = rq.quantize(mod, None, data[:32], qconfig_mapping=mapping, guard=Guard.OFF)
    assert rq.ledger(qmod).row("magnitude").quantized
    qmod = rq.quantize(mod, None, data[:32], strict=True, guard=Guard.OFF)
    assert not rq.ledger(qmod).floating


def test_quantize__operators_that_cost_much_stay_on_integers():
    """A network of few products: its float operators would take longer than all of them."""
    rng = np.random.default_rng(0)
    loud = 10 ** rng.uniform(-2, 0, (32, 1, 1))
    data = [{"x": x} for x in (rng.standard_normal((32, 8, UNITS)) * loud).astype("float32")]
    qmod = rq.quantize(build_model(magnitude, (8, UNITS)), None, data, guard=Guard.OFF)
    assert rq.ledger(qmod).row("magnitude").quantized
