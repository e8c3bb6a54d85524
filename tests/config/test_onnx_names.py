"""Types of ONNX and OpenVINO in a mapping: each is an operator that the reader makes of it."""

from __future__ import annotations

import onnx
import pytest
from operator_names import list_operators

import relayquant as rq
from relayquant.config.onnx_names import ONNX_NAMES, OPENVINO_NAMES, find_operators
from relayquant.demo import load_digits

IMAGE = "float[1, 4, 8, 8] x"
#: type -> (inputs, call)
CALLS = {
    "Add": (f"{IMAGE}, float[4, 1, 1] b", "Add(x, b)"),
    "AveragePool": (IMAGE, "AveragePool<kernel_shape = [2, 2]>(x)"),
    "Clip": (IMAGE, "Clip(x, low, high)"),
    "Concat": (IMAGE, "Concat<axis = 1>(x, x)"),
    "Conv": (f"{IMAGE}, float[4, 4, 3, 3] w", "Conv(x, w)"),
    "ConvTranspose": (f"{IMAGE}, float[4, 4, 3, 3] w", "ConvTranspose(x, w)"),
    "Div": (f"{IMAGE}, float[4, 1, 1] b", "Div(x, b)"),
    "Exp": (IMAGE, "Exp(x)"),
    "Flatten": (IMAGE, "Flatten(x)"),
    "Gather": (IMAGE, "Gather(x, places)"),
    "Gemm": ("float[2, 4] x, float[4, 3] w", "Gemm(x, w)"),
    "GlobalAveragePool": (IMAGE, "GlobalAveragePool(x)"),
    "LayerNormalization": (f"{IMAGE}, float[8] b", "LayerNormalization(x, b)"),
    "LeakyRelu": (IMAGE, "LeakyRelu(x)"),
    "MatMul": ("float[2, 4] x, float[4, 3] w", "MatMul(x, w)"),
    "MaxPool": (IMAGE, "MaxPool<kernel_shape = [2, 2]>(x)"),
    "Mul": (f"{IMAGE}, float[4, 1, 1] b", "Mul(x, b)"),
    "Pad": (IMAGE, "Pad(x, pads)"),
    "ReduceMean": (IMAGE, "ReduceMean<axes = [2, 3]>(x)"),
    "Relu": (IMAGE, "Relu(x)"),
    "Reshape": (IMAGE, "Reshape(x, shape)"),
    "Sigmoid": (IMAGE, "Sigmoid(x)"),
    "Slice": (IMAGE, "Slice(x, places, ends)"),
    "Softmax": (IMAGE, "Softmax(x)"),
    "Sub": (f"{IMAGE}, float[4, 1, 1] b", "Sub(x, b)"),
    "Tanh": (IMAGE, "Tanh(x)"),
    "Transpose": (IMAGE, "Transpose(x)"),
}
CONSTANTS = (
    "float low = {0}, float high = {6}, int64[1] places = {0}, int64[1] ends = {1}, "
    "int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}, int64[2] shape = {4, 64}"
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ONNX_NAMES)
def test_names__are_the_operators_that_models_are_read_as(name):
    inputs, call = CALLS[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => (float y) <{CONSTANTS}> '
        f"{{ y = {call} }}"
    )
    mod, _ = rq.load(model)
    assert {f"relax.{name}" for name in list_operators(mod)} & {*find_operators(name)}


@pytest.mark.parametrize("name", OPENVINO_NAMES)
def test_openvino_names__are_operators_of_its_first_opset(name):
    opset = pytest.importorskip("openvino.opset1")
    node = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")
    assert callable(getattr(opset, node))
    assert find_operators(name)


@pytest.mark.parametrize(("name", "kept"), [("Conv", 4), ("Convolution", 4), ("Gemm", 1)])
def test_mapping__selects_by_the_type_in_the_file(name, kept):
    demo = load_digits()
    default = rq.get_backend_config("x86").default_qconfig
    mapping = rq.QConfigMapping().set_global(default).set_object_type(name, None)
    plan = rq.prepare(*rq.load(demo.model_path), qconfig_mapping=mapping, backend="x86").plan
    assert len([op for op in plan.operators if f"object_type {name!r}" in op.reason]) == kept
