"""Analysis: models for other engines, whose speed `engines` compares.

They are the float model, the int8 model of the engine's own quantizer, and our integer model as
`export_onnx` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.engines import Contender, Engine
from relayquant.analysis.onnxruntime_baseline import (
    import_onnxruntime,
    quantize_with_onnxruntime,
)
from relayquant.analysis.openvino_baseline import has_nncf, import_openvino, quantize_with_nncf
from relayquant.errors import ModelError
from relayquant.formats.writers import export_onnx

#: quantizes (an ONNX file, with batches, into a folder)
Quantizer = Callable[[Path, Sequence[Mapping[str, np.ndarray]], Path], Path]


@dataclass(frozen=True)
class Rival:
    """An engine to compare with.

    Attributes:
        check: Raises if its package is missing.
        quantizer: Name of its int8 models, and the function that makes them.
        has_quantizer: Whether the quantizer is installed. An engine can run without it.
        packages: Packages whose versions affect its times.
    """

    engine: Engine
    check: Callable[[], Any]
    quantizer: tuple[str, Quantizer]
    has_quantizer: Callable[[], bool]
    packages: tuple[str, ...]


def has_own_quantizer() -> bool:
    """Return True: the engine includes its quantizer."""
    return True


#: name on the command line -> rival
RIVALS: Mapping[str, Rival] = {
    rival.engine.value: rival
    for rival in (
        Rival(
            Engine.ONNXRUNTIME,
            import_onnxruntime,
            ("onnxruntime int8", quantize_with_onnxruntime),
            has_own_quantizer,
            ("onnxruntime",),
        ),
        Rival(
            Engine.OPENVINO,
            import_openvino,
            ("openvino int8, NNCF", quantize_with_nncf),
            has_nncf,
            ("openvino", "nncf"),
        ),
    )
}


@dataclass(frozen=True)
class Rivalry:
    """Contenders by name, and why others are missing."""

    contenders: Mapping[str, Contender]
    failures: Mapping[str, str]


def prepare_rivals(
    rivals: Sequence[Rival],
    source: Path,
    qmod: tvm.IRModule,
    batches: Sequence[Mapping[str, np.ndarray]],
    folder: Path,
) -> Rivalry:
    """Prepare the models that the rivals run.

    Args:
        rivals: Engines with installed packages.
        source: The float model, an ONNX file.
        qmod: The integer module. All rivals get it as ONNX.
        batches: Calibration data for their quantizers.
        folder: Folder for the files.
    """
    contenders: dict[str, Contender] = {}
    failures: dict[str, str] = {}
    exported = folder / "exported.onnx"

    def add(rival: Rival, name: str, make: Callable[[], Path]) -> None:
        try:
            contenders[name] = Contender(rival.engine, make())
        except ModelError as error:
            failures[name] = str(error)

    for rival in rivals:
        engine, (name, quantize) = rival.engine.value, rival.quantizer
        contenders[f"{engine} float"] = Contender(rival.engine, source, is_float=True)
        if rival.has_quantizer():
            add(rival, name, lambda quantize=quantize: quantize(source, batches, folder))
        add(rival, f"{engine} int8, our QDQ", lambda: export_onnx(qmod, exported))
    return Rivalry(contenders, failures)


def list_versions(rivals: Sequence[Rival]) -> list[str]:
    """List names and versions of what is compared, ours first: "openvino 2026.4.1"."""
    packages = ["relayquant", *(package for rival in rivals for package in rival.packages)]
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue  # an optional package
    return found
