"""Load the names of a package when they are first used. Imports of higher rooms and slow imports
are delayed until then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def gather(
    package: str,
    names: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: The package's `__name__`.
        names: Module -> the names that the package re-exports from it, separated by spaces.
        modules: Name in the package -> module.
    """
    places = {name: module for module, found in names.items() for name in found.split()}
    modules = modules or {}

    def load(name: str) -> Any:
        if name in modules:
            value = import_module(modules[name])
        elif name in places:
            value = getattr(import_module(places[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *modules})

    return load, list_names
