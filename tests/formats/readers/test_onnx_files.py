"""Quantized models of others, in the folder that RELAYQUANT_ONNX_MODELS names (the test models of
ONNX Runtime, say): each one is computed as ONNX Runtime has it, or refused.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_files import find_deviation, find_models, run_file
from onnx_node_cases import Outcome
from quantized_models import GraphBuilder

VARIABLE = "RELAYQUANT_ONNX_MODELS"

#: Share of the models that are computed, of those that ONNX Runtime runs.
MIN_SHARE = 195 / 209


@pytest.mark.nightly
def test_models__are_right_or_refused():
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"no models: {VARIABLE} names a folder of them")
    results = {path: run_file(path) for path in find_models(Path(folder))}
    counts = Counter(result.outcome for result in results.values() if result is not None)
    assert not {
        str(path): result.reason
        for path, result in results.items()
        if result is not None and result.outcome in (Outcome.WRONG, Outcome.BARE)
    }
    assert counts[Outcome.RIGHT] >= MIN_SHARE * counts.total()


def test_run_file__tells_what_became_of_a_model(tmp_path):
    pytest.importorskip("onnxruntime")
    g = GraphBuilder()
    y = g.round_trip(g.node("Relu", g.round_trip("x", 0.05, np.uint8(120))), 0.05, np.uint8(0))
    path = tmp_path / "m.onnx"
    path.write_bytes(
        g.model({"x": ("float32", ("n", 4))}, {y: ("float32", None)}).SerializeToString()
    )
    plain = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [], [])
    (tmp_path / "float.onnx").write_bytes(helper.make_model(plain).SerializeToString())
    assert list(find_models(tmp_path)) == [path]
    found = run_file(path)
    assert found is not None
    assert found.outcome is Outcome.RIGHT
    z = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, (), [0.0])
    g = GraphBuilder()
    g.constants.append(z)
    y = g.node("QuantizeLinear", "x", g.constant(np.float32(0.1)), "z")
    y = g.node("DequantizeLinear", y, g.constant(np.float32(0.1)), "z")
    model = g.model({"x": ("float32", ("n", 4))}, {y: ("float32", None)}, opset=19)
    path.write_bytes(model.SerializeToString())
    found = run_file(path)
    assert found is not None
    assert found.outcome is Outcome.REFUSED


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (np.zeros(100), np.ones(100)),
        (np.zeros(100, "int8"), np.full(100, 1, "int8")),
        (np.zeros(100, "int8"), np.array([2] + [0] * 99, "int8")),
        (np.zeros(100, "int8"), np.zeros(100, "uint8")),
        (np.zeros((10, 10)), np.zeros(100)),
        (np.full(100, np.nan), np.ones(100)),
    ],
)
def test_deviation__is_seen(have, want):
    assert find_deviation([have], [want])
    assert not find_deviation([want], [want.copy()])
