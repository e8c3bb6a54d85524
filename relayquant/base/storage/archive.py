"""One file of plain data: a JSON header, texts and arrays. Written whole, read without executing
anything.

A zip archive without compression that depends on its contents alone: the same data gives the same
bytes.
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

#: entries of a file: one for each array and text, and the header
MAX_ENTRIES = 200_000
HEADER = "header.json"


@dataclass(frozen=True, eq=False)
class Archive:
    """What an archive holds: plain data, texts and arrays by name."""

    header: dict[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def write_archive(path: Path, kind: str, contents: Archive) -> None:
    """Write an archive of a `kind`, such as "relayquant.stages.prepared.1", whole or not at all.

    Raises:
        FileError: the folder does not exist or cannot be written.
    """
    names = list(contents.arrays)
    header = {"format": kind, **contents.header, "arrays": names, "texts": list(contents.texts)}

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            # ZipInfo: the time of writing does not get in.
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
    """What `write_archive` wrote; reads no more than the file is long.

    Args:
        what: What the file should be, for messages: "prepared model".
        raises: Class of the error.

    Raises:
        DataError or `raises`: there is no such file, or it is damaged or something else.
    """
    with reading(path, what, raises), zipfile.ZipFile(path) as archive:
        size = path.stat().st_size
        entries = archive.infolist()
        # Stored entries cannot be larger than the file: no archive of a few bytes fills the memory.
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
    """What an .npy file says before its data."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(stream: IO[bytes]) -> ArrayHeader:
    """The header of an .npy; the stream then stands at the data.

    Raises:
        ValueError: it holds Python objects, or what no array is; numpy may raise anything else for
            a damaged one.
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
        raise ValueError(f"shape {shape} and dtype {dtype} are those of no array")
    return header


def check_array_size(header: ArrayHeader, start: int, size: int) -> None:
    """ValueError unless the data that `header` tells of, from byte `start` on, fills `size` bytes:
    asked before memory is.
    """
    needed = start + header.nbytes
    if needed != size:
        raise ValueError(
            f"its header says shape {header.shape} and {header.dtype}, which is "
            f"{format_count(needed, 'byte')}, but it has {size}"
        )


def read_array(archive: zipfile.ZipFile, entry: str) -> np.ndarray:
    """An .npy of an archive; ValueError and others for a damaged one, see `read_array_header`."""
    with archive.open(entry) as stream:
        header = read_array_header(stream)
        check_array_size(header, stream.tell(), archive.getinfo(entry).file_size)
        stream.seek(0)
        return np.lib.format.read_array(stream, allow_pickle=False)
