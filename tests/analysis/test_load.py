"""load_integers: compiled only where there is enough to compute, with the same integers."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import MAP, build_model

import relayquant as rq
from relayquant.analysis.loader import bind_loader, load_integers
from relayquant.base.runtime import Machine
from relayquant.codegen.eager import EagerModule
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.stages.compilation import compile_draft


@pytest.fixture(scope="module")
def quantized():
    mod = build_model(lambda emit, x: emit.conv_bias("y", x), MAP)
    data = [np.random.default_rng(i).normal(size=MAP).astype("float32") for i in range(3)]
    return rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF), data


def test_load_integers__compiles_for_many_samples(quantized):
    qmod, data = quantized
    few, many = (load_integers(qmod, samples, compile_draft) for samples in (3, 10**9))
    assert isinstance(few, EagerModule)
    assert isinstance(many, Machine)
    for batch in data:
        (one,), (other,) = few.run("main", [batch]), many.run("main", [batch])
        np.testing.assert_array_equal(one, other)


def test_bind_loader__counts_the_samples(quantized):
    qmod, data = quantized
    inputs = describe_inputs(qmod)
    assert isinstance(bind_loader(open_dataset(data, inputs), compile_draft)(qmod), EagerModule)

    class Endless(list):
        def __len__(self):
            return 10**9

    for source in (Endless(data), lambda: iter(data)):  # of a function the length is not known
        assert isinstance(bind_loader(open_dataset(source, inputs), compile_draft)(qmod), Machine)
