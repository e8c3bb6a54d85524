"""What an interactive session shows of our values fits on a screen, whatever the model's size."""

from __future__ import annotations

import pytest
from float_models import Chain, build_model

import relayquant as rq

#: characters: some lines of a terminal
SCREEN = 1500


@pytest.fixture(scope="module")
def prepared():
    def body(emit: Chain, x):
        for _ in range(12):
            x = emit.conv_bias("y", x)
        return x

    return rq.prepare(build_model(body, (1, 8, 4, 4)), None, backend="x86")


def test_representation__of_a_backend():
    assert repr(rq.get_backend_config("x86")).startswith("BackendConfig('x86': ")
    longest = max(rq.get_backend_config("x86").patterns, key=lambda row: len(repr(row)))
    assert len(repr(longest.pattern)) < SCREEN


def test_representation__of_a_prepared_model(prepared):
    assert repr(prepared) == (
        "PreparedModel(for 'x86': 12 of 12 operators to quantize, parameters of 0 of 24 values)"
    )
    assert repr(prepared.graph) == "CalibrationGraph(of x: parameters of 24 values)"
    assert len(repr(prepared.plan.operators[0])) < SCREEN
