"""For the command line: the options of `quantize` and `search`, and what `relayquant.quantize` gets
for them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.cli.arguments import add_backend, add_effort, read_backend
from relayquant.cli.data import METRICS
from relayquant.cli.files import load_mapping
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, DataError
from relayquant.stages.backends import resolve_backend

#: what `--observer` names
OBSERVERS = {
    "minmax": rq.MinMax(),
    "average-max": rq.AverageMax(),
    "moving-average": rq.MovingAverageMinMax(),
    "percentile": rq.Percentile(),
    "mse": rq.MSE(),
    "kl": rq.KLDivergence(),
}


def add_quantizing(parser: argparse.ArgumentParser) -> None:
    """How a model is quantized."""
    add_backend(parser)
    parser.add_argument("--target", help="what it will run on, e.g. 'llvm -mcpu=cascadelake'")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.json",
        help="a QConfigMapping: which operators are quantized how (`search` and `sensitivity "
        "--keep` write one)",
    )
    add_effort(parser)
    parser.add_argument(
        "--model-type",
        choices=[kind.value for kind in rq.ModelType],
        help="quantize products alone and smooth what they read, as transformers need it",
    )
    parser.add_argument(
        "--observer", choices=list(OBSERVERS), help="how ranges are picked (default: by --effort)"
    )
    parser.add_argument(
        "--weights", choices=["int8", "int4"], help="integers of weights (default: int8)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="go on from here after an interruption"
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """What is to be kept, and how long it may take."""
    parser.add_argument(
        "--metric",
        choices=[*METRICS],
        help="put back to float what it takes to keep this within --max-drop: top1, the share of "
        "right answers (needs --labels), or agreement, that of the float model's answers",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        metavar="FILE.txt",
        help="classes: a line 'NAME CLASS' for each picture, or a line 'CLASS' for each sample",
    )
    parser.add_argument("--max-drop", type=float, metavar="X", help="default: 0.01")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end of the search")


def check_search(options: argparse.Namespace) -> None:
    """Options of the search go together.

    Raises:
        ConfigError: one is missing, or out of range.
        DataError: there is no file of labels.
    """
    if (options.metric == "top1") != (options.labels is not None):
        raise ConfigError(
            "--metric top1 and --labels go together: give both, or none of them.", code="RQ102"
        )
    given = [
        name
        for name, value in {"--max-drop": options.max_drop, "--budget": options.budget}.items()
        if value is not None
    ]
    if options.metric is None and given:
        raise ConfigError(
            f"{' and '.join(given)}: nothing is searched without --metric.", code="RQ102"
        )
    if options.max_drop is not None and not options.max_drop >= 0:
        raise ConfigError(f"--max-drop is {options.max_drop:g}; allowed: 0 or more.", code="RQ102")
    if options.budget is not None and not options.budget > 0:
        raise ConfigError(
            f"--budget is {options.budget:g}; allowed: more than 0 seconds.", code="RQ102"
        )
    if options.labels is not None and not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.", code="RQ301")


def read_quantizing(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `relayquant.quantize`, of the options of `add_quantizing`.

    Raises:
        ConfigError: one of them is wrong.
    """
    backend = read_backend(options.backend)
    if backend is None and options.target is not None:
        backend = rq.default_backend(resolve_target(options.target))
    mapping = None if options.config is None else load_mapping(options.config)
    if options.weights == "int4":
        if mapping is not None:
            raise ConfigError("--weights and --config: say it in the configuration.", code="RQ102")
        mapping = make_int4(resolve_backend(backend))
    return {
        "backend": backend,
        "qconfig_mapping": mapping,
        "calibration": OBSERVERS.get(options.observer),
        "effort": options.effort,
        "model_type": rq.ModelType(options.model_type) if options.model_type else None,
    }


def read_search(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `relayquant.quantize`, of the options of `add_search`."""
    if options.metric is None:
        return {}
    given = {"max_drop": options.max_drop, "budget": options.budget}
    return {
        "metric": METRICS[options.metric](options),
        **{name: value for name, value in given.items() if value is not None},
    }


def make_int4(backend: BackendConfig) -> rq.QConfigMapping:
    """The backend's own configuration, with weights of -7 to 7."""
    default = backend.default_qconfig
    if default is None:
        raise ConfigError(
            f"--weights int4: backend {backend.name!r} has no default to change.", code="RQ102"
        )
    spec = replace(default.weight.spec, quant_min=-7, quant_max=7)
    narrow = replace(default, weight=rq.TensorConfig(spec, rq.MSE()))
    return rq.QConfigMapping().set_global(narrow)


def read_dtypes(given: list[str], option: str) -> dict[str | int, str] | None:
    """{name: dtype} of "NAME=DTYPE", or {0: dtype} of "DTYPE"."""
    found: dict[str | int, str] = {}
    for text in given:
        name, _, dtype = text.rpartition("=")
        if not re.fullmatch(r"u?int(8|16)", dtype):
            raise ConfigError(
                f"{option} {text}: allowed: uint8, int8, int16, or NAME=uint8.", code="RQ102"
            )
        found[name or 0] = dtype
    return found or None


@contextmanager
def open_workers(count: int | None) -> Iterator[concurrent.futures.Executor | None]:
    """So many processes that calibrate; None where no number was given."""
    if count is None:
        yield None
        return
    with concurrent.futures.ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        # Ctrl-C goes to all processes of a terminal: who asked them ends them.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
