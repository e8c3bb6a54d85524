"""Positions that several symbolic sizes divide: few divisions, and the right elements."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.script import relax as R

import relayquant as rq
from relayquant.ir.rewrite.function import make_main

BLOCK = 2


def depth_to_space(n, c, h, w):
    return (n, BLOCK, BLOCK, c // 4, h, w), [0, 3, 4, 1, 5, 2], (n, c // 4, h * 2, w * 2)


def pixel_shuffle(n, c, h, w):
    return (n, c // 4, BLOCK, BLOCK, h, w), [0, 1, 4, 2, 5, 3], (n, c // 4, h * 2, w * 2)


def space_to_depth(n, c, h, w):
    return (n, c, h // 2, BLOCK, w // 2, BLOCK), [0, 3, 5, 1, 2, 4], (n, c * 4, h // 2, w // 2)


def channel_shuffle(n, c, h, w):
    return (n, BLOCK, c // 2, h, w), [0, 2, 1, 3, 4], (n, c, h, w)


def windows(n, c, h, w):
    return (n, c, h // 2, 2, w // 3, 3), [0, 2, 4, 3, 5, 1], (n * (h // 2) * (w // 3), 6, c)


@pytest.mark.parametrize(
    "move", [depth_to_space, pixel_shuffle, space_to_depth, channel_shuffle, windows]
)
def test_moved_blocks_of_symbolic_sizes__as_numpy(move):
    # With a correction of each division for negative numbers LLVM takes minutes.
    sizes = [tirx.Var(name, "int64") for name in "nchw"]
    split, axes, joined = move(*sizes)
    data = relax.Var("data", R.Tensor(sizes, "float32"))

    def emit(builder):
        moved = builder.emit(R.permute_dims(builder.emit(R.reshape(data, split)), axes))
        return R.reshape(moved, joined)

    mod = make_main([data], emit)
    machine = relax.VirtualMachine(rq.compile(mod, "llvm"), tvm.cpu())
    for given in (3, 8, 4, 6), (1, 4, 2, 12):
        values = np.arange(np.prod(given), dtype="float32").reshape(given)
        split, _, joined = move(*given)
        expected = values.reshape(split).transpose(axes).reshape(joined)
        np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(values)).numpy(), expected)


@pytest.mark.parametrize("divisor", [-3, 3])
def test_number_of_caller__rounds_down(divisor):
    # It is no size, so it may be negative.
    number = tirx.Var("number", "int64")
    shape = relax.Var("shape", R.Shape([number]))

    def divide(divisor):
        return te.compute((7,), lambda i: tirx.floordiv(i, divisor), name="quotient")

    mod = make_main([shape], lambda builder: builder.call_te(divide, number))
    machine = relax.VirtualMachine(rq.compile(mod, "llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.ShapeTuple([divisor])).numpy()
    np.testing.assert_array_equal(found, np.arange(7) // divisor)
