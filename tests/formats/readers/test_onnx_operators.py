"""Operators of ONNX that are converted here: what becomes of them, and what is said of the rest."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx.shape_inference
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_graphs import describe
from onnx_graphs import make_model as make_drawn_model
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from test_onnx import (
    check_against_onnxruntime,
    draw,
    make_model,
    operators_of,
    run_imported,
)

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats import readers as importers
from relayquant.formats.readers import import_onnx
from relayquant.formats.readers.onnx.operators.table import OPERATORS

RAMP = np.arange(4, dtype="float32").reshape(1, 1, 1, 4)


def make_mixed_model(node, inputs, opset, weights=None):
    """A model of one node with inputs of any dtype: name -> array of that dtype and shape."""
    return make_onnx([node], inputs, node.output, weights or {}, opset)


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_upsample__repeats_each_element(opset):
    scales = np.array([1, 1, 1, 2], "float32")
    if opset == 7:
        node = helper.make_node("Upsample", ["x"], ["y"], scales=scales.tolist())
        model = make_model([node], {"x": [1, 1, 1, 4]}, opset=7)
    else:
        node = helper.make_node("Upsample" if opset == 9 else "Resize", ["x", "s"], ["y"])
        model = make_model([node], {"x": [1, 1, 1, 4]}, weights={"s": scales}, opset=opset)
    mod, _ = import_onnx(model)
    assert operators_of(mod) == ["relax.image.resize2d"]
    (found,) = run_imported(mod, {"x": RAMP})
    assert found.ravel().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.sample(4)
@pytest.mark.parametrize("coordinates", ["align_corners", "half_pixel", "pytorch_half_pixel"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize__axes_of_one_element(mode, coordinates):
    """An axis that has, or shall have, one element: the formulas must not divide by zero."""
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    node = helper.make_node("Resize", ["x", "", "", "s"], ["y"], **attrs)
    for shape, sizes in (((5, 7), (1, 1)), ((5, 7), (10, 1)), ((1, 7), (1, 14)), ((1, 7), (2, 1))):
        x = np.random.default_rng(0).standard_normal((1, 2, *shape)).astype("float32")
        weights = {"s": np.array([1, 2, *sizes])}
        model = make_model([node], {"x": x.shape}, weights=weights, opset=18)
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
        (found,) = run_imported(import_onnx(model)[0], {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_resize__of_symbolic_sizes_by_integers_is_one_operator(mode):
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode=mode)
    weights = {"s": np.array([1, 1, 2, 3], "float32")}
    model = make_model([node], {"x": ["N", 2, "H", "W"]}, weights=weights)
    mod, _ = import_onnx(model)
    assert operators_of(mod) == ["relax.image.resize2d"]


@pytest.mark.parametrize(
    ("node", "inputs", "opset", "message"),
    [
        (
            helper.make_node("Resize", ["x", "", "", "s"], ["y"]),
            {"x": RAMP, "s": np.array([1, 1, 2, 8])},
            13,
            "sizes are computed at run time; supported: constants",
        ),
        (
            helper.make_node("ReduceSum", ["x", "axes"], ["y"]),
            {"x": RAMP, "axes": np.array([1])},
            13,
            "axes are computed at run time; supported: constants.* inputs={'axes': value}",
        ),
        (
            helper.make_node("TopK", ["x", "k"], ["y", "at"]),
            {"x": RAMP, "k": np.array([1])},
            13,
            "k is computed at run time; supported: constants",
        ),
        (
            helper.make_node("OneHot", ["x", "n", "v"], ["y"]),
            {"x": RAMP, "n": np.array(3), "v": np.array([0, 1])},
            13,
            "depth is computed at run time; supported: constants",
        ),
        (
            helper.make_node("Slice", ["x", "a", "b", "axes"], ["y"]),
            {"x": RAMP, **dict.fromkeys(("a", "b", "axes"), np.array([1]))},
            13,
            "axes are computed at run time; supported: constants",
        ),
        (
            helper.make_node("RoiAlign", ["x", "r", "b"], ["y"], mode="max"),
            {"x": RAMP, "r": draw(1, 4), "b": np.array([0])},
            16,
            "mode is 'max'; supported: avg",
        ),
        (
            helper.make_node("Dropout", ["x", "r", "t"], ["y"]),
            {"x": RAMP, "r": np.array(0.5, "float32"), "t": np.array(True)},
            13,
            "training_mode is not false; supported: inference",
        ),
        (
            helper.make_node("BatchNormalization", [*"xsbmv"], [*"ypqrs"]),
            {"x": RAMP, **dict.fromkeys("sbmv", draw(1))},
            9,
            "its output '\\w+', number 2, is not computed; supported: output 1",
        ),
    ],
    ids=lambda value: value.op_type if hasattr(value, "op_type") else None,
)
def test_refused__says_why(node, inputs, opset, message):
    with pytest.raises(ModelError, match=rf"(?s)operator {node.op_type}.* {message}"):
        import_onnx(make_mixed_model(node, inputs, opset))


@pytest.mark.parametrize(
    "error", [KeyError("k"), IndexError(), AttributeError("'Var' has no 'value'")]
)
def test_refused__whatever_a_conversion_raises(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setitem(OPERATORS, "Tile", fail)
    node = helper.make_node("Tile", ["x", "n"], ["y"])
    model = make_mixed_model(node, {"x": RAMP, "n": np.array([1, 1, 1, 2])}, 13)
    with pytest.raises(ModelError) as raised:
        import_onnx(model)
    text = str(raised.value)
    assert "Node 'y' (operator Tile, opset 13)" in text
    assert "'x' (float32 of shape (1, 1, 1, 4)), 'n' (int64 of shape (4), at run time)" in text
    assert "supported: constants after the first operand" in text
    assert type(error).__name__ in text
    assert "inputs={'n': value}" in text


def test_conversions__raise_refusals_alone():
    refusals = {"Refusal", "NotConstant", "ModelError", "refuse", "refuse_source"}
    # a file's bytes; before there are nodes to name: it names them itself
    others = {"file.py", "rewrite.py"}
    for path in (Path(importers.__file__).parent / "onnx").rglob("*.py"):
        if path.name in others:
            continue
        raised = re.findall(r"raise (\w+)", path.read_text("utf-8"))
        assert set(raised) <= refusals | {"_Failed", "cause"}, path


@pytest.mark.parametrize("domain", ["com.microsoft", "my.own"])
@pytest.mark.parametrize("name", ["Pad", "Relu", "Split", "If"])
def test_foreign_operator__is_none_of_onnx(domain, name):
    node = helper.make_node(name, ["x"], ["y"], domain=domain)
    model = make_mixed_model(node, {"x": RAMP}, 13)
    model.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(ModelError, match=rf"Not supported, 1 operator .*{domain}.{name}"):
        import_onnx(model)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_pad__of_the_run_time(mode, dtype):
    x = (draw(2, 5, 4) * 10).astype(dtype)
    pads = np.array([0, 2, -1, 1, 3, 2])
    operands = {"x": x, "p": pads}
    if mode == "constant":
        operands["fill"] = np.array(7, dtype)
    node = helper.make_node("Pad", [*operands], ["y"], mode=mode)
    mod, _ = import_onnx(make_mixed_model(node, operands, 19))
    for shift in (0, 1):
        operands["p"] = pads - shift * np.array([0, 1, 1, 0, 0, 2])
        widths = np.maximum(operands["p"], 0).reshape(2, 3).T
        cropped = x[:, :, max(0, -operands["p"][2]) :]
        want = np.pad(
            cropped, widths, mode, **({"constant_values": 7} if mode == "constant" else {})
        )
        if mode == "wrap":  # of what is not cropped
            want = np.pad(x, widths, mode)[:, :, max(0, -operands["p"][2]) :]
        (found,) = run_imported(mod, operands)
        np.testing.assert_array_equal(found, want)


@pytest.mark.sample(4)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements__of_some_rows(axis, reduction):
    x, rng = draw(3, 4, 5), np.random.default_rng(1)
    shape = np.array([2, 3, 2])
    index = np.argsort(rng.random(shape), axis) - 1
    attrs = {} if reduction == "none" else {"reduction": reduction}
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis, **attrs)
    operands = {"x": x, "i": index, "u": draw(*shape)}
    model = make_mixed_model(node, operands, 18)
    (found,) = run_imported(import_onnx(model)[0], operands)
    (want,) = ReferenceEvaluator(model).run(None, operands)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_split__of_the_run_time():
    x = draw(3, 7)
    node = helper.make_node("Split", ["x", "n"], ["a", "b", "c"], axis=1)
    mod, _ = import_onnx(make_mixed_model(node, {"x": x, "n": np.array([1, 1, 1])}, 13))
    for sizes in ([2, 4, 1], [0, 7, 0]):
        found = run_imported(mod, {"x": x, "n": np.array(sizes)})
        for have, want in zip(found, np.split(x, np.cumsum(sizes)[:-1], 1), strict=True):
            np.testing.assert_array_equal(have, want)
    executor = rq.Executor(rq.compile(mod))
    for sizes in ([2, 4, 3], [1, 1, 1], [4, -1, 4], [8, -1, 0], [-1, 0, 8]):
        with pytest.raises(ValueError, match="sizes do not fit"):
            executor.run("main", [x, np.array(sizes)])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("is_constant", [False, True])
def test_pow__of_integers(dtype, is_constant):
    base = np.array([-3, -2, -1, 1, 2, 7], dtype)
    exponent = np.array([3, -1, -3, -2, 9, 0], dtype)
    node = helper.make_node("Pow", ["x", "n"], ["y"])
    weights = {"n": exponent} if is_constant else {}
    operands = {"x": base, **({} if is_constant else {"n": exponent})}
    mod, _ = import_onnx(make_mixed_model(node, operands, 13, weights))
    (found,) = run_imported(mod, operands)
    want = [int(Fraction(int(b)) ** int(e)) for b, e in zip(base, exponent, strict=True)]
    assert found.tolist() == want


def test_run_time_sizes__are_read():
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    model = make_mixed_model(node, {"x": draw(3, 1), "shape": np.array([1, 2])}, 13)
    mod, _ = import_onnx(model)
    data = draw(3, 1)
    for size in (1, 4):
        (found,) = run_imported(mod, {"x": data, "shape": np.array([1, size])})
        np.testing.assert_array_equal(found, np.broadcast_to(data, (3, size)))


def test_shape__of_symbolic_size_is_a_tensor():
    node = helper.make_node("Shape", ["x"], ["y"])
    model = make_model([node], {"x": ["N", 3]})
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    mod, _ = import_onnx(model)
    (found,) = run_imported(mod, {"x": draw(5, 3)})
    assert found.dtype == "int64"
    assert found.tolist() == [5, 3]


def test_body__values_are_named_after_the_output():
    node = helper.make_node("Swish", ["x"], ["y"], "gate", alpha=0.5)
    mod, _ = import_onnx(make_model([node], {"x": [2, 3]}, opset=24))
    names = [binding.var.name for binding in mod["main"].body.blocks[0].bindings]
    assert names[-1] == "y"
    assert all(name.startswith("y.") for name in names[:-1])


def quantize_node(nodes, shape, weights, opset):
    model = make_model(nodes, {"x": shape}, weights=weights, opset=opset)
    mod, _ = import_onnx(model)
    data = [{"x": draw(*shape)} for _ in range(4)]
    return rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF), data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "shape", "opset"),
    [
        (
            [
                helper.make_node("MatMul", ["x", "w"], ["q"]),
                helper.make_node(
                    "Attention", ["q", "x", "x"], ["y"], q_num_heads=2, kv_num_heads=2
                ),
            ],
            [1, 4, 8],
            23,
        ),
        (
            [
                helper.make_node("MatMul", ["x", "w"], ["q"]),
                helper.make_node("RMSNormalization", ["q", "scale"], ["y"], axis=0),
            ],
            [1, 4, 8],
            23,
        ),
        (
            [
                helper.make_node("MatMul", ["x", "w"], ["q"]),
                helper.make_node("Resize", ["q", "", "scales"], ["y"], mode="cubic"),
            ],
            [1, 2, 6, 8],
            18,
        ),
        (
            [
                helper.make_node("MatMul", ["x", "w"], ["q"]),
                helper.make_node("TopK", ["q", "k"], ["y", "at"]),
            ],
            [1, 4, 8],
            18,
        ),
    ],
    ids=["attention", "rms_normalization", "resize", "top_k"],
)
def test_quantize__of_what_is_expanded(nodes, shape, opset):
    weights = {
        "w": draw(8, 8),
        "scale": draw(8),
        "scales": np.array([1, 1, 1.5, 2], "float32"),
        "k": np.array([3]),
    }
    used = {name for node in nodes for name in node.input}
    qmod, data = quantize_node(
        nodes, shape, {name: value for name, value in weights.items() if name in used}, opset
    )
    rows = {row["op"]: row["quantized"] for row in rq.ledger(qmod).to_dict()["operators"]}
    assert any(rows.values())
    assert rq.verify(qmod, data[0]).is_equal


def ints(*values):
    return np.array(values, "int64")


#: Operator -> its operands behind the sizes, and its attributes.
READERS_OF_SIZES = {
    "Abs": ([], {}), "Add": ([ints(1)], {}), "ArgMax": ([], {}),
    "CumSum": ([np.array(0, "int64")], {}), "Div": ([ints(2)], {}), "Flatten": ([], {"axis": 0}),
    "GatherElements": ([ints(0, 1)], {}), "Greater": ([ints(2)], {}), "Identity": ([], {}),
    "Max": ([ints(3)], {}), "Mod": ([ints(3)], {}), "Mul": ([ints(2)], {}), "Neg": ([], {}),
    "OneHot": ([ints(5).reshape(()), np.float32([0, 1])], {}), "Pad": ([ints(1, 1)], {}),
    "Pow": ([ints(2)], {}), "ReduceProd": ([], {"keepdims": 0}), "ReduceSum": ([], {}),
    "ScatterElements": ([ints(0), ints(9)], {}), "Sign": ([], {}), "Split": ([ints(1, 2)], {}),
    "Sub": ([ints(1)], {}), "Tile": ([ints(2)], {}), "TopK": ([ints(1)], {}),
    "Transpose": ([], {}), "Unsqueeze": ([ints(0)], {}),
}  # fmt: skip


@pytest.mark.parametrize("op", READERS_OF_SIZES)
def test_sizes__are_operands_of_any_operator(op):
    """Of a symbolic batch: what ONNX Runtime computes for two sizes of it."""
    others, attrs = READERS_OF_SIZES[op]
    names = [f"c{i}" for i in range(len(others))]
    outputs = ["y", "z"] if op in ("Split", "TopK") else ["y"]
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node(op, ["s", *names], outputs, **attrs),
    ]
    x = np.zeros((2, 3, 4), "float32")
    model = make_drawn_model(
        nodes,
        [describe("x", x, "batch")],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in zip(names, others, strict=True)],
        18,
    )
    model = onnx.shape_inference.infer_shapes(model)
    mod, _ = import_onnx(model)
    for batch in (2, 5):
        data = {"x": np.zeros((batch, 3, 4), "float32")}
        for got, want in zip(
            rq.reference.run(mod, data), run_onnxruntime(model, data, rewrites=False), strict=True
        ):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("place", [None, "half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_roi_align__regions_are_scaled_then_moved(scale, place, opset):
    """From opset 16 on, half_pixel is the default."""
    runtime = pytest.importorskip("onnxruntime")
    if opset < 16 and place:
        pytest.skip("the attribute came with opset 16")
    inputs = {
        "x": draw(2, 3, 8, 7),
        "r": np.array([[2, 4, 21, 25], [1, 0.5, 3, 2], [-3, 0, 40, 30]], "float32"),
        "b": np.array([0, 1, 1]),
    }
    node = helper.make_node(
        "RoiAlign",
        ["x", "r", "b"],
        ["y"],
        output_height=2,
        output_width=3,
        sampling_ratio=2,
        spatial_scale=scale,
        **({"coordinate_transformation_mode": place} if place else {}),
    )
    model = make_mixed_model(node, inputs, opset)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    (expected,) = runtime.InferenceSession(model.SerializeToString()).run(None, inputs)
    (found,) = rq.reference.run(import_onnx(model)[0], inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def make_reverse_sequence(x, lengths, **axes):
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], **axes)
    model = make_mixed_model(node, {"x": x, "n": lengths}, 13)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    model.graph.output[0].type.tensor_type.elem_type = kind
    return model


@pytest.mark.parametrize("axes", [{}, {"batch_axis": 0, "time_axis": 1}])
@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_reverse_sequence__takes_steps_backwards(dtype, shape, axes):
    x, lengths = draw(*shape).astype(dtype), np.array([1, 4, 3, 2])
    model = make_reverse_sequence(x, lengths, **axes)
    mod = check_against_onnxruntime(model, {"x": x, "n": lengths})
    (computed,) = rq.reference.run(mod, [x, lengths])
    np.testing.assert_array_equal(computed, run_onnxruntime(model, {"x": x, "n": lengths})[0])


def test_reverse_sequence__of_other_batches_is_refused():
    """ONNX Runtime refuses it, too."""
    model = make_reverse_sequence(draw(4, 5, 3), np.array([1, 4, 3, 2]))
    with pytest.raises(ModelError, match="second input has size 4 along axis 0; allowed: 5, as ax"):
        import_onnx(model)


def test_gather_nd__of_other_batches_is_refused():
    node = helper.make_node("GatherND", ["x", "n"], ["y"], batch_dims=1)
    model = make_mixed_model(node, {"x": draw(3, 4), "n": np.zeros((2, 2, 1), "int64")}, 13)
    with pytest.raises(ModelError, match="second input has size 2 along axis 0; allowed: 3, as ax"):
        import_onnx(model)


def test_reverse_sequence__symbolic_sizes():
    for time, lengths in ((3, [3, 2]), (5, [1, 5, 4])):
        x, n = draw(time, len(lengths), 2), np.array(lengths)
        model = make_reverse_sequence(x, n)
        sizes = model.graph.input[0].type.tensor_type.shape.dim
        sizes[0].dim_param, sizes[1].dim_param = "T", "N"
        model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "N"
        check_against_onnxruntime(model, {"x": x, "n": n})
