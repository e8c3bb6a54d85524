"""Smoothing of `compress_weights`: range moves between the columns of a weight and its data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tiny_llama import list_calls, select_calls
from tvm import relax

import relayquant as rq
from relayquant.flow.compression.compress import divide_norm
from relayquant.ir.rewrite.function import define_function, make_main
from relayquant.ir.rewrite.graph import call_name

WIDTH, UNITS = 64, 48
LOUD = np.where(np.arange(WIDTH) % 16 == 3, 30, 1).astype("float32")

Make = Callable[[relax.Expr], relax.Expr]


def norm(x: relax.Expr) -> relax.Expr:
    return relax.op.nn.rms_norm(x, relax.const(LOUD), [-1])


def layer_norm(x: relax.Expr) -> relax.Expr:
    return relax.op.nn.layer_norm(x, relax.const(LOUD), relax.const(LOUD / 2), [-1])


def scale(x: relax.Expr) -> relax.Expr:
    return relax.op.multiply(x, relax.const(LOUD))


def make_model(make: Make, *, is_shared: bool = False) -> tvm.IRModule:
    """A module of a product whose data has loud elements.

    With `is_shared` a table has the same rows.
    """
    weight = np.random.default_rng(0).normal(size=(UNITS, WIDTH)).astype("float32")
    x = relax.Var("x", relax.TensorType([8, WIDTH], "float32"))
    builder = relax.BlockBuilder()

    def compute() -> relax.Expr:
        loud = builder.emit(make(x), "loud")
        held = relax.const(weight)
        turned = builder.emit(relax.op.permute_dims(held), "turned")
        y = builder.emit(relax.op.matmul(loud, turned), "y")
        if is_shared:
            first = builder.emit(relax.op.take(held, relax.const(np.arange(8)), 0, "clip"), "rows")
            cut = builder.emit(relax.op.strided_slice(first, [1], [0], [UNITS]), "cut")
            y = builder.emit(relax.op.add(y, cut), "sum")
        return builder.emit_output(y)

    return tvm.IRModule({"main": define_function(builder, [x], compute)})


def draw(seed: int, count: int = 6) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(8, WIDTH)).astype("float32") for _ in range(count)]


def measure_error(mod, q) -> float:
    """Mean squares of the change of the result, on data that nothing was fitted to."""
    changes = [rq.reference.run(q, [x])[0] - rq.reference.run(mod, [x])[0] for x in draw(1)]
    return float(np.square(changes).mean())


@pytest.mark.parametrize("make", [norm, layer_norm, scale])
@pytest.mark.parametrize("bits", [8, 4])
def test_smoothing__loud_elements_cost_less(make, bits, monkeypatch):
    mod = make_model(make)
    smooth = rq.compress_weights(mod, dataset=draw(0), bits=bits, effort="fast")
    monkeypatch.setattr("relayquant.flow.compression.smoothing.WORTHWHILE", 0.0)
    plain = rq.compress_weights(mod, dataset=draw(0), bits=bits, effort="fast")
    assert measure_error(mod, smooth) < 0.6 * measure_error(mod, plain)


def test_smoothing__constants_of_a_norm_take_the_factors():
    q = rq.compress_weights(make_model(norm), dataset=draw(0), bits=8)
    names = [call_name(call) for call in list_calls(q["main"])]
    assert names.count("relax.nn.rms_norm") == 1
    assert "relax.multiply" not in names
    (call,) = select_calls(q, "relax.nn.rms_norm")["main"]
    assert np.ptp(np.log(call.args[1].value.numpy())) < np.ptp(np.log(LOUD))


@pytest.mark.parametrize(
    ("make", "is_divided"),
    [
        (lambda x, f: relax.op.nn.rms_norm(x, f, [-1]), True),
        (lambda x, f: relax.op.nn.layer_norm(x, f, f, [2], center=False), True),
        (lambda x, f: relax.op.nn.layer_norm(x, f, f, [1]), False),
        (lambda x, f: relax.op.nn.layer_norm(x, f, f, [-1], scale=False), False),
    ],
    ids=["rms", "no_offset", "other_axis", "no_scale"],
)
def test_divide_norm__where_its_constants_are_of_the_columns(make, is_divided):
    factors = np.linspace(0.5, 2, 6).astype("float32")
    x = relax.Var("x", relax.TensorType([2, 6, 6], "float32"))
    value = relax.BlockBuilder().normalize(make(x, relax.const(LOUD[:6])))
    divided = divide_norm(value, factors)
    assert (divided is not None) == is_divided
    if divided is not None:
        data = np.random.default_rng(0).normal(size=(2, 6, 6)).astype("float32")
        mods = (make_main([x], lambda _, each=each: each) for each in (value, divided))
        found = [rq.reference.run(mod, [data])[0] for mod in mods]
        np.testing.assert_allclose(found[1], found[0] / factors, rtol=1e-6)


def test_smoothing__other_data_is_multiplied():
    q = rq.compress_weights(
        make_model(relax.op.nn.relu), dataset=[LOUD * x for x in draw(0)], bits=8
    )
    assert len(select_calls(q, "relax.multiply")["main"]) == 1


def test_smoothing__a_table_keeps_its_rows():
    q = rq.compress_weights(make_model(norm, is_shared=True), dataset=draw(0), bits=8)
    (call,) = select_calls(q, "relax.nn.rms_norm")["main"]
    assert np.array_equal(call.args[1].value.numpy(), LOUD)


def test_smoothing__even_data_stays():
    q = rq.compress_weights(make_model(relax.op.nn.relu), dataset=draw(0), bits=8)
    assert not select_calls(q, "relax.multiply")["main"]
