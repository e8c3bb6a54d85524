"""Writes a file whole or not at all, for every stage that leaves something on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file beside `path`, then rename it: no half file ever stays.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"Cannot write {path}: there is no folder {path.parent}.")
    # The suffix stays: what writes a library looks at it.
    try:
        handle, name = tempfile.mkstemp(
            suffix=path.suffix, prefix=f".{path.stem}-", dir=path.parent
        )
    except OSError as error:  # it names the temporary file
        raise type(error)(error.errno, f"Cannot write {path}: {error.strerror}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
