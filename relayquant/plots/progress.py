"""Events of a long stage -> progress bars on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from relayquant.base.events import Callback, ProgressEvent, StageEvent


class RateColumn(ProgressColumn):
    """Units per second, e.g. "41.5 batch/s". Empty until two events have come."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g} {task.fields['unit']}/s")


class ProgressReport(Callback):
    """A bar for every running stage and task on standard error, with rate and remaining time.

    Use it as a context manager, so that the bars disappear when a stage fails:

        with ProgressReport() as progress:
            qmod = relayquant.quantize(mod, params, dataset, callbacks=(progress,))

    Nothing is written if the console is not a terminal, or with `quiet`.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            RateColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for name in list(self._tasks):
            self._finish(name)

    def on_stage_start(self, event: StageEvent) -> None:
        self._find_task(event.stage, None, "")

    def on_stage_end(self, event: StageEvent) -> None:
        self._finish(event.stage)

    def on_progress(self, event: ProgressEvent) -> None:
        task = self._find_task(event.task, event.total, event.unit)
        self._progress.update(task, completed=event.done, total=event.total, unit=event.unit)
        if event.total is not None and event.done >= event.total:
            self._finish(event.task)

    def _find_task(self, name: str, total: int | None, unit: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, unit=unit)
            self._progress.start()
        return self._tasks[name]

    def _finish(self, name: str) -> None:
        """Remove a bar. With the last one the display ends, so that others may print."""
        task = self._tasks.pop(name, None)
        if task is None:
            return
        self._progress.remove_task(task)
        if not self._tasks:
            self._progress.stop()
