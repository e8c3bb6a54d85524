"""For the command line: arguments that several commands take, alike in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.base.storage.files import check_writable, decode_json, read_text, reading
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, DataError
from relayquant.stages.backends import resolve_backend

#: bytes; that of a built-in backend has a tenth of that
MAX_BACKEND_SIZE = 1 << 22


def add_model(
    parser: argparse.ArgumentParser, text: str = "float model: .onnx, .tflite, or a module's .json"
) -> None:
    """`MODEL`, a model file, and what `relayquant.load` is told of its inputs."""
    parser.add_argument("model", type=Path, help=text)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        action="append",
        default=[],
        metavar="NAME=1,3,224,224",
        help="fix the sizes of an input, or name one (NAME=N,80); may be repeated",
    )
    parser.add_argument(
        "--input",
        type=parse_input,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="make an input a constant, a number or a list ([1, 2]); may be repeated",
    )


def split_name(text: str) -> tuple[str, str]:
    """(name, what is given to it) of NAME=...; names may have an equals sign, values have none."""
    name, mark, value = text.rpartition("=")
    if not mark or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=...")
    return name, value


def parse_shape(text: str) -> tuple[str, tuple[int | str, ...]]:
    """(name, shape) of NAME=1,N,224: sizes, and names of symbolic ones."""
    name, value = split_name(text)
    sizes = [size.strip() for size in value.split(",")]
    if not all(size.isidentifier() or (size.isdecimal() and int(size) > 0) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} gives {name!r} no shape: sizes are integers above 0 or names, between commas"
        )
    return name, tuple(int(size) if size.isdecimal() else size for size in sizes)


def parse_input(text: str) -> tuple[str, Any]:
    """(name, value) of NAME=VALUE, the value as JSON."""
    name, value = split_name(text)
    try:
        return name, decode_json(value)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} gives {name!r} no value: a number, true, false, or a list as [1, 2]"
        ) from error


def add_backend(parser: argparse.ArgumentParser) -> None:
    """`--backend NAME or FILE.json`."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="whose kernels will run it: x86, x86-7bit (faster without VNNI, less accurate), arm, "
        "generic, accelerator, or a FILE.json of your own (see `relayquant backend`; default: "
        "this machine's)",
    )


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
        return BackendConfig.from_dict(data, rq.BUILTIN_OPS, where=str(path))


def add_effort(parser: argparse.ArgumentParser) -> None:
    """`--effort LEVEL`."""
    parser.add_argument(
        "--effort",
        choices=[level.value for level in rq.Effort],
        default=rq.Effort.BALANCED.value,
        help="work that goes into accuracy (default: balanced)",
    )


def add_tune(parser: argparse.ArgumentParser) -> None:
    """`--tune` and `--tune-file FILE`, both as `tune` of `relayquant.compile`."""
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time the few best forms of every layer on this machine (some seconds, remembered)",
    )
    parser.add_argument(
        "--tune-file",
        dest="tune",
        type=Path,
        metavar="FILE",
        help="the same; remember the times in this file",
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
            raise ConfigError(f"{name} is {value}; allowed: 1 or more.", code="RQ102")
    data = getattr(options, "data", None)
    if data is not None and not (data.is_file() or data.is_dir()):
        raise DataError(f"There is no data file {data}, nor a folder of that name.", code="RQ301")
    read_backend(getattr(options, "backend", None))
    for path in outputs:
        if path is not None:
            check_writable(path)
