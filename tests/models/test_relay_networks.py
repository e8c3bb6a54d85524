"""Whole networks written as Relay: accepted by every release, and run by a real one."""

from __future__ import annotations

import numpy as np
import pytest
from relay_facts import load_facts

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.relay import to_text
from relayquant.relay.export.releases import RELEASES

#: of those with which a network ends, these are computed in float: in another order elsewhere
FLOAT_TAILS = {"resnet8"}
NETWORKS = ["resnet8", "resnet20", "mobilenet", "dscnn", "mnist"]
SAMPLES = 4

#: what TVM's own import of the int8 ResNet-8 (TFLite) has for CMSIS-NN
CMSIS_NN = {
    "qnn_conv2d": 9,
    "qnn_add": 3,
    "qnn_avg_pool2d": 1,
    "qnn_fully_connected": 1,
    "qnn_softmax": 1,
}


def quantize_case(case, count=4):
    """(integer module, its input, shape of one sample)."""
    mod, params = rq.load(str(case.model))
    qmod = rq.quantize(
        mod, params, case.calibration[:count], effort="fast", guard=rq.config.Guard.OFF
    )
    return qmod, qmod["main"].params[0].name, (1, *case.samples.shape[1:])


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NETWORKS)
def test_network__is_what_every_release_accepts(name, request, shared_data):
    facts = load_facts(shared_data("../facts/relay_releases.json"))
    qmod, argument, shape = quantize_case(request.getfixturevalue(name), 1)
    for release in map(str, RELEASES):
        for exact in (True, False):
            text, _ = to_text(qmod, exact=exact, release=release, shapes={argument: shape})
            assert not facts.find_faults(text, release), (release, exact)


@pytest.mark.parametrize("name", NETWORKS)
def test_network__in_a_real_relay(name, request, real_relay):
    """Exactly written, the bits of our compiled code; otherwise the same answers, but where the two
    best are nearer to each other than what the ties of some hundred thousand values change.
    """
    case = request.getfixturevalue(name)
    qmod, argument, shape = quantize_case(case)
    samples = case.samples[:SAMPLES].reshape(-1, *shape)
    executor = Executor(rq.compile(qmod))
    want = np.stack([executor.run("main", [sample])[0] for sample in samples])
    for exact in (True, False):
        text, params = to_text(qmod, exact=exact, release="0.10", shapes={argument: shape})
        words = text[text.index("@main(%") + 7 :]
        real_relay.add(f"exact_{exact}", text, params, {words[: words.index(":")]: samples})
    real_relay.run()
    (exactly,), (nearly,) = (real_relay.read_outputs(f"exact_{exact}") for exact in (True, False))
    if name in FLOAT_TAILS:
        np.testing.assert_allclose(exactly, want, rtol=1e-5, atol=1e-7)
    else:
        np.testing.assert_array_equal(exactly, want)
    print(name, "exact: differing", (exactly != want).sum(), "of", want.size)
    print(name, "near: differing", (nearly != want).sum(), "largest", abs(nearly - want).max())
    difference = abs(nearly - want).max()
    assert difference <= 0.03 * np.ptp(want)
    rows, others = (each.reshape(len(samples), -1) for each in (want, nearly))
    best = np.sort(rows, axis=1)
    is_clear = best[:, -1] - best[:, -2] > 2 * difference
    print(name, "near: other answers", (rows.argmax(1) != others.argmax(1)).sum(), is_clear)
    assert is_clear.any()
    assert (rows.argmax(1) == others.argmax(1))[is_clear].all()


def test_quantized_file__has_the_patterns_of_cmsis_nn(shared_data, real_relay):
    """As many of each as TVM's own import of the file; and the same answers."""
    mod, _ = rq.load(str(shared_data("ic_resnet8_int8_reference.tflite")))
    qmod = rq.lower(mod)
    images = np.load(shared_data("cifar10_unlabelled_1000.npz"))["x"][:SAMPLES]
    images = images if images.shape[-1] == 3 else images.transpose(0, 2, 3, 1)
    samples = (images.astype("int16") - 128).astype("int8").reshape(-1, 1, 32, 32, 3)
    text, params = to_text(qmod, exact=False, release="0.10")
    real_relay.add("resnet8", text, params, {qmod["main"].params[0].name: samples})
    real_relay.run("count")
    (got,) = real_relay.read_outputs("resnet8")
    want = np.stack([rq.reference.run(qmod, [sample])[0] for sample in samples])
    assert (got.reshape(SAMPLES, -1).argmax(1) == want.reshape(SAMPLES, -1).argmax(1)).all()
    counts = real_relay.read_counts("resnet8")
    assert all(counts.get(name, 0) >= count for name, count in CMSIS_NN.items()), counts
