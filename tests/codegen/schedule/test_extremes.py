"""Maxima and minima begin at infinity, whatever the schedule made of the loops."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.schedule.reduction_init import begin_at_infinity
from relayquant.ir.rewrite.function import make_main

LOWEST = float(np.finfo("float32").min)


def make_model(shape, compute, dtype="float32") -> tvm.IRModule:
    x = relax.Var("x", R.Tensor(shape, dtype))
    return make_main([x], lambda _: compute(x))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 64), 1), ((6, 64), 0), ((3, 5), None), ((2, 3, 4, 40), (1, 3))]
)
def test_extremes__of_infinities_are_infinite(shape, axis, dtype):
    data = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    data[0] = -np.inf
    data[1] = np.finfo(dtype).min
    data = np.moveaxis(data, 0, -1).copy() if axis == 0 else data
    axis = 1 if axis == 0 else axis
    given = list(axis) if isinstance(axis, tuple) else axis
    for op, have in ((np.max, relax.op.max), (np.min, relax.op.min)):
        inputs = data if op is np.max else -data
        mod = make_model(inputs.shape, lambda x, have=have: have(x, axis=given), dtype)
        (found,) = Executor(rq.compile(mod)).run("main", [inputs])
        np.testing.assert_array_equal(found, op(inputs, axis=axis))


def test_extremes__of_a_pool():
    data = np.full((1, 2, 4, 6), -np.inf, "float32")
    data[0, 1] = np.arange(24).reshape(4, 6)
    mod = make_model(data.shape, lambda x: relax.op.nn.max_pool2d(x, (2, 2), (2, 2)))
    (found,) = Executor(rq.compile(mod)).run("main", [data])
    np.testing.assert_array_equal(found, data.reshape(1, 2, 2, 2, 3, 2).max(axis=(3, 5)))


def test_extremes__start_of_a_maximum():
    """y = lowest; y = max(y, x)  ->  y = -inf; y = max(y, x)"""

    @T.prim_func
    def before(x: T.Buffer((8,), "float32"), y: T.Buffer((1,), "float32")):
        y[0] = T.float32(LOWEST)
        for k in range(8):
            y[0] = T.max(y[0], x[k])

    @T.prim_func
    def expected(x: T.Buffer((8,), "float32"), y: T.Buffer((1,), "float32")):
        y[0] = T.float32("-inf")
        for k in range(8):
            y[0] = T.max(y[0], x[k])

    text = before.script()
    tvm.ir.assert_structural_equal(
        begin_at_infinity(before), expected.with_attr("global_symbol", "before")
    )
    assert before.script() == text


def test_extremes__other_numbers_stay():
    """A mask writes the lowest number; what takes both extremes is no reduction; integers have no
    infinity.
    """

    @T.prim_func
    def mask(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for k in range(8):
            y[k] = T.float32(LOWEST)
        for k in range(8):
            y[k] = x[k] + y[k]

    @T.prim_func
    def both(x: T.Buffer((8,), "float32"), y: T.Buffer((1,), "float32")):
        y[0] = T.float32(LOWEST)
        for k in range(8):
            y[0] = T.max(y[0], x[k])
            y[0] = T.min(y[0], x[k])

    @T.prim_func
    def integers(x: T.Buffer((8,), "int8"), y: T.Buffer((1,), "int8")):
        y[0] = T.int8(-128)
        for k in range(8):
            y[0] = T.max(y[0], x[k])

    for func in (mask, both, integers):
        tvm.ir.assert_structural_equal(begin_at_infinity(func), func)
