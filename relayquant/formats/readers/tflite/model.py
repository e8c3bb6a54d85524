"""First stage, TensorFlow Lite: from a file to a module, by TVM's frontend with our converter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.base import _tvm
from relayquant.base.arguments import check_arguments
from relayquant.base.storage.files import DEFAULT_MAX_BYTES, PathLike, check_file, reading
from relayquant.errors import MissingDependencyError, ModelError, RelayQuantError, format_count
from relayquant.formats.readers.names import SourceNode, name_values
from relayquant.formats.readers.refusal import OTHERWISE
from relayquant.formats.readers.tflite.converter import make_converter
from relayquant.formats.readers.tflite.tables import check_tables, list_codes, open_model

#: Bytes 4 to 8 of every TFLite file.
FILE_IDENTIFIER = b"TFL3"


@check_arguments
def import_tflite(
    path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Import a .tflite file, weights bound as constants.

    Parameters of main and values are named as the tensors of the first subgraph. Attribute
    `relayquant.sources` maps a value's name to its operator; TFLite operators have no names, so
    the node is called after its first output tensor.

    Returns:
        The module and {} (no parameter is left unbound).

    Raises:
        ModelError: the file cannot be read, or an operator is not supported.
        MissingDependencyError: package tflite is not installed.
    """
    try:
        import tflite
    except ImportError:
        raise MissingDependencyError(
            "Reading a .tflite file needs the package tflite. Run: pip install "
            "'relayquant[tflite]'",
            code="RQ503",
        ) from None
    with reading(path, "TensorFlow Lite model", ModelError):
        model = read_file(check_file(path, max_bytes), tflite)
    # A file whose tables are sound is a model: what it has that is not supported is no damage.
    return convert_model(model)


def read_file(path: Path, tflite: Any) -> Any:
    """The model of a file, its tables checked and its operators TFLite's own."""
    data = path.read_bytes()
    if data[4:8] != FILE_IDENTIFIER:
        raise ModelError(
            f"{str(path)!r} is not a TensorFlow Lite model (no identifier TFL3).", code="RQ502"
        )
    model = open_model(tflite, data)
    check_tables(model, tflite, len(data))
    custom = list_custom_operators(model)
    if custom:
        raise ModelError(
            f"Not supported, {format_count(len(custom), 'custom operator')} of the model: "
            f"{', '.join(custom)}. Replace them before the conversion to TFLite.",
            code="RQ202",
        )
    return model


def convert_model(model: Any) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """The module of a model whose tables are sound."""
    frontend = _tvm.load_tflite_frontend()
    sources: dict[str, SourceNode] = {}
    try:
        with _tvm.FRONTEND_LOCK:
            mod = frontend.from_tflite(model, op_converter=make_converter(frontend, sources))
        # The frontend attaches the weights that it has bound already.
        mod["main"] = mod["main"].without_attr("params")
        return name_values(mod, sources), {}
    except RelayQuantError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"The TensorFlow Lite model cannot be converted: {type(error).__name__}: {text}. "
            f"{OTHERWISE}.",
            code="RQ202",
        ) from error


def list_custom_operators(model: Any) -> list[str]:
    """Names of the operators that are none of TFLite's own, with how often each is called."""
    names: dict[int, str] = {}
    for index in range(model.OperatorCodesLength()):
        custom = model.OperatorCodes(index).CustomCode()
        if custom is not None:
            names[index] = custom.decode("utf-8", "replace")
    calls = Counter(names[code] for code in list_codes(model) if code in names)
    return [f"{name!r} ({format_count(count, 'call')})" for name, count in calls.items()]
