"""Ranges that end where the functions that read them no longer change."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import MAP, build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.stages.calibration.flat_ends import TOLERANCE, cut_flat_ends, find_functions


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x.astype("float64")))


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (silu, -20, 8),
        (np.tanh, -9, 30),
        (lambda x: np.clip(x, 0, 1), -5, 4),
        (lambda x: x * np.clip(x + 3, 0, 6) / 6, -12, 5),
        (np.exp, -30, 1),
    ],
)
def test_cut__changes_no_result_by_more_than_the_tolerance(function, low, high):
    first, last = cut_flat_ends(low, high, [function])
    assert last - first < 0.8 * (high - low)
    x = np.linspace(low, high, 20001)
    change = np.abs(function(np.clip(x, first, last)) - function(x)).max()
    assert change <= 1.05 * TOLERANCE * np.ptp(function(x)) / 255


def test_cut__as_far_as_all_readers_allow():
    clip = lambda x: np.clip(x, -1, 1)  # noqa: E731
    first, last = cut_flat_ends(-8, 8, [clip, lambda x: np.clip(x, -4, 0)])
    assert (first, last) == pytest.approx((-4, 1), abs=0.02)
    assert cut_flat_ends(-8, 8, [lambda x: x, clip]) == pytest.approx((-8, 8), abs=0.02)
    with np.errstate(divide="ignore"):
        assert cut_flat_ends(-8, 8, [lambda x: 1 / np.maximum(x, 0), clip]) == (-8, 8)


def gates(emit, x):
    """`a` is read by a table alone, through a move; `b` by a product too; `c` is an output too."""
    a = emit.conv_bias("a", x)
    moved = emit("moved", op.permute_dims(a, [0, 2, 3, 1]))
    first = emit("first", op.nn.silu(moved))
    b = emit.conv_bias("b", x)
    second = emit("second", op.add(emit("gate", op.sigmoid(b)), emit.conv("g", b)))
    c = emit.conv_bias("c", x)
    third = emit("third", op.tanh(c))
    joined = [emit.dense("d", first, 3), emit.conv("e", second), emit.conv("f", third), c]
    return relax.Tuple(joined)


def test_find_functions__of_values_that_only_tables_read():
    functions = find_functions(rq.prepare(build_model(gates, MAP)))
    assert "a" in functions
    assert not {"b", "c"} & {*functions}
    x = np.linspace(-6, 6, 50, dtype="float32")
    np.testing.assert_allclose(functions["a"][0](x), silu(x), atol=1e-6)


def test_calibrate__the_step_is_smaller_and_the_user_decides():
    data = [10 * np.random.default_rng(i).standard_normal(MAP, "float32") for i in range(8)]
    prepared = rq.prepare(build_model(gates, MAP))
    cut = rq.calibrate(prepared, data).parameters["a"]
    full = rq.calibrate(prepared, data, observer=rq.observers.MinMax()).parameters["a"]
    assert cut.scale < 0.75 * full.scale
    low = -float(cut.zero_point * cut.scale)
    assert -12 < low < -2
