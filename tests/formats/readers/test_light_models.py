"""The "light" models inside the onnx package are read and prepared whole."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from operator_names import list_operators

import relayquant as rq

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

#: model -> convolutions and matrix products in it
ANCHORS = {"squeezenet": 26, "resnet50": 54, "shufflenet": 50, "bvlc_alexnet": 8}


@pytest.mark.parametrize("name", ANCHORS)
def test_light__imported_with_its_operators(name):
    path = LIGHT / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip(f"this onnx package has no {path.name}")
    names = list_operators(rq.load(path)[0])
    assert names.count("nn.conv2d") + names.count("matmul") == ANCHORS[name]
