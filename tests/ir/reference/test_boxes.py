"""Boxes without those that overlap better ones: the same rows as ONNX Runtime."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.base.runtime import Executor

BATCH, CLASSES, BOXES = 2, 3, 12
#: at most so many boxes of a class, overlap, score; None: not given
LIMITS = list(product((None, 0, 1, 2, 100), (None, 0.0, 0.3, 1.0), (None, 0.0, 0.5, -1.0)))


def make_file(limits, center: int, opset: int):
    names = ("most", "overlap", "score")
    inputs = [
        "boxes",
        "scores",
        *("" if v is None else n for n, v in zip(names, limits, strict=True)),
    ]
    while not inputs[-1]:
        inputs.pop()
    dtypes = ("int64", "float32", "float32")
    constants = {
        name: np.array([value], dtype)
        for name, value, dtype in zip(names, limits, dtypes, strict=True)
        if value is not None
    }
    node = helper.make_node("NonMaxSuppression", inputs, ["y"], center_point_box=center)
    shapes = {"boxes": (BATCH, BOXES, 4), "scores": (BATCH, CLASSES, BOXES)}
    return make_onnx([node], shapes, {"y": ("int64", None)}, constants, opset)


def check_file(limits, center: int, opset: int, *, is_compiled: bool = False) -> None:
    rng = np.random.default_rng(7)
    corner, size = rng.uniform(0, 1, (BATCH, BOXES, 2)), rng.uniform(0.05, 0.6, (BATCH, BOXES, 2))
    corners = (corner, size) if center else (corner + size, corner)
    inputs = {
        "boxes": np.concatenate(corners, -1).astype("float32"),
        "scores": rng.uniform(-0.5, 1, (BATCH, CLASSES, BOXES)).astype("float32"),
    }
    model = make_file(limits, center, opset)
    wanted = run_onnxruntime(model, inputs)[0]
    mod, _ = rq.load(model)
    np.testing.assert_array_equal(rq.reference.run(mod, inputs)[0], wanted)
    if is_compiled:
        found = Executor(rq.compile(mod)).run("main", list(inputs.values()))[0]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.sample(4)
@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_boxes__rows_of_onnx_runtime(limits, center):
    check_file(limits, center, 11)


@pytest.mark.slow
@pytest.mark.parametrize("center", [0, 1])
def test_boxes__compiled(center):
    check_file((2, 0.3, 0.1), center, 10, is_compiled=True)
