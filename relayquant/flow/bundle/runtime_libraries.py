"""Target -> TVM's runtime libraries for it: of the installed packages, or of a folder of wheels."""

from __future__ import annotations

import importlib.util
import platform
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from tvm.target import Target

from relayquant.base.storage.files import reading
from relayquant.codegen.kernels.isa.target import read_triple
from relayquant.errors import ConfigError, format_count
from relayquant_runtime import RUNTIME

#: What a C++ program links. Python has the first of them in its package apache-tvm-ffi.
LIBRARIES = ("libtvm_ffi.so", *RUNTIME)
PACKAGES = ("apache-tvm", "apache-tvm-ffi")
#: Most bytes of one library, ten times what they have.
MAX_BYTES = 1 << 26
#: Machine numbers of ELF files (elf.h), by the first word of the target's triple.
MACHINES = {
    **dict.fromkeys(("x86_64", "amd64"), 62),
    **dict.fromkeys(("aarch64", "arm64"), 183),
    **dict.fromkeys(("arm", "armv6l", "armv7a", "armv7l"), 40),
}
#: First word of a triple -> the platform of its wheels.
PLATFORMS = {62: "manylinux_2_28_x86_64", 183: "manylinux_2_28_aarch64"}


@dataclass(frozen=True)
class RuntimeLibraries:
    """Libraries of TVM for a target.

    Attributes:
        files: Name -> contents.
        missing: A sentence for each thing that is missing, with what to do.
    """

    files: dict[str, bytes]
    missing: tuple[str, ...] = ()


def find_runtime(target: Target, given: Path | None) -> RuntimeLibraries:
    """Find the runtime libraries for a target.

    Args:
        given: A wheel, or a folder with wheels or libraries. None: the installed packages, if the
            target is this machine's kind of CPU.

    Raises:
        ConfigError: `given` does not exist, or lacks a library for the target.
    """
    machine = find_machine(target)
    if given is not None and not given.exists():
        raise ConfigError(f"There is no folder or wheel {given}. {advise(target)}", code="RQ502")
    if given is None and not is_native(target):
        return RuntimeLibraries({}, (advise(target),))
    places = list_installed() if given is None else [given]
    found = {}
    for place in places:
        with reading(place, "folder or wheel with TVM's libraries", ConfigError):
            for name, data in read_libraries(place):
                if machine in (None, read_machine(data)):
                    found.setdefault(name, data)
    missing = [name for name in LIBRARIES if name not in found]
    if missing and given is not None:
        raise ConfigError(
            f"{given} has no {', '.join(missing)} for {read_triple(target)}. {advise(target)}",
            code="RQ502",
        )
    return RuntimeLibraries(found, (advise(target),) if missing else ())


def find_machine(target: Target) -> int | None:
    """Return the machine number of ELF files for a target. None if it is not known."""
    return MACHINES.get(read_triple(target).split("-")[0].lower())


def is_native(target: Target) -> bool:
    """Whether this machine runs programs of the target's kind."""
    return find_machine(target) == MACHINES.get(platform.machine().lower(), 0)


def advise(target: Target) -> str:
    """Return a sentence that says where the libraries for a target come from."""
    wheels = PLATFORMS.get(find_machine(target) or 0)
    if wheels is None:
        return (
            f"There are no packages of TVM for {read_triple(target)}: build {', '.join(LIBRARIES)} "
            "of TVM's source for it, and export again with runtime=FOLDER (--runtime FOLDER)."
        )
    packages = " ".join(f"{name}=={metadata.version(name)}" for name in PACKAGES)
    return (
        f"For TVM's runtime run: pip download --no-deps --only-binary=:all: --platform {wheels} "
        f"--python-version 3.11 -d wheels {packages}, and export again with runtime='wheels' "
        "(--runtime wheels)."
    )


def list_installed() -> list[Path]:
    """List the folders of the installed packages that hold libraries."""
    specs = [importlib.util.find_spec(name) for name in ("tvm", "tvm_ffi")]
    return [Path(spec.origin).parent / "lib" for spec in specs if spec and spec.origin]


def read_libraries(place: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, contents) of each library in a wheel, or in a folder and its wheels.

    Raises:
        ValueError: a library is too large. OSError, zipfile.BadZipFile: it cannot be read.
    """
    if place.is_file():
        with zipfile.ZipFile(place) as wheel:
            for entry in wheel.infolist():
                name = PurePosixPath(entry.filename).name
                if name in LIBRARIES:
                    check_size(name, entry.file_size)
                    yield name, wheel.read(entry)
        return
    for path in sorted(place.rglob("*")):
        if path.name in LIBRARIES and path.is_file():
            check_size(path.name, path.stat().st_size)
            yield path.name, path.read_bytes()
        elif path.suffix == ".whl":
            yield from read_libraries(path)


def check_size(name: str, size: int) -> None:
    """Raise ValueError for a library that is too large."""
    if size > MAX_BYTES:
        raise ValueError(f"{name} has {format_count(size, 'byte')}, more than {MAX_BYTES}")


def read_machine(data: bytes) -> int:
    """Return the machine number of an ELF file, 0 for another file."""
    return int.from_bytes(data[18:20], "little") if data[:4] == b"\x7fELF" else 0
