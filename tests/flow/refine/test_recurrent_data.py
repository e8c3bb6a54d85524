"""Data of 16 bits for the products that recurrent layers read: where the outputs gain by it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq

INPUTS, UNITS, STEPS = 6, 24, 12


def make_model(size: float, *, has_dense: bool = True):
    """An LSTM that reads a dense layer, or the input; `size` of the LSTM's weights."""
    rng, rows = np.random.default_rng(0), 4 * UNITS

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-1] ** 0.5).astype("float32")

    dense = {"D": draw(INPUTS, UNITS)} if has_dense else {}
    weights = dense | {
        "W": np.float32(size) * draw(1, rows, UNITS if has_dense else INPUTS),
        "R": np.float32(size) * draw(1, rows, UNITS),
    }
    data = "dense" if has_dense else "X"
    nodes = [helper.make_node("LSTM", [data, "W", "R"], ["Y"], "layer", hidden_size=UNITS)]
    if has_dense:
        nodes.insert(0, helper.make_node("MatMul", ["X", "D"], ["dense"], "dense"))
    return make_onnx(nodes, {"X": (STEPS, 1, INPUTS)}, "Y", weights, 14)


def draw_samples(count: int, seed: int) -> list[np.ndarray]:
    return [*np.random.default_rng(seed).normal(size=(count, STEPS, 1, INPUTS)).astype("float32")]


def measure_sqnr(model, qmod) -> float:
    """SQNR in dB on other samples, beside ONNX Runtime."""
    signal = noise = 0.0
    for x in draw_samples(12, 2):
        expected = run_onnxruntime(model, {"X": x})[0]
        signal += np.square(expected).sum()
        noise += np.square(expected - rq.reference.run(qmod, [x])[0]).sum()
    return float(10 * np.log10(signal / noise))


def quantize(model, **settings):
    mod, params = rq.load(model)
    return rq.quantize(mod, params, draw_samples(16, 1), callbacks=(), **settings)


def find_dtypes(qmod) -> set[str]:
    return {row["dtype"] for row in rq.ledger(qmod).to_dict()["operators"]}


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_quantize__sums_of_a_recurrent_layer_that_amplifies_errors_have_int16_data(effort) -> None:
    model = make_model(2.0)
    qmod = quantize(model, effort=effort)
    assert rq.ledger(qmod).choices["recurrent"].startswith("int16 data of 1 product: ")
    assert "int16" in find_dtypes(qmod)
    mapping = rq.prepare(*rq.load(model)).mapping
    asked = quantize(model, effort=effort, qconfig_mapping=mapping)
    assert "recurrent" not in rq.ledger(asked).choices
    assert "int16" not in find_dtypes(asked)
    assert measure_sqnr(model, qmod) > measure_sqnr(model, asked) + 2


@pytest.mark.parametrize(("size", "effort"), [(8.0, "balanced"), (2.0, "fast")])
def test_quantize__data_keeps_8_bits__without_a_clear_gain_or_if_it_must_be_fast(
    size: float, effort: str
) -> None:
    """Steps of the large layer are chaotic: whatever rounds, its later states differ."""
    qmod = quantize(make_model(size), effort=effort)
    assert "recurrent" not in rq.ledger(qmod).choices
    assert "int16" not in find_dtypes(qmod)


@pytest.mark.slow
def test_quantize__inputs_keep_the_dtype_that_was_asked_for() -> None:
    model = make_model(3.0, has_dense=False)
    assert "recurrent" in rq.ledger(quantize(model)).choices
    qmod = quantize(model, input_dtypes={0: "int8"})
    assert "recurrent" not in rq.ledger(qmod).choices
    assert str(qmod["main"].params[0].ty.dtype) == "int8"
