"""QDQ models in: every placement becomes integer operators whose results are within one step of
ONNX Runtime's.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from operator_names import count_operators
from quantized_models import GraphBuilder

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx

SHAPE = (2, 4, 9, 9)
STEP = 0.05


def input_data(shape=SHAPE) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1.5, shape).astype("float32")


def check(model, data=None, *, step: float = STEP, steps: int = 1):
    """Lower the model; its outputs are within `steps` of ONNX Runtime's. Returns the module."""
    data = input_data() if data is None else data
    mod, _ = import_onnx(model)
    qmod = rq.lower(mod)
    (expected,) = run_onnxruntime(model, {"x": data}, rewrites=False)
    (got,) = rq.reference.run(qmod, [data])
    assert got.dtype == expected.dtype
    difference = np.abs(got.astype("float64") - expected.astype("float64"))
    assert difference.max() <= step * (steps + 1e-3)
    assert (difference > step / 2).mean() < 0.02
    return qmod


def convolution(
    b: GraphBuilder, x: str, *, axis=0, weight="int8", weight_zero=0, bias=True, scale=0.02
):
    w, weight_scale = b.weight((8, 4, 3, 3), axis=axis, dtype=weight, zero_point=weight_zero)
    operands = [x, w] + ([b.bias(8, np.float32(scale) * weight_scale)] if bias else [])
    return b.node("Conv", *operands, pads=[1, 1, 1, 1])


OUT = {"dtype": ("float32", (2, 8, 9, 9))}


@pytest.mark.parametrize("axis", [0, None], ids=["per_channel", "per_tensor"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("weight", "weight_zero"), [("int8", 0), ("uint8", 128), ("uint8", 119)])
def test_conv__is_integer_in_every_dtype(dtype, axis, weight, weight_zero):
    b = GraphBuilder()
    zero = np.array(120 if dtype == "uint8" else -8, dtype)
    x = b.round_trip("x", 0.02, zero)
    y = convolution(b, x, axis=axis, weight=weight, weight_zero=weight_zero)
    y = b.round_trip(b.node("Relu", y), STEP, np.array(0 if dtype == "uint8" else -128, dtype))
    model = b.model({"x": ("float32", SHAPE)}, {y: OUT["dtype"]})
    qmod = check(model)
    assert count_operators(qmod)["qnn.conv2d"] == 1
    assert count_operators(qmod)["nn.conv2d"] == 0
    assert [row.op for row in rq.ledger(qmod).quantized] == ["nn.conv2d", "nn.relu"]


def test_conv__compiled_equals_reference():
    b = GraphBuilder()
    y = convolution(b, b.round_trip("x", 0.02, np.int8(3)))
    y = b.round_trip(y, STEP, np.int8(0))
    mod, _ = import_onnx(b.model({"x": ("float32", SHAPE)}, {y: OUT["dtype"]}))
    qmod = rq.lower(mod)
    (got,) = Executor(rq.compile(qmod)).run("main", [input_data()])
    np.testing.assert_array_equal(got, rq.reference.run(qmod, [input_data()])[0])


def moved(b: GraphBuilder, y: str) -> str:
    y = b.node("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2])
    return b.round_trip(b.node("Transpose", y, perm=[0, 2, 3, 1]), STEP, np.uint8(100))


def clipped_after(b: GraphBuilder, y: str) -> str:
    """The bound 1.23 is on neither grid."""
    y = b.round_trip(y, 0.11, np.uint8(100))
    y = b.node("Clip", y, b.constant(np.float32(-1.23)), b.constant(np.float32(1.23)))
    return b.round_trip(y, STEP, np.uint8(90))


def pair_for_each_reader(b: GraphBuilder, y: str) -> str:
    left, right = (b.round_trip(y, 0.06, np.uint8(100)) for _ in range(2))
    left = b.round_trip(b.node("Relu", left), 0.06, np.uint8(100))
    return b.round_trip(b.node("Add", left, right), STEP * 2, np.uint8(90))


def one_value_two_grids(b: GraphBuilder, y: str) -> str:
    left, right = b.round_trip(y, 0.06, np.uint8(100)), b.round_trip(y, 0.03, np.int8(0))
    return b.round_trip(b.node("Mul", left, right), STEP, np.uint8(90))


def table(b: GraphBuilder, y: str) -> str:
    y = b.node("Sigmoid", b.round_trip(y, 0.06, np.uint8(100)))
    return b.round_trip(y, STEP / 8, np.int8(-128))


def pooled(b: GraphBuilder, y: str) -> str:
    y = b.node("GlobalAveragePool", b.round_trip(y, 0.06, np.uint8(100)))
    y = b.node("Flatten", y)
    return b.round_trip(y, STEP / 4, np.uint8(90))


def concatenated(b: GraphBuilder, y: str) -> str:
    left, right = b.round_trip(y, 0.06, np.uint8(100)), b.round_trip(y, 0.03, np.uint8(128))
    return b.round_trip(b.node("Concat", left, right, axis=1), STEP, np.uint8(90))


@pytest.mark.parametrize(
    ("place", "forbidden"),
    [
        (moved, "nn.conv2d"),
        (clipped_after, "nn.conv2d"),
        (pair_for_each_reader, "add_float"),
        (one_value_two_grids, "multiply"),
        (table, "sigmoid"),
        (pooled, "mean"),
        (concatenated, "concat"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_placement__becomes_integer(place, forbidden):
    b = GraphBuilder()
    y = place(b, convolution(b, b.round_trip("x", 0.02, np.uint8(120))))
    model = b.model({"x": ("float32", SHAPE)}, {y: ("float32", None)})
    qmod = check(model, steps=1 if place is not pair_for_each_reader else 2)
    found = count_operators(qmod)
    assert found["qnn.conv2d"] == 1
    assert found[forbidden] == 0
    assert not rq.ledger(qmod).floating, str(rq.ledger(qmod))


def test_merge__equal_pairs_are_one():
    b = GraphBuilder()
    y = pair_for_each_reader(b, convolution(b, b.round_trip("x", 0.02, np.uint8(120))))
    mod, _ = import_onnx(b.model({"x": ("float32", SHAPE)}, {y: ("float32", None)}))
    assert count_operators(rq.lower(mod))["qnn.requantize"] == 1


def test_bias__of_float_or_other_units_joins_the_accumulator():
    for other_units in (False, True):
        b = GraphBuilder()
        x = b.round_trip("x", 0.02, np.uint8(120))
        w, _ = b.weight((8, 4, 3, 3))
        bias = b.random.normal(0, 1, 8).astype("float32")
        operand = b.bias(8, 1e-4) if other_units else b.constant(bias)
        y = b.round_trip(b.node("Conv", x, w, operand), STEP, np.uint8(100))
        model = b.model({"x": ("float32", SHAPE)}, {y: ("float32", (2, 8, 7, 7))})
        found = count_operators(check(model))
        assert found["qnn.dequantize"] == 1
        assert found["add"] == 1


def test_gemm__transposed_weight_is_dense():
    for transposed, shape, axis in ((1, (5, 36), 0), (0, (36, 5), 1)):
        b = GraphBuilder()
        x = b.round_trip("x", 0.02, np.int8(0))
        w, scale = b.weight(shape, axis=axis)
        y = b.node("Gemm", x, w, b.bias(5, np.float32(0.02) * scale), transB=transposed)
        model = b.model({"x": ("float32", (3, 36))}, {y: ("float32", (3, 5))})
        qmod = check(model, input_data((3, 36)), step=1e-4)
        assert count_operators(qmod)["qnn.dense"] == 1
        assert count_operators(qmod)["matmul"] == 0


def test_matmul__of_two_values():
    b = GraphBuilder()
    x = b.round_trip("x", 0.02, np.uint8(120))
    y = b.node("MatMul", x, b.node("Transpose", x, perm=[0, 2, 1]))
    y = b.round_trip(y, STEP, np.uint8(120))
    model = b.model({"x": ("float32", (2, 7, 5))}, {y: ("float32", (2, 7, 7))})
    assert count_operators(check(model, input_data((2, 7, 5))))["qnn.batch_matmul"] == 1


def test_weight__quantized_in_the_graph():
    b = GraphBuilder()
    w = b.random.normal(0, 0.2, (8, 4, 1, 1)).astype("float32")
    w = b.round_trip(b.constant(w), 0.004, np.int8(0))
    y = b.node("Conv", b.round_trip("x", 0.02, np.uint8(120)), w)
    y = b.round_trip(y, STEP, np.uint8(120))
    model = b.model({"x": ("float32", SHAPE)}, {y: OUT["dtype"]})
    assert count_operators(check(model))["qnn.conv2d"] == 1


def test_weight__of_4_bits():
    b = GraphBuilder()
    values = b.random.integers(-8, 8, (8, 4, 1, 1)).astype("int8")
    packed = helper.make_tensor("w4", TensorProto.INT4, values.shape, values.ravel().tolist())
    b.constants.append(packed)
    w = b.node("DequantizeLinear", "w4", b.constant(np.float32(0.05)))
    y = b.node("Conv", b.round_trip("x", 0.02, np.uint8(120)), w)
    y = b.round_trip(y, STEP, np.uint8(120))
    model = b.model({"x": ("float32", SHAPE)}, {y: OUT["dtype"]}, opset=21)
    assert count_operators(check(model))["qnn.conv2d"] == 1


def test_interface__integers_in_and_out():
    b = GraphBuilder()
    y = convolution(b, b.dequantize("x", 0.02, np.uint8(120)))
    y = b.quantize(y, STEP, np.int8(0))
    model = b.model({"x": ("uint8", SHAPE)}, {y: ("int8", (2, 8, 9, 9))})
    data = np.random.default_rng(0).integers(0, 256, SHAPE).astype("uint8")
    found = count_operators(check(model, data, step=1))
    assert set(found) == {"qnn.conv2d", "add", "qnn.requantize"}


def test_ledger__says_why_an_operator_stays_in_float():
    b = GraphBuilder()
    x = b.round_trip("x", 0.02, np.uint8(120))
    y = b.node("Conv", x, b.constant(b.random.normal(0, 1, (8, 4, 1, 1)).astype("float32")))
    y = b.round_trip(y, STEP, np.uint8(120))
    mod, _ = import_onnx(b.model({"x": ("float32", SHAPE)}, {y: OUT["dtype"]}))
    (row,) = rq.ledger(rq.lower(mod)).rows
    assert not row.quantized
    assert "weight is not dequantized" in row.reason
    assert "quantize" in row.advice


def test_lower__refuses_a_float_model():
    b = GraphBuilder()
    y = b.node("Relu", "x")
    mod, _ = import_onnx(b.model({"x": ("float32", SHAPE)}, {y: ("float32", SHAPE)}))
    with pytest.raises(ModelError, match=r"no quantized value.*relayquant\.quantize"):
        rq.lower(mod)


@pytest.mark.parametrize(
    ("attrs", "scale", "dtype", "message"),
    [
        ({"block_size": 2}, np.full((2, 2, 9, 9), 0.1, "float32"), "uint8", "is blocked"),
        ({}, np.float32(-0.1), "uint8", r"scale is \[-0\.1\].*above 0"),
        ({}, np.float32(np.nan), "uint8", "finite numbers above 0"),
        ({"axis": 7}, np.full(4, 0.1, "float32"), "uint8", "along axis 7"),
        ({"output_dtype": TensorProto.FLOAT8E4M3FN}, np.float32(0.1), "", "float8e4m3fn"),
    ],
)
def test_quantize_linear__error_names_the_node(attrs, scale, dtype, message):
    b = GraphBuilder()
    operands = ["x", b.constant(scale)]
    if dtype:
        operands.append(b.constant(np.zeros(scale.shape, dtype)))
    y = b.node("QuantizeLinear", *operands, **attrs)
    model = b.model({"x": ("float32", SHAPE)}, {y: ("uint8", SHAPE)}, opset=21)
    with pytest.raises(ModelError, match=message) as caught:
        import_onnx(model)
    assert y in str(caught.value)


def test_mixed_dtypes__of_a_concat():
    b = GraphBuilder()
    x = b.round_trip("x", 0.02, np.uint8(120))
    other = b.round_trip("x", 0.03, np.int8(0))
    y = b.round_trip(b.node("Concat", x, other, axis=1), STEP, np.uint8(90))
    model = b.model({"x": ("float32", SHAPE)}, {y: OUT["dtype"]})
    assert "concat" not in count_operators(check(model))


@pytest.mark.parametrize("dtype", ["UINT4", "INT4", "UINT2", "INT2"])
@pytest.mark.parametrize("axis", [None, 0, 2])
def test_quantize_linear__as_the_onnx_reference(dtype, axis):
    """Narrow dtypes saturate at their own limits; without `axis` the scales go along axis 1."""
    element = getattr(TensorProto, dtype, None)
    if element is None:
        pytest.skip(f"this onnx has no {dtype}")
    channels = SHAPE[1 if axis is None else axis]
    attrs = {} if axis is None else {"axis": axis}
    scale = np.linspace(0.1, 0.4, channels).astype("float32")
    zero = helper.make_tensor("zero", element, [channels], [1] * channels)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], **attrs),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], **attrs),
    ]
    constants = [numpy_helper.from_array(scale, "scale"), zero]
    opset = 25 if "2" in dtype else 21
    model = make_onnx(nodes, {"x": SHAPE}, {"y": SHAPE}, constants, opset)
    (want,) = ReferenceEvaluator(model).run(None, {"x": input_data()})
    (got,) = rq.reference.run(import_onnx(model)[0], [input_data()])
    np.testing.assert_array_equal(got, want)


PADS = {
    "plain": ([1, 0, 0, 2], None, (3, 4)),
    "cropped": ([1, -1, -1, 2], None, (3, 4)),
    "axes": ([2, 1], [-1], (3, 4)),
    "symbolic": ([1, 2, 0, 1], None, ("n", 4)),
    "three": ([0, 1, 0, 1, 0, 2], None, (2, 3, 4)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("form", PADS)
def test_pad__with_a_value_of_the_run_time(form, dtype):
    pads, axes, shape = PADS[form]
    b = GraphBuilder()
    operands = ["x", b.constant(np.array(pads)), "v"]
    if axes is not None:
        operands.append(b.constant(np.array(axes)))
    y = b.node("Pad", *operands)
    model = b.model({"x": (dtype, shape), "v": (dtype, (1,))}, {y: (dtype, None)}, opset=18)
    sizes = [size if isinstance(size, int) else 3 for size in shape]
    inputs = [np.arange(np.prod(sizes)).reshape(sizes).astype(dtype), np.array([77], dtype)]
    given = dict(zip(("x", "v"), inputs, strict=True))
    (expected,) = run_onnxruntime(model, given, rewrites=False)
    mod, _ = import_onnx(model)
    for found in (rq.reference.run(mod, inputs), Executor(rq.compile(mod)).run("main", inputs)):
        np.testing.assert_array_equal(found[0], expected)


def test_pad__with_a_dequantized_value_is_integer():
    b = GraphBuilder()
    x = b.round_trip("x", 0.05, np.uint8(120))
    value = b.dequantize(b.constant(np.uint8(150)), 0.05, np.uint8(120))
    y = b.node("Pad", x, b.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1])), value)
    y = b.round_trip(y, 0.05, np.uint8(120))
    qmod = check(b.model({"x": ("float32", SHAPE)}, {y: ("float32", None)}))
    assert "where" not in count_operators(qmod)
    rq.compile(qmod)
