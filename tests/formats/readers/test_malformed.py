"""Damaged files: each gives a model or a clear error, never a crash; nothing is executed, nothing
fills the memory.

The same with 1000 damaged copies of real models was run once; these few keep it so.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from quantized_models import GraphBuilder

import relayquant as rq
from relayquant.errors import ModelError, RelayQuantError
from relayquant.formats.readers import import_onnx

SHAPE = (1, 4, 8, 8)
HUGE = 2**40


def quantized_model() -> onnx.ModelProto:
    b = GraphBuilder()
    weight, scale = b.weight((4, 4, 3, 3))
    y = b.round_trip("x", 0.02, np.uint8(120))
    y = b.node("Conv", y, weight, b.bias(4, np.float32(0.02) * scale), pads=[1, 1, 1, 1])
    y = b.round_trip(b.node("Relu", y), 0.04, np.uint8(0))
    y = b.node("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
    y = b.node("Reshape", y, b.constant(np.array([1, 64])))
    y = b.round_trip(b.node("MatMul", y, b.weight((64, 5), axis=1)[0]), 0.1, np.uint8(99))
    return b.model({"x": ("float32", SHAPE)}, {y: ("float32", (1, 5))})


def damage(data: bytes, seed: int, count: int):
    """`count` copies with one to four random bytes changed."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        copy = bytearray(data)
        for at in random.integers(0, len(copy), random.integers(1, 5)):
            copy[at] = random.integers(0, 256)
        yield bytes(copy)


def load_all(copies, path) -> tuple[int, int]:
    """(models, errors); anything but a RelayQuantError with a message fails the test."""
    models, messages = 0, []
    for data in copies:
        path.write_bytes(data)
        try:
            rq.load(path)
            models += 1
        except RelayQuantError as error:
            messages.append(str(error))
    assert all(len(message) > 20 for message in messages)
    return models, len(messages)


@pytest.mark.slow
def test_onnx__random_bytes(tmp_path):
    data = quantized_model().SerializeToString()
    models, errors = load_all(damage(data, 7, 150), tmp_path / "m.onnx")
    assert models > 10
    assert errors > 40


def test_onnx__truncated_anywhere(tmp_path):
    data = quantized_model().SerializeToString()
    cuts = np.linspace(0, len(data) - 1, 40).astype(int)
    _, errors = load_all((data[:cut] for cut in cuts), tmp_path / "m.onnx")
    assert errors == len(cuts)


@pytest.mark.slow
def test_tflite__random_bytes(tmp_path, shared_data):
    pytest.importorskip("tflite")
    data = shared_data("kws_dscnn_int8_reference.tflite").read_bytes()
    models, errors = load_all(damage(data, 7, 25), tmp_path / "m.tflite")
    assert models + errors == 25


def test_tflite__damaged_tables(tmp_path, shared_data):
    """The tables of offsets are at the end of the file, where each byte counts."""
    pytest.importorskip("tflite")
    data = shared_data("kws_dscnn_int8_reference.tflite").read_bytes()
    tail = len(data) - 4000
    copies = (data[:tail] + copy for copy in damage(data[tail:], 3, 25))
    _, errors = load_all(copies, tmp_path / "m.tflite")
    assert errors > 3


def test_name__not_utf8(tmp_path):
    data = quantized_model().SerializeToString().replace(b"relu", b"rel\xff")
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError, match=r"not UTF-8|cannot|not an ONNX model"):
        rq.load(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: b.node("ConstantOfShape", b.constant(np.array([HUGE]))), r"1\.1e\+12 elements"),
        (
            lambda b: b.node("Range", *(b.constant(np.array(v)) for v in (0, HUGE, 1))),
            r"1\.1e\+12 elements",
        ),
        (lambda b: b.node("Range", *(b.constant(np.array(v)) for v in (0, 5, 0))), "inf elements"),
        (lambda b: b.node("Reshape", "x", b.constant(np.array([HUGE, -5]))), "reshape"),
    ],
)
def test_onnx__absurd_operators(make, message):
    b = GraphBuilder()
    y = make(b)
    model = b.model({"x": ("float32", SHAPE)}, {y: ("float32", None)})
    with pytest.raises(ModelError, match=f"(?i){message}"):
        import_onnx(model)


@pytest.mark.parametrize("shape", [(HUGE, HUGE), (-3, 4)])
def test_onnx__absurd_shapes(shape):
    b = GraphBuilder()
    y = b.node("Relu", "x")
    with pytest.raises(ModelError, match="'x' has the shape"):
        import_onnx(b.model({"x": ("float32", shape)}, {y: ("float32", None)}))
    b = GraphBuilder()
    tensor = numpy_helper.from_array(np.ones(4, "float32"), "w")
    tensor.dims[:] = shape
    b.constants.append(tensor)
    y = b.node("Add", "x", "w")
    with pytest.raises(ModelError, match="'w' has the shape"):
        import_onnx(b.model({"x": ("float32", SHAPE)}, {y: ("float32", None)}))


def make_function(name: str, *calls: str) -> onnx.FunctionProto:
    """A function of the domain "mine" that calls others, one after the other; a Relu if none."""
    values = ["a", *(f"t{i}" for i in range(len(calls) or 1))]
    pairs = itertools.pairwise(values)
    kinds = calls or ("Relu",)
    nodes = [
        onnx.helper.make_node(kind, [x], [y], domain="mine" if calls else "")
        for kind, (x, y) in zip(kinds, pairs, strict=True)
    ]
    opsets = [onnx.helper.make_opsetid("", 13), onnx.helper.make_opsetid("mine", 1)]
    return onnx.helper.make_function("mine", name, ["a"], [values[-1]], nodes, opsets)


def call_function(*functions: onnx.FunctionProto) -> onnx.ModelProto:
    """A model that calls the first function."""
    b = GraphBuilder()
    y = b.node("Relu", "x")
    model = b.model({"x": ("float32", SHAPE)}, {y: ("float32", SHAPE)})
    node = model.graph.node[0]
    node.op_type, node.domain = functions[0].name, "mine"
    model.functions.extend(functions)
    model.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    return model


def double(count: int) -> list[onnx.FunctionProto]:
    """Functions that each call the next one twice: 2^count operators."""
    return [
        *(make_function(f"f{i}", f"f{i + 1}", f"f{i + 1}") for i in range(count)),
        make_function(f"f{count}"),
    ]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([make_function("f", "f")], "Function 'f' of the model calls itself"),
        ([make_function("f", "g"), make_function("g", "f")], "calls itself, directly or through"),
        (double(28), r"Function 'f10' has 262144 operators once .* allowed: 200000"),
        (
            [*(make_function(f"f{i}", f"f{i + 1}") for i in range(999)), make_function("f999")],
            "has 201 levels of calls",
        ),
    ],
    ids=["itself", "each other", "doubled", "deep"],
)
def test_onnx__functions_without_bound(functions, message):
    with pytest.raises(ModelError, match=message):
        import_onnx(call_function(*functions))


def test_onnx__functions_within_bounds():
    mod, _ = rq.load(call_function(*double(3)))
    x = np.random.default_rng(0).standard_normal(SHAPE).astype("float32")
    np.testing.assert_array_equal(rq.reference.run(mod, [x])[0], np.maximum(x, 0))
