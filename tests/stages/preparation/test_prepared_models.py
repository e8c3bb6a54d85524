"""Real models, imported and prepared, against ONNX Runtime."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.formats.load import load
from relayquant.ir.rewrite.graph import call_name
from relayquant.stages.preparation import prepare_module


def count_operators(mod: tvm.IRModule) -> Counter[str]:
    (block,) = mod["main"].body.blocks
    return Counter(
        call_name(binding.value) if isinstance(binding.value, Call) else "other"
        for binding in block.bindings
    )


def run(mod: tvm.IRModule, *inputs: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(array) for array in inputs]).numpy()


def read_images(name: str, find) -> np.ndarray:
    """A few samples of each model's own kind of data, preprocessed as its README says."""
    rng = np.random.default_rng(0)
    if name == "resnet20_cifar10.onnx":
        x = np.load(find("cifar10_unlabelled_1000.npz"))["x"][:4].reshape(4, 32, 32, 3) / 255.0
        mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        return ((x - mean) / std).transpose(0, 3, 1, 2).astype("float32")
    if name == "mobilenet_v1_0.75_224.onnx":
        return rng.uniform(-1, 1, (2, 3, 224, 224)).astype("float32")
    if name == "kws_dscnn.onnx":
        x = np.load(find("kws_1000.npz"))["x"][:8].reshape(8, 1, 49, 10)
        return ((x.astype("float32") - 83) * 0.58470291).astype("float32")
    if name == "mnist-8.onnx":
        return np.load(find("mnist_1000.npz"))["x"][:1].reshape(1, 1, 28, 28).astype("float32")
    if name == "kwt1_mfcc.onnx":
        return np.load(find("kwt_unlabelled_100.npz"))["x"][:2].reshape(2, 98, 40).astype("float32")
    return np.load(find("magika_filetype_152.npz"))["x"][:1].reshape(1, 2048).astype("int32")


MODELS = {
    "resnet20_cifar10.onnx": {"relax.nn.conv2d": 19, "relax.add": 29, "relax.nn.relu": 19},
    "mobilenet_v1_0.75_224.onnx": {"relax.nn.conv2d": 28, "relax.add": 28, "relax.clip": 27},
    "kws_dscnn.onnx": {"relax.nn.conv2d": 9, "relax.add": 10, "relax.nn.relu": 9},
    "mnist-8.onnx": {"relax.nn.conv2d": 2, "relax.add": 3, "relax.nn.relu": 2},
    "kwt1_mfcc.onnx": {"relax.matmul": 98, "relax.nn.layer_norm": 24, "relax.permute_dims": 12},
    "magika_v3_3_b1.onnx": {"relax.nn.conv2d": 1, "relax.matmul": 2, "relax.nn.relu": 2},
}


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("name", MODELS)
def test_real_model__same_answer_as_onnxruntime(name, shared_data):
    ort = pytest.importorskip("onnxruntime")
    path = shared_data(name)
    mod, params = load(path)
    assert params == {}
    prepared = prepare_module(mod)
    operators = count_operators(prepared)
    for operator, number in MODELS[name].items():
        assert operators[operator] == number, operator
    for gone in ("relax.nn.batch_norm", "relax.call_tir", "other"):
        assert operators[gone] == 0, gone
    x = read_images(name, shared_data)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {session.get_inputs()[0].name: x})
    actual = run(prepared, x)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert (actual.argmax(-1) == expected.argmax(-1)).all()


#: of batch normalization, as PyTorch names them
BATCH_NORM_PARTS = ("weight", "bias", "running_mean", "running_var")


def test_resnet20__names_and_sources_survive(shared_data):
    mod, _ = load(shared_data("resnet20_cifar10.onnx"))
    before = str(mod)
    prepared = prepare_module(mod)
    assert str(mod) == before
    names = [binding.var.name for binding in prepared["main"].body.blocks[0].bindings]
    assert len(set(names)) == len(names)
    assert names[:3] == ["conv1_c.folded", "bn1_o", "conv1_r"]
    assert names[-1] == "logits"
    sources = json.loads(prepared["main"].attrs["relayquant.sources"])
    weights = {"constants": ["conv1.weight"]}
    assert sources["conv1_c.folded"] == {"node": "conv1", "op": "Conv"} | weights
    weights = {"constants": [f"bn1.{part}" for part in BATCH_NORM_PARTS]}
    assert sources["bn1_o"] == {"node": "bn1", "op": "BatchNormalization"} | weights
    assert set(names) <= set(sources)


@pytest.mark.slow
def test_resnet8_tflite__confident_and_diverse(shared_data):
    pytest.importorskip("tflite")
    mod, params = load(shared_data("ic_resnet8_fp32.tflite"))
    prepared = prepare_module(mod, params)
    assert [param.name for param in prepared["main"].params] == ["input_1"]
    operators = count_operators(prepared)
    assert operators["relax.nn.conv2d"] == 9
    assert operators["relax.mean"] == 1
    machine = relax.VirtualMachine(tvm.compile(prepared, "llvm"), tvm.cpu())
    x = np.load(shared_data("cifar10_unlabelled_1000.npz"))["x"].reshape(-1, 32, 32, 3)[:100]
    probabilities = np.concatenate(
        [machine["main"](tvm.runtime.tensor(image[None].astype("float32"))).numpy() for image in x]
    )
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    # A wrong layout or padding gives one class for all, or no confidence.
    assert len(set(probabilities.argmax(-1))) >= 8
    assert np.median(probabilities.max(-1)) > 0.7
