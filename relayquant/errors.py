"""Errors and warnings of every stage: what is wrong, where, what is allowed and what to do.

Each names a code where it is raised. The code stands at the end of the message, "[RQ202]", and
`docs/errors` has a page for it.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Iterable, Sequence


class RelayQuantError(Exception):
    """Base of all errors raised on purpose by relayquant.

    The message ends with a code, "[RQ202]". `docs/errors` has a page for each code. An error that
    quotes another error keeps the quoted code, which is closer to the cause.

    Args:
        message: What is wrong, where, what is allowed and what to do.
        code: Name of the page. "" if the error came from outside relayquant.
    """

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(add_code(str(message), code))

    @property
    def code(self) -> str:
        """The code at the end of the message, or "" if there is none."""
        return find_shown(str(self))


class ConfigError(RelayQuantError, ValueError):
    """A setting, option or configuration file is wrong."""


class ModelError(RelayQuantError, ValueError):
    """The model cannot be read, or holds something relayquant does not accept."""


class DataError(RelayQuantError, ValueError):
    """Calibration or input data is wrong: name, shape, dtype, or values."""


class QnnError(RelayQuantError, ValueError):
    """A `relax.qnn` operator has operands or attributes that it does not allow."""


class FileError(RelayQuantError, OSError):
    """A file or a folder cannot be written: its folder does not exist, a permission is missing, or
    the disk is full.

    Attributes:
        errno: The number of the system's error, as in any OSError. None if the error did not come
            from the system.
    """

    def __init__(self, message: str, number: int | None = None, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.errno = number

    def __reduce__(self) -> tuple[type[FileError], tuple[object, ...]]:
        """Keep `errno`: an OSError with one argument loses it when pickled."""
        return type(self), (*self.args, self.errno)


class WorkerError(RelayQuantError, RuntimeError):
    """Another process with a part of the work died, hangs, or failed repeatedly."""


class MissingDependencyError(RelayQuantError, ImportError):
    """An optional package is missing. The message names the extra that installs it."""


class AccuracyWarning(UserWarning):
    """The integer model does not follow the float model, or a bound on accuracy was not met."""


class DataWarning(UserWarning):
    """Calibration data looks wrong. `relayquant.lint` gives details."""


CODE = re.compile(r"\[(RQ\d{3})\]")
#: a code within a message, with the full stop before it where another one follows
SHOWN = re.compile(r"\.? \[RQ\d{3}\](?=\.)| \[RQ\d{3}\]")


def add_code(message: str, code: str) -> str:
    """Append a code to a message: the first code that it quotes, else `code`."""
    code = find_shown(message) or code
    text = SHOWN.sub("", message)
    return f"{text} [{code}]" if code else text


def find_shown(message: str) -> str:
    """Return the first code in a message, or "" if there is none."""
    found = CODE.search(message)
    return found[1] if found else ""


def warn_user(message: str, category: type[Warning] = UserWarning, *, code: str = "") -> None:
    """Warn with the line that called this package, however deep the warning is raised."""
    message = add_code(message, code)
    package = __name__.partition(".")[0]
    frame, level = inspect.currentframe(), 0
    while frame is not None and belongs_to(frame.f_globals.get("__name__", ""), package):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def belongs_to(module: str, package: str) -> bool:
    """Return whether a module is a package or inside it."""
    return module == package or module.startswith(f"{package}.")


#: Nouns with irregular plurals, see `form_plural`.
IRREGULAR_PLURALS = {"axis": "axes", "ellipsis": "ellipses", "index": "indices"}


def format_count(number: int, noun: str) -> str:
    """Format a count: "1 operator", "2 operators", "2 batches", "3 spatial axes", "0 entries"."""
    return f"{number} {noun if number == 1 else form_plural(noun)}"


def form_plural(noun: str) -> str:
    """Return the plural of a noun. In a phrase like "zero point", the last word changes."""
    rest, space, last = noun.rpartition(" ")
    if last in IRREGULAR_PLURALS:
        plural = IRREGULAR_PLURALS[last]
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        plural = f"{last[:-1]}ies"
    elif last.endswith(("s", "x", "z", "ch", "sh")):
        plural = f"{last}es"
    else:
        plural = f"{last}s"
    return f"{rest}{space}{plural}"


def suggest_sizes(name: str, wanted: Sequence[object], given: Sequence[int]) -> str:
    """Suggest how to load a model that accepts an input of these sizes. "" if no size is wrong or
    the rank differs.

    Args:
        wanted: Sizes of the model. A size that is not an int is free already.
    """
    if len(wanted) != len(given):
        return ""
    free = {
        at: size if isinstance(size, str) and size.isidentifier() else f"n{at}"
        for at, (size, got) in enumerate(zip(wanted, given, strict=True))
        if size != got
    }
    if not any(isinstance(wanted[at], int) for at in free):
        return ""
    shape = tuple(free.get(at, size) for at, size in enumerate(wanted))
    axes = ", ".join(f"{at}: torch.export.Dim({size!r})" for at, size in free.items())
    return (
        " For other sizes load the model with free ones: ONNX and TFLite with "
        f"relayquant.load(path, shapes={{{name!r}: {shape}}}), PyTorch exported with "
        f"dynamic_shapes={{{name!r}: {{{axes}}}}}."
    )


#: names that an error lists; a backend has 158 patterns, a model thousands of values
LISTED = 40


def find_near_name(wrong: str, known: Iterable[str]) -> str:
    """Return the member of `known` that `wrong` may stand for; "" if none is near."""
    return next(iter(difflib.get_close_matches(wrong, sorted(set(known)), n=1)), "")


def suggest_name(wrong: str, known: Iterable[str]) -> str:
    """Suggest the member of `known` that is nearest to `wrong`, or list the known ones."""
    known = sorted(set(known))
    near = find_near_name(wrong, known)
    if near:
        return f"Did you mean {near!r}?"
    if len(known) > LISTED:
        return f"Known: {', '.join(map(repr, known[:LISTED]))}, ... ({len(known)} in all)."
    return f"Known: {', '.join(map(repr, known))}." if known else "None is known."
