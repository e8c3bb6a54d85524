"""Every tutorial runs from beginning to end, in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import relayquant as rq

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("[0-9][0-9]_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial__runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout, "a tutorial shows something"


#: What of the package a tutorial may import, since a user may.
PUBLIC = {
    "relayquant",
    *(f"relayquant.{name}" for name in ("demo", "extend", "plots", "relay", "torch")),
}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial__imports_nothing_from_inside(path):
    """What users need is public: code that they copy must not reach into the package."""
    tree = ast.parse(path.read_text("utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        if name.split(".")[0] == "relayquant"
    }
    assert "relayquant" in imported
    assert imported <= PUBLIC
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rq"
    }
    assert names <= set(rq.__all__)
