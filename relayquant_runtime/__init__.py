"""Runs libraries that `rq.compile(...).export_library` wrote, with the runtime of TVM alone: no
compiler, no relayquant. A process has 20 MB of its own then instead of 200, and begins in a tenth
of a second.

    from relayquant_runtime import Library

    library = Library("digits.so")
    (scores,) = library.run("main", [image])

Needs the packages apache-tvm (of which only the runtime is loaded), apache-tvm-ffi and numpy.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Library", "LibraryError"]

#: How long threads of TVM that have nothing to do spin, as `relayquant.base.runtime` has it.
SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"
#: Bytes that the address of an argument must be a multiple of.
ALIGNMENT = 64
#: The libraries of a process that runs and compiles nothing; the second one has sort and topk.
RUNTIME = ("libtvm_runtime.so", "libtvm_runtime_extra.so")
#: Numbers of the device and the allocator in `vm_initialization`: CPU 0, one that keeps memory.
CPU, FIRST, POOLED = 1, 0, 2
#: Functions of a library whose model has state: its description, and new initial values.
DESCRIPTION, INITIAL_STATE = "relayquant_state", "relayquant_initial_state"
#: What the virtual machine says of an argument that does not fit its parameter.
ARGUMENT_ERROR = re.compile(
    r"loc=param\[(?P<index>\d+)\], param=(?P<name>.*?), annotation=R\.Tensor\((?P<type>.*)\)\)"
)


class LibraryError(RuntimeError):
    """A library that cannot be loaded, or has no such function; says which and what to do."""


class Library:
    """A compiled library in this process. Several threads may use it; runs take turns.

    If the model has state, `run` takes and gives what is left without the state, and holds the
    state for the next run.

    Its large constants are read where the file is mapped: it must not be changed in place meanwhile
    (to replace a library, write a new file and rename it).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Load a library.

        Raises:
            LibraryError: there is no such file, it is no library of compiled functions, was made
                for another CPU, or the packages of TVM are missing.
        """
        os.environ.setdefault(SPIN_VARIABLE, "0")
        ffi, self.path = load_runtime(), Path(path).absolute()
        if not self.path.is_file():
            raise LibraryError(f"There is no file {self.path}. Name one that export_library wrote.")
        try:
            self._machine = ffi.load_module(str(self.path))["vm_load_executable"]()
            self._machine["vm_initialization"](CPU, FIRST, POOLED)
        except (RuntimeError, AttributeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise LibraryError(
                f"{self.path} is no library that export_library wrote for this machine: {reason}"
            ) from error
        self._running = threading.RLock()  # TVM's virtual machine has one stack
        self._values, self._places = [], {}
        try:
            described = self._machine[DESCRIPTION]
        except (AttributeError, RuntimeError, ValueError):
            pass
        else:
            text = json.loads(np.from_dlpack(described()).tobytes())
            self._values, self._places = text["values"], text["functions"]
        self._held: dict[str, Any] = {}
        self.reset()

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The function `name` as it is: tensors of `as_tensor` in, tensors of tvm_ffi out. Calls of
        one library must not overlap.

        Raises:
            LibraryError: there is none.
        """
        try:
            return self._machine[name]
        except (AttributeError, RuntimeError, ValueError) as error:
            raise LibraryError(
                f"{self.path} has no function {name!r}. A quantized model's is called as in the "
                "model, mostly 'main'."
            ) from error

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state that the next run takes: name -> a new array; {} if the model has none. Assign
        such a dict to go on from there.

        Raises:
            ValueError: a state is missing, unknown, or of another shape or dtype.
        """
        with self._running:
            return {name: np.from_dlpack(held).copy() for name, held in self._held.items()}

    @state.setter
    def state(self, values: Mapping[str, Any]) -> None:
        names = [row["name"] for row in self._values]
        if sorted(values) != sorted(names):
            raise ValueError(
                f"the state has {', '.join(sorted(values)) or 'no values'}; {self.path.name} takes "
                f"{', '.join(names) or 'none'}"
            )
        arrays = {name: np.asarray(values[name]) for name in names}
        for row in self._values:
            name, dtype, shape = row["name"], row["dtype"], tuple(row["shape"])
            array = arrays[name]
            if array.shape != shape or str(array.dtype) != dtype:
                raise ValueError(
                    f"state {name!r} is {array.dtype} of shape {array.shape}; {self.path.name} "
                    f"takes {dtype} of shape {shape}"
                )
        with self._running:
            self._held = {name: as_tensor(array.copy()) for name, array in arrays.items()}

    def reset(self) -> None:
        """Begin again: the next run takes the initial state."""
        if self._values:
            with self._running:
                names = [row["name"] for row in self._values]
                self._held = dict(zip(names, self._machine[INITIAL_STATE](), strict=True))

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays, in order (a tuple of ints for a parameter that is a shape);
        returns its results as new arrays. State is neither among the arrays nor among the results.

        Raises:
            LibraryError: there is no such function.
            ValueError: an array has another shape or dtype than the function takes.
            TypeError: of TVM, where there are more or fewer arguments.
        """
        function, tensors = self[name], [as_tensor(arg) for arg in args]
        place = self._places.get(name, {"first": 0, "names": []})
        first, names = place["first"], place["names"]
        try:
            with self._running:
                held = [self._held[each] for each in names]
                results = flatten(function(*tensors[:first], *held, *tensors[first:]))
                split = len(results) - len(names)
                news = separate(results[split:], [*tensors, *results[:split]])
                self._held.update(zip(names, news, strict=True))
                return [np.from_dlpack(each) for each in results[:split]]
        except (RuntimeError, TypeError, ValueError) as error:
            found = ARGUMENT_ERROR.search(str(error))
            if found is None:
                raise
            given = np.asarray([*args[:first], *names, *args[first:]][int(found["index"])])
            raise ValueError(
                f"input {found['name']!r} of {name!r} is {given.dtype} of shape {given.shape}; "
                f"{self.path.name} takes R.Tensor({found['type']}). For other sizes compile the "
                "model with free ones: shapes= of relayquant.load, or dynamic_shapes= of "
                "torch.export."
            ) from error


@functools.cache
def load_runtime() -> Any:
    """The module tvm_ffi, with TVM's runtime loaded into the process."""
    ffi = import_ffi()
    if "tvm" in sys.modules:
        return ffi  # it is there already, with the compiler
    found = importlib.util.find_spec("tvm")
    if found is None or not found.submodule_search_locations:
        raise LibraryError("relayquant_runtime needs TVM. Run: pip install 'apache-tvm<0.28'")
    folder = Path(found.submodule_search_locations[0]) / "lib"
    for name in RUNTIME:
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    return ffi


def import_ffi() -> Any:
    """tvm_ffi, which imports PyTorch wherever that is installed, to exchange tensors with it: 160
    MB that nothing here needs. A program that does need it imports torch before.
    """
    hide = "tvm_ffi" not in sys.modules and "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        import tvm_ffi
    except ImportError as error:
        raise LibraryError(
            "relayquant_runtime needs tvm_ffi. Run: pip install 'apache-tvm-ffi<0.1.15'"
        ) from error
    finally:
        if hide:
            del sys.modules["torch"]
    return tvm_ffi


def as_tensor(value: Any) -> Any:
    """A tensor in the memory of an array if compiled code can read it there, else of a copy; tuples
    of ints become shapes; tensors and shapes pass through.
    """
    ffi = load_runtime()
    if isinstance(value, ffi.Tensor | ffi.Shape):
        return value
    if isinstance(value, tuple):
        return ffi.Shape(value)
    return ffi.from_dlpack(align_array(np.asarray(value)))


def align_array(array: np.ndarray) -> np.ndarray:
    """The array itself if it lies in C order, at an aligned address, and may be written, as DLPack
    asks for; else a copy.
    """
    flags = array.flags
    if flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0:
        return array
    raw = np.empty(array.nbytes + ALIGNMENT, "uint8")
    start = -raw.ctypes.data % ALIGNMENT
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def flatten(result: Any) -> list[Any]:
    """Tensors of a result, nested tuples taken apart."""
    if isinstance(result, load_runtime().Tensor):
        return [result]
    return [tensor for part in result for tensor in flatten(part)]


def separate(tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The tensors; copies of those whose memory another one has too, or the caller."""
    kind = load_runtime().Tensor
    taken, found = {each.data_ptr() for each in others if isinstance(each, kind)}, []
    for tensor in tensors:
        is_taken = tensor.data_ptr() in taken
        found.append(as_tensor(np.from_dlpack(tensor).copy()) if is_taken else tensor)
        taken.add(tensor.data_ptr())
    return found
