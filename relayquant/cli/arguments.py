"""For the command line: arguments that several commands take, alike in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import relayquant as rq
from relayquant.backends import resolve_backend
from relayquant.errors import ConfigError, DataError
from relayquant.storage.files import check_writable


def add_model(parser: argparse.ArgumentParser) -> None:
    """`MODEL`, a float model."""
    parser.add_argument("model", type=Path, help="float model: .onnx, .tflite, or a module's .json")


def add_data(parser: argparse.ArgumentParser) -> None:
    """`--data FILE.npz`."""
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE.npz",
        help="representative inputs: one array for each input of the model, samples first",
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """`--backend NAME`."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="whose kernels will run it: x86, arm, generic, accelerator (default: this machine's)",
    )


def add_effort(parser: argparse.ArgumentParser) -> None:
    """`--effort LEVEL`."""
    parser.add_argument(
        "--effort",
        choices=[level.value for level in rq.Effort],
        default=rq.Effort.BALANCED.value,
        help="work that goes into accuracy (default: balanced)",
    )


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
            raise ConfigError(f"{name} is {value}; allowed: 1 or more.")
    data = getattr(options, "data", None)
    if data is not None and not data.is_file():
        raise DataError(f"There is no data file {data}.")
    resolve_backend(getattr(options, "backend", None))
    for path in outputs:
        if path is not None:
            check_writable(path)
