"""Kernels in files: loaded by later processes, never damaged ones, never those of other users."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from relayquant.codegen.eager import kernel_cache, kernel_files
from relayquant.codegen.eager.kernel_cache import KernelCache, host_kernels
from relayquant.codegen.eager.kernel_files import KernelFiles
from relayquant.codegen.eager.steps.rounding import ROUND


@pytest.fixture
def files(tmp_path):
    return KernelFiles(tmp_path / "kernels", host_kernels().target)


def forbid_compiling(monkeypatch):
    def fail(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(kernel_cache, "compile_kernel", fail)


def open_cache(files):
    """A cache as another process has it, with nothing compiled yet."""
    return KernelCache(files.target, files)


def test_kernel_files__later_processes_load_what_one_compiled(files, monkeypatch):
    open_cache(files).get(ROUND)
    forbid_compiling(monkeypatch)
    assert callable(open_cache(files).get(ROUND))


@pytest.mark.parametrize("harm", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" * 99])
def test_kernel_files__damaged_ones_are_compiled_again(files, harm):
    open_cache(files).get(ROUND)
    (path,) = files.folder.glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # this process runs its code
    path.write_bytes(harm(whole))
    assert callable(open_cache(files).get(ROUND))
    assert len(path.read_bytes()) == len(whole)


def test_kernel_files__folders_of_others_are_not_used(files, monkeypatch):
    open_cache(files).get(ROUND)
    files.folder.chmod(0o777)
    forbid_compiling(monkeypatch)
    with pytest.raises(AssertionError, match="compiled"):
        open_cache(files).get(ROUND)


@pytest.mark.parametrize("part", ["description", "target", "sources"])
def test_kernel_files__names_contain_what_the_code_depends_on(files, monkeypatch, part):
    before = files.find("kernel")
    if part == "sources":
        monkeypatch.setattr(kernel_files, "digest_sources", lambda: "changed")
    other = KernelFiles(files.folder, "another" if part == "target" else files.target)
    assert other.find("other" if part == "description" else "kernel") != before


def test_kernel_files__without_a_place_kernels_are_compiled(tmp_path):
    (tmp_path / "file").write_text("no folder")
    files = KernelFiles(tmp_path / "file" / "kernels", host_kernels().target)
    assert callable(open_cache(files).get(ROUND))
    assert not files.can_write


def test_kernel_files__the_oldest_are_deleted(files, monkeypatch):
    monkeypatch.setattr(kernel_files, "MOST_FILES", 3)

    class Module:
        imports = ()

        def export_library(self, path, **_):
            with open(path, "wb") as file:
                file.write(b"code")

    paths = [files.find(str(i)) for i in range(6)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda path: files.save(path, Module()), paths))
    assert len(list(files.folder.iterdir())) == 3
