"""Locks of files that a run rewrites, so that a second run does not write into them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from relayquant.base.storage.files import check_writable, follow_link, writing
from relayquant.errors import ConfigError


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Lock a file, which is made if it is missing, for the `with` block. Yields whether no one else
    had locked it.

    The system releases the lock of a process that dies.
    """
    while True:
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if is_at(lock, path):
                yield True
                return


def is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is still the one at `path`: the run before may have deleted it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def hold_beside(path: Path) -> Iterator[bool]:
    """Lock a file that is replaced when it is written, by a file beside it: see `hold_lock`."""
    lock = follow_link(path)
    lock = lock.with_name(f"{lock.name}.lock")
    with ExitStack() as stack:
        with writing(lock):
            is_free = stack.enter_context(hold_lock(lock))
        try:
            yield is_free
        finally:
            if is_free:
                lock.unlink(missing_ok=True)


@contextmanager
def reserve_file(path: str | Path | None, setting: str, work: str) -> Iterator[None]:
    """Keep a file for one run for the `with` block. No file: nothing to do.

    Args:
        setting, work: The argument that names the file and the kind of work, for messages.

    Raises:
        ConfigError: another run has the file.
        FileError: it cannot be written.
    """
    if path is None:
        yield
        return
    check_writable(Path(path))
    with hold_beside(Path(path)) as is_free:
        if not is_free:
            raise ConfigError(
                f"{setting}={str(path)!r} is in use by another {work}; use a separate file for "
                f"each {work}, or wait until that one has ended.",
                code="RQ101",
            )
        yield
