"""Data sets, archives: .npz files, read batch by batch without pickle."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from relayquant.calibrate.datasets.arrays import Cut, plan_cut
from relayquant.calibrate.datasets.item import (
    Batch,
    InputInfo,
    check_names,
)
from relayquant.errors import DataError


@dataclass(frozen=True)
class _Member:
    """An array inside an .npz, by its header."""

    file: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


def open_archive(
    path: Path, inputs: tuple[InputInfo, ...], batch_size: int | None
) -> tuple[int, Callable[[], Iterator[Batch]]]:
    """(number of batches, function that yields them from the beginning)."""
    advice = "Write one with np.savez(path, **{input name: array with samples along axis 0})."
    if path.suffix.lower() == ".npy":
        raise DataError(
            f"{path} is an .npy file, which names no input; pass np.load(path), or an .npz. "
            f"{advice}"
        )
    if not path.is_file():
        raise DataError(f"The data set {str(path)!r} is not a file; expected an .npz. {advice}")
    with _read_archive(path) as archive:
        files = {f[: -len(".npy")]: f for f in archive.namelist() if f.endswith(".npy")}
        if len(inputs) == 1 and len(files) == 1:
            files = {inputs[0].name: next(iter(files.values()))}
        wanted = {info.name for info in inputs}
        check_names(set(files) & wanted, inputs, f"The data set {path}", present=set(files))
        members = {name: _read_header(path, archive, files[name]) for name in sorted(wanted)}
    shapes = {info.name: members[info.name].shape for info in inputs}
    cut = plan_cut(shapes, inputs, batch_size)

    def open_items() -> Iterator[Batch]:
        with _read_archive(path) as archive:
            readers = {i.name: _read_entries(path, archive, members[i.name], cut) for i in inputs}
            for _ in range(cut.batches):
                yield {name: next(reader) for name, reader in readers.items()}

    return cut.batches, open_items


def _read_archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"The data set {path} cannot be read as an .npz: {error}.") from None


def _parse_header(path: Path, file: str, stream: IO[bytes]) -> _Member:
    """Reads the header of an .npy; the stream then stands at the data."""
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise DataError(f"The data set {path}: {file} has the unknown .npy version {version}.")
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"The data set {path}: {file} has no valid header: {error}.") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"The data set {path}: {file} is damaged: {error}.") from None
    if dtype.hasobject:
        raise DataError(
            f"The data set {path}: {file} holds Python objects, which are not loaded (they could "
            "run code). Store plain numeric arrays."
        )
    return _Member(file, shape, dtype, fortran_order)


def _read_header(path: Path, archive: zipfile.ZipFile, file: str) -> _Member:
    with _open_member(path, archive, file) as stream:
        member = _parse_header(path, file, stream)
        header = stream.tell()
    needed, there = header + math.prod(member.shape) * member.dtype.itemsize, archive.getinfo(file)
    if min(member.shape, default=0) < 0 or needed != there.file_size:
        raise DataError(
            f"The data set {path}: {file} says shape {member.shape} and {member.dtype}, which is "
            f"{needed} bytes, but it has {there.file_size}; the file is damaged."
        )
    return member


def _open_member(path: Path, archive: zipfile.ZipFile, file: str) -> IO[bytes]:
    try:
        return archive.open(file)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
        # RuntimeError: encrypted; NotImplementedError: unknown compression.
        raise DataError(f"The data set {path}: {file} cannot be read: {error}.") from None


def _read_entries(
    path: Path, archive: zipfile.ZipFile, member: _Member, cut: Cut
) -> Iterator[NDArray[Any]]:
    """One array per batch. Holds one batch, or for Fortran order (rare) the whole array."""
    with _open_member(path, archive, member.file) as stream:
        _parse_header(path, member.file, stream)
        if member.fortran_order:
            data = _read_exactly(path, member, stream, math.prod(member.shape))
            whole, start = data.reshape(member.shape, order="F"), 0
            for size in cut.sizes():
                yield whole[start] if cut.stacked else whole[start : start + size]
                start += size
            return
        for size in cut.sizes():
            count = size * math.prod(member.shape[1:])
            data = _read_exactly(path, member, stream, count)
            shape = member.shape[1:] if cut.stacked else (size, *member.shape[1:])
            yield data.reshape(shape)


def _read_exactly(path: Path, member: _Member, stream: IO[bytes], count: int) -> NDArray[Any]:
    wanted = count * member.dtype.itemsize
    try:
        data = stream.read(wanted)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise DataError(f"The data set {path}: {member.file} is damaged: {error}.") from None
    if len(data) != wanted:
        raise DataError(f"The data set {path}: {member.file} ends early; the file is damaged.")
    return np.frombuffer(data, member.dtype, count)
