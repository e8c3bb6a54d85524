"""Operators on nothing: compiled, they agree with the evaluator of onnx, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx

import relayquant as rq
from relayquant.errors import ModelError

RNG = np.random.default_rng(0)
SCALE, ZERO = np.float32(0.1), np.uint8(3)


def floats(*shape):
    return RNG.standard_normal(shape).astype("float32")


def codes(*shape):
    return RNG.integers(0, 256, shape).astype("uint8")


def quantized(weight):
    """Operands of QLinearConv and QLinearMatMul after the data."""
    parts = (SCALE, ZERO, weight, SCALE, ZERO, SCALE, np.uint8(9))
    return dict(zip(("xs", "xz", "w", "ws", "wz", "ys", "yz"), parts, strict=True))


#: What is computed -> operator, data, other operands, attributes. All operands after x are
#: constants.
CASES = {
    "Gemm of depth 0": ("Gemm", floats(3, 0), {"w": floats(0, 4), "b": floats(4)}, {}),
    "MatMul of depth 0": ("MatMul", floats(2, 3, 0), {"w": floats(0, 4)}, {}),
    "MatMul of no rows": ("MatMul", floats(0, 5), {"w": floats(5, 4)}, {}),
    "MatMulInteger of depth 0": (
        "MatMulInteger",
        codes(3, 0),
        {"w": codes(0, 4), "xz": ZERO, "wz": np.uint8(7)},
        {},
    ),
    "MatMulInteger of no rows": ("MatMulInteger", codes(0, 5), {"w": codes(5, 4), "xz": ZERO}, {}),
    "QLinearMatMul of depth 0": ("QLinearMatMul", codes(3, 0), quantized(codes(0, 4)), {}),
    "QLinearMatMul of no rows": ("QLinearMatMul", codes(0, 5), quantized(codes(5, 4)), {}),
    "QLinearConv of no image": ("QLinearConv", codes(0, 2, 5, 5), quantized(codes(4, 2, 3, 3)), {}),
    "ConvInteger of no image": ("ConvInteger", codes(0, 2, 5, 5), {"w": codes(4, 2, 3, 3)}, {}),
    "Conv of no image": ("Conv", floats(0, 2, 5, 5), {"w": floats(3, 2, 3, 3)}, {}),
    "Conv of no channel": (
        "Conv",
        floats(1, 0, 5, 5),
        {"w": floats(4, 0, 3, 3), "b": floats(4)},
        {},
    ),
    "Conv of a sequence, no channel": ("Conv", floats(1, 0, 5), {"w": floats(4, 0, 3)}, {}),
    "Conv of a volume, no channel": (
        "Conv",
        floats(1, 0, 5, 5, 5),
        {"w": floats(4, 0, 3, 3, 3)},
        {},
    ),
    "Conv with no result": ("Conv", floats(1, 2, 5, 5), {"w": floats(0, 2, 3, 3)}, {}),
    "Conv of padding alone": (
        "Conv",
        floats(1, 2, 0, 5),
        {"w": floats(3, 2, 3, 3)},
        {"pads": [2, 1, 2, 1]},
    ),
    "ConvTranspose of no channel": (
        "ConvTranspose",
        floats(1, 0, 5, 5),
        {"w": floats(0, 4, 3, 3)},
        {},
    ),
    "MaxPool of no image": ("MaxPool", floats(0, 2, 5, 5), {}, {"kernel_shape": [2, 2]}),
    "AveragePool of no image": ("AveragePool", floats(0, 2, 5, 5), {}, {"kernel_shape": [2, 2]}),
    "GlobalMaxPool of no image": ("GlobalMaxPool", floats(0, 2, 5, 5), {}, {}),
    "LayerNormalization of nothing": ("LayerNormalization", floats(3, 0), {"g": floats(0)}, {}),
    "Softmax of no row": ("Softmax", floats(0, 3), {}, {}),
    "Softmax of nothing": ("Softmax", floats(3, 0), {}, {}),
    "ReduceSum over nothing": ("ReduceSum", floats(3, 0), {"axes": np.array([1])}, {"keepdims": 0}),
    "Transpose of nothing": ("Transpose", floats(3, 0, 2), {}, {"perm": [2, 0, 1]}),
    "CumSum of nothing": ("CumSum", floats(0, 3), {"axis": np.array(0)}, {}),
    "Gather of nothing": ("Gather", floats(0, 3), {"at": np.zeros(0, "int64")}, {}),
}


def load_case(name, batch=None):
    operator, data, constants, attributes = CASES[name]
    operands = ["x", *constants]
    if operator == "ConvInteger":
        operands = ["x", "w"]
    node = helper.make_node(operator, operands, ["y"], **attributes)
    shape = (batch, *data.shape[1:]) if batch else data.shape
    proto = make_onnx([node], {"x": (str(data.dtype), shape)}, constants=constants, opset=18)
    return proto, data


@pytest.mark.parametrize("name", CASES)
def test_compile__operators_on_nothing(name):
    proto, data = load_case(name)
    with np.errstate(invalid="ignore"):
        (expected,) = ReferenceEvaluator(proto).run(None, {"x": data})
    mod, _ = rq.load(proto)
    for found in (
        rq.Executor(rq.compile(mod)).run("main", [data])[0],
        rq.reference.run(mod, [data])[0],
    ):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith(("depth 0", "no channel"))])
def test_compile__sums_of_no_products_with_a_batch_of_the_run_time(name):
    proto, data = load_case(name, batch="n")
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": data})
    mod, _ = rq.load(proto)
    (found,) = rq.Executor(rq.compile(mod)).run("main", [data])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("operator", "operands", "attributes"),
    [
        ("Gather", (floats(0, 3), np.zeros(2, "int64")), {}),
        ("GatherElements", (floats(0, 3), np.zeros((2, 3), "int64")), {}),
        ("GatherND", (floats(0, 3), np.zeros((2, 1), "int64")), {}),
        ("ScatterElements", (floats(0, 3), np.zeros((2, 3), "int64"), floats(2, 3)), {}),
        ("ScatterND", (floats(0, 3), np.zeros((2, 1), "int64"), floats(2, 3)), {}),
        ("RoiAlign", (floats(0, 1, 8, 8), floats(3, 4), np.zeros(3, "int64")), {}),
    ],
)
def test_compile__no_index_fits_an_axis_of_size_0(operator, operands, attributes):
    """Compiled code would read or write memory of others."""
    inputs = {f"x{k}": array for k, array in enumerate(operands)}
    node = helper.make_node(operator, [*inputs], ["y"], **attributes)
    mod, _ = rq.load(make_onnx([node], inputs))
    with pytest.raises(ModelError, match="axis of size 0, which has no element"):
        rq.compile(mod)


@pytest.mark.parametrize("rows", [0, 1])
def test_compile__no_row_of_indices_is_beyond_the_data(rows):
    """The indices have two rows, which compiled code would read from memory of others."""
    inputs = {"x": floats(rows, 2), "at": np.zeros((2, 2), "int64")}
    mod, _ = rq.load(
        make_onnx([helper.make_node("GatherElements", [*inputs], ["y"], axis=1)], inputs)
    )
    with pytest.raises(ModelError, match="reads elements that are not there"):
        rq.compile(mod)
