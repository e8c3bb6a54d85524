"""ONNX reader: packed constants of com.microsoft -> plain arrays."""

from __future__ import annotations

import numpy as np

from relayquant.base.packing import count_bytes, count_groups, unpack_codes
from relayquant.errors import format_count
from relayquant.formats.readers.refusal import Refusal

#: Values of the codes of MatMulBnb4 by quant_type, in units of the largest magnitude of a block:
#: FP4, whose first bit is the sign, and NF4, the quantiles of a normal distribution (QLoRA,
#: appendix E).
_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
BNB4 = {0: np.concatenate([_FP4, -_FP4]).astype("float32"), 1: np.array(_NF4, "float32")}


def unpack_last(array: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpack codes (..., count) from bytes (..., n), the first code in the lowest bits.

    Raises:
        Refusal: the number of bytes does not fit `count` codes.
    """
    if array.shape[-1] != count_bytes(count, bits):
        raise Refusal(
            f"its zero points have {format_count(array.shape[-1], 'byte')} in a row; allowed: "
            f"{count_bytes(count, bits)}"
        )
    return unpack_codes(array, bits, count)


def unpack_bnb4(
    codes: np.ndarray, largest: np.ndarray, kind: int, form: tuple[int, int, int]
) -> np.ndarray:
    """Dequantize the weight (N, K) of a MatMulBnb4, float32.

    Blocks are of the flattened weight. The first code of a byte is in the high bits. Values are
    multiplied by the largest magnitude of the block.

    Args:
        codes: uint8, two codes per byte.
        largest: Largest magnitude of each block.
        kind: quant_type.
        form: N, K and block_size.

    Raises:
        Refusal: the kind is unknown, or the number of bytes or blocks does not fit the weight.
    """
    rows, features, size = form
    count = rows * features
    if kind not in BNB4:
        raise Refusal(f"quant_type is {kind}; allowed: 0 (FP4) and 1 (NF4)")
    blocks = count_groups(count, size) if size > 0 else 0
    if codes.size != (count + 1) // 2 or largest.size != blocks:
        raise Refusal(
            f"its weight has {format_count(codes.size, 'byte')} and "
            f"{format_count(largest.size, 'block')}; allowed with N={rows}, K={features}, "
            f"block_size={size}: {(count + 1) // 2} and {blocks}"
        )
    pairs = np.stack([codes.ravel() >> 4, codes.ravel() & 15], axis=1)
    values = BNB4[kind][pairs.ravel()[:count]]
    scales = np.repeat(largest.ravel().astype("float32"), size)[:count]
    return (values * scales).reshape(rows, features)
