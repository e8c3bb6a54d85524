"""Readers: floats of 4 bits (E2M1) with one scale for each group -> levels and scales.

OCP Microscaling Formats 1.0: an element is one of +-0, 0.5, 1, 1.5, 2, 3, 4, 6, and MXFP4 has a
power of two (E8M0) for each 32 elements. Levels are twice the values, which are integers, and
scales are half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relayquant.base.grouping import GroupedWeight, GroupFormat

#: Twice the value of each code, + 128.
E2M1_LEVELS = (128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116)
#: Elements that share a scale, and bytes of their codes.
MXFP4_GROUP, MXFP4_BYTES = 32, 16


def decode_exponents(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return half of the powers of two that E8M0 stores, of the same shape: 2^(e - 128)."""
    return np.ldexp(np.float32(1), exponents.astype("int32") - 128)


def make_mxfp4(codes: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> GroupedWeight:
    """Make a grouped weight (N, K) of packed codes (N, K / 2), the even one in the low half of a
    byte, and exponents (N, K / 32).
    """
    form = GroupFormat(4, MXFP4_GROUP, True, "float32", E2M1_LEVELS)
    scale, zero = decode_exponents(exponents), np.array(128, "uint8")
    return GroupedWeight(np.ascontiguousarray(codes), scale, zero, 2 * codes.shape[1], form)
