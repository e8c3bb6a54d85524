"""What is written as Relay: one expression for each way of writing an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np
from tvm import relax

from relayquant.ir.dialect import qnn
from relayquant.ir.reference.unary import RELAX_UNARY
from relayquant.ir.rewrite.editor import Editor

rng = np.random.default_rng(3)


def build(make, **inputs: np.ndarray):
    """The module of one expression over inputs."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(name, relax.TensorType(array.shape, str(array.dtype)))
        for name, array in inputs.items()
    ]
    with builder.function("main", params):
        with builder.dataflow():
            value = builder.emit(make(*params))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return Editor(builder.finalize()).build()


def build_all(cases: Mapping[str, tuple[Callable, Mapping[str, np.ndarray]]]):
    """(module with the values of all cases, inputs by name)."""
    builder = relax.BlockBuilder()
    inputs, params = {}, []
    for number, (_, arrays) in enumerate(cases.values()):
        for name, array in arrays.items():
            inputs[f"{name}{number}"] = array
            params.append(
                relax.Var(f"{name}{number}", relax.TensorType(array.shape, str(array.dtype)))
            )
    waiting = iter(params)
    with builder.function("main", params):
        with builder.dataflow():
            found = []
            for make, arrays in cases.values():
                value = builder.emit(make(*(next(waiting) for _ in arrays)))
                if isinstance(value.ty, relax.TupleType):
                    found += [
                        builder.emit(relax.TupleGetItem(value, i))
                        for i in range(len(value.ty.fields))
                    ]
                else:
                    found.append(value)
            result = builder.emit_output(relax.Tuple(found))
        builder.emit_func_output(result)
    return Editor(builder.finalize()).build(), inputs


def floats(*shape):
    return rng.standard_normal(shape).astype("float32")


def bytes_(*shape, dtype="int8"):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


Q = bytes_(2, 3, 6, 6)
R8 = bytes_(2, 3, 6, 6)
U = bytes_(2, 3, 6, 6, dtype="uint8")
ACC = rng.integers(-70000, 70000, (2, 3, 6, 6)).astype("int32")
WORDS = rng.integers(-300, 300, (2, 3, 6, 6)).astype("int16")
SCALES = np.array([0.01, 0.0017, 0.3], "float32")
#: of channels, one of which adds next to nothing: what a network has whose channel died in training
FAR_APART = np.array([1e-4, 3e-8, 2e-5], "float32")

#: Name -> (expression, inputs, what the text must hold; None: exactly it cannot be written).
INTEGER = {
    "quantize": (lambda x: qnn.quantize(x, 0.031, 7), {"x": 3 * floats(4, 9)}, ["divide"]),
    "quantize, per channel": (
        lambda x: qnn.quantize(x, SCALES, np.zeros(3, "int32"), 1, "uint8"),
        {"x": floats(2, 3, 5)},
        ["divide"],
    ),
    "quantize, as Relay": (
        lambda x: qnn.quantize(x, 0.031, 7, rounding="TONEAREST"),
        {"x": floats(4, 9)},
        ["qnn.quantize"],
    ),
    "dequantize": (lambda x: qnn.dequantize(x, 0.3, -5), {"x": Q}, ["qnn.dequantize"]),
    "requantize": (lambda x: qnn.requantize(x, 0.002, 0, 0.9, 3), {"x": ACC}, ["clip"]),
    "requantize, ties": (lambda x: qnn.requantize(x, 0.5, 0, 1.0, 0), {"x": ACC // 300}, ["clip"]),
    "requantize, per channel": (
        lambda x: qnn.requantize(x, SCALES, np.array([0, 5, -9]), 0.9, 3, 1, "uint8"),
        {"x": ACC},
        ["clip"],
    ),
    "requantize, 16 bits": (
        lambda x: qnn.requantize(x, 0.3, 2, 0.9, 3),
        {"x": WORDS},
        ["clip"],
    ),
    "requantize, as Relay": (
        lambda x: qnn.requantize(x, 0.002, 0, 0.9, 3, rounding="UPWARD", compute_dtype="int64"),
        {"x": ACC},
        ["qnn.requantize"],
    ),
    "conv1d": (
        lambda x: qnn.conv1d(x, bytes_(4, 3, 3), 3, 0, 0.1, 0.2, 2, (1, 0)),
        {"x": Q[:, :, 0]},
        ["qnn.conv2d"],
    ),
    "conv2d": (
        lambda x: qnn.conv2d(x, bytes_(4, 3, 3, 3), 3, 0, 0.1, 0.2, 2, 1),
        {"x": Q},
        ["qnn.conv2d"],
    ),
    "conv2d, depthwise NHWC": (
        lambda x: qnn.conv2d(
            x,
            bytes_(3, 3, 1, 6),
            3,
            0,
            0.1,
            0.2,
            groups=6,
            data_layout="NHWC",
            kernel_layout="HWIO",
        ),
        {"x": Q},
        ["qnn.conv2d", "HWOI"],
    ),
    "conv2d, bias": (
        lambda x: relax.op.add(
            qnn.conv2d(x, bytes_(4, 3, 3, 3), 3, 0, 0.1, 0.2, 2, 1),
            relax.const(np.arange(4, dtype="int32").reshape(1, 4, 1, 1) * 300),
        ),
        {"x": Q},
        ["nn.bias_add"],
    ),
    "conv2d, NHWC by OIHW": (
        lambda x: qnn.conv2d(x, bytes_(4, 6, 3, 2), 3, 0, 0.1, 0.2, data_layout="NHWC"),
        {"x": Q},
        ["HWIO"],
    ),
    "conv2d, 16 bits": (
        lambda x: qnn.conv2d(x, bytes_(4, 3, 3, 3), 3, 0, 0.1, 0.2, 2, 1),
        {"x": WORDS},
        ["qnn.conv2d"],
    ),
    "dense, 16 bits": (
        lambda x: qnn.dense(x, bytes_(4, 6), 3, 1, 0.1, 0.2),
        {"x": WORDS[0, 0]},
        ["nn.dense"],
    ),
    "conv2d_transpose, NHWC": (
        lambda x: qnn.conv2d_transpose(
            x, bytes_(3, 3, 4, 6), 3, 0, 0.1, 0.2, 2, data_layout="NHWC", kernel_layout="HWOI"
        ),
        {"x": Q},
        ["qnn.conv2d_transpose", "IOHW"],
    ),
    "conv2d_transpose": (
        lambda x: qnn.conv2d_transpose(x, bytes_(3, 4, 3, 3), 3, 0, 0.1, 0.2, 2),
        {"x": Q},
        ["qnn.conv2d_transpose"],
    ),
    "dense, three axes": (
        lambda x: qnn.dense(x, bytes_(4, 6), 3, 1, 0.1, 0.2),
        {"x": Q[0]},
        ["qnn.dense"],
    ),
    "batch_matmul, four axes": (
        lambda x, y: qnn.batch_matmul(x, y, 3, 1, 0.1, 0.2),
        {"x": Q, "y": R8},
        ["qnn.batch_matmul"],
    ),
    "add": (
        lambda x, y: qnn.add(x, y, 0.031, 3, 0.0173, -4, 0.04, 1),
        {"x": Q, "y": R8},
        ["float64"],
    ),
    "add, accumulator": (
        lambda x, y: qnn.add(x, y, 0.00031, 0, 0.0173, 140, 0.04, 1, out_dtype="uint8"),
        {"x": ACC, "y": U},
        ["float64"],
    ),
    "add, far apart": (
        lambda x, y: qnn.add(x, y, FAR_APART, 0, 0.517, 140, 0.4, 1, 1, out_dtype="uint8"),
        {"x": ACC, "y": U},
        ["float64"],
    ),
    "add, two accumulators": (
        lambda x, y: qnn.add(x, y, 0.0003, 0, 0.001, 0, 0.4, 1, out_dtype="uint8"),
        {"x": ACC, "y": ACC[::-1].copy()},
        None,
    ),
    "add, as Relay": (
        lambda x, y: qnn.add(
            x, y, 0.031, 3, 0.0173, -4, 0.04, 1, rounding="UPWARD", compute_dtype="int64"
        ),
        {"x": Q, "y": R8},
        ["qnn.add"],
    ),
    "subtract": (
        lambda x, y: qnn.subtract(x, y, 0.031, 3, 0.0173, -4, 0.04, 1),
        {"x": Q, "y": R8},
        ["float64"],
    ),
    "mul": (
        lambda x, y: qnn.mul(x, y, 0.031, 3, 0.0173, -4, 0.04, 1),
        {"x": Q, "y": R8},
        ["multiply"],
    ),
    "concatenate": (
        lambda x, y: qnn.concatenate((x, y), (0.031, 0.04), (3, 1), 0.04, 1, 1),
        {"x": Q, "y": R8},
        ["concatenate"],
    ),
    "leaky_relu": (
        lambda x: qnn.leaky_relu(x, 0.031, 3, 0.02, -4, 0.3),
        {"x": Q},
        ["where"],
    ),
    "prelu": (
        lambda x: qnn.prelu(x, 0.031, 3, 0.02, -4, np.linspace(-1, 2, Q.shape[1]), axis=1),
        {"x": Q},
        ["where"],
    ),
    "mean": (lambda x: qnn.mean(x, 0.031, 3, 0.02, -4, (2, 3)), {"x": Q}, ["sum"]),
    "avg_pool2d": (
        lambda x: qnn.avg_pool2d(x, 0.031, 3, 0.02, -4, 2, 2, 1, 1, count_include_pad=True),
        {"x": Q},
        ["nn.conv2d"],
    ),
    "lookup": (
        lambda x: qnn.lookup(x, bytes_(256)),
        {"x": Q},
        ["take", "bitwise_and"],
    ),
    "max_pool2d": (lambda x: relax.op.nn.max_pool2d(x, (2, 2), (2, 2)), {"x": U}, []),
    "pad": (lambda x: relax.op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=-7.0), {"x": Q}, []),
}


X = floats(2, 3, 6, 6)
FLOAT = {
    **{
        row.name: attrgetter(row.relax)(relax.op)
        for row in RELAX_UNARY.values()
        if (row.relay or row.formula) and row.name not in ("bitwise_not", "logical_not")
    },
    "matmul, three axes": lambda x: relax.op.matmul(x, relax.const(floats(6, 5))),
    "matmul, computed": lambda x: relax.op.matmul(x, x),
    "strided_slice": lambda x: relax.op.strided_slice(x, [2], [-4], [9], [2]),
    "flip": lambda x: relax.op.flip(x, 2),
    "split": lambda x: relax.op.split(x, 3, 1),
    "expand_dims": lambda x: relax.op.expand_dims(x, [0, 3]),
    "softmax": lambda x: relax.op.nn.softmax(x, 1),
    "leakyrelu": lambda x: relax.op.nn.leakyrelu(x, 0.1),
    "clip": lambda x: relax.op.clip(x, -0.3, 0.6),
    "mean": lambda x: relax.op.mean(x, [2, 3], keepdims=True),
    "avg_pool2d": lambda x: relax.op.nn.avg_pool2d(x, (2, 2), (2, 2), (1, 1)),
    "adaptive": lambda x: relax.op.nn.adaptive_avg_pool2d(x, (2, 3)),
    "take": lambda x: relax.op.take(x, relax.const(np.array([2, 0], "int64"), "int64"), 1),
    "matmul, two axes": lambda x: relax.op.matmul(
        relax.op.reshape(x, (36, 6)), relax.op.reshape(x, (6, 36))
    ),
    "matmul, bias": lambda x: relax.op.add(
        relax.op.matmul(relax.op.reshape(x, (36, 6)), relax.const(floats(6, 5))),
        relax.const(floats(5)),
    ),
    "conv2d, NHWC by OHWI": lambda x: relax.op.nn.conv2d(
        x, relax.const(floats(4, 3, 2, 6)), data_layout="NHWC", kernel_layout="OHWI"
    ),
    "conv1d, NWC": lambda x: relax.op.nn.conv1d(
        relax.op.reshape(x, (2, 18, 6)),
        relax.const(floats(4, 6, 3)),
        data_layout="NWC",
        kernel_layout="OIW",
    ),
    "conv2d, bias": lambda x: relax.op.add(
        relax.op.nn.conv2d(x, relax.const(floats(4, 3, 3, 3))), relax.const(floats(4, 1, 1))
    ),
    "conv2d_transpose": lambda x: relax.op.nn.conv2d_transpose(
        x, relax.const(floats(3, 4, 3, 3)), strides=2
    ),
    "broadcast_to": lambda x: relax.op.broadcast_to(relax.op.max(x, [2]), (5, 2, 3, 6)),
    "resize2d": lambda x: relax.op.image.resize2d(x, (12, 12)),
    "depthwise": lambda x: relax.op.nn.conv2d(x, relax.const(floats(6, 1, 3, 3)), groups=3),
    "permute": lambda x: relax.op.permute_dims(x),
    "flatten": lambda x: relax.op.flatten(x),
    "stack": lambda x: relax.op.stack([x, x], 1),
    "sum": lambda x: relax.op.sum(x, [1]),
    "prelu": lambda x: relax.op.nn.prelu(x, relax.const(floats(3)), 1),
    "log_softmax": lambda x: relax.op.nn.log_softmax(x, 1),
    "layer_norm": lambda x: relax.op.nn.layer_norm(
        x, relax.const(floats(6)), relax.const(floats(6)), -1
    ),
    "batch_norm": lambda x: relax.op.nn.batch_norm(
        x, *(relax.const(abs(floats(3)) + 1) for _ in range(4)), axis=1, training=False
    ),
    "conv3d, NDHWC by OIDHW": lambda x: relax.op.nn.conv3d(
        relax.op.reshape(x, (1, 2, 3, 6, 6)),
        relax.const(floats(4, 6, 2, 3, 3)),
        data_layout="NDHWC",
    ),
    "conv1d_transpose": lambda x: relax.op.nn.conv1d_transpose(
        relax.op.reshape(x, (2, 3, 36)), relax.const(floats(3, 4, 3))
    ),
    "avg_pool1d": lambda x: relax.op.nn.avg_pool1d(relax.op.reshape(x, (2, 3, 36)), 2, 2),
    "adaptive_avg_pool1d": lambda x: relax.op.nn.adaptive_avg_pool1d(
        relax.op.reshape(x, (2, 3, 36)), 4
    ),
}
