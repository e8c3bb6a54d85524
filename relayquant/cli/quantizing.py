"""Options of `quantize` -> arguments of `relayquant.quantize`."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import relayquant as rq
from relayquant.cli.data import METRICS
from relayquant.cli.files import load_mapping
from relayquant.cli.options import read_backend
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError, DataError
from relayquant.stages.backends import resolve_backend
from relayquant.stages.calibration.dispatch import kill_processes


def check_search(options: argparse.Namespace) -> None:
    """Check the options of accuracy control.

    Raises:
        ConfigError: one is missing, or out of range.
        DataError: there is no file of labels.
    """
    if (options.metric == "top1") != (options.labels is not None):
        raise ConfigError(
            "--metric top1 and --labels need each other: give both or neither.", code="RQ102"
        )
    given = [
        name
        for name, value in {
            "--max-drop": options.max_drop,
            "--time-limit": options.time_limit,
            "--save-config": options.save_config,
        }.items()
        if value is not None
    ]
    if options.metric is None and given:
        raise ConfigError(f"{' and '.join(given)}: this needs --metric.", code="RQ102")
    if options.max_drop is not None and not options.max_drop >= 0:
        raise ConfigError(f"--max-drop is {options.max_drop:g}; allowed: 0 or more.", code="RQ102")
    if options.time_limit is not None and not options.time_limit > 0:
        raise ConfigError(
            f"--time-limit is {options.time_limit:g}; allowed: more than 0 seconds.", code="RQ102"
        )
    if options.labels is not None and not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.", code="RQ301")


def read_quantizing(options: argparse.Namespace) -> dict[str, Any]:
    """Read the options into arguments of `relayquant.quantize`, except the options of accuracy
    control.

    Raises:
        ConfigError: one of them is wrong.
    """
    backend = read_backend(options.backend)
    if backend is None and options.target is not None:
        backend = rq.get_backend_config(target=resolve_target(options.target))
    mapping = None if options.config is None else load_mapping(options.config)
    if options.weights == "int4":
        if mapping is not None:
            raise ConfigError(
                "--weights cannot be combined with --config. Set the "
                "dtype of weights in the configuration.",
                code="RQ102",
            )
        mapping = make_int4(resolve_backend(backend))
    return {
        "backend": backend,
        "qconfig_mapping": mapping,
        "observer": options.observer,
        "effort": options.effort,
        "model_type": rq.config.ModelType(options.model_type) if options.model_type else None,
    }


def read_search(options: argparse.Namespace) -> dict[str, Any]:
    """Read the options of accuracy control into arguments of `relayquant.quantize`."""
    if options.metric is None:
        return {}
    given = {"max_drop": options.max_drop, "budget": options.time_limit}
    return {
        "metric": METRICS[options.metric](options),
        **{name: value for name, value in given.items() if value is not None},
    }


def make_int4(backend: BackendConfig) -> rq.QConfigMapping:
    """Return the backend's default configuration with weights of -8 to 7."""
    default = backend.default_mapping
    if not default.rules:
        raise ConfigError(
            f"--weights int4: backend {backend.name!r} has no default to change.", code="RQ102"
        )

    def narrow(qconfig: rq.QConfig) -> rq.QConfig:
        spec = replace(qconfig.weight.spec, quant_min=-8, quant_max=7)
        return replace(qconfig, weight=rq.TensorConfig(spec, rq.observers.MSE()))

    return default.change_qconfigs(narrow)


def read_dtypes(given: list[str], option: str) -> dict[str | int, str] | None:
    """Parse "NAME=DTYPE" to {name: dtype}, or "DTYPE" to {0: dtype}."""
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
    """Open `count` calibration processes. None if no number was given."""
    if count is None:
        yield None
        return
    with concurrent.futures.ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        # A terminal sends Ctrl-C to all of its processes. The parent ends the workers.
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as executor:
        try:
            yield executor
        except BaseException:
            # The `with` block would wait until each worker has finished its shard.
            kill_processes(executor, ())
            raise
