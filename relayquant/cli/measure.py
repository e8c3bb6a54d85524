"""For the command line: runs compiled modules on samples and puts numbers on what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.runtime import Executor, as_tensor
from relayquant.errors import ModelError


@dataclass(frozen=True)
class OutputAgreement:
    """How near one output of two modules is, over all samples."""

    max_error: float  #: largest absolute difference
    sqnr: float  #: signal to noise in dB, 10 log10(sum a^2 / sum (a - b)^2); inf when equal
    top1: float | None  #: share of rows with the same largest entry; None for less than 2 entries


def compare_outputs(
    expected: Sequence[NDArray[Any]], actual: Sequence[NDArray[Any]]
) -> list[OutputAgreement]:
    """One row for each output; arrays of equal shape (N, ..., K).

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


def bind_run(executor: Executor, inputs: Sequence[NDArray[Any]]) -> Callable[[], object]:
    """A function that runs main once, on inputs that are copied only here."""
    tensors = [as_tensor(array) for array in inputs]
    main = executor.vm["main"]
    return lambda: main(*tensors)


def time_interleaved(
    models: Sequence[Executor], inputs: Sequence[NDArray[Any]], runs: int
) -> list[float]:
    """Median seconds of one run of each model, without the copies in and out.

    The models take turns, so that a busy moment of the machine meets all of them.
    """
    tensors = [as_tensor(array) for array in inputs]

    def time_run(model: Executor) -> float:
        start = time.perf_counter()
        model.vm["main"](*tensors)
        return time.perf_counter() - start

    for model in models:
        time_run(model)  # the first run allocates
    times = [[time_run(model) for model in models] for _ in range(runs)]
    return [float(median) for median in np.median(times, axis=0)]
