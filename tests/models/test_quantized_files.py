"""Whole models as quantized files: written by us and by ONNX Runtime, the answers of both are
those of our integer model.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import relayquant as rq
from relayquant.base.runtime import Executor

runtime = pytest.importorskip("onnxruntime")


def run_session(
    path, samples: np.ndarray, size: int, level=runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
) -> np.ndarray:
    options = runtime.SessionOptions()
    options.graph_optimization_level = level
    session = runtime.InferenceSession(str(path), options)
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
    prepared = rq.calibrate(prepared, case.calibration[:10])
    reference = rq.convert_to_reference(prepared)
    path = rq.export_onnx(reference, tmp_path / "model.onnx")
    theirs = run_session(path, samples, size)
    ours = run_module(rq.lower(reference), samples, size)
    # Scales are multiplied in another order there: next to a tie a value may be a step off.
    off = np.abs(theirs - ours).max(axis=1)
    assert (off > 1e-5 * np.abs(ours).max()).mean() <= 0.05
    assert off.max() <= 0.01 * np.abs(ours).max()


def quantize_static(model, path, batches: list[np.ndarray], form: str):
    """The model as ONNX Runtime quantizes it; returns `path`."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    (name,) = [info.name for info in runtime.InferenceSession(str(model)).get_inputs()]

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{name: batch} for batch in batches])

        def get_next(self):
            return next(self.batches, None)

    quantization.quantize_static(
        str(model),
        str(path),
        Reader(),
        quant_format=quantization.QuantFormat[form],
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return path


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_import__has_onnxruntimes_answers(form, dscnn, tmp_path):
    path = quantize_static(dscnn.model, tmp_path / "model.onnx", dscnn.calibration[:3], form)
    mod, _ = rq.load(path)
    qmod = rq.lower(mod)
    anchors = [row for row in rq.ledger(qmod).rows if row.op in ("nn.conv2d", "matmul")]
    assert len(anchors) == 10
    assert all(row.quantized for row in anchors)
    theirs = run_session(path, dscnn.samples[:200], 50)
    ours = run_module(qmod, dscnn.samples[:200], 50)
    assert (theirs.argmax(1) == ours.argmax(1)).mean() >= 0.99
    # All of them here; ONNX Runtime saturates sums on processors without VNNI.
    assert np.isclose(theirs, ours, rtol=1e-5, atol=1e-5).mean() > 0.98


@pytest.mark.slow
def test_import__transformer_has_onnxruntimes_answers(kwt1, tmp_path):
    """Without its own rewriting of the graph, which lets go of quantizations (by up to 16 steps
    here): a value on the border of two steps may fall on the other side, and what follows moves.
    """
    path = quantize_static(kwt1.model, tmp_path / "model.onnx", kwt1.calibration[:1], "QDQ")
    mod, _ = rq.load(path)
    qmod = rq.lower(mod)
    floating = Counter(row.op for row in rq.ledger(qmod).rows if not row.quantized)
    assert floating == {"nn.layer_norm": 24, "nn.softmax": 12}
    samples = kwt1.samples[:10]
    theirs = run_session(path, samples, 10, runtime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    ours = run_module(qmod, samples, 10)
    assert (theirs.argmax(1) == ours.argmax(1)).all()
    steps = np.abs(theirs - ours) / np.diff(np.unique(theirs)).min()
    assert np.median(steps.max(1)) <= 2.01
    assert steps.max() <= 10.01
