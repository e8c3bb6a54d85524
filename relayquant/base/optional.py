"""Imports of optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relayquant.errors import MissingDependencyError


@contextmanager
def needed(need: str, install: str) -> Iterator[None]:
    """Import optional packages inside this context.

    Args:
        need: What needs which package, the first sentence of the message.
        install: What pip installs: an extra of relayquant, such as "relayquant[torch]".

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        yield
    except ImportError as error:
        target = f"'{install}'" if "[" in install else install
        raise MissingDependencyError(f"{need}. Run: pip install {target}", code="RQ503") from error
