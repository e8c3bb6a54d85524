"""Names of a package that are loaded when they are first used: what stands above it or takes long
to import does not have to be there before.
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
    """`__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: The package's `__name__`.
        names: Module -> those of its names that the package has as well, with spaces between.
        modules: Name -> module that the package has by this name.
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
