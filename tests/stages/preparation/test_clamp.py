"""relu, clip, maximum and minimum."""

from __future__ import annotations

import numpy as np
from float_models import as_main
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R


def test_maximum_zero__relu(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        return R.maximum(R.const(0.0, "float32"), x)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        return R.nn.relu(x)

    check_prepared(before, expected)


def test_minimum_of_maximum__clip(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        low = R.maximum(x, R.const(-1.5, "float32"))
        return R.minimum(low, R.const(2.0, "float32"))

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        return R.clip(x, -1.5, 2.0)

    check_prepared(before, expected)
    check_same_numbers(before, np.linspace(-4, 4, 6, dtype="float32").reshape(2, 3))


def test_relu_chain__one_clip(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        a = R.clip(x, -3.0, 8.0)
        b = R.nn.relu(a)
        c = R.minimum(b, R.const(6.0, "float32"))
        return R.nn.relu(c)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        return R.clip(x, 0.0, 6.0)

    check_prepared(before, expected)
    check_same_numbers(before, np.linspace(-9, 9, 6, dtype="float32").reshape(2, 3))


def test_disjoint_clamps__constant_range(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        a = R.clip(x, 4.0, 5.0)
        return R.clip(a, 0.0, 1.0)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        return R.clip(x, 1.0, 1.0)

    check_prepared(before, expected)


def test_clamp_behind_concat__is_one_of_every_product(check_prepared, check_same_numbers):
    weight, bias = (
        relax.const(np.random.default_rng(0).standard_normal(shape, "float32"))
        for shape in ((4, 3, 1, 1), (1, 4, 1, 1))
    )

    @as_main
    def before(x: R.Tensor((2, 3, 5, 5), "float32")):
        a = R.nn.conv2d(x, weight)
        b = R.add(R.nn.conv2d(x, weight), bias)
        return R.clip(R.concat((a, b), axis=1), 0.0, 6.0)

    @as_main
    def expected(x: R.Tensor((2, 3, 5, 5), "float32")):
        a = R.clip(R.nn.conv2d(x, weight), 0.0, 6.0)
        b = R.clip(R.add(R.nn.conv2d(x, weight), bias), 0.0, 6.0)
        return R.concat((a, b), axis=1)

    check_prepared(before, expected)
    check_same_numbers(before, np.random.default_rng(1).normal(0, 4, (2, 3, 5, 5)).astype("f4"))


def test_clamp_behind_concat__of_other_values_stays(check_prepared):
    weight = relax.const(np.ones((3, 3, 1, 1), "float32"))

    @as_main
    def before(x: R.Tensor((2, 3, 5, 5), "float32")):
        return R.nn.relu(R.concat((R.nn.conv2d(x, weight), x), axis=1))

    check_prepared(before, before)


def test_inner_clamp_used_twice__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        a = R.nn.relu(x)
        b = R.clip(a, 0.0, 6.0)
        return R.add(a, b)

    check_prepared(before, before)


def test_inner_clamp_returned__stays(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.clip(a, 0.0, 6.0)
                R.output(a, b)
            return (a, b)

    check_prepared(Before, Before)


def test_lone_maximum__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        return R.maximum(x, R.const(1e-12, "float32"))

    check_prepared(before, before)


def test_integers__stay(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "int32")):
        a = R.maximum(x, R.const(0, "int32"))
        return R.minimum(a, R.const(6, "int32"))

    check_prepared(before, before)


def test_broadcasting_maximum__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((3,), "float32"), z: R.Tensor((2, 3), "float32")):
        a = R.maximum(x, z)
        return R.minimum(a, R.const(6.0, "float32"))

    check_prepared(before, before)


SLOPE = relax.const(np.full(3, 0.25, "float32"))
SLOPES = relax.const(np.array([0.25, 0.5, 0.25], "float32"))


def test_prelu__leaky_relu_where_all_slopes_are_one(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        a = R.nn.prelu(x, SLOPE, axis=1)
        return R.nn.prelu(a, SLOPES, axis=1)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        a = R.nn.leakyrelu(x, alpha=0.25)
        return R.nn.prelu(a, SLOPES, axis=1)

    check_prepared(before, expected)
    check_same_numbers(before, np.linspace(-2, 2, 6, dtype="float32").reshape(2, 3))


def test_where__a_prelu_spelled_out(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        positive = R.greater(x, R.const(0.0, "float32"))
        scaled = R.multiply(R.const([[0.25]], "float32"), x)
        a = R.where(positive, x, scaled)
        also = R.greater(a, R.const(0.0, "float32"))
        by_channel = R.multiply(a, SLOPES)
        return R.where(also, a, by_channel)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        a = R.nn.leakyrelu(x, alpha=0.25)
        return R.nn.prelu(a, SLOPES, axis=1)

    check_prepared(before, expected)
    check_same_numbers(before, np.linspace(-2, 2, 6, dtype="float32").reshape(2, 3))


def test_where__another_bound_or_value_is_no_prelu(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32"), z: R.Tensor((2, 3), "float32")):
        above = R.greater(x, R.const(1.0, "float32"))
        scaled = R.multiply(x, SLOPES)
        a = R.where(above, x, scaled)
        positive = R.greater(x, R.const(0.0, "float32"))
        other = R.multiply(z, SLOPES)
        b = R.where(positive, x, other)
        c = R.where(positive, z, scaled)
        return (a, b, c)

    check_prepared(before, before)
