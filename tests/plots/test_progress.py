"""Progress: bars come with events and go with the last one; a log gets lines."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from relayquant.base.events import ProgressEvent, StageEvent
from relayquant.plots.progress import ProgressReport


def make_report(terminal: bool) -> tuple[ProgressReport, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, _environ={"TERM": "xterm"})
    return ProgressReport(console), file


def wait_for(file: io.StringIO, text: str) -> None:
    """Wait until the text was written."""
    end = time.monotonic() + 60
    while text not in file.getvalue():
        assert time.monotonic() < end, file.getvalue()
        time.sleep(0.005)


def feed(report: ProgressReport) -> None:
    report.on_stage_start(StageEvent("calibrate"))
    for done in range(1, 5):
        report.on_progress(ProgressEvent("observe", done, 8, unit="sample"))
        # What the display's own thread does several times a second.
        report._progress.refresh()


def test_progress_report__shows_task_count_and_rate() -> None:
    report, file = make_report(terminal=True)
    with report:
        feed(report)
    text = file.getvalue()
    assert "calibrate" in text
    assert "observe" in text
    assert "4/8" in text
    assert "sample/s" in text


def test_progress_report__outside_a_terminal_a_line_says_what_runs() -> None:
    file = io.StringIO()
    with ProgressReport(Console(file=file, width=20), seconds=0.01) as report:
        report.on_stage_start(StageEvent("calibrate"))
        wait_for(file, "after 0 s: calibrate\n")
        report.on_progress(ProgressEvent("read data", 3, None, unit="batch"))
        wait_for(file, "after 0 s: read data, 3 batches\n")
        report.on_progress(ProgressEvent("read data", 4, 8, unit="batch"))
        wait_for(file, "after 0 s: read data, 4/8 batches\n")
        report.on_progress(ProgressEvent("read data", 8, 8, unit="batch"))
        report.on_stage_end(StageEvent("calibrate", 1.0))
    assert not any(thread.name == "relayquant-progress" for thread in threading.enumerate())


def test_progress_report__a_short_run_leaves_no_line() -> None:
    report, file = make_report(terminal=False)
    with report:
        feed(report)
        report.on_stage_end(StageEvent("calibrate", 1.0))
    assert file.getvalue() == ""


def test_progress_report__quiet() -> None:
    file = io.StringIO()
    with ProgressReport(Console(file=file), quiet=True, seconds=0.001) as report:
        feed(report)
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_progress_report__ends_with_the_last_stage() -> None:
    report, _ = make_report(terminal=True)
    feed(report)
    report.on_progress(ProgressEvent("observe", 8, 8, unit="sample"))
    assert report._progress.live.is_started
    report.on_stage_end(StageEvent("calibrate", 1.0))
    assert not report._progress.live.is_started
    # A second run with the same report starts over.
    report.on_stage_start(StageEvent("convert"))
    assert report._progress.live.is_started
    report.on_stage_end(StageEvent("convert", 1.0))
    assert not report._progress.live.is_started


def test_progress_report__gone_after_an_error() -> None:
    report, _ = make_report(terminal=True)

    def fail() -> None:
        with report:
            feed(report)
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        fail()
    assert not report._progress.live.is_started


def test_progress_report__total_unknown() -> None:
    report, file = make_report(terminal=True)
    with report:
        report.on_progress(ProgressEvent("observe", 3, None))
        report._progress.refresh()
    assert "3 batch" in file.getvalue()
    assert "/?" not in file.getvalue()


def test_progress_report__a_stage_has_no_count() -> None:
    report, file = make_report(terminal=True)
    with report:
        report.on_stage_start(StageEvent("guard"))
        report._progress.refresh()
    assert "guard" in file.getvalue()
    assert "0" not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|-:--:--|0:00:00", "", file.getvalue())


def test_progress_report__a_task_of_unknown_length_ends_with_its_stage() -> None:
    file = io.StringIO()
    with ProgressReport(Console(file=file, width=20), seconds=0.01) as report:
        report.on_stage_start(StageEvent("calibrate"))
        report.on_progress(ProgressEvent("read data", 3, None, unit="batch"))
        report.on_stage_end(StageEvent("calibrate", 1.0))
        assert not report._running
        report.on_stage_start(StageEvent("guard"))
        wait_for(file, "after 0 s: guard\n")


def test_log__a_line_counts_from_the_beginning():
    file = io.StringIO()
    with ProgressReport(Console(file=file), seconds=0.01) as progress:
        progress._log._start -= 60
        progress.on_stage_start(StageEvent("guard"))
        wait_for(file, "after 60 s: guard\n")


def test_log__short_stages_in_a_row_are_not_silent():
    file = io.StringIO()
    with ProgressReport(Console(file=file), seconds=0.1) as progress:
        for number in range(6):
            progress.on_stage_start(StageEvent(f"stage {number}"))
            time.sleep(0.05)
            progress.on_stage_end(StageEvent(f"stage {number}", 0.05))
    assert "stage" in file.getvalue()
