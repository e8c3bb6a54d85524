"""Which instruction sets the tests compile for, and whether this machine can run them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence

import pytest
import tvm
from tvm import tirx
from tvm.target import Target

from relayquant.codegen.kernels.isa.base import PORTABLE, Isa
from relayquant.codegen.kernels.isa.select import has_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.kernels.isa.x86 import X86_ISAS
from relayquant.codegen.library.host_functions import name_kernel_pipeline
from relayquant.ir.dialect.cost import MACS_ATTR

#: A CPU that has the instruction set and no better one.
REPRESENTATIVE = {
    "amx": "sapphirerapids",
    "vnni512": "cascadelake",
    "vnni256": "alderlake",
    "avx512bw": "skylake-avx512",
    "avx2": "haswell",
    "sse2": "x86-64",
    "portable": "x86-64",
}
ISAS = (*X86_ISAS, PORTABLE)

#: Codes of DLPack.
CPU, UINT = 1, 1


def target_of(mcpu: str) -> Target:
    return Target({"kind": "llvm", "mcpu": mcpu})


def runnable_target(isa: Isa) -> Target:
    """Target of a CPU whose best instruction set is `isa`; skips if this machine lacks it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the instruction sets under test are of x86")
    if not has_isa(isa, resolve_target(None)):
        pytest.skip(f"this machine cannot run {isa.name}")
    return target_of(REPRESENTATIVE[isa.name])


def compile_kernel(func: tirx.PrimFunc, target: Target) -> Callable[..., None]:
    """A kernel to be called, lowered as in a module. Its workspaces hold garbage, as in a process
    that runs other kernels; new memory is 0, and a kernel that does not write what it reads would
    be right with that.
    """
    name = str(func.attrs["global_symbol"])
    mod = tvm.IRModule({name: func.with_attr(MACS_ATTR, 0)})
    kernel = tvm.compile(mod, target, tir_pipeline=name_kernel_pipeline())[name]

    def run(*arrays: tvm.runtime.Tensor) -> None:
        fill_workspaces(0xA5)
        kernel(*arrays)

    return run


def fill_workspaces(byte: int, count: int = 6, size: int = 1 << 20) -> None:
    """Fill what TVM keeps for the next workspaces of this thread, of at most `size` bytes each."""
    runtime = ctypes.CDLL(None)
    allocate, free = runtime.TVMBackendAllocWorkspace, runtime.TVMBackendFreeWorkspace
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    free.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    blocks = [allocate(CPU, 0, size, UINT, 8) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, byte, size)
        free(CPU, 0, block)


def best_isa() -> Isa:
    """The best instruction set of this machine that the tests know."""
    host = resolve_target(None)
    return next((isa for isa in X86_ISAS if has_isa(isa, host)), PORTABLE)


def take_samples(isas: Sequence[Isa]) -> pytest.MarkDecorator:
    """Parametrizes a test of many cases: this machine's best instruction set takes all of them,
    each other one every sixth; what is left is slow.
    """
    best = best_isa()
    return pytest.mark.parametrize(
        "isa",
        [
            pytest.param(isa, id=isa.name, marks=() if isa is best else pytest.mark.sample(6))
            for isa in isas
        ],
    )


#: Parametrizes a test over all instruction sets.
every_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
every_isa_in_samples = take_samples(ISAS)
