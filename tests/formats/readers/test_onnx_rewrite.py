"""Operators on integers (QLinear..., ...Integer) give what ONNX Runtime gives, within one step."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_runtime import run_onnxruntime
from operator_names import count_operators
from quantized_models import GraphBuilder

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx

SHAPE = (2, 4, 8, 8)


class IntegerBuilder(GraphBuilder):
    """Adds operands as QLinear operators list them: tensor, scale, zero point."""

    def triple(self, scale, zero_point) -> list[str]:
        return [self.constant(np.asarray(scale, "float32")), self.constant(zero_point)]

    def weight_triple(self, shape, axis):
        size = () if axis is None else (shape[axis],)
        scale = self.random.uniform(0.001, 0.003, size).astype("float32")
        integers = self.random.integers(-127, 128, shape).astype("int8")
        names = [self.constant(integers), *self.triple(scale, np.zeros(size, "int8"))]
        return names, scale


def check(
    b: GraphBuilder, y: str, x_dtype="uint8", y_dtype="uint8", shape=SHAPE, off_by=0.02, opset=13
):
    """The model is lowered; at most `off_by` of the results are one off, none is more."""
    model = b.model({"x": (x_dtype, shape)}, {y: (y_dtype, None)}, opset)
    limits = np.iinfo(x_dtype)
    data = np.random.default_rng(1).integers(limits.min, limits.max + 1, shape).astype(x_dtype)
    (expected,) = run_onnxruntime(model, {"x": data}, rewrites=False)
    qmod = rq.lower(import_onnx(model)[0])
    (got,) = rq.reference.run(qmod, [data])
    assert got.dtype == expected.dtype
    difference = np.abs(got.astype("int64") - expected.astype("int64"))
    assert difference.max() <= 1
    assert (difference > 0).mean() <= off_by
    assert not rq.ledger(qmod).floating, str(rq.ledger(qmod))
    return count_operators(qmod)


@pytest.mark.parametrize("axis", [0, None], ids=["per_channel", "per_tensor"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_qlinear_conv(axis, with_bias):
    b = IntegerBuilder()
    weight, _ = b.weight_triple((8, 4, 3, 3), axis)
    operands = ["x", *b.triple(0.02, np.uint8(110)), *weight, *b.triple(0.04, np.uint8(130))]
    if with_bias:
        operands.append(b.constant(b.random.integers(-2000, 2000, 8).astype("int32")))
    found = check(b, b.node("QLinearConv", *operands, pads=[1, 0, 1, 0], strides=[2, 1]))
    assert found["qnn.conv2d"] == 1
    assert found["add"] == int(with_bias)


@pytest.mark.parametrize("opset", [10, 11, 12, 17, 21])
def test_opset__of_every_kind_has_scales_for_each_channel(opset):
    """DequantizeLinear itself has an axis from opset 13 on."""
    b = IntegerBuilder()
    weight, _ = b.weight_triple((8, 4, 3, 3), 0)
    y = b.node(
        "QLinearConv", "x", *b.triple(0.02, np.uint8(110)), *weight, *b.triple(0.04, np.uint8(130))
    )
    weight, _ = b.weight_triple((6, 5), 1)
    middle = b.triple(0.04, np.uint8(130))
    y = b.node("QLinearMatMul", y, *middle, *weight, *b.triple(0.02, np.uint8(120)))
    found = check(b, y, opset=opset, off_by=0.05)
    assert found["qnn.conv2d"] == found["qnn.dense"] == 1


@pytest.mark.parametrize("axis", [1, None], ids=["per_column", "per_tensor"])
def test_qlinear_matmul(axis):
    b = IntegerBuilder()
    weight, _ = b.weight_triple((8, 5), axis)
    y = b.node(
        "QLinearMatMul", "x", *b.triple(0.02, np.int8(3)), *weight, *b.triple(0.03, np.int8(-9))
    )
    assert check(b, y, "int8", "int8", (3, 7, 8))["qnn.dense"] == 1


@pytest.mark.parametrize("is_float", [False, True])
def test_qgemm(is_float):
    b = IntegerBuilder()
    weight, _ = b.weight_triple((5, 12), 0)
    operands = ["x", *b.triple(0.02, np.uint8(3)), *weight]
    operands.append(b.constant(b.random.integers(-2000, 2000, 5).astype("int32")))
    if not is_float:
        operands += b.triple(0.03, np.uint8(120))
    y = b.node("QGemm", *operands, domain="com.microsoft", transB=1)
    if is_float:
        y = b.quantize(y, 0.03, np.uint8(120))
    assert check(b, y, shape=(3, 12))["qnn.dense"] == 1


ONE, TWO = (0.02, np.uint8(110)), (0.03, np.uint8(130))


@pytest.mark.parametrize(
    ("op", "operator", "attrs"),
    [
        ("QLinearGlobalAveragePool", "qnn.mean", {"channels_last": 0}),
        (
            "QLinearAveragePool",
            "qnn.avg_pool2d",
            {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        ),
        ("QLinearSigmoid", "qnn.lookup", {}),
        ("QLinearLeakyRelu", "qnn.leaky_relu", {"alpha": 0.1}),
    ],
)
def test_qlinear__one_operand(op, operator, attrs):
    b = IntegerBuilder()
    out = (1 / 256, np.uint8(0)) if op == "QLinearSigmoid" else TWO
    y = b.node(op, "x", *b.triple(*ONE), *b.triple(*out), domain="com.microsoft", **attrs)
    assert check(b, y)[operator] == 1


@pytest.mark.parametrize(("op", "operator"), [("Add", "qnn.add"), ("Mul", "qnn.mul")])
def test_qlinear__two_operands(op, operator):
    b = IntegerBuilder()
    x, other = ["x", *b.triple(*ONE)], ["x", *b.triple(*TWO)]
    y = b.node(f"QLinear{op}", *x, *other, *b.triple(0.06, np.uint8(90)), domain="com.microsoft")
    # ONNX Runtime multiplies three scales, we by their rounded product: ties fall otherwise.
    assert check(b, y, off_by=0.05)[operator] == 1


def test_qlinear_concat():
    b = IntegerBuilder()
    other = b.constant(b.random.integers(0, 256, SHAPE).astype("uint8"))
    operands = [*b.triple(0.03, np.uint8(100)), "x", *b.triple(*ONE), other, *b.triple(*TWO)]
    y = b.node("QLinearConcat", *operands, domain="com.microsoft", axis=1)
    assert check(b, y)["qnn.concatenate"] == 1


def test_max_pool_and_reshape_between_integers():
    b = IntegerBuilder()
    y = b.node("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2])
    y = b.node("Reshape", y, b.constant(np.array([2, 64])))
    weight, _ = b.weight_triple((64, 5), None)
    y = b.node("QLinearMatMul", y, *b.triple(*ONE), *weight, *b.triple(*TWO))
    assert check(b, y)["qnn.dense"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["int8", "uint8"])
def test_dynamic_quantize_and_matmul_integer(weight):
    b = IntegerBuilder()
    x, scale, zero = b.node("DynamicQuantizeLinear", "x", outputs=3)
    limits = np.iinfo(weight)
    w = b.random.integers(limits.min, limits.max + 1, (16, 5)).astype(weight)
    w_zero = np.array(3 if weight == "int8" else 140, weight)
    y = b.node("MatMulInteger", x, b.constant(w), zero, b.constant(w_zero))
    y = b.node("Cast", y, to=TensorProto.FLOAT)
    y = b.node("Mul", y, b.node("Mul", scale, b.constant(np.float32(0.01))))
    model = b.model({"x": ("float32", (3, 16))}, {y: ("float32", (3, 5))})
    qmod = rq.lower(import_onnx(model)[0])
    assert count_operators(qmod)["qnn.dense"] == 1
    for data in (np.random.default_rng(0).normal(0, 1, (3, 16)), np.zeros((3, 16))):
        data = data.astype("float32")
        (expected,) = run_onnxruntime(model, {"x": data}, rewrites=False)
        np.testing.assert_allclose(
            rq.reference.run(qmod, [data])[0], expected, rtol=1e-5, atol=1e-5
        )
        (got,) = Executor(rq.compile(qmod)).run("main", [data])
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_matmul_integer__of_two_values():
    b = IntegerBuilder()
    y = b.node("MatMulInteger", "x", b.node("Transpose", "x", perm=[0, 2, 1]))
    model = b.model({"x": ("uint8", (2, 3, 4))}, {y: ("int32", (2, 3, 3))})
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 4)).astype("uint8")
    (expected,) = run_onnxruntime(model, {"x": data}, rewrites=False)
    (got,) = rq.reference.run(rq.lower(import_onnx(model)[0]), [data])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize("zero", [(), (4,), (4, 1), (2, 4, 1), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("is_constant", [True, False], ids=["weight", "value"])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_matmul_integer__zero_points_of_rows_and_columns(zero, is_constant, kind):
    """Against integers of 64 bits; ONNX Runtime takes one zero point only."""
    b, random = IntegerBuilder(), np.random.default_rng(0)
    shape = (2, 4, 5) if len(zero) == 3 else (4, 5)
    limits = np.iinfo(kind)
    data, rows, weight, columns = (
        random.integers(limits.min, limits.max + 1, size).astype(kind)
        for size in (shape, zero, (5, 3) if is_constant else (*shape[:-2], 5, 3), (3,))
    )
    w = b.constant(weight) if is_constant else "w"
    y = b.node("MatMulInteger", "x", w, "z", b.constant(columns))
    given = {"x": data, "z": rows, **({} if is_constant else {"w": weight})}
    inputs = {name: (kind, array.shape) for name, array in given.items()}
    model = b.model(inputs, {y: ("int32", (*shape[:-1], 3))})
    wide = [each.astype("int64") for each in (data, rows, weight, columns)]
    row_zero = wide[1][:, None] if len(zero) == 1 else wide[1]
    expected = (wide[0] - row_zero) @ (wide[2] - wide[3])
    qmod = rq.lower(import_onnx(model)[0])
    np.testing.assert_array_equal(rq.reference.run(qmod, given)[0], expected)


def test_conv_integer__pads_with_the_zero_point():
    b = IntegerBuilder()
    w = b.random.integers(-128, 128, (8, 4, 3, 3)).astype("int8")
    y = b.node("ConvInteger", "x", b.constant(w), b.constant(np.uint8(77)), pads=[1, 1, 1, 1])
    model = b.model({"x": ("uint8", SHAPE)}, {y: ("int32", (2, 8, 8, 8))})
    data = np.random.default_rng(0).integers(0, 256, SHAPE).astype("uint8")
    (expected,) = run_onnxruntime(model, {"x": data}, rewrites=False)
    (got,) = rq.reference.run(rq.lower(import_onnx(model)[0]), [data])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 1, 2]])
@pytest.mark.parametrize(("weight", "zero", "groups"), [("int8", 0, 1), ("uint8", 140, 2)])
def test_dynamic_quantize_and_conv_integer(weight, zero, groups, pads):
    b = IntegerBuilder()
    x, scale, x_zero = b.node("DynamicQuantizeLinear", "x", outputs=3)
    limits = np.iinfo(weight)
    w = b.random.integers(limits.min, limits.max + 1, (6, 4 // groups, 3, 3)).astype(weight)
    attrs = {"pads": pads, "group": groups, "strides": [2, 1]}
    y = b.node("ConvInteger", x, b.constant(w), x_zero, b.constant(np.array(zero, weight)), **attrs)
    y = b.node("Mul", b.node("Cast", y, to=TensorProto.FLOAT), scale)
    model = b.model({"x": ("float32", SHAPE)}, {y: ("float32", None)})
    qmod = rq.lower(import_onnx(model)[0])
    assert count_operators(qmod)["qnn.conv2d"] == 1
    data = np.random.default_rng(0).normal(0, 1, SHAPE).astype("float32")
    (expected,) = run_onnxruntime(model, {"x": data}, rewrites=False)
    (computed,) = rq.reference.run(qmod, [data])
    np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5)
    (got,) = Executor(rq.compile(qmod)).run("main", [data])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "domain", "attrs", "inputs", "message"),
    [
        ("QLinearConv", "", {}, 4, "has 4 inputs"),
        ("QLinearConcat", "com.microsoft", {"axis": 1}, 4, "has 4 inputs"),
        (
            "QLinearGlobalAveragePool",
            "com.microsoft",
            {"channels_last": 1},
            5,
            "channels_last is 1; supported: 0. Write this",
        ),
        ("QLinearSoftmax", "com.microsoft", {"opset": 13}, 5, "opset is 13 in .* Convert the"),
    ],
)
def test_malformed__error_names_the_node(op, domain, attrs, inputs, message):
    b = IntegerBuilder()
    names = ["x", *b.triple(*ONE), *b.triple(*TWO)][:inputs]
    y = b.node(op, *names, domain=domain, **attrs)
    opset = 12 if op == "QLinearSoftmax" else 13
    model = b.model({"x": ("uint8", SHAPE)}, {y: ("uint8", None)}, opset)
    model.graph.node[-1].name = ""
    with pytest.raises(ModelError, match=message) as caught:
        import_onnx(model)
    assert f"node {y!r} (operator {op})" in str(caught.value)


@pytest.mark.parametrize("with_zero", [True, False], ids=["of_operand", "none"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_add__without_zero_point_has_the_type_of_its_operands(dtype, with_zero):
    b = IntegerBuilder()
    scale, zero = b.triple(0.1, np.array(0, dtype))
    zero = zero if with_zero else ""
    numbers = b.random.integers(0, 100, SHAPE)
    other = b.constant(numbers.astype(dtype))
    operands = [other, scale, zero, scale]
    inner = b.node("QLinearAdd", "x", scale, zero, *operands, domain="com.microsoft")
    y = b.node("QLinearAdd", inner, scale, zero, *operands, domain="com.microsoft")
    model = b.model({"x": (dtype, SHAPE)}, {y: (dtype, SHAPE)})
    limits = np.iinfo(dtype)
    data = b.random.integers(limits.min, limits.max + 1, SHAPE)
    expected = (data + numbers).clip(limits.min, limits.max)
    expected = (expected + numbers).clip(limits.min, limits.max)
    (got,) = rq.reference.run(import_onnx(model)[0], [data.astype(dtype)])
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, expected)


def test_malformed__conv_integer_with_auto_pad():
    b = GraphBuilder()
    weight = b.constant(np.ones((2, SHAPE[1], 3, 3), "int8"))
    y = b.node("ConvInteger", "x", weight, auto_pad="SAME_UPPER")
    model = b.model({"x": ("uint8", SHAPE)}, {y: ("int32", None)})
    with pytest.raises(ModelError, match=r"ConvInteger.*auto_pad"):
        import_onnx(model)


def test_quantize__to_4_bits_is_clipped():
    b = GraphBuilder()
    b.constants.append(helper.make_tensor("zero", TensorProto.INT4, (), [2]))
    q = b.node("QuantizeLinear", "x", b.constant(np.float32(0.1)), "zero")
    y = b.node("DequantizeLinear", q, b.constant(np.float32(0.1)), "zero")
    model = b.model({"x": ("float32", (50,))}, {y: ("float32", (50,))}, opset=21)
    data = np.linspace(-2, 2, 50).astype("float32")
    (got,) = rq.reference.run(import_onnx(model)[0], [data])
    np.testing.assert_allclose(
        got, run_onnxruntime(model, {"x": data}, rewrites=False)[0], atol=1e-6
    )
