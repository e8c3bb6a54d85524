"""GGUF file -> its header: metadata, and the place of each tensor. No tensor is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Files are untrusted, so every
count and offset is checked against the file's size before it is believed.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from relayquant.base.storage.files import DEFAULT_MAX_BYTES, PathLike, check_file, reading
from relayquant.errors import ModelError, format_count

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: default alignment of tensors in bytes
ALIGNMENT = 32
MOST_AXES = 4
#: type number of a metadata value -> numpy dtype
NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9
#: bytes of the length before a string
LENGTH = 8


class StoredKind(NamedTuple):
    """How a tensor is stored: blocks of `values` in `size` bytes each."""

    name: str
    values: int
    size: int


#: type number of a tensor -> kind of its blocks
KINDS = {
    0: StoredKind("F32", 1, 4), 1: StoredKind("F16", 1, 2), 2: StoredKind("Q4_0", 32, 18),
    3: StoredKind("Q4_1", 32, 20), 6: StoredKind("Q5_0", 32, 22), 7: StoredKind("Q5_1", 32, 24),
    8: StoredKind("Q8_0", 32, 34), 9: StoredKind("Q8_1", 32, 40), 10: StoredKind("Q2_K", 256, 84),
    11: StoredKind("Q3_K", 256, 110), 12: StoredKind("Q4_K", 256, 144),
    13: StoredKind("Q5_K", 256, 176), 14: StoredKind("Q6_K", 256, 210),
    15: StoredKind("Q8_K", 256, 292), 16: StoredKind("IQ2_XXS", 256, 66),
    17: StoredKind("IQ2_XS", 256, 74), 18: StoredKind("IQ3_XXS", 256, 98),
    19: StoredKind("IQ1_S", 256, 50), 20: StoredKind("IQ4_NL", 32, 18),
    21: StoredKind("IQ3_S", 256, 110), 22: StoredKind("IQ2_S", 256, 82),
    23: StoredKind("IQ4_XS", 256, 136), 24: StoredKind("I8", 1, 1), 25: StoredKind("I16", 1, 2),
    26: StoredKind("I32", 1, 4), 27: StoredKind("I64", 1, 8), 28: StoredKind("F64", 1, 8),
    29: StoredKind("IQ1_M", 256, 56), 30: StoredKind("BF16", 1, 2),
    34: StoredKind("TQ1_0", 256, 54),
    35: StoredKind("TQ2_0", 256, 66), 39: StoredKind("MXFP4", 32, 17),
    40: StoredKind("NVFP4", 64, 36), 41: StoredKind("Q1_0", 128, 18),
}  # fmt: skip


@dataclass(frozen=True)
class GgufPlace:
    """The place of a tensor in a file.

    Attributes:
        kind: Its type number, a key of `KINDS`.
        shape: Shape of its values, outermost axis first: (outputs, inputs) for a weight.
        offset: Its first byte, from the start of the file.
        size: Its bytes.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensors.

    Attributes:
        metadata: Key -> number, text, list of texts, or array of numbers.
        tensors: Name -> place, in file order.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufPlace]


def read_header(path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES) -> GgufHeader:
    """Read the header of a GGUF file, little-endian, of version 2 or 3.

    Raises:
        ModelError: the file does not exist, is too large, or is damaged, or a tensor has an unknown
            type.
    """
    with (
        reading(path, "GGUF file", ModelError),
        check_file(path, max_bytes).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return HeaderReader(data).read()


class HeaderReader:
    """Reads values one after another. `at` is the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def read(self) -> GgufHeader:
        """Read everything before the tensors. ValueError if it is damaged."""
        if self.take(len(MAGIC)) != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        version = self.take_number("<u4")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version:#x}; readable: 2 and 3, little-endian")
        tensors, keys = self.take_number("<u8"), self.take_number("<u8")
        metadata: dict[str, Any] = {}
        for _ in range(self.check_count(keys, LENGTH)):
            key = self.take_text()
            if key in metadata:
                raise ValueError(f"it has {key!r} twice")
            metadata[key] = self.take_value(self.take_number("<u4"))
        infos = [self.take_tensor() for _ in range(self.check_count(tensors, LENGTH))]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise ValueError(f"its alignment is {alignment!r}; allowed: a multiple of 8")
        start = -(-self.at // alignment) * alignment
        places: dict[str, GgufPlace] = {}
        for name, kind, shape, offset in infos:
            if name in places:
                raise ValueError(f"it has the tensor {name!r} twice")
            places[name] = self.find_place(name, kind, shape, offset, start, alignment)
        if sum(place.size for place in places.values()) > len(self.data):
            raise ValueError("its tensors overlap")
        return GgufHeader(metadata, places)

    def find_place(
        self, name: str, kind: int, shape: tuple[int, ...], offset: int, start: int, alignment: int
    ) -> GgufPlace:
        """Return where a tensor lies, `offset` bytes after `start`. ValueError if outside."""
        found = KINDS.get(kind)
        if found is None:
            raise ValueError(f"tensor {name!r} has type {kind}, which is unknown")
        if shape[-1] % found.values:
            raise ValueError(
                f"tensor {name!r} has rows of {format_count(shape[-1], 'value')}; {found.name} "
                f"stores {found.values} together"
            )
        size = math.prod(shape) // found.values * found.size
        if offset % alignment or start + offset + size > len(self.data):
            raise ValueError(
                f"tensor {name!r} has {format_count(size, 'byte')} at {start + offset}, not "
                f"aligned to {alignment} or behind the end at {len(self.data)}"
            )
        return GgufPlace(kind, shape, start + offset, size)

    def check_count(self, count: int, size: int) -> int:
        """Return the count. ValueError if as many values, of `size` bytes or more each, do not fit
        in the rest of the file.
        """
        if count * size > len(self.data) - self.at:
            raise ValueError(f"it ends before {format_count(count, 'value')} at {self.at}")
        return count

    def take(self, size: int) -> bytes:
        self.check_count(size, 1)
        self.at += size
        return self.data[self.at - size : self.at]

    def take_number(self, dtype: str) -> Any:
        return self.take_numbers(dtype, 1)[0].item()

    def take_numbers(self, dtype: str, count: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        self.check_count(count, size)
        return np.frombuffer(self.take(count * size), dtype)

    def take_text(self) -> str:
        return self.take_texts(1)[0]

    def take_texts(self, count: int) -> list[str]:
        """Read texts. A vocabulary has 100,000 and more, so this loop is short."""
        self.check_count(count, LENGTH)
        data, at, end, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", data, at)
            at += LENGTH + size
            if at > end:
                raise ValueError(f"it ends before {format_count(size, 'byte')} of a text")
            found.append(data[at - size : at].decode("utf-8"))
        self.at = at
        return found

    def take_value(self, kind: int) -> Any:
        """Read a value of metadata."""
        if kind == STRING:
            return self.take_text()
        if kind == ARRAY:
            kind, count = self.take_number("<u4"), self.take_number("<u8")
            return self.take_texts(count) if kind == STRING else self.take_array(kind, count)
        return self.take_array(kind, 1)[0].item()

    def take_array(self, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            raise ValueError(f"it has a value of type {kind}; readable: numbers, texts, arrays")
        return self.take_numbers(NUMBERS[kind], count)

    def take_tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read (name, type, shape, offset)."""
        name, axes = self.take_text(), self.take_number("<u4")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"tensor {name!r} has {format_count(axes, 'axis')}; allowed: 1 to 4")
        shape = tuple(reversed(self.take_numbers("<u8", axes).tolist()))
        return name, self.take_number("<u4"), shape, self.take_number("<u8")
