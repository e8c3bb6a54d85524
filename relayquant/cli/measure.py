"""Compiled modules and samples -> numbers on the outputs and their times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.runtime import Machine, as_tensor
from relayquant.errors import ModelError


@dataclass(frozen=True)
class OutputAgreement:
    """Agreement of one output of two modules, over all samples."""

    max_error: float  #: largest absolute difference
    sqnr: float  #: signal to noise in dB, 10 log10(sum a^2 / sum (a - b)^2); inf if equal
    top1: float | None  #: share of rows with the same arg max; None for fewer than 2 entries


def compare_outputs(
    expected: Sequence[NDArray[Any]], actual: Sequence[NDArray[Any]]
) -> list[OutputAgreement]:
    """Compare outputs: one row for each; arrays of equal shape (N, ..., K).

    Raises:
        ModelError: the numbers of outputs or their shapes differ.
    """
    shapes = [[array.shape for array in arrays] for arrays in (expected, actual)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"The outputs have the shapes {shapes[0]} and {shapes[1]}: these are different models.",
            code="RQ205",
        )
    rows = []
    for a, b in zip(expected, actual, strict=True):
        a, b = a.astype("float64"), b.astype("float64")
        noise = float(np.square(a - b).sum())
        signal = float(np.square(a).sum())
        with np.errstate(divide="ignore"):
            sqnr = float(10 * np.log10(signal / noise)) if noise else float("inf")
        top1 = None
        if a.ndim > 1 and a.shape[-1] > 1:
            top1 = float((a.argmax(-1) == b.argmax(-1)).mean())
        rows.append(OutputAgreement(float(np.abs(a - b).max(initial=0.0)), sqnr, top1))
    return rows


def bind_run(executor: Machine, inputs: Sequence[NDArray[Any]]) -> Callable[[], object]:
    """Return a function that runs main once. The inputs are copied here, not in each run."""
    tensors = [as_tensor(array) for array in inputs]
    main = executor.vm["main"]
    return lambda: main(*tensors)


def time_interleaved(
    models: Sequence[Machine], inputs: Sequence[NDArray[Any]], runs: int
) -> list[float]:
    """Return the median seconds of one run of each model, without copies in and out.

    The models take turns, so a busy moment of the machine affects all of them.
    """
    tensors = [as_tensor(array) for array in inputs]

    def time_run(model: Machine) -> float:
        start = time.perf_counter()
        model.vm["main"](*tensors)
        return time.perf_counter() - start

    for model in models:
        time_run(model)  # The first run allocates.
    times = [[time_run(model) for model in models] for _ in range(runs)]
    return [float(median) for median in np.median(times, axis=0)]


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use this number of threads inside TVM, unless its pool was started already.

    Only the environment variable works: `runtime.config_threadpool` counts "fast" cores, and uses
    one thread if all cores are equal.
    """
    variable = "TVM_NUM_THREADS"
    before = os.environ.get(variable)
    os.environ[variable] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
