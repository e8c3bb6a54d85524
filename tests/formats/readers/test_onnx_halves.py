"""Models of float16: float16 in and out, integers or float32 between, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from operator_names import count_operators

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError

pytest.importorskip("onnxruntime")
SHAPE = (2, 4, 6, 6)
HALF = TensorProto.FLOAT16


class HalfGraph:
    """Nodes and constants of a float16 model; every method returns the name of a tensor."""

    def __init__(self, dtype: str = "uint8", *, from_nodes: bool = False) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.zero = np.array(120 if dtype.startswith("u") else -3, dtype)
        self.from_nodes = from_nodes
        self.rng = np.random.default_rng(0)

    def constant(self, array) -> str:
        name = f"c{len(self.constants) + len(self.nodes)}"
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.from_nodes:
            self.nodes.append(helper.make_node("Constant", [], [name], name, value=tensor))
        else:
            self.constants.append(tensor)
        return name

    def add(self, op: str, *inputs: str, **attrs) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def round_trip(self, data: str, scale: float = 0.05, zero=None) -> str:
        zero = self.zero if zero is None else zero
        parameters = self.constant(np.float16(scale)), self.constant(zero)
        return self.add(
            "DequantizeLinear", self.add("QuantizeLinear", data, *parameters), *parameters
        )

    def weight(self, shape, axis: int) -> str:
        integers = self.rng.integers(-127, 128, shape).astype("int8")
        scale = self.rng.uniform(0.001, 0.003, shape[axis]).astype("float16")
        operands = map(self.constant, (integers, scale, np.zeros(shape[axis], "int8")))
        return self.add("DequantizeLinear", *operands, axis=axis)

    def model(self, output: str, opset: int = 21) -> onnx.ModelProto:
        shape = ("n", *SHAPE[1:])
        types = {"x": ("float16", shape)}, {output: ("float16", None)}
        return make_onnx(self.nodes, *types, self.constants, opset)


def convolve(g: HalfGraph, x: str) -> str:
    return g.add("Relu", g.add("Conv", x, g.weight((8, 4, 3, 3), 0), pads=[1, 1, 1, 1]))


def multiply(g: HalfGraph, x: str) -> str:
    return g.add("Gemm", g.add("Flatten", x), g.weight((144, 5), 1))


def add_biased(g: HalfGraph, x: str) -> str:
    bias = g.constant(g.rng.normal(size=8).astype("float16"))
    return g.add("Conv", x, g.weight((8, 4, 3, 3), 0), bias, strides=[2, 2])


def add_halves(g: HalfGraph, x: str) -> str:
    return g.add("Add", x, g.round_trip(g.constant(np.full((4, 1, 1), 1.5, "float16"))))


def pool(g: HalfGraph, x: str) -> str:
    return g.add("GlobalAveragePool", g.add("MaxPool", x, kernel_shape=[2, 2]))


def clip_and_pad(g: HalfGraph, x: str) -> str:
    low, high = (g.constant(np.float16(bound)) for bound in (-1, 2.5))
    pads = g.constant(np.array([0, 0, 1, 0, 0, 0, 0, 2], "int64"))
    return g.add("Pad", g.add("Clip", x, low, high), pads, g.constant(np.float16(0)))


def cast_between(g: HalfGraph, x: str) -> str:
    wide = g.add("Sigmoid", g.add("Cast", x, to=TensorProto.FLOAT))
    return g.add("Cast", wide, to=HALF)


def choose_branch(g: HalfGraph, x: str) -> str:
    """A body that computes in float16, on a condition that is known."""
    bodies = {}
    for key, factor in (("then_branch", 2.0), ("else_branch", 3.0)):
        value = numpy_helper.from_array(np.float16(factor), f"{key}.c")
        node = helper.make_node("Mul", [x, f"{key}.c"], [f"{key}.y"], key)
        output = helper.make_tensor_value_info(f"{key}.y", HALF, None)
        bodies[key] = helper.make_graph([node], key, [], [output], [value])
    return g.add("If", g.constant(np.array(False)), **bodies)


OPERATORS = [
    *(convolve, multiply, add_biased, add_halves, pool, clip_and_pad, cast_between, choose_branch)
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_half__gives_what_onnx_runtime_gives(operator, dtype):
    g = HalfGraph(dtype, from_nodes=dtype == "int8")
    step = 0.05
    y = g.round_trip(operator(g, g.round_trip("x", step)), step)
    model = g.model(y)
    x = np.random.default_rng(1).normal(0, 1.5, SHAPE).astype("float16")
    (expected,) = run_onnxruntime(model, {"x": x}, rewrites=False)
    qmod = rq.lower(rq.load(model)[0])
    for found in (rq.reference.run(qmod, [x]), Executor(rq.compile(qmod)).run("main", [x])):
        assert found[0].dtype == np.float16
        difference = np.abs(found[0].astype("float32") - expected.astype("float32"))
        assert difference.max() <= step * 1.01  # float16 itself has steps of 0.004 there
        assert (difference > step / 2).mean() < 0.03


def test_half__becomes_integer():
    g = HalfGraph()
    y = g.round_trip(convolve(g, g.round_trip(add_halves(g, g.round_trip("x")))))
    found = count_operators(rq.lower(rq.load(g.model(y))[0]))
    assert found["qnn.conv2d"] == found["qnn.add"] == 1
    assert not {"nn.conv2d", "add"} & set(found)


@pytest.mark.parametrize("from_nodes", [False, True])
def test_half__network_becomes_integer(from_nodes):
    """A float network: float16 weights, biases and values. ONNX Runtime computes it in float32."""
    g = HalfGraph(from_nodes=from_nodes)
    draw = lambda *shape: g.constant(g.rng.normal(0, 0.3, shape).astype("float16"))  # noqa: E731
    image = g.add("Relu", g.add("Conv", "x", draw(8, 4, 3, 3), draw(8), pads=[1] * 4))
    image = g.add("Add", image, g.add("Conv", image, draw(8, 8, 1, 1)))
    flat = g.add("Flatten", g.add("GlobalAveragePool", g.add("Relu", image)))
    model = g.model(g.add("Gemm", flat, draw(8, 5), draw(5)))
    data = [g.rng.normal(size=SHAPE).astype("float16") for _ in range(8)]
    mod, _ = rq.load(model)
    (expected,) = run_onnxruntime(model, {"x": data[0]}, rewrites=False)
    (found,) = Executor(rq.compile(mod)).run("main", [data[0]])
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, atol=0.004)
    qmod = rq.quantize(mod, None, data, effort="fast")
    assert {row.op for row in rq.ledger(qmod).rows if not row.quantized} == {"astype"}


def test_half__float32_is_left_alone():
    """What no quantized operator touches keeps its bits, in a quantized model too."""
    nodes = [
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Cast", ["e"], ["w"], to=TensorProto.FLOAT),
        helper.make_node("QuantizeLinear", ["w", "s"], ["y"]),
    ]
    result = {"y": ("uint8", None)}
    model = make_onnx(nodes, {"x": ("float16", (4,))}, result, {"s": np.float32(0.1)}, 21)
    mod, _ = rq.load(model)
    assert 'R.Tensor((4,), dtype="float16") = R.exp(x)' in str(mod)


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ"])
@pytest.mark.parametrize("scale", ["float32", "float16"])
def test_float8__is_refused_by_name(kind, scale):
    g = HalfGraph()
    g.constants.append(helper.make_tensor("z", getattr(TensorProto, kind), (), [0.0]))
    g.add("QuantizeLinear", "x", g.constant(np.array(0.05, scale)), "z")
    name = {"N": "float8e4m3fn", "2": "float8e5m2", "Z": kind.lower()}[kind[-1]]
    pattern = "".join(f"{letter}_?" for letter in name)
    with pytest.raises(ModelError, match=rf"quantization to {pattern} is not supported"):
        rq.load(g.model(g.nodes[-1].output[0]))
