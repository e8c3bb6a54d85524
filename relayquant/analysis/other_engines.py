"""Analysis: the models that other engines run, for `engines` to compare speed with: the float one,
what their own quantizer makes of it, and our integer model as `export_onnx` writes it.
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
        check: Fails where its package is missing.
        quantizer: What its int8 models are called, and what makes them.
        has_quantizer: Whether the quantizer is there; an engine can do without.
        packages: Those whose versions its times depend on.
    """

    engine: Engine
    check: Callable[[], Any]
    quantizer: tuple[str, Quantizer]
    has_quantizer: Callable[[], bool]
    packages: tuple[str, ...]


def has_own_quantizer() -> bool:
    """Of an engine that brings its quantizer along."""
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
    """What the rivals are to run.

    Args:
        rivals: Whose packages are installed.
        source: The float model, an ONNX file.
        qmod: The integer module, written as ONNX for all of them.
        batches: What their quantizers calibrate on.
        folder: For the files.
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
    """Names and versions of what is compared, ours first: "openvino 2026.4.1"."""
    packages = ["relayquant", *(package for rival in rivals for package in rival.packages)]
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue  # one that the engine can do without
    return found
