"""Entry of the first stage: which importer reads a file, and the importer for torch.export
programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm

from relayquant.errors import ModelError
from relayquant.importers.files import DEFAULT_MAX_BYTES, PathLike
from relayquant.importers.onnx_model import import_onnx
from relayquant.importers.tflite_model import import_tflite
from relayquant.importers.torch_program import import_torch

Shapes = Mapping[str, Sequence[int | str]]
Imported = tuple[tvm.IRModule, dict[str, np.ndarray]]

#: Suffix of a file -> what it holds, for messages.
READABLE = {
    ".onnx": "ONNX",
    ".tflite": "TensorFlow Lite",
    ".pt2": "torch.export",
}


def load(
    path: PathLike, *, shapes: Shapes | None = None, max_bytes: int = DEFAULT_MAX_BYTES
) -> Imported:
    """Read a float model from a file; the suffix says of which kind it is.

    Args:
        path: A file .onnx, .tflite or .pt2 (written by torch.export.save).
        shapes: Input name -> shape, to fix or rename symbolic dimensions (ONNX only): {"x": ("N",
        3, 224, 224)}. max_bytes: Refuse larger models, external weights included.

    Returns:
        The module, and parameters that are not bound yet as {name: array}; {} for all kinds read
        today.

    Raises:
        ModelError: unknown suffix, unreadable file, or something in the model that is not
        supported. MissingDependencyError: an optional package is needed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in READABLE:
        kinds = ", ".join(f"{ending} ({kind})" for ending, kind in READABLE.items())
        raise ModelError(
            f"Cannot tell from the name of {str(path)!r} what kind of model it is. Readable: "
            f"{kinds}. "
            "Any module of a TVM frontend may also be passed to relayquant directly."
        )
    if suffix == ".onnx":
        return import_onnx(path, shapes=shapes, max_bytes=max_bytes)
    if shapes is not None:
        raise ModelError(
            f"shapes= applies to ONNX models only; a {suffix} file has its shapes fixed. Leave it "
            "out."
        )
    if suffix == ".tflite":
        return import_tflite(path, max_bytes=max_bytes)
    return import_torch(path, max_bytes=max_bytes)
