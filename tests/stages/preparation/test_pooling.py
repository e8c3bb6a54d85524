"""Pads before windows, pools over the whole map, flatten."""

from __future__ import annotations

import math

import numpy as np
import pytest
from float_models import as_main
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

RNG = np.random.default_rng(3)
W = relax.const(RNG.standard_normal((4, 3, 3, 3)).astype("float32"))
W1 = relax.const(RNG.standard_normal((4, 3, 3)).astype("float32"))


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def test_pad_before_conv2d__folded(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 0, 1, 2, 3], pad_value=0.0)
        return R.nn.conv2d(p, W, padding=[1, 1, 0, 0], strides=[2, 2])

    @as_main
    def expected(x: R.Tensor((1, 3, 8, 8), "float32")):
        return R.nn.conv2d(x, W, padding=[1, 3, 1, 3], strides=[2, 2])

    check_prepared(before, expected)
    check_same_numbers(before, draw(1, 3, 8, 8))


def test_pad_before_conv1d__folded(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 3, 8), "float32")):
        p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 2, 0], pad_value=0.0)
        return R.nn.conv1d(p, W1)

    @as_main
    def expected(x: R.Tensor((1, 3, 8), "float32")):
        return R.nn.conv1d(x, W1, padding=[2, 0])

    check_prepared(before, expected)


def test_pad_with_other_value_or_channels__stays(check_prepared):
    weight = relax.const(draw(4, 4, 3, 3))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=1.0)
        y = R.nn.conv2d(p, W)
        q = R.nn.pad(x, pad_width=[0, 0, 0, 1, 1, 1, 1, 1], pad_value=0.0)
        z = R.nn.conv2d(q, weight)
        r = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_mode="reflect")
        v = R.nn.conv2d(r, W)
        return y, z, v

    check_prepared(before, before)


def test_pad_used_twice__stays(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
                y = R.nn.conv2d(p, W)
                R.output(p, y)
            return (p, y)

    check_prepared(Before, Before)


@pytest.mark.slow
def test_pad_before_avg_pool__counts_pads(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
        return R.nn.avg_pool2d(p, pool_size=[3, 3])

    @as_main
    def expected(x: R.Tensor((1, 3, 8, 8), "float32")):
        return R.nn.avg_pool2d(x, pool_size=[3, 3], padding=[1, 1, 1, 1], count_include_pad=True)

    check_prepared(before, expected)
    check_same_numbers(before, draw(1, 3, 8, 8))


def test_pad_before_avg_pool_with_uncounted_padding__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
        return R.nn.avg_pool2d(p, pool_size=[3, 3], padding=[1, 1, 1, 1])

    check_prepared(before, before)


@pytest.mark.slow
def test_pad_before_max_pool__folded_on_non_negative_data(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        r = R.nn.relu(x)
        p = R.nn.pad(r, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
        return R.nn.max_pool2d(p, pool_size=[3, 3], strides=[2, 2])

    @as_main
    def expected(x: R.Tensor((1, 3, 8, 8), "float32")):
        r = R.nn.relu(x)
        return R.nn.max_pool2d(r, pool_size=[3, 3], strides=[2, 2], padding=[1, 1, 1, 1])

    check_prepared(before, expected)
    check_same_numbers(before, draw(1, 3, 8, 8))


def test_pad_before_max_pool__minus_infinity_folded(check_same_numbers):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 8, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            widths = [0, 0, 0, 0, 1, 1, 1, 1]
            padded = builder.emit(relax.op.nn.pad(x, widths, "constant", -math.inf))
            out = builder.emit_output(relax.op.nn.max_pool2d(padded, [3, 3]))
        builder.emit_func_output(out)
    prepared = check_same_numbers(builder.finalize(), draw(1, 3, 8, 8))
    assert len(prepared["main"].body.blocks[0].bindings) == 1


def test_pad_before_max_pool__stays_on_signed_data_or_wide_pads(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        p = R.nn.pad(x, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
        y = R.nn.max_pool2d(p, pool_size=[3, 3])
        r = R.nn.relu(x)
        q = R.nn.pad(r, pad_width=[0, 0, 0, 0, 3, 3, 3, 3], pad_value=0.0)
        z = R.nn.max_pool2d(q, pool_size=[3, 3])
        return y, z

    check_prepared(before, before)


@pytest.mark.slow
def test_pools_over_the_whole_map__mean(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((2, 3, 8, 6), "float32"), z: R.Tensor((2, 8, 6, 3), "float32")):
        a = R.nn.adaptive_avg_pool2d(x, output_size=[1, 1])
        b = R.nn.avg_pool2d(x, pool_size=[8, 6], strides=[8, 6])
        c = R.nn.avg_pool2d(z, pool_size=[8, 6], layout="NHWC")
        return a, b, c

    @as_main
    def expected(x: R.Tensor((2, 3, 8, 6), "float32"), z: R.Tensor((2, 8, 6, 3), "float32")):
        a = R.mean(x, axis=[2, 3], keepdims=True)
        b = R.mean(x, axis=[2, 3], keepdims=True)
        c = R.mean(z, axis=[1, 2], keepdims=True)
        return a, b, c

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 3, 8, 6), draw(2, 8, 6, 3))


def test_smaller_pools__stay(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3, 8, 6), "float32")):
        a = R.nn.adaptive_avg_pool2d(x, output_size=[2, 1])
        b = R.nn.avg_pool2d(x, pool_size=[8, 5])
        c = R.nn.avg_pool2d(x, pool_size=[8, 6], padding=[1, 1, 1, 1])
        return a, b, c

    check_prepared(before, before)


def test_flatten__reshape(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3, 4), "float32")):
        a = R.flatten(x)
        b = R.nn.batch_flatten(x)
        return a, b

    @as_main
    def expected(x: R.Tensor((2, 3, 4), "float32")):
        a = R.reshape(x, R.shape([24]))
        b = R.reshape(x, R.shape([2, 12]))
        return a, b

    check_prepared(before, expected)
