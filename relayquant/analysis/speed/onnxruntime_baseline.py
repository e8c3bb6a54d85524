"""ONNX Runtime's int8 model of a float model. `engines` compares speed with it.

It is made by ONNX Runtime's static quantization with the settings that its documentation recommends
for x86: QDQ, uint8 activations, per-channel int8 weights, MinMax, after shape inference and graph
optimization.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter

from relayquant.base.optional import needed
from relayquant.errors import ModelError

#: first opset with per-channel quantization parameters, which ONNX Runtime's tools need
QDQ_OPSET = 13
MAIN_DOMAIN = ("", "ai.onnx")


def import_onnxruntime() -> Any:
    """Import the package with its quantization tools.

    Raises:
        MissingDependencyError: it is not installed.
    """
    with needed(
        "Comparing with ONNX Runtime needs the package onnxruntime", "relayquant[onnxruntime]"
    ):
        import onnxruntime
        import onnxruntime.quantization.shape_inference
    return onnxruntime


def quantize_with_onnxruntime(
    source: Path,
    batches: Iterable[Mapping[str, np.ndarray]],
    folder: Path,
    *,
    per_channel: bool = True,
) -> Path:
    """Write ONNX Runtime's int8 model of `source` into `folder` and return its path.

    Weights have a scale for each channel, or with `per_channel` False one for each tensor.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        ModelError: onnxruntime cannot quantize the model.
    """
    ort = import_onnxruntime()
    tools = ort.quantization

    class SampleReader(tools.CalibrationDataReader):
        """Hands out the batches one by one."""

        def __init__(self) -> None:
            self.batches: Iterator[Mapping[str, np.ndarray]] = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else dict(batch)

    prepared, result = folder / "prepared.onnx", folder / "int8.onnx"
    try:
        with hush_root_logger():
            source = convert_opset(source, folder)
            # Symbolic shape inference needs sympy and finds nothing for static shapes.
            tools.shape_inference.quant_pre_process(
                str(source), str(prepared), skip_symbolic_shape=True
            )
            tools.quantize_static(
                str(prepared),
                str(result),
                SampleReader(),
                quant_format=tools.QuantFormat.QDQ,
                activation_type=tools.QuantType.QUInt8,
                weight_type=tools.QuantType.QInt8,
                per_channel=per_channel,
                calibrate_method=tools.CalibrationMethod.MinMax,
            )
    except Exception as error:
        # Its C++ and Python parts raise a dozen unrelated classes.
        raise ModelError(
            f"ONNX Runtime cannot quantize {source}: {type(error).__name__}: {error}", code="RQ504"
        ) from error
    return result


def convert_opset(source: Path, folder: Path) -> Path:
    """Return the model, or a copy in `folder` with an opset that has per-channel QuantizeLinear."""
    model = onnx.load(str(source))
    opset = next((each.version for each in model.opset_import if each.domain in MAIN_DOMAIN), 1)
    if opset >= QDQ_OPSET:
        return source
    converted = folder / "converted.onnx"
    # In IR version 3 every weight is also an input, so the converter would treat it as an input.
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)
    onnx.save(onnx.version_converter.convert_version(model, QDQ_OPSET), str(converted))
    return converted


@contextmanager
def hush_root_logger() -> Iterator[None]:
    """Silence advice that the tools log on the root logger: our user cannot follow it."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
