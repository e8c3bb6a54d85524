"""Compiled modules and samples -> the times of their runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.runtime import Machine, as_tensor


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
