"""What is computed from symbolic sizes, as PyTorch writes `x.size(i)` and as models of others have
it: compiled code and numpy as ONNX Runtime, for inputs of several sizes.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from test_onnx import draw
from test_onnx import make_model as make_float_model
from test_onnx_lost_shapes import Compiled, make_model

import relayquant as rq
from relayquant.errors import ModelError

RNG = np.random.default_rng(23)
INPUT = ("float32", ["N", 3, "M"])

#: Constants by name; only those that a case reads go into its model.
CONSTANTS = {
    **{f"i{n}": np.array(n) for n in (-1, 0, 1, 2, 3, 5)},
    **{f"v{n}": np.array([n]) for n in (-3, -1, 0, 1, 2, 3, 99, 2**62)},
    "zeros5": np.array([0] * 5),
    "column": np.array([3, 1]),
    "ones3": np.array([1, 1, 1]),
    "double": np.array([1, 1, 2, 2]),
    "hw": np.array([8, 10]),
    "half": np.array(-0.5, "float32"),
    "wide": RNG.standard_normal((1, 3, 1)).astype("float32"),
    "table": RNG.standard_normal((3, 20)).astype("float32"),
    "short": RNG.standard_normal((3, 4)).astype("float32"),
    "flat": RNG.standard_normal((2, 3)).astype("float32"),
    "nothing": np.zeros(1, "float32"),
    "index": np.array([[2]]),
    "bits": np.array([0, 1], "float32"),
    "mask": np.array([True, False, True]),
    "nines": np.array([9, 9, 9]),
}

ONE, VALUE = (numpy_helper.from_array(np.array([value])) for value in (1, np.float32(2.5)))


def node(text: str, **attributes):
    """A node from "y = Op(a, b)"."""
    outputs, _, call = text.partition(" = ")
    op, _, operands = call.rstrip(")").partition("(")
    inputs = [name.strip() for name in operands.split(",")]
    return helper.make_node(op, inputs, outputs.split(", "), **attributes)


SHAPE = node("s = Shape(x)")
N = [SHAPE, node("n = Gather(s, i0)"), node("nv = Unsqueeze(n, v0)")]
M = [SHAPE, node("m = Gather(s, i2)"), node("mv = Unsqueeze(m, v0)")]


def concat(*names):
    return node(f"c = Concat({', '.join(names)})", axis=0)


VIEW = node("y = Reshape(x, c)")

CASES = {
    "x.view(x.size(0), -1)": [*N, concat("nv", "v-1"), VIEW],
    "x.view(-1, 3 * m)": [*M, node("t = Mul(m, i3)"), node("tv = Unsqueeze(t, v0)"),
                          concat("v-1", "tv"), VIEW],
    "x.view(n, 3, m / 2, 2)": [*N, *M[1:], node("h = Div(m, i2)"), node("hv = Unsqueeze(h, v0)"),
                               concat("nv", "v3", "hv", "v2"), VIEW],
    "x.size(-1)": [SHAPE, node("y = Gather(s, i-1)")],
    "x.shape[1:]": [node("y = Shape(x)", start=1)],
    "x.shape[:-1]": [node("y = Shape(x)", end=-1)],
    "m + 2": [*M, node("y = Add(m, i2)")],
    "2 - m": [*M, node("y = Sub(i2, m)")],
    "(2 - m) / 3": [*M, node("d = Sub(i2, m)"), node("y = Div(d, i3)")],
    "(2 - m) % 3": [*M, node("d = Sub(i2, m)"), node("y = Mod(d, i3)")],
    "where(mask, s, 9)": [SHAPE, node("y = Where(mask, s, nines)")],
    "where(mask, 9, s)": [SHAPE, node("y = Where(mask, nines, s)")],
    "x.numel()": [SHAPE, node("y = ReduceProd(s)", keepdims=0)],
    "prod(s, keepdim)": [SHAPE, node("y = ReduceProd(s)", keepdims=1)],
    "arange(m)": [*M, node("y = Range(i0, m, i1)")],
    "x + arange(m)": [*M, node("r = Range(i0, m, i1)"), node("f = Cast(r)", to=TensorProto.FLOAT),
                      node("y = Add(x, f)")],
    "full like": [SHAPE, node("c = ConstantOfShape(s)", value=VALUE), node("y = Add(x, c)")],
    "full (n, 3)": [*N, concat("nv", "v3"), node("y = ConstantOfShape(c)", value=VALUE)],
    "expand(n, 3, 3)": [*N, concat("nv", "v3", "v3"), node("y = Expand(wide, c)")],
    "expand(n, -1, m)": [SHAPE, node("o = ConstantOfShape(v3)", value=ONE),
                         node("w = Mul(o, i-1)"), node("e = Equal(s, w)"),
                         node("c = Where(e, o, s)"), node("y = Expand(wide, c)")],
    "tile(n, 2)": [*N, concat("nv", "v2"), node("y = Tile(flat, c)")],
    "x[..., : m / 2]": [*M, node("h = Div(m, i2)"), node("hv = Unsqueeze(h, v0)"),
                        node("y = Slice(x, v0, hv, v2)")],
    "x[..., m / 2 :]": [*M, node("h = Div(m, i2)"), node("hv = Unsqueeze(h, v0)"),
                        node("y = Slice(x, hv, v99, v2)")],
    "x[..., : m : 2]": [*M, node("y = Slice(x, v0, mv, v2, v2)")],
    "x[..., m :: -1]": [*M, node("y = Slice(x, mv, v-3, v2, v-1)")],
    "x + table[:, : m]": [*M, node("p = Slice(table, v0, mv, v1)"), node("y = Add(x, p)")],
    "short[:, : m]": [*M, node("y = Slice(short, v0, mv, v1)")],
    "short[:, -m :]": [*M, node("k = Neg(mv)"), node("y = Slice(short, k, v99, v1)")],
    "short[:, m - 3 :]": [*M, node("k = Sub(mv, v3)"), node("y = Slice(short, k, v99, v1)")],
    "x.shape[:2]": [SHAPE, node("a = Slice(s, v0, v2)"), concat("a", "v-1"), VIEW],
    "x.shape[-3:-1]": [SHAPE, node("a = Slice(s, v-3, v-1)"), concat("a", "v-1"), VIEW],
    "x / sqrt(m)": [*M, node("f = Cast(m)", to=TensorProto.FLOAT), node("q = Sqrt(f)"),
                    node("y = Div(x, q)")],
    "x * m ** -0.5": [*M, node("f = Cast(m)", to=TensorProto.FLOAT), node("q = Pow(f, half)"),
                      node("y = Mul(x, q)")],
    "int32": [SHAPE, node("t = Cast(s)", to=TensorProto.INT32), node("n = Gather(t, i0)"),
              node("w = Cast(n)", to=TensorProto.INT64), node("nv = Unsqueeze(w, v0)"),
              concat("nv", "v-1"), VIEW],
    "size": [node("n = Size(x)"), node("nv = Unsqueeze(n, v0)"), node("y = Reshape(x, nv)")],
    "product": [SHAPE, node("c = ReduceProd(s)"), VIEW],
    "product (0-d)": [SHAPE, node("y = ReduceProd(s)", keepdims=0)],
    "squeeze": [node("s = Shape(x)", end=1), node("n = Squeeze(s, v0)"),
                node("nv = Unsqueeze(n, v0)"), concat("nv", "v-1"), VIEW],
    "split": [SHAPE, node("a, b, d = Split(s, ones3)"), concat("d", "b", "a"), VIEW],
    "m - m % 3": [*M, node("r = Mod(m, i3)"), node("d = Sub(m, r)"), node("dv = Unsqueeze(d, v0)"),
                  node("y = Slice(x, v0, dv, v2)")],
    "max": [*M, node("d = Max(m, i2, i3)"), node("dv = Unsqueeze(d, v0)"),
            node("y = Slice(x, v0, dv, v2)")],
    "min": [*M, node("d = Min(m, i2)"), node("dv = Unsqueeze(d, v0)"),
            node("y = Slice(x, v0, dv, v2)")],
    "pad to a multiple": [*M, node("k = Neg(m)"), node("r = Mod(k, i5)"),
                          node("rv = Unsqueeze(r, v0)"), concat("zeros5", "rv"),
                          node("y = Pad(x, c)")],
    "x[n - 1]": [*N, node("d = Sub(n, i1)"), node("y = Gather(x, d)")],
    "where m > 5": [*M, node("g = Greater(m, i5)"), node("y = Where(g, x, nothing)")],
    "where m >= 0": [*M, node("g = GreaterOrEqual(m, i0)"), node("y = Where(g, x, nothing)")],
    "where m < 0": [*M, node("g = Less(m, i0)"), node("y = Where(g, x, nothing)")],
    "where m < m": [*M, node("g = Less(m, m)"), node("y = Where(g, x, nothing)")],
    "short[:, -m - 1 :]": [*M, node("o = Add(mv, v1)"), node("k = Neg(o)"),
                           node("y = Slice(short, k, v99, v1)")],
    "where m <= -1": [*M, node("g = LessOrEqual(m, i-1)"), node("y = Where(g, x, nothing)")],
    "replaced": [SHAPE, node("c = ScatterND(s, index, v-1)"), VIEW],
    "causal": [*M, node("r = Range(i0, m, i1)"), node("a = Unsqueeze(r, v0)"),
               node("b = Unsqueeze(r, v1)"), node("y = LessOrEqual(a, b)")],
    "chunks": [*M, node("h = Div(m, i2)"), node("hv = Unsqueeze(h, v0)"),
               node("r = Sub(mv, hv)"), concat("hv", "r"), node("y, z = Split(x, c)", axis=2)],
    "trilu": [*N, node("y = Trilu(x, n)")],
    "shape of a shape": [SHAPE, node("y = Shape(s)")],
    "same": [SHAPE, node("c = Identity(s)"), VIEW],
    "matrix": [SHAPE, node("a = Reshape(s, column)"), node("b = Transpose(a)"),
               node("y = Reshape(b, v-1)")],
    "bounded": [*M, node("d = Clip(m, i0, i2)"), node("dv = Unsqueeze(d, v0)"),
                node("y = Slice(x, v0, dv, v2)")],
}  # fmt: skip

IMAGES = {
    "resize to (8, 10)": [SHAPE, node("a = Slice(s, v0, v2)"), concat("a", "hw"),
                          node("y = Resize(x, , , c)")],
    "twice as large": [SHAPE, node("c = Mul(s, double)"), node("y = Resize(x, , , c)")],
}  # fmt: skip


def make_case(nodes, inputs):
    used = {name for each in nodes for name in each.input}
    weights = {name: array for name, array in CONSTANTS.items() if name in used}
    return make_model(nodes, inputs, 17, weights)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_sizes__as_onnx_runtime(name):
    compiled = Compiled(make_case(CASES[name], {"x": INPUT}))
    for n, m in ((2, 8), (3, 6)):
        compiled.check({"x": RNG.standard_normal((n, 3, m)).astype("float32")})


@pytest.mark.parametrize("name", IMAGES)
def test_sizes__of_images(name):
    sizes = [4, 5] if name.startswith("resize") else ["H", "W"]
    compiled = Compiled(make_case(IMAGES[name], {"x": ("float32", ["N", 3, *sizes])}))
    for n in (1, 2):
        compiled.check({"x": RNG.standard_normal((n, 3, 4, 5)).astype("float32")})


@pytest.mark.parametrize(
    "nodes",
    [
        [*M, node("y = OneHot(column, m, bits)")],
        [*M, node("y, z = TopK(x, mv)")],
        [*M, node("c = CumSum(x, m)")],
    ],
    ids=lambda nodes: nodes[-1].op_type,
)
def test_sizes__that_have_to_be_known(nodes):
    with pytest.raises(ModelError, match="Fix M while loading: shapes="):
        rq.load(make_case(nodes, {"x": INPUT}))


def test_sizes__division_by_zero():
    nodes = [*M, node("y = Div(m, i0)")]
    with pytest.raises(ModelError, match=r"operator Div.*divides a size by 0"):
        rq.load(make_case(nodes, {"x": INPUT}))


def test_sizes__stay_expressions_of_the_model():
    """The result has the sizes of the input, not new ones that only the run time knows."""
    nodes = [*N, *M[1:], concat("mv", "nv", "v3"), VIEW]
    mod, _ = rq.load(make_case(nodes, {"x": INPUT}))
    sizes = mod["main"].ret_ty.shape.values
    assert [str(size) for size in sizes[:2]] == ["M", "N"]
    assert int(sizes[2]) == 3


INDEXED = {"x": ("float32", ["A", "B", "C"]), "i": ("int64", ["K", "L", "M"])}


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize(
    ("axis", "shape"),
    [(1, (2, 3, 5)), (0, (2, 2, 2)), (2, (3, 4, 7)), (-1, (1, 1, 2)), (1, (3, 9, 5))],
)
def test_gather_elements__fewer_indices_than_data(axis, shape, is_symbolic):
    data = RNG.standard_normal((3, 4, 5)).astype("float32")
    index = RNG.integers(-data.shape[axis], data.shape[axis], shape)
    inputs = INDEXED if is_symbolic else {"x": ("float32", data.shape), "i": ("int64", shape)}
    gather = helper.make_node("GatherElements", ["x", "i"], ["y"], axis=axis)
    Compiled(make_model([gather], inputs, 18)).check({"x": data, "i": index})


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("reduction", ["none", "add", "max"])
@pytest.mark.parametrize(("axis", "shape"), [(0, (2, 2, 2)), (1, (2, 3, 5)), (-1, (1, 1, 2))])
def test_scatter_elements__fewer_indices_than_symbolic_data(axis, shape, reduction):
    data = RNG.standard_normal((3, 4, 5)).astype("float32")
    count = int(np.prod(shape)) // shape[axis]
    rows = [RNG.permutation(data.shape[axis])[: shape[axis]] for _ in range(count)]
    others = [size for at, size in enumerate(shape) if at != axis % 3]
    index = np.moveaxis(np.array(rows).reshape(*others, shape[axis]), -1, axis)
    index = np.ascontiguousarray(np.where(index % 2, index - data.shape[axis], index))
    updates = RNG.standard_normal(shape).astype("float32")
    inputs = {**INDEXED, "u": ("float32", INDEXED["i"][1])}
    attrs = {"axis": axis, "reduction": reduction}
    scatter = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], **attrs)
    Compiled(make_model([scatter], inputs, 18)).check({"x": data, "i": index, "u": updates})


@pytest.mark.sample(3)
@pytest.mark.parametrize("end", [2**31 - 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("opset", [9, 18])
def test_slice__to_the_end_of_a_symbolic_size(end, dtype, opset):
    """An end of INT_MAX is no size to plan memory for: it ended in std::bad_alloc."""
    if end > np.iinfo(dtype).max:
        pytest.skip(f"{dtype} does not hold it")
    rows = {"starts": [1], "ends": [end], "axes": [0]}
    names = list(rows) if opset >= 10 else []
    attrs = {} if names else rows
    nodes = [
        helper.make_node("Slice", ["x", *names], ["v"], **attrs),
        helper.make_node("LRN", ["v"], ["y"], size=3),
    ]
    constants = {name: np.array(rows[name], dtype) for name in names}
    model = make_onnx(nodes, {"x": ["batch", 4, 5, 6]}, {"y": None}, constants, opset)
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 6)).astype("float32")
    (want,) = run_onnxruntime(model, {"x": x})
    mod, _ = rq.load(model)
    (got,) = rq.Executor(rq.compile(mod)).run("main", [x])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize(
    "bounds",
    [(2, -1, 1), (2, -2, 2), (-3, 2, 1), (3, 1, 1), (-1, -3, 1), (-2, 2, -1), (1, 3, -1)],
    ids=str,
)
def test_slice__of_a_short_axis_is_empty(bounds, opset):
    """Where its start lies behind its end. TVM counts less than no elements there."""
    begin, end, step = bounds
    is_old = opset < 10
    if is_old and step != 1:
        pytest.skip("this opset has no steps")
    attributes = {"starts": [begin], "ends": [end], "axes": [0]}
    names = "begin", "end", "axis", "step"
    rows = np.array([begin, end, 0, step]).reshape(4, 1)
    given = ["x"] if is_old else ["x", *names]
    call = helper.make_node("Slice", given, ["y"], **(attributes if is_old else {}))
    constants = dict(zip(names, rows, strict=True))
    model = make_onnx([call], {"x": ["n", 2]}, {"y": ["m", 2]}, constants, opset)
    mod, _ = rq.load(model)
    executor = rq.Executor(rq.compile(mod))
    for size in range(6):
        x = np.arange(2 * size, dtype="float32").reshape(size, 2)
        wanted = x[begin:end:step]
        np.testing.assert_array_equal(rq.reference.run(mod, [x])[0], wanted)
        np.testing.assert_array_equal(executor.run("main", [x])[0], wanted)


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("parts", [(0, 3), (3, 0), (1, 0, 2), (0, 0, 3)], ids=str)
def test_split__into_parts_without_elements(parts, opset):
    names = [f"part{i}" for i in range(len(parts))]
    given = {"split": [*parts]} if opset < 13 else {}
    call = helper.make_node("Split", ["x"] + ["parts"] * (not given), names, axis=-1, **given)
    join = helper.make_node("Concat", [*names, *names[:1]], ["y"], axis=1)
    constants = {} if given else {"parts": np.array(parts)}
    result = {"y": ["n", 3 + parts[0]]}
    compiled = Compiled(make_onnx([call, join], {"x": ["n", 3]}, result, constants, opset))
    for size in (2, 0):
        compiled.check({"x": RNG.standard_normal((size, 3)).astype("float32")})


@pytest.mark.parametrize(
    ("opset", "sizes", "right", "wrong"),
    [(11, (2, 3), [5], [6, 4, 0]), (17, (2, 3), [5], [6, 4, 0]), (13, None, [4, 0], [5, 1])],
)
def test_split__of_a_symbolic_axis(opset, sizes, right, wrong):
    """ONNX Runtime refuses what does not fit, too."""
    given = {"split": [*sizes]} if sizes and opset < 13 else {}
    parts = [] if given or not sizes else ["parts"]
    calls = [
        helper.make_node("Constant", [], ["parts"], value_ints=sizes or [0]),
        helper.make_node("Split", ["x", *parts], ["a", "b"], axis=-1, **given),
        helper.make_node("Concat", ["b", "a"], ["y"], axis=-1),
    ]
    compiled = Compiled(make_model(calls[not parts :], {"x": ("float32", [2, "n"])}, opset))
    for size in right:
        compiled.check({"x": RNG.standard_normal((2, size)).astype("float32")})
    for size in wrong:
        with pytest.raises(ValueError, match=r"sizes do not fit '.*', which makes \(2, n\)"):
            compiled.machine["main"](tvm.runtime.tensor(np.zeros((2, size), "float32")))


@pytest.mark.parametrize("size", [5, "n"])
@pytest.mark.parametrize("parts", [(-1, 6), (3, -1, 3), (6, -1)])
@pytest.mark.parametrize("opset", [11, 17])
def test_split__into_parts_below_zero_is_refused(size, parts, opset):
    """ONNX Runtime refuses them, too."""
    given = {"split": [*parts]} if opset < 13 else {}
    names = [f"part{i}" for i in range(len(parts))]
    calls = [
        helper.make_node("Constant", [], ["parts"], value_ints=parts),
        helper.make_node("Split", ["x"] + ["parts"] * (not given), names, axis=1, **given),
        helper.make_node("Concat", names, ["y"], axis=1),
    ]
    model = make_model(calls[bool(given) :], {"x": ("float32", [2, size])}, opset)
    with pytest.raises(rq.RelayQuantError, match="sizes of at least 0"):
        rq.load(model)
    with pytest.raises(Exception, match=r"[Ss]plit|Negative dimension"):
        run_onnxruntime(model, {"x": np.zeros((2, 5), "float32")})


def test_split__into_more_sections_than_fit_is_refused():
    """4 sections of 2 begin behind 5 elements, and the last one of 6 has no element."""
    names = ["a", "b", "c", "d"]
    calls = [
        helper.make_node("Split", ["x"], names, axis=0, num_outputs=4),
        helper.make_node("Concat", names[::-1], ["y"], axis=0),
    ]
    with pytest.raises(rq.RelayQuantError, match="cuts 5 elements into 4 parts of 2"):
        rq.load(make_model(calls, {"x": ("float32", [5])}, 18))
    for size in (6, 7):
        compiled = Compiled(make_model(calls, {"x": ("float32", [size])}, 18))
        compiled.check({"x": RNG.standard_normal(size).astype("float32")})


@pytest.mark.parametrize(("right", "wrong"), [([3, 8], [5, 8]), ([2, 3, 8], [2, 5, 8])])
def test_expand__to_sizes_that_do_not_fit_is_refused(right, wrong):
    """Rows are repeated if there is one; ONNX Runtime refuses other numbers, too."""
    call = helper.make_node("Expand", ["x", "sizes"], ["y"])
    infos = {"x": ("float32", ["n", 8]), "sizes": ("int64", [len(right)])}
    compiled = Compiled(make_model([call], infos, 17))
    for rows in (1, 3):
        x = RNG.standard_normal((rows, 8)).astype("float32")
        compiled.check({"x": x, "sizes": np.array(right)})
    inputs = {"x": np.zeros((3, 8), "float32"), "sizes": np.array(wrong)}
    with pytest.raises(ValueError, match="sizes do not fit"):
        compiled.machine["main"](*map(tvm.runtime.tensor, inputs.values()))
    with pytest.raises(Exception, match=r"Expand|invalid"):
        run_onnxruntime(compiled.model, inputs)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax__of_nothing(op):
    call = helper.make_node(op, ["x"], ["y"], axis=-1)
    compiled = Compiled(make_model([call], {"x": ("float32", ["N", "M"])}, 18))
    for shape in ((3, 0), (0, 4), (2, 4)):
        compiled.check({"x": RNG.standard_normal(shape).astype("float32")})


@pytest.mark.slow
@pytest.mark.parametrize("size", ["n", 3])
def test_slice__bounds_inside_and_outside_of_the_axis(size):
    """As ONNX Runtime: clamped, in both directions. All slices are results of one model."""
    ends = [-(2**63), -4, -1, 0, 2, 4, 2**63 - 1]
    bounds = [
        (start, end, step)
        for start in (-(2**63), -5, -1, 0, 3, 2**63 - 1)
        for end in ends
        for step in (1, 2, -1, -3)
        if step > 0 or end < 2**31 - 1  # the specification does not say what this means
    ]
    numbers = {n for row in bounds for n in row} | {0}
    names = {number: f"c{at}" for at, number in enumerate(sorted(numbers))}
    nodes = [
        helper.make_node("Slice", ["x", names[a], names[b], names[0], names[c]], [f"y{at}"])
        for at, (a, b, c) in enumerate(bounds)
    ]
    results = {node.output[0]: None for node in nodes}
    constants = {name: np.array([n]) for n, name in names.items()}
    model = make_onnx(nodes, {"x": [size, 2]}, results, constants)
    exe = rq.Executor(rq.compile(rq.load(model)[0]))
    for rows in (1, 2, 5) if size == "n" else (size,):
        x = np.arange(2 * rows, dtype="float32").reshape(rows, 2)
        results = zip(bounds, exe.run("main", [x]), run_onnxruntime(model, {"x": x}), strict=True)
        for row, got, want in results:
            assert got.shape == want.shape, (rows, row)
            np.testing.assert_array_equal(got, want, err_msg=str((rows, row)))


@pytest.mark.parametrize("size", ["n", 3])
def test_slice__of_no_axes(size):
    call = helper.make_node("Slice", ["x", "none", "none", "none"], ["y"])
    types = {"x": [size, 2]}, {"y": [size, 2]}
    compiled = Compiled(make_onnx([call], *types, {"none": np.zeros(0, "int64")}))
    compiled.check({"x": RNG.standard_normal((3, 2)).astype("float32")})


@pytest.mark.parametrize("bounds", [(-2, 99, 1), (-1, -99, -1)])
def test_slice__along_an_axis_that_is_counted_from_the_end(bounds):
    names = ("start", "end", "axis", "step")
    values = (*bounds[:2], -1, bounds[2])
    call = helper.make_node("Slice", ["x", *names], ["y"])
    constants = {name: np.array([n]) for name, n in zip(names, values, strict=True)}
    compiled = Compiled(make_onnx([call], {"x": ["n", "k"]}, {"y": None}, constants))
    compiled.check({"x": RNG.standard_normal((3, 4)).astype("float32")})


def test_concat__of_sizes_that_only_the_run_compares():
    """The maps of a detector's levels: n // 2 * 2 rows beside n rows."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["small"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Resize", ["small", "", "scales"], ["large"]),
        helper.make_node("Concat", ["x", "large"], ["both"], axis=1),
        helper.make_node("Conv", ["both", "w"], ["y"]),
    ]
    weights = {"w": draw(3, 4, 1, 1), "scales": np.array([1, 1, 2, 2], "float32")}
    model = make_float_model(nodes, {"x": ["n", 2, "h", "w"]}, weights=weights, opset=13)
    mod, _ = rq.load(model)
    executor = rq.Executor(rq.compile(mod))
    for shape in ((1, 2, 4, 6), (2, 2, 8, 2)):
        x = draw(*shape)
        (expected,) = run_onnxruntime(model, {"x": x})
        np.testing.assert_allclose(executor.run("main", [x])[0], expected, atol=1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        executor.run("main", [draw(1, 2, 4, 5)])
