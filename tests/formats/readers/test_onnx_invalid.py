"""Models that are not valid ONNX, which ONNX Runtime refuses as well, and sizes that no memory
holds: refused by the name of the node.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.formats.readers.onnx.graph.inference import MAX_VALUE

SHAPE = (3, 4)
HUGE = 2**33


def ints(*values):
    return np.array(values, "int64")


def make_model(op, constants=(), *, opset=17, outputs=1, shape=SHAPE, dtype="float32", **attrs):
    """One node on x and constants; None is an operand left out."""
    names = ["" if array is None else f"c{at}" for at, array in enumerate(constants)]
    weights = {name: a for name, a in zip(names, constants, strict=True) if name}
    operands = names if op in ("ConstantOfShape", "Range") else ["x", *names]
    node = helper.make_node(op, operands, [f"y{at}" for at in range(outputs)], "here", **attrs)
    return make_onnx([node], {"x": (dtype, shape)}, node.output, weights, opset)


def is_refused_by_onnxruntime(model) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options)
    except Exception:
        return True
    return False


INVALID = {
    "Split of 3 into 2": (make_model("Split", outputs=2), "not evenly splittable"),
    "Split without sizes": (make_model("Split", opset=18, outputs=2), "num_outputs"),
    "attribute of a later opset": (
        make_model("ReduceSum", [ints(0)], noop=1), "Unrecognized attribute: noop"),
    "attribute of an earlier opset": (make_model("Clip", max=1.0), "Unrecognized attribute: max"),
    "attribute of another type": (make_model("Flatten", axis=1.0), "Mismatched attribute type"),
    "attribute that is missing": (make_model("Concat"), "Required attribute 'axis' is missing"),
    "operator of a later opset": (make_model("Gelu"), "No Op registered for Gelu"),
    "operator that is gone": (
        make_model("Upsample", [np.ones(2, "float32")]), "Upsample is deprecated"),
    "too many inputs": (make_model("Relu", [ints(0)]), "input size 2 not in range"),
    "too few inputs": (make_model("Add"), "input size 1 not in range"),
    "two types": (make_model("Add", [ints(1)]), "inconsistent type"),
    "type that it does not take": (make_model("Relu", dtype="bool"), "Relu|bool"),
    "sizes that do not fit": (make_model("Add", [np.ones((3, 3), "float32")]), "Incompatible dim"),
    "product that does not fit": (
        make_model("MatMul", [np.ones((3, 2), "float32")]), "Incompatible dim"),
    "reshape that does not fit": (make_model("Reshape", [ints(5, 5)]), "Reshape expects"),
    "permutation of another rank": (make_model("Transpose", perm=[0, 1, 2]), "perm"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid__as_onnx_runtime(name):
    model, says = INVALID[name]
    assert is_refused_by_onnxruntime(model) or name in NOT_BY_ONNX_RUNTIME
    with pytest.raises(ModelError, match=rf"(?s)Node 'here' \(operator \w+, opset \d+\).*({says})"):
        rq.load(model)


#: What ONNX Runtime notices only when it runs.
NOT_BY_ONNX_RUNTIME = ("reshape that does not fit",)


def test_invalid__declared_output():
    model = make_model("Relu")
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", TensorProto.INT32, SHAPE))
    assert is_refused_by_onnxruntime(model)
    says = "output 'y0' is declared as int32, and computed as float32"
    with pytest.raises(ModelError, match=says):
        rq.load(model)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    assert rq.load(model)[0]


@pytest.mark.parametrize("number", [0, 99])
def test_invalid__type_that_does_not_exist(number):
    model = make_model("Relu")
    model.graph.input[0].type.tensor_type.elem_type = number
    with pytest.raises(ModelError, match=rf"'x' has the data type {number}; allowed: .* 1 to \d+"):
        rq.load(model)
    model = make_model("Add", [np.ones(4, "float32")])
    model.graph.initializer[0].data_type = number
    with pytest.raises(ModelError, match=rf"'c0' has the data type {number}; allowed"):
        rq.load(model)


@pytest.mark.parametrize("domain", ["com.microsoft", "mine"])
def test_valid__other_domains_are_not_looked_at(domain):
    """The checker of onnx knows nothing of them; a function of the model is its own definition."""
    node = helper.make_node("BiasGelu", ["x", "b"], ["y"], domain=domain)
    model = make_onnx([node], {"x": [3, 4], "b": [4]}, "y", (), 20)
    if domain == "mine":
        body = [helper.make_node("Add", ["x", "b"], ["s"]), helper.make_node("Gelu", ["s"], ["y"])]
        model.functions.append(
            helper.make_function(
                "mine", "BiasGelu", ["x", "b"], ["y"], body, model.opset_import[:1]
            )
        )
    assert rq.load(model)[0]


#: Operators whose result has a size that an operand or an attribute says.
LARGE = {
    "Pad": make_model("Pad", [ints(0, 0, 0, HUGE)]),
    "Pad (attribute)": make_model("Pad", opset=10, pads=[0, 0, 0, HUGE]),
    "Expand": make_model("Expand", [ints(HUGE, 1, 1)]),
    "Tile": make_model("Tile", [ints(1, HUGE)]),
    "ConstantOfShape": make_model("ConstantOfShape", [ints(HUGE)]),
    "ConstantOfShape (2-d)": make_model("ConstantOfShape", [ints(2**17, 2**17)]),
    "Range": make_model("Range", [np.array(0), np.array(HUGE), np.array(1)]),
    "Resize": make_model("Resize", [None, np.array([1, 1, 1e6, 1e6], "float32")],
                         shape=(1, 1, 4, 4)),
    "Resize (sizes)": make_model("Resize", [None, None, ints(1, 1, 2**17, 2**17)],
                                 shape=(1, 1, 4, 4)),
    "OneHot": make_model("OneHot", [np.array(HUGE), np.array([0, 1], "float32")], dtype="int64"),
    "ConvTranspose": make_model("ConvTranspose", [np.ones((1, 1, 3, 3), "float32")],
                                shape=(1, 1, 4, 4), strides=[2**16, 2**16]),
    "Conv": make_model("Conv", [np.ones((1, 1, 3, 3), "float32")], shape=(1, 1, 4, 4),
                       pads=[2**17] * 4),
    "Add": make_model("Add", [np.ones((2**17, 1), "float32")], shape=(2**17,)),
    "MatMul": make_model("MatMul", [np.ones((1, 2**17), "float32")], shape=(2**17, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large__refused_before_memory_is_asked_for(name):
    says = rf"Node 'here' .*(its result has the shape .*supported: {MAX_VALUE}|elements; supported)"
    with pytest.raises(ModelError, match=says):
        rq.load(LARGE[name])


def test_large__pads_that_fit():
    assert rq.load(make_model("Pad", [ints(0, 0, 0, 2**20)]))[0]


@pytest.mark.parametrize(
    ("op", "names", "attributes", "says"),
    [
        ("Concat", ["a", "b"], {}, "'axis'"),
        ("Concat", ["a", "b"], {"axis": "x"}, "axis"),
        ("MatMul", ["a"], {}, "min"),
        ("Conv", ["a"], {}, "min"),
        ("Concat", ["a", "", "b"], {"axis": 0}, "its operand 1 is left out; allowed"),
        ("Sum", ["a", ""], {}, "its operand 1 is left out; allowed"),
        ("Max", ["", "a"], {}, "its operand 0 is left out; allowed"),
        ("Add", ["a", ""], {}, "input 1 is marked single"),
    ],
)
def test_invalid__operands_and_attributes_beside_symbolic_sizes(op, names, attributes, says):
    inputs = dict.fromkeys(sorted({*names} - {""}), ("n", 3, 4))
    node = helper.make_node(op, names, ["y"], "here", **attributes)
    model = make_onnx([node], inputs)
    with pytest.raises(ModelError, match=rf"Node 'here'.*{says}.*RQ202"):
        rq.load(model)


def make_window_model(op, sizes, kernel, stride=1, pad=0):
    """A convolution or pool over (1, 2, *sizes); a name is a symbolic size."""
    rank = len(sizes)
    attrs = {
        "kernel_shape": [kernel] * rank,
        "strides": [stride] * rank,
        "pads": [pad] * 2 * rank,
    }
    weights = [np.ones((3, 2, *[kernel] * rank), "float32")] if "Conv" in op else []
    if op == "ConvTranspose":
        weights = [np.ones((2, 3, *[kernel] * rank), "float32")]
    return make_model(op, weights, opset=18, shape=(1, 2, *sizes), **attrs)


@pytest.mark.parametrize(
    ("sizes", "stride", "pad"),
    [((2,), 1, 0), ((5, 2), 1, 0), ((2, 5), 2, 0), ((1, 5), 1, 0), ((1, 1), 1, 0)],
)
def test_invalid__a_kernel_wider_than_the_data(sizes, stride, pad):
    model, data = make_window_model("Conv", sizes, 3, stride, pad), np.ones((1, 2, *sizes))
    with pytest.raises(Exception, match="Invalid input shape"):
        run_onnxruntime(model, {"x": data.astype("float32")})
    with pytest.raises(ModelError, match=r"'here' .*kernel_shape \[3.* is wider than data of \["):
        rq.load(model)


@pytest.mark.parametrize("op", ["Conv", "MaxPool", "AveragePool"])
@pytest.mark.parametrize("stride", [1, 2])
def test_invalid__a_window_wider_than_data_of_a_symbolic_size(op, stride):
    """ONNX Runtime refuses the convolution. Of pools it makes a result without elements, or the
    window that it has none of with stride 1.
    """
    mod, _ = rq.load(make_window_model(op, (5, "W"), 3, stride))
    executor = Executor(rq.compile(mod))
    for width in (0, 1, 2):
        x = np.ones((1, 2, 5, width), "float32")
        with pytest.raises(ValueError, match="their sizes do not fit 'y0', which"):
            executor.run("main", [x])
        with pytest.raises(ModelError, match=r"value 'y0'.* leaves nothing of"):
            rq.reference.run(mod, {"x": x})
    x = np.ones((1, 2, 5, 3), "float32")
    (want,) = run_onnxruntime(make_window_model(op, (5, 3), 3, stride), {"x": x})
    np.testing.assert_allclose(executor.run("main", [x])[0], want)
