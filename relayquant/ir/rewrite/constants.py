"""Constants of a module: is a weight that is handed over there already, are its numbers usable?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tvm import relax

from relayquant.ir.rewrite.graph import constant_value

#: Squares of larger float32 numbers are infinite.
LARGEST = float(np.sqrt(np.finfo("float32").max))


def holds_constant(exprs: Iterable[relax.Expr], value: Any) -> bool:
    """Whether one of the constants in `exprs` has the dtype and the numbers of `value`, in any
    layout: importers turn weights.

    Args:
        exprs: Functions, or values of one.
        value: A numpy array or a TVM tensor.
    """
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    wanted = list_bytes(array)
    found = []

    def visit(expr: relax.Expr) -> None:
        other = constant_value(expr)
        if other is not None and (other.dtype, other.size) == (array.dtype, array.size):
            found.append(bool((list_bytes(other) == wanted).all()))

    for expr in exprs:
        relax.analysis.post_order_visit(expr, visit)
        if any(found):
            return True
    return False


def list_bytes(array: np.ndarray) -> np.ndarray:
    """The elements of an array as bytes, sorted."""
    return np.sort(np.ascontiguousarray(array).reshape(-1).view(f"V{array.dtype.itemsize}"))


def count_huge(array: np.ndarray) -> int:
    """How many finite elements are beyond `LARGEST`."""
    if max(-float(array.min(initial=0)), float(array.max(initial=0))) <= LARGEST:
        return 0
    return int((np.isfinite(array) & (np.abs(array) > LARGEST)).sum())
