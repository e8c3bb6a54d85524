"""Events that long-running stages report to callbacks.

Pass instances of `Callback` as `callbacks=` to `quantize` and `calibrate`, and override the methods
you need. The stages print nothing themselves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from relayquant.base.qtypes import QParams, ValueInfo
from relayquant.base.user_calls import note_error
from relayquant.errors import ConfigError, suggest_name

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class StageEvent:
    """The start or end of a pipeline stage. `seconds` is 0.0 at the start."""

    stage: str
    seconds: float = 0.0


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of a task: `done` of `total` units. `total` is None if it is not known."""

    task: str
    done: int
    total: int | None
    unit: str = "batch"


@dataclass(frozen=True)
class ParametersEvent:
    """The quantization parameters of one value were chosen: of `info.name`, and `info.role` says
    what it is.
    """

    info: ValueInfo
    qparams: QParams


@dataclass(frozen=True)
class SummaryEvent:
    """`quantize` ended. `text` is one line: what runs on integers, and what the outputs lost."""

    text: str


@dataclass(frozen=True)
class TrainingEvent:
    """Training progress after `step` of `steps`.

    Attributes:
        loss: Mean loss since the previous event. NaN if there was no step.
        score: Result of the validation. None without one.
        is_best: Whether this state is the best so far.
    """

    step: int
    steps: int
    loss: float
    score: float | None
    is_best: bool


class Callback:
    """Base of all callbacks. Every method does nothing.

    To stop the run, raise an exception in a method: it reaches the caller as it is, and a
    checkpoint stays. A subclass with another `on_` method raises ConfigError, because nothing would
    call it.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(cls):  # with what it inherits from other classes
            if name.startswith("on_") and name not in known and callable(getattr(cls, name)):
                raise ConfigError(
                    f"Callback {cls.__name__}: no event calls the method {name!r}. "
                    f"{suggest_name(name, known)}",
                    code="RQ106",
                )

    def on_stage_start(self, event: StageEvent) -> None:
        """Called when a stage begins."""

    def on_stage_end(self, event: StageEvent) -> None:
        """Called when a stage ends."""

    def on_progress(self, event: ProgressEvent) -> None:
        """Called when a long task advances."""

    def on_parameters(self, event: ParametersEvent) -> None:
        """Called when parameters of one value were chosen, in topological order."""

    def on_training(self, event: TrainingEvent) -> None:
        """Called when a training state was measured."""

    def on_summary(self, event: SummaryEvent) -> None:
        """Called when `quantize` ends."""


class SummaryLine(Callback):
    """Writes the line that sums up a quantization to standard error."""

    def on_summary(self, event: SummaryEvent) -> None:
        print(f"relayquant: {event.text}", file=sys.stderr)


@dataclass(frozen=True)
class CallbackList(Callback):
    """Sends every event to each of several callbacks, in order."""

    callbacks: tuple[Callback, ...] = ()

    @staticmethod
    def of(callbacks: Iterable[Callback] | Callback) -> CallbackList:
        if isinstance(callbacks, CallbackList):
            return callbacks
        if isinstance(callbacks, Callback):
            return CallbackList((callbacks,))
        return CallbackList(tuple(callbacks))

    def on_stage_start(self, event: StageEvent) -> None:
        self._send("on_stage_start", event)

    def on_stage_end(self, event: StageEvent) -> None:
        self._send("on_stage_end", event)

    def on_progress(self, event: ProgressEvent) -> None:
        self._send("on_progress", event)

    def on_parameters(self, event: ParametersEvent) -> None:
        self._send("on_parameters", event)

    def on_training(self, event: TrainingEvent) -> None:
        self._send("on_training", event)

    def on_summary(self, event: SummaryEvent) -> None:
        self._send("on_summary", event)

    def _send(self, method: str, event: object) -> None:
        """Pass an event on. A callback may raise to stop the run, so its exception stays as it is;
        a note names the callback and the event.
        """
        for callback in self.callbacks:
            try:
                getattr(callback, method)(event)
            except Exception as error:
                name = f"{type(callback).__name__}.{method}"
                note_error(error, f"relayquant: raised by the callback {name}, called with {event}")
                raise

    def follow(self, task: str, items: Iterable[T], total: int | None, unit: str) -> Iterator[T]:
        """Yield the items, and report each as progress of a task when the next one is asked for."""
        for done, item in enumerate(items, 1):
            yield item
            self.on_progress(ProgressEvent(task, done, total, unit))

    def run_stage(self, name: str, stage: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a stage between its start and end events and return its result."""
        self.on_stage_start(StageEvent(name))
        start = time.perf_counter()
        result = stage(*args, **kwargs)
        self.on_stage_end(StageEvent(name, time.perf_counter() - start))
        return result
