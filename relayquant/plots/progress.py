"""Events of a long stage -> progress bars on a terminal, or lines in a log."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import (
    BarColumn,
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
from relayquant.errors import format_count

#: seconds after which a log gets a line, if anything is still running
LINE_SECONDS = 5.0


@dataclass(frozen=True)
class RunningTask:
    """A stage or task that has begun."""

    name: str
    done: int = 0
    total: int | None = None
    unit: str = ""

    @property
    def count(self) -> str:
        """How much is done: "4/8 batches", "3 batches" if the total is not known, or nothing."""
        if self.total is not None:
            return f"{self.done}/{format_count(self.total, self.unit)}"
        return format_count(self.done, self.unit) if self.done else ""

    def describe(self, seconds: float) -> str:
        """Return a line for a log: "after 12 s: calibrate, 4/8 batches"."""
        return f"after {seconds:.0f} s: {', '.join(filter(None, (self.name, self.count)))}"


class CountColumn(ProgressColumn):
    """How much is done, see `RunningTask.count`."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["count"])


class RateColumn(ProgressColumn):
    """Units per second, e.g. "41.5 batch/s". Empty until two events have come."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = task.fields["unit"]
        return Text("" if speed is None or not unit else f"{speed:.3g} {unit}/s")


class ProgressReport(Callback):
    """A bar for every running stage and task on standard error, with rate and remaining time.

    Use it as a context manager, so that the bars disappear when a stage fails:

        with ProgressReport() as progress:
            qmod = relayquant.quantize(mod, params, dataset, callbacks=(progress,))

    If the console is not a terminal, a line that says what is running is written every few seconds.
    With `quiet` nothing is written.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, seconds: float = LINE_SECONDS
    ) -> None:
        self.console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            CountColumn(),
            RateColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._log = None
        if not quiet and not self.console.is_terminal:
            self._log = LineLog(self.console, seconds)
        self._running: dict[str, tuple[RunningTask, TaskID]] = {}

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self._finish(name)

    def on_stage_start(self, event: StageEvent) -> None:
        self._update(event.stage, 0, None, "")

    def on_stage_end(self, event: StageEvent) -> None:
        # A task whose total is not known ends with its stage.
        names = list(self._running)
        if event.stage in names:
            for name in reversed(names[names.index(event.stage) :]):
                self._finish(name)

    def on_progress(self, event: ProgressEvent) -> None:
        self._update(event.task, event.done, event.total, event.unit)
        if event.total is not None and event.done >= event.total:
            self._finish(event.task)

    def _update(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Show a stage or task, which may be new."""
        if name in self._running:
            task, bar = self._running[name]
        else:
            task = RunningTask(name)
            bar = self._progress.add_task(name, total=None, count="", unit="")
            self._progress.start()
        task = replace(task, done=done, total=total, unit=unit)
        self._running[name] = task, bar
        self._progress.update(bar, completed=done, total=total, count=task.count, unit=unit)
        self._tell_log()

    def _finish(self, name: str) -> None:
        """Remove a bar. With the last one the display ends, so that others may print."""
        found = self._running.pop(name, None)
        if found is None:
            return
        self._progress.remove_task(found[1])
        if not self._running:
            self._progress.stop()
        self._tell_log()

    def _tell_log(self) -> None:
        if self._log is not None:
            self._log.follow(tuple(task for task, _ in self._running.values()))


class LineLog:
    """Writes a line every few seconds while something runs. A thread does so, because a stage may
    be silent for longer. Many short stages in a row are a long one, so a line counts from the
    beginning.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self.console, self.seconds = console, seconds
        self._running: tuple[RunningTask, ...] = ()
        self._start = time.monotonic()
        self._due = self._start + seconds
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, running: tuple[RunningTask, ...]) -> None:
        """Take note of what runs now, the outermost first. The thread ends with the last of it."""
        self._running = running
        if running and self._thread is None:
            self._end.clear()
            self._thread = threading.Thread(
                target=self._write, name="relayquant-progress", daemon=True
            )
            self._thread.start()
        elif not running and self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        while not self._end.wait(max(self._due - time.monotonic(), 0.0)):
            now = time.monotonic()
            self._due = now + self.seconds
            for task in self._running[-1:]:
                line = task.describe(now - self._start)
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
