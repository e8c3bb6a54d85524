"""One file of plain data: a JSON header, texts and arrays. Written whole, read without executing
anything.

A zip archive without compression that depends on its contents alone: the same data gives the same
bytes.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.errors import DataError
from relayquant.files import write_whole

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
    """Write an archive of a `kind`, such as "relayquant.prepared.1", whole or not at all.

    Raises:
        OSError: the folder does not exist or cannot be written.
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


def read_archive(path: Path, kind: str, what: str) -> Archive:
    """What `write_archive` wrote; reads no more than the file is long.

    Args:
        what: What the file should be, for messages: "prepared model".

    Raises:
        DataError: there is no such file, or it is damaged or something else.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            # Stored entries cannot be larger than the file: no archive of a few bytes fills the
            # memory.
            is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            total = sum(entry.file_size for entry in entries)
            if not is_plain or total > size or len(entries) > MAX_ENTRIES:
                raise DataError(
                    f"{path} is no {what}: its entries are not as relayquant writes them."
                )
            header = json.loads(archive.read(HEADER))
            if not isinstance(header, dict) or header.get("format") != kind:
                raise DataError(f"{path} is no {what} of format {kind!r}.")
            arrays = {}
            for i, name in enumerate(header["arrays"]):
                with archive.open(f"{i}.npy") as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
            texts = {name: archive.read(name).decode() for name in header["texts"]}
            return Archive(header, arrays, texts)
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no {what}, or is damaged: {error}.") from error
