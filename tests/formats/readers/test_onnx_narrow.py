"""Element types of fewer bits than compiled code computes: as onnx's evaluator, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx

import relayquant as rq
from relayquant.errors import ModelError

NODE = helper.make_node
DATA = np.linspace(-40, 40, 24, dtype="float32").reshape(4, 6)
NARROW = ["INT4", "UINT4", "INT2", "UINT2"]
FLOATS = ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ", "FLOAT4E2M1"]


def find_kind(name):
    kind = getattr(TensorProto, name, None)
    return pytest.skip(f"this onnx has no {name}") if kind is None else kind


def round_trip(data="x", zero="z", output="y"):
    return [
        NODE("QuantizeLinear", [data, "s", zero], [f"{output}.q"]),
        NODE("DequantizeLinear", [f"{output}.q", "s", zero], [output]),
    ]


def describe(name, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, None)


def choose(then_nodes, name, kind, constants=()):
    """An If that takes its first branch; the other has an output of the same type."""
    other = NODE("Identity", ["other"], ["b"])
    branches = [
        helper.make_graph(then_nodes, "then", [], [describe(name, kind)], list(constants)),
        helper.make_graph([other], "else", [], [describe("b", kind)]),
    ]
    return NODE("If", ["yes"], ["y" if kind == TensorProto.FLOAT else "z"],
                then_branch=branches[0], else_branch=branches[1])  # fmt: skip


def repeat(kind):
    """A Loop of two steps that carries the zero point into its body and out of it."""
    body = helper.make_graph(
        [
            *round_trip("u", "w", "v"),
            NODE("Identity", ["go"], ["on"]),
            NODE("Identity", ["w"], ["w1"]),
        ],
        "body",
        [describe("i", TensorProto.INT64), describe("go", TensorProto.BOOL), describe("u"),
         describe("w", kind)],
        [describe("on", TensorProto.BOOL), describe("v"), describe("w1", kind)],
    )  # fmt: skip
    return NODE("Loop", ["two", "yes", "x", "z0"], ["x1", "z"], body=body)


#: How the zero point of QuantizeLinear comes from a constant -> nodes
WAYS = {
    "constant": lambda z, kind: [NODE("Constant", [], ["z"], value=z), *round_trip()],
    "identity": lambda z, kind: [NODE("Identity", ["z0"], ["z"]), *round_trip()],
    "moved": lambda z, kind: [
        NODE("Unsqueeze", ["z0", "axis"], ["z1"]),
        NODE("Squeeze", ["z1"], ["z"]),
        *round_trip(),
    ],
    "filled": lambda z, kind: [
        NODE("ConstantOfShape", ["no_axes"], ["z"],
             value=helper.make_tensor("value", kind, (1,), [1])),
        *round_trip(),
    ],
    "branch": lambda z, kind: [choose([NODE("Identity", ["z0"], ["a"])], "a", kind), *round_trip()],
    "in a branch": lambda z, kind: [choose(round_trip("x", "z0", "a"), "a", TensorProto.FLOAT)],
    "of a branch": lambda z, kind: [
        choose(round_trip("x", "inner", "a"), "a", TensorProto.FLOAT, [z])
    ],
    "loop": lambda z, kind: [repeat(kind), *round_trip("x1")],
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_quantize_linear__clips_to_the_type_of_a_zero_point(way, name):
    """The zero point is held in 8 bits, but its own type sets the limits."""
    kind = find_kind(name)
    zero = helper.make_tensor("z0", kind, (), [1])
    inner = helper.make_tensor("inner", kind, (), [1])
    constants = {
        "s": np.float32(0.5),
        "axis": np.array([0]),
        "no_axes": np.array([], "int64"),
        "yes": np.array(True),
        "two": np.array(2),
    }
    nodes = WAYS[way](inner, kind)
    model = make_onnx(nodes, {"x": DATA.shape}, "y", constants, 25)
    other = helper.make_tensor("other", kind, (), [0])
    if "a branch" in way:
        other = helper.make_tensor("other", TensorProto.FLOAT, (1,), [0])
    model.graph.initializer.extend([zero, other])
    (want,) = ReferenceEvaluator(model).run(None, {"x": DATA})
    (got,) = rq.reference.run(rq.load(model)[0], [DATA])
    assert len(np.unique(want)) <= 16
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", [*NARROW, *FLOATS])
@pytest.mark.parametrize("op", ["Cast", "CastLike"])
def test_cast__of_values_is_refused(op, name):
    """LLVM would compute with the values before the cast."""
    kind = find_kind(name)
    cast = NODE("Cast", ["x"], ["c"], to=kind)
    if op == "CastLike":
        cast = NODE("CastLike", ["x", "like"], ["c"])
    like = helper.make_tensor("like", kind, (1,), [1.0])
    nodes = [cast, NODE("Cast", ["c"], ["y"], to=TensorProto.FLOAT)]
    model = make_onnx(nodes, {"x": DATA.shape}, "y", [like], 25)
    with pytest.raises(ModelError, match=r"Node 'c' .* its elements are \w+4?\w*; supported: fl"):
        rq.load(model)


@pytest.mark.parametrize("name", [*NARROW, *FLOATS])
def test_input__of_a_narrow_type_is_refused(name):
    kind = find_kind(name)
    nodes = [NODE("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    model = make_onnx(nodes, {"x": (kind, (3,))}, "y", (), 25)
    with pytest.raises(ModelError, match="Input 'x' cannot be read: its elements are"):
        rq.load(model)


@pytest.mark.parametrize("name", [*NARROW, *FLOATS])
def test_constant__of_a_narrow_type_is_read(name):
    """Each value that the type has."""
    kind = find_kind(name)
    numbers = {"INT4": range(-8, 8), "UINT4": range(16), "INT2": range(-2, 2), "UINT2": range(4)}
    numbers = list(numbers.get(name, [-448, -6, -1.5, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 240]))
    w = helper.make_tensor("w", kind, (len(numbers),), numbers)
    nodes = [NODE("Cast", ["w"], ["c"], to=TensorProto.FLOAT), NODE("Add", ["x", "c"], ["y"])]
    data = np.zeros(len(numbers), "float32")
    model = make_onnx(nodes, {"x": data}, "y", [w], 25)
    (want,) = ReferenceEvaluator(model).run(None, {"x": data})
    mod = rq.load(model)[0]
    executor = rq.Executor(rq.compile(mod))
    for found in (rq.reference.run(mod, [data]), executor.run("main", [data])):
        np.testing.assert_array_equal(found[0], want)


#: Scales of a weight (32, 6) -> their shape, and attributes
SCALES = {
    "one": ((), {}),
    "rows": ((32,), {"axis": 0}),
    "columns": ((6,), {"axis": -1}),
    "blocks of rows": ((2, 6), {"axis": 0, "block_size": 16}),
    "blocks of columns": ((32, 2), {"axis": 1, "block_size": 3}),
    "a last block that is short": ((3, 6), {"axis": -2, "block_size": 12}),
}


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("name", FLOATS)
def test_dequantize_linear__of_constant_floats(name, form, has_zero):
    """Also with scales that are floats of 8 bits with a scale themselves, as in NVFP4."""
    kind, (shape, attrs) = find_kind(name), SCALES[form]
    rng = np.random.default_rng(0)
    numbers, scales = rng.normal(0, 2, 192), rng.uniform(0.1, 1, shape)
    constants = [
        helper.make_tensor("w", kind, (32, 6), numbers.tolist()),
        helper.make_tensor("s8", TensorProto.FLOAT8E4M3FN, shape, scales.reshape(-1).tolist()),
        helper.make_tensor("s1", TensorProto.FLOAT, (), [0.25]),
        helper.make_tensor("z", kind, shape, [0.0] * scales.size),
    ]
    nodes = [
        NODE("DequantizeLinear", ["s8", "s1"], ["s"]),
        NODE("DequantizeLinear", ["w", "s", "z"][: 2 + has_zero], ["wide"], **attrs),
        NODE("MatMul", ["x", "wide"], ["y"]),
    ]
    data = rng.normal(0, 1, (3, 32)).astype("float32")
    model = make_onnx(nodes, {"x": data}, "y", constants, 23)
    (want,) = ReferenceEvaluator(model).run(None, {"x": data})
    (got,) = rq.reference.run(rq.load(model)[0], [data])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "attrs", "message"),
    [
        ((5,), {"axis": 1}, r"shape \(5,\), and its data \(32, 6\); allowed along axis 1: \(6,\)"),
        ((6,), {"axis": 2}, "axis"),
        ((4, 6), {"axis": 0, "block_size": 16}, "block_size=16 along axis 0"),
    ],
)
def test_dequantize_linear__scales_of_floats_fit(shape, attrs, message):
    w = helper.make_tensor("w", TensorProto.FLOAT8E5M2, (32, 6), [1.0] * 192)
    s = helper.make_tensor("s", TensorProto.FLOAT, shape, [1.0] * int(np.prod(shape)))
    nodes = [
        NODE("DequantizeLinear", ["w", "s"], ["wide"], **attrs),
        NODE("MatMul", ["x", "wide"], ["y"]),
    ]
    with pytest.raises(ModelError, match=message):
        rq.load(make_onnx(nodes, {"x": (3, 32)}, "y", [w, s], 23))
