"""Events: what a callback raises stops the run as it is, and a note names the callback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import pytest

from relayquant import Callback, ConfigError
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


@dataclass(frozen=True)
class FrozenStop(Exception):
    why: str


class StopWithText(Exception):
    def __init__(self):
        self.__notes__ = "of the user"


class StopWithProperty(Exception):
    @property
    def __notes__(self):
        return "of the user"


@dataclass(frozen=True, eq=False)
class Raising(Callback):
    error: Exception

    def on_progress(self, event):
        raise self.error


def stop_with(error):
    """Return the notes of an error that a callback raises, after it came through as it is."""
    with pytest.raises(type(error)) as caught:
        CallbackList.of(Raising(error)).on_progress(ProgressEvent("calibrate", 2, 3))
    assert caught.value is error
    return caught.value.__notes__


def test_callback_that_raises__exception_that_cannot_be_set_has_the_note():
    (note,) = stop_with(FrozenStop("enough"))
    assert "raised by the callback Raising.on_progress" in note


@pytest.mark.parametrize("kind", [StopWithText, StopWithProperty])
def test_callback_that_raises__notes_of_another_kind_stay(kind):
    assert stop_with(kind()) == "of the user"


def test_callback_that_raises__note_of_the_exception_stays_first():
    error = Stopped()
    error.__notes__ = ["of the user"]
    first, second = stop_with(error)
    assert first == "of the user"
    assert "Raising.on_progress" in second


def test_list_of_a_list__is_the_same_list():
    """So an event names the callback alone, however many stages pass it on."""
    listeners = CallbackList.of(StopAtTwo())
    assert CallbackList.of(listeners) is listeners


def test_callback__method_that_no_event_calls_is_named():
    with pytest.raises(ConfigError, match=r"Typo: .*'on_parameter'\. Did you mean 'on_parameters'"):
        type("Typo", (StopAtTwo,), {"on_parameter": lambda self, event: None})
    type("Own", (Callback,), {"once": 1, "on_stage_end": lambda self, event: None})


class Misspelled:
    def on_parameter(self, event):
        """No event has this name."""


def test_callback__method_of_another_name_is_refused_where_it_is_inherited():
    with pytest.raises(ConfigError, match=r"'on_parameter'\. Did you mean 'on_parameters'"):

        class Inherits(Misspelled, Callback):
            pass


def test_callback__attributes_of_a_user_are_no_methods():
    class Named(Callback):
        on_done = None

    assert Named().on_done is None
