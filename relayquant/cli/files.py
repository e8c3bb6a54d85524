"""For the command line: reads models from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

import relayquant as rq
from relayquant.base.storage.files import decode_json, read_text, reading
from relayquant.base.storage.module_file import ARCHIVE_SUFFIX, WHAT, read_module
from relayquant.errors import ConfigError, ModelError
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.editor import Editor
from relayquant.relay import is_relay_json
from relayquant.stages.preparation.bind import bind_params

#: A Relax module as `tvm.ir.save_json` wrote it, float or quantized.
MODULE_SUFFIX = ".json"
#: bytes; a line for each of 100,000 operators has less
MAX_MAPPING_SIZE = 1 << 26


def load_model(
    path: Path,
    shape: Sequence[tuple[str, Any]] = (),
    value: Sequence[tuple[str, Any]] = (),
) -> tuple[tvm.IRModule, Mapping[str, Any] | None]:
    """(module, params) of a model file: a Relax module, or what else `relayquant.load` reads.

    A JSON file may also hold a Relay module.

    Args:
        path: The file.
        shape: (input, its shape) of each `--shape`.
        value: (input, what it always is) of each `--input`.

    Raises:
        ConfigError: an input is named twice.
        ModelError: there is no such file, it is not a model, or none of its inputs is so named.
    """
    shapes = collect(shape, "--shape")
    inputs = collect(value, "--input")
    if not path.is_file():
        raise ModelError(f"There is no model file {path}.", code="RQ201")
    is_module = path.suffix == MODULE_SUFFIX and not is_relay_json(_read_head(path))
    if is_module or path.suffix == ARCHIVE_SUFFIX:
        if shapes or inputs:
            raise ModelError(
                f"{path} is a Relax module, whose inputs are what they are. --shape and --input "
                "are for model files that relayquant.load reads.",
                code="RQ102",
            )
        return load_module(path), None
    return rq.load(path, shapes=shapes, inputs=inputs)


def collect(pairs: Sequence[tuple[str, Any]], option: str) -> dict[str, Any] | None:
    """Name -> value of an option that may be repeated; None if it was not given."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigError(
            f"{option} is given twice for one input; the names: {', '.join(found)}.", code="RQ102"
        )
    return found or None


def _read_head(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(1000)


def load_module(path: Path) -> tvm.IRModule:
    """The Relax module in a file, JSON or an archive.

    Raises:
        ModelError: there is no such file, or it holds something else.
    """
    module = read_module(path)
    with reading(path, WHAT, ModelError):
        find_ledger(module)  # so that the file is named where it is damaged
    return module


def load_mapping(path: Path) -> rq.QConfigMapping:
    """The configuration in a JSON file, as `QConfigMapping.to_dict` gives it.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ConfigError(f"There is no configuration file {path}.", code="RQ102")
    with reading(path, "configuration (a QConfigMapping as JSON)", ConfigError):
        data = decode_json(read_text(path, MAX_MAPPING_SIZE))
        return rq.QConfigMapping.from_dict(data, str(path))


def bind_weights(mod: tvm.IRModule, params: Mapping[str, Any] | None) -> tvm.IRModule:
    """The module with its weights as constants, so that only the inputs are left as parameters.

    Raises:
        ModelError: a name is unknown, a shape or dtype differs, or a value is missing.
    """
    editor = Editor(mod)
    bind_params(editor, params)
    return editor.build()
