"""Read and write files for every stage. A file is written completely or not at all. Any problem
with a file that is read becomes an error that names the file.
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

#: longest part of another library's message that our errors repeat
MESSAGE_LENGTH = 400


# --- Writing ------------------------------------------------------------------------------------


#: advice if no temporary file can be made
TEMPORARY = "Set TMPDIR to a folder that can be written."
#: Advice per error number of the system. For any other error, a writable place is needed.
REMEDIES = {
    errno.ENOSPC: "Free space there, or name another place.",
    errno.EDQUOT: "Free space there, or name another place.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or name another place.",
}


@contextmanager
def writing(
    path: str | os.PathLike[str], remedy: str = "Name a place that can be written."
) -> Iterator[None]:
    """Turn an OSError inside the `with` block into a FileError that names `path`. Without this, a
    full disk, a file size limit or a missing permission names no file or a temporary one.

    All code that makes a file or a folder uses this.
    """
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        if error.errno is None:  # raised by a library, not by a system call
            raise FileError(f"Cannot write {path}: {error}", code="RQ501") from error
        reason = os.strerror(error.errno)
        name = error.filename2 or error.filename  # a copy has both: from, to
        if name is not None and not is_near(name, Path(path)):
            reason = f"{os.fsdecode(name)}: {reason}"
        advice = REMEDIES.get(error.errno, remedy)
        if remedy == TEMPORARY:
            advice = name_temporary(advice)
        raise FileError(
            f"Cannot write {path}: {reason}. {advice}", error.errno, code="RQ501"
        ) from error


def name_temporary(text: str) -> str:
    """Return the text of an error of a temporary file, whose place TMPDIR chooses."""
    return text.replace("name another place", "set TMPDIR to another folder")


@contextmanager
def naming(path: Path, temporary: Path) -> Iterator[None]:
    """Let a FileError inside the `with` block name `path`, not the temporary file or folder that is
    renamed to it.
    """
    try:
        yield
    except FileError as error:
        text = str(error).replace(str(temporary), str(path))
        raise FileError(text, error.errno, code="RQ501") from error


def is_near(name: Any, path: Path) -> bool:
    """Return whether a file is `path` itself, inside it if it is a folder, or next to it."""
    return Path(os.fsdecode(name)).parent in (path.parent, path)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file next to `path`, then rename it. No incomplete file stays.

    A device or a pipe, for example /dev/stdout, is written directly, because a file must not
    replace it. A symbolic link stays, and the file that it leads to is replaced.

    Raises:
        FileError: the folder does not exist or cannot be written, or the disk is full. Names
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
            with naming(path, temporary), writing(temporary):
                write(temporary)
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file with `write_whole`. A name that is no Unicode is escaped."""
    data = text.encode("utf-8", errors="backslashreplace")
    write_whole(path, lambda temporary: temporary.write_bytes(data))


def replace_folder(path: Path, mark: str, write: Callable[[Path], object]) -> None:
    """Call `write` on an empty folder next to `path`, then rename it. No incomplete folder stays.

    Args:
        mark: Name of a file that every folder of this kind has. A folder that has it is replaced.

    Raises:
        FileError: the folder cannot be written, or holds something else.
    """
    path = path.absolute()
    with writing(path):
        check_folder(path, mark)
        with open_temporary_folder(path.parent) as folder:
            made, old = folder / "new", folder / "old"
            made.mkdir()
            with naming(path, made), writing(made):
                write(made)
            if path.exists():
                path.rename(old)
            try:
                made.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise


def check_folder(path: Path, mark: str) -> None:
    """Raise FileError unless `replace_folder` can write this folder. Call this before long work."""
    with writing(path):
        check_parent(path)
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if not is_free and not (path / mark).is_file():
            raise FileError(
                f"Cannot write {path}: it holds something else. Name a new or an empty folder, or "
                f"one with a {mark}, which is replaced.",
                errno.EEXIST,
                code="RQ501",
            )
        make_temporary(path).unlink()  # as in `check_writable`


def check_writable(path: Path) -> None:
    """Raise FileError if no file can be written to `path`. Call this before long work.

    The folder must exist, and `path` must not be a folder.
    """
    with writing(path):
        check_place(path)
        if not is_stream(path):
            # Only an attempt shows it: root ignores permissions, and some file systems are
            # read-only.
            make_temporary(follow_link(path)).unlink()


def check_place(path: Path) -> None:
    """Raise FileError if `path` is a folder, or its folder does not exist."""
    if path.is_dir():
        raise FileError(
            f"Cannot write {path}: it is a folder. Name a file in it.", errno.EISDIR, code="RQ501"
        )
    check_parent(path)


def check_parent(path: Path) -> None:
    """Raise FileError if the folder of `path` does not exist."""
    if path.parent.is_dir():
        return
    if path.parent.exists():
        raise FileError(
            f"Cannot write {path}: {path.parent} is no folder. Name a place that can be written.",
            errno.ENOTDIR,
            code="RQ501",
        )
    raise FileError(
        f"Cannot write {path}: there is no folder {path.parent}. Make it, or name another place.",
        errno.ENOENT,
        code="RQ501",
    )


def follow_link(path: Path) -> Path:
    """Return where a symbolic link leads, even if there is no file yet. Other paths are unchanged.

    Raises:
        FileError: the folder that it leads into does not exist.
    """
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    check_place(target)
    return target


def is_stream(path: Path) -> bool:
    """Return whether `path` exists and is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def make_temporary(path: Path) -> Path:
    """Make an empty file next to `path`."""
    # The suffix stays, because the writer of a library checks it.
    handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent)
    os.close(handle)
    return Path(name)


@contextmanager
def open_temporary_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Make a folder in `parent` or the system's temporary folder. It is removed when the `with`
    block ends.

    Raises:
        FileError: no folder can be made. If a file in the system's folder cannot be written inside
            the `with` block, the advice names TMPDIR.
    """
    with ExitStack() as stack:
        with writing(parent or "temporary files", TEMPORARY):
            folder = tempfile.TemporaryDirectory(prefix="relayquant-", dir=parent)
            path = Path(stack.enter_context(folder)).absolute()
        try:
            yield path
        except FileError as error:
            if parent is not None or str(path) not in str(error):
                raise
            raise FileError(name_temporary(str(error)), error.errno, code="RQ501") from error


# --- Reading ------------------------------------------------------------------------------------


@contextmanager
def reading(
    path: str | os.PathLike[str],
    what: str,
    raises: type[RelayQuantError] = DataError,
    advice: str = "",
) -> Iterator[None]:
    """Turn every error inside the `with` block into an error of ours that names the file.

    Files are untrusted. For a damaged file, the parsers of Python, numpy, protobuf or TVM may raise
    anything (TokenError, RecursionError, MemoryError, struct.error, ...), and no list of these
    errors is complete. All readers of files use this, so none needs a list.

    Args:
        path: The file.
        what: What the file should be: "prepared model".
        raises: Class of the error. An error of ours is kept.
        advice: A sentence that says what to do.
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
    """Return another library's error on one line, without a full stop."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    elif not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= MESSAGE_LENGTH else f"{text[:MESSAGE_LENGTH]}..."


def decode_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Decode a JSON text.

    Args:
        text: The text. Bytes are UTF-8.
        allow_nan: Accept NaN and infinities, which Python writes although JSON has none.

    Raises:
        ValueError, RecursionError: the text is not well-formed, or nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if allow_nan:
        return json.loads(text)
    return json.loads(text, parse_constant=refuse_constant, parse_float=parse_finite)


def refuse_constant(name: str) -> float:
    """Reject NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is not allowed")


def parse_finite(text: str) -> float:
    """Parse a number that fits in a float. Python would read 1e999 as infinity."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a number")
    return value


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 text file inside `reading`, without the byte order mark that editors of Windows
    write. ValueError if it is larger than `max_bytes`.
    """
    if path.is_dir():
        raise ValueError("it is a folder")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {format_count(max_bytes, 'byte')}")
    return data.decode("utf-8-sig")


#: File name ending of the archives that `module_file` writes.
ARCHIVE_SUFFIX = ".rqm"
#: Default size limit of model files in bytes, weights included.
DEFAULT_MAX_BYTES = 8 * 2**30

#: How a text file begins that git leaves where it did not download a large file, and its most
#: bytes: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
POINTER, LONGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024

PathLike = str | os.PathLike[str]


def check_file(path: PathLike, max_bytes: int, *, extra_bytes: int = 0) -> Path:
    """Return `path` as Path if it is a readable, non-empty file of at most `max_bytes`.

    Raises:
        ModelError: it is missing, not a file, empty, unreadable or too large, or Git LFS has not
            downloaded it.
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
    if size < LONGEST_POINTER:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise ModelError(
                    f"{str(path)!r} is not the file but a pointer of Git LFS to it. Download the "
                    "file itself: git lfs pull.",
                    code="RQ201",
                )
    return path
