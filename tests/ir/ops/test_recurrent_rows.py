"""Quantizing a model with a recurrent layer: one row, no growth with the steps, its accuracy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS, UNITS = 8, 32


def make_model(op, steps):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (rng.uniform(-1, 1, shape) / UNITS**0.5).astype("float32")

    rows = GATES[op] * UNITS
    weights = {"W": draw(1, rows, INPUTS), "R": draw(1, rows, UNITS), "B": draw(1, 2 * rows)}
    node = helper.make_node(op, ["X", *weights], ["Y"], "layer", hidden_size=UNITS)
    return make_onnx([node], {"X": (steps, 1, INPUTS)}, "Y", weights, 14)


def quantize(op, steps=12, **settings):
    """(model, samples, integer module)"""
    model, rng = make_model(op, steps), np.random.default_rng(1)
    samples = [rng.normal(size=(steps, 1, INPUTS)).astype("float32") for _ in range(8)]
    mod, params = rq.load(model)
    return model, samples, rq.quantize(mod, params, samples, effort="fast", **settings)


def measure_sqnr(expected, found):
    return 10 * np.log10(np.square(expected).sum() / np.square(expected - found).sum())


def run_session(model, sample):
    return run_onnxruntime(model, {"X": sample})[0]


@pytest.mark.parametrize("op", GATES)
def test_recurrent__as_onnxruntime_with_floats(op):
    """The products are integers, the gates and states float32: no step adds to the error."""
    model, samples, qmod = quantize(op)
    rows = {row["op"]: row for row in rq.ledger(qmod).to_dict()["operators"]}
    assert rows[f"qnn.{op.lower()}"]["quantized"]
    assert rows["matmul"]["quantized"]
    (found,) = rq.reference.run(qmod, [samples[0]])
    assert measure_sqnr(run_session(model, samples[0]), found) > 36


def test_recurrent__module_does_not_grow_with_the_steps():
    few, many = (quantize("LSTM", steps)[2].script() for steps in (3, 24))
    assert few.count("\n") == many.count("\n")


def test_recurrent__kept_in_float():
    default = rq.get_backend_config("x86").default_qconfig
    mapping = rq.QConfigMapping().set_global(default).set_object_type("qnn.lstm", None)
    _, _, qmod = quantize("LSTM", qconfig_mapping=mapping, backend="x86")
    rows = {row["op"]: row for row in rq.ledger(qmod).to_dict()["operators"]}
    assert rows["matmul"]["quantized"]
    assert not rows["qnn.lstm"]["quantized"]
    assert "qnn.lstm" in rows["qnn.lstm"]["reason"]


def test_recurrent__has_no_float16():
    mapping = rq.QConfigMapping().set_object_type("qnn.lstm", rq.config.FLOAT16)
    with pytest.warns(UserWarning, match="float32"):
        _, _, qmod = quantize("LSTM", qconfig_mapping=mapping)
    rows = {row["op"]: row for row in rq.ledger(qmod).to_dict()["operators"]}
    assert rows["qnn.lstm"]["reason"] == "recurrent layers compute in float32"


@pytest.mark.parametrize("op", GATES)
def test_recurrent__exported_as_one_node(op, tmp_path):
    _, samples, qmod = quantize(op)
    path = rq.export_onnx(qmod, tmp_path / "layer.onnx", recurrent="operator")
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count(op) == 1
    assert "MatMul" not in kinds
    found = run_session(path, samples[0])
    (expected,) = rq.reference.run(qmod, [samples[0]])
    assert measure_sqnr(expected, found) > 36
