"""Kernels of recurrent layers on every instruction set, against numpy, to the bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from emulated_unit import find_target
from exact import call_kernel
from machines import best_isa, every_isa
from tvm.target import Target

from relayquant.codegen.kernels.isa.arm import NEON, SDOT, SMMLA
from relayquant.codegen.kernels.recurrent import Recurrence, build_recurrence, pack_recurrence
from relayquant.ir.dialect.qnn.recurrent import CELLS
from relayquant.ir.reference import qnn

ACTIVATIONS = {"lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh"), "rnn": ("tanh",)}
OWN = {"lstm": ("input_forget", "cell_clip"), "gru": ("linear_before_reset",), "rnn": ()}
ABSENT = {"lengths": 2**31 - 1}

#: cell, steps, samples, units, settings: units that fill no vector, one, and several with a rest
CASES = [
    ("lstm", 3, 2, 7, {"given": CELLS["lstm"].optional}),
    ("lstm", 4, 1, 32, {"is_reversed": True, "clip": 0.5, "cell_clip": 0.3}),
    ("lstm", 2, 3, 37, {"input_forget": True, "activations": ("tanh", "relu", "sigmoid")}),
    ("gru", 3, 3, 20, {"given": CELLS["gru"].optional, "linear_before_reset": True}),
    ("gru", 3, 2, 16, {"given": ("lengths",), "is_reversed": True, "clip": 0.3}),
    ("rnn", 4, 2, 5, {"given": CELLS["rnn"].optional, "activations": ("relu",)}),
]


def make_spec(cell, steps, batch, units, settings, is_integer=True):
    values = {
        "activations": ACTIVATIONS[cell],
        "clip": 0.0,
        "is_reversed": False,
        "linear_before_reset": False,
        "input_forget": False,
        "cell_clip": 0.0,
        "given": (),
        **settings,
    }
    return Recurrence(cell, steps, batch, units, is_integer, **values)


def draw(spec):
    """(gates, weight, scale, the optional operands by name)"""
    rng = np.random.default_rng(0)
    width = spec.gates * spec.units
    x = rng.normal(size=(spec.steps, spec.batch, width)).astype("float32")
    weight = rng.normal(size=(spec.units, width)).astype("float32")
    shapes = {
        "hidden": (spec.batch, spec.units),
        "cell": (spec.batch, spec.units),
        "peepholes": (3, spec.units),
        "hidden_bias": (spec.units,),
    }
    given = {n: rng.normal(size=shapes[n]).astype("float32") for n in spec.given if n in shapes}
    if "lengths" in spec.given:
        given["lengths"] = np.arange(spec.batch, dtype="int32")[::-1] + spec.steps - spec.batch + 1
    if not spec.is_integer:
        return x, weight, np.float32(1), given
    scale = (np.abs(weight).max(0) / 127).astype("float32")
    return x, np.rint(weight / scale).astype("int8"), scale, given


def expect(spec, x, weight, scale, given):
    others = [given.get(name, ABSENT.get(name, 0.0)) for name in CELLS[spec.cell].optional]
    attrs = {
        name: getattr(spec, name)
        for name in ("activations", "clip", "is_reversed", *OWN[spec.cell])
    }
    return getattr(qnn, spec.cell)(x, weight, scale, *others, **attrs)


def run(spec, isa, target):
    x, weight, scale, given = operands = draw(spec)
    packed = pack_recurrence(spec, isa, weight, scale) if spec.is_integer else [weight]
    inputs = [x, *packed, *(given[name] for name in spec.given)]
    expected = expect(spec, *operands)
    kernel = build_recurrence(spec, isa, spec.cell)
    return call_kernel(kernel, target, inputs, expected.shape, "float32"), expected


@pytest.mark.sample(3)
@every_isa
def test_recurrence__as_numpy_on_every_instruction_set(isa):
    found, expected = run(make_spec(*CASES[0]), isa, find_target(isa))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: f"{case[0]}{case[3]}")
def test_recurrence__as_numpy_in_every_form(case):
    isa = best_isa()
    found, expected = run(make_spec(*case), isa, find_target(isa))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case[0])
def test_recurrence__with_a_float_weight(case):
    """Sums of floats have no order that is specified."""
    isa = best_isa()
    found, expected = run(make_spec(*case, is_integer=False), isa, find_target(isa))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_recurrence__steps_and_samples_known_at_run_time():
    isa = best_isa()
    known = make_spec(*CASES[0])
    spec = Recurrence(**{**vars(known), "steps": None, "batch": None})
    x, weight, scale, given = operands = draw(known)
    inputs = [x, *pack_recurrence(spec, isa, weight, scale), *(given[n] for n in spec.given)]
    expected = expect(known, *operands)
    kernel = build_recurrence(spec, isa, "lstm")
    found = call_kernel(kernel, find_target(isa), inputs, expected.shape, "float32")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("isa", "features", "dot"),
    [(SDOT, "+dotprod", "sdot"), (SMMLA, "+dotprod,+i8mm", "sdot"), (NEON, "", "sm(?:ul|la)l2?")],
    ids=lambda value: getattr(value, "name", None),
)
def test_recurrence__dot_products_of_arm(isa, features, dot):
    kernel = build_recurrence(make_spec("lstm", 4, 1, 32, {}), isa, "lstm")
    target = Target(
        {
            "kind": "llvm",
            "mtriple": "aarch64-linux-gnu",
            "mattr": ["+neon", *filter(None, features.split(","))],
        }
    )
    library = tvm.compile(tvm.IRModule({"lstm": kernel}), target=target)
    assert re.search(rf"\t{dot}\tv", library.mod.inspect_source("asm"))
