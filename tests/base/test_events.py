"""Events: what a callback raises stops the run as it is, and a note names the callback."""

from __future__ import annotations

import traceback

import pytest

from relayquant import Callback
from relayquant.base.events import CallbackList, ProgressEvent


class Stopped(Exception):
    """Of a user, to stop a run."""


class StopAtTwo(Callback):
    def on_progress(self, event):
        if event.done == 2:
            raise Stopped


def test_callback_that_raises__keeps_its_exception_and_is_named():
    listeners = CallbackList.of([Callback(), StopAtTwo()])
    with pytest.raises(Stopped) as caught:
        list(listeners.follow("calibrate", range(3), 3, "batch"))
    event = ProgressEvent("calibrate", 2, 3)
    note = f"relayquant: raised by the callback StopAtTwo.on_progress, called with {event}"
    assert caught.value.__notes__ == [note]


def test_callback_that_raises__note_is_shown():
    with pytest.raises(Stopped) as caught:
        CallbackList.of(StopAtTwo()).on_progress(ProgressEvent("calibrate", 2, 3))
    shown = "".join(traceback.format_exception(caught.value))
    if hasattr(caught.value, "add_note"):
        assert "StopAtTwo.on_progress" in shown.splitlines()[-1]
