"""Target -> instruction set for its kernels."""

from __future__ import annotations

from tvm.target import Target

from relayquant.codegen.kernels.integer.lookup import AARCH64_SHUFFLES, X86_SHUFFLES, ByteShuffle
from relayquant.codegen.kernels.isa.arm import AARCH64_ISAS, ARM32_ISAS
from relayquant.codegen.kernels.isa.arm_bf16 import BFMMLA
from relayquant.codegen.kernels.isa.base import PORTABLE, Isa, IsaT
from relayquant.codegen.kernels.isa.bf16 import TILES_BF16, VECTORS_BF16, Bf16Isa
from relayquant.codegen.kernels.isa.target import (
    Architecture,
    find_architecture,
    has_feature,
    is_linux_64,
)
from relayquant.codegen.kernels.isa.timing import BF16_TIMINGS, TIMINGS, Timings
from relayquant.codegen.kernels.isa.x86 import X86_ISAS
from relayquant.errors import ConfigError
from relayquant_runtime.tiles import may_use_tiles

#: Fastest first. `select_isa` takes the first one whose features the target has.
ISAS: dict[Architecture, tuple[Isa, ...]] = {
    Architecture.X86: X86_ISAS,
    Architecture.AARCH64: AARCH64_ISAS,
    Architecture.ARM32: ARM32_ISAS,
    Architecture.OTHER: (),
}
#: Fastest first, as in ISAS.
BF16_ISAS: dict[Architecture, tuple[Bf16Isa, ...]] = {
    Architecture.X86: (TILES_BF16, VECTORS_BF16),
    Architecture.AARCH64: (BFMMLA,),
    Architecture.ARM32: (),
    Architecture.OTHER: (),
}
#: Fastest first, as in ISAS.
SHUFFLES: dict[Architecture, tuple[ByteShuffle, ...]] = {
    Architecture.X86: X86_SHUFFLES,
    Architecture.AARCH64: AARCH64_SHUFFLES,
    Architecture.ARM32: (),
    Architecture.OTHER: (),
}


def has_isa(isa: Isa | ByteShuffle, target: Target) -> bool:
    """Whether `target` (not this machine) can execute every instruction that `isa` emits.

    `isa` must be of the target's architecture: 32-bit and 64-bit Arm both have "neon". Code that
    uses a matrix unit asks 64-bit Linux for it.
    """
    if isinstance(isa, Isa) and isa.unit is not None and not is_linux_64(target):
        return False
    return all(has_feature(feature, target) for feature in isa.features)


def select_isa(target: Target) -> Isa:
    """Select the fastest instruction set of an LLVM target. PORTABLE if none is known.

    LLVM's description of the target decides. An instruction that the target lacks would abort the
    compiling process, so nothing is assumed from this machine.
    """
    for isa in ISAS[find_architecture(target)]:
        if has_isa(isa, target):
            return time_isa(isa, target, TIMINGS)
    return PORTABLE


def describe_products(target: Target) -> str:
    """Describe in one line the instructions with which kernels for a target multiply bytes.

    It is said whether this process may use them. If not, the same kernels run on vectors.
    """
    first, *refused = list_product_lines(target)
    return refused[0] if refused and not may_use_tiles() else first


def list_product_lines(target: Target) -> list[str]:
    """Return the line of `describe_products`, for a target with tiles followed by the line for a
    process that may not use them.
    """
    isa = select_isa(target)
    if isa.unit is None:
        return [f"int8 products: {isa.name}"]
    return [
        f"int8 products: {isa.name}, on tiles; few rows and depthwise on vectors",
        f"int8 products: {isa.companion.name}, on vectors, since this process may not use the "
        "tiles of AMX (an old kernel, a filter of system calls, or a small signal stack)",
    ]


def time_isa(isa: IsaT, target: Target, timings: Timings) -> IsaT:
    """Return the instruction set with the timing of the target's core, if that is known."""
    if find_architecture(target) is not Architecture.X86:
        return isa
    for features, timing in timings:
        if all(has_feature(feature, target) for feature in features):
            return isa.with_timing(timing)
    return isa


def select_bf16(target: Target) -> Bf16Isa:
    """Select the instructions of a target for products of bfloat16.

    Raises:
        ConfigError: The target has no such instructions.
    """
    for isa in BF16_ISAS[find_architecture(target)]:
        if has_isa(isa, target):
            return time_isa(isa, target, BF16_TIMINGS)
    raise ConfigError(
        f"precision='bf16': the target {target} has no instruction for products of bfloat16. "
        "Allowed: x86 CPUs with avx512bf16 (Cooper Lake, Sapphire Rapids and later Xeons, Zen 4 "
        "and later) and 64-bit Arm CPUs with bf16 (Neoverse V1 and N2, Cortex-A710 and later). Use "
        "precision='float32', or another target, such as 'llvm -mcpu=sapphirerapids' or 'llvm "
        "-mtriple=aarch64-linux-gnu -mcpu=neoverse-v1'.",
        code="RQ102",
    )


def has_bf16_tiles(target: Target) -> bool:
    """Whether a target has tiles for products of bfloat16."""
    return find_architecture(target) is Architecture.X86 and has_isa(TILES_BF16, target)


def select_fast_bf16(target: Target) -> Bf16Isa | None:
    """Select the instructions of a target for products of bfloat16 that are faster than those of
    float32: tiles, or vectors of a core whose timing says so. None if it has neither.
    """
    if find_architecture(target) is not Architecture.X86:
        return None
    if has_bf16_tiles(target):
        return TILES_BF16
    isa = time_isa(VECTORS_BF16, target, BF16_TIMINGS)
    return isa if has_isa(isa, target) and isa.timing.has_fast_pairs else None


def select_shuffle(target: Target) -> ByteShuffle | None:
    """Select how an LLVM target looks up bytes in registers. None if it cannot."""
    shuffles = SHUFFLES[find_architecture(target)]
    return next((shuffle for shuffle in shuffles if has_isa(shuffle, target)), None)
