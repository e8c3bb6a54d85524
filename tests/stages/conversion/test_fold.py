"""Each fold rule, before and after."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relayquant.base.qtypes import Rounding
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run
from relayquant.stages.conversion import fold_qnn

SCALES = np.array([0.5, 0.25, 2.0], "float32")
WEIGHT = np.arange(-6, 6, dtype="int8").reshape(4, 3)


def scalar(value, dtype="float32"):
    return relax.const(np.array(value, dtype))


def dequantize(q, scale=0.5, zero_point=10):
    return qnn.dequantize(q, scalar(scale), scalar(zero_point, "int32"))


def dequantize_channels(q, axis=1):
    return qnn.dequantize(q, relax.const(SCALES), relax.const(np.zeros(3, "int32")), axis=axis)


def quantize(x, scale=0.5, zero_point=10, dtype="uint8"):
    return qnn.quantize(x, scalar(scale), scalar(zero_point, "int32"), out_dtype=dtype)


def quantize_channels(x, axis=1):
    return qnn.quantize(x, relax.const(SCALES), relax.const(np.zeros(3, "int32")), axis=axis)


def requantize(q, to_scale, to_zero_point, dtype):
    return qnn.requantize(
        q, scalar(0.5), scalar(10, "int32"), scalar(to_scale), scalar(to_zero_point, "int32"),
        out_dtype=dtype,
    )  # fmt: skip


def requantize_channels(q):
    return qnn.requantize(
        q, relax.const(SCALES), relax.const(np.zeros(3, "int32")), scalar(1.5), scalar(7, "int32"),
        axis=1, out_dtype="uint8",
    )  # fmt: skip


def check(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    text = before.script(show_meta=True)
    new = fold_qnn(before)
    assert before.script(show_meta=True) == text
    tvm.ir.assert_structural_equal(new["main"], expected["main"], map_free_vars=True)


def test_quantize_of_dequantize__same_parameters_vanish():
    @as_main
    def before(q: R.Tensor((2, 3), "uint8")):
        r = R.nn.relu(q)
        d = dequantize(r)
        p = quantize(d)
        return R.clip(p, T.uint8(3), T.uint8(9))

    @as_main
    def expected(q: R.Tensor((2, 3), "uint8")):
        r = R.nn.relu(q)
        return R.clip(r, T.uint8(3), T.uint8(9))

    check(before, expected)


@pytest.mark.parametrize("rounding", Rounding)
def test_quantize_of_dequantize__keeps_the_rounding(rounding):
    """1 of scale 0.5 is a tie at scale 1: each way of rounding has its own integers there."""
    q, builder = relax.Var("q", relax.TensorType((4,), "int8")), relax.BlockBuilder()
    zero = scalar(0, "int32")
    with builder.function("main", [q]):
        with builder.dataflow():
            d = builder.emit(dequantize(q, 0.5, 0))
            p = qnn.quantize(d, scalar(1.0), zero, out_dtype="int8", rounding=rounding)
            result = builder.emit_output(p)
        builder.emit_func_output(result)
    before = builder.finalize()
    folded, data = fold_qnn(before), np.array([1, 3, -1, -3], "int8")
    calls = [binding.value for binding in folded["main"].body.blocks[0].bindings]
    assert [call.op.name for call in calls] == ["relax.qnn.requantize"]
    np.testing.assert_array_equal(run(folded, [data])[0], run(before, [data])[0])
    exact = {
        Rounding.TONEAREST: [1, 2, -1, -2], Rounding.TONEAREST_EVEN: [0, 2, 0, -2],
        Rounding.UPWARD: [1, 2, 0, -1],
    }  # fmt: skip
    np.testing.assert_array_equal(run(before, [data])[0], exact[rounding])


def test_quantize_of_dequantize__other_parameters_become_requantize():
    @as_main
    def before(q: R.Tensor((2, 3), "uint8")):
        d = dequantize(q)
        return quantize(d, 0.25, -3, "int8")

    @as_main
    def expected(q: R.Tensor((2, 3), "uint8")):
        return requantize(q, 0.25, -3, "int8")

    check(before, expected)
    values = np.arange(6, dtype="uint8").reshape(2, 3) * 40
    np.testing.assert_array_equal(run(fold_qnn(before), values)[0], run(before, values)[0])


def test_quantize_of_dequantize__same_numbers_of_another_dtype_are_converted():
    @as_main
    def before(q: R.Tensor((2, 3), "uint8")):
        d = dequantize(q)
        return quantize(d, 0.5, 10, "int8")

    @as_main
    def expected(q: R.Tensor((2, 3), "uint8")):
        return requantize(q, 0.5, 10, "int8")

    check(before, expected)


def test_quantize_of_dequantize__accumulator_per_channel():
    @as_main
    def before(q: R.Tensor((2, 3, 4), "int32")):
        d = dequantize_channels(q)
        return quantize(d, 1.5, 7)

    @as_main
    def expected(q: R.Tensor((2, 3, 4), "int32")):
        return requantize_channels(q)

    check(before, expected)


def test_quantize_of_dequantize__the_float_value_stays_for_its_other_readers():
    @as_main
    def before(q: R.Tensor((2, 3), "uint8")):
        d = dequantize(q)
        p = quantize(d, 0.25, -3, "int8")
        s = R.nn.softmax(d)
        return (p, s)

    @I.ir_module
    class Expected:
        @R.function
        def main(q: R.Tensor((2, 3), "uint8")):
            with R.dataflow():
                d = dequantize(q)
                p = requantize(q, 0.25, -3, "int8")
                s = R.nn.softmax(d)
                out = (p, s)
                R.output(out)
            return out

    check(before, Expected)


def test_quantize_of_dequantize__parameters_that_are_variables_stay():
    @as_main
    def module(q: R.Tensor((2, 3), "uint8"), s: R.Tensor((), "float32")):
        d = R.qnn.dequantize(q, s, R.const(10, "int32"))
        return quantize(d)

    check(module, module)


def test_quantize_of_dequantize__per_channel_output_stays():
    """requantize has one scale for its output."""

    @as_main
    def before(q: R.Tensor((2, 3), "uint8")):
        d = dequantize(q)
        return quantize_channels(d)

    check(before, before)


def test_constants__integer_constants_are_computed():
    @as_main
    def before(q: R.Tensor((4, 4), "uint8")):
        w = R.permute_dims(R.const(WEIGHT), axes=[1, 0])
        return R.qnn.dense(
            q, w, R.const(10, "int32"), R.const(0, "int32"),
            R.const(0.5, "float32"), R.const(0.25, "float32"),
        )  # fmt: skip

    @as_main
    def expected(q: R.Tensor((4, 4), "uint8")):
        return R.qnn.dense(
            q, R.const(np.ascontiguousarray(WEIGHT.T)), R.const(10, "int32"),
            R.const(0, "int32"), R.const(0.5, "float32"), R.const(0.25, "float32"),
        )  # fmt: skip

    check(before, expected)


def test_clip_of_clip__bounds_intersect():
    @as_main
    def before(q: R.Tensor((4,), "uint8")):
        a = R.clip(q, T.uint8(3), T.uint8(90))
        b = R.clip(a, T.uint8(0), T.uint8(255))
        return R.clip(b, T.uint8(10), T.uint8(200))

    @as_main
    def expected(q: R.Tensor((4,), "uint8")):
        return R.clip(q, T.uint8(10), T.uint8(90))

    check(before, expected)


def test_clip_of_clip__intervals_that_do_not_meet():
    for outer in ((100, 120), (0, 2)):
        q = relax.Var("q", relax.TensorType((256,), "uint8"))
        builder = relax.BlockBuilder()

        def clip(value, low, high):
            return relax.op.clip(
                value, tvm.tirx.IntImm("uint8", low), tvm.tirx.IntImm("uint8", high)
            )

        with builder.function("main", [q]):
            with builder.dataflow():
                inner = builder.emit(clip(q, 3, 90))
                out = builder.emit_output(clip(inner, *outer))
            builder.emit_func_output(out)
        mod = builder.finalize()
        values = np.arange(256, dtype="uint8")
        np.testing.assert_array_equal(run(fold_qnn(mod), values)[0], run(mod, values)[0])


def test_clip__float_clips_are_left_alone():
    @as_main
    def module(x: R.Tensor((4,), "float32")):
        a = R.clip(x, 0.0, 5.0)
        return R.clip(a, 1.0, 6.0)

    check(module, module)
