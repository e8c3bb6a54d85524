"""Analysis: how long runs take; contenders take turns, as the machine may have other users."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relayquant.analysis.engine_process import time_turn

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


#: of one timed run: seconds that passed, and CPU seconds of its process
Timing = tuple[float, float]


def measure_latency(
    contenders: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, Latency]:
    """Time functions of this process that do one run each; see `measure_turns`."""
    for run in contenders.values():
        run()  # the first run allocates

    def bind_turn(run: Callable[[], object]) -> Callable[[], list[Timing]]:
        return lambda: time_turn(run, TURN)

    return measure_turns({name: bind_turn(run) for name, run in contenders.items()}, rounds)


def measure_turns(
    contenders: Mapping[str, Callable[[], Sequence[Timing]]], rounds: int
) -> dict[str, Latency]:
    """Let contenders take `rounds` >= 1 turns, so that a busy moment meets all: name -> times.

    Args:
        contenders: Name -> function that takes one turn, here or in another process.
        rounds: Turns of each.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, take_turn in contenders.items():
            time.sleep(PAUSE)
            timings[name] += take_turn()
    latencies = {}
    for name, times in timings.items():
        passed, cpu = np.array(times).T
        latencies[name] = Latency(
            float(passed.min()), float(np.median(passed)), float(np.median(cpu)), len(times)
        )
    return latencies
