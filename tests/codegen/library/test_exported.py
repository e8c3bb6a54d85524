"""Exported libraries with many threads, from Python and without: bits are those of one thread, and
of the module in memory. Their constants lie in the file, small ones too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from float_models import build_model, draw_batches
from native_program import compile_program
from tvm import relax

import relayquant as rq
from relayquant.codegen.library import mmap_constants as mapped

SHAPE = (1, 16, 40, 40)
RUNS = 30
FROM_PYTHON = """
import os, sys
import numpy as np, tvm
from relayquant.base.runtime import Executor
library, source, to, runs, *shape = sys.argv[1:]
array = np.fromfile(source, "float32").reshape([int(size) for size in shape])
main = Executor(tvm.runtime.load_module(library)).vm["main"]
before = len(os.listdir("/proc/self/task"))
results = [main(tvm.runtime.tensor(array)).numpy().copy() for _ in range(int(runs))]
assert all((result == results[0]).all() for result in results)
results[0].tofile(to)
print(1 + len(os.listdir("/proc/self/task")) - before)
"""


def build_convolutions() -> tvm.IRModule:
    """Kernels of all kinds that threads share: image, convolutions, depthwise, a sum, a mean."""

    def body(emit, x):
        op = relax.op
        first = emit("first", op.nn.relu(emit.conv_bias("first.b", x, 64)))
        deep = emit("deep", op.nn.relu(emit.conv("deep.c", first, 64, groups=64)))
        both = emit("both", op.add(emit.conv_bias("both.b", deep, 64), first))
        return emit("out", op.mean(both, [2, 3]))

    return build_model(body, SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With `model.so`, an input, and its output of the module in memory."""
    folder = tmp_path_factory.mktemp("exported")
    mod = build_convolutions()
    batches = [{name: array / 8 for name, array in b.items()} for b in draw_batches(mod, 2)]
    qmod = rq.quantize(mod, None, batches, effort="fast")
    executable = rq.compile(qmod)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "LEAST_BYTES", 64)
        executable.export_library(str(folder / "model.so"))
    (array,) = batches[0].values()
    (result,) = rq.Executor(executable).run("main", [array])
    result.tofile(folder / "in_memory")
    array.tofile(folder / "input")
    return folder


def run_library(command: list[str], folder: Path, threads: int) -> np.ndarray:
    """The output, of a process that had so many threads."""
    sizes = [str(size) for size in SHAPE]
    files = [str(folder / name) for name in ("model.so", "input", "output")]
    result = subprocess.run(
        [*command, *files, str(RUNS), *sizes],
        env={**os.environ, "TVM_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == threads
    return np.fromfile(folder / "output", "float32")


@pytest.fixture(scope="module")
def expected(folder) -> np.ndarray:
    return run_library([sys.executable, "-c", FROM_PYTHON], folder, 1)


@pytest.mark.slow
def test_exported__threads_give_the_bits_of_one(folder, expected):
    got = run_library([sys.executable, "-c", FROM_PYTHON], folder, 16)
    assert np.isfinite(expected).all()
    assert len(set(expected)) > 1
    np.testing.assert_array_equal(expected, np.fromfile(folder / "in_memory", "float32"))
    np.testing.assert_array_equal(got, expected)


@pytest.fixture(scope="module")
def program(folder) -> Path:
    return compile_program(folder)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_exported__runs_without_python(folder, expected, program, threads):
    got = run_library([str(program)], folder, threads)
    np.testing.assert_array_equal(got, expected)
