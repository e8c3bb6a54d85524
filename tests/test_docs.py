"""The site: every page, public name and tutorial becomes one, without a warning."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import relayquant as rq

ROOT = Path(__file__).resolve().parents[1]


def test_site__builds_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "sphinx_gallery"):
        pytest.importorskip(package)
    for folder in ("docs", "tutorials"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(tmp_path / "docs"), str(site)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (site / "api.html").read_text("utf-8")
    callables = [name for name in rq.__all__ if callable(getattr(rq, name))]
    assert [name for name in callables if f'id="relayquant.{name}"' not in page] == []
    for script in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        assert (site / "tutorials" / f"{script.stem}.html").is_file()
