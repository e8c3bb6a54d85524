"""Inputs with channels of very different range: scaled exactly, and only where it helps."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import relax as R

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.stages.equalization.channels import ChannelStatistics, measure_channels
from relayquant.stages.equalization.inputs import equalize_inputs, find_scaled_inputs

RNG = np.random.default_rng(8)
RANGES = np.geomspace(300, 1, 12).astype("float32")
#: the model pays as much heed to small channels as to large ones
W = (RNG.standard_normal((12, 8)) / RANGES[:, None]).astype("float32")


def product_model(weight: np.ndarray = W) -> tvm.IRModule:
    constant = relax.const(weight)

    @as_main
    def model(x: R.Tensor((20, 12), "float32")):
        return R.matmul(x, constant)

    return model


def draw_batches(count: int, ranges: np.ndarray = RANGES) -> list[np.ndarray]:
    return [(RNG.uniform(-1, 1, (20, 12)) * ranges).astype("float32") for _ in range(count)]


def measure(mod: tvm.IRModule, batches: list[np.ndarray]) -> dict[str, ChannelStatistics]:
    return measure_channels([{"x": batch} for batch in batches], find_scaled_inputs(mod))


def test_measure_channels__streams():
    batches = draw_batches(3)
    rows = np.concatenate(batches).astype("float64")
    statistics = measure_channels(({"x": b} for b in batches), ["x"])["x"]
    np.testing.assert_array_equal(statistics.largest, np.abs(rows).max(0))
    np.testing.assert_allclose(statistics.mean_square, (rows**2).mean(0))


def test_scales__powers_of_two():
    statistics = ChannelStatistics(np.array([300.0, 0.0, 0.01]), np.ones(3))
    np.testing.assert_array_equal(statistics.scales(), np.float32([256, 1, 2.0**-7]))


def test_equalize__same_function_bit_for_bit():
    mod, batches = product_model(), draw_batches(2)
    equalized = equalize_inputs(mod, measure(mod, batches))
    values = rq.reference.run_values(equalized, {"x": batches[0]})
    assert np.abs(values["x.equalized"]).max(0) == pytest.approx(np.ones(12), rel=0.5)
    expected = Executor(rq.compile(mod)).run("main", [batches[1]])[0]
    np.testing.assert_array_equal(
        Executor(rq.compile(equalized)).run("main", [batches[1]])[0], expected
    )


def move_by(*moves: tuple) -> tvm.IRModule:
    """x (20, 12), moved by operators of relax, times W"""
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((20, 12), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for name, *args in moves:
                value = builder.emit(getattr(relax.op, name)(value, *args))
            out = builder.emit_output(relax.op.matmul(value, relax.const(W)))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize(
    "moves",
    [
        [("expand_dims", 1), ("permute_dims", [1, 0, 2]), ("squeeze", [0])],
        [("reshape", (4, 5, 12)), ("permute_dims", [1, 0, 2])],
    ],
)
def test_equalize__behind_moves_that_keep_the_channels_last(moves):
    mod, batches = move_by(*moves), draw_batches(2)
    equalized = equalize_inputs(mod, measure(mod, batches))
    values = rq.reference.run_values(equalized, {"x": batches[0]})
    assert [name for name in values if name.endswith(".equalized")]
    expected = Executor(rq.compile(mod)).run("main", [batches[1]])[0]
    np.testing.assert_array_equal(
        Executor(rq.compile(equalized)).run("main", [batches[1]])[0], expected
    )


@pytest.mark.parametrize(
    "moves",
    [
        [("reshape", (5, 4, 12)), ("permute_dims", [0, 2, 1]), ("reshape", (20, 12))],
        [("reshape", (12, 20)), ("permute_dims", [1, 0])],
        [("flip", 1)],
    ],
)
def test_find_scaled_inputs__not_where_other_channels_are_last(moves):
    assert not find_scaled_inputs(move_by(*moves))


@pytest.mark.parametrize(
    ("weight", "ranges"),
    [
        (W, np.ones(12, "float32")),  # nothing to equalize
        (W * RANGES[:, None] ** 2, RANGES),  # the small channels hardly count
    ],
)
def test_equalize__leaves_what_would_gain_little(weight, ranges):
    mod = product_model(weight.astype("float32"))
    assert equalize_inputs(mod, measure(mod, draw_batches(2, ranges))) is mod


def test_quantize__equalizes():
    mod, batches = product_model(), draw_batches(8)
    expected = batches[-1] @ W

    def find_error(prepared: rq.PreparedModel) -> float:
        prepared = rq.calibrate(prepared, batches)
        qmod = rq.lower(rq.convert_to_reference(prepared))
        return float(np.square(rq.reference.run(qmod, [batches[-1]])[0] - expected).mean())

    plain = find_error(rq.prepare(mod))
    assert find_error(rq.prepare(mod, dataset=batches)) < plain / 10
