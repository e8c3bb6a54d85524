"""Floats <-> integers in the same order, of which each has its place, also NaN; part of
`wide_types`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx, topi

#: floats that TVM sorts -> integers of as many bits
KEYS = {"float32": "int32", "float64": "int64"}


def make_keys(numbers: Any) -> Any:
    """Integers in the order of floats: equal for 0 and -0, and the largest for NaN.

    The bits of floats are so ordered, but for those with a sign, which go backwards.
    """
    dtype = KEYS[str(numbers.dtype)]
    most = tirx.const(np.iinfo(dtype).max, dtype)
    infinity = tirx.const(int(np.array(np.inf, str(numbers.dtype)).view(dtype)), dtype)
    bits = topi.reinterpret(numbers, dtype)
    size = topi.bitwise_and(bits, most)
    is_negative = topi.less(bits, tirx.const(0, dtype))
    keys = topi.where(is_negative, topi.negative(size), bits)
    return topi.where(topi.greater(size, infinity), topi.full_like(keys, most), keys)


def read_keys(keys: Any, dtype: str) -> Any:
    """The floats of `make_keys`; 0 of -0."""
    least = tirx.const(np.iinfo(str(keys.dtype)).min, keys.dtype)
    negative = topi.bitwise_or(topi.negative(keys), least)
    is_negative = topi.less(keys, tirx.const(0, keys.dtype))
    return topi.reinterpret(topi.where(is_negative, negative, keys), dtype)
