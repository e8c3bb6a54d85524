"""Calls of functions that a user wrote, from every stage: what one raises is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relayquant.errors import ConfigError, RelayQuantError

T = TypeVar("T")

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
        kind: It raised an exception that is not passed on.
    """
    try:
        return function()
    except passed:
        raise
    except Exception as error:
        text = f"{where} raised {type(error).__name__}{at}: {error}"
        raise kind(text.removesuffix(": "), code=code) from error


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
