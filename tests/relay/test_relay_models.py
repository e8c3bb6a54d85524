"""Relay models through the whole pipeline: float ones are quantized, integer ones compiled."""

from __future__ import annotations

import numpy as np
import pytest
from relay_testing import WRITTEN_BY_TVM

import relayquant as rq
from relayquant.relay import from_text

FLOAT = """
def @main(%image: Tensor[(1, 3, 8, 8), float32], %conv1.weight: Tensor[(8, 3, 3, 3), float32],
          %conv1.bias: Tensor[(8), float32], %fc.weight: Tensor[(4, 8), float32]) {
  let %conv1 = nn.conv2d(%image, %conv1.weight, padding=[1, 1, 1, 1], channels=8,
                         kernel_size=[3, 3]);
  let %biased = nn.bias_add(%conv1, %conv1.bias);
  let %relu1 = nn.relu(%biased);
  %0 = nn.global_avg_pool2d(%relu1);
  %1 = nn.batch_flatten(%0);
  let %fc = nn.dense(%1, %fc.weight, units=4);
  %fc
}
"""

INTEGER = """
def @main(%x: Tensor[(1, 4, 8, 8), uint8], %w: Tensor[(8, 4, 3, 3), int8],
          %b: Tensor[(8), int32], %s: Tensor[(8), float32]) {
  %0 = qnn.conv2d(%x, %w, 128, 0, 0.02f, %s, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3],
                  out_dtype="int32");
  %1 = nn.bias_add(%0, %b);
  %2 = qnn.requantize(%1, %s, 0, 0.7f, 10, axis=1, rounding="UPWARD", compute_dtype="int64",
                      out_dtype="uint8");
  %3 = clip(%2, a_min=10f, a_max=255f);
  %4 = nn.max_pool2d(%3, pool_size=[2, 2], strides=[2, 2]);
  %5 = nn.avg_pool2d(cast(%4, dtype="int32"), pool_size=[4, 4]);
  qnn.dequantize(%5, 0.7f, 10)
}
"""


def test_float__quantized_by_its_names():
    rng = np.random.default_rng(0)
    params = {
        "conv1.weight": rng.standard_normal((8, 3, 3, 3)).astype("float32") / 5,
        "conv1.bias": rng.standard_normal(8).astype("float32") / 5,
        "fc.weight": rng.standard_normal((4, 8)).astype("float32"),
    }
    mod = from_text(FLOAT, params)
    data = [rng.standard_normal((1, 3, 8, 8)).astype("float32") for _ in range(16)]
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name("fc", None)
    )
    qmod = rq.quantize(mod, None, data, qconfig_mapping=mapping, effort="fast")
    rows = {row["name"]: row for row in rq.ledger(qmod).to_dict()["operators"]}
    assert rows["relu1"]["quantized"]
    assert not rows["fc"]["quantized"]
    for x in data[:4]:
        want, got = rq.reference.run(mod, [x])[0], rq.reference.run(qmod, [x])[0]
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.slow
def test_integer__compiled_as_it_is():
    """The bits of the numpy reference."""
    rng = np.random.default_rng(1)
    params = {
        "w": rng.integers(-127, 128, (8, 4, 3, 3)).astype("int8"),
        "b": rng.integers(-999, 999, 8).astype("int32"),
        "s": rng.uniform(0.0005, 0.002, 8).astype("float32"),
    }
    mod = from_text(INTEGER, params)
    x = rng.integers(0, 256, (1, 4, 8, 8)).astype("uint8")
    assert len(np.unique(rq.reference.run(mod, [x])[0])) > 3
    assert rq.verify(mod, [x]).differences == ()


@pytest.mark.slow
def test_dump__float_model_is_quantized():
    mod, _ = rq.load(WRITTEN_BY_TVM / "resnet8_cifar.relay")
    rng = np.random.default_rng(2)
    data = [rng.standard_normal((1, 3, 28, 28)).astype("float32") for _ in range(6)]
    qmod = rq.quantize(mod, None, data, effort="fast")
    rows = rq.ledger(qmod).to_dict()["operators"]
    convs = [row for row in rows if row["op"] == "nn.conv2d"]
    assert convs
    assert all(row["quantized"] for row in convs)
    want, got = rq.reference.run(mod, [data[0]])[0], rq.reference.run(qmod, [data[0]])[0]
    np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.slow
def test_dump__integer_model_is_compiled():
    mod, _ = rq.load(WRITTEN_BY_TVM / "qnn_convnet.json")
    with np.load(WRITTEN_BY_TVM / "qnn_convnet.io.npz") as data:
        assert rq.verify(mod, [data["in_input"]]).differences == ()


def test_dump__fake_quantized_model_becomes_integer():
    """dequantize - float operator - quantize, with the parameters of the file."""
    mod, _ = rq.load(WRITTEN_BY_TVM / "qdq_convnet.json")
    low = rq.lower(mod)
    assert "R.nn.conv2d" not in low.script()
    with np.load(WRITTEN_BY_TVM / "qdq_convnet.io.npz") as data:
        np.testing.assert_array_equal(rq.reference.run(low, [data["in_input"]])[0], data["out0"])
