"""Weights that a library expands: the size of its file, and the bits of the module in memory,
whoever asks for them first.
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
from tvm import relax

import relayquant as rq
from relayquant.codegen.kernels.expansion import Expanded
from relayquant.codegen.library.mmap_constants import find_large_constants
from relayquant_runtime import Library

# Libraries of several tests are compared, bit for bit.
pytestmark = pytest.mark.optimized

KINDS = ("float", "int8")
CHANNELS, LAYERS = 256, 8
SHAPE = (1, CHANNELS, 28, 28)  # large enough for transforms on the CPUs of both makers
#: bytes of a file over bytes of the weights, for networks whose weights are most of them
MOST_BYTES = 1.15

THREADS = """
import sys, threading
import numpy as np
from relayquant_runtime import Library
x = np.load(sys.argv[2])
libraries, results = [Library(sys.argv[1]) for _ in range(4)], [None] * 4
barrier = threading.Barrier(4)
def run(i):
    barrier.wait()
    results[i] = libraries[i].run("main", [x])[0].copy()
threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
np.save(sys.argv[3], np.stack(results))
"""
FORK = """
import os, sys
import numpy as np
from relayquant_runtime import Library
x, library, results = np.load(sys.argv[2]), Library(sys.argv[1]), []
def run_in_child():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, library.run("main", [x])[0].tobytes())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        results.append(np.frombuffer(file.read(), "float32"))
run_in_child()
results.append(library.run("main", [x])[0].reshape(-1).copy())
run_in_child()
np.save(sys.argv[3], np.stack(results))
"""


@pytest.fixture(scope="module")
def modules() -> dict[str, tvm.IRModule]:
    """Layers of 3x3 convolutions in float and quantized."""

    def body(emit, x):
        for i in range(LAYERS):
            x = emit(f"relu{i}", relax.op.nn.relu(emit.conv_bias(f"layer{i}", x, CHANNELS)))
        return emit("mean", relax.op.mean(x, [2, 3]))

    mod = build_model(body, SHAPE)
    return {"float": mod, "int8": rq.quantize(mod, None, draw_small(mod, 2), effort="fast")}


def draw_small(mod: tvm.IRModule, count: int) -> list[dict[str, np.ndarray]]:
    """Inputs as small as those of images that were normalized."""
    return [{name: each / 8 for name, each in b.items()} for b in draw_batches(mod, count)]


@pytest.fixture(scope="module")
def folder(modules, tmp_path_factory) -> Path:
    """Of each kind a library, and the result of the module in memory."""
    folder = tmp_path_factory.mktemp("expanded")
    ((array,),) = (batch.values() for batch in draw_small(modules["float"], 1))
    np.save(folder / "input.npy", array)
    for kind, mod in modules.items():
        executable = rq.compile(mod)
        executable.export_library(str(folder / f"{kind}.so"))
        np.save(folder / f"{kind}.npy", rq.Executor(executable).run("main", [array])[0])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_export_library__is_little_larger_than_the_weights(kind, folder):
    weights = LAYERS * CHANNELS * CHANNELS * 9 * {"float": 4, "int8": 1}[kind]
    size = (folder / f"{kind}.so").stat().st_size
    assert weights < size <= MOST_BYTES * weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_find_large_constants__has_those_that_are_expanded(kind, modules):
    lowered = rq.compile(modules[kind], "llvm -mcpu=cascadelake")._lowered
    constants = find_large_constants(lowered).values()
    assert sum(isinstance(each, Expanded) for each in constants) == LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_library__expands_to_the_bits_in_memory(kind, folder):
    array, expected = (np.load(folder / f"{name}.npy") for name in ("input", kind))
    library = Library(folder / f"{kind}.so")
    assert np.isfinite(expected).all()
    assert len(set(expected.reshape(-1).tolist())) > CHANNELS / 8
    for _ in range(2):
        np.testing.assert_array_equal(library.run("main", [array])[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", [THREADS, FORK], ids=["threads", "fork"])
def test_library__whoever_asks_first(script, kind, folder, tmp_path):
    """Threads that all start at once, and forks before and after the first run."""
    files = [folder / f"{kind}.so", folder / "input.npy", tmp_path / "results.npy"]
    command = [sys.executable, "-c", script, *map(str, files)]
    environment = {**os.environ, "TVM_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    expected = np.load(folder / f"{kind}.npy").reshape(-1)
    results = np.load(files[-1])
    assert len(results) == (4 if script == THREADS else 3)
    for got in results.reshape(len(results), -1):
        np.testing.assert_array_equal(got, expected)
