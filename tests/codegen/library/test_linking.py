"""Linkers for other systems: which is taken, and what is said where there is none."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from float_models import build_model
from tvm.relax import op
from tvm.target import Target

import relayquant as rq
from relayquant.codegen.library import linking

ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}


def target_of(triple: str) -> Target:
    return Target({"kind": "llvm", "mtriple": triple})


@pytest.mark.parametrize(
    ("triple", "name"),
    [
        ("aarch64-linux-gnu", "aarch64-linux-gnu"),
        ("arm64-unknown-linux-gnu", "aarch64-linux-gnu"),
        ("armv7l-linux-gnueabihf", "arm-linux-gnueabihf"),
        ("x86_64-conda-linux-gnu", "x86_64-linux-gnu"),
        ("riscv64-unknown-linux-gnu", "riscv64-linux-gnu"),
        ("x86_64-pc-windows-msvc", None),
        ("arm64-apple-darwin", None),
    ],
)
def test_find_gnu_name__is_what_debian_calls_the_tools(triple, name):
    assert linking.find_gnu_name(target_of(triple)) == name


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """A machine of whose programs only those in this folder are found; each writes its words."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(linking, "find_spec", lambda name: None)
    return tmp_path


def add_tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_choose_linker__takes_the_best_that_is_there(tools):
    for name in ("zig", "ld.lld", "aarch64-linux-gnu-ld", "aarch64-linux-gnu-g++"):
        add_tool(tools, name, f'echo {name} "$@" > {tools}/said')
        link = linking.choose_linker(target_of("aarch64-linux-gnu"), "m.so")
        link("m.so", ["a.o", "b.o"], options=[])
        said = (tools / "said").read_text().split()
        assert said[0] == name
        assert said[-4:] == ["-o", "m.so", "a.o", "b.o"]
        assert "-shared" in said


def test_export_library__without_a_linker_says_what_to_install(tools):
    mod = build_model(lambda emit, x: emit.dense("d", x, 4), (2, 4))
    executable = rq.compile(mod, ARM)
    with pytest.raises(rq.errors.MissingDependencyError) as error:
        executable.export_library(str(tools / "m.so"))
    told = str(error.value)
    assert "apt install g++-aarch64-linux-gnu (Debian, Ubuntu), or: pip install ziglang" in told
    assert told.endswith("[RQ503]")
    add_tool(tools, "aarch64-linux-gnu-ld", "echo no room >&2; exit 3")
    with pytest.raises(rq.ModelError, match=r"did not link .*m\.so \(exit code 3\): no room"):
        executable.export_library(str(tools / "m.so"))
    # A linker of the user's own is asked as ever.
    objects = []
    executable.export_library(
        str(tools / "m.so"), fcompile=lambda out, files, **_: objects.extend(files)
    )
    assert objects


@pytest.mark.parametrize("target", [None, ARM])
def test_export_library__names_the_file_as_the_user_does(target, tmp_path, monkeypatch):
    """Not the temporary file beside it. An old library stays until the new one is whole."""
    executable = rq.compile(build_identity(), target)
    add_tool(tmp_path, "linker", 'while [ "$1" != "-o" ]; do shift; done; echo new > "$2"')
    linker = str(tmp_path / "linker")
    monkeypatch.setattr(linking, "list_linkers", lambda name: iter([[linker, "-shared"]]))
    monkeypatch.setattr(linking.cc, "get_cc", lambda: linker)
    for place in (tmp_path / "none" / "m.so", tmp_path, tmp_path / "linker" / "m.so"):
        with pytest.raises(rq.errors.FileError, match=rf"^Cannot write {place}: (?!.*m-)"):
            executable.export_library(place)
    place = tmp_path / "m.so"
    place.write_text("old")
    old = place.open()
    executable.export_library(place)
    assert (old.read(), place.read_text()) == ("old", "new\n")
    add_tool(tmp_path, "linker", "echo bad flag >&2; exit 1")
    with pytest.raises(rq.ModelError, match=f"did not link .*{tmp_path}.*: bad flag"):
        executable.export_library(place)
    assert place.read_text() == "new\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linker", "m.so"]


@pytest.mark.parametrize("target", [None, ARM])
def test_export_library__on_a_full_disk_says_so(target, tmp_path, monkeypatch):
    """Of a linker for another system, and of this machine's compiler, which TVM runs."""
    add_tool(tmp_path, "full", 'echo "final link failed: No space left on device" >&2\nexit 1')
    full = str(tmp_path / "full")
    monkeypatch.setattr(linking, "list_linkers", lambda name: iter([[full, "-shared"]]))
    monkeypatch.setattr(linking.cc, "get_cc", lambda: full)
    mod = build_model(lambda emit, x: emit("y", op.nn.relu(x)), (1, 4))
    with pytest.raises(rq.errors.FileError, match=r"left on device\. Free space") as caught:
        rq.compile(mod, target).export_library(str(tmp_path / "m.so"))
    assert caught.value.errno == errno.ENOSPC


def test_choose_linker__leaves_this_machine_to_tvm():
    assert linking.choose_linker(rq.compile(build_identity()).target, "m.so") is None
    assert linking.choose_linker(target_of("aarch64-linux-gnu"), "m.tar") is None


def build_identity():
    return build_model(lambda emit, x: emit.dense("d", x, 4), (2, 4))


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++"), reason="needs Debian's g++-aarch64-linux-gnu"
)
def test_export_library__for_arm_without_more_words(tmp_path):
    rq.compile(build_identity(), ARM).export_library(str(tmp_path / "m.so"))
    header = np.fromfile(tmp_path / "m.so", "uint8", 20)
    assert bytes(header[:4]) == b"\x7fELF"
    assert header[18] == 183  # EM_AARCH64 of elf.h
