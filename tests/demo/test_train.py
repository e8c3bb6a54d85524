"""The trainer of the built-in example: exact gradients, seeded, and a faithful export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from relayquant.demo import train


def random_network(seed: int) -> train.Network:
    """A network as in the middle of training: no parameter and no statistic at its first value."""
    rng = np.random.default_rng(seed)
    network = train.Network(rng)
    for name, value in network.params.items():
        network.params[name] = value + rng.normal(0, 0.1, value.shape).astype("float32")
    for name, (mean, variance) in network.statistics.items():
        shifted = rng.normal(0, 0.5, mean.shape).astype("float32")
        network.statistics[name] = (shifted, variance + shifted**2)
    return network


def test_network__gradients_match_differences() -> None:
    rng = np.random.default_rng(0)
    network = random_network(0)
    network.params = {name: value.astype("float64") for name, value in network.params.items()}
    images, labels = rng.random((4, 8, 8, 1)), np.array([1, 2, 3, 4])
    logits, backward = network.forward(images, training=True)
    backward(train.softmax_cross_entropy(logits, labels)[1])
    assert set(network.grads) == set(network.params)

    def loss_with(name: str, where: tuple[int, ...], value: float) -> float:
        kept = network.params[name][where]
        network.params[name][where] = value
        loss, _ = train.softmax_cross_entropy(network.forward(images, training=True)[0], labels)
        network.params[name][where] = kept
        return loss

    step = 1e-6
    for name, value in network.params.items():
        for _ in range(3):
            where = tuple(int(rng.integers(size)) for size in value.shape)
            above = loss_with(name, where, value[where] + step)
            below = loss_with(name, where, value[where] - step)
            difference = (above - below) / (2 * step)
            assert network.grads[name][where] == pytest.approx(difference, rel=1e-3, abs=1e-7), name


def test_export_onnx__same_logits(tmp_path: Path) -> None:
    network = random_network(1)
    images = np.random.default_rng(1).random((3, 8, 8, 1)).astype("float32")
    expected, _ = network.forward(images, training=False)
    train.export_onnx(network, tmp_path / "model.onnx")
    session = ReferenceEvaluator(onnx.load(str(tmp_path / "model.onnx")))
    (actual,) = session.run(None, {"image": images.transpose(0, 3, 1, 2)})
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-4, atol=1e-4)


def test_train_network__seeded_and_learning() -> None:
    rng = np.random.default_rng(2)
    labels = np.arange(64) % 2
    # Stripes, lying or standing: easy, but only for a network that learns.
    images = rng.random((64, 8, 8, 1)).astype("float32") * 0.2
    images[labels == 0, ::2] += 0.8
    images[labels == 1, :, ::2] += 0.8
    settings = train.TrainSettings(epochs=12, batch=32)
    first = train.train_network(images, labels, settings)
    second = train.train_network(images, labels, settings)
    for name, value in first.params.items():
        assert np.array_equal(value, second.params[name]), name
    untrained = train.train_network(images, labels, train.TrainSettings(epochs=0, batch=32))
    losses = [
        train.softmax_cross_entropy(network.forward(images, training=True)[0], labels)[0]
        for network in (first, untrained)
    ]
    assert losses[0] < 0.7 * losses[1]


def test_write_demo__whole_files(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra 'train'")
    settings = train.TrainSettings(epochs=1, held_out=1600, calibration=8)
    accuracy = train.write_demo(tmp_path, settings)
    assert 0.0 <= accuracy <= 1.0
    with np.load(tmp_path / train.DATA_FILE) as data:
        assert data["calibration"].shape == (8, 8, 8)
        assert data["images"].shape == (1600, 8, 8)
        assert data["images"].dtype == np.uint8
        assert str(data["origin"]) == train.ORIGIN
    onnx.checker.check_model(str(tmp_path / train.MODEL_FILE))
