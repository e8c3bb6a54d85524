"""Options that several commands share -> their values. TVM is not imported before it is needed."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import relayquant as rq
from relayquant.base.storage.files import (
    ARCHIVE_SUFFIX,
    check_writable,
    decode_json,
    read_text,
    reading,
)
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError

if TYPE_CHECKING:
    from relayquant.plots.report_data import CommandWords

#: bytes; the largest built-in backend has a tenth of this
MAX_BACKEND_SIZE = 1 << 22


def read_backend(given: str | None) -> BackendConfig | None:
    """Read `--backend`: a built-in backend, or one in a file. None if it was not given.

    Raises:
        ConfigError: there is no such backend or file, or the file holds something else.
    """
    if given is None or not given.endswith(".json"):
        if given is None:
            return None
        from relayquant.stages.backends import resolve_backend

        return resolve_backend(given)
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"--backend {given}: there is no such file.", code="RQ102")
    with reading(path, "backend (a BackendConfig as JSON)", ConfigError):
        data = decode_json(read_text(path, MAX_BACKEND_SIZE))
        return BackendConfig.from_dict(data, rq.extend.BUILTIN_OPS, where=str(path))


def check_options(
    options: argparse.Namespace,
    *,
    counts: Mapping[str, int | None] | None = None,
    outputs: tuple[Path | None, ...] = (),
) -> None:
    """Check what costs nothing to check, before anything takes time.

    The backend must exist, numbers must be 1 or more, and the output files must be writable.

    Args:
        options: Parsed options. `backend` is checked if the command has it.
        counts: Option -> its value, None if it was not given.
        outputs: Files that will be written, None for a file that was not asked for.

    Raises:
        ConfigError, FileError: a check failed.
    """
    for name, value in (counts or {}).items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; allowed: 1 or more.", code="RQ102")
    read_backend(getattr(options, "backend", None))
    for path in outputs:
        if path is not None:
            check_writable(path)


def name_words(options: argparse.Namespace, qmodel: Path | None) -> CommandWords:
    """Return the words of the commands that a report proposes.

    Args:
        options: Parsed options with MODEL and `--data`.
        qmodel: The quantized module's file. None if there is none.
    """
    from relayquant.cli.files import JSON_SUFFIX
    from relayquant.plots.report_data import CommandWords

    if qmodel is not None and qmodel.suffix not in (ARCHIVE_SUFFIX, JSON_SUFFIX):
        qmodel = None  # a library, which no other command takes
    is_written = qmodel is not None
    qmodel = qmodel or options.model.with_suffix(f".int8{ARCHIVE_SUFFIX}")
    data = shlex.quote(str(options.data))
    if options.preprocess is not None:
        data += f" --preprocess {shlex.quote(options.preprocess)}"
    files = options.model, qmodel, qmodel.with_suffix(".so")
    model, module, library = (shlex.quote(str(path)) for path in files)
    return CommandWords(model, module, data, library, is_written)
