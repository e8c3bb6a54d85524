"""Relay: TVM's binary form of tensors, single (in metadata) and by name (a `.params` file).

We have our own reader, because TVM's C++ reader trusts the sizes in a file. All numbers are
little-endian:

    params := u64 0xF7E58D4F05049CB7, u64 0, u64 n, n x (u64 length, name), u64 n, n x tensor
    tensor := u64 0xDD5E40F096B4A13F, u64 0, i32 device type, i32 device id, i32 ndim,
              u8 code, u8 bits, u16 lanes, ndim x i64, i64 bytes, data
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from relayquant.base.storage.files import write_whole
from relayquant.errors import ModelError, format_count

PARAMS_MAGIC = 0xF7E58D4F05049CB7
TENSOR_MAGIC = 0xDD5E40F096B4A13F

#: Largest rank of a tensor in a model. numpy's limit is 64.
MAX_RANK = 32

#: (type code, bits) of DLPack -> numpy dtype. A bool is stored as one byte.
DTYPES: dict[tuple[int, int], str] = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (1, 1): "bool",
    (6, 8): "bool",
}
#: numpy dtype -> (type code, bits) as TVM 0.19 writes it.
DTYPE_CODES = {dtype: code for code, dtype in reversed(DTYPES.items())}


class _Cursor:
    """A position in a buffer. Every read is checked against the end."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = memoryview(data)
        self.what = what
        self.at = 0

    def take(self, size: int, part: str) -> memoryview:
        left = len(self.data) - self.at
        if size < 0 or size > left:
            raise ModelError(
                f"{self.what} is truncated or corrupt: {part} at byte {self.at} needs "
                f"{format_count(size, 'byte')}, {left} are left.",
                code="RQ502",
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, layout: str, part: str) -> tuple[int, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout), part))

    def expect(self, magic: int, part: str) -> None:
        at = self.at
        found, _ = self.numbers("QQ", part)
        if found != magic:
            raise ModelError(
                f"{self.what} is not what it should be: {part} at byte {at} starts with "
                f"{found:#x} instead of {magic:#x}.",
                code="RQ502",
            )

    def tensor(self, name: str) -> np.ndarray:
        self.expect(TENSOR_MAGIC, f"tensor {name}")
        _, _, ndim = self.numbers("iii", f"tensor {name}")
        code, bits, lanes = self.numbers("BBH", f"tensor {name}")
        dtype = DTYPES.get((code, bits))
        if dtype is None or lanes != 1:
            known = ", ".join(sorted(DTYPE_CODES))
            raise ModelError(
                f"{self.what}: tensor {name} has type code {code}, {format_count(bits, 'bit')}, "
                f"{format_count(lanes, 'lane')}; supported: {known}.",
                code="RQ202",
            )
        if not 0 <= ndim <= MAX_RANK:
            raise ModelError(
                f"{self.what}: tensor {name} has {format_count(ndim, 'axis')}; allowed: 0 to "
                f"{MAX_RANK}.",
                code="RQ502",
            )
        shape = self.numbers(f"{ndim}q", f"shape of tensor {name}")
        (size,) = self.numbers("q", f"size of tensor {name}")
        wanted = math.prod(shape) * np.dtype(dtype).itemsize
        if min(shape, default=0) < 0 or size != wanted:
            raise ModelError(
                f"{self.what}: tensor {name} of shape {shape} and dtype {dtype} has "
                f"{format_count(size, 'byte')} of data instead of {wanted}.",
                code="RQ502",
            )
        return np.frombuffer(self.take(size, f"data of tensor {name}"), dtype).reshape(shape).copy()


def decode_tensor(data: bytes, what: str) -> np.ndarray:
    """Decode the tensor in `data`, which must hold nothing else.

    Raises:
        ModelError: it is truncated, corrupt, or has a dtype that numpy lacks.
    """
    cursor = _Cursor(data, what)
    tensor = cursor.tensor("0")
    if cursor.at != len(data):
        raise ModelError(
            f"{what} has {format_count(len(data) - cursor.at, 'byte')} after its tensor.",
            code="RQ502",
        )
    return tensor


def encode_tensor(array: np.ndarray) -> bytes:
    """Encode one tensor as TVM 0.19 does.

    Raises:
        ModelError: TVM cannot store the dtype.
    """
    array = np.asarray(array, order="C")
    code = DTYPE_CODES.get(str(array.dtype))
    if code is None:
        raise ModelError(
            f"dtype {array.dtype} cannot be saved; allowed: {sorted(DTYPE_CODES)}.", code="RQ203"
        )
    head = struct.pack("<QQiii", TENSOR_MAGIC, 0, 1, 0, array.ndim)
    kind = struct.pack("<BBH", *code, 1)
    shape = struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes)
    return head + kind + shape + array.astype(array.dtype.newbyteorder("<")).tobytes()


def decode_params(data: bytes, what: str = "The params") -> dict[str, np.ndarray]:
    """Decode the bytes of TVM's `save_param_dict` to {name: array}.

    Raises:
        ModelError: they are truncated, corrupt, or something else.
    """
    cursor = _Cursor(data, what)
    cursor.expect(PARAMS_MAGIC, "the header")
    (count,) = cursor.numbers("Q", "the number of names")
    names: list[str] = []
    for index in range(count):
        (length,) = cursor.numbers("Q", f"name {index}")
        try:
            names.append(bytes(cursor.take(length, f"name {index}")).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{what}: name {index} is not UTF-8 text ({error}).", code="RQ502"
            ) from error
    (tensors,) = cursor.numbers("Q", "the number of tensors")
    if tensors != count or len(set(names)) != count:
        raise ModelError(
            f"{what} has {format_count(count, 'name')}, {len(set(names))} of them distinct, and "
            f"{format_count(tensors, 'tensor')}; each tensor needs a unique name.",
            code="RQ502",
        )
    params = {name: cursor.tensor(repr(name)) for name in names}
    if cursor.at != len(data):
        raise ModelError(
            f"{what} has {format_count(len(data) - cursor.at, 'byte')} after its last tensor.",
            code="RQ502",
        )
    return params


def encode_params(params: Mapping[str, np.ndarray]) -> bytes:
    """Encode parameters to the bytes that TVM's `save_param_dict` writes and `load_param_dict`
    reads.
    """
    parts = [struct.pack("<QQQ", PARAMS_MAGIC, 0, len(params))]
    for name in params:
        text = name.encode("utf-8")
        parts += [struct.pack("<Q", len(text)), text]
    parts.append(struct.pack("<Q", len(params)))
    parts += [encode_tensor(np.asarray(array)) for array in params.values()]
    return b"".join(parts)


def save_params(params: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Write a `.params` file, completely or not at all.

    Raises:
        ModelError: TVM cannot store a dtype.
        FileError: the folder cannot be written.
    """
    data = encode_params(params)
    write_whole(Path(path), lambda file: file.write_bytes(data))
