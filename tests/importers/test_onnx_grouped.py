"""MatMulNBits and DequantizeLinear with blocks are read, and written: against ONNX Runtime and the
reference evaluator of onnx.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.importers.onnx.operators import FOREIGN
from relayquant.packing import count_bytes, count_groups, pack_codes
from relayquant.rewrite import Graph

runtime = pytest.importorskip("onnxruntime")
MICROSOFT = "com.microsoft"
ROWS = rq.QSpec("int8", rq.Scheme.SYMMETRIC, rq.Granularity.PER_ROW, is_dynamic=True)
AFFINE_ROWS = rq.QSpec("int8", rq.Scheme.AFFINE, rq.Granularity.PER_ROW, is_dynamic=True)


def make_file(path, nodes, tensors, shape, dtype=TensorProto.FLOAT):
    """A model of one input x and one output y."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path))
    return path


def draw(shape, seed=1):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def run_file(path, x):
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def list_operators(mod):
    graph = Graph(mod)
    return [graph.op_name(b.var).removeprefix("relax.") for b in graph.bindings]


# --- MatMulNBits ----------------------------------------------------------------------------------


def make_nbits(path, *, bits=4, size=16, features=40, zero=None, bias=False, rows=6, **attrs):
    rng = np.random.default_rng(0)
    groups = count_groups(features, size)
    codes = rng.integers(0, 1 << bits, (rows, groups, size))
    codes.reshape(rows, -1)[:, features:] = 0  # what fills the last group
    found = {
        "w": pack_codes(codes, bits),
        "s": rng.uniform(0.01, 0.1, rows * groups).astype("float32"),
    }
    zeros = rng.integers(0, 1 << bits, (rows, groups))
    if zero == "packed":
        found["z"] = pack_codes(zeros, bits).reshape(-1)
    elif zero == "float":
        found["z"] = zeros.reshape(-1).astype("float32")
    names = ["x", "w", "s", "z" if zero else "", ""]
    if bias:
        found["b"] = rng.normal(size=rows).astype("float32")
        names.append("b")
    while not names[-1]:
        names.pop()
    form = {"K": features, "N": rows, "bits": bits, "block_size": size, **attrs}
    node = helper.make_node("MatMulNBits", names, ["y"], name="n", domain=MICROSOFT, **form)
    tensors = [numpy_helper.from_array(array, name) for name, array in found.items()]
    return make_file(path, [node], tensors, ("n", features))


NBITS = [
    {"bits": bits, "zero": zero, "features": features, "size": size}
    for bits in (4, 8)
    for zero in (None, "packed")
    for features, size in ((64, 32), (40, 16), (16, 16))
] + [{"zero": "float"}, {"bias": True}, {"bits": 8, "bias": True, "zero": "packed"}]


@pytest.mark.parametrize("form", NBITS, ids=lambda form: "-".join(map(str, form.values())))
def test_nbits__gives_what_onnx_runtime_gives(tmp_path, form):
    path = make_nbits(tmp_path / "m.onnx", **form)
    mod, _ = rq.load(path)
    assert list_operators(mod)[0] == "qnn.grouped_dense"
    x = draw((5, form.get("features", 40)))
    found = rq.reference.run(mod, {"x": x})[0]
    np.testing.assert_allclose(found, run_file(path, x), rtol=1e-5, atol=1e-5)


#: message -> form of the node
REFUSED = {
    r"its weight has 5 bits; supported: 2, 4, 8": {"bits": 5},
    r"allowed with N=6, K=40, block_size=32: 192": {"size": 16, "block_size": 32},
    r"its attribute weight_prepacked is 1; supported: 0": {"weight_prepacked": 1},
    r"its attribute layout is 2; supported: none of that name": {"layout": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_nbits__refuses_by_name(tmp_path, message):
    with pytest.raises(ModelError, match=message):
        rq.load(make_nbits(tmp_path / "m.onnx", **REFUSED[message]))


@pytest.mark.parametrize("name", ["K", "N", "block_size"])
def test_nbits__what_is_missing_is_named(tmp_path, name):
    path = make_nbits(tmp_path / "m.onnx")
    model = onnx.load(str(path))
    kept = [attribute for attribute in model.graph.node[0].attribute if attribute.name != name]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    onnx.save(model, str(path))
    with pytest.raises(ModelError, match=f"Node 'n' .*: it has no attribute {name}; required"):
        rq.load(path)


def test_nbits__hints_and_defaults_change_nothing(tmp_path):
    plain = make_nbits(tmp_path / "a.onnx")
    said = make_nbits(tmp_path / "b.onnx", accuracy_level=4, weight_prepacked=0)
    x = draw((3, 40))
    one, two = (rq.reference.run(rq.load(path)[0], {"x": x})[0] for path in (plain, said))
    np.testing.assert_array_equal(one, two)


def test_foreign_operators__know_every_attribute_of_their_schema():
    """Whatever ONNX Runtime's own schema has is read, neutral by one value, or refused by name."""
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas = {s.name: s for s in state.get_all_operator_schema() if s.domain == MICROSOFT}
    for name, operator in FOREIGN[MICROSOFT].items():
        attributes = schemas[name].attributes
        assert {n for n, a in attributes.items() if a.required} <= set(operator.required)
        for attribute in {*attributes, "unheard_of"} - set(operator.known):
            given = {**dict.fromkeys(operator.required, 1), attribute: 77}
            with pytest.raises(ValueError, match=f"attribute {attribute} is 77"):
                operator.select_attributes(given)
        neutral = {**dict.fromkeys(operator.required, 1), **operator.neutral}
        assert not set(operator.select_attributes(neutral)) & set(operator.neutral)


def test_nbits__zero_points_that_do_not_fit_are_named(tmp_path):
    path = make_nbits(tmp_path / "m.onnx", zero="packed")
    model = onnx.load(str(path))
    (zero,) = [t for t in model.graph.initializer if t.name == "z"]
    zero.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(zero)[:-1], "z"))
    onnx.save(model, str(path))
    with pytest.raises(ModelError, match=r"zero points have 11 bytes; allowed: 12"):
        rq.load(path)


# --- DequantizeLinear with blocks -----------------------------------------------------------------


def make_integers(name, values, kind):
    if kind in ("int8", "uint8"):
        return numpy_helper.from_array(values.astype(kind), name)
    flat = pack_codes(values.reshape(-1) & 15, 4).tobytes()
    element = getattr(TensorProto, kind.upper())
    return helper.make_tensor(name, element, values.shape, flat, raw=True)


def make_blocks(path, *, kind="uint4", axis=0, has_zero=True, op="MatMul", size=16, features=48):
    """MatMul or Gather of a dequantized matrix; (K, N) with blocks along axis 0, else (N, K)."""
    rng, units = np.random.default_rng(0), 6
    low, high = {"uint4": (0, 16), "int4": (-8, 8), "uint8": (0, 256), "int8": (-128, 128)}[kind]
    shape = (features, units) if axis == 0 else (units, features)
    groups = tuple(-(-n // size) if i == axis else n for i, n in enumerate(shape))
    tensors = [
        make_integers("w", rng.integers(low, high, shape), kind),
        numpy_helper.from_array(rng.uniform(0.01, 0.1, groups).astype("float32"), "s"),
        *([make_integers("z", rng.integers(low, high, groups), kind)] if has_zero else []),
    ]
    inputs = ["w", "s", *(["z"] if has_zero else [])]
    nodes = [helper.make_node("DequantizeLinear", inputs, ["d"], "d", axis=axis, block_size=size)]
    if op == "Gather":
        nodes.append(helper.make_node("Gather", ["d", "x"], ["y"], "y", axis=0))
        return make_file(path, nodes, tensors, (3,), TensorProto.INT64)
    weight = "d"
    if axis == 1:
        nodes.append(helper.make_node("Transpose", ["d"], ["t"], "t", perm=[1, 0]))
        weight = "t"
    nodes.append(helper.make_node("MatMul", ["x", weight], ["y"], "y"))
    return make_file(path, nodes, tensors, ("n", features))


BLOCKS = [
    {"kind": kind, "axis": axis, "has_zero": has_zero}
    for kind in ("uint4", "int4", "uint8", "int8")
    for axis in (0, 1)
    for has_zero in (True, False)
]


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: "-".join(map(str, form.values())))
@pytest.mark.parametrize("op", ["MatMul", "Gather"])
def test_blocks__are_read_as_groups(tmp_path, form, op):
    path = make_blocks(tmp_path / "m.onnx", op=op, **form)
    mod, _ = rq.load(path)
    x = draw((2, 48)) if op == "MatMul" else np.array([2, 0, -1])
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    found = rq.reference.run(mod, {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if op == "MatMul" or form["axis"] == 1:
        (name,) = set(list_operators(mod)) & {"qnn.grouped_dense", "qnn.grouped_take"}
        assert name == ("qnn.grouped_dense" if op == "MatMul" else "qnn.grouped_take")
        assert list_operators(mod) == [name]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"alpha": 0.5, "beta": 2.0, "bias": (1, 6)},
        {"transA": 1, "bias": (6,)},
        {"beta": 0.25, "bias": ()},
    ],
    ids=str,
)
def test_blocks__of_gemm_are_read_as_groups(tmp_path, form, axis):
    """transB, as PyTorch exports a linear layer, or not; against the reference evaluator."""
    bias, form = form.get("bias"), {k: v for k, v in form.items() if k != "bias"}
    path = make_blocks(tmp_path / "m.onnx", axis=axis)
    model = onnx.load(str(path))
    kept = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    names = ["x", "d", *([] if bias is None else ["b"])]
    kept.append(helper.make_node("Gemm", names, ["y"], "y", transB=axis, **form))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    if bias is not None:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(draw(bias)), "b"))
    shape = model.graph.input[0].type.tensor_type.shape
    x = draw((2, 48))
    if form.get("transA"):
        x = np.ascontiguousarray(x.T)
        shape.dim[0].dim_value = 48
        shape.dim[1].dim_param = "n"
    onnx.save(model, str(path))
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    mod, _ = rq.load(path)
    np.testing.assert_allclose(rq.reference.run(mod, {"x": x})[0], expected, rtol=1e-5, atol=1e-5)
    found = list_operators(mod)
    assert "qnn.grouped_dense" in found
    assert "qnn.grouped_take" not in found


def test_blocks__what_is_no_product_is_exact_too(tmp_path):
    """The dequantized matrix is an output; blocks of another rank are refused with the reason."""
    path = make_blocks(tmp_path / "m.onnx")
    model = onnx.load(str(path))
    model.graph.output.append(helper.make_tensor_value_info("d", TensorProto.FLOAT, None))
    onnx.save(model, str(path))
    x = draw((2, 48))
    for one, two in zip(
        rq.reference.run(rq.load(path)[0], {"x": x}),
        ReferenceEvaluator(str(path)).run(None, {"x": x}),
        strict=True,
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


# --- there and back -------------------------------------------------------------------------------


def compress(path, **settings):
    """A product by a float weight, and one of a looked-up row, compressed."""
    rng = np.random.default_rng(3)
    weights = {"w": (48, 10), "u": (10, 7)}
    tensors = [
        numpy_helper.from_array(rng.normal(size=shape).astype("float32"), name)
        for name, shape in weights.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "h"),
        helper.make_node("MatMul", ["h", "u"], ["y"], "y"),
    ]
    mod, params = rq.load(make_file(path, nodes, tensors, ("n", 48)))
    return rq.compress_weights(mod, params, **settings)


SETTINGS = [
    {"bits": bits, "is_symmetric": is_symmetric, "group_size": size, "activation": activation}
    for bits in (2, 3, 4, 8)
    for is_symmetric, size, activation in ((True, 16, None), (False, 32, ROWS), (True, None, None))
] + [{"bits": 4, "is_symmetric": False, "group_size": 16, "activation": AFFINE_ROWS}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['bits']}-{s['group_size']}")
def test_export__runs_elsewhere_and_is_read_back(tmp_path, settings):
    q = compress(tmp_path / "f.onnx", **settings)
    x = draw((4, 48))
    expected = rq.reference.run(q, {"x": x})[0]
    size = np.abs(expected).max()
    for form in rq.GroupedForm:
        path = rq.export_onnx(q, tmp_path / "q.onnx", grouped=form)
        found = run_file(path, x)
        if form is rq.GroupedForm.BLOCKS:
            (same,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
            np.testing.assert_allclose(same, expected, rtol=1e-4, atol=1e-5 * size)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * size)
        # told that data may be int8, ONNX Runtime quantizes it by blocks, not by rows
        nearly = 0.05 if settings["activation"] else 1e-5
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=nearly * size)
        again = rq.load(path)[0]
        np.testing.assert_allclose(
            rq.reference.run(again, {"x": x})[0], expected, rtol=1e-4, atol=nearly * size
        )
        kinds = [node.op_type for node in onnx.load(str(path)).graph.node]
        has_nbits = form is rq.GroupedForm.NBITS and settings["group_size"] is not None
        assert ("MatMulNBits" in kinds) is has_nbits


def test_export__four_bits_take_half_a_byte(tmp_path):
    q = compress(tmp_path / "f.onnx", bits=4, group_size=16)
    for form in rq.GroupedForm:
        model = onnx.load(str(rq.export_onnx(q, tmp_path / "q.onnx", grouped=form)))
        sizes = {t.name: len(t.raw_data) for t in model.graph.initializer}
        assert sizes["h.weight"] == 48 * 10 // 2
        assert sizes["h.weight"] == count_bytes(48, 4) * 10
