"""Relay out: the text is Relay as TVM writes it, and computes the same bits when read again."""

from __future__ import annotations

import re

import numpy as np
import pytest
from relay_testing import WRITTEN_BY_TVM
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.dialect import qnn
from relayquant.errors import ModelError
from relayquant.relay import from_text, to_text
from relayquant.relay.operators import OPERATORS
from relayquant.relay.printer import has_literal, print_module
from relayquant.relay.text_reader import METADATA, parse_text
from relayquant.rewrite.editor import Editor

rng = np.random.default_rng(3)

#: As TVM prints, without comments.
TEXT = """#[version = "0.0.5"]
def @helper(%x: Tensor[(2, 3), float32]) -> Tensor[(2, 3), float32] {
  exp(%x)
}

def @main(%y: Tensor[(2, ?), float32], %b: bool) -> (Tensor[(2, 3), float32], float32) {
  let %z: Tensor[(2, 3), float32] = @helper(%y);
  %0 = fn (%x1: Tensor[(2, 3), float32], Primitive=1, Composite="my.relu") {
    nn.leaky_relu(%x1, alpha=0.1f)
  };
  %1 = split(%z, indices_or_sections=[1, 2], axis=1);
  %2 = %0(%z);
  %3 = if (True) {
    %z
  } else {
    negative(%z)
  };
  %4 = %1.1;
  %5 = nn.pad(%4, -1.5f, pad_width=[[0, 1], [2, 0]]);
  %6 = qnn.quantize(%5, 0.00784314f, 128i64, out_dtype="uint8");
  %7 = (%6,);
  (%2, nanf, 1e-07f, 7i16)
}
"""


def test_print__is_what_was_parsed():
    assert print_module(parse_text(TEXT)) == TEXT


@pytest.mark.parametrize("name", ["mlp", "mobilenet", "resnet18", "resnet8_cifar", "squeezenet"])
def test_print__as_tvm_printed(name):
    text = (WRITTEN_BY_TVM / f"{name}.nometa.relay").read_text()
    wanted = re.sub(r" */\*.*?\*/", "", METADATA.split(text)[0], flags=re.DOTALL)
    assert print_module(parse_text(text)).strip() == wanted.strip()


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


def check_round_trip(mod, inputs, exact=True):
    """(text, results of both), after they were found equal."""
    text, params = to_text(mod, exact=exact)
    again = from_text(text, params)
    want, got = rq.reference.run(mod, inputs), rq.reference.run(again, inputs)
    for value, expected in zip(got, want, strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
    return text


def floats(*shape):
    return rng.standard_normal(shape).astype("float32")


def bytes_(*shape, dtype="int8"):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


Q = bytes_(2, 3, 6, 6)
R8 = bytes_(2, 3, 6, 6)
U = bytes_(2, 3, 6, 6, dtype="uint8")
ACC = rng.integers(-70000, 70000, (2, 3, 6, 6)).astype("int32")
SCALES = np.array([0.01, 0.0017, 0.3], "float32")

#: Name -> (expression, inputs, operators that the text must hold).
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


@pytest.mark.parametrize("name", INTEGER)
def test_integer__round_trip_is_exact(name):
    make, inputs, operators = INTEGER[name]
    text = check_round_trip(build(make, **inputs), inputs)
    for operator in operators:
        assert operator in text


@pytest.mark.parametrize(
    "name", ["quantize", "requantize", "requantize, per channel", "add", "mul"]
)
def test_integer__not_exact_is_qnn_and_near(name):
    make, inputs, _ = INTEGER[name]
    mod = build(make, **inputs)
    text, params = to_text(mod, exact=False)
    assert f"qnn.{name.split(',')[0]}(" in text
    want = rq.reference.run(mod, inputs)[0].astype("int32")
    got = rq.reference.run(from_text(text, params), inputs)[0].astype("int32")
    assert abs(got - want).max() <= 1


X = floats(2, 3, 6, 6)
FLOAT = {
    "matmul, three axes": lambda x: relax.op.matmul(x, relax.const(floats(6, 5))),
    "matmul, computed": lambda x: relax.op.matmul(x, x),
    "strided_slice": lambda x: relax.op.strided_slice(x, [2], [-4], [9], [2]),
    "split": lambda x: relax.op.split(x, 3, 1),
    "expand_dims": lambda x: relax.op.expand_dims(x, [0, 3]),
    "softmax": lambda x: relax.op.nn.softmax(x, 1),
    "gelu": lambda x: relax.op.nn.gelu(x),
    "leakyrelu": lambda x: relax.op.nn.leakyrelu(x, 0.1),
    "clip": lambda x: relax.op.clip(x, -0.3, 0.6),
    "mean": lambda x: relax.op.mean(x, [2, 3], keepdims=True),
    "avg_pool2d": lambda x: relax.op.nn.avg_pool2d(x, (2, 2), (2, 2), (1, 1)),
    "adaptive": lambda x: relax.op.nn.adaptive_avg_pool2d(x, (2, 3)),
    "take": lambda x: relax.op.take(x, relax.const(np.array([2, 0], "int64"), "int64"), 1),
    "resize2d": lambda x: relax.op.image.resize2d(x, (12, 12)),
    "depthwise": lambda x: relax.op.nn.conv2d(x, relax.const(floats(6, 1, 3, 3)), groups=3),
    "permute": lambda x: relax.op.permute_dims(x),
}


@pytest.mark.parametrize("name", FLOAT)
def test_float__round_trip(name):
    mod = build(FLOAT[name], x=X)
    text, params = to_text(mod)
    want = rq.reference.run(mod, [X])
    got = rq.reference.run(from_text(text, params), [X])
    for value, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(value, expected, 1e-6, 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.relay",
        "qdq_convnet.json",
        "qnn_convnet.json",
        "resnet8_cifar.relay",
        "transformer2.json",
    ],
)
def test_dump__round_trip_is_exact(name):
    path = WRITTEN_BY_TVM / name
    mod, _ = rq.load(path)
    with np.load(path.with_name(name.split(".")[0] + ".io.npz")) as data:
        check_round_trip(mod, {p.name: data[f"in_{p.name}"] for p in mod["main"].params})


def test_digits__quantized_model_round_trip():
    """The whole way: float model, integer module, Relay text, integer module."""
    from relayquant.demo import load_digits

    demo = load_digits()
    mod, params = rq.load(demo.model_path)
    qmod = rq.quantize(mod, params, demo.calibration[:4], effort="fast")
    text = check_round_trip(qmod, [demo.images[:40]])
    assert text.count("qnn.conv2d(") == 4
    assert text.count("qnn.dense(") == 1
    assert set(re.findall(r"[\w.]+(?=\()", text)) - {"main"} <= set(OPERATORS)


def test_names__are_what_relay_accepts():
    mod = build(lambda x: relax.op.add(x, relax.const(floats(2, 3))), **{"in.0:x-y": floats(2, 3)})
    text, params = to_text(mod)
    names = re.findall(r"%([^\s:,)]+)", text)
    assert all(re.fullmatch(r"[A-Za-z_]\w*|\d+", name) for name in names)
    assert set(params) <= set(names)


@pytest.mark.parametrize("word", ["type", "ref_read", "let", "inff", "inffer"])
def test_names__that_relay_takes_for_something_else(word):
    text, _ = to_text(build(relax.op.nn.relu, **{word: floats(2, 3)}))
    assert f"%v{word}" in text
    assert f"%{word}" not in text


def test_literals__least_int64_is_a_parameter():
    least = np.array(np.iinfo("int64").min)
    assert not has_literal(least)
    assert has_literal(least + 1)


def test_literals__have_all_digits():
    value = np.float32(0.1) + np.float32(1e-8)
    mod = build(lambda x: relax.op.multiply(x, relax.const(value, "float32")), x=floats(9))
    check_round_trip(mod, [floats(9)])


def test_dimensions__open_ones():
    text = "def @main(%x: Tensor[(?, 3), float32]) { reshape(%x, newshape=[-1, 3, 1]) }"
    again, _ = to_text(from_text(text))
    assert "%x: Tensor[(?, 3), float32]" in again
    assert "newshape=[-1, 3, 1]" in again


@I.ir_module
class Unwritable:
    @R.function
    def main(x: R.Tensor((2, 6), "float32")) -> R.Tensor((2, 6), "float32"):
        with R.dataflow():
            a = R.cumsum(x, axis=1)
            b = R.nn.pad(a, [0, 0, 0, 0], pad_mode="circular")
            c = R.sort(b)
            R.output(c)
        return c


def test_unwritable__all_listed():
    with pytest.raises(ModelError) as raised:
        to_text(Unwritable)
    message = str(raised.value)
    assert "3 values cannot be written" in message
    for row in ("a (cumsum): ", "b (nn.pad): it pads in mode circular", "c (sort): "):
        assert row in message


REFUSED = {
    "int32 result": lambda x: qnn.requantize(x, 0.1, 0, 0.2, 0, out_dtype="int32"),
    "another mode": lambda x: qnn.requantize(
        x, 0.1, 0, 0.2, 0, rounding="TONEAREST_EVEN", compute_dtype="int64"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_exact__what_relay_cannot_compute(name):
    with pytest.raises(ModelError, match=r"requantize.*: (a result of dtype int32|Relay has no)"):
        to_text(build(REFUSED[name], x=ACC))
