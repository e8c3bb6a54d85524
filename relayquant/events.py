"""Events that long-running stages report; a callback overrides what it wants to hear.

Pass instances as `callbacks=` to `quantize` and `calibrate`. Nothing is printed by the stages
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from relayquant.qtypes import QParams, ValueInfo


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
