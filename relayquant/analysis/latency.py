"""Analysis: how long runs take; contenders take turns, as the machine may have other users."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relayquant.analysis.engine_process import time_turn
from relayquant.base.arguments import check_arguments
from relayquant.errors import ConfigError, format_count

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


@check_arguments
def measure_latency(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 20
) -> dict[str, Latency]:
    """Time functions that do one run each, in turns, so that a busy moment meets all of them.

    Args:
        contenders: Name -> function, which copies as little as the program that it stands for.
        rounds: Turns of each; one takes 0.02 s or a run, whichever is longer.

    Raises:
        ConfigError: no round, or nobody to take it.
    """
    if rounds < 1 or not contenders:
        raise ConfigError(
            f"measure_latency: {format_count(rounds, 'round')} of "
            f"{format_count(len(contenders), 'function')}; allowed: at least one of each.",
            code="RQ101",
        )
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
