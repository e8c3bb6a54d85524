"""Recurrent layers in a module: kernels, plain loops where there is none, and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compiled_call import run_compiled
from declined_rules import hear_declined
from tvm import relax

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.recurrent import lower_recurrent
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main

UNITS = 5
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
SETTINGS = {
    "lstm": {"clip": 0.5, "peepholes": np.full((3, UNITS), 0.3, "float32")},
    "gru": {"is_reversed": True, "lengths": np.array([2, 4], "int32")},
    "rnn": {"activations": ["relu"], "hidden": np.full((2, UNITS), 0.2, "float32")},
}


def draw(op, steps=4, batch=2):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, batch, GATES[op] * UNITS)).astype("float32")
    return x, rng.integers(-127, 128, (UNITS, GATES[op] * UNITS)).astype("int8")


def make_layer(op, weight, **settings):
    scale = np.full(weight.shape[1], 0.01, "float32")
    return lambda x: getattr(qnn, op)(x, weight, scale, **{**SETTINGS[op], **settings})


def make_model(op, weight, shape, **settings):
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    return make_main([x], lambda _: make_layer(op, weight, **settings)(x))


@pytest.mark.parametrize("op", GATES)
def test_recurrent__kernel_as_numpy(op):
    x, weight = draw(op)
    found, expected = run_compiled(make_layer(op, weight), x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("op", GATES)
def test_recurrent__plain_loops_as_numpy(op):
    """What TVM compiles without this package's pipeline."""
    x, weight = draw(op)
    mod = make_model(op, weight, x.shape)
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(found, rq.reference.run(mod, [x])[0])


def test_recurrent__linear_before_reset_in_plain_loops():
    x, weight = draw("gru")
    bias = np.linspace(-1, 1, UNITS, dtype="float32")
    mod = make_model("gru", weight, x.shape, linear_before_reset=True, hidden_bias=bias)
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(found, rq.reference.run(mod, [x])[0])


def test_recurrent__number_of_steps_known_at_run_time():
    """One library runs sequences of any length."""
    _, weight = draw("lstm")
    steps = tvm.tirx.Var("T", "int64")
    mod = make_model("lstm", weight, (steps, 2, 4 * UNITS))
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    for count in (1, 6):
        x, _ = draw("lstm", count)
        found = machine["main"](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_array_equal(found, rq.reference.run(mod, [x])[0])


def test_recurrent__without_a_kernel():
    """One number for all samples is rare: the plain loops take it."""
    x, weight = draw("rnn")
    mod = make_model("rnn", weight, x.shape, hidden=0.5)
    with hear_declined() as heard:
        lower_recurrent(mod, resolve_target(None))
    assert [reason for _, _, reason in heard] == ["operand 'hidden' is one number for all samples"]
    found, expected = run_compiled(make_layer("rnn", weight, hidden=0.5), x)
    np.testing.assert_array_equal(found, expected)


def test_recurrent__wrong_shape():
    x, weight = draw("lstm")
    with pytest.raises(rq.errors.QnnError, match=r"qnn.lstm: operand 'hidden' has shape \(3, 5\)"):
        make_model("lstm", weight, x.shape, hidden=np.zeros((3, UNITS), "float32"))
