"""MatMulNBits and DequantizeLinear with blocks are read, and written: against ONNX Runtime and the
reference evaluator of onnx.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from operator_names import list_operators
from tvm import relax

import relayquant as rq
from relayquant.base.packing import count_bytes, count_groups, pack_codes, unpack_codes
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.formats.readers.onnx.foreign.table import FOREIGN, OF_FRONTEND
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite import Graph

pytest.importorskip("onnxruntime")
MICROSOFT = "com.microsoft"
GROUPS = rq.QSpec(
    "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_GROUP, is_dynamic=True
)
ROWS = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)
AFFINE_ROWS = rq.QSpec(
    "int8", rq.config.Scheme.AFFINE, rq.config.Granularity.PER_ROW, is_dynamic=True
)


def make_file(path, nodes, tensors, shape, dtype="float32"):
    """A model of one input x and one output y."""
    onnx.save(make_onnx(nodes, {"x": (dtype, shape)}, {"y": None}, tensors, 21), str(path))
    return path


def draw(shape, seed=1):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def run_file(path, x):
    return run_onnxruntime(path, {"x": x}, rewrites=False)[0]


# --- MatMulNBits ----------------------------------------------------------------------------------


def order_columns(rng, order, features, size):
    """A group for each column: shuffled; or so that the first group is the one that is not full."""
    groups = np.arange(features, dtype="int32") // size
    if order == "short_first":
        groups = groups.max() - groups
    return rng.permutation(groups)


def make_nbits(
    path, *, bits=4, size=16, features=40, zero=None, order=None, bias=False, rows=6, **attrs
):
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
    elif zero == "fractions":
        found["z"] = rng.uniform(-2, (1 << bits) + 1, rows * groups).astype("float32")
    if order is not None:
        found["g"] = order_columns(rng, order, features, size)
    names = ["x", "w", "s", "z" if zero else "", "g" if order is not None else ""]
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
] + [
    {"zero": "float"},
    {"bias": True},
    {"bits": 8, "bias": True, "zero": "packed"},
    {"bits": 8, "zero": "fractions"},
    {"zero": "fractions", "bias": True},
    {"zero": "fractions", "features": 64, "size": 32},
    {"order": "shuffled"},
    {"order": "short_first", "zero": "packed"},
    {"order": "shuffled", "zero": "fractions", "bias": True},
    {"bits": 8, "order": "shuffled", "zero": "packed", "features": 64, "size": 32},
    {"bits": 2, "zero": "packed", "features": 64},
    {"bits": 2},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", NBITS, ids=lambda form: "-".join(map(str, form.values())))
def test_nbits__gives_what_onnx_runtime_gives(tmp_path, form):
    path = make_nbits(tmp_path / "m.onnx", **form)
    mod, _ = rq.load(path)
    names = list_operators(mod)
    assert "qnn.grouped_dense" in names[:2]
    assert ("matmul" in names) is (form.get("zero") == "fractions")
    x = draw((5, form.get("features", 40)))
    expected = multiply_by_definition(path, x)
    if form not in UNLIKE:
        np.testing.assert_allclose(run_file(path, x), expected, rtol=1e-5, atol=2e-5)
    for found in (
        rq.reference.run(mod, {"x": x})[0],
        Executor(rq.compile(mod)).run("main", [x])[0],
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


#: Forms that ONNX Runtime's CPU code refuses; of the second, it takes the middle for zero points.
UNLIKE = [
    {"bits": 8, "zero": "fractions"},
    {"order": "short_first", "zero": "packed"},
    {"bits": 8, "order": "shuffled", "zero": "packed", "features": 64, "size": 32},
]


def multiply_by_definition(path, x):
    """x @ w^T with w[n, k] = (codes[n, k] - zeros[n, group of k]) * scales[n, group of k]."""
    (node,) = (graph := onnx.load(str(path)).graph).node
    form = {one.name: one.i for one in node.attribute}
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rows, features, bits = form["N"], form["K"], form["bits"]
    groups = count_groups(features, form["block_size"])
    codes = unpack_codes(found["w"].reshape(rows, -1), bits, features).astype("float64")
    zeros = found.get("z", np.full(rows * groups, 1 << (bits - 1), "float32"))
    if zeros.dtype == np.uint8:
        zeros = unpack_codes(zeros.reshape(rows, -1), bits, groups)
    of = found.get("g", np.arange(features) // form["block_size"])
    zeros, scales = (each.reshape(rows, groups)[:, of] for each in (zeros, found["s"]))
    return x @ ((codes - zeros) * scales).T + found.get("b", 0)


def test_nbits__of_float16(tmp_path):
    """Data, scales and result are float16; the scales stay so."""
    model = onnx.load(str(make_nbits(tmp_path / "m.onnx", zero="packed", bias=True)))
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).astype("float16")
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, str(tmp_path / "m.onnx"))
    x = draw((5, 40)).astype("float16")
    mod, _ = rq.load(tmp_path / "m.onnx")
    (found,) = rq.reference.run(mod, {"x": x})
    assert found.dtype == np.float16
    np.testing.assert_allclose(
        found.astype("float32"), run_file(tmp_path / "m.onnx", x).astype("float32"), rtol=5e-3,
        atol=5e-3,
    )  # fmt: skip
    graph = Graph(mod)
    (product,) = [b for b in graph.bindings if "grouped_dense" in graph.op_name(b.var)]
    assert str(graph.call_of(product.var).args[3].ty.dtype) == "float16"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0] * 17 + [1] * 15 + [2] * 8, r"g_idx has groups of \[8, 15, 17\]; allowed: 16 each"),
        ([0] * 16 + [1] * 16 + [3] * 8, r"entries up to 3; allowed: 40 from 0 to 2"),
    ],
)
def test_nbits__groups_that_are_none_are_named(tmp_path, groups, message):
    model = onnx.load(str(make_nbits(tmp_path / "m.onnx", order="shuffled")))
    (order,) = [tensor for tensor in model.graph.initializer if tensor.name == "g"]
    order.CopyFrom(numpy_helper.from_array(np.array(groups, "int32"), "g"))
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match=message):
        rq.load(tmp_path / "m.onnx")


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
        least = {**dict.fromkeys(operator.required, 1), OF_FRONTEND: {"num_outputs": 1}}
        for attribute in {*attributes, "unheard_of"} - set(operator.known):
            given = {**least, attribute: 77}
            with pytest.raises(ValueError, match=f"attribute {attribute} is 77"):
                operator.select_attributes(given)
        neutral = {**least, **operator.neutral}
        assert not set(operator.select_attributes(neutral)) & set(operator.neutral)


def test_nbits__zero_points_that_do_not_fit_are_named(tmp_path):
    path = make_nbits(tmp_path / "m.onnx", zero="packed")
    model = onnx.load(str(path))
    (zero,) = [t for t in model.graph.initializer if t.name == "z"]
    zero.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(zero)[:-1], "z"))
    onnx.save(model, str(path))
    with pytest.raises(ModelError, match=r"zero points have 11 bytes; allowed: 12"):
        rq.load(path)


# --- MatMulBnb4 -----------------------------------------------------------------------------------


def make_bnb4(path, *, kind=0, size=16, features=24, rows=6, **attrs):
    rng = np.random.default_rng(0)
    found = {
        "w": rng.integers(0, 256, (rows * features + 1) // 2).astype("uint8"),
        "s": rng.uniform(0.5, 2, -(-rows * features // size)).astype("float32"),
    }
    form = {"K": features, "N": rows, "block_size": size, "quant_type": kind, **attrs}
    node = helper.make_node("MatMulBnb4", ["x", *found], ["y"], name="n", domain=MICROSOFT, **form)
    tensors = [numpy_helper.from_array(array, name) for name, array in found.items()]
    return make_file(path, [node], tensors, ("n", features))


@pytest.mark.parametrize("kind", [0, 1], ids=["fp4", "nf4"])
@pytest.mark.parametrize(("features", "size"), [(24, 16), (64, 32), (16, 64)])
def test_bnb4__gives_what_onnx_runtime_gives(tmp_path, kind, features, size):
    path = make_bnb4(tmp_path / "m.onnx", kind=kind, features=features, size=size)
    x = draw((5, features))
    found = rq.reference.run(rq.load(path)[0], {"x": x})[0]
    np.testing.assert_allclose(found, run_file(path, x), rtol=1e-5, atol=1e-5)


#: message -> form of the node
BNB4_REFUSED = {
    r"operator MatMulBnb4\) .*attribute transB is 0; supported: 1": {"transB": 0},
    r"operator MatMulBnb4\) .*quant_type is 2; allowed: 0": {"kind": 2},
    r"operator MatMulBnb4\) .*attribute layout is 1; supported: none": {"layout": 1},
    r"has 72 bytes and 9 blocks; allowed with N=6, K=24, block_size=32: 72 and 5": {
        "block_size": 32
    },
}


@pytest.mark.parametrize("message", BNB4_REFUSED)
def test_bnb4__refuses_by_name(tmp_path, message):
    with pytest.raises(ModelError, match=message):
        rq.load(make_bnb4(tmp_path / "m.onnx", **BNB4_REFUSED[message]))


# --- GatherBlockQuantized -------------------------------------------------------------------------


def make_gather(path, *, kind, bits=4, shape=(7, 40), axes=(0, 1), size=16, zero=False, index=(3,)):
    """`axes`: of the look-up, of the blocks."""
    rng = np.random.default_rng(0)
    low, high = (-8, 8) if kind == "int4" else (0, 1 << bits)
    groups = tuple(-(-n // size) if at == axes[1] else n for at, n in enumerate(shape))
    tensors = []
    for name, form in (("w", shape), *([("z", groups)] if zero else [])):
        values = rng.integers(low, high, form)
        if kind == "packed":
            tensors.append(numpy_helper.from_array(pack_codes(values, bits), name))
        else:
            tensors.append(make_integers(name, values, kind))
    scale = rng.uniform(0.01, 0.1, groups).astype("float32")
    tensors.append(numpy_helper.from_array(scale, "s"))
    form = {"gather_axis": axes[0], "quantize_axis": axes[1], "block_size": size, "bits": bits}
    names = ["w", "x", "s", *(["z"] if zero else [])]
    node = helper.make_node("GatherBlockQuantized", names, ["y"], "n", domain=MICROSOFT, **form)
    return make_file(path, [node], tensors, index, TensorProto.INT64)


GATHERS = [
    *({"kind": "packed", "bits": bits, "zero": zero} for bits in (2, 4, 8) for zero in (0, 1)),
    *({"kind": kind, "zero": zero} for kind in ("uint4", "int4") for zero in (0, 1)),
    {"kind": "uint4", "axes": (1, 0), "shape": (40, 7)},
    {"kind": "int4", "axes": (1, 1), "zero": 1},
    {"kind": "int4", "shape": (5, 3, 24), "axes": (0, 2), "zero": 1},
    {"kind": "uint4", "shape": (5, 20, 4), "axes": (2, 1)},
    {"kind": "packed", "shape": (5, 3, 24), "axes": (0, 2), "zero": 1},
    {"kind": "packed", "index": (2, 3), "size": 32},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", GATHERS, ids=lambda form: "-".join(map(str, form.values())))
def test_gather_blocks__gives_what_onnx_runtime_gives(tmp_path, form):
    path = make_gather(tmp_path / "m.onnx", **form)
    x = np.resize(np.array([2, 0, -1]), form.get("index", (3,)))
    mod, _ = rq.load(path)
    expected = run_file(path, x)
    for found in (
        rq.reference.run(mod, {"x": x})[0],
        Executor(rq.compile(mod)).run("main", [x])[0],
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if len(form.get("shape", (7, 40))) == 2 and form.get("axes", (0, 1)) == (0, 1):
        assert "qnn.grouped_take" in list_operators(mod)


def test_gather_blocks__refuses_by_name(tmp_path):
    path = make_gather(tmp_path / "m.onnx", kind="packed")
    model = onnx.load(str(path))
    node = model.graph.node[0]
    for attribute, value, message in (
        ("bits", 3, "uint8 data has bits=3"),
        ("quantize_axis", 0, "quantize_axis=0; supported"),
        ("layout", 1, "attribute layout is 1; supported: none of that name"),
    ):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        kept = [one for one in node.attribute if one.name != attribute]
        del changed.graph.node[0].attribute[:]
        changed.graph.node[0].attribute.extend([*kept, helper.make_attribute(attribute, value)])
        with pytest.raises(ModelError, match=rf"operator GatherBlockQuantized\) .*{message}"):
            rq.load(changed)


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
] + [
    {"bits": 4, "is_symmetric": is_symmetric, "group_size": 16, "activation": activation}
    for is_symmetric, activation in ((False, AFFINE_ROWS), (True, GROUPS))
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['bits']}-{s['group_size']}")
def test_export__runs_elsewhere_and_is_read_back(tmp_path, settings):
    q = compress(tmp_path / "f.onnx", **settings)
    x = draw((4, 48))
    expected = rq.reference.run(q, {"x": x})[0]
    size = np.abs(expected).max()
    for form in rq.config.GroupedForm:
        path = rq.export_onnx(q, tmp_path / "q.onnx", grouped=form)
        found = run_file(path, x)
        if form is rq.config.GroupedForm.BLOCKS:
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
        has_nbits = form is rq.config.GroupedForm.NBITS and settings["group_size"] is not None
        assert ("MatMulNBits" in kinds) is has_nbits


def test_export__four_bits_take_half_a_byte(tmp_path):
    q = compress(tmp_path / "f.onnx", bits=4, group_size=16)
    for form in rq.config.GroupedForm:
        model = onnx.load(str(rq.export_onnx(q, tmp_path / "q.onnx", grouped=form)))
        sizes = {t.name: len(t.raw_data) for t in model.graph.initializer}
        assert sizes["h.weight"] == 48 * 10 // 2
        assert sizes["h.weight"] == count_bytes(48, 4) * 10


@pytest.mark.parametrize("form", rq.config.GroupedForm)
def test_export__levels_are_codes_of_eight_bits(tmp_path, form):
    """ONNX has no levels."""
    rng, levels = np.random.default_rng(0), (*range(0, 256, 17),)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 64), "float32"))
    codes = rng.integers(0, 256, (5, 32)).astype("uint8")
    parts = codes, rng.normal(size=(5, 2)).astype("float32"), np.array(128, "uint8")
    with builder.function("main", [x]):
        with builder.dataflow():
            constants = [relax.const(part) for part in parts]
            call = qnn.grouped_dense(x, 1.0, *constants, 4, 32, 64, levels)
            y = builder.emit_output(builder.emit(call, "product"))
        builder.emit_func_output(y)
    mod, data = builder.finalize(), rng.normal(size=(2, 64)).astype("float32")
    path = rq.export_onnx(mod, tmp_path / "q.onnx", grouped=form)
    (expected,) = rq.reference.run(mod, {"x": data})
    np.testing.assert_allclose(run_file(path, data), expected, rtol=1e-4, atol=1e-3)


def test_export__offsets_of_groups_are_refused_by_name(tmp_path):
    """As blocks of GGUF with a minimum have them: ONNX has zero points only."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 32), "float32"))
    parts = np.zeros((3, 16), "uint8"), np.ones((3, 1), "float16"), np.ones((3, 1), "float16")
    with builder.function("main", [x]):
        with builder.dataflow():
            call = qnn.grouped_dense(x, 1.0, *(relax.const(part) for part in parts), 4, 32, 32)
            y = builder.emit_output(builder.emit(call, "product"))
        builder.emit_func_output(y)
    with pytest.raises(ModelError, match=r"'product' has offsets.*Q4_1.*Q8_0.*RQ203"):
        rq.export_onnx(builder.finalize(), tmp_path / "q.onnx")
