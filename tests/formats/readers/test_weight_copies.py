"""A module has weights of its own: what happens to their source afterwards changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx_models import make_onnx
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq

X = np.asarray([[1, -2, 3, -4], [2, 0.5, -1, 1]], "float32")
WEIGHT = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)


@I.ir_module
class Product:
    @R.function
    def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 4), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y


def make_aligned(values):
    """An array that TVM takes as it lies; numpy alone promises 16 bytes."""
    memory = np.empty(values.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


#: name -> array -> what `params` holds of its memory
FORMS: dict[str, Callable[[np.ndarray], dict[str, Any]]] = {
    "numpy": lambda array: {"w": array},
    "view": lambda array: {"w": array.reshape(2, 8).reshape(4, 4)},
    "dlpack": lambda array: {"w": tvm.runtime.from_dlpack(array)},
    "in order": lambda array: {"main": [tvm.runtime.from_dlpack(array)]},
}

#: name -> params -> module
TAKERS: dict[str, Callable[[dict[str, Any]], tvm.IRModule]] = {
    "quantize": lambda params: rq.quantize(Product, params, [X]),
    "prepare": lambda params: rq.prepare(Product, params).mod,
    "compress_weights": lambda params: rq.compress_weights(Product, params, group_size=None),
    "relay": lambda params: rq.relay.from_text(
        '#[version = "0.0.5"]\n'
        "def @main(%x: Tensor[(2, 4), float32], %w: Tensor[(4, 4), float32]) {\n"
        "  nn.dense(%x, %w, units=None)\n}\n",
        params,
    ),
}


def read_outputs(mod):
    return [output.copy() for output in rq.reference.run(mod, [X])]


def assert_unchanged(mod, change):
    before = read_outputs(mod)
    change()
    for got, expected in zip(read_outputs(mod), before, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("form", FORMS)
def test_params__may_change_afterwards(form, taker):
    if (form, taker) == ("in order", "relay"):
        return  # a Relay module has names
    array = make_aligned(WEIGHT)
    mod = TAKERS[taker](FORMS[form](array))
    assert_unchanged(mod, lambda: array.__imul__(3))


@pytest.mark.parametrize("taker", TAKERS)
def test_params__of_torch_may_change_afterwards(taker):
    torch = pytest.importorskip("torch", reason="pip install torch")
    weight = torch.from_numpy(WEIGHT.copy())
    mod = TAKERS[taker]({"w": weight})
    assert_unchanged(mod, lambda: weight.mul_(3))


def test_params_of_a_file_that_is_mapped__may_change_afterwards(tmp_path):
    np.save(tmp_path / "w.npy", WEIGHT)
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r+")
    mod = rq.prepare(Product, {"w": mapped}).mod
    assert_unchanged(mod, lambda: mapped.__imul__(3))


def make_product(weight):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return make_onnx(nodes, {"x": [2, 4]}, {"y": [2, 4]}, [weight], 13)


@pytest.mark.parametrize("is_raw", [True, False])
def test_onnx_model__may_change_afterwards(is_raw):
    weight = numpy_helper.from_array(WEIGHT, "w")
    if not is_raw:
        weight = helper.make_tensor("w", TensorProto.FLOAT, (4, 4), WEIGHT.ravel())
    model = make_product(weight)
    mod, _ = rq.load(model)
    (stored,) = model.graph.initializer

    def change():
        if is_raw:
            stored.raw_data = (WEIGHT * 3).tobytes()
        else:
            stored.float_data[:] = (WEIGHT * 3).ravel()

    assert_unchanged(mod, change)


def test_onnx_external_data__may_be_overwritten_afterwards(tmp_path):
    path, data = tmp_path / "model.onnx", tmp_path / "w.bin"
    model = make_product(numpy_helper.from_array(WEIGHT, "w"))
    onnx.save(model, path, save_as_external_data=True, location=data.name, size_threshold=0)
    mod, _ = rq.load(path)
    with data.open("r+b") as file:
        assert_unchanged(mod, lambda: file.write(bytes(data.stat().st_size)) and file.flush())
