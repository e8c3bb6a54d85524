"""Q/DQ models whose activations have a scale for each index of an axis, against ONNX Runtime."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq

#: operator -> (ONNX name, shape of the data, of the weight, axis of its channels, shape of the
#: result, attributes); twice as many channels come out of each as go in
WEIGHTED = {
    "conv": ("Conv", (2, 4, 5, 6), (8, 4, 3, 3), 0, (2, 8, 5, 6), {"pads": [1] * 4}),
    "depthwise": ("Conv", (2, 4, 5, 6), (8, 1, 3, 3), 0, (2, 8, 3, 4), {"group": 4}),
    "grouped": ("Conv", (2, 4, 5, 6), (8, 2, 1, 1), 0, (2, 8, 5, 6), {"group": 2}),
    "square": ("Conv", (2, 4, 5, 6), (4, 4, 1, 1), 0, (2, 4, 5, 6), {}),
    "conv1d": ("Conv", (2, 4, 6), (8, 4, 3), 0, (2, 8, 4), {}),
    "conv3d": ("Conv", (1, 4, 3, 3, 3), (8, 4, 1, 1, 1), 0, (1, 8, 3, 3, 3), {}),
    "transposed": ("ConvTranspose", (2, 4, 5, 6), (4, 8, 3, 3), 1, (2, 8, 7, 8), {}),
    "gemm": ("Gemm", (3, 4), (8, 4), 0, (3, 8), {"transB": 1}),
    "matmul": ("MatMul", (3, 4), (4, 8), 1, (3, 8), {}),
    "matmul of 3 axes": ("MatMul", (2, 3, 4), (4, 8), 1, (2, 3, 8), {}),
}
#: the same of operators without weights
PLAIN = {
    "relu": ("Relu", (2, 4, 5, 6), (2, 4, 5, 6), {}),
    "max_pool": ("MaxPool", (2, 4, 5, 6), (2, 4, 4, 5), {"kernel_shape": [2, 2]}),
    "padded max_pool": (
        "MaxPool", (2, 4, 5, 6), (2, 4, 5, 6), {"kernel_shape": [3, 3], "pads": [1] * 4},
    ),
    "average_pool": ("AveragePool", (2, 4, 5, 6), (2, 4, 4, 5), {"kernel_shape": [2, 2]}),
    "sigmoid": ("Sigmoid", (2, 4, 5, 6), (2, 4, 5, 6), {}),
    "transpose": ("Transpose", (2, 4, 5, 6), (2, 5, 6, 4), {"perm": [0, 2, 3, 1]}),
    "mul": ("Mul", (2, 4, 5, 6), (2, 4, 5, 6), {}),
    "add": ("Add", (2, 4, 6, 6), (2, 4, 6, 6), {}),
    "matmul of two": ("MatMul", (2, 4, 4), (2, 4, 4), {}),
}  # fmt: skip


class Builder:
    """A Q/DQ model around one operator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes, self.constants = [], []

    def constant(self, array) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def parameters(self, size: int | None, dtype: str, *, shifted: bool) -> list[str]:
        scale = self.rng.uniform(0.01, 0.05, size or ()).astype("float32")
        zero = self.rng.integers(1, 90, size or ()) if shifted else np.zeros(size or (), int)
        return [self.constant(scale), self.constant(zero.astype(dtype))]

    def quantize(self, value: str, size: int | None, axis: int, *, shifted: bool) -> str:
        """The value behind quantize and dequantize."""
        names, on = self.parameters(size, "uint8", shifted=shifted), {"axis": axis} if size else {}
        integers, real = f"{value}_int", f"{value}_real"
        self.nodes.append(helper.make_node("QuantizeLinear", [value, *names], [integers], **on))
        self.nodes.append(helper.make_node("DequantizeLinear", [integers, *names], [real], **on))
        return real

    def weight(self, shape: tuple[int, ...], axis: int | None) -> str:
        """A dequantized int8 weight, with a scale for each index of an axis."""
        size, on = (None, {}) if axis is None else (shape[axis], {"axis": axis})
        integers = self.constant(self.rng.integers(-100, 100, shape).astype("int8"))
        names = self.parameters(size, "int8", shifted=False)
        self.nodes.append(helper.make_node("DequantizeLinear", [integers, *names], ["w"], **on))
        return "w"

    def bias(self, size: int) -> str:
        """A bias of whole units s_x * s_w, which integers hold, where x has one scale."""
        floats = [each for each in self.constants if each.data_type == TensorProto.FLOAT]
        weight, data = map(numpy_helper.to_array, floats)
        values = self.rng.normal(size=size).astype("float32")
        if data.size == 1:
            unit = weight * data.reshape(())
            values = np.round(values / unit) * unit
        return self.constant(values)

    def build(self, name: str, axis: int, *, shifted: bool, closed: bool, bias: bool):
        """(model, feed); `closed`: the result is quantized; `shifted`: zero points are not 0."""
        if name in WEIGHTED:
            op, shape, weight, out, result, attributes = WEIGHTED[name]
            parts = [self.weight(weight, out)]
        else:
            op, shape, result, attributes = PLAIN[name]
            parts = []
        data = self.quantize("x", shape[axis], axis, shifted=shifted)
        if bias:
            parts.append(self.bias(weight[out]))
        parts = [
            data,
            *parts,
            *([data] if op in ("Mul", "Add", "MatMul")[: 3 * (not parts)] else []),
        ]
        self.nodes.append(helper.make_node(op, parts, ["y"], **attributes))
        output = self.quantize("y", None, 0, shifted=True) if closed else "y"
        model = make_onnx(self.nodes, {"x": shape}, {output: result}, self.constants, 13)
        onnx.checker.check_model(model, full_check=True)
        return model, {"x": self.rng.normal(size=shape).astype("float32")}


def compute_expected(model, feed) -> np.ndarray:
    return run_onnxruntime(model, feed, rewrites=False)[0]


def check(name: str, axis: int, *, shifted: bool, closed: bool, bias: bool) -> None:
    """What is lowered is what ONNX Runtime computes, compiled too; float rows have the reason."""
    model, feed = Builder().build(name, axis, shifted=shifted, closed=closed, bias=bias)
    expected = compute_expected(model, feed)
    mod, _ = rq.load(model)
    qmod = rq.lower(mod)
    reasons = ("parameters for each index of its axis", "the windows reach over")
    for row in rq.ledger(qmod).rows:
        if name == "conv3d" and row.op in ("reshape", "permute_dims"):  # behind a float product
            assert row.quantized or "is not dequantized" in row.reason, row
        else:
            assert row.quantized or any(reason in row.reason for reason in reasons), row
    found = rq.reference.run(qmod, feed)[0]
    # One step of the result where it is quantized, for sums that lie between two.
    step = 0.05 if closed else 1e-5
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=step + 1e-6)
    assert (np.abs(found - expected) > 1e-5).mean() < 0.01
    assert rq.verify(qmod, feed, None)


def find_axes(name: str) -> range:
    return range(len((WEIGHTED | PLAIN)[name][1]))


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [*WEIGHTED, *PLAIN])
def test_lower__scales_of_channels(name):
    check(name, 1, shifted=True, closed=True, bias=name in WEIGHTED and "matmul" not in name)


@pytest.mark.parametrize("name", ["conv", "padded max_pool", "max_pool", "add"])
def test_lower__scales_of_another_axis(name):
    check(name, 3 if name != "add" else 2, shifted=False, closed=True, bias=False)


@pytest.mark.slow
@pytest.mark.parametrize(("shifted", "closed"), [*product([False, True], repeat=2)])
@pytest.mark.parametrize("name", [*WEIGHTED, *PLAIN])
def test_lower__scales_of_any_axis(name, shifted, closed):
    for axis in find_axes(name):
        for bias in {False, name in WEIGHTED and "matmul" not in name}:
            check(name, axis, shifted=shifted, closed=closed, bias=bias)


def measure_sqnr(model, feed) -> float:
    """How near what `quantize` makes of a Q/DQ model is to what ONNX Runtime computes, in dB."""
    mod, params = rq.load(model)
    qmod = rq.quantize(mod, params, [feed] * 2, effort="fast", guard=rq.config.Guard.OFF)
    assert all(row.quantized for row in rq.ledger(qmod).rows)
    assert rq.verify(qmod, feed, None)
    expected = compute_expected(model, feed)
    error = rq.reference.run(qmod, feed)[0] - expected
    return float(10 * np.log10((expected**2).sum() / (error**2).sum()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv", "depthwise", "matmul"])
def test_quantize__calibrates_data_with_scales_of_channels(name):
    build = Builder().build
    assert measure_sqnr(*build(name, 1, shifted=True, closed=False, bias=name == "conv")) > 35


@pytest.mark.sample(5)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", ["conv", "depthwise", "conv1d", "transposed", "gemm", "matmul"])
def test_quantize__weights_that_are_integers_beside_float_data(name, per_channel):
    """They stand for what they dequantize to."""
    op, shape, weight, out, result, attributes = WEIGHTED[name]
    b = Builder()
    parts = ["x", b.weight(weight, out if per_channel else None)]
    b.nodes.append(helper.make_node(op, parts, ["y"], **attributes))
    model = make_onnx(b.nodes, {"x": shape}, {"y": result}, b.constants, 13)
    assert measure_sqnr(model, {"x": b.rng.normal(size=shape).astype("float32")}) > 35
