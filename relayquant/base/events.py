"""Events that long-running stages report; a callback overrides what it wants to hear.

Pass instances as `callbacks=` to `quantize` and `calibrate`. Nothing is printed by the stages
themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from relayquant.base.qtypes import QParams, ValueInfo

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class StageEvent:
    """A stage of the pipeline started or ended; `seconds` is 0.0 at the start."""

    stage: str
    seconds: float = 0.0


@dataclass(frozen=True)
class ProgressEvent:
    """`done` of `total` units of a task; total is None when it cannot be known."""

    task: str
    done: int
    total: int | None
    unit: str = "batch"


@dataclass(frozen=True)
class ParametersEvent:
    """The parameters of one value were picked."""

    info: ValueInfo
    qparams: QParams


@dataclass(frozen=True)
class TrainingEvent:
    """The state of a training after `step` of `steps`: the mean loss since the event before (NaN
    where there was no step), and what validation gave, None without; `is_best` so far.
    """

    step: int
    steps: int
    loss: float
    score: float | None
    is_best: bool


class Callback:
    """Base of all callbacks: every method does nothing."""

    def on_stage_start(self, event: StageEvent) -> None:
        """A stage begins."""

    def on_stage_end(self, event: StageEvent) -> None:
        """A stage ended."""

    def on_progress(self, event: ProgressEvent) -> None:
        """A long task advanced."""

    def on_parameters(self, event: ParametersEvent) -> None:
        """Parameters of one value were picked, in topological order."""

    def on_training(self, event: TrainingEvent) -> None:
        """A training was measured."""


@dataclass(frozen=True)
class CallbackList(Callback):
    """Sends every event to each of several callbacks, in order."""

    callbacks: tuple[Callback, ...] = ()

    @staticmethod
    def of(callbacks: Iterable[Callback] | Callback) -> CallbackList:
        if isinstance(callbacks, Callback):
            return CallbackList((callbacks,))
        return CallbackList(tuple(callbacks))

    def on_stage_start(self, event: StageEvent) -> None:
        for callback in self.callbacks:
            callback.on_stage_start(event)

    def on_stage_end(self, event: StageEvent) -> None:
        for callback in self.callbacks:
            callback.on_stage_end(event)

    def on_progress(self, event: ProgressEvent) -> None:
        for callback in self.callbacks:
            callback.on_progress(event)

    def on_parameters(self, event: ParametersEvent) -> None:
        for callback in self.callbacks:
            callback.on_parameters(event)

    def on_training(self, event: TrainingEvent) -> None:
        for callback in self.callbacks:
            callback.on_training(event)

    def run_stage(self, name: str, stage: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a stage gives, run between its two events."""
        self.on_stage_start(StageEvent(name))
        start = time.perf_counter()
        result = stage(*args, **kwargs)
        self.on_stage_end(StageEvent(name, time.perf_counter() - start))
        return result
