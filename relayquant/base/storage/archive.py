"""One file of plain data: a JSON header, texts and arrays. Reading it executes no code.

The file is a zip archive without compression. Its bytes depend on its contents only: the same data
gives the same bytes. It is written completely or not at all.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from relayquant.base.storage.files import decode_json, reading, write_whole
from relayquant.errors import DataError, RelayQuantError, format_count

#: entries of a file: one per array and text, and the header
MAX_ENTRIES = 200_000
HEADER = "header.json"


@dataclass(frozen=True, eq=False)
class Archive:
    """The contents of an archive: plain data, and texts and arrays by name."""

    header: dict[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def write_archive(path: Path, kind: str, contents: Archive) -> None:
    """Write an archive of a `kind`, for example "relayquant.prepared.1", completely or not at all.

    Raises:
        FileError: the folder does not exist or cannot be written.
    """
    names = list(contents.arrays)
    header = {"format": kind, **contents.header, "arrays": names, "texts": list(contents.texts)}

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            # ZipInfo keeps the time of writing out of the file.
            archive.writestr(zipfile.ZipInfo(HEADER), json.dumps(header))
            for name, text in contents.texts.items():
                archive.writestr(zipfile.ZipInfo(name), text)
            for i, name in enumerate(names):
                array = np.asarray(contents.arrays[name])
                with archive.open(zipfile.ZipInfo(f"{i}.npy"), "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)

    write_whole(path, write)


def read_archive(
    path: Path, kind: str, what: str, raises: type[RelayQuantError] = DataError
) -> Archive:
    """Read an archive of `write_archive`. Reads no more bytes than the file has.

    Args:
        what: What the file should be, for messages: "prepared model".
        raises: Class of the error.

    Raises:
        DataError or `raises`: the file does not exist, is damaged or is something else.
    """
    with reading(path, what, raises), zipfile.ZipFile(path) as archive:
        size = path.stat().st_size
        entries = archive.infolist()
        # Stored entries cannot be larger than the file, so a small archive cannot fill the memory.
        is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        total = sum(entry.file_size for entry in entries)
        if not is_plain or total > size or len(entries) > MAX_ENTRIES:
            raise ValueError("its entries are not as relayquant writes them")
        header = decode_json(archive.read(HEADER))
        if not isinstance(header, dict) or header.get("format") != kind:
            raise ValueError(f"its format is not {kind!r}")
        names, texts = ([str(name) for name in header[key]] for key in ("arrays", "texts"))
        return Archive(
            header,
            {name: read_array(archive, f"{i}.npy") for i, name in enumerate(names)},
            {name: archive.read(name).decode() for name in texts},
        )


@dataclass(frozen=True)
class ArrayHeader:
    """Shape and dtype of an array, from the header of its .npy."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(stream: IO[bytes]) -> ArrayHeader:
    """Read the header of an .npy. The stream then is at the start of the data.

    Raises:
        ValueError: it holds Python objects, or no valid array. For a damaged header numpy may raise
            any error.
    """
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"unknown .npy version {version}")
    if dtype.hasobject:
        raise ValueError(
            "it holds Python objects, which are not loaded (they could run code); store plain "
            "numeric arrays"
        )
    header = ArrayHeader(shape, dtype, fortran_order)
    if min(shape, default=0) < 0 or dtype.itemsize == 0:
        raise ValueError(f"shape {shape} and dtype {dtype} describe no valid array")
    return header


def check_array_size(header: ArrayHeader, start: int, size: int) -> None:
    """Raise ValueError unless the data described by `header`, from byte `start` on, fills `size`
    bytes.

    The check runs before memory is allocated.
    """
    needed = start + header.nbytes
    if needed != size:
        raise ValueError(
            f"its header says shape {header.shape} and {header.dtype}, which is "
            f"{format_count(needed, 'byte')}, but it has {size}"
        )


def read_array(archive: zipfile.ZipFile, entry: str) -> np.ndarray:
    """Read an .npy entry of an archive. Raises ValueError and others for a damaged one, see
    `read_array_header`.
    """
    with archive.open(entry) as stream:
        header = read_array_header(stream)
        check_array_size(header, stream.tell(), archive.getinfo(entry).file_size)
        stream.seek(0)
        return np.lib.format.read_array(stream, allow_pickle=False)
