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
from relayquant_runtime.elf import read_machine

#: What a C++ program links. Python has the first of them in its package apache-tvm-ffi.
LIBRARIES = ("libtvm_ffi.so", *RUNTIME)
PACKAGES = ("apache-tvm", "apache-tvm-ffi")
#: Most bytes of one library, ten times what they have.
MAX_BYTES = 1 << 26
#: Other names of CPUs in triples -> the name in `platform.machine()`.
NAMES = {
    "amd64": "x86_64",
    "arm64": "aarch64",
    **dict.fromkeys(("armv6l", "armv7a", "armv7l"), "arm"),
}
#: CPU -> the platform of its wheels.
PLATFORMS = {name: f"manylinux_2_28_{name}" for name in ("x86_64", "aarch64")}
KNOWN = (*PLATFORMS, "arm")


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
                if machine in ("", read_machine(data)):
                    found.setdefault(name, data)
    missing = [name for name in LIBRARIES if name not in found]
    if missing and given is not None:
        raise ConfigError(
            f"{given} has no {', '.join(missing)} for {read_triple(target)}. {advise(target)}",
            code="RQ502",
        )
    return RuntimeLibraries(found, (advise(target),) if missing else ())


def find_machine(target: Target) -> str:
    """Return the name of a target's CPU, as `read_machine` gives it. "" if it is not known."""
    name = name_machine(read_triple(target).split("-")[0])
    return name if name in KNOWN else ""


def name_machine(name: str) -> str:
    """Return one name for all names of a kind of CPU."""
    return NAMES.get(name.lower(), name.lower())


def is_native(target: Target) -> bool:
    """Whether this machine runs programs of the target's kind."""
    return find_machine(target) == name_machine(platform.machine())


def advise(target: Target) -> str:
    """Return a sentence that says where the libraries for a target come from."""
    wheels = PLATFORMS.get(find_machine(target))
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
