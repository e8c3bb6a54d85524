"""Permutations of axes against numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from exact import call_kernel
from floats import TARGET
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.kernels.permutation import Permutation, make_permutation
from relayquant.ir.rewrite.function import make_main

CASES = [
    ((1, 64, 20, 30), (0, 2, 3, 1), "float32"),
    ((1, 20, 30, 64), (0, 3, 1, 2), "uint8"),
    ((2, 33, 3, 17), (0, 2, 3, 1), "int8"),  # keys of attention
    ((3, 8, 9, 10), (2, 3, 0, 1), "float32"),  # two axes each
    ((40, 16), (1, 0), "int32"),
    ((19, 5, 300), (2, 1, 0), "int16"),
    ((8, 1, 8), (2, 1, 0), "float32"),
    ((600, 17), (1, 0), "uint8"),  # several tasks along the last axis
    ((2, 3, 5, 7), (0, 2, 3, 1), "float32"),  # a few channels, which are interleaved
    ((4, 300), (1, 0), "uint8"),
    ((3, 2, 16), (0, 2, 1), "int16"),
]


def draw(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize(("shape", "axes", "dtype"), CASES)
def test_make_permutation__equals_numpy(shape, axes, dtype):
    x = draw(shape, dtype)
    spec = Permutation(shape, axes, dtype, x.itemsize)
    assert spec.has_kernel
    got = call_kernel(make_permutation(spec), TARGET, [x], spec.out_shape, dtype)
    np.testing.assert_array_equal(got, x.transpose(axes))


@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [
        ((1, 197, 3, 64), (0, 2, 1, 3), "int8"),  # the last axis stays
        ((1, 224, 224, 3), (0, 3, 1, 2), "float32"),  # three channels are no tile
        ((1, 5, 224, 224), (0, 2, 3, 1), "float32"),  # nor are five, which are not few
        ((1, 3, 3, 5), (0, 2, 3, 1), "float32"),  # 15 pixels are no vector
        ((1, 8, 1, 1), (0, 2, 3, 1), "float32"),  # moves no element
        ((16, 16), (1, 0), "int64"),
        ((), (), "float32"),
    ],
)
def test_has_kernel__where_two_long_axes_change_places_or_one_goes_behind_a_short_one(
    shape, axes, dtype
):
    assert not Permutation(shape, axes, dtype, np.dtype(dtype).itemsize).has_kernel


@pytest.mark.parametrize("shape", [(2, 24, 9, 10), ("n", 24, 9, 10), (2, 24, "n", 10)])
@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (2, 3, 0, 1), None])
def test_compile__permute_dims_of_known_and_unknown_sizes(shape, axes):
    x = draw((2, 24, 9, 10), "float32")
    n = tirx.Var("n", "int64")
    data = relax.Var("x", relax.TensorType([n if s == "n" else s for s in shape], "float32"))
    mod = make_main([data], lambda builder: builder.emit(relax.op.permute_dims(data, axes)))
    got = rq.Executor(rq.compile(mod)).run("main", [x])[0]
    np.testing.assert_array_equal(got, x.transpose(axes))
