"""Convolutions, products and reductions, compiled for two targets, against naive numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from qnn_testing import make_module, run_call, run_constant_and_variable, run_module
from tvm import relax, tirx

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.ir.dialect import qnn

RNG = np.random.default_rng(0)


def integers(shape, dtype="int8"):
    low, high = INTEGER_LIMITS[dtype]
    return RNG.integers(low, high, shape, endpoint=True).astype(dtype)


def to_layout(array, source, target):
    return np.ascontiguousarray(array.transpose([source.index(letter) for letter in target]))


def convolve(x, w, strides, padding, dilation, groups):
    """Naive NCHW / OIHW convolution in int64."""
    top, left, bottom, right = padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right))).astype("int64")
    n, _, h, width = x.shape
    outputs, per_group, kh, kw = w.shape
    oh = (h - dilation[0] * (kh - 1) - 1) // strides[0] + 1
    ow = (width - dilation[1] * (kw - 1) - 1) // strides[1] + 1
    y = np.zeros((n, outputs, oh, ow), "int64")
    for o, i, j, k in itertools.product(range(outputs), range(per_group), range(kh), range(kw)):
        c = o // (outputs // groups) * per_group + i
        rows = slice(j * dilation[0], j * dilation[0] + strides[0] * (oh - 1) + 1, strides[0])
        columns = slice(k * dilation[1], k * dilation[1] + strides[1] * (ow - 1) + 1, strides[1])
        y[:, o] += x[:, c, rows, columns] * int(w[o, i, j, k])
    return y


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("data_layout", "kernel_layout"),
    [("NCHW", "OIHW"), ("NHWC", "HWIO"), ("NHWC", "OHWI"), ("NCHW", "IHWO")],
)
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "strides", "padding", "dilation"),
    [
        (3, 5, 1, (1, 1), (0, 0, 0, 0), (1, 1)),
        (5, 7, 1, (2, 1), (1, 2, 0, 3), (1, 1)),
        (4, 6, 2, (1, 2), (1, 1, 1, 1), (2, 1)),
        (3, 6, 3, (1, 1), (2, 1, 2, 1), (1, 2)),
    ],
)
def test_conv2d(data_layout, kernel_layout, channels, outputs, groups, strides, padding, dilation):
    x, w = integers((2, channels, 7, 9), "uint8"), integers((outputs, channels // groups, 3, 2))
    zeros = RNG.integers(-5, 6, outputs).astype("int32")
    got = run_constant_and_variable(
        lambda d, k, z, zk: qnn.conv2d(
            d,
            k,
            z,
            zk,
            0.1,
            0.2,
            strides,
            padding,
            dilation,
            groups,
            data_layout,
            kernel_layout,
        ),
        [to_layout(x, "NCHW", data_layout), to_layout(w, "OIHW", kernel_layout)],
        [131, zeros],
        targets=["llvm"],
    )
    expected = convolve(
        x.astype("int64") - 131,
        w.astype("int64") - zeros[:, None, None, None],
        strides,
        padding,
        dilation,
        groups,
    )
    np.testing.assert_array_equal(got, to_layout(expected, "NCHW", data_layout))
    assert got.dtype == "int32"


def test_conv2d__both_targets_and_int16():
    x, w = integers((1, 3, 6, 6), "int16"), integers((5, 3, 3, 3))
    got = run_call(lambda d, k: qnn.conv2d(d, k, -300, 4, 0.1, 0.2, padding=1), x, w)
    expected = convolve(x.astype("int64") + 300, w.astype("int64") - 4, (1, 1), (1,) * 4, (1, 1), 1)
    np.testing.assert_array_equal(got, expected)


def test_conv2d__symbolic_batch_and_size():
    n, h = tirx.Var("n", "int64"), tirx.Var("h", "int64")
    w = integers((5, 3, 3, 3))
    module = make_module(
        lambda d: qnn.conv2d(d, w, 7, 0, 0.1, 0.2, strides=2, padding=1),
        [relax.TensorType((n, 3, h, 8), "int8")],
    )
    for batch, height in ((1, 5), (3, 8)):
        x = integers((batch, 3, height, 8))
        expected = convolve(x.astype("int64") - 7, w, (2, 2), (1,) * 4, (1, 1), 1)
        np.testing.assert_array_equal(run_module(module, [x]), expected)


@pytest.mark.parametrize("layouts", [("NCW", "OIW"), ("NWC", "WIO"), ("NWC", "OWI")])
def test_conv1d(layouts):
    x, w = integers((2, 4, 11)), integers((6, 2, 3))
    got = run_call(
        lambda d, k: qnn.conv1d(d, k, 3, -1, 0.1, 0.2, 2, (2, 1), 2, 2, *layouts),
        to_layout(x, "NCW", layouts[0]),
        to_layout(w, "OIW", layouts[1]),
    )
    expected = convolve(
        x[:, :, None].astype("int64") - 3,
        w[:, :, None].astype("int64") + 1,
        (1, 2),
        (0, 2, 0, 1),
        (1, 2),
        2,
    )[:, :, 0]
    np.testing.assert_array_equal(got, to_layout(expected, "NCW", layouts[0]))


def convolve_transposed(x, w, strides, padding, extra, dilation, groups):
    """Naive NCHW / IOHW: every input adds its window to the output."""
    n, channels, h, width = x.shape
    _, per_group, kh, kw = w.shape
    full_h = (h - 1) * strides[0] + dilation[0] * (kh - 1) + 1
    full_w = (width - 1) * strides[1] + dilation[1] * (kw - 1) + 1
    y = np.zeros((n, per_group * groups, full_h + extra[0], full_w + extra[1]), "int64")
    for c, o, j, k in itertools.product(range(channels), range(per_group), range(kh), range(kw)):
        out = c // (channels // groups) * per_group + o
        rows = slice(j * dilation[0], j * dilation[0] + strides[0] * (h - 1) + 1, strides[0])
        columns = slice(k * dilation[1], k * dilation[1] + strides[1] * (width - 1) + 1, strides[1])
        y[:, out, rows, columns] += x[:, c] * int(w[c, o, j, k])
    top, left, bottom, right = padding
    return y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layouts", [("NCHW", "IOHW"), ("NHWC", "HWIO")])
@pytest.mark.parametrize(
    ("groups", "strides", "padding", "extra", "dilation"),
    [
        (1, (1, 1), (0, 0, 0, 0), (0, 0), (1, 1)),
        (1, (2, 3), (1, 0, 2, 1), (1, 2), (1, 1)),
        (3, (2, 1), (1, 1, 0, 2), (0, 0), (2, 1)),
    ],
)
def test_conv2d_transpose(layouts, groups, strides, padding, extra, dilation):
    x, w = integers((2, 3, 5, 4), "uint8"), integers((3, 2, 3, 2))
    outputs = 2 * groups
    zeros = RNG.integers(-5, 6, outputs).astype("int32")
    got = run_constant_and_variable(
        lambda d, k, z, zk: qnn.conv2d_transpose(
            d, k, z, zk, 0.1, 0.2, strides, padding, extra, dilation, groups, *layouts
        ),
        [to_layout(x, "NCHW", layouts[0]), to_layout(w, "IOHW", layouts[1])],
        [120, zeros],
        targets=["llvm"],
    )
    per_input = np.repeat(zeros.reshape(groups, 2), 3 // groups, axis=0)
    expected = convolve_transposed(
        x.astype("int64") - 120,
        w.astype("int64") - per_input[:, :, None, None],
        strides,
        padding,
        extra,
        dilation,
        groups,
    )
    np.testing.assert_array_equal(got, to_layout(expected, "NCHW", layouts[0]))


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)])
def test_dense(shape):
    x, w, zeros = integers(shape, "uint8"), integers((5, 7)), np.arange(-2, 3, dtype="int32")
    got = run_constant_and_variable(
        lambda d, k, z, zk: qnn.dense(d, k, z, zk, 0.1, 0.2), [x, w], [100, zeros]
    )
    expected = (x.astype("int64") - 100) @ (w.astype("int64") - zeros[:, None]).T
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, 6), (5, 6)), ((2, 4, 6), (2, 5, 6)), ((2, 1, 4, 6), (3, 5, 6)), ((4, 6), (3, 5, 6))],
)
def test_batch_matmul(left, right):
    x, y = integers(left), integers(right, "uint8")
    got = run_constant_and_variable(
        lambda a, b, *z: qnn.batch_matmul(a, b, *z, 0.1, 0.2), [x, y], [-3, 130]
    )
    expected = (x.astype("int64") + 3) @ (y.astype("int64") - 130).swapaxes(-1, -2)
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- reductions


def finish_mean(total, count, s_in, s_out, zero, dtype="int8"):
    """The default arithmetic: m' = float32(m / float32(count))."""
    ratio = np.float64(np.float32(s_in)) / np.float64(np.float32(s_out))
    m = np.float32(ratio) / np.asarray(count, "float32")
    t = np.rint(total.astype("float32") * m.astype("float32"))
    low, high = INTEGER_LIMITS[dtype]
    return (np.clip(t, low - zero, high - zero).astype("int64") + zero).astype(dtype)


@pytest.mark.parametrize(
    ("axes", "keepdims"), [([2, 3], False), ([-1], True), ([3, 1], False), (None, False)]
)
def test_mean(axes, keepdims):
    x = integers((2, 3, 5, 7))
    got = run_constant_and_variable(
        lambda d, *p: qnn.mean(d, *p, axes=axes, keepdims=keepdims, out_dtype="uint8"),
        [x],
        [0.1, -9, 0.01, 120],
    )
    over = tuple(axes) if axes else None
    total = (x.astype("int64") + 9).sum(axis=over, keepdims=keepdims)
    expected = finish_mean(total, x.size // total.size, 0.1, 0.01, 120, "uint8")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_mean__symbolic_count(arithmetic):
    """The count is known at run time only; the result is that of a fixed shape."""

    def make_call(d):
        return qnn.mean(d, 0.1, 3, 0.02, -5, axes=[1], compute_dtype=arithmetic)

    symbolic = make_module(make_call, [relax.TensorType((4, tirx.Var("n", "int64")), "int8")])
    for size in (1, 7, 49):
        x = integers((4, size))
        np.testing.assert_array_equal(run_module(symbolic, [x]), run_call(make_call, x))


def test_mean__relay_modes_divide_the_real_multiplier():
    x = integers((4, 8))
    got = run_constant_and_variable(
        lambda d, *p: qnn.mean(
            d, *p, axes=[1], rounding=Rounding.UPWARD, compute_dtype=Arithmetic.INT64
        ),
        [x],
        [0.5, 3, 0.25, -5],
    )
    total = (x.astype("int64") - 3).sum(axis=1)
    expected = np.clip(np.floor(total * 2 / 8 + 0.5) - 5, -128, 127)
    np.testing.assert_array_equal(got, expected.astype("int8"))


def pool(x, size, strides, padding, dilation, out_shape):
    """Per window of NCHW data: sum, number of data elements, the same with those of its padding."""
    edges = [(padding[i], padding[i + 2]) for i in range(2)]
    sizes = [x.shape[2 + i] + sum(edges[i]) for i in range(2)]
    reach = [(out_shape[i] - 1) * strides[i] + dilation[i] * (size[i] - 1) + 1 for i in range(2)]
    beyond = [(0, max(reach[i] - sizes[i], 0)) for i in range(2)]
    ones = np.ones(x.shape[2:], "int64")
    results = []
    for source in (
        np.pad(x, ((0, 0), (0, 0), *edges)),
        np.pad(ones, edges),
        np.pad(ones, edges, constant_values=1),
    ):
        padded = np.pad(source, [(0, 0)] * (source.ndim - 2) + beyond).astype("int64")
        total = np.zeros((*source.shape[:-2], *out_shape), "int64")
        for j, k in itertools.product(range(size[0]), range(size[1])):
            rows = slice(j * dilation[0], j * dilation[0] + strides[0] * (out_shape[0] - 1) + 1)
            columns = slice(k * dilation[1], k * dilation[1] + strides[1] * (out_shape[1] - 1) + 1)
            total += padded[..., rows, columns][..., :: strides[0], :: strides[1]]
        results.append(total)
    return results


POOLS = [
    ((2, 3), (1, 2), (0, 0, 0, 0), (1, 1), False),
    ((3, 2), (2, 1), (1, 0, 2, 1), (1, 1), False),
    ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), True),
    ((2, 2), (3, 2), (0, 1, 0, 0), (2, 1), True),
    ((1, 2), (5, 3), (1, 1, 0, 2), (1, 1), True),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("size", "strides", "padding", "dilation", "ceil"), POOLS)
def test_avg_pool2d(layout, include, size, strides, padding, dilation, ceil):
    x = integers((2, 3, 7, 8))
    got = run_constant_and_variable(
        lambda d, *p: qnn.avg_pool2d(
            d, *p, size, strides, dilation, padding, ceil, include, layout
        ),
        [to_layout(x, "NCHW", layout)],
        [0.1, -9, 0.06, 12],
        targets=["llvm"],
    )
    got = to_layout(got, layout, "NCHW")
    total, inside, with_pads = pool(
        x.astype("int64") + 9, size, strides, padding, dilation, got.shape[2:]
    )
    divisor = np.maximum(with_pads if include else inside, 1)
    np.testing.assert_array_equal(got, finish_mean(total, divisor, 0.1, 0.06, 12))


@pytest.mark.sample(3)
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("size", "strides", "padding", "dilation", "ceil"), POOLS)
def test_avg_pool2d__counts_as_the_float_operator(include, size, strides, padding, dilation, ceil):
    """Within rounding of relax.nn.avg_pool2d, so that a quantized pool averages what it did."""
    x = integers((1, 2, 7, 8))
    settings = (size, strides, padding, dilation, ceil, include)
    expected = run_call(
        lambda d: relax.op.nn.avg_pool2d(d, *settings), x.astype("float32"), targets=["llvm"]
    )
    got = run_call(
        lambda d: qnn.avg_pool2d(
            d, 1.0, 0, 1.0, 0, size, strides, dilation, padding, ceil, include
        ),
        x,
        targets=["llvm"],
    )
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 0.5001


def test_avg_pool2d__symbolic_size_in_ceil_mode():
    h = tirx.Var("h", "int64")

    def make_call(d):
        return qnn.avg_pool2d(d, 0.1, 3, 0.1, 3, 1, 3, padding=0, ceil_mode=True)

    symbolic = make_module(make_call, [relax.TensorType((1, 1, h, 5), "int8")])
    for height in (5, 6, 7):
        x = integers((1, 1, height, 5))
        np.testing.assert_array_equal(run_module(symbolic, [x]), x[:, :, ::3, ::3])


def test_avg_pool2d__both_targets_and_relay_mode():
    """Relay requantizes first, pads with 0 and truncates."""
    x = integers((1, 3, 6, 6), "uint8")
    modes = {"rounding": Rounding.UPWARD, "compute_dtype": Arithmetic.INT64}
    got = run_constant_and_variable(
        lambda d, *p: qnn.avg_pool2d(
            d, *p, pool_size=3, padding=1, count_include_pad=True, **modes
        ),
        [x],
        [0.5, 100, 0.25, 7],
    )
    moved = (x.astype("int64") - 100) * 2 + 7
    total, _, _ = pool(moved, (3, 3), (1, 1), (1,) * 4, (1, 1), (6, 6))
    expected = np.clip(np.trunc(total / 9), 0, 255)
    np.testing.assert_array_equal(got, expected.astype("uint8"))
