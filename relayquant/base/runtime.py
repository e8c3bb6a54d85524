"""Running compiled modules: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import concurrent.futures as futures
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import tvm
import tvm_ffi
from threadpoolctl import ThreadpoolController
from tvm import relax

from relayquant.base import _tvm
from relayquant.errors import ConfigError, DataError, suggest_sizes

#: How long TVM's idle threads spin before they sleep. Its default of 300,000 turns makes two
#: threads up to 500 times slower than one as soon as another process wants a core, and as few as 30
#: a hundred times. With 0 they lose nothing, but to wake one takes about 10 microseconds.
SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"

#: bytes that the address of a tensor must be a multiple of
ALIGNMENT = 64
#: dtypes of tensors that numpy looks at without a copy
_VIEWED = frozenset(
    [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64"]
)

S = TypeVar("S")
T = TypeVar("T")

#: compiles a module into something `Executor` can run
CompileModule = Callable[[tvm.IRModule], Any]


class FunctionRunner(Protocol):
    """Runs the functions of a module by name; several threads may do so at once."""

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays and shapes; returns its results as new arrays."""
        ...


#: makes the functions of a module runnable
LoadModule = Callable[[tvm.IRModule], FunctionRunner]


def count_cores() -> int:
    """Cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux; elsewhere all cores count
    return (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()) or 1


def count_threads() -> int:
    """Threads that this process may keep busy: TVM_NUM_THREADS, or the cores it may use."""
    wanted = os.environ.get("TVM_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return count_cores()


def limit_blas() -> Any:
    """A context in which numpy's and scipy's matrix products and factorizations run on one thread.

    Their threads spin while they wait for one another: beside a busy process, or when several
    threads compute products, that takes a hundred times as long as the work. And the bits of a sum
    do not depend on the number of cores.
    """
    return find_thread_pools().limit(limits=1, user_api="blas")


def map_on_threads(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """`function` of each item, in order, computed on `count_threads()` threads.

    Items are taken from the iterator by the caller's thread, and not many more of them than there
    are threads wait at any time.
    """
    threads = count_threads()
    with futures.ThreadPoolExecutor(threads, thread_name_prefix="relayquant") as pool:
        running: deque[futures.Future[T]] = deque()
        try:
            for item in items:
                running.append(pool.submit(function, item))
                if len(running) > threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


@functools.cache
def find_thread_pools() -> ThreadpoolController:
    """The libraries with threads of their own that are loaded."""
    return ThreadpoolController()


def stop_spinning() -> None:
    """Let TVM's idle threads sleep at once, unless the environment says otherwise.

    TVM reads the variable when its first parallel kernel runs: call this before.
    """
    os.environ.setdefault(SPIN_VARIABLE, "0")


@functools.cache
def find_first_user() -> tuple[int, int]:
    """(process, its threads) that first ran compiled kernels. A fork inherits the answer, but not
    the threads.
    """
    return os.getpid(), count_threads()


def check_threads() -> None:
    """Before kernels run: that the threads which TVM deals their parts to exist in this process.

    Raises:
        ConfigError: they were left behind by a fork; a kernel would wait for them for ever.
    """
    process, threads = find_first_user()
    if process != os.getpid() and threads > 1:
        raise ConfigError(
            f"This process is a fork of one (pid {process}) that has run kernels on {threads} "
            "threads, which a fork does not have: kernels would wait for them for ever. Start "
            "processes by multiprocessing.get_context('spawn') or 'forkserver', fork before "
            "anything runs, or set TVM_NUM_THREADS=1.",
            code="RQ107",
        )


class Executor:
    """A compiled module on this machine's CPU; functions are called by name."""

    def __init__(self, executable: Any) -> None:
        stop_spinning()
        self.vm = relax.VirtualMachine(executable, tvm.cpu())
        self._running = threading.Lock()  # TVM's virtual machine has one stack

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays (TVM tensors, shapes); returns its results as new arrays.

        Raises:
            ConfigError: the process is a fork of one that has run kernels; see `check_threads`.
            DataError: an array has another shape or dtype than the function takes.
        """
        return self.call(name, [as_tensor(arg) for arg in args])

    def call(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """`run` with arguments as TVM takes them: also tuples of tensors, and numbers."""
        check_threads()
        try:
            with self._running:
                return [as_array(out) for out in flatten_result(self.vm[name](*args))]
        except (RuntimeError, TypeError, ValueError) as error:
            fault = _tvm.read_argument_error(error)
            if fault is None:
                raise
            raise describe_argument(fault, args[fault.index]) from error


def describe_argument(fault: _tvm.ArgumentError, argument: Any) -> DataError:
    """The error of an argument that does not fit."""
    where = f"input {fault.name!r} of {fault.function!r}"
    if not isinstance(argument, tvm.runtime.Tensor):
        return DataError(
            f"{where} is a {type(argument).__name__}; allowed: an array.", code="RQ302"
        )
    wanted = f"({', '.join(map(str, fault.shape))})" if fault.shape is not None else "any shape"
    advice = suggest_sizes(fault.name, fault.shape or (), argument.shape)
    if not advice and any(isinstance(size, str) for size in fault.shape or ()):
        advice = " Sizes of one name must agree between the inputs."
    return DataError(
        f"{where} is {argument.dtype} of shape {tuple(argument.shape)}; allowed: {fault.dtype} of "
        f"{'shape ' if fault.shape is not None else ''}{wanted}.{advice}",
        code="RQ302",
    )


def as_tensor(array: Any) -> tvm.runtime.Tensor | tvm_ffi.Shape:
    """A TVM tensor on the CPU; TVM tensors and shapes pass through."""
    if isinstance(array, tvm.runtime.Tensor | tvm_ffi.Shape):
        return array
    # ascontiguousarray would give a scalar one dimension.
    return tvm.runtime.tensor(np.asarray(array, order="C"))


def view_tensor(array: np.ndarray) -> Any:
    """A TVM tensor in the memory of an `empty_aligned` array; a copy of any other array, or of one
    that may not be written.
    """
    flags = array.flags
    is_aligned = array.ctypes.data % ALIGNMENT == 0
    if array.size and flags.c_contiguous and flags.writeable and is_aligned:
        return tvm.runtime.from_dlpack(array)
    return as_tensor(array)


def as_array(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """A numpy view of a tensor on the CPU, or a copy where numpy cannot look at it."""
    if str(tensor.dtype) in _VIEWED and all(tensor.shape):
        return np.from_dlpack(tensor)
    return np.asarray(tensor.numpy())


def view_constant(tensor: Any) -> np.ndarray:
    """The values of a constant of a module where they lie, not to be written."""
    array = as_array(tensor)
    array.flags.writeable = False
    return array


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """A new array that compiled code can read where it lies: see `view_tensor`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, "uint8")
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(tuple(shape))


def find_memory_axes(array: np.ndarray) -> tuple[int, ...]:
    """Axes of an array in the order they lie in memory, outermost first: transposed by them, a view
    of a contiguous array is contiguous.
    """
    strides = array.strides
    return tuple(sorted(range(array.ndim), key=lambda axis: -strides[axis]))


def align_array(array: np.ndarray) -> np.ndarray:
    """The array itself if compiled code can read it where it lies, else a copy in C order."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = empty_aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def as_shape(sizes: Iterable[int]) -> tvm_ffi.Shape:
    """A value for a parameter that is a shape."""
    return tvm_ffi.Shape(tuple(sizes))


def flatten_result(result: Any) -> list[Any]:
    """Tensors of a result, nested tuples taken apart."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for part in result for tensor in flatten_result(part)]
