"""Fitting the weights of recurrent layers, which multiply the layer's own result."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.stages.calibration.weights.patches import LinearView

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS, UNITS, STEPS = 3, 48, 24


def make_model(op: str, **attributes: int):
    """A layer whose result is the hidden state of each step."""
    rng, rows = np.random.default_rng(0), GATES[op] * UNITS

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-1] ** 0.5).astype("float32")

    half = np.float32(0.5)  # states follow the inputs: few directions
    weights = {"W": draw(1, rows, INPUTS), "R": half * draw(1, rows, UNITS)}
    weights["B"] = draw(1, 2 * rows)
    node = helper.make_node(op, ["X", *weights], ["Y"], "layer", hidden_size=UNITS, **attributes)
    return make_onnx([node], {"X": (STEPS, 1, INPUTS)}, "Y", weights, 14)


def draw_samples(count: int, seed: int) -> list[np.ndarray]:
    """Slow signals, so that the hidden states are alike from step to step."""
    steps = np.random.default_rng(seed).normal(size=(count, STEPS, 1, INPUTS))
    return [*(steps.cumsum(1) / 2).astype("float32")]


def fit(model, order: rq.config.Order = rq.config.Order.PARALLEL):
    """The recurrent operator's float weight, and its weight and scale after calibration."""
    prepared = rq.prepare(*rq.load(model))
    calibrated = rq.calibrate(prepared, draw_samples(16, 1), order=order)
    (operator,) = (o for o in prepared.plan.operators if o.op.startswith("relax.qnn."))
    key = f"{operator.name}:weight"
    scale = calibrated.parameters[dict(operator.operands)["weight"]].scale
    return prepared.graph.constants[key].value, calibrated.constants.get(key), scale


def measure_noise(model, error: np.ndarray) -> float:
    """Mean square of what a change of the weight does to the sums, on other samples."""
    states = [run_onnxruntime(model, {"X": x})[0].reshape(-1, UNITS) for x in draw_samples(8, 2)]
    return float(np.square(np.concatenate(states) @ error).mean())


@pytest.mark.parametrize("order", rq.config.Order)
@pytest.mark.parametrize("op", GATES)
def test_fit__recurrent_weights_lose_less_than_the_nearest(op: str, order: rq.config.Order) -> None:
    model = make_model(op, **({"linear_before_reset": 1} if op == "GRU" else {}))
    weight, fitted, scale = fit(model, order)
    assert fitted is not None
    levels = fitted / scale
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-3)
    nearest = np.rint(weight / scale) * scale
    assert 2 * measure_noise(model, fitted - weight) < measure_noise(model, nearest - weight)


def test_fit__gru_whose_gates_multiply_different_states__keeps_the_nearest() -> None:
    _, fitted, _ = fit(make_model("GRU"))
    assert fitted is None


def test_fit__rows_are_the_steps_without_the_last_states() -> None:
    result = np.arange(5 * 2 * 3, dtype="float32").reshape(5, 2, 3)
    view = LinearView(None, (1, 0), skipped=2)
    found = view.sample_rows([result, result], 100, np.random.default_rng(0))
    assert np.array_equal(found[0], np.concatenate([result[2:].reshape(-1, 3)] * 2))
