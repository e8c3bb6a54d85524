"""Store for the values of all batches, between subgraphs: on disk, but for what a `ValueMemory` has
room for. Memory does not grow with the data.

The data is split into shards of consecutive batches. A computed value has one file per shard. An
input of the model has one file for all shards, because it is written before the number of batches
is known. A file is a sequence of records. It is never incomplete, and its name follows from the
value's name, so every process can find it. Files are memory-mapped: parts that nothing reads are
not loaded, and compiled code reads the values in place.

A record is a line of JSON (dtype, shape in memory order, axes of that order) and the values in
memory order. Both are padded to a multiple of 64 bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from relayquant.base.runtime import ALIGNMENT, align_array, find_memory_axes, invert_axes
from relayquant.base.storage.files import writing
from relayquant.errors import DataError

#: Largest number of shards. Every observer can merge this many states, and it is enough to keep as
#: many workers busy.
MOST_SHARDS = 32
#: bytes of computed values that need no file
MOST_KEPT_BYTES = 1 << 27
#: advice for a damaged checkpoint
BEGIN_ANEW = "Delete the checkpoint to start again."
#: size limit of a record's header
MOST_HEADER_BYTES = 1 << 10


@dataclass(frozen=True)
class Shard:
    """Batches start..stop-1. `index` counts shards."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def cut_shards(batches: int) -> tuple[Shard, ...]:
    """Split `batches` batches into equal shards. The last may be smaller.

    The split depends only on the number of batches. Statistics are merged shard by shard, so the
    result is the same for any number of processes.
    """
    size = max(-(-batches // MOST_SHARDS), 1)
    return tuple(
        Shard(i, start, min(start + size, batches))
        for i, start in enumerate(range(0, batches, size))
    )


class ValueWriter:
    """Writes one file of values. The file gets its name when the `with` block ends without an
    error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.parent / f".{path.name}-{secrets.token_hex(8)}"
        with writing(path):
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._offset = 0

    def __enter__(self) -> ValueWriter:
        return self

    def append(self, array: np.ndarray) -> int:
        """Add the next batch and return its offset in the file."""
        offset = self._offset
        axes = find_memory_axes(array)
        # ascontiguousarray would give a scalar one dimension.
        memory = np.asarray(array.transpose(axes), order="C")
        header = make_header(memory.dtype.name, memory.shape, axes)  # bfloat16 has no other
        content = memory.reshape(-1).view("uint8").data
        with writing(self._path):
            padding = bytes(-memory.nbytes % ALIGNMENT)
            self._offset += write_all(self._file, [header, content, padding])
        return offset

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with writing(self._path):
            os.close(self._file)
            if error is None:
                os.replace(self._temporary, self._path)
        if error is not None:
            self._temporary.unlink(missing_ok=True)


@functools.lru_cache(maxsize=256)
def make_header(dtype: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> bytes:
    """Return the first line of a record, padded."""
    header = json.dumps({"dtype": dtype, "shape": shape, "axes": axes}).encode() + b"\n"
    return header + bytes(-len(header) % ALIGNMENT)


def write_all(file: int, parts: Sequence[bytes | memoryview]) -> int:
    """Write all parts, in one system call if possible. Return the number of bytes."""
    done = os.writev(file, parts)
    for part in parts:
        rest, done = memoryview(part)[done:], max(done - len(part), 0)
        while rest:
            rest = rest[os.write(file, rest) :]
    return sum(map(len, parts))


class ValueMemory:
    """Computed values of one process that need no file, at most `most` bytes. By the path that the
    file would have. Any thread may call.
    """

    def __init__(self, most: int) -> None:
        self._values: dict[Path, list[np.ndarray]] = {}
        self._room = most
        self._lock = threading.Lock()

    def reserve(self, size: int) -> bool:
        """Whether there is room for so many bytes, which are taken then. Negative: give back."""
        with self._lock:
            if size > self._room:
                return False
            self._room -= size
            return True

    def put(self, path: Path, arrays: list[np.ndarray]) -> None:
        """Store arrays that `reserve` took room for."""
        self._values[path] = arrays

    def find(self, path: Path) -> list[np.ndarray] | None:
        """Return the arrays stored under a path; None if there are none."""
        return self._values.get(path)

    def drop(self, path: Path) -> bool:
        """Forget what is stored under a path. Return whether there was anything."""
        arrays = self._values.pop(path, None)
        self.reserve(-sum(array.nbytes for array in arrays or ()))
        return arrays is not None


class KeptWriter:
    """Keeps a value's shard in memory while there is room, and writes it to its file if not."""

    def __init__(self, path: Path, memory: ValueMemory) -> None:
        self._path, self._memory = path, memory
        self._arrays: list[np.ndarray] = []
        self._file: ValueWriter | None = None

    def __enter__(self) -> KeptWriter:
        return self

    def append(self, array: np.ndarray) -> None:
        """Add the next batch, whose memory nobody writes to any more."""
        if self._file is None and self._memory.reserve(array.nbytes):
            axes = find_memory_axes(array)
            self._arrays.append(align_array(array.transpose(axes)).transpose(invert_axes(axes)))
            return
        if self._file is None:
            self._file = ValueWriter(self._path)
            for kept in self._arrays:
                self._file.append(kept)
            self._forget()
        self._file.append(array)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)
        elif error is None:
            self._memory.put(self._path, self._arrays)
        else:
            self._forget()

    def _forget(self) -> None:
        self._memory.reserve(-sum(array.nbytes for array in self._arrays))
        self._arrays = []


@dataclass(frozen=True)
class ValueStore:
    """Values by name and shard in a folder. Without a memory it is plain data, so other processes
    can use it.

    Attributes:
        folder: The folder with the files.
        starts: For each input of the model: offset of each shard in its file.
        memory: Holds computed values that are not in files.
    """

    folder: Path
    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory: ValueMemory | None = None

    def path(self, name: str, shard: Shard | None) -> Path:
        """Return the file of a value's shard, or of an input if the shard is None."""
        return make_path(self.folder, name, None if shard is None else shard.index)

    def write_input(self, name: str) -> ValueWriter:
        """Return a writer for all batches of an input."""
        return ValueWriter(self.path(name, None))

    def write(self, name: str, shard: Shard) -> ValueWriter | KeptWriter:
        """Return a writer for one shard of a computed value, which takes the place of another."""
        path = self.path(name, shard)
        if self.memory is None:
            return ValueWriter(path)
        self.memory.drop(path)
        return KeptWriter(path, self.memory)

    def read(self, name: str, shard: Shard) -> Iterator[np.ndarray]:
        """Return the batches of one shard of a value, in order. Do not write into them.

        Raises:
            DataError: the file is missing or truncated.
        """
        is_input = name in self.starts
        path = self.path(name, None if is_input else shard)
        kept = None if self.memory is None else self.memory.find(path)
        if kept is not None:
            yield from kept
            return
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                offset = self.starts[name][shard.index] if is_input else 0
                for _ in range(len(shard)):
                    array, offset = read_record(file.fileno(), offset, size)
                    yield array
        except (OSError, ValueError) as error:
            raise DataError(
                f"Value {name!r} of batches {shard.start}..{shard.stop - 1} cannot be read from "
                f"{self.folder}: {error}. Somebody else changed the folder, or a worker does not "
                "see it.",
                code="RQ502",
            ) from error

    def drop(self, name: str, shards: tuple[Shard, ...]) -> None:
        """Delete a value and free its space. Unknown names are ignored."""
        for shard in (None, *shards):
            path = self.path(name, shard)
            if self.memory is None or not self.memory.drop(path):
                path.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1 << 12)
def make_path(folder: Path, name: str, index: int | None) -> Path:
    """Return the path of a value's shard with this index, or of an input if it is None."""
    stem = hashlib.sha256(name.encode()).hexdigest()[:24]
    return folder / (stem if index is None else f"{stem}.{index}")


def read_record(file: int, offset: int, size: int) -> tuple[np.ndarray, int]:
    """Return the record at `offset` of an open file of `size` bytes as memory of the file, and
    the offset of the next one. Raise ValueError if it is not complete.
    """
    line, found, _ = os.pread(file, MOST_HEADER_BYTES, offset).partition(b"\n")
    if not found:
        raise ValueError("the file ends early")
    dtype, shape, axes = parse_header(line)
    start = round_up(offset + len(line) + 1)
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    # A damaged header must not ask for more than the file has.
    if round_up(end) > size:
        raise ValueError("the file ends early")
    memory = np.empty(0, dtype)
    if count:
        # One batch at a time: mapped memory counts as used while something holds it.
        page = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file, end - page, access=mmap.ACCESS_COPY, offset=page)
        memory = np.frombuffer(mapped, dtype, count, start - page)
    return memory.reshape(shape).transpose(axes), round_up(end)


@functools.lru_cache(maxsize=256)
def parse_header(text: bytes) -> tuple[np.dtype, tuple[int, ...], tuple[int, ...]]:
    """Return (dtype, shape in memory order, axes that restore the logical order). Raise
    ValueError if the header is damaged.
    """
    try:
        header = json.loads(text)
        dtype = np.dtype(header["dtype"])
        sizes, order = tuple(map(int, header["shape"])), tuple(map(int, header["axes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("a header is damaged") from error
    if dtype.hasobject or min(sizes, default=0) < 0 or sorted(order) != list(range(len(sizes))):
        raise ValueError("a header is damaged")
    return dtype, sizes, tuple(int(axis) for axis in np.argsort(order))


def round_up(offset: int) -> int:
    """Round up to the next multiple of 64."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
