"""Symbolic sizes that the graph of an ONNX model settles, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq
from relayquant.formats.readers.onnx.graph.fixed_sizes import fix_sizes, read_shape
from relayquant.ir.rewrite.graph import tensor_shape

RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def make_model(nodes, inputs, weights, results, opset=17) -> onnx.ModelProto:
    return make_onnx(nodes, inputs, results, weights, opset)


def read_input(mod) -> tuple[int | str, ...] | None:
    return tensor_shape(mod["main"].params[0])


def check_run(model: onnx.ModelProto, mod, x: np.ndarray) -> None:
    (want,) = run_onnxruntime(model, {"x": x})
    (got,) = rq.Executor(rq.compile(mod)).run("main", [x])
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "attrs", "weights", "shape", "expected"),
    [
        ("MatMul", {}, [(5, 7)], ("n", "k"), ("n", "5")),
        ("MatMul", {}, [(5,)], ("n", "k"), ("n", "5")),
        ("Gemm", {}, [(5, 7)], ("n", "k"), ("n", "5")),
        ("Gemm", {"transA": 1}, [(5, 7)], ("k", "n"), ("5", "n")),
        ("Gemm", {"transB": 1}, [(7, 5)], ("n", "k"), ("n", "5")),
        ("Conv", {}, [(4, 6, 3)], ("n", "c", "t"), ("n", "6", "t")),
        ("Conv", {"group": 3}, [(6, 2, 1)], ("n", "c", "t"), ("n", "6", "t")),
        ("ConvTranspose", {}, [(6, 2, 3)], ("n", "c", "t"), ("n", "6", "t")),
        ("LSTM", {"hidden_size": 2}, [(1, 8, 5), (1, 8, 2)], ("t", "n", "k"), ("t", "n", "5")),
        ("GRU", {"hidden_size": 2}, [(1, 6, 5), (1, 6, 2)], ("t", "n", "k"), ("t", "n", "5")),
        ("RNN", {"hidden_size": 2}, [(1, 2, 5), (1, 2, 2)], ("t", "n", "k"), ("t", "n", "5")),
        ("InstanceNormalization", {}, [(6,), (6,)], ("n", "c", "t"), ("n", "6", "t")),
        ("BatchNormalization", {}, [(6,)] * 4, ("n", "c", "t"), ("n", "6", "t")),
    ],
    ids=str,
)
def test_fix_sizes__of_the_input_of_an_operator(op, attrs, weights, shape, expected):
    """A size stays symbolic if no operator fixes it."""
    arrays = {f"w{at}": draw(*sizes) for at, sizes in enumerate(weights)}
    node = helper.make_node(op, ["x", *arrays], ["y"], **attrs)
    model = make_model([node], {"x": shape}, arrays, {"y": None})
    graph = model.graph
    (info,) = fix_sizes(graph.node, graph.initializer, [*graph.input], 17)
    assert tuple(map(str, read_shape(info) or ())) == expected
    assert read_shape(graph.input[0]) == [*shape]  # not changed


def test_fix_sizes__behind_other_operators():
    """Transposes, unsqueezes and slices are followed. One fixed size fixes the next."""
    weights = {"a": draw(5, 7), "axes": np.array([1]), "b": draw(9, 3)}
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0]),
        helper.make_node("Unsqueeze", ["turned", "axes"], ["deep"]),
        helper.make_node("MatMul", ["deep", "a"], ["product"]),
        helper.make_node("Transpose", ["product"], ["back"], perm=[2, 1, 0]),
        helper.make_node("MatMul", ["back", "b"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("k", "n")}, weights, {"y": None})
    mod, _ = rq.load(model)
    assert read_input(mod) == (5, 9)
    check_run(model, mod, draw(5, 9))


def test_fix_sizes__that_contradict_stay():
    """No size can run."""
    weights = {"a": draw(5, 7), "b": draw(6, 7)}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["one"], "first"),
        helper.make_node("MatMul", ["x", "b"], ["other"], "second"),
        helper.make_node("Add", ["one", "other"], ["y"]),
    ]
    graph = make_model(nodes, {"x": ("n", "k")}, weights, {"y": None}).graph
    (info,) = fix_sizes(graph.node, graph.initializer, [*graph.input], 17)
    assert read_shape(info) == ["n", "k"]


@pytest.mark.parametrize(
    ("op", "attrs", "shapes", "expected"),
    [
        ("Concat", {"axis": 1}, [("n", 3), ("m", 4), ("k", 1)], [("n", 3), ("n", 4), ("n", 1)]),
        ("Concat", {"axis": -1}, [("n", 3), (2, 4), ("k", 1)], [(2, 3), (2, 4), (2, 1)]),
        ("Concat", {"axis": 0}, [("n", "t"), ("m", "u")], [("n", "t"), ("m", "t")]),
        ("MatMul", {}, [("n", "k"), ("j", 4)], [("n", "k"), ("k", 4)]),
        ("Gemm", {"transB": 1}, [("n", "k"), (4, "j")], [("n", "k"), (4, "k")]),
    ],
    ids=str,
)
def test_fix_sizes__that_have_different_names(op, attrs, shapes, expected):
    """Converters name the batch of each input for itself. Sizes that must be equal are one."""
    inputs = {f"x{at}": shape for at, shape in enumerate(shapes)}
    nodes = [helper.make_node("Relu", [name], [f"{name}_positive"]) for name in inputs]
    node = helper.make_node(op, [f"{name}_positive" for name in inputs], ["y"], **attrs)
    model = make_model([*nodes, node], inputs, {}, {"y": ("p", "q")})
    mod, _ = rq.load(model)
    assert [tensor_shape(value) for value in mod["main"].params] == expected
    sizes = {"n": 2, "k": 3, "m": 5, "t": 6}
    arrays = [draw(*(sizes.get(str(size), size) for size in shape)) for shape in expected]
    given = dict(zip(inputs, arrays, strict=True))
    (want,) = run_onnxruntime(model, given)
    executor = rq.Executor(rq.compile(mod))
    np.testing.assert_allclose(executor.run("main", arrays)[0], want, rtol=1e-5, atol=1e-6)
    arrays[1] = np.concatenate([arrays[1]] * 2, axis=1 if op == "Gemm" or "m" in expected[1] else 0)
    with pytest.raises((rq.DataError, RuntimeError)):
        executor.run("main", arrays)


def test_fix_sizes__of_the_states_of_a_recurrence():
    """Their batch is that of the sequence."""
    shapes = {"x": ("t", "n", 5), "h": (1, "batch", 2)}
    weights = {"w": draw(1, 6, 5), "r": draw(1, 6, 2)}
    node = helper.make_node("GRU", ["x", "w", "r", "", "", "h"], ["y"], hidden_size=2)
    graph = make_model([node], shapes, weights, {"y": None}).graph
    found = fix_sizes(graph.node, graph.initializer, [*graph.input], 17)
    assert [read_shape(info) for info in found] == [["t", "n", 5], [1, "n", 2]]


@pytest.mark.parametrize("opset", [12, 17])
def test_squeeze__without_axes_keeps_symbolic_sizes(opset):
    """The declared result has one size: the symbolic one."""
    weights = {"w": draw(5, 1)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Squeeze", ["product"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("n", "k")}, weights, {"y": ("m",)}, opset)
    mod, _ = rq.load(model)
    assert read_input(mod) == ("n", 5)
    check_run(model, mod, draw(3, 5))


@pytest.mark.parametrize("opset", [11, 17])
def test_squeeze__of_a_symbolic_size_is_checked_at_run_time(opset):
    """5 to 9 samples make one window of 5. More are refused, as ONNX Runtime refuses them."""
    axes = {} if opset >= 13 else {"axes": [-1]}
    weights = {"w": draw(4, 1, 5)} | ({"axes": np.array([-1])} if opset >= 13 else {})
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["windows"], strides=[5]),
        helper.make_node("Squeeze", ["windows", *list(weights)[1:]], ["y"], **axes),
    ]
    model = make_model(nodes, {"x": ("b", 1, "n")}, weights, {"y": ("b", 4)}, opset)
    mod, _ = rq.load(model)
    for size in (5, 9):
        check_run(model, mod, draw(2, 1, size))
    executor = rq.Executor(rq.compile(mod))
    with pytest.raises(ValueError, match=r"sizes do not fit 'y.1', which must be \(b, 4, 1\)"):
        executor.run("main", [draw(2, 1, 10)])
    with pytest.raises(rq.DataError, match=r"\(2, 4, 2\); allowed: \(b, 4, 1\)"):
        rq.reference.run(mod, [draw(2, 1, 10)])


@pytest.mark.parametrize("bounds", [("low", "high"), ("low", ""), ("", "high")])
def test_clip__between_bounds_of_the_run(bounds):
    """They are operators with forms in every writer, not kernels of TVM."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["low"], keepdims=0),
        helper.make_node("Abs", ["low"], ["high"]),
        helper.make_node("Clip", ["x", *bounds], ["y"]),
    ]
    model = make_model(nodes, {"x": ("n", 3)}, {}, {"y": ("n", 3)})
    mod, _ = rq.load(model)
    assert "call_tir" not in mod.script()
    for rows in (1, 4):
        check_run(model, mod, draw(rows, 3))


def test_squeeze__without_axes_whose_result_has_another_rank():
    """The symbolic size would have to go: it is 1, or the declaration is wrong."""
    weights = {"w": draw(5, 4)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Squeeze", ["product"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("n", "k")}, weights, {"y": ("m",)})
    with pytest.raises(rq.ModelError, match=r"rank of its result 'y'.*shapes="):
        rq.load(model)
    mod, _ = rq.load(model, shapes={"x": (3, 5)})
    check_run(model, mod, draw(3, 5))


@pytest.mark.slow
def test_fix_sizes__beside_an_operator_of_another_domain():
    """ONNX infers nothing of a model that does not name the domain's version."""
    weights = {"w": draw(5, 7)}
    nodes = [
        helper.make_node("Gelu", ["x"], ["active"], domain="com.microsoft"),
        helper.make_node("MatMul", ["active", "w"], ["inner"]),
        helper.make_node("MatMul", ["x", "w"], ["outer"]),
        helper.make_node("Add", ["inner", "outer"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("n", "k")}, weights, {"y": ("n", 7)})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    mod, _ = rq.load(model)
    assert read_input(mod) == ("n", 5)
    check_run(model, mod, draw(3, 5))


def test_squeeze__the_name_of_its_axes_may_be_taken():
    weights = {"w": draw(5, 1), "y.axes": draw(1)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Squeeze", ["product"], ["flat"]),
        helper.make_node("Squeeze", ["product"], ["y"]),
        helper.make_node("Add", ["y", "y.axes"], ["z"]),
    ]
    model = make_model(nodes, {"x": ("n", "k")}, weights, {"z": ("n",)})
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n",)) for name in ("flat", "y")
    )
    check_run(model, rq.load(model)[0], draw(3, 5))
