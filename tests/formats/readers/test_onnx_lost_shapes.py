"""Shapes that Relax loses, a symbolic size against another one, are those that ONNX infers: every
operator that broadcasts, and those that need the shape of what was broadcast.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from onnx_models import make_onnx
from onnx_node_cases import TARGET
from onnx_runtime import run_onnxruntime
from tvm import relax

import relayquant as rq
from relayquant.formats.readers.onnx.operators.broadcast import ELEMENTWISE

RNG = np.random.default_rng(11)

BOOLS = ("And", "Or", "Xor")
BITS = ("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")

#: Sizes of two symbolic dimensions in one run.
RUNS = [(1, 4), (4, 1), (4, 4), (1, 1)]


def draw(op: str, shape) -> np.ndarray:
    if op in BOOLS:
        return RNG.random(shape) > 0.5
    if op in BITS:
        return RNG.integers(0, 7, shape).astype("uint8")
    return (np.abs(RNG.standard_normal(shape)) + 0.1).astype("float32")


def make_model(nodes, inputs, opset, weights=None, domains=()) -> onnx.ModelProto:
    """A model with inputs name -> (dtype, shape) and the output y; also of other domains."""
    model = make_onnx(nodes, inputs, "y", weights or {}, opset)
    return onnx.shape_inference.infer_shapes(model)


class Compiled:
    """A model that was loaded and compiled once, for inputs of any size."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.mod, _ = rq.load(model)
        self.machine = relax.VirtualMachine(rq.compile(self.mod, TARGET), tvm.cpu())

    def check(self, feeds: dict[str, np.ndarray]) -> None:
        """Compiled code and numpy as ONNX Runtime."""
        (want,) = run_onnxruntime(self.model, feeds)
        given = [tvm.runtime.tensor(feeds[param.name]) for param in self.mod["main"].params]
        for found in (self.machine["main"](*given).numpy(), rq.reference.run(self.mod, feeds)[0]):
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_broadcasts__every_operator_that_onnx_says_does():
    said = {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if schema.domain == "" and "multidirectional" in (schema.doc or "").lower()
    }
    assert said <= ELEMENTWISE
    assert ELEMENTWISE - said == {"PRelu"}  # unidirectional: the slope alone grows


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", sorted(ELEMENTWISE - {"Where", "PRelu"}))
def test_broadcasts__two_symbolic_sizes(op):
    attrs = {"Mod": {"fmod": 1}, "BitShift": {"direction": "LEFT"}}.get(op, {})
    node = helper.make_node(op, ["a", "b"], ["y"], **attrs)
    dtype = draw(op, ()).dtype
    compiled = Compiled(make_model([node], {"a": (dtype, ["N", 3]), "b": (dtype, ["M", 3])}, 18))
    for n, m in RUNS:
        compiled.check({"a": draw(op, (n, 3)), "b": draw(op, (m, 3))})


@pytest.mark.slow
def test_broadcasts__where():
    node = helper.make_node("Where", ["c", "a", "b"], ["y"])
    inputs = {
        "c": ("bool", ["K", 1]),
        "a": ("float32", ["N", 1, "A"]),
        "b": ("float32", ["M", 5]),
    }
    compiled = Compiled(make_model([node], inputs, 16))
    for k, a, m in itertools.product((1, 4), (1, 5), (1, 4)):
        feeds = {"c": draw("And", (k, 1)), "a": draw("", (2, 1, a)), "b": draw("", (m, 5))}
        compiled.check(feeds)


@pytest.mark.slow
def test_broadcasts__slope_and_batches():
    node = helper.make_node("PRelu", ["a", "b"], ["y"])
    inputs = {"a": ("float32", ["N", 3, 4]), "b": ("float32", ["M", 4])}
    compiled = Compiled(make_model([node], inputs, 16))
    for m in (1, 3):
        compiled.check({"a": -draw("", (2, 3, 4)), "b": draw("", (m, 4))})
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    inputs = {"a": ("float32", ["N", 3, "K"]), "b": ("float32", ["M", "K", 2])}
    compiled = Compiled(make_model([node], inputs, 13))
    for n, m in RUNS:
        compiled.check({"a": draw("", (n, 3, 5)), "b": draw("", (m, 5, 2))})


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_flattening__of_what_was_broadcast(op, axis):
    """Before opset 13 everything from the axis on is one row."""
    nodes = [helper.make_node("Add", ["a", "c"], ["s"]), helper.make_node(op, ["s"], ["y"])]
    nodes[1].attribute.append(helper.make_attribute("axis", axis))
    weights = {"c": draw("", (4, 3, 2))}
    compiled = Compiled(make_model(nodes, {"a": ("float32", ["N", 3, 2])}, 12, weights))
    for n in (1, 4):
        compiled.check({"a": draw("", (n, 3, 2))})


@pytest.mark.sample(3)
@pytest.mark.parametrize(("opset", "axis"), [(11, 0), (11, 2), (13, 0), (13, 1), (13, -1)])
def test_hardmax__of_rows_of_symbolic_length(opset, axis):
    """The first of equal values is hot."""
    model = make_model(
        [helper.make_node("Hardmax", ["a"], ["y"], axis=axis)],
        {"a": ("float32", ["N", "M", "K"])},
        opset,
    )
    compiled = Compiled(model)
    for sizes in ((2, 3, 4), (1, 1, 5)):
        compiled.check({"a": np.round(draw("", sizes))})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("op", ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
def test_reductions__of_integers_are_rounded_to_zero(op, dtype):
    node = helper.make_node(op, ["a"], ["y"], axes=[1], keepdims=0)
    data = np.random.default_rng(0).integers(1, 9, (3, 4)).astype(dtype)
    Compiled(make_model([node], {"a": (dtype, ["N", 4])}, 13)).check({"a": data})


def test_constant_of_shape__of_a_scalar():
    nodes = [
        helper.make_node("Shape", ["a"], ["sizes"]),
        helper.make_node("ConstantOfShape", ["sizes"], ["one"]),
        helper.make_node("Add", ["a", "one"], ["y"]),
    ]
    Compiled(make_model(nodes, {"a": ("float32", [])}, 13)).check({"a": np.asarray(draw("", ()))})


def test_gather__of_no_size_has_the_dtype_of_sizes():
    nodes = [
        helper.make_node("Shape", ["a"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "none"], ["y"]),
    ]
    weights = {"none": np.empty(0, "int32")}
    Compiled(make_model(nodes, {"a": ("float32", ["N", 3])}, 13, weights)).check(
        {"a": draw("", (2, 3))}
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Pad", ["s", "pads"], ["y"]),
        helper.make_node("Gather", ["s", "at"], ["y"], axis=1),
        helper.make_node("Reshape", ["s", "shape"], ["y"]),
        helper.make_node("Slice", ["s", "one", "two"], ["y"]),
        helper.make_node("LayerNormalization", ["s", "scale"], ["y"], axis=-1),
        helper.make_node("Flatten", ["s"], ["y"], axis=2),
        helper.make_node("Transpose", ["s"], ["y"]),
        helper.make_node("Concat", ["s", "s"], ["y"], axis=0),
        helper.make_node("ReduceMean", ["s"], ["y"], keepdims=0),
        helper.make_node("Shape", ["s"], ["y"]),
        helper.make_node("Softmax", ["s"], ["y"], axis=0),
        helper.make_node("Tile", ["s", "times"], ["y"]),
        helper.make_node("GlobalAveragePool", ["s"], ["y"]),
    ],
    ids=lambda node: node.op_type,
)
def test_operators__on_what_was_broadcast(node):
    weights = {
        "pads": np.array([0, 1, 0, 0, 0, 2]),
        "at": np.array([0, -1]),
        "shape": np.array([0, -1]),
        "one": np.array([1]),
        "two": np.array([3]),
        "scale": draw("", 4),
        "times": np.array([2, 1, 3]),
    }
    used = {name: weights[name] for name in node.input if name in weights}
    nodes = [helper.make_node("Mul", ["a", "b"], ["s"]), node]
    inputs = {"a": ("float32", ["N", 3, 1]), "b": ("float32", ["M", 1, 4])}
    compiled = Compiled(make_model(nodes, inputs, 17, used))
    for n, m in RUNS[:3]:
        compiled.check({"a": draw("", (n, 3, 1)), "b": draw("", (m, 1, 4))})


@pytest.mark.parametrize("sizes", [[2, 1, 1, 4], [1, 4], [3, 1]])
def test_expand__of_a_symbolic_size(sizes):
    node = helper.make_node("Expand", ["a", "sizes"], ["y"])
    inputs = {"a": ("float32", ["N", 3, "A"])}
    known = Compiled(make_model([node], inputs, 13, {"sizes": np.array(sizes)}))
    at_run = Compiled(make_model([node], {**inputs, "sizes": ("int64", [len(sizes)])}, 13))
    for n, a in ((2, 1), (2, sizes[-1]), (1, sizes[-1])):
        data = draw("", (n, 3, a))
        known.check({"a": data})
        at_run.check({"a": data, "sizes": np.array(sizes)})


def test_broadcast__of_sizes_that_do_not_fit():
    """ONNX Runtime refuses the run as well."""
    node = helper.make_node("Add", ["a", "b"], ["y"])
    inputs = {"a": ("float32", ["N", 3]), "b": ("float32", ["M", 3])}
    compiled = Compiled(make_model([node], inputs, 13))
    given = [tvm.runtime.tensor(draw("", (n, 3))) for n in (2, 3)]
    with pytest.raises(ValueError, match="sizes do not fit"):
        compiled.machine["main"](*given)


def test_broadcasts__a_size_that_is_never_one_is_the_size_of_the_result():
    nodes = [
        helper.make_node("Concat", ["a", "a"], ["twice"], axis=0),
        helper.make_node("Add", ["twice", "b"], ["y"]),
    ]
    inputs = {"a": ("float32", ["N", 3]), "b": ("float32", ["M", 3])}
    compiled = Compiled(make_model(nodes, inputs, 13))
    (size, _) = compiled.mod["main"].ret_ty.shape.values
    assert [var.name for var in tvm.tirx.analysis.undefined_vars(size)] == ["N"]
    for n, m in ((1, 1), (1, 2), (3, 1), (2, 4)):
        compiled.check({"a": draw("Add", (n, 3)), "b": draw("Add", (m, 3))})
    for n, m in ((2, 2), (1, 3), (1, 4)):
        given = [tvm.runtime.tensor(draw("", (size, 3))) for size in (n, m)]
        with pytest.raises(ValueError, match="sizes do not fit"):
            compiled.machine["main"](*given)


def test_broadcasts__behind_a_product_of_unknown_width():
    """max(N, C), which TVM's passes do not compile, is a size of the run time."""
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["m"]),
        helper.make_node("Add", ["m", "c"], ["s"]),
        helper.make_node("Mul", ["s", "c"], ["t"]),
        helper.make_node("Relu", ["t"], ["y"]),
    ]
    inputs = {
        "a": ("float32", ["M", "K"]),
        "b": ("float32", ["K", "N"]),
        "c": ("float32", ["C"]),
    }
    compiled = Compiled(make_model(nodes, inputs, 13))
    for n, c in ((5, 5), (5, 1), (1, 4)):
        compiled.check({"a": draw("", (2, 3)), "b": draw("", (3, n)), "c": draw("", (c,))})
