"""Object files with large data: as binutils reads them, and of sizes that code does not reach."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from relayquant.codegen.library.object_file import AARCH64, X86_64, writing_object
from relayquant.errors import ModelError

SYMBOL = "relayquant_data"


def write_object(path, section, data=b"abc"):
    with writing_object(path, section, SYMBOL, 64) as file:
        file.write(data)
    return path


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf of binutils")
@pytest.mark.parametrize(
    ("section", "machine", "flags"),
    [(X86_64, "X86-64", "Al"), (AARCH64, "AArch64", "A")],
    ids=["x86-64", "aarch64"],
)
def test_writing_object__as_readelf_reads_it(section, machine, flags, tmp_path):
    path = write_object(tmp_path / "m.o", section)
    words = ["readelf", "--all", "--wide", f"--hex-dump={section.name}", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.stderr == ""
    assert "Type: REL (Relocatable file)" in lines
    assert any(line.startswith("Machine:") and line.endswith(machine) for line in lines)
    (row,) = (line for line in lines if line.startswith(f"[ 1] {section.name}"))
    assert row.endswith(f"000003 00 {flags} 0 0 64")
    assert any(line.startswith("[ 2] .note.GNU-stack PROGBITS") for line in lines)
    assert f"1: 0000000000000000 3 OBJECT GLOBAL HIDDEN 1 {SYMBOL}" in lines
    assert "0x00000000 616263 abc" in lines


def test_writing_object__more_than_a_library_holds(tmp_path):
    section = replace(AARCH64, most=2)
    with pytest.raises(ModelError, match=r"0.00 GB of constants; linkers of this architecture"):
        write_object(tmp_path / "m.o", section)


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_writing_object__code_finds_what_lies_beyond_2_gib(tmp_path):
    """The data is a hole in the file, with a byte at its end."""
    size = (2 << 30) + (64 << 20)
    with writing_object(tmp_path / "data.o", X86_64, SYMBOL, 64) as file:
        file.seek(size - 1, 1)
        file.write(b"\7")
    source = tmp_path / "main.c"
    source.write_text(
        f'extern const char {SYMBOL}[] __attribute__((visibility("hidden")));\n'
        f"static const char *volatile place = {SYMBOL};\n"
        "static int calls;\n"
        f"int get(void) {{ return calls++ + place[{size - 1}L]; }}"
    )
    library = tmp_path / "m.so"
    objects = [str(source), str(tmp_path / "data.o")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), *objects], check=True)
    program = f"import ctypes; m = ctypes.CDLL({str(library)!r}); print(m.get(), m.get())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7", "8"]
