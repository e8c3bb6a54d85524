"""Data sets in .npz and .npy files: batches are read one at a time, without pickle."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.storage.archive import ArrayHeader, check_array_size, read_array_header
from relayquant.base.storage.files import reading
from relayquant.data.arrays import Cut, plan_cut
from relayquant.data.item import (
    Batch,
    InputInfo,
    check_names,
    list_names,
)
from relayquant.errors import DataError, DataWarning, format_count, warn_user

#: np.savez's name for an array without a name
UNNAMED = "arr_0"
#: Limits of memory held at once: the multiple of the file's size that one batch may have, and a
#: number of bytes that is always allowed. Zeros compress by a factor of 1000, so without limits a
#: small file could fill the memory.
MOST_EXPANSION, LEAST_HELD = 100, 1 << 26
#: how an .npz begins, as every zip does, and an .npy
ZIP, NPY = b"PK", b"\x93NUMPY"
ADVICE = (
    "Write one with np.savez(path, **{input name: array with samples along axis 0}); np.loadtxt "
    "reads a table of text. The commands of a shell take a folder of pictures, too."
)


@dataclass(frozen=True)
class _Member:
    """An array inside an .npz, described by its header."""

    file: str
    header: ArrayHeader


@dataclass(frozen=True)
class _OneArray:
    """An .npy file, seen as an .npz with one array that has no name."""

    path: Path

    def __enter__(self) -> _OneArray:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def namelist(self) -> list[str]:
        return [f"{UNNAMED}.npy"]

    def open(self, file: str) -> IO[bytes]:
        return self.path.open("rb")

    def measure(self, file: str) -> int:
        return self.path.stat().st_size


class _Archive(zipfile.ZipFile):
    """An .npz."""

    def measure(self, file: str) -> int:
        """The number of bytes of an array's file."""
        return self.getinfo(file).file_size


def list_arrays(path: Path) -> dict[str, str]:
    """Name of each array of an .npz -> its file in there. An .npy has one array, without a name."""
    with _open_archive(path) as archive:
        return {f[: -len(".npy")]: f for f in archive.namelist() if f.endswith(".npy")}


def open_archive(
    path: Path, inputs: tuple[InputInfo, ...], batch_size: int | None
) -> tuple[int, Callable[[], Iterator[Batch]]]:
    """Return (number of batches, function that yields them from the beginning)."""
    if not path.is_file():
        raise DataError(
            f"The data set {str(path)!r} is not a file; expected an .npz. {ADVICE}", code="RQ301"
        )
    if path.suffix.lower() == ".npy" and len(inputs) != 1:
        raise DataError(
            f"{path} is an .npy file, which names no input, but the model has "
            f"{format_count(len(inputs), 'input')} ({list_names(inputs)}). {ADVICE}",
            code="RQ302",
        )
    files = list_arrays(path)
    with _open_archive(path) as archive:
        if len(inputs) == 1 and len(files) == 1:
            (only,) = files
            if only not in (inputs[0].name, UNNAMED):
                warn_user(
                    f"The data set {path} has no array {inputs[0].name!r}; its only array {only!r} "
                    "is used for that input.",
                    DataWarning,
                    code="RQ304",
                )
            files = {inputs[0].name: files[only]}
        wanted = {info.name for info in inputs}
        check_names(set(files) & wanted, inputs, f"The data set {path}", present=set(files))
        members = {name: _read_header(path, archive, files[name]) for name in sorted(wanted)}
    shapes = {info.name: members[info.name].header.shape for info in inputs}
    cut = plan_cut(shapes, inputs, batch_size)
    for member in members.values():
        _check_memory(path, member, cut)

    def open_items() -> Iterator[Batch]:
        with _open_archive(path) as archive:
            readers = {i.name: _read_entries(path, archive, members[i.name], cut) for i in inputs}
            for _ in range(cut.batches):
                yield {name: next(reader) for name, reader in readers.items()}

    return cut.batches, open_items


def _open_archive(path: Path) -> _Archive | _OneArray:
    if path.suffix.lower() == ".npy":
        return _OneArray(path)
    with reading(path, "data set in an .npz", advice=ADVICE):
        try:
            archive = _Archive(path)
        except zipfile.BadZipFile:
            raise ValueError(_explain_beginning(path)) from None
        if not any(name.endswith(".npy") for name in archive.namelist()):
            archive.close()
            raise ValueError("it is a zip without an array of numpy")
        return archive


def _explain_beginning(path: Path) -> str:
    """Say what is wrong with a file that is no zip."""
    with path.open("rb") as file:
        start = file.read(8)
    if not start:
        return "it is empty"
    if start.startswith(ZIP):
        return "it ends early, so copy or write it again"
    if start.startswith(NPY):
        return "it is an .npy file of another name, so name it .npy"
    return f"it begins with {start!r}, and an .npz with {ZIP!r}"


@contextmanager
def _open_member(path: Path, archive: _Archive | _OneArray, file: str) -> Iterator[IO[bytes]]:
    """Open an entry for reading. Problems with it become a DataError that names file and entry."""
    where = f"{path}: {file}" if isinstance(archive, _Archive) else path
    with reading(where, "array"), archive.open(file) as stream:
        yield stream


def _read_header(path: Path, archive: _Archive | _OneArray, file: str) -> _Member:
    with _open_member(path, archive, file) as stream:
        header = read_array_header(stream)
        check_array_size(header, stream.tell(), archive.measure(file))
    return _Member(file, header)


def _check_memory(path: Path, member: _Member, cut: Cut) -> None:
    """Raise DataError if the data held at once would fill the memory."""
    shape, nbytes = member.header.shape, member.header.nbytes
    held = nbytes
    if not member.header.fortran_order:
        held = cut.size * math.prod(shape[1:]) * member.header.dtype.itemsize
    most = max(MOST_EXPANSION * path.stat().st_size, LEAST_HELD)
    if held > most:
        part = "array in Fortran order, read as a whole," if held == nbytes else "batch"
        raise DataError(
            f"The data set {path}: a{'n' if held == nbytes else ''} {part} of {member.file}, "
            f"shape {shape}, takes {format_count(held, 'byte')}, more than {MOST_EXPANSION} times "
            "the file. If this is intended, save arrays in C order with np.savez (uncompressed).",
            code="RQ301",
        )


def _read_entries(
    path: Path, archive: _Archive | _OneArray, member: _Member, cut: Cut
) -> Iterator[NDArray[Any]]:
    """Yield one array per batch. Holds one batch in memory, or the whole array if it is in Fortran
    order (rare).
    """
    shape = member.header.shape
    with _open_member(path, archive, member.file) as stream:
        read_array_header(stream)
        if member.header.fortran_order:
            data = _read_exactly(member, stream, math.prod(shape))
            whole, start = data.reshape(shape, order="F"), 0
            for size in cut.sizes():
                yield whole[start] if cut.stacked else whole[start : start + size]
                start += size
            return
        for size in cut.sizes():
            data = _read_exactly(member, stream, size * math.prod(shape[1:]))
            yield data.reshape(shape[1:] if cut.stacked else (size, *shape[1:]))


def _read_exactly(member: _Member, stream: IO[bytes], count: int) -> NDArray[Any]:
    wanted = count * member.header.dtype.itemsize
    data = stream.read(wanted)
    if len(data) != wanted:
        raise ValueError("it ends early")
    return np.frombuffer(data, member.header.dtype, count)
