"""Numbers <-> integers in the same order, of which each has its place, also NaN; part of
`wide_types`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx, topi

#: numbers that TVM sorts only without NaN, or not at all -> integers of as many bits
KEYS = {"float32": "int32", "float64": "int64", "uint64": "int64"}
UNSIGNED = frozenset(["uint64"])


def make_keys(numbers: Any) -> Any:
    """Integers in the order of numbers: for floats equal of 0 and -0, and the largest of NaN.

    The bits of floats are so ordered, but for those with a sign, which go backwards; those of
    integers without a sign are, once the upper half of them has one.
    """
    if str(numbers.dtype) in UNSIGNED:
        return flip_sign(topi.reinterpret(numbers, KEYS[str(numbers.dtype)]))
    dtype = KEYS[str(numbers.dtype)]
    most = tirx.const(np.iinfo(dtype).max, dtype)
    infinity = tirx.const(int(np.array(np.inf, str(numbers.dtype)).view(dtype)), dtype)
    bits = topi.reinterpret(numbers, dtype)
    size = topi.bitwise_and(bits, most)
    is_negative = topi.less(bits, tirx.const(0, dtype))
    keys = topi.where(is_negative, topi.negative(size), bits)
    return topi.where(topi.greater(size, infinity), topi.full_like(keys, most), keys)


def read_keys(keys: Any, dtype: str) -> Any:
    """The numbers of `make_keys`; 0 of -0."""
    if dtype in UNSIGNED:
        return topi.reinterpret(flip_sign(keys), dtype)
    least = tirx.const(np.iinfo(str(keys.dtype)).min, keys.dtype)
    negative = topi.bitwise_or(topi.negative(keys), least)
    is_negative = topi.less(keys, tirx.const(0, keys.dtype))
    return topi.reinterpret(topi.where(is_negative, negative, keys), dtype)


def flip_sign(integers: Any) -> Any:
    """Each with its highest bit changed."""
    dtype = str(integers.dtype)
    return topi.bitwise_xor(integers, tirx.const(np.iinfo(dtype).min, dtype))
