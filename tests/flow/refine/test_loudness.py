"""Samples that are loud and quiet by turns, in models whose outputs do not deviate for that."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from float_models import build_model
from tvm import relax

import relayquant as rq
from relayquant.analysis.outputs import OutputGap
from relayquant.flow.refine.loudness import is_uneven, loses_nothing

RNG = np.random.default_rng(5)
SHAPE = 1, 3, 8, 8


def make_normed():
    """A convolution, and a norm of its result: a quiet sample counts as much as a loud one."""

    def body(emit, x):
        weight = relax.const(RNG.standard_normal((4, 3, 3, 3)).astype("float32"))
        y = emit("conv", relax.op.nn.conv2d(x, weight, padding=1))
        ones, zeros = (relax.const(np.full(256, n, "float32")) for n in (1, 0))
        flat = emit("flat", relax.op.reshape(y, (1, 256)))
        return emit("norm", relax.op.nn.layer_norm(flat, ones, zeros, axes=[1], epsilon=1e-9))

    return build_model(body, SHAPE)


def draw(loudest: float) -> list[np.ndarray]:
    """48 samples, each fourth of loudness `loudest`, the others of 1."""
    samples = RNG.uniform(-1, 1, (48, *SHAPE)).astype("float32")
    samples[::4] *= np.float32(loudest)
    return [*samples]


def run_all(mod, data: list[np.ndarray]) -> np.ndarray:
    executor = rq.Executor(rq.compile(mod))
    return np.stack([executor.run("main", [x])[0] for x in data]).astype("float64")


@pytest.mark.slow
def test_quantize__quiet_samples_have_their_own_range_without_a_warning():
    mod, data = make_normed(), draw(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rq.AccuracyWarning)
        qmod = rq.quantize(mod, None, data[:24], callbacks=())
    guard = rq.ledger(qmod).guard
    assert (guard.ranged, guard.reverted, guard.deviates) == (("conv",), (), False)
    assert rq.ledger(qmod).row("conv").quantized
    plain = rq.quantize(mod, None, data[:24], guard=rq.config.Guard.OFF, callbacks=())
    expected = run_all(mod, data[24:])
    noise = [np.square(run_all(each, data[24:]) - expected).mean() for each in (qmod, plain)]
    assert noise[0] < 0.1 * noise[1]


@pytest.mark.parametrize(
    ("loudest", "options"), [(10, {}), (32, {"strict": True}), (32, {"effort": "fast"})]
)
def test_quantize__ranges_stay_calibrated(loudest, options):
    """Where no sample is quiet enough, where integers are promised, and without effort."""
    options = {"guard": rq.config.GuardSettings(min_sqnr=0, doubtful_sqnr=0), **options}
    if "strict" in options:
        options["qconfig_mapping"] = (
            rq.QConfigMapping()
            .set_global(rq.get_backend_config().default_qconfig)
            .set_object_type("nn.layer_norm", None)
        )
    qmod = rq.quantize(make_normed(), None, draw(loudest)[:24], callbacks=(), **options)
    assert rq.ledger(qmod).guard.ranged == ()


def test_is_uneven__half_of_the_samples_are_below_a_sixteenth_of_the_largest():
    def batch(*peaks: float, dtype: str = "float32") -> dict[str, np.ndarray]:
        return {"x": np.array([[0, peak] for peak in peaks], dtype)}

    assert is_uneven([batch(1, -1), batch(17, 1)])
    assert not is_uneven([batch(1, -1), batch(15, 1)])
    assert not is_uneven([batch(17, 17), batch(17, 1)])
    assert not is_uneven([batch(1, 1, 17, dtype="int32")])
    assert not is_uneven([{"x": np.float32(1)}])


@pytest.mark.parametrize(
    ("found", "before", "expected"),
    [
        ([22.0, 32.8], [21.0, 32.9], True),
        ([22.8, 32.1], [21.3, 32.9], False),  # one output loses, whatever the other gains
        ([20.9, 32.9], [21.0, 32.9], False),
        ([np.inf, 30.0], [np.inf, 30.0], True),
        ([-np.inf], [20.0], False),
    ],
)
def test_loses_nothing__no_output_loses(found, before, expected):
    assert loses_nothing([*map(OutputGap, found)], [*map(OutputGap, before)]) is expected


def test_loses_nothing__clearly_other_answers_decide():
    assert not loses_nothing([OutputGap(40.0, 1, 32)], [OutputGap(20.0, 0, 32)])
