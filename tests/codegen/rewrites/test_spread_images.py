"""Sums of images whose sizes are compared at run time: as ONNX Runtime, in the kernels' layout."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from onnx_models import make_onnx
from operator_names import list_operators

import relayquant as rq
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.rewrites.spread_images import mark_spreads

#: (height, width) of two images that fit.
PAIRS = (((5, 6), (5, 6)), ((5, 6), (1, 6)), ((1, 1), (4, 7)), ((1, 7), (4, 1)), ((1, 1), (1, 1)))


@pytest.fixture(scope="module")
def network() -> bytes:
    """y = relu(conv(a) + conv(b)) of images of free sizes."""
    rng = np.random.default_rng(2)
    weights = {f"w{x}": rng.standard_normal((9, 4, 3, 3)).astype("float32") for x in "ab"}
    nodes = [helper.make_node("Conv", [x, f"w{x}"], [f"c{x}"], pads=[1, 1, 1, 1]) for x in "ab"] + [
        helper.make_node("Add", ["ca", "cb"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    shapes = {x: [2, 4, f"h{x}", f"w{x}"] for x in "ab"}
    return make_onnx(nodes, shapes, {"y": None}, weights).SerializeToString()


def load_network(network: bytes, folder):
    path = folder / "network.onnx"
    path.write_bytes(network)
    return rq.load(str(path))


def draw_images(rng: np.random.Generator, pair: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    return [rng.standard_normal((2, 4, *size)).astype("float32") for size in pair]


def test_mark_spreads__only_inputs_and_results_are_transposed(network, tmp_path):
    mod, _ = load_network(network, tmp_path)
    converted = convert_layout(mark_spreads(mod))
    names = list_operators(converted)
    assert "take" not in names
    assert names.count("image.resize2d") == 4
    assert names.count("permute_dims") == 3


def test_mark_spreads__follows_onnx_runtime(network, tmp_path):
    rng, session = np.random.default_rng(1), ort.InferenceSession(network)
    mod, _ = load_network(network, tmp_path)
    executor = rq.Executor(rq.compile(mod))
    for pair in PAIRS:
        data = draw_images(rng, pair)
        (expected,) = session.run(None, dict(zip("ab", data, strict=True)))
        (found,) = executor.run("main", data)
        np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-4, atol=1e-4)
    for pair in (((5, 6), (5, 3)), ((2, 6), (5, 6))):
        with pytest.raises(ValueError, match="sizes do not fit"):
            executor.run("main", draw_images(rng, pair))


@pytest.mark.slow
def test_mark_spreads__exact_in_integers(network, tmp_path):
    rng = np.random.default_rng(3)
    mod, params = load_network(network, tmp_path)
    batches = [tuple(draw_images(rng, pair)) for pair in PAIRS]
    qmod = rq.quantize(mod, params, batches, effort="fast", guard=rq.config.Guard.OFF)
    executor = rq.Executor(rq.compile(qmod))
    for pair in PAIRS:
        data = draw_images(rng, pair)
        (expected,) = rq.reference.run(qmod, data)
        (found,) = executor.run("main", data)
        np.testing.assert_array_equal(found, expected)
