"""For the command line: a quantized module becomes a file, whose ending says of which kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm

import relayquant as rq
from relayquant.base.storage.files import write_text, write_whole
from relayquant.base.storage.module_file import ARCHIVE_SUFFIX
from relayquant.errors import ConfigError

#: ending -> what is written
ENDINGS = {
    ".json": "the module, which `relayquant compile` takes",
    ".onnx": "ONNX with QuantizeLinear and DequantizeLinear",
    ".rqm": "the module too, its weights as many bytes as they are",
    ".relay": "Relay text, with its parameters in .params beside it",
    ".so": "a compiled library",
}


def check_ending(path: Path) -> None:
    """Whether there is such a kind.

    Raises:
        ConfigError: there is none.
    """
    if path.suffix not in ENDINGS:
        kinds = "; ".join(f"{ending} ({what})" for ending, what in ENDINGS.items())
        raise ConfigError(f"-o {path}: a quantized module is written as {kinds}.", code="RQ102")


def write_module(qmod: tvm.IRModule, path: Path, target: Any = None) -> list[Path]:
    """Write a quantized module; the files that were written."""
    check_ending(path)
    if path.suffix == ".onnx":
        rq.export_onnx(qmod, path)
    elif path.suffix == ".so":
        executable = rq.compile(qmod, target)
        write_whole(path, lambda file: executable.export_library(str(file)))
    elif path.suffix == ".relay":
        text, params = rq.relay.to_text(qmod)
        write_text(path, text)
        beside = path.with_suffix(".params")
        rq.relay.save_params(params, beside)
        return [path, beside]
    elif path.suffix == ARCHIVE_SUFFIX:
        rq.save_module(qmod, path)
    else:
        text = tvm.ir.save_json(qmod)
        write_text(path, text)
    return [path]
