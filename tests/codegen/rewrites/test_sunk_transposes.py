"""Transposes of images move behind sums and products, and vanish before the next layer."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import build_model
from operator_names import list_operators
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.rewrites.sunk_transposes import sink_transposes
from relayquant.ir.rewrite.walker import tidy_module

qnn = rq.extend.qnn
NHWC = (1, 4, 6, 8)
FACTORS = np.linspace(0.5, 2, 8, dtype="float32")


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((1, 4, 6, 8), "float32"), y: R.Tensor((1, 4, 6, 8), "float32")
    ) -> R.Tensor((1, 8, 4, 6), "float32"):
        with R.dataflow():
            lv = R.permute_dims(x, axes=[0, 3, 1, 2])
            lv1 = R.permute_dims(y, axes=[0, 3, 1, 2])
            lv2 = R.multiply(lv1, R.const(2.0, "float32"))
            gv = R.add(lv, lv2)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((1, 4, 6, 8), "float32"), y: R.Tensor((1, 4, 6, 8), "float32")
    ) -> R.Tensor((1, 8, 4, 6), "float32"):
        with R.dataflow():
            lv2_before = R.multiply(y, R.const(2.0, "float32"))
            gv_before = R.add(x, lv2_before)
            gv = R.permute_dims(gv_before, axes=[0, 3, 1, 2])
            R.output(gv)
        return gv


def test_sink_transposes__behind_a_sum() -> None:
    tvm.ir.assert_structural_equal(tidy_module(sink_transposes(Before)), Expected)


def turn(emit, name, x, axes=(0, 3, 1, 2)):
    return emit(name, R.permute_dims(x, [*axes]))


def block(emit, x, name):
    """What ConvNeXt has behind its layers: factors of channels, and the residual."""
    real = emit(f"{name}.real", R.sin(R.permute_dims(x, [0, 2, 3, 1])))
    product = R.multiply(turn(emit, f"{name}.turned", real), relax.const(FACTORS[:, None, None]))
    return emit(name, R.add(emit(f"{name}.scaled", product), x))


def blocks(emit, x):
    x = turn(emit, "image", x)
    for number in range(3):
        x = block(emit, x, f"block{number}")
    return turn(emit, "end", x, (0, 2, 3, 1))


def quantized_residual(emit, x):
    codes = emit("codes", qnn.quantize(x, 0.05, relax.const(np.int32(3)), out_dtype="uint8"))
    turned = turn(emit, "turned_codes", codes)
    residual = emit("residual", qnn.dequantize(turned, 0.05, relax.const(np.int32(3))))
    other = turn(emit, "other", emit("sine", R.sin(x)))
    return turn(emit, "end", emit("sum", R.subtract(other, residual)), (0, 2, 3, 1))


def check_numbers(mod: tvm.IRModule) -> None:
    x = np.random.default_rng(2).standard_normal(NHWC).astype("float32")
    (found,), (expected,) = Executor(rq.compile(mod)).run("main", [x]), rq.reference.run(mod, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("body", [blocks, quantized_residual])
def test_convert_layout__no_transpose_is_left(body) -> None:
    mod = build_model(body, NHWC)
    assert list_operators(mod).count("permute_dims") > 2
    assert list_operators(convert_layout(mod)).count("permute_dims") == 0
    check_numbers(mod)


def test_sink_transposes__a_module_without_any_is_the_same() -> None:
    mod = build_model(lambda emit, x: emit("y", R.add(x, x)), NHWC)
    assert sink_transposes(mod).same_as(mod)


def another_operand(emit, x):
    turned = turn(emit, "turned", x)
    return emit("sum", R.add(turned, emit("mean", R.mean(turned, [2, 3], keepdims=True))))


def other_axes(emit, x):
    square = emit("square", R.matmul(R.permute_dims(x, [0, 1, 3, 2]), x))  # (1, 4, 8, 8)
    first, second = turn(emit, "first", square), turn(emit, "second", square, (0, 2, 3, 1))
    return emit("sum", R.add(R.reshape(first, (1, 8, 8, 4)), second))


def heads(emit, x):
    """The transpose of attention stays where its kernels look for it."""
    return emit("scaled", R.multiply(turn(emit, "turned", x, (0, 2, 1, 3)), emit.constant(8)))


def broadcast_images(emit, x):
    row = emit("row", R.mean(x, [1], keepdims=True))
    return emit("sum", R.add(turn(emit, "turned", x), turn(emit, "turned_row", row)))


@pytest.mark.parametrize("body", [another_operand, other_axes, heads, broadcast_images])
def test_sink_transposes__others_stay(body) -> None:
    mod = build_model(body, NHWC)
    tvm.ir.assert_structural_equal(tidy_module(sink_transposes(mod)), tidy_module(mod))
    check_numbers(mod)
