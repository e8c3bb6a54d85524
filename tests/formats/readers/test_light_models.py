"""The "light" models inside the onnx package are read and prepared whole."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import relayquant as rq
from relayquant.ir.rewrite import Graph

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

#: model -> convolutions and matrix products in it
ANCHORS = {"squeezenet": 26, "resnet50": 54, "shufflenet": 50, "bvlc_alexnet": 8}


@pytest.mark.parametrize("name", ANCHORS)
def test_light__imported_with_its_operators(name):
    path = LIGHT / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip(f"this onnx package has no {path.name}")
    graph = Graph(rq.load(path)[0])
    anchors = ("relax.nn.conv2d", "relax.matmul")
    assert sum(graph.op_name(b.var) in anchors for b in graph.bindings) == ANCHORS[name]
