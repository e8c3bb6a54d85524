"""Pack integers of 2, 3, 4 and 8 bits into bytes: the storage format of grouped weights.

A *code* is an unsigned integer with 2, 3, 4 or 8 bits. A row of codes is one string of bits, lowest
bit first: code k has the bits k * bits .. (k + 1) * bits, and bit i of the row is bit i % 8 of byte
i // 8. With 4 bits, the even code is in the low half of a byte, as in ONNX's int4 and MatMulNBits.
Each row begins at a byte boundary.

A weight in *groups* has codes c (N, K). Each `group_size` neighbours of a row share one scale and
one zero point z. The last group of a row may be smaller. real = scale * (c - z).

Codes of 4 bits may be numbers of *levels*: 16 integers of 8 bits at any distances, as of float
formats of 4 bits. Then c is levels[code], and z is 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]

#: Supported bits per code.
CODE_BITS = (2, 3, 4, 8)
#: Bits of a code that is the number of a level.
LEVEL_BITS = 4


def count_bytes(length: int, bits: int) -> int:
    """Count the bytes of a row of `length` codes."""
    return -(-length * bits // 8)


def count_groups(length: int, group_size: int) -> int:
    """Count the groups of a row of `length` codes. The last group may be smaller."""
    return -(-length // group_size)


def middle_code(bits: int) -> int:
    """Return the zero point of a symmetric format: the code of integer 0."""
    return 1 << (bits - 1)


def value_bits(bits: int, levels: Sequence[int]) -> int:
    """Return the bits of the values of codes."""
    return 8 if len(levels) else bits


def read_levels(codes: Codes, levels: Sequence[int]) -> Codes:
    """Return the values of codes: the codes, or the levels whose numbers they are."""
    return np.array(levels, "uint8")[codes] if len(levels) else codes


def pack_codes(codes: NDArray[Any], bits: int) -> Codes:
    """Pack codes (..., K) below 2**bits into bytes (..., count_bytes(K, bits)). Unused bits
    are 0.
    """
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
    """Unpack bytes (..., count_bytes(length, bits)) into codes (..., length)."""
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
    """Repeat values per group (..., G) to values per code (..., length)."""
    return np.repeat(values, group_size, axis=-1)[..., :length]
