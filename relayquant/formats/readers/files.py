"""Importers, first step: is the file there, small enough, and of a kind that can be read?"""

from __future__ import annotations

import os
from pathlib import Path

from relayquant.errors import ModelError, format_count

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
