"""The cases of the operator table: a Relay expression each, and what it is in numpy and scipy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from scipy import special

rng = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def ints(low: int, high: int, *shape: int, dtype: str = "int32") -> np.ndarray:
    return rng.integers(low, high, shape).astype(dtype)


def conv(x, w, strides=1, pad=0):
    """NCHW / OIHW in two dimensions, one group."""
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    windows = sliding_window_view(x, w.shape[2:], (2, 3))[:, :, ::strides, ::strides]
    return np.einsum("nchwij,ocij->nohw", windows, w)


def transposed_conv(x, w, stride):
    """NCHW / IOHW, no padding."""
    n, _, h, wd = x.shape
    _, o, kh, kw = w.shape
    out = np.zeros((n, o, (h - 1) * stride + kh, (wd - 1) * stride + kw), x.dtype)
    for i in range(h):
        for j in range(wd):
            part = np.einsum("nc,coij->noij", x[:, :, i, j], w)
            out[:, :, i * stride : i * stride + kh, j * stride : j * stride + kw] += part
    return out


def windows(x, size):
    """NCHW, windows of `size` that do not overlap."""
    return sliding_window_view(x, (size, size), (2, 3))[:, :, ::size, ::size]


def normalize(x, axes, epsilon=1e-5):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon)


def softmax(x):
    return special.softmax(x, -1)


X = floats(2, 3, 4, 4)
M = floats(3, 4)
POSITIVE = np.abs(floats(3, 4)) + 0.5
UNIT = rng.uniform(-0.9, 0.9, (3, 4)).astype("float32")
I = ints(-9, 9, 3, 4)
J = ints(1, 5, 3, 4)
B = rng.integers(0, 2, (3, 4)).astype(bool)
C = rng.integers(0, 2, (3, 4)).astype(bool)
Q = ints(-128, 128, 2, 3, 4, 4, dtype="int8")
W = ints(-128, 128, 5, 3, 3, 3, dtype="int8")
ACC = ints(-5000, 5000, 2, 3)
GAMMA, BETA, MEAN, VAR = floats(3), floats(3), floats(3), np.abs(floats(3)) + 0.1
DW = floats(3, 2, 3, 3)


def requantize(x, scale, zero, out_scale, out_zero, dtype="int8"):
    """UPWARD in exact arithmetic: floor(x * m + 0.5) for multipliers that are powers of two."""
    real = np.floor((x.astype("int64") - zero) * (scale / out_scale) + 0.5).astype("int64")
    info = np.iinfo(dtype)
    return np.clip(real + out_zero, info.min, info.max).astype(dtype)


def table(function):
    """Half away from zero, from scale 1/16 to 1/64, zero points 3 and -5."""

    def apply(x):
        y = np.nan_to_num(function((x.astype("float64") - 3) / 16), nan=np.inf, posinf=1e9)
        y = np.clip(y, -1e9, 1e9) * 64
        rounded = np.trunc(y + np.copysign(0.5, y))
        return np.clip(rounded - 5, -128, 127).astype("int8")

    return apply


def integer_softmax(x):
    v = x.astype("int64") - 3
    v = v - v.max(-1, keepdims=True)
    v = v + (v >> 1) - (v >> 4)
    n = np.clip(np.trunc(v / -16).astype("int64"), 0, 20)
    b = ((v + n * 16) >> 1) + 16
    e = b << (n.max(-1, keepdims=True) - n)
    o = ((2**30 // e.sum(-1, keepdims=True)) * e) >> 23
    return requantize(o, 1 / 128, 0, 1 / 256, -128)


def case(text, expected, name=None, **inputs):
    """A case of the operator that `text` calls first, or of operator `name`."""
    name = name or re.search(r"[a-z][\w.]*(?=\()", text)[0]
    return pytest.param(name, text, expected, inputs, id=name)


def unary(name, function, x=M):
    return case(f"{name}(%x)", lambda x: function(x), x=x)


def binary(name, function, x=M, y=POSITIVE):
    return case(f"{name}(%x, %y)", lambda x, y: function(x, y), x=x, y=y)


def reduce(name, text, function, x=X):
    return case(f"{name}(%x, {text})", function, x=x)


def away(x):
    wide = np.asarray(x, "float64")
    return np.trunc(wide + np.copysign(0.5, wide)).astype(np.asarray(x).dtype)


LINEAR = [
    case(
        "nn.conv1d(%x, %w, channels=4, kernel_size=[2])",
        lambda x, w: conv(x[:, :, None], w[:, :, None])[:, :, 0],
        x=floats(2, 3, 6),
        w=floats(4, 3, 2),
    ),
    case(
        "nn.conv2d(%x, %w, strides=[2, 2], padding=[1, 1, 1, 1], channels=5, kernel_size=[3, 3])",
        lambda x, w: conv(x, w, 2, 1),
        x=X,
        w=floats(5, 3, 3, 3),
    ),
    case(
        "nn.conv3d(%x, %w)",
        lambda x, w: conv(x[:, :, 0], w[:, :, 0])[:, :, None],
        x=floats(1, 2, 1, 4, 4),
        w=floats(3, 2, 1, 2, 2),
    ),
    case(
        "nn.conv1d_transpose(%x, %w, strides=[2])",
        lambda x, w: transposed_conv(x[:, :, :, None], w[:, :, :, None], 2)[:, :, :, 0],
        x=floats(1, 2, 5),
        w=floats(2, 3, 3),
    ),
    case(
        "nn.conv2d_transpose(%x, %w, channels=2, kernel_size=[3, 3], strides=[2, 2])",
        lambda x, w: transposed_conv(x, w, 2),
        x=X,
        w=floats(3, 2, 3, 3),
    ),
    case("nn.dense(%x, %w, units=5)", lambda x, w: x @ w.T, x=M, w=floats(5, 4)),
    case(
        "nn.matmul(%x, %w, transpose_a=True)", lambda x, w: x.T @ w, x=floats(4, 3), w=floats(4, 5)
    ),
    case(
        "nn.batch_matmul(%x, %y, transpose_b=True)",
        lambda x, y: x @ y.swapaxes(1, 2),
        x=floats(2, 3, 4),
        y=floats(2, 5, 4),
    ),
]

POOL = [
    case(
        "nn.max_pool1d(%x, pool_size=[2], strides=[2])",
        lambda x: x.reshape(2, 3, 3, 2).max(-1),
        x=floats(2, 3, 6),
    ),
    case(
        "nn.max_pool2d(%x, pool_size=[2, 2], strides=[2, 2])",
        lambda x: windows(x, 2).max((4, 5)),
        x=X,
    ),
    case(
        "nn.max_pool3d(%x, pool_size=[1, 2, 2], strides=[1, 2, 2])",
        lambda x: windows(x[:, :, 0], 2).max((4, 5))[:, :, None],
        x=floats(1, 2, 1, 4, 4),
    ),
    case(
        "nn.avg_pool1d(%x, pool_size=[2], strides=[2])",
        lambda x: x.reshape(2, 3, 3, 2).mean(-1),
        x=floats(2, 3, 6),
    ),
    case(
        "nn.avg_pool2d(%x, pool_size=[2, 2], strides=[2, 2])",
        lambda x: windows(x, 2).mean((4, 5)),
        x=X,
    ),
    case(
        "nn.avg_pool2d(%x, pool_size=[2, 2], strides=[2, 2])",
        lambda x: np.trunc(windows(x, 2).sum((4, 5)) / 4).astype("int32"),
        x=ints(-99, 99, 1, 3, 4, 4),
    ),
    case(
        "nn.avg_pool3d(%x, pool_size=[1, 2, 2], strides=[1, 2, 2])",
        lambda x: windows(x[:, :, 0], 2).mean((4, 5))[:, :, None],
        x=floats(1, 2, 1, 4, 4),
    ),
    case(
        "nn.adaptive_avg_pool1d(%x, output_size=[2])",
        lambda x: x.reshape(2, 3, 2, 3).mean(-1),
        x=floats(2, 3, 6),
    ),
    case(
        "nn.adaptive_avg_pool2d(%x, output_size=[2, 2])", lambda x: windows(x, 2).mean((4, 5)), x=X
    ),
    case(
        "nn.adaptive_avg_pool3d(%x, output_size=[1, 2, 2])",
        lambda x: windows(x[:, :, 0], 2).mean((4, 5))[:, :, None],
        x=floats(1, 2, 1, 4, 4),
    ),
    case(
        "nn.adaptive_max_pool2d(%x, output_size=[1, 1])",
        lambda x: x.max((2, 3), keepdims=True),
        x=X,
    ),
    case('nn.global_avg_pool2d(%x, layout="NHWC")', lambda x: x.mean((1, 2), keepdims=True), x=X),
    case(
        "nn.global_avg_pool2d(%x)",
        lambda x: np.trunc(x.sum((2, 3), keepdims=True) / 16).astype("int32"),
        x=ints(-99, 99, 1, 3, 4, 4),
    ),
    case("nn.global_max_pool2d(%x)", lambda x: x.max((2, 3), keepdims=True), x=X),
    case(
        "%0 = nn.batch_norm(%x, %g, %b, %m, %v, epsilon=0.001f); %0.0",
        lambda x, g, b, m, v: (
            (x - m[:, None, None]) / np.sqrt(v[:, None, None] + 0.001) * g[:, None, None]
            + b[:, None, None]
        ),
        x=X,
        g=GAMMA,
        b=BETA,
        m=MEAN,
        v=VAR,
    ),
    case(
        "nn.layer_norm(%x, %g, %b, axis=1)",
        lambda x, g, b: normalize(x, (1,)) * g[:, None, None] + b[:, None, None],
        x=X,
        g=GAMMA,
        b=BETA,
    ),
    case(
        "nn.group_norm(%x, %g, %b, num_groups=3)",
        lambda x, g, b: normalize(x, (2, 3)) * g[:, None, None] + b[:, None, None],
        x=X,
        g=GAMMA,
        b=BETA,
    ),
    case(
        "nn.instance_norm(%x, %g, %b)",
        lambda x, g, b: normalize(x, (2, 3)) * g[:, None, None] + b[:, None, None],
        x=X,
        g=GAMMA,
        b=BETA,
    ),
    unary("nn.softmax", softmax),
    unary("nn.fast_softmax", softmax),
    unary("nn.log_softmax", lambda x: np.log(softmax(x))),
    case("%0 = nn.dropout(%x, rate=0.3f); %0.0", lambda x: x, x=M),
]

ELEMENTWISE = [
    unary("abs", np.abs),
    unary("acos", np.arccos, UNIT),
    unary("acosh", np.arccosh, POSITIVE + 1),
    unary("asin", np.arcsin, UNIT),
    unary("asinh", np.arcsinh),
    unary("atan", np.arctan),
    unary("atanh", np.arctanh, UNIT),
    unary("bitwise_not", np.invert, I),
    unary("ceil", np.ceil),
    unary("cos", np.cos),
    unary("cosh", np.cosh),
    unary("erf", special.erf),
    unary("exp", np.exp),
    unary("floor", np.floor),
    unary("isfinite", np.isfinite),
    unary("isinf", np.isinf),
    unary("isnan", np.isnan),
    unary("log", np.log, POSITIVE),
    unary("log2", np.log2, POSITIVE),
    unary("log10", np.log10, POSITIVE),
    unary("logical_not", np.logical_not, B),
    unary("negative", np.negative),
    unary("round", away, np.array([0.5, -0.5, 1.5, 2.5, 0.49999997, -2.3, 7.0], "float32")),
    unary("rsqrt", lambda x: 1 / np.sqrt(x), POSITIVE),
    unary("sigmoid", special.expit),
    unary("sign", np.sign),
    unary("sin", np.sin),
    unary("sinh", np.sinh),
    unary("sqrt", np.sqrt, POSITIVE),
    unary("tan", np.tan, UNIT),
    unary("tanh", np.tanh),
    unary("trunc", np.trunc),
    unary("fast_erf", special.erf),
    unary("fast_exp", np.exp),
    unary("fast_tanh", np.tanh),
    unary("nn.relu", lambda x: np.maximum(x, 0)),
    unary("hardswish", lambda x: x * np.clip(x + 3, 0, 6) / 6),
    binary("add", np.add),
    binary("subtract", np.subtract),
    binary("multiply", np.multiply),
    binary("divide", np.divide),
    binary("power", np.power, POSITIVE),
    binary("maximum", np.maximum),
    binary("minimum", np.minimum),
    binary("mod", np.fmod, I, J),
    binary("floor_mod", np.mod, I, J),
    binary("floor_divide", np.floor_divide, I, J),
    binary("left_shift", np.left_shift, I, J),
    binary("right_shift", np.right_shift, I, J),
    binary("bitwise_and", np.bitwise_and, I, J),
    binary("bitwise_or", np.bitwise_or, I, J),
    binary("bitwise_xor", np.bitwise_xor, I, J),
    binary("logical_and", np.logical_and, B, C),
    binary("logical_or", np.logical_or, B, C),
    binary("logical_xor", np.logical_xor, B, C),
    binary("equal", np.equal, I, J),
    binary("not_equal", np.not_equal, I, J),
    binary("less", np.less),
    binary("less_equal", np.less_equal),
    binary("greater", np.greater),
    binary("greater_equal", np.greater_equal),
    case("where(%c, %x, %y)", lambda c, x, y: np.where(c, x, y), c=B, x=M, y=POSITIVE),
    case("clip(%x, a_min=-0.5f, a_max=1f)", lambda x: np.clip(x, -0.5, 1), x=M),
    case(
        "clip(%x, a_min=-3f, a_max=300f)",
        lambda x: np.clip(x, -3, 127),
        x=ints(-128, 128, 3, 4, dtype="int8"),
    ),
    case("nn.leaky_relu(%x)", lambda x: np.where(x > 0, x, x / 4), x=M),
    case("nn.prelu(%x, %a)", lambda x, a: np.where(x > 0, x, x * a[:, None, None]), x=X, a=GAMMA),
    case("nn.bias_add(%x, %b)", lambda x, b: x + b[:, None, None], x=X, b=floats(3)),
    case('cast(%x, dtype="int32")', lambda x: x.astype("int32"), x=M * 9),
    case("cast_like(%x, %y)", lambda x, y: x.astype("int32"), x=M * 9, y=I),
    case(
        "fixed_point_multiply(%x, multiplier=1431655765, shift=-1)",
        lambda x: np.floor(x * (1431655765 / 2**32) + 0.5).astype("int32"),
        x=ints(-9999, 9999, 20),
    ),
    case(
        "nn.l2_normalize(%x, eps=1e-6f, axis=[1])",
        lambda x: x / np.sqrt((x * x).sum(1, keepdims=True)),
        x=X,
    ),
    case(
        "nn.lrn(%x, size=3, alpha=0.3f)",
        lambda x: (
            x
            / (
                2
                + 0.1
                * sliding_window_view(np.pad(x * x, [(0, 0), (1, 1), (0, 0), (0, 0)]), 3, 1).sum(-1)
            )
            ** 0.75
        ),
        x=X,
    ),
    *(
        unary(name, lambda x: x)
        for name in (
            "copy",
            "annotation.stop_fusion",
            "annotation.cast_hint",
            "annotation.checkpoint",
            "annotation.bitpack_start",
            "annotation.bitpack_end",
            "device_copy",
            "on_device",
        )
    ),
    *(
        case(f'{name}(%x, compiler="dnnl")', lambda x: x, x=M)
        for name in ("annotation.compiler_begin", "annotation.compiler_end")
    ),
]

SHAPE = [
    case("reshape(%x, newshape=[0, -4, -1, 3, -3])", lambda x: x.reshape(2, 1, 3, 16), x=X),
    case("reshape(%x, newshape=[0, -1])", lambda x: x.reshape(2, -1), x=X),
    case("reshape_like(%x, %y)", lambda x, y: x.reshape(4, 3), x=M, y=floats(4, 3)),
    case("nn.batch_flatten(%x)", lambda x: x.reshape(2, -1), x=X),
    case("squeeze(%x, axis=[0, 2])", lambda x: np.squeeze(x), x=floats(1, 3, 1)),
    case("expand_dims(%x, axis=-1, num_newaxis=2)", lambda x: x[..., None, None], x=M),
    case("transpose(%x, axes=[0, 2, 3, 1])", lambda x: x.transpose(0, 2, 3, 1), x=X),
    case("transpose(%x)", lambda x: x.T, x=M),
    case(
        'layout_transform(%x, src_layout="NCHW", dst_layout="NHWC")',
        lambda x: x.transpose(0, 2, 3, 1),
        x=X,
    ),
    case(
        "nn.depth_to_space(%x, block_size=2)",
        lambda x: x.reshape(1, 2, 2, 2, 3, 3).transpose(0, 3, 4, 1, 5, 2).reshape(1, 2, 6, 6),
        x=floats(1, 8, 3, 3),
    ),
    case(
        'nn.space_to_depth(%x, block_size=2, layout="NHWC")',
        lambda x: x.reshape(1, 2, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(1, 2, 2, 12),
        x=floats(1, 4, 4, 3),
    ),
    case(
        "concatenate((%x, %y), axis=-1)",
        lambda x, y: np.concatenate([x, y], -1),
        x=M,
        y=floats(3, 2),
    ),
    case("stack((%x, %y), axis=1)", lambda x, y: np.stack([x, y], 1), x=M, y=POSITIVE),
    case("%0 = split(%x, indices_or_sections=[1, 3], axis=1); %0.1", lambda x: x[:, 1:3], x=M),
    case("%0 = split(%x, indices_or_sections=2, axis=1); %0.1", lambda x: x[:, 2:], x=M),
    case(
        "strided_slice(%x, begin=[3, 1], end=[0, 9223372036854775807], strides=[-2, 1],"
        " axes=[2, 3])",
        lambda x: x[:, :, 3:0:-2, 1:],
        x=X,
    ),
    case(
        'strided_slice(%x, begin=[0, 1], end=[-1, 2], strides=[1], slice_mode="size")',
        lambda x: x[:, 1:3],
        x=M,
    ),
    case(
        "nn.pad(%x, -1.5f, pad_width=[[0, 1], [2, 0]])",
        lambda x: np.pad(x, [(0, 1), (2, 0)], constant_values=-1.5),
        x=M,
    ),
    case(
        'nn.pad(%x, 0f, pad_width=[[0, 1], [2, 0]], pad_mode="edge")',
        lambda x: np.pad(x, [(0, 1), (2, 0)], "edge"),
        x=M,
    ),
    case(
        "nn.mirror_pad(%x, pad_width=[[1, 1], [2, 0]])",
        lambda x: np.pad(x, [(1, 1), (2, 0)], "symmetric"),
        x=M,
    ),
    case("tile(%x, reps=[2, 1])", lambda x: np.tile(x, (2, 1)), x=M),
    case("repeat(%x, repeats=2, axis=1)", lambda x: np.repeat(x, 2, 1), x=M),
    case("reverse(%x, axis=1)", lambda x: x[:, ::-1], x=M),
    case("broadcast_to(%x, shape=[2, 3, 4])", lambda x: np.broadcast_to(x, (2, 3, 4)), x=M),
    case(
        "broadcast_to_like(%x, %y)",
        lambda x, y: np.broadcast_to(x, (2, 3, 4)),
        x=M,
        y=floats(2, 3, 4),
    ),
    case("slice_like(%x, %y)", lambda x, y: x[:2, :3], x=M, y=floats(2, 3)),
    case(
        'image.resize2d(%x, size=[8, 8], method="nearest_neighbor",'
        ' coordinate_transformation_mode="asymmetric", rounding_method="floor")',
        lambda x: x.repeat(2, 2).repeat(2, 3),
        x=X,
    ),
    case("nn.upsampling(%x, scale_h=2f, scale_w=2f)", lambda x: x.repeat(2, 2).repeat(2, 3), x=X),
]

REDUCE = [
    reduce("sum", "axis=[1], keepdims=True", lambda x: x.sum(1, keepdims=True)),
    reduce("max", "axis=[2, 3]", lambda x: x.max((2, 3))),
    reduce("min", "axis=[-1]", lambda x: x.min(-1)),
    reduce("prod", "axis=[0]", lambda x: x.prod(0)),
    reduce("mean", "axis=[0], exclude=True", lambda x: x.mean((1, 2, 3))),
    reduce("mean", "axis=[1]", lambda x: np.trunc(x.sum(1) / 4).astype("int32"), I),
    case(
        "%0 = mean(%x, axis=[1], keepdims=True); variance(%x, %0, axis=[1], unbiased=True)",
        lambda x: x.var(1, ddof=1),
        "variance",
        x=X,
    ),
    reduce("all", "axis=[1]", lambda x: x.all(1), B),
    reduce("any", "axis=[1]", lambda x: x.any(1), B),
    reduce("argmax", "axis=[1]", lambda x: x.argmax(1).astype("int32")),
    reduce("argmin", "axis=[1]", lambda x: x.argmin(1).astype("int32")),
    case(
        '%0 = topk(%x, k=2, dtype="int32"); %0.1',
        lambda x: np.argsort(-x, -1)[:, :2].astype("int32"),
        x=M,
    ),
    case("sort(%x, is_ascend=False)", lambda x: -np.sort(-x, -1), x=M),
    case("argsort(%x, axis=0)", lambda x: np.argsort(x, 0).astype("int32"), x=M),
    case("cumsum(%x, axis=1)", lambda x: x.cumsum(1), x=M),
    case("cumprod(%x, axis=1)", lambda x: x.cumprod(1), x=M),
    case('add(%x, zeros(shape=[3, 4], dtype="float32"))', lambda x: x, "zeros", x=M),
    case('add(%x, ones(shape=[3, 4], dtype="float32"))', lambda x: x + 1, "ones", x=M),
    case("add(%x, zeros_like(%x))", lambda x: x, "zeros_like", x=M),
    case("add(%x, ones_like(%x))", lambda x: x + 1, "ones_like", x=M),
    case('add(%x, full(2.5f, shape=[4], dtype="float32"))', lambda x: x + 2.5, "full", x=M),
    case("add(%x, full_like(%x, 2.5f))", lambda x: x + 2.5, "full_like", x=M),
    case(
        'add(%x, arange(1f, 5f, 1f, dtype="float32"))',
        lambda x: x + np.arange(1, 5, dtype="float32"),
        "arange",
        x=M,
    ),
    case(
        'one_hot(%x, 1f, 0f, depth=5, axis=-1, dtype="float32")',
        lambda x: np.eye(5, dtype="float32")[x],
        x=J,
    ),
]

INDEX = [
    case("take(%x, %i, axis=1)", lambda x, i: x.take(i, 1), x=M, i=ints(0, 4, 2, 2)),
    case("take(%x, %i)", lambda x, i: x.take(i), x=M, i=ints(0, 12, 2, 2)),
    case(
        "gather(%x, %i, axis=1)",
        lambda x, i: np.take_along_axis(x, i, 1),
        x=M,
        i=ints(0, 4, 3, 2, dtype="int64"),
    ),
    case(
        "gather_nd(%x, %i)",
        lambda x, i: x[i[0], i[1]],
        x=M,
        i=np.array([[0, 2, 1], [3, 0, 1]], "int64"),
    ),
    case(
        'scatter_nd(%x, %i, %u, mode="add")',
        lambda x, i, u: x + np.array([[0, 0, 0, 5], [0, 0, 0, 0], [7, 0, 0, 0]], "float32"),
        x=M,
        i=np.array([[0, 2], [3, 0]], "int64"),
        u=np.array([5, 7], "float32"),
    ),
    case(
        "scatter_elements(%x, %i, %u, axis=1)",
        lambda x, i, u: np.array([np.r_[u[r], x[r, 1:]] for r in range(3)]),
        x=M,
        i=np.zeros((3, 1), "int64"),
        u=floats(3, 1),
    ),
]

S = "0.0625f, 3, 0.015625f, -5"
QUANTIZED = [
    case(
        'qnn.quantize(%x, 0.25f, 3, out_dtype="int8")',
        lambda x: np.clip(away(x * 4) + 3, -128, 127).astype("int8"),
        x=np.array([0.125, -0.125, 0.375, 99, -99, 1.1], "float32"),
    ),
    case("qnn.dequantize(%x, 0.25f, 3)", lambda x: (x.astype("float32") - 3) / 4, x=Q),
    case(
        'qnn.requantize(%x, 0.25f, 0, 2f, -1, out_dtype="int8")',
        lambda x: requantize(x, 0.25, 0, 2.0, -1),
        x=ACC,
    ),
    case(
        "qnn.conv2d(%x, %w, 3, 0, 0.1f, 0.2f, padding=[1, 1, 1, 1], kernel_size=[3, 3],"
        ' channels=5, out_dtype="int32")',
        lambda x, w: conv(x.astype("int32") - 3, w.astype("int32"), 1, 1),
        x=Q,
        w=W,
    ),
    case(
        'qnn.conv2d_transpose(%x, %w, 3, 0, 0.1f, 0.2f, strides=[2, 2], out_dtype="int32")',
        lambda x, w: transposed_conv(x.astype("int32") - 3, w.astype("int32"), 2),
        x=Q,
        w=ints(-128, 128, 3, 2, 3, 3, dtype="int8"),
    ),
    case(
        'qnn.dense(%x, %w, 3, 1, 0.1f, 0.2f, units=5, out_dtype="int32")',
        lambda x, w: (x.astype("int32") - 3) @ (w.astype("int32") - 1).T,
        x=ints(-128, 128, 3, 4, dtype="int8"),
        w=ints(-128, 128, 5, 4, dtype="int8"),
    ),
    case(
        'qnn.batch_matmul(%x, %y, 3, 1, 0.1f, 0.2f, out_dtype="int32", transpose_b=True)',
        lambda x, y: (x.astype("int32") - 3) @ (y.astype("int32") - 1).swapaxes(1, 2),
        x=ints(-128, 128, 2, 3, 4, dtype="int8"),
        y=ints(-128, 128, 2, 5, 4, dtype="int8"),
    ),
    case(
        "qnn.add(%x, %y, 0.5f, 3, 0.25f, -2, 1f, 4)",
        lambda x, y: np.clip(
            np.floor((x.astype("int64") - 3) / 2 + 0.5)
            + np.floor((y.astype("int64") + 2) / 4 + 0.5)
            + 4,
            -128,
            127,
        ).astype("int8"),
        x=Q,
        y=Q[::-1].copy(),
    ),
    case(
        "qnn.subtract(%x, %y, 0.5f, 3, 0.25f, -2, 1f, 4)",
        lambda x, y: np.clip(
            np.floor((x.astype("int64") - 3) / 2 + 0.5)
            - np.floor((y.astype("int64") + 2) / 4 + 0.5)
            + 4,
            -128,
            127,
        ).astype("int8"),
        x=Q,
        y=Q[::-1].copy(),
    ),
    case(
        "qnn.mul(%x, %y, 0.5f, 3, 0.25f, -2, 8f, 4)",
        lambda x, y: requantize((x.astype("int64") - 3) * (y.astype("int64") + 2), 1 / 8, 0, 8, 4),
        x=Q,
        y=Q[::-1].copy(),
    ),
    case(
        "qnn.concatenate((%x, %y), (0.5f, 1f), (3, 0), 1f, 0, axis=1)",
        lambda x, y: np.concatenate([requantize(x, 0.5, 3, 1, 0), y], 1),
        x=Q,
        y=Q[::-1].copy(),
    ),
    case(
        f"qnn.leaky_relu(%x, {S.replace('0.015625f', '0.0625f').replace('-5', '3')}, alpha=0.5f)",
        lambda x: np.where(
            x < 3, np.floor(x.astype("int64") / 2 + 0.5) + 2, x.astype("int64")
        ).astype("int8"),
        x=Q,
    ),
    case(
        "qnn.avg_pool2d(%x, 0.5f, 3, 0.5f, 3, pool_size=[2, 2], strides=[2, 2])",
        lambda x: np.trunc(windows(x.astype("int32"), 2).sum((4, 5)) / 4).astype("int8"),
        x=Q,
    ),
    case(
        "qnn.softmax(%x, 0.0625f, 3, 0.00390625f, -128)",
        integer_softmax,
        x=ints(-40, 41, 3, 6, dtype="int8"),
    ),
    *(
        case(f"qnn.{name}(%x, {S})", table(function), x=Q)
        for name, function in {
            "abs": np.abs,
            "erf": special.erf,
            "exp": np.exp,
            "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
            "log": np.log,
            "rsqrt": lambda x: 1 / np.sqrt(x),
            "sigmoid": special.expit,
            "sqrt": np.sqrt,
            "tanh": np.tanh,
        }.items()
    ),
]

#: Attributes and dtypes that TVM 0.10 prints beyond those above.
I64 = ints(-9999, 9999, 20, dtype="int64")
PADDED = ints(-99, 99, 1, 2, 5, 5)
HALVES = (slice(0, 3), slice(2, 5))


def padded_average(x):
    """3 x 3 windows in steps of 2 over one value of padding, which does not count."""
    sums, counts = (
        sliding_window_view(np.pad(a, [(0, 0), (0, 0), (1, 1), (1, 1)]), (3, 3), (2, 3)).sum(
            (4, 5)
        )[:, :, ::2, ::2]
        for a in (x, np.ones_like(x))
    )
    return np.trunc(sums / counts).astype("int32")


VARIATIONS = [
    case(
        "fixed_point_multiply(%x, multiplier=1431655765, shift=-1)",
        lambda x: np.floor(x * (1431655765 / 2**32) + 0.5).astype("int64"),
        x=I64,
    ),
    case("clip(%x, a_min=0.5f, a_max=7.6f)", lambda x: np.clip(x, 0, 7), x=I),
    case("where(%c, %x, %y)", lambda c, x, y: np.where(c != 0, x, y), c=I, x=M, y=POSITIVE),
    unary("negative", lambda x: np.negative(x), ints(0, 255, 9, dtype="uint8")),
    case("nn.leaky_relu(%x)", lambda x: np.maximum(x, 0), x=I),
    case(
        'take(%x, %i, batch_dims=1, axis=2, mode="clip")',
        lambda x, i: np.stack([a.take(b, 1, mode="clip") for a, b in zip(x, i, strict=True)]),
        x=X,
        i=ints(-1, 6, 2, 3),
    ),
    case(
        "gather_nd(%x, %i)",
        lambda x, i: x[i[0], i[1]],
        x=M,
        i=np.array([[0, 2, 1], [3, 0, 1]], "int32"),
    ),
    reduce("argmax", "axis=[1, 2]", lambda x: x.reshape(2, 12, 4).argmax(1).astype("int32")),
    reduce(
        "argmin",
        "axis=[0], keepdims=True, select_last_index=True",
        lambda x: 2 - x[::-1].argmin(0, keepdims=True).astype("int32"),
        ints(0, 2, 3, 6),
    ),
    case(
        "reshape_like(%x, %y, lhs_begin=1, lhs_end=3, rhs_begin=0, rhs_end=2)",
        lambda x, y: x.reshape(2, 6, 2, 4),
        x=X,
        y=floats(6, 2),
    ),
    case("reshape(%x, newshape=[-1, 0], reverse=True)", lambda x: x.reshape(24, 4), x=X),
    case("%0 = split(%x, indices_or_sections=1); %0.0", lambda x: x, x=M),
    case(
        "nn.pad(%x, pad_width=[[0, 1], [2, 0]], pad_value=-1.5f)",
        lambda x: np.pad(x, [(0, 1), (2, 0)], constant_values=-1.5),
        x=M,
    ),
    case(
        "nn.avg_pool2d(%x, pool_size=[3, 3], strides=[2, 2], padding=[1, 1, 1, 1])",
        padded_average,
        x=PADDED,
    ),
    case(
        "nn.avg_pool1d(%x, pool_size=[2], strides=[2], ceil_mode=True)",
        lambda x: np.concatenate(
            [np.trunc(x[..., :4].reshape(1, 2, 2, 2).sum(-1) / 2).astype("int32"), x[..., 4:]], -1
        ),
        x=ints(-99, 99, 1, 2, 5),
    ),
    case(
        "nn.adaptive_avg_pool2d(%x, output_size=[1, 2])",
        lambda x: np.trunc(
            np.stack([x[..., :3].sum((2, 3)), x[..., 2:].sum((2, 3))], -1)[:, :, None] / 15
        ).astype("int32"),
        x=PADDED,
    ),
    case(
        "nn.adaptive_max_pool2d(%x, output_size=[2])",
        lambda x: np.array(
            [[[[c[a, b].max() for b in HALVES] for a in HALVES] for c in x[0]]], "int32"
        ),
        x=PADDED,
    ),
    case(
        'image.resize2d(%x, size=[4, 2], method="nearest_neighbor", out_dtype="float32")',
        lambda x: x[:, :, :, [1, 3]].astype("float32"),
        x=ints(-99, 99, 1, 2, 4, 4),
    ),
    case(
        'image.resize2d(%x, size=[8, 4], method="nearest_neighbor",'
        ' coordinate_transformation_mode="asymmetric", rounding_method="ceil")',
        lambda x: x.repeat(2, 2),
        x=X,
    ),
    case(
        'nn.conv2d_transpose(%x, %w, data_layout="NHWC", kernel_layout="HWOI", channels=2,'
        " kernel_size=[3, 3])",
        lambda x, w: transposed_conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), 1).transpose(
            0, 2, 3, 1
        ),
        x=floats(1, 4, 4, 3),
        w=floats(3, 3, 2, 3),
    ),
]

CASES = [*VARIATIONS, *LINEAR, *POOL, *ELEMENTWISE, *SHAPE, *REDUCE, *INDEX, *QUANTIZED]
