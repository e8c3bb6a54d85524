"""Keeps the values of all batches on disk between segments, so that memory does not grow with the
data.

The data is cut into shards of consecutive batches. A value has one file per shard, a row of .npy
records; an input of the model, which is written before it is known how many batches there are, has
one file for all. Files appear whole, under names that any process works out from the value's name.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from relayquant.errors import DataError
from relayquant.runtime import empty_aligned

#: The data is cut into at most so many shards. Not more than a state of every observer can be
#: merged for, and enough to keep as many workers busy.
MOST_SHARDS = 32


@dataclass(frozen=True)
class Shard:
    """Batches start..stop-1; `index` counts shards."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def cut_shards(batches: int) -> tuple[Shard, ...]:
    """Equal shards of `batches` batches, the last may be smaller.

    They depend on the number of batches alone: statistics are merged shard by shard, so that
    results are the same however many processes there are.
    """
    size = max(-(-batches // MOST_SHARDS), 1)
    return tuple(
        Shard(i, start, min(start + size, batches))
        for i, start in enumerate(range(0, batches, size))
    )


class ValueWriter:
    """Writes one file of values; it takes its place when the `with` block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        self._temporary, self._file = Path(name), os.fdopen(handle, "wb")

    def __enter__(self) -> ValueWriter:
        return self

    def append(self, array: np.ndarray) -> int:
        """Add the next batch; returns where in the file it starts."""
        offset = self._file.tell()
        # ascontiguousarray would give a scalar one dimension.
        np.lib.format.write_array(self._file, np.asarray(array, order="C"), allow_pickle=False)
        return offset

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class ValueStore:
    """Values by name and shard in a folder; plain data, so that other processes can have it.

    Attributes:
        folder: Where the files are.
        starts: Of the model's inputs: where in its file each shard begins.
    """

    folder: Path
    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def path(self, name: str, shard: Shard | None) -> Path:
        """The file of a value's shard; of an input for None."""
        stem = hashlib.sha256(name.encode()).hexdigest()[:24]
        return self.folder / (stem if shard is None else f"{stem}.{shard.index}")

    def write_input(self, name: str) -> ValueWriter:
        """A writer for all batches of an input."""
        return ValueWriter(self.path(name, None))

    def write(self, name: str, shard: Shard) -> ValueWriter:
        """A writer for one shard of a computed value."""
        return ValueWriter(self.path(name, shard))

    def read(self, name: str, shard: Shard) -> Iterator[np.ndarray]:
        """The batches of one shard of a value, in order.

        Raises:
            DataError: the file is not there or ends early.
        """
        is_input = name in self.starts
        path = self.path(name, None if is_input else shard)
        try:
            with open(path, "rb") as file:
                if is_input:
                    file.seek(self.starts[name][shard.index])
                for _ in range(len(shard)):
                    yield read_record(file)
        except (OSError, ValueError) as error:
            raise DataError(
                f"Value {name!r} of batches {shard.start}..{shard.stop - 1} cannot be read from "
                f"{self.folder}: {error}. Somebody else changed the folder, or a worker does not "
                "see it."
            ) from error

    def drop(self, name: str, shards: tuple[Shard, ...]) -> None:
        """Forget a value and free its disk space; unknown names are ignored."""
        for shard in (None, *shards):
            self.path(name, shard).unlink(missing_ok=True)


def read_record(file: BinaryIO) -> np.ndarray:
    """The next .npy record of a file; ValueError if there is no whole one."""
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"a record of version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    count = math.prod(shape)
    # A damaged header must not ask for more memory than there is data.
    here, end = file.tell(), file.seek(0, 2)
    if dtype.hasobject or count * dtype.itemsize > end - here:
        raise ValueError("the file ends early")
    file.seek(here)
    array = empty_aligned(shape, dtype)
    file.readinto(array.reshape(-1).view("uint8"))
    return array
