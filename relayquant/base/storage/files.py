"""Files, for every stage that reads or leaves something on disk: written whole or not at all, and
whatever is wrong with one that is read is an error that names it.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from relayquant.errors import (
    DataError,
    FileError,
    MissingDependencyError,
    ModelError,
    RelayQuantError,
    format_count,
)

#: characters of a foreign message that an error of ours repeats
MESSAGE_LENGTH = 400


# --- Writing ------------------------------------------------------------------------------------


#: what to do where no temporary file can be made
TEMPORARY = "Set TMPDIR to a folder that can be written."
#: what to do about an error of the system; about any other, a place that can be written is needed
REMEDIES = {
    errno.ENOSPC: "Free space there, or name another place.",
    errno.EDQUOT: "Free space there, or name another place.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or name another place.",
}


@contextmanager
def writing(
    path: str | os.PathLike[str], remedy: str = "Name a place that can be written."
) -> Iterator[None]:
    """An OSError inside becomes a FileError that names `path`: a full disk, a limit on files or a
    lost right name no file, or a temporary one.

    Whatever makes a file or a folder goes through here.
    """
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        if error.errno is None:  # of no call of the system: a library's own
            raise FileError(f"Cannot write {path}: {error}", code="RQ501") from error
        reason = os.strerror(error.errno)
        if error.filename is not None and not is_near(error.filename, Path(path)):
            reason = f"{error.filename}: {reason}"
        remedy = REMEDIES.get(error.errno, remedy)
        raise FileError(
            f"Cannot write {path}: {reason}. {remedy}", error.errno, code="RQ501"
        ) from error


def is_near(name: Any, path: Path) -> bool:
    """Whether a file is `path` itself, in it if that is a folder, or beside it."""
    return Path(os.fsdecode(name)).parent in (path.parent, path)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file beside `path`, then rename it: no half file ever stays.

    A device or a pipe, such as /dev/stdout, is written itself: a file must not take its place. So
    it is with a symbolic link, which stays: the file that it leads to is replaced.

    Raises:
        FileError: the folder does not exist or cannot be written, or the disk is full; names
            `path`.
    """
    with writing(path):
        check_place(path)
        if is_stream(path):
            write(path)
            return
        target = follow_link(path)
        temporary = make_temporary(target)
        try:
            write(temporary)
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text, as `write_whole` does."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(path: Path) -> None:
    """Raises FileError if no file can be written there: to be asked before work that takes long.

    The folder must be there, and `path` must not be a folder itself.
    """
    with writing(path):
        check_place(path)
        if not is_stream(path):
            # Only the attempt tells: rights do not bind root, and some file systems take nothing.
            make_temporary(follow_link(path)).unlink()


def check_place(path: Path) -> None:
    """Raises FileError if `path` is a folder, or in none."""
    if path.is_dir():
        raise FileError(
            f"Cannot write {path}: it is a folder. Name a file in it.", errno.EISDIR, code="RQ501"
        )
    if not path.parent.is_dir():
        raise FileError(
            f"Cannot write {path}: there is no folder {path.parent}. Make it, or name another "
            "place.",
            errno.ENOENT,
            code="RQ501",
        )


def follow_link(path: Path) -> Path:
    """Where a symbolic link leads, also to no file yet; any other path as it is.

    Raises:
        FileError: it leads into no folder.
    """
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    check_place(target)
    return target


def is_stream(path: Path) -> bool:
    """Whether something is there that is neither file nor folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def make_temporary(path: Path) -> Path:
    """An empty file beside `path`."""
    # The suffix stays: what writes a library looks at it.
    handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent)
    os.close(handle)
    return Path(name)


@contextmanager
def open_temporary_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A folder, in `parent` or the system's, that is gone when the `with` block ends.

    Raises:
        FileError: none can be made.
    """
    with ExitStack() as stack:
        with writing(parent or "temporary files", TEMPORARY):
            folder = tempfile.TemporaryDirectory(prefix="relayquant-", dir=parent)
            path = Path(stack.enter_context(folder)).absolute()
        yield path


# --- Reading ------------------------------------------------------------------------------------


@contextmanager
def reading(
    path: str | os.PathLike[str],
    what: str,
    raises: type[RelayQuantError] = DataError,
    advice: str = "",
) -> Iterator[None]:
    """Whatever goes wrong inside becomes an error of ours that names the file.

    Files are untrusted. What a damaged one makes the parsers of Python, numpy, protobuf or TVM
    raise is theirs to choose (TokenError, RecursionError, MemoryError, struct.error, ...) and no
    list of it is complete: all readers of files go through here, so that none needs one.

    Args:
        path: The file.
        what: What it should be: "prepared model".
        raises: Class of the error; an error of ours keeps its own.
        advice: What to do about it: a sentence.
    """
    try:
        yield
    except MissingDependencyError:
        raise
    except RelayQuantError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise raises(f"There is no file {path}.", code="RQ502") from error
    except Exception as error:
        text = f"{path} is no {what}, or is damaged: {describe(error)}. {advice}"
        raise raises(text.rstrip(), code="RQ502") from error


def describe(error: Exception) -> str:
    """A foreign error on one line, without a full stop."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    elif not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= MESSAGE_LENGTH else f"{text[:MESSAGE_LENGTH]}..."


def decode_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        allow_nan: NaN and infinities, which Python writes and JSON does not have, are numbers.

    Raises:
        ValueError, RecursionError: it is not well formed, or too deep.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if allow_nan:
        return json.loads(text)
    return json.loads(text, parse_constant=refuse_constant, parse_float=parse_finite)


def refuse_constant(name: str) -> float:
    """NaN and infinities are no JSON."""
    raise ValueError(f"{name} is not allowed")


def parse_finite(text: str) -> float:
    """A number that a float holds: 1e999 is infinity to Python."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a number")
    return value


def read_text(path: Path, max_bytes: int) -> str:
    """Text of a UTF-8 file, for use inside of `reading`; ValueError if it is larger than
    `max_bytes`.
    """
    if path.is_dir():
        raise ValueError("it is a folder")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {format_count(max_bytes, 'byte')}")
    return data.decode("utf-8")


#: Largest model that is read unless the caller allows more: weights included, in bytes.
DEFAULT_MAX_BYTES = 8 * 2**30

PathLike = str | os.PathLike[str]


def check_file(path: PathLike, max_bytes: int, *, extra_bytes: int = 0) -> Path:
    """`path` as Path, if it is a readable, non-empty file of at most `max_bytes`.

    Raises:
        ModelError: it is missing, no file, empty, unreadable or too large.
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"There is no model file {str(path)!r}.", code="RQ201")
    if not path.is_file():
        raise ModelError(f"{str(path)!r} is not a file but a folder or device.", code="RQ201")
    size = path.stat().st_size + extra_bytes
    if size == 0:
        raise ModelError(f"The model file {str(path)!r} is empty.", code="RQ201")
    if size > max_bytes:
        raise ModelError(
            f"The model {str(path)!r} has {format_count(size, 'byte')}, more than the limit of "
            f"{max_bytes}. Pass a larger max_bytes if you trust it.",
            code="RQ201",
        )
    if not os.access(path, os.R_OK):
        raise ModelError(
            f"The model file {str(path)!r} is not readable; check its permissions.", code="RQ201"
        )
    return path
