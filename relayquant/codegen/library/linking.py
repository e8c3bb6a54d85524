"""Object files of a target -> shared library. Finds a linker for the target on this machine.

LLVM writes the object files for any target, but the linker of this machine joins only its own.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tvm
from tvm.contrib import tvmjs
from tvm.support import cc, tar
from tvm.target import Target

from relayquant.base.storage.files import REMEDIES, TEMPORARY, writing
from relayquant.codegen.kernels.isa.target import read_triple
from relayquant.errors import MissingDependencyError, ModelError

#: First word of a triple -> Debian's name of the system, which begins the names of its tools. Other
#: words name themselves: riscv64-linux-gnu.
GNU_NAMES = {
    "amd64": "x86_64-linux-gnu",
    "arm64": "aarch64-linux-gnu",
    "arm": "arm-linux-gnueabihf",
    "armv6l": "arm-linux-gnueabihf",
    "armv7a": "arm-linux-gnueabihf",
    "armv7l": "arm-linux-gnueabihf",
}
#: Endings that TVM writes without a linker for the target.
OTHER_ENDINGS = {".tar": tar.tar, ".wasm": tvmjs.create_tvmjs_wasm}
#: Bytes of an object file besides its data.
OBJECT_HEADERS = 4096
#: What TVM writes before the message of this machine's compiler.
LINK_ERROR = "Compilation error:\n"
#: Characters of a linker's message that an error quotes.
MESSAGE_LENGTH = 400

#: As `fcompile` of `export_library`: (file to write, object files).
Link = Callable[..., None]


@contextmanager
def emitting(paths: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Let LLVM write these object files to memory. Yields a function that stores them on disk.

    LLVM ends the process if a disk is full. Paths that it does not write become no files.
    """
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for path in paths:
            files[path] = os.memfd_create(path.name)
            stack.callback(os.close, files[path])
            with writing(path, TEMPORARY):
                path.unlink(missing_ok=True)
                path.symlink_to(f"/proc/{os.getpid()}/fd/{files[path]}")

        def store() -> None:
            for path, file in files.items():
                with writing(path, TEMPORARY):
                    path.unlink()
                    if os.fstat(file).st_size:
                        with open(file, "rb", closefd=False) as source, path.open("wb") as copy:
                            source.seek(0)
                            shutil.copyfileobj(source, copy)

        yield store


def check_size_limit(size: int, path: Path) -> None:
    """Raise OSError if the process may not write so many bytes (ulimit -f), not even to memory."""
    if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < size:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))


def write_object(source: Path) -> Path:
    """Compile an .ll file with data to an object file beside it.

    Raises:
        FileError: there is no space for it.
    """
    compiled = source.with_suffix(".o")
    with writing(compiled, TEMPORARY):
        check_size_limit(source.stat().st_size + OBJECT_HEADERS, compiled)
    with emitting([compiled]) as store:
        tvm.runtime.load_module(str(source)).write_to_file(str(compiled))
        store()
    return compiled


def write_library(module: Any, path: Path, folder: Path, **options: Any) -> Any:
    """Write the shared library of a module, as its `export_library` does.

    Args:
        folder: A folder for object files.
        options: As for `export_library`.

    Raises:
        FileError: there is no space for the library or the object files. With a limit on the size
            of files, an object file is taken to have half the size of its assembly; the kernels of
            networks have a third.
    """
    link = options.pop("fcompile", None) or OTHER_ENDINGS.get(path.suffix, cc.create_shared)
    folder = Path(options.pop("workspace_dir", None) or folder)
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        for each in (module, *module.imports):
            if each.kind == "llvm":
                with writing(path):
                    check_size_limit(len(each.inspect_source("s")) // 2, path)
    names = [f"lib{i}" for i in range(1 + len(module.imports))]

    with emitting([folder / f"{name}.o" for name in (*names, "devc")]) as store:

        @functools.wraps(link)
        def store_and_link(*args: Any, **named: Any) -> Any:
            store()
            return link(*args, **named)

        with writing(path), linking(str(path)):
            return module.export_library(
                str(path), fcompile=store_and_link, workspace_dir=str(folder), **options
            )


def choose_linker(target: Target, file_name: str) -> Link | None:
    """Choose what joins object files for a target. None: TVM's choice, this machine's compiler.

    Raises:
        MissingDependencyError: there is no linker for the target. The message says what to install.
    """
    name = find_gnu_name(target)
    if name is None or Path(file_name).suffix in OTHER_ENDINGS:
        return None
    is_native = name == GNU_NAMES.get(platform.machine(), f"{platform.machine()}-linux-gnu")
    if is_native and cc.get_cc():
        return None
    command = next(list_linkers(name), None)
    if command is None:
        package = "g++" if is_native else f"g++-{name.replace('_', '-')}"
        raise MissingDependencyError(
            f"{file_name} is for {read_triple(target)}, and this machine has no linker for it. "
            f"Run: apt install {package} (Debian, Ubuntu), or: pip install ziglang. Or pass "
            "fcompile= to export_library, a function that takes the file to write and its object "
            "files.",
            code="RQ503",
        )

    def link(output: Any, objects: Any, **_: Any) -> None:
        objects = [objects] if isinstance(objects, str) else objects
        run_linker([*command, "-o", str(output), *map(os.fspath, objects)], file_name)

    return link


def find_gnu_name(target: Target) -> str | None:
    """Return Debian's name of the target's system, such as "aarch64-linux-gnu". None if it is not
    Linux.
    """
    architecture, *system = read_triple(target).lower().split("-")
    if target.kind.name != "llvm" or "linux" not in system:
        return None
    return GNU_NAMES.get(architecture, f"{architecture}-linux-gnu")


def list_linkers(name: str) -> Iterator[list[str]]:
    """List commands on this machine that join object files of a system, the best first.

    Code of LLVM needs no start files and no libraries that the loading process does not have, so a
    bare linker is enough.
    """
    for tool in ("g++", "gcc", "ld"):
        if path := shutil.which(f"{name}-{tool}"):
            yield [path, "-shared"]
    if path := shutil.which("ld.lld"):
        yield [path, "-shared"]
    options = ["cc", "-target", name, "-shared", "-nostdlib"]
    if path := shutil.which("zig"):
        yield [path, *options]
    elif find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", *options]


def run_linker(words: Sequence[str], file_name: str) -> None:
    """Run a linker. Errors name `file_name`, as the user knows the file.

    Raises:
        OSError: there is no space for the file.
        ModelError: it failed for another reason.
    """
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        refuse_space(file_name, said := done.stderr or done.stdout)
        file_name = f"{file_name} (exit code {done.returncode})"
        raise refuse_linking(words[0], file_name, said)


@contextmanager
def linking(file_name: str) -> Iterator[None]:
    """Turn what TVM raises where this machine's compiler does not link a library into our errors.

    Raises:
        OSError: there is no space for the file.
        ModelError: it failed for another reason.
    """
    try:
        yield
    except RuntimeError as error:
        refuse_space(file_name, said := str(error))
        if not said.startswith(LINK_ERROR):
            raise
        # The command comes last, perhaps with hundreds of words.
        said = said.removeprefix(LINK_ERROR).partition("\n\nCommand line:")[0]
        raise refuse_linking("The compiler of this machine", file_name, said) from error


def refuse_linking(linker: str, file_name: str, said: str) -> ModelError:
    """Return the error of a linker that failed."""
    words = " ".join(said.split())[-MESSAGE_LENGTH:]
    return ModelError(f"{linker} did not link {file_name}: {words}", code="RQ503")


def refuse_space(output: str, said: str) -> None:
    """Raise the system's error that a linker's message names, if it is one of `REMEDIES`. A linker
    that writes a file that is too large is ended by a signal.
    """
    said = said.replace(str(signal.strsignal(signal.SIGXFSZ)), os.strerror(errno.EFBIG))
    for number in REMEDIES:
        if os.strerror(number) in said:
            raise OSError(number, os.strerror(number), output)
