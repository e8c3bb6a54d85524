"""Model files -> modules, and modules -> files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

import relayquant as rq
from relayquant.base.storage.files import (
    ARCHIVE_SUFFIX,
    decode_json,
    read_text,
    reading,
    write_text,
)
from relayquant.base.storage.module_file import WHAT, read_module
from relayquant.cli.grammar import LIBRARIES
from relayquant.config import Precision
from relayquant.errors import ConfigError, ModelError
from relayquant.formats.load import FORMATS, is_folder_config
from relayquant.ir.ledger import find_ledger
from relayquant.relay import is_relay_json

#: A Relax module that `tvm.ir.save_json` wrote, float or quantized.
JSON_SUFFIX = ".json"
#: ending -> what is written
ENDINGS = {
    ".rqm": "the module, which `relayquant export` takes",
    ".json": "the same as text",
    ".onnx": "ONNX with QuantizeLinear and DequantizeLinear",
    ".relay": "Relay text, with its parameters in .params next to it",
    ".so": "a compiled library",
}
#: bytes; a mapping with a line for each of 100,000 operators is smaller
MAX_MAPPING_SIZE = 1 << 26


def load_model(
    path: Path,
    shape: Sequence[tuple[str, Any]] = (),
    value: Sequence[tuple[str, Any]] = (),
) -> tuple[tvm.IRModule, Mapping[str, Any] | None]:
    """Read (module, params) from a model file: a Relax module, or any file that `relayquant.load`
    reads.

    A JSON file may also hold a Relay module.

    Args:
        path: The file.
        shape: (input, its shape) of each `--shape`.
        value: (input, its constant value) of each `--input`.

    Raises:
        ConfigError: an input is named twice.
        ModelError: there is no such file, it is not a model, or it has no input of a given name.
    """
    shapes = collect(shape, "--shape")
    inputs = collect(value, "--input")
    if not path.exists():  # a name without an ending is no path for the parser
        raise ModelError(f"There is no model file {path}.", code="RQ201")
    check_no_library(path)
    if is_module_file(path):
        if shapes or inputs:
            raise ModelError(
                f"{path} is a Relax module. Its inputs cannot be changed: leave out --shape and "
                "--input, which are for model files that relayquant.load reads.",
                code="RQ102",
            )
        return load_module(path), None
    return rq.load(path, shapes=shapes, inputs=inputs)


def load_options(
    options: argparse.Namespace,
) -> tuple[tvm.IRModule, Mapping[str, Any] | None]:
    """Read MODEL with `--shape` and `--input`. See `load_model`."""
    return load_model(options.model, options.shape, options.input)


def collect(pairs: Sequence[tuple[str, Any]], option: str) -> dict[str, Any] | None:
    """Collect name -> value of an option that may be repeated. None if it was not given."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigError(
            f"{option} is given twice for one input; the names: {', '.join(found)}.", code="RQ102"
        )
    return found or None


def is_module_file(path: Path) -> bool:
    """Whether a file name has the ending of a Relax module."""
    if path.suffix != JSON_SUFFIX or is_folder_config(path):
        return path.suffix == ARCHIVE_SUFFIX
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return not is_relay_json(file.read(1000))


def load_module(path: Path) -> tvm.IRModule:
    """Read the Relax module in a file, JSON or an archive.

    Raises:
        ModelError: there is no such file, or it holds something else.
    """
    check_no_library(path)
    kinds = {each.suffix: each.kind for each in FORMATS}
    if path.suffix not in (ARCHIVE_SUFFIX, JSON_SUFFIX) and path.suffix in kinds and path.is_file():
        raise ModelError(
            f"{path} is a model file ({kinds[path.suffix]}), and a module is wanted here: the .rqm "
            "or .json of `relayquant quantize`. Where a command takes both, the float model goes "
            f"first. To write a module: relayquant quantize {path} --data DATA -o "
            f"{path.with_suffix('.int8.rqm')}",
            code="RQ201",
        )
    module = read_module(path)
    with reading(path, WHAT, ModelError):
        find_ledger(module)  # so that the message names the damaged file
    return module


def check_no_library(path: Path) -> None:
    """Raise ModelError if the name of an existing file is that of a compiled library."""
    if path.suffix in LIBRARIES and path.is_file():
        raise ModelError(
            f"{path} is a compiled library, and no module can be read back from one. Name the "
            "module instead. To write it: relayquant quantize MODEL --data DATA -o "
            f"{path.with_suffix(ARCHIVE_SUFFIX)}",
            code="RQ201",
        )


def load_mapping(path: Path) -> rq.QConfigMapping:
    """Read the configuration in a JSON file, as written by `QConfigMapping.to_dict`.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ConfigError(f"There is no configuration file {path}.", code="RQ102")
    with reading(path, "configuration (a QConfigMapping as JSON)", ConfigError):
        data = decode_json(read_text(path, MAX_MAPPING_SIZE))
        return rq.QConfigMapping.from_dict(data, str(path))


def check_ending(path: Path) -> None:
    """Check that the ending of a path names a kind of file that can be written.

    Raises:
        ConfigError: it does not.
    """
    if path.suffix not in (*ENDINGS, *LIBRARIES):
        kinds = "; ".join(f"{ending} ({what})" for ending, what in ENDINGS.items())
        raise ConfigError(f"-o {path}: a module is written as {kinds}.", code="RQ102")


def write_module(
    mod: tvm.IRModule,
    path: Path,
    target: Any = None,
    tune: bool | Path = False,
    precision: Precision | None = None,
) -> list[Path]:
    """Write a module in the format that the ending of `path` selects. Return the written files."""
    check_ending(path)
    if path.suffix == ".onnx":
        rq.export_onnx(mod, path)
    elif path.suffix in LIBRARIES:
        executable = rq.compile(mod, target, tune=tune, precision=precision)
        executable.export_library(str(path))
    elif path.suffix == ".relay":
        text, params = rq.relay.to_text(mod)
        write_text(path, text)
        beside = path.with_suffix(".params")
        rq.relay.save_params(params, beside)
        return [path, beside]
    elif path.suffix == ARCHIVE_SUFFIX:
        rq.save_module(mod, path)
    else:
        text = tvm.ir.save_json(mod)
        write_text(path, text)
    return [path]
