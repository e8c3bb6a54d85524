"""Analysis: how long runs take; contenders take turns, as the machine may have other users."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

#: Seconds before each turn, so that the thread pool of the contender before has stopped spinning.
PAUSE = 0.01
#: Seconds that one turn of a contender lasts at least.
TURN = 0.02


@dataclass(frozen=True)
class Latency:
    """Seconds of one run, over all timed runs.

    Attributes:
        best, median: Of the time that passed.
        cpu: Median of the CPU time of the whole process, which a busy machine hardly changes; with
            several threads it holds their waiting too, as far as they spin.
        runs: Timed runs.
    """

    best: float
    median: float
    cpu: float
    runs: int


def measure_latency(
    contenders: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, Latency]:
    """Time each contender in `rounds` turns.

    The contenders take turns, so that a busy moment of the machine meets all of them. A turn is a
    pause, one run that is not timed (it fills the caches and wakes the threads), and as many timed
    runs as fit into `TURN`, at least one.

    Args:
        contenders: Name -> function that does one run.
        rounds: Turns of each, >= 1.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()  # the first run allocates
    for _ in range(rounds):
        for name, run in contenders.items():
            time.sleep(PAUSE)
            run()
            spent = 0.0
            while spent < TURN:
                start, cpu = time.perf_counter(), time.process_time()
                run()
                elapsed = time.perf_counter() - start
                seconds[name].append((elapsed, time.process_time() - cpu))
                spent += elapsed
    latencies = {}
    for name, times in seconds.items():
        passed, cpu = np.array(times).T
        latencies[name] = Latency(
            float(passed.min()), float(np.median(passed)), float(np.median(cpu)), len(times)
        )
    return latencies
