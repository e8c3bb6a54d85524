"""Linear resizes of images: the kernel against the onnx evaluator, and where there is none."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from float_models import build_model
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.floating.resize import TASK_VALUES, LinearResize, ResizedAxis
from relayquant.codegen.legalization.resizing import read_linear_resize
from relayquant.codegen.rewrites.layout import TRANSPOSE_RULES
from relayquant.ir.rewrite import apply_rules
from relayquant.ir.rewrite.function import make_main

#: (N, C, H, W) -> (H, W). Whole vectors of columns and none, ratios that are whole and not, tasks
#: of some rows that overlap, one row or column, planes and pixels of few and of many channels.
RESIZES = {
    "segmentation": ((1, 21, 32, 32), (256, 256)),
    "twice": ((2, 40, 8, 8), (16, 16)),
    "odd": ((2, 3, 17, 9), (40, 33)),
    "columns only": ((1, 1, 7, 5), (7, 11)),
    "rows only": ((1, 5, 3, 20), (50, 20)),
    "one pixel": ((1, 2, 1, 1), (5, 6)),
    "tasks": ((1, 2, 100, 120), (333, 300)),
    "narrower": ((1, 3, 10, 40), (20, 19)),
    "a task that is moved back": ((1, 1, 3, 1366), (47, 1366)),
}
MODES = ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"]


def build_resize(
    shape: tuple[int | str, ...],
    size: tuple[int, int],
    layout: str = "NCHW",
    mode: str = "half_pixel",
    dtype: str = "float32",
    method: str = "linear",
) -> tvm.IRModule:
    """main(x) of one resize. `shape` is (N, C, H, W) whatever the layout is."""
    extents = [tvm.tirx.Var(each, "int64") if isinstance(each, str) else each for each in shape]
    x = relax.Var("x", relax.TensorType([extents["NCHW".index(axis)] for axis in layout], dtype))
    resized = relax.op.image.resize2d(
        x,
        relax.ShapeExpr(size),
        roi=[0.0] * 4,
        layout=layout,
        method=method,
        coordinate_transformation_mode=mode,
        rounding_method="",
    )
    return make_main([x], lambda _: resized)


def find_resize(mod: tvm.IRModule) -> object:
    """What is read of the only operator of a module, for a CPU."""
    (binding,) = mod["main"].body.blocks[0].bindings
    with Target("llvm"):
        return read_linear_resize(binding.value)


def evaluate_onnx(x: np.ndarray, size: tuple[int, int], mode: str) -> np.ndarray:
    """Resize in the onnx evaluator. x is NCHW."""
    sizes = np.array([*x.shape[:2], *size])
    attributes = {"mode": "linear", "coordinate_transformation_mode": mode}
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **attributes)
    model = make_onnx([node], {"x": x}, {"y": (*x.shape[:2], *size)}, {"sizes": sizes}, 18)
    onnx.checker.check_model(model)
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


def draw(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(shape).astype("float32")


def turn(images: np.ndarray, layout: str) -> np.ndarray:
    return np.ascontiguousarray(images if layout == "NCHW" else images.transpose(0, 2, 3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RESIZES)
def test_linear_resize__agrees_with_onnx(name: str, mode: str, layout: str) -> None:
    """`evaluate_onnx` takes each pixel by itself: some results are compared of large images."""
    shape, size = RESIZES[name]
    x = draw(shape)
    mod = build_resize(shape, size, layout, mode)
    (found,) = Executor(rq.compile(mod)).run("main", [turn(x, layout)])
    expected = turn(evaluate_onnx(x[:1, :2], size, mode), layout)
    some = found[:1, :2] if layout == "NCHW" else found[:1, ..., :2]
    np.testing.assert_allclose(some, expected, rtol=1e-5, atol=2e-6)
    (everywhere,) = rq.reference.run(mod, turn(x, layout))
    # TVM computes places in float32: near 100 they are off by 1e-5 of a pixel.
    np.testing.assert_allclose(found, everywhere, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_read_rows__no_task_reads_more(mode: str) -> None:
    """`read_rows` sizes the kernel's memory, so that no task of `emit_planes` may read more rows.

    The last task is moved back. With some of these sizes only that one reads as many.
    """
    for size, result in [(size, result) for size in range(1, 40) for result in range(40, 60)]:
        rows = ResizedAxis(size, result, mode)
        first, second = rows.places
        for task_rows in (7, 24, 30):
            columns = ResizedAxis(5, -(-TASK_VALUES // task_rows), mode)
            spec = LinearResize(1, 1, rows, columns, is_planar=True)
            assert spec.task_rows == task_rows
            starts = [min(at, result - task_rows) for at in range(0, result, task_rows)]
            most = max(second[start + task_rows - 1] - first[start] + 1 for start in starts)
            assert most == spec.read_rows


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_linear_resize__a_free_batch(layout: str) -> None:
    mod = build_resize(("n", 5, 6, 7), (13, 15), layout)
    assert find_resize(mod) is not None
    x = draw((3, 5, 6, 7))
    (found,) = Executor(rq.compile(mod)).run("main", [turn(x, layout)])
    expected = turn(evaluate_onnx(x, (13, 15), "half_pixel"), layout)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", RESIZES)
def test_linear_resize__has_a_kernel(name: str) -> None:
    assert find_resize(build_resize(*RESIZES[name])) is not None


OTHERS = {
    "whole vectors of channels": build_resize((1, 32, 8, 8), (16, 16), "NHWC"),
    "a plane that shrinks": build_resize((1, 3, 64, 64), (32, 100)),
    "cubic": build_resize((1, 3, 8, 8), (16, 16), method="cubic"),
    "nearest": build_resize((1, 3, 8, 8), (16, 16), method="nearest_neighbor"),
    "float16": build_resize((1, 3, 8, 8), (16, 16), dtype="float16"),
    "free rows": build_resize((1, 3, "h", 8), (16, 16)),
    "one row of corners": build_resize((1, 3, 1, 8), (1, 16), mode="align_corners"),
    "a crop": build_resize((1, 3, 8, 8), (16, 16), mode="tf_crop_and_resize"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_linear_resize__others_are_left(name: str) -> None:
    assert find_resize(OTHERS[name]) is None


def test_linear_resize__only_for_a_cpu() -> None:
    (binding,) = build_resize((1, 3, 8, 8), (16, 16))["main"].body.blocks[0].bindings
    assert read_linear_resize(binding.value) is None


# ---- transposes ----------------------------------------------------------------------------------


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((1, 8, 8, 21), "float32")) -> R.Tensor((1, 21, 32, 32), "float32"):
        with R.dataflow():
            lv = R.image.resize2d(
                x, R.shape([32, 32]), layout="NHWC", method="linear", out_dtype="float32"
            )
            gv = R.permute_dims(lv, axes=[0, 3, 1, 2])
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((1, 8, 8, 21), "float32")) -> R.Tensor((1, 21, 32, 32), "float32"):
        with R.dataflow():
            gv_turned = R.permute_dims(x, axes=[0, 3, 1, 2])
            gv = R.image.resize2d(
                gv_turned, R.shape([32, 32]), layout="NCHW", method="linear", out_dtype="float32"
            )
            R.output(gv)
        return gv


def test_transpose_of_resize__moves_fewer_pixels() -> None:
    tvm.ir.assert_structural_equal(apply_rules(Before, TRANSPOSE_RULES), Expected)


def resize_and_turn(emit, x, size=(32, 32), axes=(0, 3, 1, 2)):
    resized = emit("lv", R.image.resize2d(x, R.shape([*size]), layout="NHWC", method="linear"))
    return emit("turned", R.permute_dims(resized, [*axes]))


def read_in_both(emit, x):
    resized = emit("lv", R.image.resize2d(x, R.shape([8, 8]), layout="NHWC", method="linear"))
    turned = emit("turned", R.permute_dims(resized, [0, 3, 1, 2]))
    return emit("sum", R.add(turned, resized))


@pytest.mark.parametrize(
    "body",
    [
        lambda emit, x: resize_and_turn(emit, x, size=(4, 4)),
        lambda emit, x: resize_and_turn(emit, x, axes=(0, 2, 1, 3)),
        read_in_both,
    ],
    ids=["fewer pixels", "another layout", "read in both layouts"],
)
def test_transpose_of_resize__others_stay(body) -> None:
    mod = build_model(body, (1, 8, 8, 8))
    tvm.ir.assert_structural_equal(apply_rules(mod, TRANSPOSE_RULES), mod)


@pytest.mark.parametrize("mode", ["half_pixel", "pytorch_half_pixel", "asymmetric"])
def test_resize__of_symbolic_sizes_is_that_of_the_evaluator(mode):
    """TVM did not compile positions that are products by a quotient of symbolic sizes."""
    scales = np.array([1, 1, 2, 3], "float32")
    node = helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode=mode
    )
    shapes = {"x": (1, 3, "h", "w")}, {"y": (1, 3, "h2", "w3")}
    model = make_onnx([node], *shapes, {"scales": scales}, 18)
    machine = Executor(rq.compile(rq.load(model)))
    for size in ((5, 7), (1, 4)):
        x = np.random.default_rng(0).standard_normal((1, 3, *size)).astype("float32")
        (want,) = ReferenceEvaluator(model).run(None, {"x": x})
        (found,) = machine.run("main", [x])
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["linear", "cubic", "nearest_neighbor"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_resize__with_aligned_corners_to_one_row_is_the_first(is_symbolic, layout, method):
    """As in ONNX and PyTorch. TVM divides 0 by 0."""
    rows = tvm.tirx.Var("rows", "int64") if is_symbolic else 1
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6)).astype("float32")
    given = x if layout == "NCHW" else np.ascontiguousarray(np.moveaxis(x, 1, -1))
    data = relax.Var("x", relax.TensorType(given.shape, "float32"))
    size = relax.Var("size", relax.TensorType((rows,), "float32"))
    mod = make_main(
        [data, size],
        lambda _: relax.op.image.resize2d(
            data, relax.ShapeExpr([rows, 6]), layout=layout, method=method,
            coordinate_transformation_mode="align_corners", rounding_method="round",
        ),
    )  # fmt: skip
    (found,) = Executor(rq.compile(mod)).run("main", [given, np.zeros(1, "float32")])
    found = found if layout == "NCHW" else np.moveaxis(found, -1, 1)
    np.testing.assert_allclose(found, x[:, :, :1], rtol=1e-5, atol=1e-5)
