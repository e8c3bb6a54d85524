"""Networks from outside: each is loaded as it is, quantized, compiled and run, and follows its
float model.

`pytest -m nightly tests/models/test_networks.py` runs those that take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from networks import NETWORKS

import relayquant as rq
from relayquant.base.runtime import Executor


@dataclass(frozen=True)
class Row:
    """The least ratio of signal to noise of each output in dB (None: integers, of which `agreement`
    is the least share that is equal), and of answers along the last axis, the least share that is
    that of float.
    """

    decibels: tuple[float | None, ...]
    agreement: float | None = None
    effort: str = "balanced"
    is_slow: bool = True


ROWS = {
    "ultraface": Row((30, 30), 0.99),
    "fastestdet": Row((8,)),
    "dtln_1": Row((10, 30)),
    "dtln_1_tflite": Row((10, 30)),
    "dtln_2": Row((12, 25)),
    "face_landmark": Row((30, 10)),
    "keypoints": Row((None,), 0.99, is_slow=False),
    "silero": Row((10, 25)),
    "stories": Row((13,), 0.7),
}


def measure_decibels(real: np.ndarray, got: np.ndarray) -> float:
    """Of the variance of `real` to the mean square error."""
    real, error = real.astype("float64"), real.astype("float64") - got
    return float(10 * np.log10(real.var() / np.square(error).mean()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if ROWS[name].is_slow else ()) for name in ROWS],
)
def test_network__quantized_compiled_and_run(name, shared_data):
    network, row = NETWORKS[name](shared_data), ROWS[name]
    mod, params = rq.load(network.model, **network.options)
    qmod = rq.quantize(mod, params, network.calibration, effort=row.effort)
    names = [param.name for param in mod["main"].params]
    real, got = (
        [executor.run("main", [sample[name] for name in names]) for sample in network.samples]
        for executor in (Executor(rq.compile(mod)), Executor(rq.compile(qmod)))
    )
    real, got = ([np.stack(arrays) for arrays in zip(*rows, strict=True)] for rows in (real, got))
    found = [
        None if decibels is None else measure_decibels(a, b)
        for a, b, decibels in zip(real, got, row.decibels, strict=True)
    ]
    answers = [a if row.decibels[0] is None else a.argmax(-1) for a in (real[0], got[0])]
    print(name, found, same := float((answers[0] == answers[1]).mean()))
    for decibels, least in zip(found, row.decibels, strict=True):
        assert least is None or decibels > least
    assert row.agreement is None or same >= row.agreement
