"""Positions that repeat: compiled code reads them as numpy does. LLVM takes j % 8 for j."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.script import tirx as T

import relayquant as rq
from relayquant.codegen.schedule.periods import hide_periods
from relayquant.ir.rewrite.function import make_main

#: shape and repeats of each axis
TILES = [
    ((3, 8), (6, 8)),
    ((3, 4), (6, 16)),
    ((3, 16), (6, 8)),
    ((6, 8), (6, 8)),
    ((3, 4, 2), (6, 4, 2)),
    ((5, 4, 2), (4, 4, 2)),
    ((3, 4, 3), (6, 4, 2)),
    ((2, 3, 4, 2), (7, 6, 4, 2)),
]


def run_tile(data, repeats, target=None):
    x = relax.Var("x", relax.TensorType(data.shape, str(data.dtype)))
    mod = make_main([x], lambda _: relax.op.tile(x, repeats))
    return rq.Executor(rq.compile(mod, target)).run("main", [data])[0]


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("shape", "repeats"), TILES)
def test_tile__is_numpys(shape, repeats, dtype):
    """Half to seven of eight values came from other positions."""
    data = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape).astype(dtype)
    np.testing.assert_array_equal(run_tile(data, repeats), np.tile(data, repeats))


def make_copy(rows: int):
    @T.prim_func(s_tir=True)
    def copy(x: T.Buffer((rows, 8), "float32"), y: T.Buffer((18, 64), "float32")):
        for i, j in T.grid(18, 64):
            with T.sblock("y"):
                row, column = T.axis.remap("SS", [i, j])
                y[row, column] = x[row % rows, column % 8]

    return copy


@pytest.mark.parametrize(("rows", "is_hidden"), [(3, True), (5, True), (4, False), (8, False)])
def test_hide__remainders_of_powers_of_two_beside_other_divisions(rows, is_hidden):
    """All others stay as they are, also the remainders by other numbers."""
    hidden = hide_periods(make_copy(rows)).script()
    assert ("llvm.annotation" in hidden) == is_hidden
    assert f"% {rows}" in hidden


def test_hide__vectors_stay_as_they_are():
    @T.prim_func(s_tir=True)
    def copy(x: T.Buffer((3, 8), "float32"), y: T.Buffer((18, 64), "float32")):
        for i, j in T.grid(18, 8):
            for k in T.vectorized(8):
                with T.sblock("y"):
                    row = T.axis.spatial(18, i)
                    column = T.axis.spatial(64, j * 8 + k)
                    y[row, column] = x[row % 3, column % 8]

    assert hide_periods(copy).script() == copy.script()
