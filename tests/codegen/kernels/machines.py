"""Which instruction sets the tests compile for, and whether this machine can run them."""

from __future__ import annotations

import platform

import pytest
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu

from relayquant.codegen.kernels.isa.base import PORTABLE, X86_ISAS, Isa
from relayquant.codegen.kernels.isa.select import has_isa

#: A CPU that has the instruction set and no better one.
REPRESENTATIVE = {
    "vnni512": "cascadelake",
    "vnni256": "alderlake",
    "avx512bw": "skylake-avx512",
    "avx2": "haswell",
    "sse2": "x86-64",
    "portable": "x86-64",
}
ISAS = (*X86_ISAS, PORTABLE)

#: Parametrizes a test over all instruction sets.
every_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def target_of(mcpu: str) -> Target:
    return Target({"kind": "llvm", "mcpu": mcpu})


def runnable_target(isa: Isa) -> Target:
    """Target of a CPU whose best instruction set is `isa`; skips if this machine lacks it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the instruction sets under test are of x86")
    if not has_isa(isa, target_of(llvm_get_system_cpu())):
        pytest.skip(f"this machine cannot run {isa.name}")
    return target_of(REPRESENTATIVE[isa.name])


def best_isa() -> Isa:
    """The best instruction set of this machine that the tests know."""
    host = target_of(llvm_get_system_cpu())
    return next((isa for isa in X86_ISAS if has_isa(isa, host)), PORTABLE)
