"""Models for other engines, whose speed `engines` compares.

They are the float model, the int8 model of the engine's own quantizer, and our integer model as
`export_onnx` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.speed.engines import Candidate, Engine
from relayquant.analysis.speed.onnxruntime_baseline import (
    import_onnxruntime,
    quantize_with_onnxruntime,
)
from relayquant.analysis.speed.openvino_baseline import (
    has_nncf,
    import_openvino,
    quantize_with_nncf,
)
from relayquant.config import Precision, RecurrentForm
from relayquant.errors import ModelError
from relayquant.formats.writers import export_onnx

#: quantizes (an ONNX file, with batches, into a folder)
Quantizer = Callable[[Path, Sequence[Mapping[str, np.ndarray]], Path], Path]


@dataclass(frozen=True)
class OtherEngine:
    """An engine to compare with.

    Attributes:
        check: Raises if its package is missing.
        quantizer: Name of its int8 models, and the function that makes them.
        has_quantizer: Whether the quantizer is installed. An engine can run without it.
        packages: Packages whose versions affect its times.
        recurrent: The fastest form of our integer layers that it runs.
    """

    engine: Engine
    check: Callable[[], Any]
    quantizer: tuple[str, Quantizer]
    has_quantizer: Callable[[], bool]
    packages: tuple[str, ...]
    recurrent: RecurrentForm


#: name on the command line -> other
OTHER_ENGINES: Mapping[str, OtherEngine] = {
    other.engine.value: other
    for other in (
        OtherEngine(
            Engine.ONNXRUNTIME,
            import_onnxruntime,
            ("onnxruntime int8", quantize_with_onnxruntime),
            lambda: True,  # the engine includes it
            ("onnxruntime",),
            RecurrentForm.OPERATOR,
        ),
        OtherEngine(
            Engine.OPENVINO,
            import_openvino,
            ("openvino int8, NNCF", quantize_with_nncf),
            has_nncf,
            ("openvino", "nncf"),
            RecurrentForm.STEPS,  # its LSTM takes constants only
        ),
    )
}


@dataclass(frozen=True)
class CandidateModels:
    """Candidates by name, and why others are missing."""

    candidates: Mapping[str, Candidate]
    failures: Mapping[str, str]


def prepare_candidates(
    others: Sequence[OtherEngine],
    source: Path,
    qmod: tvm.IRModule,
    batches: Sequence[Mapping[str, np.ndarray]],
    folder: Path,
    precision: Precision = Precision.FLOAT32,
) -> CandidateModels:
    """Prepare the models that the others run.

    Args:
        others: Engines with installed packages.
        source: The float model, an ONNX file.
        qmod: The integer module. All others get it as ONNX.
        batches: Calibration data for their quantizers.
        folder: Folder for the files.
        precision: Of the float model, for engines that can choose. ONNX Runtime has float32 only.
    """
    candidates: dict[str, Candidate] = {}
    failures: dict[str, str] = {}

    def add(other: OtherEngine, name: str, make: Callable[[], Path]) -> None:
        try:
            candidates[name] = Candidate(other.engine, make())
        except ModelError as error:
            failures[name] = str(error)

    for other in others:
        engine, (name, quantize) = other.engine.value, other.quantizer
        candidates[f"{engine} float"] = Candidate(other.engine, source, precision)
        if other.has_quantizer():
            add(other, name, lambda quantize=quantize: quantize(source, batches, folder))
        exported = folder / f"{engine}.exported.onnx"
        write = functools.partial(export_onnx, qmod, exported, recurrent=other.recurrent)
        add(other, f"{engine} int8, our QDQ", write)
    return CandidateModels(candidates, failures)


def list_versions(others: Sequence[OtherEngine]) -> list[str]:
    """List names and versions of what is compared, ours first: "openvino 2026.4.1"."""
    packages = ["relayquant", *(package for other in others for package in other.packages)]
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue  # an optional package
    return found
