"""Runs libraries that `rq.compile(...).export_library` wrote, with the runtime of TVM alone: no
compiler, no relayquant. A process has 20 MB of its own then instead of 200, and begins in a tenth
of a second.

    from relayquant_runtime import Library

    library = Library("digits.so")  # or the folder of rq.export_bundle
    (scores,) = library.run("main", [image])

Needs the packages apache-tvm-ffi and numpy, and TVM's runtime: that of the bundle, or the package
apache-tvm, of which only the runtime is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relayquant_runtime.bundle import Bundle, read_bundle
from relayquant_runtime.elf import HEAD, read_length, read_machine
from relayquant_runtime.errors import LibraryError
from relayquant_runtime.flags import read_flags
from relayquant_runtime.tiles import uses_tiles
from relayquant_runtime.vm_errors import (
    ArgumentError,
    advise_rank,
    check_real,
    read_argument_error,
    read_count_error,
)

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
#: Data of a library: JSON that describes its functions and its target.
LIBRARY_DESCRIPTION = "relayquant_description"
#: Device and number of each file that was loaded -> its time of change and size at that time.
_FIRST_SEEN: dict[tuple[int, int], tuple[int, int]] = {}
#: TVM's runtime, as this process has loaded it.
_LOADED: list[ctypes.CDLL] = []
_LOADING = threading.Lock()


class Library:
    """A compiled library in this process. Several threads may use it; runs take turns.

    If the model has state, `run` takes and gives what is left without the state, and holds the
    state for the next run.

    Its large constants are read where the file is mapped: it must not be changed in place meanwhile
    (to replace a library, write a new file and rename it). Then the next `Library` of the same path
    is the new one, and those that were made before go on with the old one.

    Attributes:
        path: The library's file.
        manifest: The JSON of a bundle: names, shapes, dtypes, scales, preprocessing. {} if the
            library was given alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Load a library, or the folder that `rq.export_bundle` wrote.

        Raises:
            LibraryError: there is no such file, it is no library of compiled functions, was made
                for another CPU or for instructions that this one lacks, or the packages of TVM are
                missing. A file of a bundle is missing or is not the one that was exported. The file
                was changed in place since this process loaded it.
        """
        os.environ.setdefault(SPIN_VARIABLE, "0")
        given = Path(path).absolute()
        bundle = read_bundle(given) if given.is_dir() else Bundle(given, {}, {})
        self.path, self.manifest = bundle.library, bundle.manifest
        if not self.path.is_file():
            raise LibraryError(f"There is no file {self.path}. Name one that export_library wrote.")
        ffi = load_runtime(bundle)
        check_unchanged(self.path)
        with self.path.open("rb") as file:
            head, have = file.read(HEAD), os.fstat(file.fileno()).st_size
        if have < (length := read_length(head)):  # a read behind its end would end the process
            raise LibraryError(
                f"{self.path} was cut off: it has {have} of {length} bytes. Copy it again."
            )
        try:
            self._machine = ffi.load_module(spell_version(self.path))["vm_load_executable"]()
            self._machine["vm_initialization"](CPU, FIRST, POOLED)
        except (RuntimeError, AttributeError, ValueError) as error:
            machine = read_machine(head)
            if machine not in ("", platform.machine()):
                raise LibraryError(
                    f"{self.path} is made for {machine}; this machine is {platform.machine()}. "
                    "Run it there, or compile the model for this machine."
                ) from error
            reason = str(error).strip().splitlines()[-1]
            raise LibraryError(
                f"{self.path} is no library that export_library wrote for this machine: {reason}"
            ) from error
        check_instructions(self.path)
        self._running = threading.RLock()  # TVM's virtual machine has one stack
        described = self.describe_state()
        self._values, self._places = described["values"], described["functions"]
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

    def has_function(self, name: str) -> bool:
        """Whether the library has a function of this name."""
        try:
            return self._machine[name] is not None
        except (AttributeError, RuntimeError, ValueError):
            return False

    def describe_state(self) -> dict[str, Any]:
        """The state as plain data: "values" -> rows of name, shape and dtype, and "functions" ->
        function name -> number of its first parameter that is state, and the names.
        """
        if not self.has_function(DESCRIPTION):
            return {"values": [], "functions": {}}
        return json.loads(np.from_dlpack(self._machine[DESCRIPTION]()).tobytes())

    def describe(self) -> str:
        """Describe the library in a few lines: target, functions with inputs and outputs, state,
        and the instructions with which the library multiplies bytes.

        A process that may not use the tiles of AMX runs the same kernels on vectors; it is said.
        The library asks Linux when it first runs, and keeps the answer.
        """
        described = read_description(self.path)
        target = described.get("target", {"triple": "an unknown target", "cpu": "unknown CPU"})
        lines = [f"{self.path.name}: {target['triple']}, {target['cpu']}"]
        for name, function in described.get("functions", {}).items():
            inputs, outputs = (
                ", ".join(map(format_value, function[key])) for key in ("inputs", "outputs")
            )
            lines.append(f"{name}({inputs}) -> {outputs}")
        lines.append(f"state: {', '.join(map(format_value, self._values)) or 'none'}")
        first, *refused = described.get("products", ["int8 products: not known"])
        lines.append(refused[0] if refused and not uses_tiles(open_again(self.path)) else first)
        return "\n".join(lines)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state that the next run takes: name -> a new array; {} if the model has none. Assign
        such a dict to go on from there.

        Raises:
            ValueError: a state is missing, unknown, or of another shape or dtype.
            TypeError: what is assigned is no dict.
        """
        with self._running:
            return {name: np.from_dlpack(held).copy() for name, held in self._held.items()}

    @state.setter
    def state(self, values: Mapping[str, Any]) -> None:
        names = [row["name"] for row in self._values]
        if not isinstance(values, Mapping):
            raise TypeError(
                f"the state is of type {type(values).__name__}; allowed: a dict from name to "
                "array, as `state` gives it"
            )
        given = sorted(map(str, values))
        if given != sorted(names):
            raise ValueError(
                f"the state has {', '.join(given) or 'no values'}; {self.path.name} takes "
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

    def run(self, name: str, args: Sequence[Any] = ()) -> list[np.ndarray]:
        """Call a function with arrays, in order (a tuple of ints for a parameter that is a shape);
        returns its results as new arrays. State is neither among the arrays nor among the results.

        Raises:
            LibraryError: there is no such function.
            ValueError: an array has another shape or dtype than the function takes, or there are
                more or fewer.
            TypeError: `name` is no text, or `args` is no list of arrays of numbers.
        """
        tensors, function = as_tensors(name, args), self[name]
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
            counted = read_count_error(error)
            if counted is not None:
                raise ValueError(
                    f"the number of inputs of {name!r} is {len(tensors)}; {self.path.name} takes "
                    f"{counted[0] - len(names)}. Pass a list with one array for each."
                ) from error
            fault = read_argument_error(error)
            if fault is None:
                raise
            given = np.asarray([*args[:first], *names, *args[first:]][fault.index])
            raise ValueError(
                f"input {fault.name!r} of {name!r} is {given.dtype} of shape {given.shape}; "
                f"{self.path.name} takes R.Tensor({fault.type}). {advise(given, fault)}"
            ) from error


def advise(given: np.ndarray, fault: ArgumentError) -> str:
    """What to do where an array does not fit a parameter."""
    if fault.dtype != str(given.dtype):
        return f'Convert it with array.astype("{fault.dtype}").'
    return advise_rank(fault, given.ndim) or (
        "For other sizes compile the model with free ones: shapes= of relayquant.load, or "
        "dynamic_shapes= of torch.export."
    )


def load_runtime(bundle: Bundle) -> Any:
    """The module tvm_ffi, with TVM's runtime loaded into the process. The runtime is the one of the
    package apache-tvm if that is installed, else the one of the first bundle.

    Later bundles use the same one. A second copy would register the same names again, and TVM would
    end the process.
    """
    ffi = import_ffi()
    if "tvm" in sys.modules:
        return ffi  # it is there already, with the compiler
    with _LOADING:
        if len(_LOADED) < len(RUNTIME):
            for place in find_runtime(bundle)[len(_LOADED) :]:
                _LOADED.append(ctypes.CDLL(str(place), ctypes.RTLD_GLOBAL))
    return ffi


def find_runtime(bundle: Bundle) -> list[Path]:
    """The files of TVM's runtime, in the order in which they are loaded.

    Raises:
        LibraryError: neither the package apache-tvm nor the bundle has them.
    """
    found = importlib.util.find_spec("tvm")
    if found is not None and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0]) / "lib"
        places = [folder / name for name in RUNTIME]
    else:
        places = [bundle.runtime[name] for name in RUNTIME if name in bundle.runtime]
    if len(places) < len(RUNTIME):
        missing = bundle.manifest.get("missing") or [
            "The folder that export_bundle wrote has it, a library alone has not: load the folder, "
            "or run: pip install 'apache-tvm<0.28'"
        ]
        raise LibraryError(f"relayquant_runtime needs TVM's runtime. {' '.join(map(str, missing))}")
    return places


@functools.cache
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


def spell_version(path: Path) -> str:
    """Return a path to the file by which no other file was ever loaded.

    The system's loader (dlopen) takes a path that it knows for the library that it has, and never
    looks at the file. "/" and "/./" lead to the same folder, so they spell the file's number.
    """
    status = path.stat()
    bits = f"{status.st_dev << 64 | status.st_ino:0128b}"
    folders = "".join("./" if bit == "1" else "/" for bit in bits)
    return f"{path.parent}/{folders}{path.name}"


def check_unchanged(path: Path) -> None:
    """LibraryError if the file may have been written into since this process first loaded it: what
    is mapped is then neither the old library nor the new one. Its time of change says so; a `touch`
    looks the same.
    """
    status = path.stat()
    found = status.st_mtime_ns, status.st_size
    if _FIRST_SEEN.setdefault((status.st_dev, status.st_ino), found) != found:
        raise LibraryError(
            f"{path} was changed in place since this process loaded it (its size or time of change "
            "is another). Write the new library to another file and rename that to this path, and "
            "load it in a new process. If only the time was set (touch), rename a copy to it."
        )


def check_instructions(path: Path) -> None:
    """LibraryError if a loaded library was compiled for instructions that this machine lacks: its
    first kernel would end the process.
    """
    target = read_description(path).get("target", {})
    flags = read_flags()
    missing = sorted({*target.get("flags", ())} - flags) if flags else []
    if missing:
        raise LibraryError(
            f"{path} was compiled for {target['cpu']}; this machine lacks {', '.join(missing[:5])}"
            ". Compile the model for this machine's CPU: target='llvm -mcpu=...'"
        )


def open_again(path: Path) -> ctypes.CDLL:
    """Return a loaded library, for its data."""
    return ctypes.CDLL(spell_version(path))


def read_description(path: Path) -> dict[str, Any]:
    """What a loaded library says about itself; {} if it says nothing."""
    try:
        text = ctypes.c_char.in_dll(open_again(path), LIBRARY_DESCRIPTION)
    except ValueError:
        return {}
    return json.loads(ctypes.string_at(ctypes.addressof(text)))


def format_value(row: Mapping[str, Any]) -> str:
    """An input, output or state on one line: "image float32 (N, 1, 8, 8)"."""
    shape = "" if row["shape"] is None else f" ({', '.join(map(str, row['shape']))})"
    return f"{row['name']} {row['dtype']}{shape}"


def as_tensors(name: str, args: Sequence[Any]) -> list[Any]:
    """Tensors of the arguments of the function `name`. TypeError if the name is no text or they are
    no list of arrays.
    """
    if type(name) is not str:
        raise TypeError(
            f"the function to run is given as a {type(name).__name__}; allowed: its name, mostly "
            "'main', before a list of its inputs: run('main', [array])"
        )
    # A list is asked for first: it takes a tenth of the time of the other questions.
    if type(args) is not list and (
        isinstance(args, np.ndarray | import_ffi().Tensor | str | bytes | dict)
        or not isinstance(args, Iterable)
    ):
        raise TypeError(
            f"the inputs of {name!r} are of type {type(args).__name__}; allowed: a list with one "
            f"array for each input, also where there is only one: run({name!r}, [array])"
        )
    try:
        return [as_tensor(arg) for arg in args]
    except (BufferError, TypeError, ValueError) as error:
        kinds = ", ".join(type(arg).__name__ for arg in args)
        raise TypeError(
            f"the inputs of {name!r} ({kinds}) do not all become arrays: "
            f"{str(error).rstrip('.')}. Pass a list with one numpy array of numbers for each input"
        ) from error


def as_tensor(value: Any) -> Any:
    """A tensor in the memory of an array if compiled code can read it there, else of a copy; tuples
    of ints become shapes; tensors and shapes pass through.
    """
    ffi = import_ffi()
    if isinstance(value, tuple):
        return ffi.Shape(value)
    if isinstance(value, ffi.Shape):
        return value
    tensor = value
    if not isinstance(value, ffi.Tensor):
        tensor = ffi.from_dlpack(align_array(np.asarray(value)))
    check_real(tensor)
    return tensor


def align_array(array: np.ndarray) -> np.ndarray:
    """The array itself if it lies in C order, at an aligned address, and may be written, as DLPack
    asks for; else a copy.
    """
    flags = array.flags
    if flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0:
        return array
    raw = np.empty(array.nbytes + ALIGNMENT, "uint8")
    start = -raw.ctypes.data % ALIGNMENT
    # A slice of no elements would lie at the beginning of `raw`.
    copy = np.frombuffer(raw, array.dtype, array.size, start).reshape(array.shape)
    copy[...] = array
    return copy


def flatten(result: Any) -> list[Any]:
    """Tensors of a result, nested tuples taken apart."""
    if isinstance(result, import_ffi().Tensor):
        return [result]
    return [tensor for part in result for tensor in flatten(part)]


def separate(tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The tensors; copies of those whose memory another one has too, or the caller."""
    kind = import_ffi().Tensor
    taken, found = {each.data_ptr() for each in others if isinstance(each, kind)}, []
    for tensor in tensors:
        is_taken = tensor.data_ptr() in taken
        found.append(as_tensor(np.from_dlpack(tensor).copy()) if is_taken else tensor)
        taken.add(tensor.data_ptr())
    return found
