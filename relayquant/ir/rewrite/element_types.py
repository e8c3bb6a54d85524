"""Types of elements that values of a running model may have. Constants may have others, if they are
cast before the model runs.

TVM rounds no number to a float of 8 bits, and has no memory for elements that share a byte: LLVM
computes with the number before the cast, or the run fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm_ffi
from tvm import relax

#: bits of the narrowest numbers that are computed, floats and integers
FLOAT_BITS, INTEGER_BITS = 16, 8

#: for messages
ELEMENT_TYPES = (
    f"floats of {FLOAT_BITS} bits or more, integers of {INTEGER_BITS} bits or more, and bool"
)


def is_too_narrow(dtype: str) -> bool:
    """Return whether no code computes values of a dtype. "" is no dtype."""
    if dtype in ("", "bool"):
        return False
    least = INTEGER_BITS if dtype.startswith(("int", "uint")) else FLOAT_BITS
    return tvm_ffi.dtype(dtype).bits < least


def list_dtypes(ty: Any) -> Iterator[str]:
    """List the dtypes of a value's type, of all fields if it is a tuple."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from list_dtypes(field)
    elif isinstance(ty, relax.TensorType) and ty.dtype is not None:
        yield str(ty.dtype)
