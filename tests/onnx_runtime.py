"""What ONNX Runtime computes from a model: an answer that is not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest


def run_onnxruntime(
    model: onnx.ModelProto | str | Path, inputs: dict[str, Any], *, rewrites: bool = True
) -> list[np.ndarray]:
    """The outputs of a model or file; without `rewrites` each node is run as it is written."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    if not rewrites:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)
