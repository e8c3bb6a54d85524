"""Kernel specifications -> compiled kernels, each compiled once in a process, on several threads.

LLVM works without Python's lock, so kernels that will be needed are compiled while others run.
`kernel_files` keeps them for later processes.
"""

from __future__ import annotations

import concurrent.futures as futures
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target

from relayquant.base.cores import count_threads
from relayquant.base.runtime import keep_freed_memory
from relayquant.codegen.eager.kernel_files import KernelFiles, open_kernel_files
from relayquant.codegen.kernels.emit import IS_SCHEDULED
from relayquant.codegen.kernels.floating.tile import FloatIsa, choose_float_isa
from relayquant.codegen.kernels.isa.target import host_config, resolve_target
from relayquant.codegen.library.host_functions import NEEDLESS_PASSES, disable_passes

#: Steps pass valid arguments. Checking each argument again would be half of a kernel's code.
CONFIG = {"tirx.disable_assert": True}
#: Name of a kernel in its module.
NAME = "kernel"
#: Number of kernels that are kept. A network has about five.
MOST_KERNELS = 256


@dataclass(frozen=True)
class KernelKey:
    """A kernel: `make(spec, isa, name)` builds its PrimFunc."""

    make: Callable[[Any, FloatIsa, str], tirx.PrimFunc]
    spec: Any

    def describe(self) -> str:
        """Return a text that differs from the texts of all other kernels."""
        return f"{self.make.__module__}.{self.make.__qualname__} {self.spec!r}"


class KernelCache:
    """Compiled kernels for this machine. Any thread may ask for them.

    They run on the thread that calls them: several threads call several kernels.
    """

    def __init__(self, target: Target, files: KernelFiles | None = None) -> None:
        self.target, self.isa, self.files = target, choose_float_isa(target), files
        self._lock = threading.Lock()
        self._kernels: OrderedDict[KernelKey, futures.Future[Any]] = OrderedDict()

    def get(self, key: KernelKey) -> Callable[..., None]:
        """Return a kernel, a function of TVM tensors.

        Compile it unless it exists or is being compiled.
        """
        future, is_mine = self._reserve(key)
        if is_mine:
            self._compile(key, future)
        return future.result()

    def request(self, keys: Iterable[KernelKey]) -> None:
        """Compile kernels in the background, in this order."""
        missing = [(key, future) for key in keys for future, new in [self._reserve(key)] if new]
        if not missing:
            return
        pool = futures.ThreadPoolExecutor(count_threads(), thread_name_prefix="relayquant-compile")
        for key, future in missing:
            pool.submit(self._compile, key, future)
        pool.shutdown(wait=False)  # the threads end once everything is compiled

    def _reserve(self, key: KernelKey) -> tuple[futures.Future[Any], bool]:
        """Return the kernel's future, and whether the caller has to fill it."""
        with self._lock:
            future = self._kernels.get(key)
            if future is not None:
                self._kernels.move_to_end(key)
                return future, False
            future = self._kernels[key] = futures.Future()
            while len(self._kernels) > MOST_KERNELS:
                self._kernels.popitem(last=False)
            return future, True

    def _compile(self, key: KernelKey, future: futures.Future[Any]) -> None:
        try:
            future.set_result(self._load(key))
        except BaseException as error:
            with self._lock:
                self._kernels.pop(key, None)
            future.set_exception(error)

    def _load(self, key: KernelKey) -> Callable[..., None]:
        """Load a kernel from its file, or compile it and write the file."""
        if self.files is None:
            return compile_kernel(key, self.isa, self.target)[NAME]
        path = self.files.find(f"{key.describe()} {self.isa!r}")
        found = self.files.load(path, NAME)
        if found is not None:
            return found
        module = compile_kernel(key, self.isa, self.target)
        self.files.save(path, module)
        # The file's code is ready to run; the module would have LLVM work once more.
        return self.files.load(path, NAME) or module[NAME]


@functools.cache
def host_kernels() -> KernelCache:
    """Return the kernels of this process, for its machine. Files keep them.

    They use LLVM at level 1, since registers and vectors are laid out before LLVM sees a kernel.
    """
    keep_freed_memory()
    target = resolve_target({**host_config(), "opt-level": 1})
    return KernelCache(target, open_kernel_files(target))


def compile_kernel(key: KernelKey, isa: FloatIsa, target: Target) -> Any:
    """Compile a module of one kernel, with serial loops."""
    func = make_serial(key.make(key.spec, isa, NAME)).with_attr(IS_SCHEDULED, True)
    with tvm.transform.PassContext(config=CONFIG), disable_passes(NEEDLESS_PASSES):
        return tvm.tirx.build(tvm.IRModule({NAME: func}), target)


def make_serial(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the loops of a kernel serial, so that it runs on one thread."""

    def visit(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, visit)))
