"""Running compiled modules: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

#: How long TVM's idle threads spin before they sleep. Its default of 300,000 turns makes two
#: threads up to 500 times slower than one as soon as another process wants a core; with 0 they lose
#: nothing.
SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"

#: compiles a module into something `Executor` can run
CompileModule = Callable[[tvm.IRModule], Any]


def stop_spinning() -> None:
    """Let TVM's idle threads sleep at once, unless the environment says otherwise.

    TVM reads the variable when its first parallel kernel runs: call this before.
    """
    os.environ.setdefault(SPIN_VARIABLE, "0")


class Executor:
    """A compiled module on this machine's CPU; functions are called by name."""

    def __init__(self, executable: Any) -> None:
        stop_spinning()
        self.vm = relax.VirtualMachine(executable, tvm.cpu())

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays (TVM tensors, shapes); returns its results as new arrays."""
        tensors = [as_tensor(arg) for arg in args]
        return [np.asarray(out.numpy()) for out in flatten_result(self.vm[name](*tensors))]


def as_tensor(array: Any) -> tvm.runtime.Tensor | tvm_ffi.Shape:
    """A TVM tensor on the CPU; TVM tensors and shapes pass through."""
    if isinstance(array, tvm.runtime.Tensor | tvm_ffi.Shape):
        return array
    # ascontiguousarray would give a scalar one dimension.
    return tvm.runtime.tensor(np.asarray(array, order="C"))


def as_shape(sizes: Iterable[int]) -> tvm_ffi.Shape:
    """A value for a parameter that is a shape."""
    return tvm_ffi.Shape(tuple(sizes))


def flatten_result(result: Any) -> list[Any]:
    """Tensors of a result, nested tuples taken apart."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for part in result for tensor in flatten_result(part)]
