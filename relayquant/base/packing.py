"""Integers of 2, 3, 4 and 8 bits side by side in bytes: how grouped weights are held and saved.

A *code* is an unsigned integer of so many bits. A row of codes is one string of bits, lowest first:
code k has bits k * bits .. (k + 1) * bits, bit i of the row is bit i % 8 of byte i // 8. For 4 bits
that is the even code in the low half of a byte, as ONNX has int4 and MatMulNBits. Each row begins
with a byte of its own.

A weight in *groups*: codes c (N, K) with one scale, and one zero point z, for each `group_size`
neighbours of a row, of which the last group may have fewer: real = scale * (c - z).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]

#: Bits that a code may have.
CODE_BITS = (2, 3, 4, 8)


def count_bytes(length: int, bits: int) -> int:
    """Bytes of a row of `length` codes."""
    return -(-length * bits // 8)


def count_groups(length: int, group_size: int) -> int:
    """Groups of a row of `length` codes; the last may not be full."""
    return -(-length // group_size)


def middle_code(bits: int) -> int:
    """The zero point of a symmetric scheme: the code of integer 0 in two's complement, moved."""
    return 1 << (bits - 1)


def pack_codes(codes: NDArray[Any], bits: int) -> Codes:
    """Codes (..., K) below 2**bits -> bytes (..., count_bytes(K, bits)); unused bits are 0."""
    codes = np.ascontiguousarray(codes, "uint8")
    if bits == 8:
        return codes
    if bits in (2, 4):
        each = 8 // bits
        short = -codes.shape[-1] % each
        padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
        packed = padded[..., ::each].copy()
        for place in range(1, each):
            packed |= padded[..., place::each] << (bits * place)
        return packed
    planes = (codes[..., None] >> np.arange(bits, dtype="uint8")) & 1
    return np.packbits(planes.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_codes(packed: Codes, bits: int, length: int) -> Codes:
    """Bytes (..., count_bytes(length, bits)) -> codes (..., length)."""
    if bits == 8:
        return packed[..., :length]
    if bits in (2, 4):
        codes = np.empty((*packed.shape, 8 // bits), "uint8")
        for place in range(8 // bits):
            codes[..., place] = (packed >> (bits * place)) & ((1 << bits) - 1)
        return codes.reshape(*packed.shape[:-1], -1)[..., :length]
    planes = np.unpackbits(packed, axis=-1, count=length * bits, bitorder="little")
    planes = planes.reshape(*packed.shape[:-1], length, bits)
    codes = np.zeros(planes.shape[:-1], "uint8")
    for place in range(bits):
        codes |= planes[..., place] << place
    return codes


def spread_groups(values: NDArray[Any], group_size: int, length: int) -> NDArray[Any]:
    """One value for each group (..., G) -> one for each code (..., length)."""
    return np.repeat(values, group_size, axis=-1)[..., :length]
