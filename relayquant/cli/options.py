"""For the command line: what options name that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import relayquant as rq
from relayquant.base.storage.files import check_writable, decode_json, read_text, reading
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, DataError
from relayquant.stages.backends import resolve_backend

#: bytes; the largest built-in backend has a tenth of that
MAX_BACKEND_SIZE = 1 << 22


def read_backend(given: str | None) -> BackendConfig | None:
    """What `--backend` names: one of ours, or one in a file; None where it was not given.

    Raises:
        ConfigError: there is no such backend or file, or the file holds something else.
    """
    if given is None or not given.endswith(".json"):
        return None if given is None else resolve_backend(given)
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
    """What costs nothing to know, before anything takes time: that the data is there, that there is
    such a backend, that numbers are 1 or more, and that files can be written.

    Args:
        options: As parsed; `data` and `backend` are looked at where a command has them.
        counts: Option -> its value; None where it was not given.
        outputs: Files that will be written; None where there is none to be.

    Raises:
        ConfigError, DataError, FileError: one of these is not so.
    """
    for name, value in (counts or {}).items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; allowed: 1 or more.", code="RQ102")
    data = getattr(options, "data", None)
    if data is not None and not (data.is_file() or data.is_dir()):
        raise DataError(f"There is no data file {data}, nor a folder of that name.", code="RQ301")
    read_backend(getattr(options, "backend", None))
    for path in outputs:
        if path is not None:
            check_writable(path)
