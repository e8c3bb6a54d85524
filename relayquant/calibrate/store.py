"""Keeps intermediate values of all batches on disk between segments, so that memory does not grow
with the data.

One temporary file per value; a value's file is deleted when nothing reads it any more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np


@dataclass(frozen=True, eq=False)
class _Record:
    """One value: its file and where each batch lies in it."""

    file: IO[bytes]
    path: Path
    batches: list[tuple[int, tuple[int, ...], np.dtype]] = field(default_factory=list)


class ValueStore:
    """Arrays by (value name, batch), in a temporary directory that lives as long as the `with`
    block.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._parent = directory
        self._records: dict[str, _Record] = {}
        self._count = 0

    def __enter__(self) -> ValueStore:
        self._directory = tempfile.TemporaryDirectory(prefix="relayquant-", dir=self._parent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self._records):
            self.drop(name)
        self._directory.cleanup()

    def append(self, name: str, array: np.ndarray) -> None:
        """Add the next batch of a value."""
        if name not in self._records:
            path = Path(self._directory.name) / str(self._count)
            self._count += 1
            self._records[name] = _Record(open(path, "w+b"), path)  # noqa: SIM115
        record = self._records[name]
        offset = record.file.seek(0, 2)
        array = np.asarray(array, order="C")  # ascontiguousarray would give a scalar one dimension
        array.tofile(record.file)
        record.batches.append((offset, array.shape, array.dtype))

    def read(self, name: str, batch: int) -> np.ndarray:
        """One batch of a value."""
        record = self._records[name]
        offset, shape, dtype = record.batches[batch]
        record.file.seek(offset)
        count = int(np.prod(shape, dtype="int64"))
        return np.fromfile(record.file, dtype, count).reshape(shape)

    def read_all(self, name: str) -> Iterator[np.ndarray]:
        """Every batch of a value, in order."""
        for batch in range(len(self._records[name].batches)):
            yield self.read(name, batch)

    def drop(self, name: str) -> None:
        """Forget a value and free its disk space; unknown names are ignored."""
        record = self._records.pop(name, None)
        if record is not None:
            record.file.close()
            record.path.unlink()
