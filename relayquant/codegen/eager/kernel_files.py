"""Compiled kernels in files: what one process has compiled, later ones load.

    kernel, target, versions  ->  a shared library in the system's folder for caches

Compiling a kernel takes 0.1 to 0.2 s, loading a file less than a millisecond. A name contains
everything that a kernel's code depends on, so no file is ever changed: processes may read, write
and delete at the same time.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.target import Target

from relayquant.base.storage.files import open_temporary_folder, write_whole, writing
from relayquant.codegen.library.linking import write_library
from relayquant.codegen.tuning.schedule_cache import find_cache_folder
from relayquant.errors import FileError

#: Number of files that are kept. A network has about five kernels of 25 KB.
MOST_FILES = 256
#: Bytes of the checksum at the end of a file.
CHECKSUM_BYTES = 32
#: Sources that kernels are generated and lowered by.
SOURCES = Path(__file__).resolve().parents[1]


class KernelFiles:
    """The files of a folder, and the target of their kernels.

    Code of a file is run. So the folder is used only if no other user may write into it.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder, self.target = folder, target
        #: False once a file could not be written: there is no linker, or no space
        self.can_write = True

    def find(self, description: str) -> Path:
        """Return the path of a kernel, whether there is a file or not."""
        parts = (description, str(self.target), tvm.__version__, tvm_ffi.__version__)
        text = "\0".join((*parts, digest_sources()))
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"

    def load(self, path: Path, name: str) -> Callable[..., None] | None:
        """Load the function `name` of a file. None if there is no intact file."""
        try:
            if not is_own_folder(self.folder):
                return None
            data = path.read_bytes()
            if hashlib.sha256(data[:-CHECKSUM_BYTES]).digest() != data[-CHECKSUM_BYTES:]:
                return None
            path.touch()  # the files that nobody has used for the longest time are deleted
            return tvm.runtime.load_module(str(path))[name]
        except Exception:  # of the system or of TVM: the kernel is compiled instead
            return None

    def save(self, path: Path, module: Any) -> None:
        """Write a compiled module, if that is possible. Delete the oldest files if there are many.

        A cache must not make anything fail.
        """
        if not self.can_write:
            return

        def write(temporary: Path) -> None:
            with open_temporary_folder() as folder, writing(temporary):
                write_library(module, temporary, folder)
                data = temporary.read_bytes()
                # Loaders ignore what follows the last section.
                temporary.write_bytes(data + hashlib.sha256(data).digest())

        try:
            with writing(self.folder):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_own_folder(self.folder):
                raise FileError(f"Another user may write into {self.folder}.", code="RQ501")
            write_whole(path, write)
            self.delete_oldest()
        except Exception:
            self.can_write = False

    def delete_oldest(self) -> None:
        """Delete the files that were not used for the longest time, down to `MOST_FILES`."""
        found = []
        for path in self.folder.glob("*.so"):
            with suppress(FileNotFoundError):  # another process deletes, too
                found.append((path.stat().st_mtime, path))
        for _, path in sorted(found)[:-MOST_FILES]:
            path.unlink(missing_ok=True)


@functools.cache
def open_kernel_files(target: Target) -> KernelFiles:
    """Return the files of this user."""
    return KernelFiles(find_cache_folder() / "kernels", target)


def is_own_folder(folder: Path) -> bool:
    """Whether only this user may write into a folder."""
    if not hasattr(os, "getuid"):
        return folder.is_dir()
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


@functools.cache
def digest_sources() -> str:
    """Return the checksum of the modules that make kernels, so that a changed one is compiled."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
