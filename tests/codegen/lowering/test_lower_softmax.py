"""Softmax in modules: the kernels that it becomes, and its bits, which are those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.integer.lower import lower_integer
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import call_name

SCORES = (2, 3, 20, 37)
FACTOR = 0.3


def number(value, ndim=0):
    return relax.const(np.full((1,) * ndim, value, "float32"))


def make_module(body, shape=SCORES, dtype="float32"):
    """main(x) of what `body(emit, x)` gives: a list of values."""
    symbols = {}
    extents = [
        symbols.setdefault(e, tvm.tirx.Var(e, "int64")) if isinstance(e, str) else e for e in shape
    ]
    x = relax.Var("x", relax.TensorType(extents, dtype))
    return make_main([x], lambda builder: relax.Tuple(body(builder.emit, x)))


def quantize(emit, y, dtype="uint8", scale=1 / 255):
    value = rq.extend.qnn.quantize(y, scale, relax.const(0, "int32"), out_dtype=dtype)
    return emit(value)


def list_names(mod):
    """What main calls behind `lower_integer`: operators, and kernels by their names."""
    lowered = lower_integer(mod, resolve_target(None))
    calls = [b.value for block in lowered["main"].body.blocks for b in block.bindings]
    return [
        call.args[0].name_hint if call_name(call) == "relax.call_tir" else call_name(call)
        for call in calls
        if isinstance(call, tvm.ir.Call)
    ]


def draw(shape=SCORES):
    rng = np.random.default_rng(0)
    x = (rng.normal(0, 1, shape) * 10.0 ** rng.integers(-2, 3, shape)).astype("float32")
    x[0, ..., 1:] = -np.inf
    return x


def run(mod, x):
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    return [value.numpy() for value in machine["main"](tvm.runtime.tensor(x))]


def check(mod, x):
    for found, wanted in zip(run(mod, x), rq.reference.run(mod, [x]), strict=True):
        np.testing.assert_array_equal(found, wanted)


def scaled_codes(emit, x):
    return [quantize(emit, emit(op.nn.softmax(emit(op.multiply(x, number(FACTOR))), -1)))]


def masked_codes(emit, x):
    mask = relax.const(np.triu(np.full((20, 37), -1e30, "float32"), 18))
    return [quantize(emit, emit(op.nn.softmax(emit(op.add(x, mask)), 3)))]


def scaled_and_kept(emit, x):
    y = emit(op.nn.softmax(emit(op.multiply(x, number(FACTOR, 2))), -1))
    return [quantize(emit, y), y]


def negative_factor(emit, x):
    return [quantize(emit, emit(op.nn.softmax(emit(op.multiply(x, number(-FACTOR))), -1)))]


def product_read_twice(emit, x):
    product = emit(op.multiply(x, number(FACTOR)))
    return [quantize(emit, emit(op.nn.softmax(product, -1))), product]


def along_channels(emit, x):
    return [quantize(emit, emit(op.nn.softmax(x, 1)))]


def codes_of_rows(emit, x):
    y = emit(op.nn.softmax(emit(op.multiply(x, number(FACTOR))), -1))
    pair = emit(rq.extend.qnn.quantize_rows(y))
    return [emit(relax.TupleGetItem(pair, i)) for i in range(2)]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (scaled_codes, ["softmax"]),
        (masked_codes, ["relax.add", "softmax"]),
        (scaled_and_kept, ["softmax", "qnn_quantize"]),
        (negative_factor, ["relax.multiply", "softmax"]),
        (product_read_twice, ["relax.multiply", "softmax"]),
        (along_channels, ["relax.nn.softmax", "qnn_quantize"]),
        (codes_of_rows, ["softmax", "relax.qnn.quantize_rows"]),
    ],
)
def test_lower_softmax__the_bits_of_the_reference(body, names):
    """With the number before it and the integers behind it, where nobody else reads what goes."""
    mod = make_module(body)
    assert list_names(mod) == names
    check(mod, draw())


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", [("n", 3, 20, 37), (2, 3, "m", "k"), (2, 3, 20, "k")])
@pytest.mark.parametrize("body", [scaled_codes, codes_of_rows, along_channels])
def test_lower_softmax__of_extents_that_are_known_at_run_time(shape, body):
    if body is codes_of_rows and shape[-1] == "k":
        pytest.skip("rows of unknown length have no integers")
    check(make_module(body, shape), draw())


@pytest.mark.parametrize("axis", range(4))
def test_softmax__of_a_float_module(axis):
    mod = make_module(lambda emit, x: [emit(op.nn.softmax(x, axis))])
    check(mod, draw())
    check(make_module(lambda emit, x: [emit(op.nn.softmax(x, axis))], ("n", 3, "m", 37)), draw())


def test_softmax__outside_of_dataflow_and_in_another_layout():
    """Behind a convolution, whose layout moves the axis."""
    rng = np.random.default_rng(1)
    x = relax.Var("x", relax.TensorType((1, 3, 8, 9), "float32"))
    weight = relax.const(rng.normal(size=(4, 3, 3, 3)).astype("float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        result = builder.emit(op.nn.softmax(builder.emit(op.negative(x)), 3))
        builder.emit_func_output(relax.Tuple([result]))
    check(builder.finalize(), rng.normal(size=(1, 3, 8, 9)).astype("float32"))

    def body(emit, x):
        y = emit(op.nn.conv2d(emit(op.nn.softmax(x, 3)), weight, padding=1))
        return [y]

    data = rng.normal(size=(1, 3, 8, 9)).astype("float32")
    mod = make_module(body, (1, 3, 8, 9))
    np.testing.assert_allclose(run(mod, data)[0], rq.reference.run(mod, [data])[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_softmax__of_other_floats_is_that_of_tvm(dtype):
    x = np.random.default_rng(2).normal(size=(3, 20)).astype(dtype)
    mod = make_module(lambda emit, x: [emit(op.nn.softmax(x))], (3, 20), dtype)
    tolerance = 1e-2 if dtype == "float16" else 1e-12
    np.testing.assert_allclose(run(mod, x)[0], rq.reference.run(mod, [x])[0], rtol=tolerance)


def test_verify__attention_has_no_ties():
    """Integers behind a softmax, nearly half of whose scores lie at ties."""

    def body(emit, x):
        q = emit(rq.extend.qnn.quantize(x, 0.5, relax.const(0, "int32"), out_dtype="int8"))
        real = emit(rq.extend.qnn.dequantize(q, 0.5, relax.const(0, "int32")))
        return scaled_codes(emit, real)

    mod = make_module(body, (2, 12, 64, 128))
    report = rq.verify(mod, [np.random.default_rng(3).normal(0, 4, (2, 12, 64, 128)).astype("f4")])
    assert report.is_equal
    assert report.ties == 0
