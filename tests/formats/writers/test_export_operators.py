"""Float operators that are written to ONNX: ONNX Runtime's result is numpy's. Node cases of the
onnx package, read and written, are computed as onnx has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from float_models import build_model
from onnx_node_cases import as_array, find_difference, list_cases
from onnx_runtime import run_onnxruntime
from tvm import relax, tirx

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.preparation import prepare_module

runtime = pytest.importorskip("onnxruntime")

op = relax.op
RNG = np.random.default_rng(0)
INDEX = np.array([[0, 2, -1, 7], [3, 1, 0, -4], [2, 2, 2, 5]])
PLACES = np.array([[2], [0]])
WEIGHT = RNG.normal(size=4).astype("float32")

#: One input (n, 4) of float32: the operator, and numpy's form of it.
BINARY = {
    "not_equal": (op.not_equal, np.not_equal),
    "less_equal": (op.less_equal, np.less_equal),
    "greater_equal": (op.greater_equal, np.greater_equal),
    "floor_divide": (op.floor_divide, np.floor_divide),
    "floor_mod": (op.floor_mod, np.mod),
    "mod": (op.mod, np.fmod),
}
LOGICAL = {
    "logical_and": (op.logical_and, np.logical_and),
    "logical_or": (op.logical_or, np.logical_or),
    "logical_xor": (op.logical_xor, np.logical_xor),
    "bitwise_and": (op.bitwise_and, np.bitwise_and),
    "bitwise_or": (op.bitwise_or, np.bitwise_or),
    "bitwise_xor": (op.bitwise_xor, np.bitwise_xor),
}


def count_hot(index: np.ndarray) -> np.ndarray:
    """1.5 at the index of each of four classes, else -0.5; negative ones are no class."""
    return np.where(index[..., None] == np.arange(4), 1.5, -0.5).astype("float32")


def normalize(x, groups):
    rows = x.reshape(len(x), groups, -1).astype("float64")
    rows = rows - rows.mean(-1, keepdims=True)
    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-2)
    return rows.reshape(x.shape) * WEIGHT[:, None] - WEIGHT[:, None]


def scatter(x):
    result = x.copy()
    np.add.at(result, PLACES[:, 0], np.stack([WEIGHT, WEIGHT]))
    return result


def integers(array):
    return relax.const(array, "int64")


def floats(array):
    return relax.const(np.asarray(array, "float32"), "float32")


def float32(value):
    return tirx.FloatImm("float32", value)


def as_bytes(x):
    return op.astype(op.multiply(op.abs(x), floats(60)), "uint8")


@dataclass(frozen=True)
class Case:
    """An operator on x of shape (n, *rest), with a symbolic n, and its form in numpy."""

    make: object
    expected: object
    rest: tuple[int, ...] = (4,)


CASES = {
    **{
        name: Case(lambda x, f=f: f(x, floats(0.5)), lambda x, g=g: g(x, np.float32(0.5)))
        for name, (f, g) in BINARY.items()
    },
    **{
        f"{name}_of_integers": Case(
            lambda x, f=f: f(op.astype(op.multiply(x, floats(4)), "int64"), integers(np.array(-3))),
            lambda x, g=g: g((x * 4).astype("int64"), -3),
        )
        for name, (f, g) in BINARY.items()
    },
    **{
        name: Case(
            lambda x, f=f: f(op.greater(x, floats(0)), op.less(x, floats(0.5))),
            lambda x, g=g: g(x > 0, x < 0.5),
        )
        for name, (f, g) in LOGICAL.items()
    },
    **{
        f"{name}_of_integers": Case(
            lambda x, f=f: f(
                op.astype(op.multiply(x, floats(9)), "int32"), relax.const(6, "int32")
            ),
            lambda x, g=g: g((x * 9).astype("int32"), np.int32(6)),
        )
        for name, (f, g) in LOGICAL.items()
        if name.startswith("bitwise")
    },
    "isfinite": Case(lambda x: op.isfinite(op.divide(x, op.nn.relu(x))), lambda x: x > 0),
    "flip_rows": Case(lambda x: op.flip(x, 0), lambda x: x[::-1]),
    "flip_columns": Case(lambda x: op.flip(x, -1), lambda x: x[:, ::-1]),
    "cumsum": Case(lambda x: op.cumsum(x, 0), lambda x: x.cumsum(0)),
    "cumsum_exclusive": Case(
        lambda x: op.cumsum(x, -1, exclusive=True), lambda x: x.cumsum(-1) - x
    ),
    "cumsum_of_all": Case(lambda x: op.cumsum(x), lambda x: x.cumsum()),
    "cumsum_of_bool": Case(
        lambda x: op.cumsum(op.greater(x, floats(0)), 0, "int32"),
        lambda x: (x > 0).cumsum(0, dtype="int32"),
    ),
    "tril": Case(lambda x: op.tril(x, 1), lambda x: np.tril(x, 1)),
    "triu": Case(lambda x: op.triu(x, -1), lambda x: np.triu(x, -1)),
    "prod": Case(lambda x: op.prod(x, -1), lambda x: x.prod(-1)),
    "variance": Case(lambda x: op.variance(x, -1, keepdims=True), lambda x: x.var(-1)[:, None]),
    "std": Case(lambda x: op.std(x), lambda x: x.std()),
    "rms_norm": Case(
        lambda x: op.nn.rms_norm(x, floats(WEIGHT), [-1], 1e-2),
        lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * WEIGHT,
    ),
    "group_norm": Case(
        lambda x: op.nn.group_norm(x, floats(WEIGHT), floats(-WEIGHT), 2, 1, [2, 3], 1e-2),
        lambda x: normalize(x.reshape(*x.shape[:2], -1), 2).reshape(x.shape),
        (4, 3, 2),
    ),
    "instance_norm": Case(
        lambda x: op.nn.instance_norm(x, floats(WEIGHT), floats(-WEIGHT), 1, [2], 1e-2),
        lambda x: normalize(x, 4),
        (4, 5),
    ),
    "scatter_nd": Case(
        lambda x: op.scatter_nd(x, integers(PLACES), floats([WEIGHT, WEIGHT]), "add"), scatter
    ),
    "one_hot": Case(
        lambda x: op.add(
            op.one_hot(integers(INDEX), float32(1.5), float32(-0.5), 4, -1), op.sum(x)
        ),
        lambda x: count_hot(INDEX) + x.sum(),
    ),
    "arange": Case(
        lambda x: op.arange(0, x.ty.shape[0] * 2, 2, "int32"),
        lambda x: np.arange(0, 2 * len(x), 2, dtype="int32"),
    ),
    "full": Case(
        lambda x: op.full((x.ty.shape[0], 3), floats(0.5)),
        lambda x: np.full((len(x), 3), 0.5, "float32"),
    ),
    "zeros_like": Case(lambda x: op.zeros_like(x, "int32"), lambda x: np.zeros(x.shape, "int32")),
    "sort": Case(lambda x: op.sort(x, 0), lambda x: np.sort(x, 0)),
    "sort_down": Case(
        lambda x: op.sort(as_bytes(x), -1, True),
        lambda x: np.sort((abs(x) * 60).astype("uint8"), -1)[:, ::-1],
    ),
    "argsort_of_ties": Case(
        lambda x: op.argsort(op.sign(x), -2), lambda x: np.argsort(np.sign(x), 0, kind="stable")
    ),
    "argsort_down_of_ties": Case(
        lambda x: op.argsort(op.astype(op.sign(x), "int8"), 1, True, "int64"),
        lambda x: np.argsort(-np.sign(x), 1, kind="stable"),
    ),
    "topk_values": Case(lambda x: op.topk(x, 3, -1, "values"), lambda x: -np.sort(-x, -1)[:, :3]),
    "topk_indices": Case(
        lambda x: op.topk(x, 2, 0, "indices", False), lambda x: np.argsort(x, 0)[:2]
    ),
    "topk_of_all": Case(
        lambda x: op.topk(x, -1, 0, "indices", True, "int64"), lambda x: np.argsort(-x, 0)
    ),
    "topk_both": Case(
        lambda x: op.add(op.topk(x, 2)[0], op.astype(op.topk(x, 2)[1], "float32")),
        lambda x: -np.sort(-x)[:, :2] + np.argsort(-x)[:, :2],
    ),
    "median": Case(lambda x: op.median(x, [0])[0], lambda x: np.sort(x, 0)[(len(x) - 1) // 2]),
    "median_index": Case(
        lambda x: op.median(x, [-1], True)[1], lambda x: np.argsort(x, -1)[:, 1:2]
    ),
    "median_of_all": Case(lambda x: op.median(x), lambda x: np.sort(x.ravel())[x.size // 2 - 1]),
    "cumprod": Case(lambda x: op.cumprod(x, 0), lambda x: x.cumprod(0)),
    "cumprod_exclusive": Case(
        lambda x: op.cumprod(x, -1, exclusive=True),
        lambda x: np.c_[np.ones(len(x)), x.cumprod(-1)[:, :-1]].astype("float32"),
    ),
    "cumprod_of_all": Case(lambda x: op.cumprod(x), lambda x: x.cumprod()),
    "cumprod_of_bytes": Case(
        lambda x: op.cumprod(as_bytes(x), 1, "int32"),
        lambda x: (abs(x) * 60).astype("uint8").cumprod(1, dtype="int32"),
    ),
    "repeat": Case(lambda x: op.repeat(x, 3, 0), lambda x: x.repeat(3, 0)),
    "repeat_columns": Case(lambda x: op.repeat(x, 2, -1), lambda x: x.repeat(2, -1)),
    "repeat_of_all": Case(lambda x: op.repeat(x, 2), lambda x: x.repeat(2)),
    "einsum": Case(lambda x: op.einsum((x, x), "ni,nj->ij"), lambda x: x.T @ x),
    "index_tensor": Case(
        lambda x: op.index_tensor(x, (integers([[0], [-1]]), integers([1, 3, 1]))),
        lambda x: x[[[0], [-1]], [1, 3, 1]],
    ),
    "index_tensor_rows": Case(
        lambda x: op.index_tensor(x, (integers([[0, 1, -1]]),)), lambda x: x[[[0, 1, -1]]]
    ),
    "shape_to_tensor": Case(
        lambda x: op.shape_to_tensor(relax.ShapeExpr(x.ty.shape.values)),
        lambda x: np.array(x.shape),
    ),
}


#: No place is halfway between two, where ONNX Runtime's nearest one is not PyTorch's.
GRID = np.clip(RNG.normal(size=(3, 2, 5, 6)), -1.45, 1.45).astype("float32")
REGIONS = np.array([[0, 1, 1, 6, 5], [2, 0.5, 2.25, 3, 7.5], [1, -1, 0, 9, 4]], "float32")
MAPS, VOLUMES = (3, 2, 8, 7), (2, 4, 3, 4, 5)
KERNEL = RNG.normal(size=(4, 2, 2, 3, 2)).astype("float32")


#: shape of x, and an operator on it. The reference has it from numpy and PyTorch's formulas.
AS_REFERENCE = {
    **{
        f"{name}_of_{dtype}": (
            (4, 3),
            lambda x, f=f, dtype=dtype: f(op.astype(as_bytes(x), dtype), relax.const(3, dtype)),
        )
        for name, f in (("left_shift", op.left_shift), ("right_shift", op.right_shift))
        for dtype in ("uint8", "uint32", "uint64")
    },
    **{
        f"grid_sample_{method}_{padding}_{aligned}": (
            MAPS,
            lambda x, method=method, padding=padding, aligned=aligned: op.image.grid_sample(
                x, floats(GRID), method, "NCHW", padding, aligned
            ),
        )
        for method in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (True, False)
    },
    **{
        f"roi_align_{ratio}_{aligned}": (
            MAPS,
            lambda x, ratio=ratio, aligned=aligned: op.vision.roi_align(
                x, floats(REGIONS), (2, 3), 0.5, ratio, aligned
            ),
        )
        for ratio in (-1, 2)
        for aligned in (True, False)
    },
    "pixel_shuffle": ((2, 8, 3, 4), lambda x: op.nn.pixel_shuffle(x, 2)),
    "eye_like": ((3, 5), lambda x: op.eye_like(x, 1, "int32")),
    "eye_like_below": ((4, 4), lambda x: op.eye_like(x, -2)),
    "nonzero": ((4, 3), lambda x: op.nonzero(op.astype(x, "int32"))),
    "unique": ((4, 3), lambda x: op.unique(op.astype(x, "int64"))),
    "unique_rows": ((4, 3), lambda x: op.unique(op.astype(op.sign(x), "int64"), axis=0)),
    "conv3d": (
        VOLUMES,
        lambda x: op.nn.conv3d(x, floats(KERNEL), (1, 2, 1), (0, 1, 1, 1, 0, 0), groups=2),
    ),
    "conv3d_transpose": (
        VOLUMES,
        lambda x: op.nn.conv3d_transpose(
            x, floats(KERNEL), (2, 1, 2), (0, 1, 0, 1, 1, 0), (1, 0, 0), (1, 1, 2), groups=2
        ),
    ),
}


def test_float_module__as_a_reader_gives_it(tmp_path):
    """Operators that only the canonical form is without: split, batch norm, stack, flatten."""
    ones = floats(np.ones(2))

    def body(emit, x):
        halves = emit("halves", op.split(x, 2, 1))
        normed = emit(
            "both", op.nn.batch_norm(halves[0], ones, ones, ones, ones, 1, training=False)
        )
        summed = emit("sum", op.nn.conv2d(normed[0], floats(np.ones((2, 2, 1, 1)))))
        return emit("y", op.nn.batch_flatten(op.stack([summed, halves[1]], 1)))

    mod = build_model(body, (3, 4, 2, 2))
    x = RNG.normal(size=(3, 4, 2, 2)).astype("float32")
    (got,) = run_onnxruntime(rq.export_onnx(mod, tmp_path / "m.onnx"), {"x": x})
    np.testing.assert_allclose(got, rq.reference.run(mod, [x])[0], rtol=1e-4, atol=1e-5)


#: rank, result of an adaptive pool, layout
ADAPTIVE = [(1, [5], "NCW"), (2, [3, 2], "NCHW"), (2, [3, 11], "NHWC"), (3, [2, 1, 3], "NCDHW")]


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize(("rank", "result", "layout"), ADAPTIVE)
def test_adaptive_pool__as_pytorch_averages(rank, result, layout, is_symbolic, tmp_path):
    torch = pytest.importorskip("torch")
    make = getattr(op.nn, f"adaptive_avg_pool{rank}d")
    shape, symbols = (2, *((7, 6, 5)[:rank]), 3), ("n", *(("h", "w", "d")[:rank]), 3)
    order = [*range(rank + 2)]
    if layout[1] == "C":
        order = [0, rank + 1, *range(1, rank + 1)]
    given = [(symbols if is_symbolic else shape)[at] for at in order]
    mod = build_model(lambda emit, x: emit("y", make(x, result, layout)), tuple(given))
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    for size in {shape, (3, *((12, 3, 4)[:rank]), 3) if is_symbolic else shape}:
        x = RNG.normal(size=size).astype("float32")
        first = torch.from_numpy(np.moveaxis(x, -1, 1))
        wanted = getattr(torch.nn.functional, f"adaptive_avg_pool{rank}d")(first, result).numpy()
        (got,) = run_onnxruntime(path, {"x": np.ascontiguousarray(np.transpose(x, order))})
        got = got if layout[1] == "C" else np.moveaxis(got, -1, 1)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["linear", "nearest_neighbor", "cubic"])
def test_resize__to_sizes_of_the_input(method, tmp_path):
    def make(x):
        _, _, height, width = x.ty.shape.values
        rounding = "floor" if method == "nearest_neighbor" else ""
        return op.image.resize2d(
            x, (height * 2, width + 3), None, "NCHW", method, "half_pixel", rounding
        )

    mod = build_model(lambda emit, x: emit("y", make(x)), ("n", 2, "h", "w"))
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    for sizes in ((3, 4), (5, 2)):
        x = RNG.normal(size=(2, 2, *sizes)).astype("float32")
        (expected,) = rq.reference.run(mod, [x])
        np.testing.assert_allclose(run_onnxruntime(path, {"x": x})[0], expected, 1e-4, 1e-5)


#: Compiled for the reference for seconds each.
LONG = tuple(f"grid_sample_{method}_reflection" for method in ("bilinear", "bicubic"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(LONG) else [])
        for name in AS_REFERENCE
    ],
)
def test_operator__as_the_reference_computes_it(name, tmp_path):
    shape, make = AS_REFERENCE[name]
    mod = build_model(lambda emit, x: emit("y", make(x)), shape)
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    x = (RNG.normal(size=shape) * 2).astype("float32")
    (expected,) = rq.reference.run(mod, [x])
    (got,) = run_onnxruntime(path, {"x": x})
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: op.left_shift(op.astype(x, "int32"), relax.const(1)),
            "shifts int32; in",
        ),
        (
            lambda x: op.vision.roi_align(x, floats(REGIONS), (2, 2), 1.0, mode="max"),
            "roi_align with mode='max'",
        ),
        (
            lambda x: op.image.grid_sample(x, floats(GRID), layout="NHWC"),
            "grid_sample with layout='NHWC'",
        ),
    ],
)
def test_operator__refused_by_name(make, message, tmp_path):
    mod = build_model(lambda emit, x: emit("y", make(x)), MAPS)
    with pytest.raises(ModelError, match=message):
        rq.export_onnx(mod, tmp_path / "m.onnx")


def use_sums(compute):
    """The real values of integers that are computed from sums."""

    def read(emit, sums, scale):
        return emit("y", qnn.dequantize(emit("used", compute(sums)), scale, ZERO))

    return read


ZERO, THREE = relax.const(np.int32(0)), relax.const(np.int32(3))
#: What reads sums of products -> whether the file can have it: with a scale, and with none (of 1).
OF_SUMS = {
    "astype": (lambda emit, sums, scale: emit("y", op.astype(sums, "float32")), False, True),
    "multiply by itself": (use_sums(lambda sums: op.multiply(sums, sums)), False, True),
    "multiply by a number": (use_sums(lambda sums: op.multiply(sums, THREE)), False, True),
    "maximum with a number": (use_sums(lambda sums: op.maximum(sums, THREE)), False, True),
    "right_shift": (use_sums(lambda sums: op.right_shift(sums, THREE)), False, False),
    "floor_divide": (use_sums(lambda sums: op.floor_divide(sums, THREE)), False, False),
    "prod": (use_sums(lambda sums: op.prod(sums, [1], keepdims=True)), False, False),
    "add to itself": (use_sums(lambda sums: op.add(sums, sums)), True, True),
    "sum": (use_sums(lambda sums: op.sum(sums, [1], keepdims=True)), True, True),
    "clip": (use_sums(lambda sums: op.clip(sums, 0, 40)), True, True),
    "flip": (use_sums(lambda sums: op.flip(sums, 1)), True, True),
}


@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("name", OF_SUMS)
def test_sums_of_products__what_reads_them_is_right_or_refused(name, scale, tmp_path):
    """The file has their real values: with scales of 1 these are the sums."""
    read, *is_served = OF_SUMS[name]
    weight = relax.const(RNG.integers(-9, 9, (4, 8)).astype("int8"))

    def body(emit, x):
        one = relax.const(np.float32(scale))
        data = emit("q", qnn.quantize(x, one, ZERO, out_dtype="int8"))
        sums = emit("sums", qnn.dense(data, weight, ZERO, ZERO, one, one, out_dtype="int32"))
        return read(emit, sums, relax.const(np.float32(scale**2)))

    mod = build_model(body, (2, 8))
    if not is_served[scale == 1]:
        with pytest.raises(ModelError, match=r"reads the sums of products 'sums'.*dequantize\(\)"):
            rq.export_onnx(mod, tmp_path / "m.onnx")
        return
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    x = (RNG.normal(size=(2, 8)) * 4).astype("float32")
    np.testing.assert_array_equal(run_onnxruntime(path, {"x": x}), rq.reference.run(mod, [x]))


@pytest.mark.parametrize("name", CASES)
def test_operator__as_numpy_computes_it(name, tmp_path):
    case = CASES[name]
    mod = build_model(lambda emit, x: emit("y", case.make(x)), ("n", *case.rest))
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    for n in (3, 5):
        x = RNG.normal(size=(n, *case.rest)).astype("float32")
        expected = np.asarray(case.expected(x))
        (got,) = run_onnxruntime(path, {"x": x})
        assert (got.shape, got.dtype.kind) == (expected.shape, expected.dtype.kind)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_sizes__that_integers_of_the_run_give(tmp_path):
    """As many rows as there are positive numbers."""
    sizes = [tirx.Var("n", "int64"), 4]
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(sizes, "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            positive = builder.emit(op.astype(op.greater(x, floats(0)), "int64"))
            count = builder.match_cast(
                op.reshape(op.sum(positive), (1,)), relax.TensorType([1], "int64")
            )
            size = tirx.Var("k", "int64")
            builder.match_cast(builder.emit(op.tensor_to_shape(count)), relax.ShapeType([size]))
            rows = builder.emit(op.broadcast_to(floats([[1, 2]]), (size, 2)))
            result = builder.emit_output(op.cumsum(rows, 0))
        builder.emit_func_output(result)
    path = rq.export_onnx(builder.get(), tmp_path / "m.onnx")
    for n in (1, 3):
        data = RNG.normal(size=(n, 4)).astype("float32")
        expected = np.cumsum(np.tile([[1, 2]], ((data > 0).sum(), 1)), 0)
        np.testing.assert_array_equal(run_onnxruntime(path, {"x": data})[0], expected)


#: two steps of float16 apart, see test_onnx_node_cases.py
FAULTS = {"test_attention_4d_causal_fp16", "test_attention_4d_causal_fp16_expanded"}
PARTS = 32


def write_and_run(case, path) -> str:
    """Read a case, write it, run the file in ONNX Runtime. Returns what differs from onnx."""
    try:
        path = rq.export_onnx(prepare_module(rq.load(case.model)[0]), path)
    except ModelError:
        return ""
    session = runtime.InferenceSession(str(path))
    names = [node.name for node in session.get_inputs()]
    faults = []
    for inputs, wanted in case.data_sets:
        given = zip((info.name for info in case.model.graph.input), inputs, strict=False)
        arrays = {name: np.asarray(as_array(value)) for name, value in given}
        found = session.run(None, {name: arrays[name] for name in names})
        wanted = [as_array(value) for value in wanted]
        faults.append(find_difference(found, wanted, case.rtol, case.atol))
    return "; ".join(filter(None, faults))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_node_cases__are_written_right_or_refused(part, tmp_path):
    cases = [case for case in list_cases()[part::PARTS] if case.name not in FAULTS]
    faults = {case.name: write_and_run(case, tmp_path / "m.onnx") for case in cases}
    assert not {name: fault for name, fault in faults.items() if fault}


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64", "float16"]
)
def test_where__of_every_type(dtype, tmp_path):
    """ONNX Runtime has a kernel for some of them only. The largest and least numbers stay."""
    types = [relax.TensorType(shape, t) for shape, t in (((3,), "bool"), ((2, 3), dtype))]
    c, a = (relax.Var(name, ty) for name, ty in zip("ca", types, strict=True))
    if dtype == "bool":
        low, high = False, True
    else:
        info = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
        low, high = info.min, info.max
    other = np.array([high, low, 0], dtype)
    mod = make_main([c, a], lambda _: op.where(c, a, relax.const(other, dtype)))
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    given = {"c": np.array([True, False, True]), "a": np.array([[low, 1, high]] * 2, dtype)}
    (got,) = run_onnxruntime(path, given)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.where(given["c"], given["a"], other))


def gather_max(x):
    """The largest value of each window of 2 by 2, with one row and column of padding around."""
    lowest = np.iinfo(x.dtype).min
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=lowest)
    return np.lib.stride_tricks.sliding_window_view(wide, (2, 2), (2, 3)).max((-1, -2))


#: One input (2, 3, 4, 5) of integers: the operator, and numpy's form of it.
CHOSEN = {
    "clip": (lambda x: op.clip(x, 7, 90), lambda x: np.clip(x, 7, 90)),
    "relu": (op.nn.relu, lambda x: np.maximum(x, 0)),
    "pad": (
        lambda x: op.nn.pad(x, [0, 0, 1, 0, 0, 2, 0, 0], "constant", 3.0),
        lambda x: np.pad(x, ((0, 0), (1, 0), (0, 2), (0, 0)), constant_values=3),
    ),
    "reflect": (
        lambda x: op.nn.pad(x, [0, 0, 0, 0, 1, 0, 0, 2], "reflect"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 0), (0, 2)), "reflect"),
    ),
    "max_pool": (lambda x: op.nn.max_pool2d(x, (2, 2), padding=1), gather_max),
    "maximum": (
        lambda x: op.maximum(x, op.flip(x, 1)),
        lambda x: np.maximum(x, np.flip(x, 1)),
    ),
    "minimum": (
        lambda x: op.minimum(x, relax.const(np.array(40, str(x.ty.dtype)))),
        lambda x: np.minimum(x, 40).astype(x.dtype),
    ),
    "max": (lambda x: op.max(x, [1, 3]), lambda x: x.max((1, 3))),
    "min": (lambda x: op.min(x, [2], keepdims=True), lambda x: x.min(2, keepdims=True)),
    "argmax": (lambda x: op.argmax(x, 3), lambda x: x.argmax(3)),
    "argmin": (lambda x: op.argmin(x, 1), lambda x: x.argmin(1)),
    "resize": (
        lambda x: op.image.resize2d(
            x,
            relax.ShapeExpr((8, 10)),
            layout="NCHW",
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        lambda x: x.repeat(2, 2).repeat(2, 3),
    ),
}


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16"])
@pytest.mark.parametrize("name", CHOSEN)
def test_integers__that_are_chosen_of_every_type(name, dtype, tmp_path):
    """ONNX Runtime lacks kernels for 16-bit integers. The largest and least numbers stay."""
    build, compute = CHOSEN[name]
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max + 1, (2, 3, 4, 5)).astype(dtype)
    x[:, 0, 0, :2] = info.min, info.max
    var = relax.Var("x", relax.TensorType(x.shape, dtype))
    mod = make_main([var], lambda _: build(var))
    path = rq.export_onnx(mod, tmp_path / "m.onnx")
    (got,) = run_onnxruntime(path, {"x": x})
    expected = compute(x)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
