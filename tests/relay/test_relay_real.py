"""Relay out: all ways of writing an operator, built and run by a real Relay."""

from __future__ import annotations

import numpy as np
import pytest
from relay_export_cases import FLOAT, INTEGER, X, build, build_all

import relayquant as rq
from relayquant.relay import to_text

EXACT = [name for name, (_, _, wanted) in INTEGER.items() if wanted is not None]


@pytest.mark.parametrize("exact", [True, False])
def test_integer__in_a_real_relay(exact, real_relay):
    """The bits of our numpy, or within one step of each operator's own result."""
    mod, inputs = build_all({name: INTEGER[name][:2] for name in EXACT})
    text, params = to_text(mod, exact=exact, release="0.10")
    real_relay.add("rows", text, params, {name: array[None] for name, array in inputs.items()})
    real_relay.run()
    want = rq.reference.run(mod, inputs)
    for name, got, expected in zip(EXACT, real_relay.read_outputs("rows"), want, strict=True):
        difference = abs(got[0].astype("float64") - expected).max()
        assert difference <= (0 if exact else 1), (name, difference)


def test_float__in_a_real_relay(real_relay):
    mods = {name: build(make, x=X) for name, make in FLOAT.items()}
    for name, mod in mods.items():
        text, params = to_text(mod, release="0.10")
        real_relay.add(name.replace(" ", "_"), text, params, {"x": X[None]})
    real_relay.run()
    for name, mod in mods.items():
        found = real_relay.read_outputs(name.replace(" ", "_"))
        for got, expected in zip(found, rq.reference.run(mod, [X]), strict=False):
            np.testing.assert_allclose(got[0], expected, 1e-4, 1e-4, err_msg=name)
