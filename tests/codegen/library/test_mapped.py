"""Large constants of exported libraries: every dtype and shape as in memory, once in memory, and
only where a library can hold them.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.library import mmap_constants as mapped
from relayquant.codegen.library.mmap_constants import (
    LEAST_BYTES,
    can_map,
    find_large_constants,
    write_constants,
)
from relayquant.ir.rewrite.function import make_main

DTYPES = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("bool", "float16", "bfloat16", "float32", "float64"),
)
SHAPES = ((3, 5, 7), (4, 1), (11,), (2, 1, 2, 3, 2))
#: number of an architecture in the header of an object file
ELF_MACHINES = {"x86_64-linux-gnu": 62, "aarch64-linux-gnu": 183}


def as_dtype(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def build_takes(arrays: list[np.ndarray], with_constants: bool = True) -> tvm.IRModule:
    """Two rows of every constant, by a kernel, and the constants themselves, or not."""
    rows = relax.Var("rows", relax.TensorType((2,), "int32"))

    def emit(builder):
        constants = [relax.const(tvm.runtime.tensor(array)) for array in arrays]
        taken = [builder.emit(relax.op.take(c, rows, axis=0)) for c in constants]
        return relax.Tuple([*taken, *(constants if with_constants else [])])

    return make_main([rows], emit)


def draw_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(DTYPES))]
    pairs = zip(DTYPES, shapes, strict=True)
    return [rng.integers(0, 100, shape).astype(as_dtype(dtype)) for dtype, shape in pairs]


def test_mapped__constants_of_all_dtypes_are_those_in_memory(tmp_path, monkeypatch):
    arrays = draw_arrays()
    executable = rq.compile(build_takes(arrays))
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1)
    assert len(find_large_constants(executable._lowered)) == len(arrays)
    executable.export_library(tmp_path / "all.so")
    machine = rq.Executor(tvm.runtime.load_module(str(tmp_path / "all.so")))
    results = machine.run("main", [np.array([1, 0], "int32")])
    for array, taken, whole in zip(
        arrays, results[: len(arrays)], results[len(arrays) :], strict=True
    ):
        expected = array.astype("float32") if array.dtype.kind == "V" else array
        np.testing.assert_array_equal(taken.astype(expected.dtype), expected[[1, 0]])
        np.testing.assert_array_equal(whole.astype(expected.dtype), expected)


def test_mapped__results_outlive_the_library(tmp_path, monkeypatch):
    """A constant that a module returns belongs to the caller, who may also write into it."""
    array = np.arange(1000, dtype="float32").reshape(10, 100)
    monkeypatch.setattr(mapped, "LEAST_BYTES", 1)
    rq.compile(build_takes([array])).export_library(str(tmp_path / "one.so"))
    machine = rq.Executor(tvm.runtime.load_module(str(tmp_path / "one.so")))
    taken, whole = machine.run("main", [np.array([3, 4], "int32")])
    del machine
    gc.collect()
    whole += 1
    np.testing.assert_array_equal(whole, array + 1)
    np.testing.assert_array_equal(taken, array[3:5])


def test_mapped__small_constants_stay_with_the_bytecode(tmp_path):
    executable = rq.compile(build_takes([np.ones((2, LEAST_BYTES // 8 - 1), "float32")]))
    assert find_large_constants(executable._lowered) == {}
    executable.export_library(str(tmp_path / "small.so"))
    assert mapped.PROVIDER.encode() not in (tmp_path / "small.so").read_bytes()


def test_mapped__saving_after_a_run_is_silent(tmp_path, capfd):
    """TVM's virtual machine changes the executable that it runs, and each load tells of it."""
    array, rows = np.arange(8, dtype="float32").reshape(4, 2), np.array([3, 1], "int32")
    executable = rq.compile(build_takes([array]))
    rq.Executor(executable).run("main", [rows])
    executable.export_library(str(tmp_path / "late.so"))
    machine = rq.Executor(tvm.runtime.load_module(str(tmp_path / "late.so")))
    np.testing.assert_array_equal(machine.run("main", [rows])[0], array[rows])
    assert "Scope" not in capfd.readouterr().err


def test_mapped__modules_without_kernels_are_saved(tmp_path):
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(x)
    rq.compile(builder.finalize()).export_library(str(tmp_path / "same.so"))
    machine = rq.Executor(tvm.runtime.load_module(str(tmp_path / "same.so")))
    array = np.ones(2, "float32")
    np.testing.assert_array_equal(machine.run("main", [array])[0], array)


@pytest.mark.parametrize("is_run", [False, True])
def test_mapped__modules_without_inputs_are_saved(tmp_path, is_run):
    """The result is a constant: neither a kernel nor a check of inputs is compiled."""
    array = np.arange(3, dtype="float32")
    mod = make_main([], lambda _: relax.op.negative(relax.const(array)))
    executable = rq.compile(mod)
    if is_run:
        np.testing.assert_array_equal(rq.Executor(executable).run("main", [])[0], -array)
    executable.export_library(str(tmp_path / "fixed.so"))
    machine = rq.Executor(tvm.runtime.load_module(str(tmp_path / "fixed.so")))
    np.testing.assert_array_equal(machine.run("main", [])[0], -array)


MEMORY = """
import sys
import numpy as np
from relayquant_runtime import Library

def read_peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

rows = np.array([1, 0], "int32")
Library("{small}").run("main", [rows])
before = read_peak()
library = Library("{large}")
loaded = read_peak()
library.run("main", [rows])
print(loaded - before, read_peak() - before)
"""


@pytest.mark.slow
def test_mapped__loading_copies_nothing_and_a_run_loads_what_it_reads(tmp_path):
    """A constant of 64 MB of which a run reads two rows of 64 kB; TVM's own form loads it four
    times.
    """
    large = np.ones((1024, 16384), "float32")
    for name, array in (("small", large[:, :4]), ("large", large)):
        mod = build_takes([array], with_constants=False)
        rq.compile(mod).export_library(str(tmp_path / f"{name}.so"))
    source = MEMORY.format(small=tmp_path / "small.so", large=tmp_path / "large.so")
    result = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TVM_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    loaded, ran = map(int, result.stdout.split())
    assert loaded < large.nbytes / 16
    assert ran < large.nbytes / 8


@pytest.mark.parametrize("triple", ELF_MACHINES)
def test_write_constants__is_an_object_of_the_target(triple, tmp_path):
    target = resolve_target(f"llvm -mtriple={triple}")
    array = np.arange(4096, dtype="int32")
    folder = tmp_path / 'a "folder" \\ of é'
    folder.mkdir()
    kernels = rq.compile(build_takes([array]), target).mod.imports[0]
    described = str(kernels["_get_target_string"]())
    files = write_constants([relax.const(array)], target, described, folder)
    contents = [path.read_bytes() for path in files]
    for data in contents:
        assert data[:4] == b"\x7fELF"
        assert int.from_bytes(data[18:20], "little") == ELF_MACHINES[triple]
    assert array.tobytes() in contents[0]


@pytest.mark.parametrize(
    ("target", "attrs"),
    [
        ("llvm -mtriple=armv7a-linux-gnueabihf", {}),
        ("llvm -mtriple=x86_64-apple-darwin", {}),
        ("llvm -mtriple=x86_64-linux-gnu", {"system_lib_prefix": "mine_"}),
        ("c", {}),
    ],
)
def test_can_map__declines(target, attrs):
    mod = tvm.IRModule({}, attrs=tvm.ir.make_node("ir.DictAttrs", **attrs) if attrs else None)
    kind = tvm.target.Target({"kind": "c"}) if target == "c" else resolve_target(target)
    assert not can_map(mod, kind)


def test_can_map__takes_64_bit_linux():
    for triple in ELF_MACHINES:
        assert can_map(tvm.IRModule({}), resolve_target(f"llvm -mtriple={triple}"))
