"""Machines by what LLVM says of them: the CPU's name, and whether each feature is there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tvm.target import Target

from relayquant.codegen.kernels.isa.target import Architecture, find_architecture

#: Without a triple LLVM means this machine's architecture.
on_x86 = pytest.mark.skipif(
    find_architecture(Target("llvm")) is not Architecture.X86, reason="the CPUs under test are x86"
)


def split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: All that LLVM 22 asks an x86 CPU for.
ASKED = split_names("""
    64bit adx aes amx-avx512 amx-bf16 amx-complex amx-fp16 amx-fp8 amx-int8 amx-movrs amx-tf32
    amx-tile avx avx10.1 avx10.2 avx2 avx512bf16 avx512bitalg avx512bw avx512cd avx512dq avx512f
    avx512fp16 avx512ifma avx512vbmi avx512vbmi2 avx512vl avx512vnni avx512vp2intersect
    avx512vpopcntdq avxifma avxneconvert avxvnni avxvnniint16 avxvnniint8 bmi bmi2 ccmp cf cldemote
    clflushopt clwb clzero cmov cmpccxadd crc32 cx16 cx8 egpr enqcmd f16c fma fma4 fsgsbase fxsr
    gfni hreset invpcid kl lwp lzcnt mmx movbe movdir64b movdiri movrs mwaitx ndd nf pclmul pconfig
    pku popcnt ppx prefetchi prfchw ptwrite push2pop2 raoint rdpid rdpru rdrnd rdseed rtm sahf
    serialize sgx sha sha512 shstk sm3 sm4 sse sse2 sse3 sse4.1 sse4.2 sse4a ssse3 tbm tsxldtrk
    uintr usermsr vaes vpclmulqdq waitpkg wbnoinvd widekl xop xsave xsavec xsaveopt xsaves zu
""")
#: Virtual machines of Intel and AMD since 2022 have these.
BOTH = split_names("""
    64bit adx aes avx avx2 avx512bf16 avx512bitalg avx512bw avx512cd avx512dq avx512f avx512ifma
    avx512vbmi avx512vbmi2 avx512vl avx512vnni avx512vpopcntdq bmi bmi2 clflushopt clwb cmov crc32
    cx16 cx8 f16c fma fsgsbase fxsr gfni invpcid lzcnt mmx movbe pclmul pku popcnt prfchw rdpid
    rdrnd rdseed sahf sha sse sse2 sse3 sse4.1 sse4.2 ssse3 vaes vpclmulqdq wbnoinvd xsave xsavec
    xsaveopt xsaves
""")
#: With BOTH, all that LLVM said on a virtual machine with AMX, an Emerald Rapids.
SAPPHIRE = BOTH | split_names("""
    amx-bf16 amx-int8 amx-tile avx512fp16 avxvnni cldemote movdir64b movdiri serialize shstk
    tsxldtrk
""")
#: What LLVM knows of these CPUs, without what virtual machines hide. Not recorded.
ZEN4 = BOTH | {"clzero", "sse4a"}
ZEN5 = ZEN4 | {"avx512vp2intersect", "avxvnni", "movdir64b", "movdiri", "prefetchi"}


@dataclass(frozen=True)
class HostCpu:
    """What `ask_host` returns on a machine."""

    cpu: str
    has: frozenset[str]

    def ask(self) -> tuple[str, dict[str, bool]]:
        return self.cpu, {name: name in self.has for name in sorted(ASKED | self.has)}


HOSTS = {
    "Sapphire Rapids": HostCpu("rocketlake", SAPPHIRE),
    "Emerald Rapids": HostCpu("emeraldrapids", SAPPHIRE),
    "without AMX": HostCpu("emeraldrapids", frozenset(n for n in SAPPHIRE if n[:3] != "amx")),
    "without AVX512": HostCpu(
        "emeraldrapids",
        frozenset(name for name in SAPPHIRE if not name.startswith(("amx", "avx512"))),
    ),
    "Zen 4": HostCpu("znver4", ZEN4),
    "Zen 5": HostCpu("znver5", ZEN5),
    "Zen 4 without AVX512": HostCpu(
        "znver4", frozenset(name for name in ZEN4 if not name.startswith("avx512"))
    ),
    "unknown": HostCpu("generic", SAPPHIRE),
    "with APX": HostCpu("graniterapids", SAPPHIRE | {"egpr", "ndd", "nf", "ppx", "push2pop2"}),
}
