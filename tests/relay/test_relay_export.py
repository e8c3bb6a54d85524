"""Relay out: the text is Relay as TVM writes it, and computes the same bits when read again."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from onnx_models import make_onnx
from relay_export_cases import ACC, FLOAT, INTEGER, Q, X, build, build_all, bytes_, floats
from relay_testing import WRITTEN_BY_TVM
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ConfigError, ModelError
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.legality import LEGAL_STAGES, Stage
from relayquant.ir.dialect.qnn.attention import ATTENTION_OPERATORS
from relayquant.ir.rewrite.function import make_main
from relayquant.relay import from_text, to_text
from relayquant.relay.export import EXPORTS
from relayquant.relay.export.quantized_rows import export_as_table
from relayquant.relay.export.sums import sum_rounds_once
from relayquant.relay.operators import OPERATORS
from relayquant.relay.printer import has_literal, print_module
from relayquant.relay.text_reader import METADATA, parse_text

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


def check_round_trip(mod, inputs, **options):
    """The text, after the results of both were found equal."""
    text, params = to_text(mod, **options)
    again = from_text(text, params)
    want, got = rq.reference.run(mod, inputs), rq.reference.run(again, inputs)
    for value, expected in zip(got, want, strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
    return text


EXACT = [name for name, (_, _, wanted) in INTEGER.items() if wanted is not None]


@pytest.mark.parametrize("name", EXACT)
def test_integer__round_trip_is_exact(name):
    make, inputs, wanted = INTEGER[name]
    text = check_round_trip(build(make, **inputs), inputs)
    for word in wanted:
        assert word in text


@pytest.mark.slow
def test_integer__read_again_and_compiled_is_exact():
    """Compiled, not in numpy alone: the simplifier turns float (x + c) - c into x."""
    mod, inputs = build_all({name: INTEGER[name][:2] for name in EXACT})
    text, params = to_text(mod)
    got = Executor(rq.compile(from_text(text, params))).run("main", list(inputs.values()))
    for value, expected in zip(got, rq.reference.run(mod, inputs), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("data", [Q, Q.view("uint8")], ids=["int8", "uint8"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: qnn.leaky_relu(x, 0.031, 3, 0.02, 4, 0.3),
        lambda x: qnn.leaky_relu(x, 0.031, 3, 0.02, 4, 0.0),
        lambda x: qnn.prelu(x, 0.031, 3, 0.02, 4, np.array(-1.5), axis=1),
    ],
)
def test_integer__an_operator_without_a_row_is_a_table(make, data, monkeypatch):
    """Of bytes, with one parameter for all: what the next such operator is written as."""
    for name in ("leaky_relu", "prelu"):
        monkeypatch.setitem(EXPORTS, f"relax.qnn.{name}", export_as_table)
    text = check_round_trip(build(make, x=data), {"x": data})
    assert "take(" in text


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (lambda x: qnn.prelu(x, 0.1, 3, 0.2, 4, np.arange(3.0), 1), Q, "differ between channels"),
        (lambda x: qnn.prelu(x, 0.1, 3, 0.2, 4, 0.5), Q.astype("int16"), "needs 8-bit data"),
    ],
)
def test_integer__no_table(make, data, message, monkeypatch):
    monkeypatch.setitem(EXPORTS, "relax.qnn.prelu", export_as_table)
    with pytest.raises(ModelError, match=message):
        to_text(build(make, x=data))


def test_operators__each_is_written():
    """All that a quantized module may hold, but what is refused by name."""
    integer = {name for name, stages in LEGAL_STAGES.items() if Stage.QNN in stages}
    # Weights of few bits in groups, and what reads them, are refused: there is no such operator.
    # So are recurrent layers, and attention over a cache. Transforms are written as products.
    grouped = ("grouped_dense", "grouped_take", "quantize_rows")
    experts = ("expert_dense", "grouped_expert_dense")
    others = ("lstm", "gru", "rnn", "gated_delta", "dft")
    refused = {f"relax.qnn.{name}" for name in (*grouped, *experts, *others)}
    assert integer - set(EXPORTS) == ATTENTION_OPERATORS | refused


def test_recurrent__says_what_to_do(tmp_path):
    """Layers are one operator for all steps, which Relay has not."""
    constants = {"w": np.ones((1, 8, 4), "float32"), "r": np.ones((1, 8, 2), "float32")}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=2)
    model = make_onnx([node], {"x": (3, 1, 4)}, "y", constants)
    onnx.save(model, path := tmp_path / "lstm.onnx")
    with pytest.raises(ModelError, match=r"qnn.lstm.*no recurrent layers.*export_onnx"):
        to_text(rq.load(path))


@pytest.mark.parametrize("release", ["0.8", "0.19"])
def test_integer__not_exact_is_near(release):
    """Every operator within one step of its own result, in all releases."""
    names = [name for name in INTEGER if name != "add, as Relay"]
    mod, inputs = build_all({name: INTEGER[name][:2] for name in names})
    text, params = to_text(mod, exact=False, release=release)
    want = rq.reference.run(mod, inputs)
    got = rq.reference.run(from_text(text, params), inputs)
    for name, value, expected in zip(names, got, want, strict=True):
        assert abs(value.astype("float64") - expected).max() <= 1, name


@pytest.mark.parametrize(
    "name", ["requantize", "requantize, per channel", "add", "add, far apart", "mul", "concatenate"]
)
def test_integer__not_exact_is_qnn(name):
    """Also where the scales of a sum are so far apart that it could not be added exactly."""
    make, inputs, _ = INTEGER[name]
    text, _ = to_text(build(make, **inputs), exact=False)
    assert f"qnn.{name.split(',')[0]}(" in text
    assert "float64" not in text


def test_quantize__not_exact():
    """Of an input it stays exact: all pixels of an image may lie halfway."""
    x = {"x": np.arange(-9, 9, dtype="float32") / 2}
    of_input = build(lambda x: qnn.quantize(x, 1.0, 0), **x)
    check_round_trip(of_input, x, exact=False)
    behind = build(lambda x: qnn.quantize(relax.op.sigmoid(x), 0.01, 0), **x)
    assert "qnn.quantize(" in to_text(behind, exact=False)[0]


def test_mean__not_exact_is_an_average_pool():
    """Between casts, as back ends look for it, where the parameters stay."""
    mod = build(lambda x: qnn.mean(x, 0.031, 3, 0.031, 3, (1, 2)), x=Q)
    text, params = to_text(mod, exact=False)
    cast, pool, narrow = (line.strip() for line in text.splitlines()[2:5])
    assert cast == '%0 = cast(%x, dtype="int32");'
    assert pool == '%1 = nn.avg_pool2d(%0, pool_size=[3, 6], layout="NHWC");'
    assert narrow == '%2 = cast(%1, dtype="int8");'
    want, got = (rq.reference.run(each, [Q])[0] for each in (mod, from_text(text, params)))
    assert abs(got.astype(int) - want).max() <= 1


def test_bias__constant_first_and_what_is_none():
    """add(b, product) too; a constant of another shape stays an addition."""

    def make(shape, is_first):
        def expression(x):
            product = relax.op.nn.conv2d(x, relax.const(floats(4, 3, 3, 3)))
            bias = relax.const(floats(*shape))
            return relax.op.add(bias, product) if is_first else relax.op.add(product, bias)

        return to_text(build(expression, x=X))[0]

    assert "nn.bias_add(%0, " in make((1, 4, 1, 1), True)
    assert "axis=1" not in make((4, 1, 1), False)  # the default of nn.bias_add
    for shape in ((1,), (4,), (2, 4, 1, 1), (1, 1, 4, 1)):
        assert " add(" in make(shape, False)


def test_sum__that_no_float64_holds_is_refused_exactly():
    """r * m_r of both signs at half a step: what float64 cuts off the accumulator decides."""
    mod = build(
        lambda x, y: qnn.add(x, y, 1e-8, 0, 0.5, 0, 1.0, 0, out_dtype="int8"),
        x=ACC,
        y=bytes_(2, 3, 6, 6),
    )
    with pytest.raises(ModelError, match=r"too far apart to add exactly; exact=False adds them"):
        to_text(mod)


def fused_sum(left, first, right, second):
    """round(float32(l * first) + r * second), half to even, by exact fractions."""
    product = Fraction(float(np.float32(left) * np.float32(first)))
    total = product + Fraction(int(right)) * Fraction(float(second))
    near = np.float32(float(total))
    candidates = [
        np.nextafter(near, np.float32(-np.inf)),
        near,
        np.nextafter(near, np.float32(9e9)),
    ]
    best = min(candidates, key=lambda c: (abs(Fraction(float(c)) - total), is_odd(c)))
    return int(np.rint(best))


def is_odd(number):
    return int(np.float32(number).view("int32")) & 1


def test_sum__rounds_once_where_it_is_said_to():
    """Against exact fractions, at the places where twice rounded sums would differ: accumulators
    that bring the sum next to a threshold.
    """
    right = np.arange(-128, 128)
    checked = 0
    for exponent in range(-34, -16):
        first, second = np.float32(1.1 * 2.0**exponent), np.float32(0.8137)
        assert sum_rounds_once(np.array(first), np.array(second), right, 256)
        for r in right[::7]:
            product = float(second) * int(r)
            missing = round((np.floor(product) + 0.5 - product) / float(first))
            for left in (-1, 0, 1, missing - 1, missing, missing + 1):
                if abs(left) < 2**31:
                    twice = np.float32(float(np.float32(left) * first) + product)
                    assert int(np.rint(twice)) == fused_sum(left, first, r, second)
                    checked += 1
    assert checked > 2000


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
    shape = demo.images[:40].shape
    name = qmod["main"].params[0].name
    text = check_round_trip(qmod, [demo.images[:40]], shapes={name: shape})
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


OPEN = """def @main(%x: Tensor[(?, 3), float32], %y: Tensor[(?, ?), float32]) {
  (reshape(%x, newshape=[-1, 3, 1]), %y)
}"""


def test_shapes__fix_what_is_open():
    mod = from_text(OPEN)
    text, _ = to_text(mod, shapes={"x": (4, 3), "y": (2, 5)})
    assert "%x: Tensor[(4, 3), float32], %y: Tensor[(2, 5), float32]" in text
    assert "newshape=[4, 3, 1]" in text


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        (None, ModelError, r"input 'x' is \(.*, 3\), input 'y' is .* Give them: shapes={'x': "),
        ({"x": (4, 3)}, ModelError, r"but input 'y' is"),
        ({"z": (4, 3)}, ConfigError, r"there is no input 'z'. .*'x', 'y'"),
        ({"x": (4, 2)}, ConfigError, r"shapes\['x'\] is \(4, 2\), but the input is .*allowed"),
        ({"x": (4,)}, ConfigError, r"shapes\['x'\] is \(4,\), but the input is"),
        ({"x": (0, 3)}, ConfigError, r"size from 1"),
    ],
)
def test_shapes__that_do_not_fit(shapes, error, message):
    with pytest.raises(error, match=message):
        to_text(from_text(OPEN), shapes=shapes)


def test_shapes__that_contradict_each_other():
    size = tvm.tirx.Var("n", "int64")
    params = [relax.Var(name, relax.TensorType((size, 3), "float32")) for name in "ab"]
    mod = make_main(params, lambda _: relax.op.add(*params))
    with pytest.raises(ConfigError, match=r"shapes\['a'\] is \(2, 3\), but with the other shapes"):
        to_text(mod, shapes={"a": (2, 3), "b": (4, 3)})


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
    assert "3 values cannot be written in the Relay of TVM 0.19" in message
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


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("padding", [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 2]])
def test_pool__has_as_many_windows_in_relay(kind, padding):
    """With ceil_mode Relay counts a last window that begins behind the data, Relax does not."""
    x = relax.Var("x", relax.TensorType((1, 2, 4, 5), "float32"))
    function = getattr(relax.op.nn, f"{kind}_pool2d")

    def emit(builder):
        made = function(x, [3, 2], [2, 2], padding, ceil_mode=True)
        return builder.emit(made)

    mod = make_main([x], emit)
    data = np.random.default_rng(0).normal(size=(1, 2, 4, 5)).astype("float32")
    again = from_text(*to_text(mod))
    (expected,), (found,) = (rq.reference.run(each, [data]) for each in (mod, again))
    np.testing.assert_array_equal(found, expected)
