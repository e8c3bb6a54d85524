"""Attention with rows that are masked everywhere: 0, as in ONNX Runtime, and never NaN."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_runtime import run_onnxruntime
from test_onnx_lost_shapes import Compiled, make_model

import relayquant as rq
from relayquant.errors import ModelError

RNG = np.random.default_rng(5)
QUERY, KEYS = (1, 2, 3, 4), (1, 2, 5, 4)


def make_case(mask: np.ndarray, opset: int, **attributes):
    """(a model, its inputs)"""
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], **attributes)
    feeds = {
        "q": RNG.standard_normal(QUERY).astype("float32"),
        "k": RNG.standard_normal(KEYS).astype("float32"),
        "v": RNG.standard_normal(KEYS).astype("float32"),
        "mask": mask,
    }
    inputs = {name: (array.dtype, array.shape) for name, array in feeds.items()}
    return make_model([node], inputs, opset), feeds


@pytest.mark.sample(5)
@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_attention__masked_rows_are_0(opset, attributes, dtype):
    mask = RNG.random((3, 5)) > 0.3
    mask[1] = False
    if dtype == "float32":
        mask = np.where(mask, 0, -np.inf).astype(dtype)
    model, feeds = make_case(mask, opset, **attributes)
    assert not run_onnxruntime(model, feeds)[0][0, :, 1].any()
    Compiled(model).check(feeds)


def test_attention__old_release_of_onnx(monkeypatch):
    monkeypatch.setattr(onnx, "__version__", "1.22.0")
    model, _ = make_case(np.ones((3, 5), bool), 23)
    with pytest.raises(
        ModelError, match=r"are NaN in onnx 1\.22\.0; .*pip install -U \"onnx>=1\.23\""
    ):
        rq.load(model)
    node = helper.make_node("Attention", ["q", "k", "k"], ["y"])
    inputs = {"q": ("float32", QUERY), "k": ("float32", KEYS)}
    assert rq.load(make_model([node], inputs, 23))[0]
