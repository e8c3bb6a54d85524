"""Pooling, with and without AVX, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from exact import F32, call_kernel, random_values, store
from machines import runnable_target

from relayquant.codegen.kernels.integer.elementwise import Space
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.integer.pool import (
    AvgPool2d,
    MaxPool2d,
    Mean,
    PoolWindow,
    build_avg_pool2d,
    build_max_pool2d,
    build_mean,
)
from relayquant.codegen.kernels.isa.x86 import AVX2, AVX512BW, SSE2

OUT = Epilogue(zero_point=7)
OUTSIDE = -(2**20)
WINDOWS = {
    "3x3/2 padded": PoolWindow(2, 7, 8, 20, (3, 3), (2, 2), (1, 1, 1, 1)),
    "ceil mode, 3 channels": PoolWindow(1, 7, 8, 3, (3, 2), (2, 1), ceil_mode=True),
    "global": PoolWindow(1, 7, 7, 64, (7, 7)),
    "dilation, asymmetric padding": PoolWindow(1, 9, 9, 33, (3, 3), (1, 1), (1, 2, 1, 0), (2, 2)),
    "with threads": PoolWindow(1, 40, 40, 48, (3, 3), (1, 1), (1, 1, 1, 1)),
}
with_machines = pytest.mark.parametrize("isa", [SSE2, AVX2, AVX512BW], ids=lambda isa: isa.name)
with_windows = pytest.mark.parametrize("case", WINDOWS)


def taps(x, window):
    """(taps, N, OH, OW, C) int64; OUTSIDE where a tap is not in the data."""
    top, left = window.padding[:2]
    (oh, ow), (sh, sw), (dh, dw) = window.out_size, window.strides, window.dilation
    padded = np.full((x.shape[0], x.shape[1] + 40, x.shape[2] + 40, x.shape[3]), OUTSIDE, "int64")
    padded[:, top : top + window.height, left : left + window.width] = x
    return np.stack(
        [
            padded[:, i * dh : i * dh + oh * sh : sh, j * dw : j * dw + ow * sw : sw]
            for i, j in np.ndindex(*window.kernel)
        ]
    )


@pytest.mark.sample(4)
@with_machines
@with_windows
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_build_max_pool2d__equals_numpy(isa, case, dtype):
    window = WINDOWS[case]
    x = random_values(np.random.default_rng(0), window.in_shape, dtype)
    func = build_max_pool2d(MaxPool2d(window, dtype))
    got = call_kernel(func, runnable_target(isa), [x], window.out_shape, dtype)
    np.testing.assert_array_equal(got, taps(x, window).max(axis=0))


@with_machines
def test_build_max_pool2d__of_floats_begins_at_infinity(isa):
    window = WINDOWS["dilation, asymmetric padding"]
    x = np.random.default_rng(0).normal(size=window.in_shape).astype("float32")
    x[:, :7, :, :9] = -np.inf
    func = build_max_pool2d(MaxPool2d(window, "float32"))
    got = call_kernel(func, runnable_target(isa), [x], window.out_shape, "float32")
    ranks = np.argsort(np.argsort(x.ravel(), kind="stable"), kind="stable").reshape(x.shape)
    expected = np.sort(x.ravel())[taps(ranks, window).max(axis=0)]
    assert np.isinf(expected).any()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.sample(4)
@with_machines
@with_windows
@pytest.mark.parametrize(
    ("dtype", "count_include_pad"), [("int8", False), ("int8", True), ("int16", False)]
)
def test_build_avg_pool2d__equals_numpy(isa, case, dtype, count_include_pad):
    window = WINDOWS[case]
    x = random_values(np.random.default_rng(0), window.in_shape, dtype)
    spec = AvgPool2d(window, Space(dtype, -3, 1.7), OUT, count_include_pad)
    func = build_avg_pool2d(spec)
    got = call_kernel(func, runnable_target(isa), [x], window.out_shape, "uint8")
    values = taps(x, window)
    inside = values != OUTSIDE
    sums = np.where(inside, values + 3, 0).sum(axis=0).astype("float32")
    count = np.prod(window.kernel) if count_include_pad else inside.sum(axis=0)
    factor = F32(1.7) / np.asarray(count, "float32")
    np.testing.assert_array_equal(got, store(sums * factor, OUT))


MEANS = {
    "last axis": ((3, 5, 37), 2, 2),
    "last axes, short": ((7, 2, 5), 1, 2),
    "all axes": ((2, 3, 5), 0, 2),
    "first axis": ((6, 4, 19), 0, 0),
    "middle axes": ((2, 3, 4, 16), 1, 2),
    "with threads": ((70, 8000), 1, 1),
}


@pytest.mark.sample(4)
@with_machines
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("case", MEANS)
def test_build_mean__equals_numpy(isa, case, dtype):
    shape, first, last = MEANS[case]
    x = random_values(np.random.default_rng(0), shape, dtype)
    spec = Mean(shape, first, last, Space(dtype, -3, 0.01), OUT)
    axes = tuple(range(first, last + 1))
    sums = (x.astype("int64") + 3).sum(axis=axes, keepdims=True).astype("float32")
    factor = F32(0.01) / F32(spec.extents[1])
    got = call_kernel(build_mean(spec), runnable_target(isa), [x], sums.shape, "uint8")
    np.testing.assert_array_equal(got, store(sums * factor, OUT))


@with_machines
@pytest.mark.parametrize(
    ("dtype", "end", "count"),
    [("uint8", 255, 257), ("uint8", 255, 258), ("int8", -128, 256), ("int8", -128, 257)],
)
def test_build_mean__largest_sums_of_16_bits_and_beyond(isa, dtype, end, count):
    x = np.full((1, count, 80), end, dtype)
    spec = Mean(x.shape, 1, 1, Space(dtype, -3, 0.5), OUT)
    got = call_kernel(build_mean(spec), runnable_target(isa), [x], (1, 1, 80), "uint8")
    total = np.full((1, 1, 80), count * (end + 3), "float32")
    np.testing.assert_array_equal(got, store(total * (F32(0.5) / F32(count)), OUT))


def test_build_mean__of_everything_is_a_scalar():
    x = np.arange(24, dtype="int8").reshape(1, 2, 3, 4)
    spec = Mean(x.shape, 0, 3, Space("int8", 0, 2.0), OUT)
    got = call_kernel(build_mean(spec, "mean", ()), runnable_target(SSE2), [x], (), "uint8")
    np.testing.assert_array_equal(got, store(F32(x.sum()) * (F32(2.0) / F32(24)), OUT))


@pytest.mark.parametrize(("dtype", "most"), [("int8", 8_421_504), ("int16", 32_768)])
def test_build_mean__too_many_values(dtype, most):
    build_mean(Mean((1, most), 1, 1, Space(dtype, -3, 1.7), OUT))
    with pytest.raises(ValueError, match=f"allowed: up to {most}"):
        build_mean(Mean((1, most + 1), 1, 1, Space(dtype, -3, 1.7), OUT))


def test_window__does_not_fit():
    with pytest.raises(ValueError, match="does not fit"):
        PoolWindow(1, 2, 2, 4, (3, 3))
