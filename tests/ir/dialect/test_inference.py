"""Type inference: shapes known, symbolic and unknown; and a message for everything it rejects."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import Call, Op

import relayquant.ir.dialect  # noqa: F401
from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.convolution import QConv2DAttrs
from relayquant.ir.dialect.qnn.product import QMatmulAttrs
from relayquant.ir.dialect.qnn.quantization import QuantizeAttrs, RequantizeAttrs
from relayquant.ir.dialect.qnn.reduction import QAvgPool2DAttrs


def tensor(shape, dtype="int8", name="x"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def unranked(dtype="int8", ndim=-1):
    return relax.Var("x", relax.TensorType(None, dtype, ndim=ndim))


def infer(call):
    return relax.BlockBuilder().normalize(call).ty


X = tensor((2, 3, 8, 8))
F = tensor((2, 3, 8, 8), "float32")
W = tensor((5, 3, 3, 3), "int8", "w")
A = tensor((4, 6))
ONE = (1.0, 0, 1.0, 0)
BINARY = (1.0, 0, 1.0, 0, 1.0, 0)


# ---------------------------------------------------------------- shapes

SHAPES = {
    "quantize": (lambda: qnn.quantize(F, 1.0, 0, out_dtype="uint16"), (2, 3, 8, 8), "uint16"),
    "dequantize": (lambda: qnn.dequantize(X, 1.0, 0, out_dtype="float16"), (2, 3, 8, 8), "float16"),
    "requantize": (lambda: qnn.requantize(X, *ONE, out_dtype="int32"), (2, 3, 8, 8), "int32"),
    "simulated": (lambda: qnn.simulated_quantize(F, 1, 1.0, 0), (2, 3, 8, 8), "float32"),
    "conv1d": (
        lambda: qnn.conv1d(
            tensor((2, 9, 3)), tensor((3, 3, 4)), 0, 0, 1.0, 1.0, 2, (1, 0), 1, 1, "NWC", "WIO"
        ),
        (2, 4, 4),
        "int32",
    ),
    "conv2d_asymmetric": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, strides=(2, 1), padding=(1, 2, 0, 1)),
        (2, 5, 4, 9),
        "int32",
    ),
    "conv2d_dilated": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, dilation=(2, 3)),
        (2, 5, 4, 2),
        "int32",
    ),
    "conv2d_depthwise_nhwc": (
        lambda: qnn.conv2d(
            tensor((2, 8, 8, 3)),
            tensor((3, 3, 1, 6)),
            0,
            0,
            1.0,
            1.0,
            groups=3,
            data_layout="NHWC",
            kernel_layout="HWIO",
        ),
        (2, 6, 6, 6),
        "int32",
    ),
    "conv2d_transpose": (
        lambda: qnn.conv2d_transpose(
            X, tensor((3, 5, 3, 3)), 0, 0, 1.0, 1.0, 2, (1, 1, 0, 0), (1, 0)
        ),
        (2, 5, 17, 16),
        "int32",
    ),
    "dense": (
        lambda: qnn.dense(tensor((2, 4, 6)), tensor((7, 6)), 0, 0, 1.0, 1.0),
        (2, 4, 7),
        "int32",
    ),
    "batch_matmul": (
        lambda: qnn.batch_matmul(tensor((2, 1, 4, 6)), tensor((3, 5, 6)), 0, 0, 1.0, 1.0),
        (2, 3, 4, 5),
        "int32",
    ),
    "add_broadcast": (
        lambda: qnn.add(X, tensor((3, 1, 1), "int32"), *BINARY),
        (2, 3, 8, 8),
        "int8",
    ),
    "mul_out_dtype": (
        lambda: qnn.mul(A, tensor((6,)), *BINARY, out_dtype="int16"),
        (4, 6),
        "int16",
    ),
    "concatenate": (
        lambda: qnn.concatenate([A, tensor((4, 2))], [1.0, 1.0], [0, 0], 1.0, 0, axis=-1),
        (4, 8),
        "int8",
    ),
    "avg_pool2d": (
        lambda: qnn.avg_pool2d(X, *ONE, pool_size=3, strides=2, padding=(1, 0, 0, 0)),
        (2, 3, 4, 3),
        "int8",
    ),
    "avg_pool2d_ceil": (
        lambda: qnn.avg_pool2d(X, *ONE, pool_size=3, strides=2, ceil_mode=True),
        (2, 3, 4, 4),
        "int8",
    ),
    "avg_pool2d_ceil_drops_the_last_window": (
        lambda: qnn.avg_pool2d(
            X, *ONE, pool_size=1, strides=5, padding=(0, 2, 2, 1), ceil_mode=True
        ),
        (2, 3, 2, 2),
        "int8",
    ),
    "avg_pool2d_ceil_as_relay": (
        lambda: qnn.avg_pool2d(
            X, *ONE, pool_size=1, strides=5, padding=(0, 2, 2, 1), ceil_mode=True, rounding="UPWARD"
        ),
        (2, 3, 3, 3),
        "int8",
    ),
    "mean": (lambda: qnn.mean(X, *ONE, axes=[-1, 2]), (2, 3), "int8"),
    "mean_keepdims": (lambda: qnn.mean(X, *ONE, axes=[1], keepdims=True), (2, 1, 8, 8), "int8"),
    "mean_all": (lambda: qnn.mean(X, *ONE, out_dtype="uint8"), (), "uint8"),
    "leaky_relu": (lambda: qnn.leaky_relu(X, *ONE), (2, 3, 8, 8), "int8"),
    "prelu": (lambda: qnn.prelu(X, *ONE, np.ones(8), axis=-1), (2, 3, 8, 8), "int8"),
    "lookup": (
        lambda: qnn.lookup(X, tensor((256,), "float32")),
        (2, 3, 8, 8),
        "float32",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_infer__shape_and_dtype(name):
    make, shape, dtype = SHAPES[name]
    ty = infer(make())
    assert tuple(map(int, ty.shape)) == shape
    assert str(ty.dtype) == dtype


def test_infer__symbolic_batch_and_size():
    n, h = tirx.Var("n", "int64"), tirx.Var("h", "int64")
    data = relax.Var("x", relax.TensorType((n, 3, h, 8), "int8"))
    conv = infer(qnn.conv2d(data, W, 0, 0, 1.0, np.ones(5, "float32"), padding=1, strides=2))
    assert conv.shape[0].same_as(n)
    span = tvm.sym.Analyzer().simplify(conv.shape[2] - ((h - 1) // 2 + 1))
    assert int(span) == 0
    pooled = infer(qnn.mean(data, *ONE, axes=[2]))
    assert pooled.shape[0].same_as(n)
    joined = infer(qnn.concatenate([data, data], [1.0] * 2, [0] * 2, 1.0, 0, axis=2))
    assert int(tvm.sym.Analyzer().simplify(joined.shape[2] - 2 * h)) == 0
    summed = infer(qnn.add(data, tensor((3, 1, 1)), *BINARY))
    assert summed.shape[2].same_as(h)


RANKS = {
    "quantize": (lambda: qnn.quantize(unranked("float32", 3), 1.0, 0), 3),
    "dequantize_nothing": (lambda: qnn.dequantize(unranked(), 1.0, 0), -1),
    "conv2d": (lambda: qnn.conv2d(unranked(ndim=4), W, 0, 0, 1.0, 1.0), 4),
    "conv2d_nothing": (lambda: qnn.conv2d(unranked(), unranked(), 0, 0, 1.0, 1.0), 4),
    "dense": (lambda: qnn.dense(unranked(ndim=3), tensor((7, 6)), 0, 0, 1.0, 1.0), 3),
    "batch_matmul": (lambda: qnn.batch_matmul(unranked(ndim=3), unranked(ndim=4), 0, 0, 1, 1), 4),
    "add": (lambda: qnn.add(unranked(ndim=2), X, *BINARY), 4),
    "add_nothing": (lambda: qnn.add(unranked(), X, *BINARY), -1),
    "concatenate": (
        lambda: qnn.concatenate([A, unranked(ndim=2)], [1.0] * 2, [0] * 2, 1.0, 0),
        2,
    ),
    "avg_pool2d": (lambda: qnn.avg_pool2d(unranked(), *ONE), 4),
    "mean": (lambda: qnn.mean(unranked(ndim=4), *ONE, axes=[1, 2]), 2),
    "mean_nothing": (lambda: qnn.mean(unranked(), *ONE, axes=[1, 2]), -1),
    "lookup": (lambda: qnn.lookup(unranked("uint8", 2), tensor((256,))), 2),
}


@pytest.mark.parametrize("name", RANKS)
def test_infer__unknown_shape_keeps_rank(name):
    make, rank = RANKS[name]
    ty = infer(make())
    assert ty.shape is None
    assert ty.ndim == rank


# ---------------------------------------------------------------- messages


def per_channel(length, dtype="float32"):
    return np.ones(length, dtype)


MESSAGES = {
    "quantize dtype": (
        lambda: qnn.quantize(X, 1.0, 0),
        r"qnn\.quantize: operand 'data' has dtype int8; allowed: float32, float16\. "
        r"Change the parameters of an integer tensor with qnn\.requantize",
    ),
    "dequantize dtype": (
        lambda: qnn.dequantize(F, 1.0, 0),
        r"qnn\.dequantize: operand 'data' has dtype float32; allowed: int8, .* Quantize it first",
    ),
    "out dtype": (
        lambda: qnn.quantize(F, 1.0, 0, out_dtype="int7"),
        r"qnn\.quantize: out_dtype='int7' is not allowed; allowed: int8, uint8, int16",
    ),
    "scale dtype": (
        lambda: qnn.quantize(F, tensor((), "float64"), 0),
        r"operand 'scale' has dtype float64; allowed: float32. Convert it to float32",
    ),
    "zero point dtype": (
        lambda: qnn.quantize(F, 1.0, tensor((), "int8")),
        r"operand 'zero_point' has dtype int8; allowed: int32. Convert it to int32",
    ),
    "scale zero": (
        lambda: qnn.quantize(F, [1.0, 0.0, 2.0], 0, axis=1),
        r"operand 'scale' holds 0\.0; allowed: finite numbers > 0.*any scale, such as 1",
    ),
    "scale infinite": (
        lambda: qnn.dequantize(X, np.inf, 0),
        r"operand 'scale' holds inf; allowed: finite numbers > 0",
    ),
    "scale nan": (
        lambda: qnn.requantize(X, 1.0, 0, np.nan, 0),
        r"operand 'output_scale' holds nan; allowed: finite numbers > 0",
    ),
    "zero point outside": (
        lambda: qnn.quantize(F, 1.0, -1, out_dtype="uint8"),
        r"operand 'zero_point' holds -1; allowed for uint8: 0\.\.255",
    ),
    "zero point of the data": (
        lambda: qnn.requantize(X, 1.0, [0, 128, 0], 1.0, 0, axis=1),
        r"operand 'input_zero_point' holds 128; allowed for int8: -128\.\.127",
    ),
    "zero point fraction": (
        lambda: qnn.quantize(F, 1.0, 0.5),
        r"operand 'zero_point' is 0\.5; allowed: integers that fit into int32",
    ),
    "zero point too large": (
        lambda: qnn.quantize(F, 1.0, 2**40),
        r"operand 'zero_point' is 1099511627776; allowed: integers that fit into int32",
    ),
    "axis range": (
        lambda: qnn.quantize(F, 1.0, 0, axis=4),
        r"qnn\.quantize: axis=4 is outside operand 'data' of rank 4; allowed: -4\.\.3",
    ),
    "axis range below": (
        lambda: qnn.add(A, A, *BINARY, rhs_axis=-3),
        r"qnn\.add: rhs_axis=-3 is outside operand 'rhs' of rank 2; allowed: -2\.\.1",
    ),
    "parameter length": (
        lambda: qnn.quantize(F, per_channel(4), 0, axis=1),
        r"operand 'scale' has length 4; allowed: a scalar, or 3 values, one per index of axis 1 "
        r"of 'data'\. Check the axis",
    ),
    "parameter rank": (
        lambda: qnn.quantize(F, np.ones((3, 2), "float32"), 0, axis=1),
        r"operand 'scale' has rank 2; allowed: rank 0 \(one per tensor\) or rank 1",
    ),
    "parameter of a scalar": (
        lambda: qnn.quantize(tensor((), "float32"), per_channel(3), 0),
        r"operand 'scale' has rank 1; allowed: a scalar, because 'data' has no axis",
    ),
    "output parameters": (
        lambda: qnn.requantize(X, 1.0, 0, per_channel(3), 0, axis=1),
        r"operand 'output_scale' has rank 1; allowed: a scalar",
    ),
    "operand kind": (
        lambda: qnn.quantize([1.0], 1.0, 0),
        r"qnn\.quantize: operand 'data' is a list; allowed: a relax expression or a numpy array",
    ),
    "parameter kind": (
        lambda: qnn.quantize(F, "x", 0),
        r"qnn\.quantize: operand 'scale' is a str; allowed: a relax expression, a number",
    ),
    "not a tensor": (
        lambda: qnn.dequantize(relax.Tuple([X, X]), 1.0, 0),
        r"qnn\.dequantize: operand 'data' is .*uple.*; allowed: a tensor",
    ),
    "rounding": (
        lambda: qnn.quantize(F, 1.0, 0, rounding="DOWN"),
        r"qnn\.quantize: rounding='DOWN' is not allowed; allowed: .*UPWARD, TONEAREST, ",
    ),
    "arithmetic": (
        lambda: qnn.requantize(X, *ONE, compute_dtype="int32"),
        r"qnn\.requantize: compute_dtype='int32' is not allowed; allowed: .*int64, float32,",
    ),
    "number of operands": (
        lambda: Call(
            Op.get("relax.qnn.quantize"), [F], QuantizeAttrs(-1, "int8", "TONEAREST_EVEN")
        ),
        r"qnn\.quantize: got 1 operand; it takes 3: data, scale, zero_point",
    ),
    "number of operands of concatenate": (
        lambda: Call(
            Op.get("relax.qnn.concatenate"), [A], qnn.concatenate([A], [1], [0], 1, 0).attrs
        ),
        r"qnn\.concatenate: got 1 operand; it takes 5",
    ),
    "rounding of a built call": (
        lambda: Call(
            Op.get("relax.qnn.requantize"),
            qnn.requantize(X, *ONE).args,
            RequantizeAttrs(-1, "int8", "DOWN", "float32"),
        ),
        r"qnn\.requantize: rounding='DOWN' is not allowed",
    ),
    "arithmetic of a built call": (
        lambda: Call(
            Op.get("relax.qnn.requantize"),
            qnn.requantize(X, *ONE).args,
            RequantizeAttrs(-1, "int8", "UPWARD", "int8"),
        ),
        r"qnn\.requantize: compute_dtype='int8' is not allowed",
    ),
    "simulated dtype": (
        lambda: qnn.simulated_quantize(X, 1, 1.0, 0),
        r"qnn\.simulated_quantize: operand 'data' has dtype int8; .*keeps float tensors",
    ),
    "simulated code": (
        lambda: qnn.simulated_quantize(F, 9, 1.0, 0),
        r"operand 'dtype' holds 9; allowed codes: 0 pass through, 1 int8, 2 uint8",
    ),
    "simulated parameter": (
        lambda: qnn.simulated_dequantize(F, 1, np.ones((2, 2), "float32"), 0),
        r"operand 'scale' has rank 2; allowed: rank 0 or 1",
    ),
    "conv data dtype": (
        lambda: qnn.conv2d(F, W, 0, 0, 1.0, 1.0),
        r"qnn\.conv2d: operand 'data' has dtype float32; allowed: int8, uint8, int16",
    ),
    "conv weight dtype": (
        lambda: qnn.conv2d(X, tensor((5, 3, 3, 3), "int32"), 0, 0, 1.0, 1.0),
        r"qnn\.conv2d: operand 'weight' has dtype int32; allowed: int8, uint8, int16",
    ),
    "conv out dtype": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, out_dtype="int16"),
        r"qnn\.conv2d: out_dtype='int16' is not allowed; allowed: int32",
    ),
    "conv rank": (
        lambda: qnn.conv2d(tensor((3, 8, 8)), W, 0, 0, 1.0, 1.0),
        r"qnn\.conv2d: operand 'data' has rank 3; allowed: rank 4 \(NCHW\)",
    ),
    "conv channels": (
        lambda: qnn.conv2d(X, tensor((5, 2, 3, 3)), 0, 0, 1.0, 1.0),
        r"operand 'weight' takes 2 input channels in each of 1 group; 'data' has 3 channels; "
        r".*Check data_layout, kernel_layout and groups",
    ),
    "conv groups": (
        lambda: qnn.conv2d(X, tensor((5, 1, 3, 3)), 0, 0, 1.0, 1.0, groups=3),
        r"operand 'weight' has 5 output channels; allowed: a multiple of groups=3",
    ),
    "conv no groups": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, groups=0),
        r"groups=0 is not allowed; allowed: 1 or more",
    ),
    "conv layout": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, data_layout="NCHW4c"),
        r"data_layout='NCHW4c' is not allowed; allowed: the letters NCHW",
    ),
    "conv kernel layout": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, kernel_layout="OIW"),
        r"kernel_layout='OIW' is not allowed; allowed: the letters OIHW",
    ),
    "conv window": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, dilation=4),
        r"operand 'data' has shape \(2, 3, 8, 8\); its padded H is smaller than the .* window",
    ),
    "conv strides": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, strides=(1, 0)),
        r"strides=\[1, 0\] is not allowed; allowed: 2 integers >= 1",
    ),
    "conv number of strides": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, strides=(1, 1, 1)),
        r"strides=\[1, 1, 1\] is not allowed; allowed: one integer or 2",
    ),
    "conv padding": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, padding=(1, 2, 3)),
        r"padding=\[1, 2, 3\] is not allowed; allowed: 1, 2 or 4 integers",
    ),
    "conv negative padding": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, 1.0, padding=-1),
        r"padding=\[-1, -1, -1, -1\] is not allowed; allowed: 4 integers >= 0",
    ),
    "conv short padding of a built call": (
        lambda: Call(
            Op.get("relax.qnn.conv2d"),
            qnn.conv2d(X, W, 0, 0, 1.0, 1.0).args,
            QConv2DAttrs([1, 1], [1, 1], [1, 1], 1, "NCHW", "OIHW", "int32"),
        ),
        r"padding=\[1, 1\] is not allowed; allowed: 4 integers >= 0",
    ),
    "conv input scale": (
        lambda: qnn.conv2d(X, W, 0, 0, per_channel(3), 1.0),
        r"operand 'input_scale' has rank 1; allowed: a scalar",
    ),
    "conv kernel scale": (
        lambda: qnn.conv2d(X, W, 0, 0, 1.0, per_channel(3)),
        r"operand 'kernel_scale' has length 3; allowed: a scalar, or 5 values, one per output",
    ),
    "conv transpose channels": (
        lambda: qnn.conv2d_transpose(X, W, 0, 0, 1.0, 1.0),
        r"operand 'weight' takes 5 input channels; 'data' has 3; allowed: the same number",
    ),
    "conv transpose groups": (
        lambda: qnn.conv2d_transpose(X, tensor((3, 4, 3, 3)), 0, 0, 1.0, 1.0, groups=2),
        r"operand 'data' has 3 channels; allowed: a multiple of groups=2",
    ),
    "conv transpose output padding": (
        lambda: qnn.conv2d_transpose(X, tensor((3, 5, 3, 3)), 0, 0, 1, 1, 2, 0, output_padding=2),
        r"output_padding=\[2, 2\] is not allowed; allowed: less than the stride or less than",
    ),
    "conv transpose padding": (
        lambda: qnn.conv2d_transpose(X, tensor((3, 5, 3, 3)), 0, 0, 1, 1, padding=9),
        r"padding=\[9, 9, 9, 9\] leaves nothing of its H",
    ),
    "dense shape": (
        lambda: qnn.dense(A, tensor((6, 4)), 0, 0, 1.0, 1.0),
        r"operand 'weight' has shape \(6, 4\); allowed: \(units, 6\), as 'data' is \(4, 6\)\. "
        r"The weight is \(units, inputs\)",
    ),
    "dense rank": (
        lambda: qnn.dense(A, tensor((6,)), 0, 0, 1.0, 1.0),
        r"operand 'weight' has rank 1; allowed: rank 2",
    ),
    "dense of a scalar": (
        lambda: qnn.dense(tensor(()), tensor((7, 6)), 0, 0, 1.0, 1.0),
        r"operand 'data' has rank 0; allowed: rank 1 or more",
    ),
    "dense out dtype of a built call": (
        lambda: Call(
            Op.get("relax.qnn.dense"),
            qnn.dense(A, tensor((7, 6)), 0, 0, 1.0, 1.0).args,
            QMatmulAttrs("float32"),
        ),
        r"qnn\.dense: out_dtype='float32' is not allowed; allowed: int32",
    ),
    "batch_matmul shape": (
        lambda: qnn.batch_matmul(A, tensor((6, 5)), 0, 0, 1.0, 1.0),
        r"operand 'y' has shape \(6, 5\); allowed: \(\.\.\., N, 6\).*transposed",
    ),
    "batch_matmul batch": (
        lambda: qnn.batch_matmul(tensor((2, 4, 6)), tensor((3, 5, 6)), 0, 0, 1.0, 1.0),
        r"operands 'x' \(2\) and 'y' \(3\) do not broadcast",
    ),
    "batch_matmul parameters": (
        lambda: qnn.batch_matmul(A, tensor((5, 6)), 0, 0, 1.0, per_channel(5)),
        r"operand 'y_scale' has rank 1; allowed: a scalar",
    ),
    "add broadcast": (
        lambda: qnn.add(A, tensor((3, 6)), *BINARY),
        r"qnn\.add: operands 'lhs' \(4, 6\) and 'rhs' \(3, 6\) do not broadcast; allowed: dim",
    ),
    "add dtype": (
        lambda: qnn.add(A, tensor((4, 6), "float32"), *BINARY),
        r"qnn\.add: operand 'rhs' has dtype float32; allowed: int8.* Quantize a float operand",
    ),
    "concatenate count": (
        lambda: qnn.concatenate([A, A], [1.0], [0, 0], 1.0, 0),
        r"qnn\.concatenate: got 2 tensors, 1 scale and 2 zero points; allowed: the same number",
    ),
    "concatenate dtype": (
        lambda: qnn.concatenate([A, tensor((4, 6), "uint8")], [1.0] * 2, [0] * 2, 1.0, 0),
        r"operand 'data\[1\]' has dtype uint8; allowed: int8, the dtype of data\[0\].*Requantize",
    ),
    "concatenate shape": (
        lambda: qnn.concatenate([A, tensor((3, 5))], [1.0] * 2, [0] * 2, 1.0, 0),
        r"operand 'data\[1\]' has shape \(3, 5\); allowed: that of data\[0\], \(4, 6\), but for",
    ),
    "concatenate rank": (
        lambda: qnn.concatenate([A, X], [1.0] * 2, [0] * 2, 1.0, 0),
        r"operand 'data\[1\]' has rank 4; allowed: rank 2",
    ),
    "concatenate axis": (
        lambda: qnn.concatenate([A, A], [1.0] * 2, [0] * 2, 1.0, 0, axis=2),
        r"axis=2 is outside operand 'data\[0\]' of rank 2",
    ),
    "concatenate tuple": (
        lambda: qnn.concatenate(A, [1.0], [0], 1.0, 0),
        r"operand 'data' is .*; allowed: a tuple of tensors",
    ),
    "concatenate list": (
        lambda: qnn.concatenate(3, [1.0], [0], 1.0, 0),
        r"operand 'data' is a int; allowed: a list or tuple",
    ),
    "concatenate scale": (
        lambda: qnn.concatenate([A, A], [1.0, -1.0], [0, 0], 1.0, 0),
        r"operand 'input_scales\[1\]' holds -1\.0; allowed: finite numbers > 0",
    ),
    "concatenate nested tuple": (
        lambda: qnn.concatenate(relax.Tuple([relax.Tuple([A])]), [1.0], [0], 1.0, 0),
        r"qnn\.concatenate: data\[0\] is .*; allowed: a tensor",
    ),
    "pool rank": (
        lambda: qnn.avg_pool2d(A, *ONE),
        r"qnn\.avg_pool2d: operand 'data' has rank 2; allowed: rank 4 \(NCHW\)",
    ),
    "pool size": (
        lambda: qnn.avg_pool2d(X, *ONE, pool_size=9),
        r"its padded H is smaller than the \(dilated\) window. Use a smaller window",
    ),
    "pool layout": (
        lambda: qnn.avg_pool2d(X, *ONE, layout="NCH"),
        r"layout='NCH' is not allowed; allowed: the letters NCHW",
    ),
    "pool size of a built call": (
        lambda: Call(
            Op.get("relax.qnn.avg_pool2d"),
            qnn.avg_pool2d(X, *ONE).args,
            QAvgPool2DAttrs(
                [0, 1], [1, 1], [1, 1], [0] * 4, False, False, "NCHW", "UPWARD", "int64"
            ),
        ),
        r"pool_size=\[0, 1\] is not allowed; allowed: 2 integers >= 1",
    ),
    "mean axis": (
        lambda: qnn.mean(A, *ONE, axes=[2]),
        r"qnn\.mean: axes=2 is outside operand 'data' of rank 2",
    ),
    "mean axis twice": (
        lambda: qnn.mean(A, *ONE, axes=[1, -1]),
        r"qnn\.mean: axes=\[1, -1\] repeats an axis",
    ),
    "leaky_relu alpha": (
        lambda: qnn.leaky_relu(A, *ONE, alpha=1.5),
        r"qnn\.leaky_relu: alpha=1\.5 is not allowed; allowed: 0\.\.1\. Use qnn\.lookup",
    ),
    "prelu slopes": (
        lambda: qnn.prelu(A, *ONE, np.ones(4), axis=1),
        r"qnn\.prelu: operand 'slopes' has length 4; allowed: .*6",
    ),
    "prelu axis": (
        lambda: qnn.prelu(A, *ONE, np.ones(4), axis=2),
        r"qnn\.prelu: axis=2 is outside operand 'data' of rank 2",
    ),
    "prelu not finite": (
        lambda: qnn.prelu(A, *ONE, np.array([1, np.inf, 0, 0, 0, 0])),
        r"qnn\.prelu: operand 'slopes' holds inf; allowed: finite numbers",
    ),
    "lookup dtype": (
        lambda: qnn.lookup(tensor((4,), "int16"), tensor((256,))),
        r"qnn\.lookup: operand 'data' has dtype int16; allowed: int8, uint8\. A table is",
    ),
    "lookup table": (
        lambda: qnn.lookup(A, tensor((255,))),
        r"qnn\.lookup: operand 'table' has length 255; allowed: 256 entries",
    ),
    "lookup table rank": (
        lambda: qnn.lookup(A, tensor((16, 16))),
        r"qnn\.lookup: operand 'table' has rank 2; allowed: rank 1",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_infer__message(name):
    make, message = MESSAGES[name]
    with pytest.raises(QnnError, match=message):
        infer(make())


def test_infer__one_value_per_tensor_may_have_shape_1():
    ty = infer(qnn.requantize(X, [0.5], [3], [0.25], [1], axis=1))
    assert tuple(map(int, ty.shape)) == (2, 3, 8, 8)
