"""Constants of a module: find equal ones, measure their size, check their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst

from relayquant.base.runtime import view_constant
from relayquant.ir.rewrite.function import list_functions, map_functions
from relayquant.ir.rewrite.graph import constant_value

#: The square of a larger float32 number is infinite.
LARGEST = float(np.sqrt(np.finfo("float32").max))


def holds_constant(exprs: Iterable[relax.Expr], value: Any) -> bool:
    """Whether a constant in `exprs` has the dtype and the elements of `value`, in any order.

    The order is ignored because readers transpose weights.

    Args:
        exprs: Functions, or values of a function.
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
    """Return the bytes of each element of an array, sorted."""
    return np.sort(np.ascontiguousarray(array).reshape(-1).view(f"V{array.dtype.itemsize}"))


def hash_array(array: np.ndarray) -> bytes:
    """Return a digest of the bits of an array, by which equal constants are found."""
    return hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8)).digest()


def list_constants(func: relax.Function) -> list[GenericConst]:
    """List the tensor constants of a function, each once."""
    found: dict[GenericConst, None] = {}

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, GenericConst) and constant_value(expr) is not None:
            found.setdefault(expr)

    relax.analysis.post_order_visit(func, visit)
    return list(found)


def find_start(constant: GenericConst) -> tuple[str, bytes]:
    """Return the type and the first bits of a constant. Equal constants have the same."""
    return str(constant.ty), view_constant(constant.value).reshape(-1)[:64].tobytes()


def count_huge(array: np.ndarray) -> int:
    """Count the finite elements with a magnitude above `LARGEST`."""
    if max(-float(array.min(initial=0)), float(array.max(initial=0))) <= LARGEST:
        return 0
    return int((np.isfinite(array) & (np.abs(array) > LARGEST)).sum())


def share_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module in which equal tensor constants of all functions are one object.

        a = matmul(x, const1); b = matmul(a, const2)  ->  ... matmul(a, const1)

    `mod` is not changed. Constants are equal if they have the same type and the same bits: 0.0 and
    -0.0 differ, and NaNs with the same bits are equal.

    Readers and stages that make constants end with this step. Rules compute a constant from a
    weight once for each use. Afterwards it is stored, saved and loaded once.
    """
    alike: dict[tuple[str, bytes], list[GenericConst]] = {}
    for func in list_functions(mod).values():
        for constant in list_constants(func):
            alike.setdefault(find_start(constant), []).append(constant)
    first: dict[tuple[str, bytes], GenericConst] = {}
    swaps: dict[GenericConst, GenericConst] = {}
    for (kind, _), constants in alike.items():
        for constant in constants if len(constants) > 1 else ():
            found = first.setdefault((kind, hash_array(view_constant(constant.value))), constant)
            if not found.same_as(constant):
                swaps[constant] = found
    if not swaps:
        return mod
    share = (GenericConst, lambda constant: swaps.get(constant, constant))
    return map_functions(mod, lambda func: tvm_ffi.structural_map(func, share))


def count_constant_bytes(mod: tvm.IRModule) -> int:
    """Count the bytes of all constants: weights, biases and quantization parameters.

    A constant with several readers counts once, also if several functions read it.
    """
    functions = list_functions(mod).values()
    found = dict.fromkeys(constant for func in functions for constant in list_constants(func))
    return sum(view_constant(constant.value).nbytes for constant in found)
