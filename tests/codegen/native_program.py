"""Programs that run exported libraries without Python: `run_library.cc`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tvm
import tvm_ffi

SOURCE = Path(__file__).with_name("run_library.cc")


def compile_program(folder: Path, source: Path = SOURCE) -> Path:
    """Compiles one against TVM's runtime; skips the test where that cannot be."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    runtimes = [*Path(tvm.__file__).parent.rglob("libtvm_runtime.so")][:1]
    ffi = Path(tvm_ffi.__file__).parent
    if not runtimes or not (ffi / "include/tvm/ffi/extra/module.h").exists():
        pytest.skip("TVM is here without its runtime library or headers")
    folders = [str(runtimes[0].parent), str(ffi / "lib")]
    command = [
        *(compiler, "-std=c++17", "-O1", str(source), "-o", str(folder / "run")),
        f"-I{ffi / 'include'}",
        *(f"-L{each}" for each in folders),
        *("-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi", f"-Wl,-rpath,{':'.join(folders)}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder / "run"
