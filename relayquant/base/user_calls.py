"""Calls of functions that a user wrote, from every stage: what one raises is named."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from relayquant.errors import ConfigError, RelayQuantError

T = TypeVar("T")
#: Packages whose files are not the user's: a message names none of their lines.
LIBRARIES = ("relayquant", "numpy", "tvm", "tvm_ffi")

#: What a function raises by mistake. Other exceptions may be meant to stop a run, and stay.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)


def call_user(
    where: str,
    function: Callable[[], T],
    passed: tuple[type[Exception], ...] = (),
    *,
    at: str = "",
    kind: type[RelayQuantError] = ConfigError,
    code: str = "RQ106",
) -> T:
    """Call a function and return its result.

    Args:
        where: Names the function, for the message.
        passed: Exceptions that are passed on.
        at: What it was called for, as " for value 'relu'".

    Raises:
        kind: It raised an exception that is not passed on. Names the line of the user's file.
    """
    try:
        return function()
    except passed:
        raise
    except Exception as error:
        text = f"{where} raised {type(error).__name__}{at}: {error}"
        raise kind(f"{text.removesuffix(': ')}{find_line(error)}", code=code) from error


def find_line(error: Exception) -> str:
    """Return where a user's function raised, as " (rules.py:12)"; "" if no line is the user's.

    It is the innermost line of the user's file, also where another library raised below it.
    """
    lines = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES
    ]
    if not lines:
        return ""
    first = lines[0][0]
    return f" ({first}:{[number for file, number in lines if file == first][-1]})"


def is_mistake(error: Exception) -> bool:
    """Whether an exception shows a mistake in the function that raised it. An error of relayquant
    says itself what is wrong.
    """
    return isinstance(error, MISTAKES) and not isinstance(error, RelayQuantError)


def note_error(error: Exception, note: str) -> None:
    """Add a note that Python 3.11 and newer show below the traceback. For functions that may raise
    on purpose, to stop a run: the error stays as the user made it.
    """
    if not hasattr(type(error), "__notes__"):  # a property of the user's class
        # Not set as an attribute: a class may forbid it, such as a frozen dataclass.
        notes = vars(error).setdefault("__notes__", [])
        if isinstance(notes, list):
            notes.append(note)
