"""The script that trains the built-in example: the digits that are shipped, a network that learns,
and an export that computes what PyTorch computes.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from relayquant.demo import load_digits

torch = pytest.importorskip("torch", reason="pip install torch")
pytest.importorskip("sklearn", reason="pip install scikit-learn")
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "train_digits.py"))
SHIPPED = load_digits().model_path


def test_write_demo__digits_are_those_that_are_shipped(tmp_path: Path) -> None:
    # Guessing is right once in ten times.
    assert SCRIPT["write_demo"](tmp_path, epochs=4) > 0.4
    with np.load(tmp_path / "digits.npz") as data, np.load(SHIPPED.with_suffix(".npz")) as shipped:
        assert set(data) == set(shipped)
        for name, array in shipped.items():
            assert array.dtype == data[name].dtype
            np.testing.assert_array_equal(data[name], array)


def test_export_onnx__nodes_and_shapes_of_the_shipped_model(tmp_path: Path) -> None:
    SCRIPT["export_onnx"](SCRIPT["Network"]().eval(), tmp_path / "model.onnx")

    def describe(model: onnx.ModelProto) -> list[object]:
        graph = model.graph
        nodes = [(n.op_type, n.name, *n.input, *n.output) for n in graph.node]
        weights = [(t.name, *t.dims) for t in graph.initializer]
        return [*nodes, *weights, *map(str, (*graph.input, *graph.output))]

    assert describe(onnx.load(str(tmp_path / "model.onnx"))) == describe(onnx.load(str(SHIPPED)))


def test_export_onnx__same_logits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = SCRIPT["Network"]()
    network(torch.rand(64, 1, 8, 8) * 3)  # statistics other than those it starts with
    images = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        expected = network.eval()(images).numpy()
    SCRIPT["export_onnx"](network, tmp_path / "model.onnx")
    session = ReferenceEvaluator(onnx.load(str(tmp_path / "model.onnx")))
    (actual,) = session.run(None, {"image": images.numpy()})
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-4, atol=1e-4)
