"""The int8 model of NNCF, OpenVINO's quantizer. `engines` compares speed with it.

NNCF runs with its defaults, the "performance" preset for CPUs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.base.optional import needed
from relayquant.errors import ModelError


def import_openvino() -> Any:
    """Import the package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    with needed("Comparing with OpenVINO needs the package openvino", "relayquant[openvino]"):
        import openvino  # pyright: ignore[reportMissingImports]
    return openvino


def has_nncf() -> bool:
    """Whether NNCF is installed."""
    return importlib.util.find_spec("nncf") is not None


def quantize_with_nncf(
    source: Path, batches: Iterable[Mapping[str, np.ndarray]], folder: Path
) -> Path:
    """Write NNCF's int8 model of an ONNX file into `folder`, in OpenVINO's format. Return its path.

    Raises:
        MissingDependencyError: openvino or nncf is not installed.
        ModelError: they cannot read or quantize the model.
    """
    ov = import_openvino()
    # NNCF shows progress on stdout and logs on its own logger.
    with contextlib.redirect_stdout(io.StringIO()):
        with needed("The int8 model of OpenVINO's own quantizer needs the package nncf", "nncf"):
            import nncf  # pyright: ignore[reportMissingImports]
        nncf.set_log_level(logging.ERROR)
        samples = [dict(batch) for batch in batches]
        try:
            model = ov.Core().read_model(source)
            if model.is_dynamic():
                model.reshape({name: list(array.shape) for name, array in samples[0].items()})
            quantized = nncf.quantize(
                model, nncf.Dataset(samples), subset_size=max(1, len(samples))
            )
            result = folder / "nncf.xml"
            ov.save_model(quantized, result, compress_to_fp16=False)
        except Exception as error:
            # Its C++ and Python parts raise a dozen unrelated classes.
            raise ModelError(
                f"NNCF cannot quantize {source}: {type(error).__name__}: {error}", code="RQ504"
            ) from error
    return result
