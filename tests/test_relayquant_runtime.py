"""Libraries in a process that has no compiler: results, what is loaded, messages."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant_runtime import Library, LibraryError, align_array, as_tensor, read_description
from relayquant_runtime.flags import read_flags

X, ONE = np.ones((3, 2), "float32"), np.float32(1)
COMPLEX = tvm.runtime.from_dlpack(align_array(np.ones((3, 2), "complex64")))


@I.ir_module
class Nested:
    @R.function
    def main(x: R.Tensor(("n", 2), "float32"), s: R.Tensor((), "float32")):
        with R.dataflow():
            y = R.multiply(x, s)
            z = (y, (R.cumsum(x, axis=0), s))
            R.output(z)
        return z

    @R.function
    def resize(x: R.Tensor((6,), "float32"), to: R.Shape(["a", "b"])):
        a, b = T.int64(), T.int64()
        with R.dataflow():
            y = R.reshape(x, (a, b))
            R.output(y)
        return y


@as_main
def shifted(x: R.Tensor(("n", 2), "float32"), s: R.Tensor((), "float32")):
    return R.add(x, s)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("library") / "nested.so"
    rq.compile(Nested).export_library(str(path))
    return path


ALONE = """
import json, sys
import numpy as np
from relayquant_runtime import Library
library = Library(sys.argv[1])
x = np.arange(6, dtype="float32").reshape(3, 2)
results = library.run("main", [x, np.array(2, "float32")])
names = {"tvm", "torch", "relayquant"} & {*sys.modules}
import tvm_ffi
print(json.dumps([[each.tolist() for each in results], sorted(names)]))
"""


def test_library__runs_without_the_compiler(path):
    command = [sys.executable, "-c", ALONE, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (product, total, factor), loaded = json.loads(result.stdout)
    assert loaded == []
    x = np.arange(6).reshape(3, 2)
    assert product == (2 * x).tolist()
    assert total == np.cumsum(x, 0).tolist()
    assert factor == 2


def test_library__gives_what_an_executor_does(path):
    x, s = np.random.default_rng(0).standard_normal((5, 2), "float32"), np.float32(3)
    expected = rq.Executor(tvm.runtime.load_module(str(path))).run("main", [x, s])
    for ours, theirs in zip(Library(path).run("main", [x, s]), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_library__takes_shapes(path):
    x = np.arange(6, dtype="float32")
    (result,) = Library(path).run("resize", [x, (2, 3)])
    np.testing.assert_array_equal(result, x.reshape(2, 3))


def test_align_array__keeps_what_can_be_read_where_it_lies():
    odd = np.zeros(65, "float32")[1:]
    odd = odd if odd.ctypes.data % 64 else np.zeros(66, "float32")[2:]
    fixed = align_array(odd)
    assert fixed.ctypes.data % 64 == 0
    assert fixed is not odd
    assert align_array(fixed) is fixed
    # Several, because each lies somewhere else.
    empty = [align_array(np.zeros((0, size), "float32")) for size in range(1, 20)]
    assert not any(array.ctypes.data % 64 for array in empty)
    assert [array.shape for array in empty] == [(0, size) for size in range(1, 20)]
    turned = align_array(np.arange(6).reshape(2, 3).T)
    np.testing.assert_array_equal(turned, np.arange(6).reshape(2, 3).T)
    assert turned.flags.c_contiguous
    assert as_tensor(np.float32(1)).shape == ()


def test_library__of_a_path_is_the_file_that_lies_there_now(path, tmp_path):
    place, factor = tmp_path / "model.so", np.float32(3)
    shutil.copy(path, place)
    first = Library(place)
    assert first.run("main", [X, factor])[0].tolist() == (3 * X).tolist()

    rq.compile(shifted).export_library(str(place))
    assert Library(place).run("main", [X, factor])[0].tolist() == (X + 3).tolist()
    assert "main(x " in Library(place).describe()
    assert first.run("main", [X, factor])[0].tolist() == (3 * X).tolist()


def test_library__that_was_written_into_is_refused(path, tmp_path):
    place = tmp_path / "model.so"
    shutil.copy(path, place)
    Library(place)
    os.utime(place, ns=(0, place.stat().st_mtime_ns + 1))  # as writing does, without its harm
    with pytest.raises(LibraryError, match=r"model.so was changed in place .* rename"):
        Library(place)


def test_library__says_what_is_wrong(path, tmp_path):
    with pytest.raises(LibraryError, match=r"There is no file .*nowhere\.so.*export_library"):
        Library(tmp_path / "nowhere.so")
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(LibraryError, match=r"text\.so is no library that export_library wrote"):
        Library(tmp_path / "text.so")
    with pytest.raises(LibraryError, match=r"has no function 'nain'.*mostly 'main'"):
        Library(path)["nain"]


@pytest.mark.slow
def test_library__that_was_cut_off(path, tmp_path):
    """In a process of its own: a read behind the end of a mapped file would end this one."""
    data, place = path.read_bytes(), tmp_path / "cut.so"
    for length in (100, 1000, len(data) // 2, len(data) - 1):
        place.write_bytes(data[:length])
        done = subprocess.run(
            [sys.executable, "-c", ALONE, place], capture_output=True, text=True, check=False
        )
        expected = f"cut.so was cut off: it has {length} of {len(data)} bytes. Copy it again."
        assert f"LibraryError: {place.parent}/{expected}" in done.stderr, (length, done)


def test_library__made_for_another_cpu(path, tmp_path):
    """The machine number of the ELF header says which (elf.h: 243 is RISC-V)."""
    data = bytearray(path.read_bytes())
    data[18:20] = (243).to_bytes(2, "little")
    (tmp_path / "other.so").write_bytes(data)
    expected = rf"other\.so is made for riscv64; this machine is {platform.machine()}\."
    with pytest.raises(LibraryError, match=expected):
        Library(tmp_path / "other.so")


def test_library__for_instructions_that_this_machine_lacks(path, monkeypatch):
    """Its first kernel would end the process."""
    target = read_description(path)["target"]
    assert {*target["flags"]} <= read_flags() or not read_flags()  # it was compiled here
    monkeypatch.setattr("relayquant_runtime.read_flags", lambda: frozenset({"fpu", "asimd"}))
    expected = rf"nested\.so was compiled for {re.escape(target['cpu'])}; this machine lacks \w+"
    if {*target["flags"]} - {"asimd"}:
        with pytest.raises(LibraryError, match=expected):
            Library(path)
    monkeypatch.setattr("relayquant_runtime.read_flags", frozenset)  # no Linux
    assert len(Library(path).run("main", [X, ONE])) == 3


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        (
            [X],
            ValueError,
            r"number of inputs of 'main' is 1; nested\.so takes 2\. Pass a list with",
        ),
        ([X, ONE, ONE], ValueError, r"number of inputs of 'main' is 3; nested\.so takes 2\."),
        (X, TypeError, r"of type ndarray; allowed: a list .* run\('main', \[array\]\)"),
        ([X, "text"], TypeError, r"\(ndarray, str\) do not all become arrays: .*\. Pass a list"),
        ([X * 1j, ONE], TypeError, r"become arrays: one has complex numbers; allowed: real"),
        ([COMPLEX, ONE], TypeError, r"become arrays: one has complex numbers; allowed: real"),
        ([X.astype("float64"), ONE], ValueError, r'is float64 .* array\.astype\("float32"\)\.$'),
        ([X[:, :1], ONE], ValueError, r"of shape \(3, 1\); .* For other sizes compile"),
        ([X[0], ONE], ValueError, r"takes 2 dimensions, and got 1\. .* by array\[None\]\.$"),
        ([X[None], ONE], ValueError, r"takes 2 dimensions, and got 3\. Reshape the array\.$"),
    ],
    ids=[
        *("too few", "too many", "array", "text", "complex", "complex tensor"),
        *("dtype", "size", "no batch", "rank"),
    ],
)
def test_library__says_which_inputs_it_takes(path, args, kind, message):
    library = Library(path)
    with pytest.raises(kind, match=message):
        library.run("main", args)
    assert len(library.run("main", [X, ONE])) == 3  # it runs on
