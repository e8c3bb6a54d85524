"""Functions of one value in every float type of ONNX: near 0, where differences cancel, and where
powers overflow. What is right says numpy in float64, rounded once.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_node_cases import TARGET
from onnx_runtime import run_onnxruntime
from tvm import relax

import relayquant as rq
from relayquant.ir.rewrite.graph import call_name
from relayquant.stages.preparation import prepare_module

TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}

#: Largest error in units of the type's precision: 1 is the distance of 1 to the next number.
LARGEST_ERROR = 4

NEAR_0 = (-7.25, -3.0, -1e-2, -1e-3, -1e-5, -1e-7, -0.0, 1e-7, 1e-5, 1e-3, 0.3)
WIDE = (*NEAR_0, -89.0, -20.0, 20.0, 88.9, 89.0)


def selu(x):
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))


def softplus(x):
    return np.logaddexp(0, x)


#: (operator, attributes, inputs, what it is in float64)
ROWS = (
    ("Elu", {}, WIDE, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
    ("Elu", {"alpha": 0.25}, WIDE, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)) / 4)),
    ("Celu", {"alpha": 2.0}, WIDE, lambda x: np.where(x > 0, x, 2 * np.expm1(x.clip(max=0) / 2))),
    (
        "Selu",
        {"alpha": 1.5, "gamma": 0.5},
        WIDE,
        lambda x: np.where(x > 0, 0.5 * x, 0.75 * np.expm1(np.minimum(x, 0))),
    ),
    ("Mish", {}, (*NEAR_0, -20.0, 20.0, 89.0), lambda x: x * np.tanh(softplus(x))),
    ("Selu", {}, WIDE, selu),
    ("Softplus", {}, (*NEAR_0, -80.0, -17.5, 3.0, 19.0, 21.0, 89.0, 1000.0), softplus),
    ("Tanh", {}, WIDE, np.tanh),
    ("Sinh", {}, WIDE, np.sinh),
    ("Cosh", {}, WIDE, np.cosh),
    ("Atanh", {}, (-0.9, -1e-3, -1e-5, 1e-7, 1e-5, 0.3), np.arctanh),
    ("Reciprocal", {}, (0.0, -0.0, np.inf, 4.0), lambda x: 1 / x),
    (
        "ThresholdedRelu",
        {"alpha": 0.5},
        (-np.inf, -1.0, 0.5, 0.75, np.inf, np.nan),
        lambda x: np.where(x > 0.5, x, 0),
    ),
)  # fmt: skip

#: Celu of ONNX takes float32 only.
CASES = [(row, dtype) for row in ROWS for dtype in TYPES if row[0] != "Celu" or dtype == "float32"]


def compute(op, attributes, data):
    """What the compiled operator makes of the data."""
    node = helper.make_node(op, ["x"], ["y"], **attributes)
    mod, _ = rq.load(make_onnx([node], {"x": data}, "y", (), 22))
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(data)).numpy()


@pytest.mark.parametrize(("row", "dtype"), CASES, ids=[f"{row[0]}-{dtype}" for row, dtype in CASES])
def test_function__keeps_its_digits(row, dtype):
    op, attributes, values, function = row
    limits = ml_dtypes.finfo(TYPES[dtype])
    with np.errstate(all="ignore"):
        data = np.array(values, TYPES[dtype])
        wanted = function(data.astype("float64")).astype(TYPES[dtype]).astype("float64")
        found = compute(op, attributes, data).astype("float64")
        size = np.maximum(np.abs(wanted), float(limits.smallest_normal))
        error = np.where(found == wanted, 0, np.abs(found - wanted) / size / float(limits.eps))
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert np.nanmax(error) <= LARGEST_ERROR, (data, found, wanted)


@pytest.mark.parametrize("bias", [3.0, 2.5, -2.5])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_shrink__of_integers_that_no_float_holds(dtype, bias):
    limits = np.iinfo(dtype)
    data = [limits.min + 9, limits.max - 9, 2**53 + 1, 7, 5, 4, 2, 0]
    exact = [
        int(Fraction(x) + Fraction(bias if x < -4.5 else -bias)) if abs(x) > 4.5 else 0
        for x in data
    ]
    found = compute("Shrink", {"lambd": 4.5, "bias": bias}, np.array(data, dtype))
    assert found.tolist() == exact


#: NaN with each of the bits that a bfloat16 lacks, with all of them, and infinity.
BITS = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cast__to_bfloat16_keeps_nan(dtype):
    whole = np.array(BITS, "uint32").view("float32")
    data = {
        "float16": np.array([0x7C01, 0x7FFF, 0xFC01, 0x7C00, 0x3C00], "uint16").view("float16"),
        "float32": np.append(whole, np.float32(1.5)),
        "float64": np.array([(1 << 63) - 1, 0x7FF << 52 | 1, 0x7FF << 52], "uint64").view(
            "float64"
        ),
    }[dtype]
    found = compute("Cast", {"to": TensorProto.BFLOAT16}, data).astype("float64")
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, data.astype("float64"))


#: Operators of bfloat16 for which TVM has no code: (operator, attributes, constants)
NARROW = (
    ("Clip", {}, {"low": np.array(-0.5), "high": np.array(1.0)}),
    ("Pad", {}, {"pads": np.array([0, 1, 2, 1]), "value": np.array(1.5)}),
    ("Pad", {"mode": "reflect"}, {"pads": np.array([0, 1, 0, 1])}),
    ("ArgMax", {"axis": 1}, {}),
    ("ArgMin", {"axis": -1, "select_last_index": 1}, {}),
    ("Hardmax", {"axis": 0}, {}),
)


@pytest.mark.parametrize(("op", "attributes", "constants"), NARROW, ids=[row[0] for row in NARROW])
def test_bfloat16__as_the_reference_evaluator(op, attributes, constants):
    data = np.random.default_rng(0).standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
    weights = {
        name: each.astype(ml_dtypes.bfloat16) if each.dtype.kind == "f" else each
        for name, each in constants.items()
    }
    node = helper.make_node(op, ["x", *constants], ["y"], **attributes)
    model = make_onnx([node], {"x": data}, "y", weights, 18)
    mod, _ = rq.load(model)
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data)).numpy()
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": data})
    np.testing.assert_array_equal(found.astype("float64"), wanted.astype("float64"))


#: (operator, attributes, constants after the data)
BOUNDS = (
    ("Relu", {}, ()),
    ("LeakyRelu", {}, ()),
    ("PRelu", {}, (0.1,)),
    ("HardSigmoid", {}, ()),
    ("HardSwish", {}, ()),
    ("Elu", {}, ()),
    ("Celu", {}, ()),
    ("Selu", {}, ()),
    ("Sign", {}, ()),
    ("Clip", {}, (-1.0, 1.0)),
    ("Clip", {}, (0.0, 6.0)),
    ("Max", {}, (0.5,)),
    ("Min", {}, (0.5,)),
    ("Max", {}, ()),
    ("Min", {}, ()),
)


@pytest.mark.parametrize("at", range(len(BOUNDS)))
def test_bounds__keep_nan_as_onnx_runtime(at):
    op, attributes, numbers = BOUNDS[at]
    x = np.float32([1, -2, np.nan, 0.5, -0.25, np.inf, 7, np.nan])
    data = {"x": x} if numbers or op not in ("Max", "Min") else {"x": x, "z": x[::-1].copy()}
    constants = {f"c{k}": np.float32(number) for k, number in enumerate(numbers)}
    node = helper.make_node(op, [*data, *constants], ["y"], **attributes)
    model = make_onnx([node], data, {"y": x.shape}, constants, 18)
    (want,) = run_onnxruntime(model, data, rewrites=False)
    mod, _ = rq.load(model)
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    given = [tvm.runtime.tensor(array) for array in data.values()]
    for found in (machine["main"](*given).numpy(), rq.reference.run(mod, data)[0]):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["Sign", "Max", "Min"])
def test_narrow_bounds__keep_nan_as_numpy(op, dtype):
    narrow = TYPES[dtype]
    x = np.array([1, -2, np.nan, 0.5, -0.0, np.inf, 7, np.nan], narrow)
    data = {"x": x} if op == "Sign" else {"x": x, "z": x[::-1].copy()}
    node = helper.make_node(op, [*data], ["y"])
    model = make_onnx([node], data, {"y": x}, (), 18)
    function = {"Sign": np.sign, "Max": np.maximum, "Min": np.minimum}[op]
    with np.errstate(all="ignore"):
        want = function(*(array.astype("float32") for array in data.values()))
    mod, _ = rq.load(model)
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, data.values())).numpy()
    for found in (compiled, rq.reference.run(mod, data)[0]):
        assert found.dtype == narrow
        np.testing.assert_array_equal(found.astype("float32"), want)


#: Operators whose result TVM's own folding of constants would make a number.
FOLDED = [row for row in BOUNDS if row[0] not in ("Celu", "HardSwish", "PRelu")] + [
    ("ReduceMax", {}, ()),
    ("ReduceMin", {}, ()),
    ("ArgMax", {}, ()),
    ("Mul", {}, (0.0,)),
    ("Div", {}, (0.0,)),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("at", range(len(FOLDED)))
def test_constants__folded_with_nan_as_the_evaluator(at, dtype):
    op, attributes, numbers = FOLDED[at]
    x = np.array([1, -2, np.nan, 0.5, -0.25, np.inf, 7, np.nan], dtype)
    arrays = [x, *(np.array(c, dtype) for c in numbers)]
    arrays += [x[::-1].copy()] if op in ("Max", "Min") and not numbers else []
    constants = {f"c{k}": array for k, array in enumerate(arrays)}
    nodes = [
        helper.make_node(op, [*constants], ["v"], **attributes),
        helper.make_node("Cast", ["v"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "wide"], ["y"]),
    ]
    model = make_onnx(nodes, {"x": [1]}, "y", constants, 18)
    zero = np.zeros(1, "float32")
    with np.errstate(all="ignore"):
        (want,) = ReferenceEvaluator(model).run(None, {"x": zero})
    mod, params = rq.load(model)
    machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
    prepared = prepare_module(mod, params)
    names = [call_name(binding.value) for binding in prepared["main"].body.blocks[0].bindings]
    assert names == ["relax.add"]
    compiled = machine["main"](tvm.runtime.tensor(zero)).numpy()
    for found in (compiled, rq.reference.run(prepared, [zero])[0]):
        np.testing.assert_allclose(found, want, rtol=2e-3)
