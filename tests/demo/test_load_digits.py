"""The built-in example as a user gets it: whole files, and a float model that reads digits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from relayquant.demo import load_digits
from relayquant.errors import DataError


def test_load_digits__shapes_and_ranges() -> None:
    demo = load_digits(batch=48)
    assert [len(batch) for batch in demo.calibration] == [48, 48, 32]
    for images in (*demo.calibration, demo.images):
        assert images.shape[1:] == (1, 8, 8)
        assert images.dtype == np.float32
        assert images.min() == 0.0
        assert images.max() == 1.0
    assert demo.labels.shape == (len(demo.images),) == (500,)
    assert set(demo.labels.tolist()) == set(range(10))


def test_load_digits__says_where_the_digits_come_from() -> None:
    origin = load_digits().origin
    assert "UCI" in origin
    assert "CC BY 4.0" in origin


def test_load_digits__no_calibration_digit_is_held_out() -> None:
    demo = load_digits()
    held_out = {image.tobytes() for image in demo.images}
    assert not [
        image for batch in demo.calibration for image in batch if image.tobytes() in held_out
    ]


def test_load_digits__wrong_batch() -> None:
    with pytest.raises(DataError, match=r"batch=0.*1 or more"):
        load_digits(batch=0)


def test_model__reads_the_held_out_digits() -> None:
    demo = load_digits()
    model = onnx.load(str(demo.model_path))
    onnx.checker.check_model(model, full_check=True)
    (logits,) = ReferenceEvaluator(model).run(None, {"image": demo.images})
    assert (np.argmax(logits, 1) == demo.labels).mean() >= 0.98


def test_model__has_a_free_batch_and_names() -> None:
    model = onnx.load(str(load_digits().model_path))
    (image,) = model.graph.input
    assert image.name == "image"
    assert [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim] == ["N", 1, 8, 8]
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"conv1", "block1/depthwise", "block1/pointwise", "block1/add", "dense"} <= set(names)
