"""int8 TensorFlow Lite files keep their parameters and their accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from operator_names import count_operators

import relayquant as rq
from relayquant.base.runtime import Executor

#: what TensorFlow Lite's reference kernels reach on the 1000 samples (ai-edge-litert 2.1)
DSCNN_ACCURACY = 0.901


def lower_file(path):
    pytest.importorskip("tflite")
    mod, _ = rq.load(path)
    qmod = rq.lower(mod, "arm")
    return qmod, count_operators(qmod)


@pytest.mark.slow
def test_dscnn__has_the_interpreters_accuracy(shared_data):
    qmod, operators = lower_file(shared_data("kws_dscnn_int8_reference.tflite"))
    assert operators["qnn.conv2d"] == 9
    assert operators["qnn.dense"] == operators["qnn.mean"] == 1
    assert [row.op for row in rq.ledger(qmod).floating] == ["nn.softmax"]
    with np.load(shared_data("kws_1000.npz")) as data:
        x, labels = data["x"].astype("int8").reshape(-1, 1, 49, 10, 1), data["y"]
    executor = Executor(rq.compile(qmod))
    answers = np.array([executor.run("main", [sample])[0].argmax() for sample in x])
    assert abs((answers == labels).mean() - DSCNN_ACCURACY) <= 0.003


@pytest.mark.slow
def test_resnet8__agrees_with_the_float_file(shared_data):
    qmod, operators = lower_file(shared_data("ic_resnet8_int8_reference.tflite"))
    assert operators["qnn.conv2d"] == 9
    assert operators["qnn.add"] == 3
    assert [row.op for row in rq.ledger(qmod).floating] == ["nn.softmax"]
    images = np.load(shared_data("cifar10_unlabelled_1000.npz"))["x"][500:700]
    images = images if images.shape[-1] == 3 else images.transpose(0, 2, 3, 1)
    float_mod, _ = rq.load(shared_data("ic_resnet8_fp32.tflite"))
    machines = Executor(rq.compile(float_mod)), Executor(rq.compile(qmod))
    same = []
    for image in images[:, None]:
        # Scale 1, zero point -128: the integers are the pixels.
        integers = (image.astype("int16") - 128).astype("int8")
        inputs = image.astype("float32"), integers
        answers = [m.run("main", [x])[0].argmax() for m, x in zip(machines, inputs, strict=True)]
        same.append(answers[0] == answers[1])
    assert np.mean(same) >= 0.93  # the interpreter's own: 0.949
    report = rq.verify(qmod, [integers])
    assert report.is_equal, report.first
