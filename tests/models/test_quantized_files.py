"""Whole models as quantized files: written by us and by ONNX Runtime, the answers of both are
those of our integer model.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.runtime import Executor

runtime = pytest.importorskip("onnxruntime")


def run_session(path, samples: np.ndarray, size: int) -> np.ndarray:
    session = runtime.InferenceSession(str(path))
    name = session.get_inputs()[0].name
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    return np.concatenate([session.run(None, {name: part})[0] for part in parts])


def run_module(mod, samples: np.ndarray, size: int) -> np.ndarray:
    executor = Executor(rq.compile(mod))
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    return np.concatenate([executor.run("main", [part])[0] for part in parts])


@pytest.mark.parametrize(("name", "size"), [("dscnn", 50)])
def test_export__has_our_answers_in_onnxruntime(name, size, request, tmp_path):
    case = request.getfixturevalue(name)
    samples = case.samples[:200]
    mod, params = rq.load(case.model)
    prepared = rq.prepare(mod, params, effort="fast")
    rq.calibrate(prepared, case.calibration[:10])
    reference = rq.convert_to_reference(prepared)
    path = rq.export_onnx(reference, tmp_path / "model.onnx")
    theirs = run_session(path, samples, size)
    ours = run_module(rq.lower(reference), samples, size)
    assert (theirs.argmax(1) == ours.argmax(1)).mean() >= 0.99
    if case.labels is not None:
        labels = case.labels[: len(samples)]
        right = [(answers.argmax(1) == labels).mean() for answers in (theirs, ours)]
        assert abs(right[0] - right[1]) <= 0.005


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_import__has_onnxruntimes_answers(form, dscnn, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"input": batch} for batch in dscnn.calibration[:3]])

        def get_next(self):
            return next(self.batches, None)

    path = tmp_path / "model.onnx"
    quantization.quantize_static(
        str(dscnn.model),
        str(path),
        Reader(),
        quant_format=quantization.QuantFormat[form],
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    mod, _ = rq.load(path)
    qmod = rq.lower(mod)
    anchors = [row for row in rq.ledger(qmod).rows if row.op in ("nn.conv2d", "matmul")]
    assert len(anchors) == 10
    assert all(row.quantized for row in anchors)
    theirs = run_session(path, dscnn.samples[:200], 50)
    ours = run_module(qmod, dscnn.samples[:200], 50)
    assert (theirs.argmax(1) == ours.argmax(1)).mean() >= 0.99
    steps = np.abs(theirs - ours) / np.diff(np.unique(theirs)).min()
    assert (steps > 0.5).mean() < 0.02
