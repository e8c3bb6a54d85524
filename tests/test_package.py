"""The package as others get it: the source distribution has every file, and the wheel runs where no
clone is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: What tools leave in a clone, and what a build does not carry.
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "*.egg-info",
    "build",
    "dist",
    "*.so",
)


def list_files(folder: Path) -> set[str]:
    """Paths of all files below a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_distributions__have_all_files_and_run_without_the_clone(tmp_path: Path) -> None:
    pytest.importorskip("build")
    clone, dist, installed, elsewhere = (
        tmp_path / name for name in ("clone", "dist", "installed", "elsewhere")
    )
    shutil.copytree(ROOT, clone, ignore=LEFT_OUT)
    files = list_files(clone)
    # The wheel is made of the source distribution.
    run("-m", "build", "--no-isolation", "--outdir", dist, clone, cwd=tmp_path)
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(files - names) == []

    (wheel,) = dist.glob("*.whl")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index")
    run(*pip, "--target", installed, wheel, cwd=tmp_path)
    packaged = {name for name in files if name.startswith(("relayquant/", "relayquant_runtime/"))}
    assert sorted(packaged - list_files(installed)) == []

    elsewhere.mkdir()
    script = (
        "import relayquant, relayquant_runtime; print(relayquant.__file__, relayquant.__version__)"
    )
    found, version = run("-c", script, cwd=elsewhere, PYTHONPATH=str(installed)).split()
    assert Path(found).is_relative_to(installed)
    assert wheel.name == f"relayquant-{version}-py3-none-any.whl"
    shown = run(installed / "bin/relayquant", "demo", cwd=elsewhere, PYTHONPATH=str(installed))
    assert "7 of 7 operators quantized" in shown
