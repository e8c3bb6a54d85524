"""Names of new values, next to those that there are."""

from __future__ import annotations

from collections.abc import Container


def find_free_name(base: str, taken: Container[str], joint: str = ".") -> str:
    """`base`, or `base.1`, `base.2`, ... where it is taken."""
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}{joint}{number}"
    return name
