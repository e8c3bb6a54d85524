"""Bytes of a GGUF tensor in quantized blocks -> grouped weight with the same values.

A row of a tensor is a sequence of blocks. A block holds 32 or 256 neighbours of the row: codes, and
what makes real numbers of them. The layouts are those of `ggml-common.h` in llama.cpp. The order of
a block's bytes in memory is the order of the fields in these tables (d, m: float16).

    Q4_0  d, codes               real = d * (code - 8)         Q5_0, Q8_0 alike
    Q4_1  d, m, codes            real = d * code + m           Q5_1 alike
    Q4_K  d, m, 8 x 6-bit s, t   real = d * s * code - m * t   Q5_K, Q2_K alike
    Q6_K  codes, 16 x int8 s, d  real = d * s * (code - 32)    Q3_K alike
    IQ4_NL  d, codes             real = d * level[code]        IQ4_XS: scales d * s
    MXFP4   e, codes             real = 2^(e - 127) * code as float of 4 bits (e2m1)
    NVFP4   4 x s, codes         real = s as float of 8 bits (e4m3) * code as float of 4 bits

Groups hold such blocks exactly: d * s and m * t have at most 24 bits. Codes of 5 and 6 bits take 8
bits in a grouped weight. Floats of 4 bits are halves of integers up to 12, the levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from relayquant.base.grouping import GroupedWeight, GroupFormat
from relayquant.base.packing import count_bytes, middle_code, pack_codes
from relayquant.base.runtime import map_on_threads
from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.float4 import E2M1_LEVELS, decode_exponents
from relayquant.formats.readers.gguf.header import KINDS

Array = np.ndarray

#: Number of weights that a thread decodes at once.
CHUNK = 1 << 20


@dataclass(frozen=True)
class BlockKind:
    """What the blocks of one of `KINDS` hold.

    Attributes:
        bits, group_size: The format of the grouped weight.
        scale_dtype: Dtype of its scales and offsets: the smallest that holds them.
        has_offset: Whether a group has an offset.
        decode: (n, size) -> packed codes uint8 (n, values * bits / 8), scales and, if there are
            any, offsets (n, values / group_size).
        levels: The values of codes + 128, if the codes are numbers of levels.
    """

    bits: int
    group_size: int
    scale_dtype: str
    has_offset: bool
    decode: Callable[[Array], tuple[Array, ...]]
    levels: tuple[int, ...] = ()


def read_blocks(raw: Array, kind: int, shape: tuple[int, int]) -> GroupedWeight:
    """Convert a tensor's bytes to a grouped weight with the same values.

    Args:
        raw: The bytes of the tensor, uint8, of any shape.
        kind: Type number of the tensor in the file (ggml_type), a key of `BLOCK_KINDS`.
        shape: (N, K) of the weight: outputs first.

    Raises:
        ModelError: there is no such kind, a row is not a whole number of blocks, or `raw` has
            another size.
    """
    if kind not in BLOCK_KINDS:
        known = ", ".join(f"{KINDS[number].name} ({number})" for number in BLOCK_KINDS)
        raise ModelError(
            f"Blocks of type {int(kind)}; allowed: {known}. Quantize the model to one of these.",
            code="RQ202",
        )
    stored, form, (rows, features) = KINDS[kind], BLOCK_KINDS[kind], shape
    each = features // stored.values
    if features % stored.values or raw.size != rows * each * stored.size:
        raise ModelError(
            f"A tensor of {stored.name} blocks has shape {shape} and "
            f"{format_count(raw.size, 'byte')}; allowed: rows of whole blocks, "
            f"{format_count(stored.size, 'byte')} for each "
            f"{format_count(stored.values, 'weight')}. The file is damaged.",
            code="RQ502",
        )
    blocks = raw.reshape(rows, each * stored.size)
    groups = (rows, features // form.group_size)
    codes = np.empty((rows, count_bytes(features, form.bits)), "uint8")
    parts = [np.empty(groups, form.scale_dtype) for _ in range(1 + form.has_offset)]

    def decode_rows(start: int) -> None:
        own = slice(start, start + step)
        block = np.ascontiguousarray(blocks[own]).reshape(-1, stored.size)
        with np.errstate(invalid="ignore"):  # A damaged file may have infinite scales.
            found, *values = form.decode(block)
        codes[own] = found.reshape(-1, codes.shape[1])
        for part, value in zip(parts, values, strict=True):
            part[own] = value.reshape(-1, groups[1])

    step = max(1, CHUNK // max(features, 1))
    for _ in map_on_threads(decode_rows, range(0, rows, step)):
        pass
    own_form = GroupFormat(
        form.bits, form.group_size, not form.has_offset, form.scale_dtype, form.levels
    )
    middle = np.array(middle_code(own_form.value_bits), "uint8")
    zero_point = parts[1] if form.has_offset else middle
    return GroupedWeight(codes, parts[0], zero_point, features, own_form)


def split_fields(blocks: Array, *sizes: int) -> list[Array]:
    """Split blocks (n, bytes) into fields of these sizes and the rest. A size of 2 is float16."""
    fields = np.split(blocks, np.cumsum(sizes), axis=1)
    return [
        np.ascontiguousarray(field).view("<f2") if field.shape[1] == 2 else field
        for field in fields
    ]


def split_bits(packed: Array, width: int, bits: int) -> Array:
    """Split bytes (n, B) into codes (n, B * 8 / bits).

    `width` bytes hold 8 / bits runs of `width` codes: the first run is in the lowest bits.
    """
    shifts = np.arange(0, 8, bits, dtype="uint8")[:, None]
    runs = packed.reshape(len(packed), -1, 1, width) >> shifts
    return (runs & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def pair_codes(packed: Array, width: int) -> Array:
    """Pack codes of 4 bits as neighbours, from bytes (n, B) whose halves are runs of `width` codes:
    the first run is in the lowest bits.

        bytes 2i and 2i + 1 of a run, (h h') (l l')  ->  byte i of the first half of the result,
        (l' l), and byte i of the second, (h' h)
    """
    pairs = packed.reshape(len(packed), -1, width).view("<u2")
    found = np.empty((*pairs.shape[:2], 2, width // 2), "uint8")
    low, high = pairs & np.uint16(0x0F0F), pairs >> np.uint16(4) & np.uint16(0x0F0F)
    for half, codes in enumerate((low, high)):
        found[:, :, half] = codes | codes >> np.uint16(4)
    return found.reshape(len(packed), -1)


def split_scales(packed: Array) -> tuple[Array, Array]:
    """Split 12 bytes (n, 12) of Q4_K into scales and minimums of 6 bits, float32 (n, 8)."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.hstack([low & 63, (rest & 15) | (low >> 2 & 48)]).astype("float32"),
        np.hstack([high & 63, (rest >> 4) | (high >> 2 & 48)]).astype("float32"),
    )


def decode_q4_0(blocks: Array) -> tuple[Array, ...]:
    scale, codes = split_fields(blocks, 2)
    return pair_codes(codes, 16), scale


def decode_q4_1(blocks: Array) -> tuple[Array, ...]:
    scale, offset, codes = split_fields(blocks, 2, 2)
    return pair_codes(codes, 16), scale, offset


def decode_q5_0(blocks: Array) -> tuple[Array, ...]:
    scale, high, low = split_fields(blocks, 2, 4)
    return join_fifth_bits(low, high) + np.uint8(128 - 16), scale


def decode_q5_1(blocks: Array) -> tuple[Array, ...]:
    scale, offset, high, low = split_fields(blocks, 2, 2, 4)
    return join_fifth_bits(low, high), scale, offset


def join_fifth_bits(low: Array, high: Array) -> Array:
    """Join 4 low bits (n, 16 bytes) and one high bit (n, 4 bytes) of 32 codes."""
    return split_bits(low, 16, 4) | np.unpackbits(high, axis=1, bitorder="little") << 4


def decode_q8_0(blocks: Array) -> tuple[Array, ...]:
    scale, codes = split_fields(blocks, 2)
    return codes ^ np.uint8(128), scale  # int8 + 128


def decode_q2_k(blocks: Array) -> tuple[Array, ...]:
    scales, codes, d, m = split_fields(blocks, 16, 64, 2)
    scale, minimum = d.astype("float32") * (scales & 15), m.astype("float32") * (scales >> 4)
    return pack_codes(split_bits(codes, 32, 2), 2), scale, -minimum


def decode_q3_k(blocks: Array) -> tuple[Array, ...]:
    high, low, scales, d = split_fields(blocks, 32, 64, 12)
    scale = split_bits(scales[:, :8], 8, 4) | split_bits(scales[:, 8:], 4, 2) << 4
    codes = split_bits(low, 32, 2) | split_bits(high, 32, 1) << 2
    return pack_codes(codes, 3), d.astype("float32") * (scale.astype("float32") - 32)


def decode_q4_k(blocks: Array) -> tuple[Array, ...]:
    d, m, scales, codes = split_fields(blocks, 2, 2, 12)
    scale, minimum = split_scales(scales)
    return pair_codes(codes, 32), d.astype("float32") * scale, -(m.astype("float32") * minimum)


def decode_q5_k(blocks: Array) -> tuple[Array, ...]:
    d, m, scales, high, low = split_fields(blocks, 2, 2, 12, 32)
    scale, minimum = split_scales(scales)
    codes = split_bits(low, 32, 4) | split_bits(high, 32, 1) << 4
    return codes, d.astype("float32") * scale, -(m.astype("float32") * minimum)


def decode_q6_k(blocks: Array) -> tuple[Array, ...]:
    low, high, scales, d = split_fields(blocks, 128, 64, 16)
    codes = split_bits(low, 64, 4) | split_bits(high, 32, 2) << 4
    return codes + np.uint8(128 - 32), d.astype("float32") * scales.view("int8")


def decode_iq4_xs(blocks: Array) -> tuple[Array, ...]:
    d, high, low, codes = split_fields(blocks, 2, 2, 4)
    bits = high.view("<u2") >> np.arange(0, 16, 2, dtype="uint16") & 3
    scale = split_bits(low, 1, 4) | bits.astype("uint8") << 4
    return pair_codes(codes, 16), d.astype("float32") * (scale.astype("float32") - 32)


def decode_mxfp4(blocks: Array) -> tuple[Array, ...]:
    exponent, codes = split_fields(blocks, 1)
    return pair_codes(codes, 16), decode_exponents(exponent)


def decode_nvfp4(blocks: Array) -> tuple[Array, ...]:
    """Scales are positive floats of 8 bits (E4M3), and 0 for the code of NaN, as in llama.cpp."""
    packed, codes = split_fields(blocks, 4)
    exponent, fraction = packed >> 3 & 15, packed & 7
    is_normal = exponent > 0
    digits = (fraction + np.where(is_normal, 8, 0)).astype("float32")
    scale = np.ldexp(digits, np.maximum(exponent, 1).astype("int32") - 11)
    return pair_codes(codes, 8), np.where(packed == 0x7F, np.float32(0), scale)


#: Levels of IQ4_NL, + 128.
IQ4_LEVELS = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)

#: By type number (ggml_type).
BLOCK_KINDS: Mapping[int, BlockKind] = {
    2: BlockKind(4, 32, "float16", False, decode_q4_0),
    3: BlockKind(4, 32, "float16", True, decode_q4_1),
    6: BlockKind(8, 32, "float16", False, decode_q5_0),
    7: BlockKind(8, 32, "float16", True, decode_q5_1),
    8: BlockKind(8, 32, "float16", False, decode_q8_0),
    10: BlockKind(2, 16, "float32", True, decode_q2_k),
    11: BlockKind(3, 16, "float32", False, decode_q3_k),
    12: BlockKind(4, 32, "float32", True, decode_q4_k),
    13: BlockKind(8, 32, "float32", True, decode_q5_k),
    14: BlockKind(8, 16, "float32", False, decode_q6_k),
    20: BlockKind(4, 32, "float16", False, decode_q4_0, IQ4_LEVELS),
    23: BlockKind(4, 32, "float32", False, decode_iq4_xs, IQ4_LEVELS),
    39: BlockKind(4, 32, "float32", False, decode_mxfp4, E2M1_LEVELS),
    40: BlockKind(4, 16, "float32", False, decode_nvfp4, E2M1_LEVELS),
}
