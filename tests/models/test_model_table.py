"""A table of models: each is imported, quantized from a few samples, compiled and run, and its
answers are compared with those of the float model.

`pytest -m nightly tests/models/test_model_table.py` runs the rows that take long as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from light_models import SHAPE, find_path, load_light

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.formats.readers import import_onnx

#: operators with weights, or with two computed factors: what quantization is for
ANCHORS = ("nn.conv1d", "nn.conv2d", "matmul")


@dataclass(frozen=True)
class Row:
    """A model: how many of its convolutions and products become integer, how many operators of
    which kind stay in float, and the least ratio of signal to noise of its answers, in dB.
    """

    anchors: int
    floating: Mapping[str, int] = field(default_factory=dict)
    decibels: float = 20


def check(row: Row, mod, params, samples: list[np.ndarray]) -> None:
    """Quantize with all but the last of `samples`, compare on that one."""
    qmod = rq.quantize(mod, params, samples[:-1], effort="fast")
    rows = rq.ledger(qmod).rows
    anchors = [entry for entry in rows if entry.op in ANCHORS]
    assert sum(entry.quantized for entry in anchors) == row.anchors == len(anchors)
    assert Counter(entry.op for entry in rows if not entry.quantized) == row.floating
    (real,), (got,) = (
        Executor(rq.compile(model)).run("main", [samples[-1]]) for model in (mod, qmod)
    )
    assert got.shape == real.shape
    assert np.isfinite(got).all()
    signal = np.square(real - real.mean()).mean()
    ratio = 10 * np.log10(signal / np.square(got - real).mean())
    assert ratio > row.decibels


#: what local response normalization is made of, twice; it has no integer form
RESPONSE = {
    "elementwise_chain": 4,
    "expand_dims": 2,
    "squeeze": 2,
    "divide": 2,
    "permute_dims": 4,
    "reshape": 6,
    "nn.avg_pool2d": 4,
}

#: light models of the onnx package
LIGHT = {
    "squeezenet": Row(26),
    "shufflenet": Row(50, decibels=28),
    "bvlc_alexnet": Row(8, RESPONSE),
    "zfnet512": Row(8, RESPONSE),
    "inception_v1": Row(58, RESPONSE),
    "inception_v2": Row(70),
    "resnet50": Row(54),
    "densenet121": Row(121),
    "vgg19": Row(19),
}

#: the one that CI can afford
CHEAP = ("squeezenet",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in CHEAP else pytest.mark.nightly)
        for name in LIGHT
    ],
)
def test_light_model__quantized_compiled_and_run(name):
    if not find_path(name).exists():
        pytest.skip(f"this onnx package has no {find_path(name).name}")
    mod, params = import_onnx(load_light(name))
    rng = np.random.default_rng(0)
    samples = [rng.standard_normal(SHAPE, "float32") for _ in range(3)]
    check(LIGHT[name], mod, params, samples)
