"""How long runs take. Candidates take turns, because the machine may have other users."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relayquant.analysis.speed.engine_process import time_turn
from relayquant.base.arguments import check_arguments
from relayquant.errors import ConfigError, format_count

#: Seconds before each turn, so that the previous candidate's thread pool has stopped spinning.
PAUSE = 0.01
#: Seconds that one turn of a candidate lasts at least.
TURN = 0.02


@dataclass(frozen=True)
class Latency:
    """Seconds of one run, over all timed runs.

    Attributes:
        best, median: Wall-clock time.
        cpu: Median CPU time of the whole process. A busy machine hardly changes it. With several
            threads it includes the time that they spin.
        runs: Number of timed runs.
    """

    best: float
    median: float
    cpu: float
    runs: int


#: of one timed run: wall seconds and CPU seconds of its process
Timing = tuple[float, float]


@check_arguments
def measure_latency(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 20
) -> dict[str, Latency]:
    """Time functions that do one run each, in turns, so that a busy moment affects all of them.

    Args:
        candidates: Name -> function. It should copy as little as the real program.
        rounds: Turns of each. One turn takes 0.02 s or one run, whichever is longer.

    Raises:
        ConfigError: `rounds` < 1, or no candidates.
    """
    if rounds < 1 or not candidates:
        raise ConfigError(
            f"measure_latency: {format_count(rounds, 'round')} of "
            f"{format_count(len(candidates), 'function')}; allowed: at least one of each.",
            code="RQ101",
        )
    for run in candidates.values():
        run()  # The first run allocates.

    def bind_turn(run: Callable[[], object]) -> Callable[[], list[Timing]]:
        return lambda: time_turn(run, TURN)

    return measure_turns({name: bind_turn(run) for name, run in candidates.items()}, rounds)


def measure_turns(
    candidates: Mapping[str, Callable[[], Sequence[Timing]]], rounds: int
) -> dict[str, Latency]:
    """Let candidates take `rounds` >= 1 turns and return their times by name.

    Args:
        candidates: Name -> function that takes one turn, in this process or another one.
        rounds: Turns of each.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, take_turn in candidates.items():
            time.sleep(PAUSE)
            timings[name] += take_turn()
    latencies = {}
    for name, times in timings.items():
        passed, cpu = np.array(times).T
        latencies[name] = Latency(
            float(passed.min()), float(np.median(passed)), float(np.median(cpu)), len(times)
        )
    return latencies
