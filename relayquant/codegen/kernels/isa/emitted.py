"""Target -> instructions without which compiled code would end the process, for whoever loads it.

Features of a target also name what no code contains unasked, and machines differ in these without
harm. This list has what kernels use and what LLVM chooses by itself. The tiles of AMX are missing:
code asks for them before it uses them.
"""

from __future__ import annotations

from tvm.target import Target

from relayquant.codegen.kernels.isa.target import (
    Architecture,
    find_architecture,
    list_instructions,
)

#: LLVM's name -> Linux's name in /proc/cpuinfo, "" for what Linux has named since version 5.12 only
#: (2021): under an older one, machines that have these instructions would seem to lack them.
#: Sources: LLVM's X86.td and AArch64Features.td; Linux's cpufeatures.h and elf_hwcaps.rst.
EMITTED = {
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "popcnt": "popcnt",
    "movbe": "movbe",
    "lzcnt": "abm",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "gfni": "gfni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "",
    "avxvnni": "",
    "egpr": "",
    "neon": "asimd",
    "lse": "atomics",
    "rdm": "asimdrdm",
    "dotprod": "asimddp",
    "fullfp16": "asimdhp",
    "sve": "sve",
    "sve2": "sve2",
    "i8mm": "i8mm",
    "bf16": "bf16",
}

#: Architectures whose flags Linux names so.
FLAGGED = (Architecture.X86, Architecture.AARCH64)


def list_missing_instructions(target: Target, host: Target) -> list[str]:
    """List LLVM's names of the instructions that code for a target may contain and `host`, of the
    same architecture, lacks, sorted.
    """
    missing = list_instructions(target) - list_instructions(host)
    return sorted(missing & EMITTED.keys())


def list_linux_flags(target: Target) -> list[str]:
    """List what /proc/cpuinfo of a machine must name to run code for a target, sorted.

    Empty for 32-bit Arm, where Linux has other names.
    """
    if find_architecture(target) not in FLAGGED:
        return []
    flags = {EMITTED[name] for name in list_instructions(target) & EMITTED.keys()}
    return sorted(flags - {""})
