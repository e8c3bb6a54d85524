"""The package's source, for the tests that read it: each module is parsed once in a process.

Nothing of relayquant is imported here: a broken rule is reported even when nothing loads.
"""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "relayquant"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


#: "relayquant.ir.plan" -> its file
SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def read_tree(module: str) -> ast.Module:
    tree = ast.parse(SOURCES[module].read_bytes(), str(SOURCES[module]))
    gc.freeze()  # a million nodes in all, which every search for garbage would visit
    return tree


@functools.cache
def list_nodes(module: str) -> list[ast.AST]:
    """Every node of a module's tree."""
    return list(ast.walk(read_tree(module)))
