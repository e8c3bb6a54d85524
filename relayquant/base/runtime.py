"""Run compiled modules: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import concurrent.futures as futures
import ctypes
import functools
import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import tvm
import tvm_ffi
from threadpoolctl import ThreadpoolController
from tvm import relax

from relayquant.base.cores import count_threads
from relayquant.base.freed_memory import large_memory
from relayquant.errors import ConfigError, DataError, format_count, suggest_sizes
from relayquant_runtime.vm_errors import (
    ArgumentError,
    advise_rank,
    check_real,
    read_argument_error,
    read_count_error,
)

#: How many turns TVM's idle threads spin before they sleep. With TVM's default of 300,000, two
#: threads are up to 500 times slower than one as soon as another process needs a core. Even 30
#: turns cost a factor of 100. With 0 nothing is lost, but waking a thread takes about 10
#: microseconds.
SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"

#: required alignment of a tensor's address in bytes
ALIGNMENT = 64
#: most bytes that glibc reuses: 32 MB, with its header
MOST_REUSED_BYTES = (1 << 25) - (1 << 13)
#: dtypes of tensors that numpy can view without a copy
_VIEWED = frozenset(
    [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64"]
)

#: Types of one input or of named ones, that are easily given instead of a list.
ONE_VALUE = (np.ndarray, tvm.runtime.Tensor, str, bytes, dict)

#: Functions that compiled modules with state have, see `codegen.library.state_functions`.
DESCRIPTION, INITIAL_STATE = "relayquant_state", "relayquant_initial_state"

S = TypeVar("S")
T = TypeVar("T")

#: compiles a module into something `Machine` can run
CompileModule = Callable[[tvm.IRModule], Any]


class FunctionRunner(Protocol):
    """Runs the functions of a module by name. Safe to call from several threads at once."""

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays and shapes. Returns its results as new arrays."""
        ...


#: makes the functions of a module runnable
LoadModule = Callable[[tvm.IRModule], FunctionRunner]


def limit_blas() -> Any:
    """Return a context in which matrix products and factorizations of numpy and scipy use one
    thread.

    Their threads spin while they wait for each other. Next to a busy process, or when several
    threads compute products, the waiting takes a hundred times as long as the work. One thread also
    makes the bits of a sum independent of the number of cores.
    """
    return find_thread_pools().limit(limits=1, user_api="blas")


def map_on_threads(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Apply `function` to each item on `count_threads()` threads. Results keep the order of the
    items.

    The calling thread reads the iterator. Only about as many items as threads wait at any time.
    """
    threads = count_threads()
    if threads == 1:
        yield from map(function, items)
        return
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
    """Return the loaded libraries that have their own threads."""
    return ThreadpoolController()


def stop_spinning() -> None:
    """Let TVM's idle threads sleep at once, unless the environment variable is set.

    TVM reads the variable when its first parallel kernel runs, so call this before.
    """
    os.environ.setdefault(SPIN_VARIABLE, "0")


def keep_freed_memory() -> None:
    """Let arrays of up to 32 MB that are freed leave their memory to the next ones.

    glibc asks the system for each array that is larger than any freed so far, and the system clears
    its pages each time: up to a tenth of a calibration. So an array of the largest size that glibc
    keeps is freed here. Larger ones have `freed_memory`. Free memory goes back to the system above
    64 MB only, twice that size. A second call changes nothing.
    """
    np.empty(MOST_REUSED_BYTES, "uint8")  # nothing is written, so this takes no memory


@functools.cache
def find_first_user() -> tuple[int, int]:
    """Return (process id, thread count) of the process that first ran compiled kernels. A fork
    inherits this record, but not the threads.
    """
    return os.getpid(), count_threads()


def check_threads() -> None:
    """Check that TVM's worker threads exist in this process. Call this before kernels run.

    Raises:
        ConfigError: the process is a fork without the threads. A kernel would wait for them
            forever.
    """
    process, threads = find_first_user()
    if process != os.getpid() and threads > 1:
        raise ConfigError(
            f"This process is a fork of one (pid {process}) that has run kernels on {threads} "
            "threads, which a fork does not have: kernels would wait for them forever. Start "
            "processes by multiprocessing.get_context('spawn') or 'forkserver', fork before "
            "anything runs, or set TVM_NUM_THREADS=1.",
            code="RQ107",
        )


class Machine:
    """A compiled module on this machine's CPU. Functions are called by name and take all their
    arguments, state included.
    """

    def __init__(self, executable: Any) -> None:
        if not isinstance(executable, tvm.runtime.Module | tvm.runtime.Executable):
            raise ConfigError(
                f"{type(self).__name__}: executable is a {type(executable).__name__}; allowed: "
                "what relayquant.compile(mod) returns. A file that export_library wrote is loaded "
                "with relayquant_runtime.Library(path).",
                code="RQ101",
            )
        stop_spinning()
        self.vm = relax.VirtualMachine(executable, tvm.cpu())
        self._running = threading.Lock()  # TVM's virtual machine has one stack.

    def run(self, name: str, args: Sequence[Any] = ()) -> list[np.ndarray]:
        """Call a function with arrays (TVM tensors, shapes). Returns its results as new arrays.

        Raises:
            ConfigError: the process is a fork of one that has run kernels, see `check_threads`.
            DataError: there is no such function, `args` is no list of arrays, their number is
                wrong, or the shape or dtype of one differs from the function's parameter.
        """
        return self.call(name, as_tensors(name, args))

    def call(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arguments of TVM's types, also tuples of tensors and numbers."""
        return [as_array(out) for out in self.call_tensors(name, args)]

    def call_tensors(self, name: str, args: Sequence[Any]) -> list[tvm.runtime.Tensor]:
        """Call a function like `call`. Returns its results as tensors."""
        check_threads()
        try:
            with self._running:
                return flatten_result(self.vm[name](*args))
        except AttributeError as error:
            if self.has_function(name):
                raise
            raise DataError(
                f"There is no function {name!r} in this executable. Name a function of the "
                "compiled module, mostly 'main'.",
                code="RQ101",
            ) from error
        except (RuntimeError, TypeError, ValueError) as error:
            fault = read_argument_error(error)
            if fault is not None:
                raise describe_argument(fault, args[fault.index]) from error
            count = read_count_error(error)
            if count is None:
                raise
            wanted, names = count
            raise DataError(
                f"{name!r} takes {format_count(wanted, 'input')} ({names}), and got {len(args)}. "
                "Pass a list with one array for each, in this order.",
                code="RQ302",
            ) from error

    def has_function(self, name: str) -> bool:
        """Whether the module has a function of this name."""
        try:
            return self.vm[name] is not None
        except (AttributeError, ValueError):
            return False

    def count_parameters(self, name: str) -> int:
        """Return how many arguments a function takes."""
        return int(self.vm._get_function_arity(name))


class Executor(Machine):
    """A compiled module on this machine's CPU. Functions are called by name.

    If the module has state, `run` takes and gives what is left without the state, and holds the
    state for the next call. Several threads may call it. Calls take turns. For two streams at the
    same time make two executors.
    """

    def __init__(self, executable: Any) -> None:
        super().__init__(executable)
        described = self.describe_state()
        self._values: list[dict[str, Any]] = described["values"]
        self._places: dict[str, dict[str, Any]] = described["functions"]
        self._held: dict[str, tvm.runtime.Tensor] = {}
        self._stepping = threading.RLock()  # A call begins with the state that the last one left.
        self.reset()

    def describe_state(self) -> dict[str, Any]:
        """Return the description that the compiled module carries. Empty if it has no state."""
        if not self.has_function(DESCRIPTION):
            return {"values": [], "functions": {}}
        (text,) = self.call(DESCRIPTION, [])
        return json.loads(text.tobytes())

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Name -> a copy of the value that the next call takes. {} if the module has no state.

        Assign such a dict, with all names, to go on from other values.
        """
        with self._stepping:
            return {name: as_array(tensor).copy() for name, tensor in self._held.items()}

    @state.setter
    def state(self, values: Mapping[str, Any]) -> None:
        names = [row["name"] for row in self._values]
        if not isinstance(values, Mapping):
            raise DataError(
                f"The state is of type {type(values).__name__}; allowed: a dict from name to "
                "array, as `state` gives it.",
                code="RQ302",
            )
        given = sorted(map(str, values))
        if given != sorted(names):
            raise DataError(
                f"The state has {', '.join(given) or 'no values'}; allowed: "
                f"{', '.join(names) or 'none, the module has no state'}.",
                code="RQ302",
            )
        for row in self._values:
            check_state_value(row, values[row["name"]])
        with self._stepping:
            self._held = {name: copy_tensor(values[name]) for name in names}

    def reset(self) -> None:
        """Begin again: the next call takes the initial state."""
        if self._values:
            with self._stepping:
                tensors = self.call_tensors(INITIAL_STATE, [])
                names = [row["name"] for row in self._values]
                self._held = dict(zip(names, tensors, strict=True))

    def run(self, name: str, args: Sequence[Any] = ()) -> list[np.ndarray]:
        """Call a function with arrays (TVM tensors, shapes). Returns its results as new arrays.

        State is neither among the arguments nor among the results.

        Raises:
            ConfigError: the process is a fork of one that has run kernels, see `check_threads`.
            DataError: see `Machine.run`.
        """
        given = as_tensors(name, args)
        place = self._places.get(name)
        if place is None:
            return self.call(name, given)
        first, names = place["first"], place["names"]
        wanted = self.count_parameters(name) - len(names)
        if len(given) != wanted:
            raise DataError(
                f"{name!r} takes {format_count(wanted, 'input')} besides its state "
                f"({', '.join(names)}), and got {len(given)}. The executor holds the state: give "
                "the inputs without it.",
                code="RQ302",
            )
        with self._stepping:
            held = [self._held[each] for each in names]
            results = self.call_tensors(name, [*given[:first], *held, *given[first:]])
            split = len(results) - len(names)
            news = separate(results[split:], [*given, *results[:split]])
            self._held.update(zip(names, news, strict=True))
        return [as_array(each) for each in results[:split]]


def describe_argument(fault: ArgumentError, argument: Any) -> DataError:
    """Make the error for an argument that does not fit."""
    where = f"input {fault.name!r} of {fault.function!r}"
    if not isinstance(argument, tvm.runtime.Tensor):
        return DataError(
            f"{where} is a {type(argument).__name__}; allowed: an array.", code="RQ302"
        )
    wanted = f"({', '.join(map(str, fault.shape))})" if fault.shape is not None else "any shape"
    advice = suggest_sizes(fault.name, fault.shape or (), argument.shape)
    if str(argument.dtype) != fault.dtype:
        advice = f' Convert it with array.astype("{fault.dtype}").{advice}'
    elif of_rank := advise_rank(fault, len(argument.shape)):
        advice = f" {of_rank}"
    elif not advice and any(isinstance(size, str) for size in fault.shape or ()):
        advice = " Sizes with the same name must agree between the inputs."
    return DataError(
        f"{where} is {argument.dtype} of shape {tuple(argument.shape)}; allowed: {fault.dtype} of "
        f"{'shape ' if fault.shape is not None else ''}{wanted}.{advice}",
        code="RQ302",
    )


def as_tensors(name: str, args: Sequence[Any]) -> list[tvm.runtime.Tensor | tvm_ffi.Shape]:
    """Convert the arguments of the function `name`.

    Raises:
        DataError: the name is no text, the arguments are no list, or one of them is no array of
            numbers.
    """
    if type(name) is not str:
        raise DataError(
            f"The function to run is given as a {type(name).__name__}; allowed: its name, mostly "
            "'main', before a list of its inputs: run('main', [array]).",
            code="RQ101",
        )
    # A list is asked for first: it takes a tenth of the time of the other questions.
    if type(args) is not list and (isinstance(args, ONE_VALUE) or not isinstance(args, Iterable)):
        raise DataError(
            f"The inputs of {name!r} are of type {type(args).__name__}; allowed: a list with one "
            f"array for each input, also where there is only one: run({name!r}, [array]).",
            code="RQ101",
        )
    try:
        return [as_tensor(arg) for arg in args]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The inputs of {name!r} ({', '.join(type(arg).__name__ for arg in args)}) do not all "
            f"become arrays: {error}. Pass a list with one numpy array of numbers for each input.",
            code="RQ302",
        ) from error


def as_tensor(array: Any) -> tvm.runtime.Tensor | tvm_ffi.Shape:
    """Convert to a TVM tensor on the CPU, in its byte order. TVM tensors and shapes pass through.

    Raises:
        ValueError: it has masked values, complex numbers or other values without a TVM dtype.
    """
    if isinstance(array, tvm_ffi.Shape):
        return array
    if isinstance(array, tvm.runtime.Tensor):
        check_real(array)
        return array
    check_unmasked(array)
    array = np.asarray(array, order="C")  # ascontiguousarray would give a scalar one dimension
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if native.dtype.name in _VIEWED and native.size:
        # A quarter of the time of `tvm.runtime.tensor`, which compares names of dtypes.
        copy = empty_aligned(native.shape, native.dtype)
        copy[...] = native
        return view_aligned(copy)
    return tvm.runtime.tensor(native)


def check_unmasked(array: Any) -> None:
    """Raise ValueError if an array of numpy.ma has masked values, which numpy's own arrays would
    show as if they were data.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise ValueError("values are masked; allowed: arrays without a mask, as array.filled(0)")


def view_tensor(array: np.ndarray) -> Any:
    """Return a TVM tensor that shares the memory of an `empty_aligned` array. Any other array, or a
    read-only one, is copied.
    """
    if array.flags.c_contiguous and find_address(array) % ALIGNMENT == 0:
        return view_aligned(array)
    return as_tensor(array)


def view_aligned(array: np.ndarray) -> Any:
    """As `view_tensor`, of an array that `empty_aligned` or `align_array` returned."""
    if array.size and array.flags.writeable:
        return tvm.runtime.from_dlpack(array)
    return as_tensor(array)


def as_array(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """Return a numpy view of a CPU tensor, or a copy if numpy cannot view its dtype."""
    if str(tensor.dtype) in _VIEWED and all(tensor.shape):
        return np.from_dlpack(tensor)
    return np.asarray(tensor.numpy())


def view_constant(tensor: Any) -> np.ndarray:
    """Return the values of a module's constant without a copy. Do not write to them."""
    array = as_array(tensor)
    array.flags.writeable = False
    return array


def freeze_array(array: np.ndarray) -> np.ndarray:
    """Return an array that nothing can write to, see `is_frozen`: the array itself if it is one,
    else a copy in the same memory order.
    """
    if is_frozen(array):
        return array
    axes = find_memory_axes(array)
    ordered = array.transpose(axes)
    copy = np.ndarray(ordered.shape, array.dtype, ordered.tobytes())
    return copy.transpose(invert_axes(axes))


def is_frozen(array: np.ndarray) -> bool:
    """Whether the memory of an array is `bytes`. Other read-only arrays may change: through a view
    that can be written to, or once their owner makes them writeable.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, bytes)


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Allocate an array that compiled code can read in place, see `view_tensor`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize + ALIGNMENT
    if size > MOST_REUSED_BYTES:
        memory = large_memory().take(size)
        return np.ndarray(tuple(shape), dtype, memory, -ctypes.addressof(memory) % ALIGNMENT)
    raw = np.empty(size, "uint8")
    return np.ndarray(tuple(shape), dtype, raw, -find_address(raw) % ALIGNMENT)


def find_address(array: np.ndarray) -> int:
    """Return the address of a contiguous array's first element."""
    if array.flags.writeable and array.size and array.dtype.kind in "biuf":
        # A fifth of the time of `array.ctypes`.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return array.ctypes.data


def find_memory_axes(array: np.ndarray) -> tuple[int, ...]:
    """Return the axes of an array in memory order, outermost first. Transposing a view of a
    contiguous array by these axes makes it contiguous.
    """
    strides = array.strides
    return tuple(sorted(range(array.ndim), key=lambda axis: -strides[axis]))


@functools.lru_cache(maxsize=64)
def invert_axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inverse permutation of `axes`."""
    return tuple(int(axis) for axis in np.argsort(axes))


def align_array(array: np.ndarray) -> np.ndarray:
    """Return the array itself if compiled code can read it in place, else a copy in C order."""
    if array.flags.c_contiguous and find_address(array) % ALIGNMENT == 0:
        return array
    copy = empty_aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def separate(tensors: Sequence[Any], others: Sequence[Any]) -> list[tvm.runtime.Tensor]:
    """Return the tensors, each with memory of its own: a tensor that shares memory with another one
    is copied, so that writing into it changes no other.
    """
    taken = {each.data_ptr() for each in others if isinstance(each, tvm.runtime.Tensor)}
    found = []
    for tensor in tensors:
        found.append(copy_tensor(tensor) if tensor.data_ptr() in taken else tensor)
        taken.add(tensor.data_ptr())
    return found


def copy_tensor(value: Any) -> tvm.runtime.Tensor:
    """Return a new tensor with the values of an array or a tensor."""
    array = value.numpy() if isinstance(value, tvm.runtime.Tensor) else np.asarray(value, order="C")
    return tvm.runtime.tensor(array)


def check_state_value(row: Mapping[str, Any], value: Any) -> None:
    """Check shape and dtype of a state that a user gives.

    Raises:
        DataError: they differ from the description.
    """
    array = value if isinstance(value, tvm.runtime.Tensor) else np.asarray(value)
    shape = tuple(int(size) for size in array.shape)
    if shape != tuple(row["shape"]) or str(array.dtype) != row["dtype"]:
        raise DataError(
            f"State {row['name']!r} is {array.dtype} of shape {shape}; allowed: {row['dtype']} of "
            f"shape {tuple(row['shape'])}.",
            code="RQ302",
        )


def as_shape(sizes: Iterable[int]) -> tvm_ffi.Shape:
    """Convert a value for a parameter that is a shape."""
    return tvm_ffi.Shape(tuple(sizes))


def flatten_result(result: Any) -> list[Any]:
    """Flatten the nested tuples of a result to a list of tensors."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    found: list[Any] = []
    for part in result:  # of a language model a hundred
        found += [part] if isinstance(part, tvm.runtime.Tensor) else flatten_result(part)
    return found
