"""CPU core -> its caches, for the choice of tiles and of loop orders. This machine does not matter.

Sources: Intel's and AMD's optimization manuals. Cores with the same instructions differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from relayquant.codegen.kernels.isa.target import Architecture, find_architecture, has_feature


@dataclass(frozen=True)
class Caches:
    """Caches of one core. The defaults fit every common core.

    Attributes:
        set_lines: Lines of one set of the first-level data cache. Addresses 4 KiB apart share a
            set.
        near_bytes: Bytes of the second-level cache.
        far_bytes: Bytes of weights that a core reads from the last-level cache, or from memory, in
            the time of one float multiply-add of a vector. Measured on Zen 4 and on Emerald Rapids.
    """

    set_lines: int = 8
    near_bytes: int = 1 << 20
    far_bytes: int = 12

    @property
    def is_far_slow(self) -> bool:
        """Whether it takes longer to read weights again than to keep more rows beside them."""
        return self.far_bytes < 6


#: Used if the core is not known.
COMMON_CACHES = Caches()
#: LLVM features that identify a core, features that it lacks -> its caches, newest first. Only AMD
#: cores have sse4a.
CACHES: tuple[tuple[tuple[str, ...], tuple[str, ...], Caches], ...] = (
    (("sse4a", "avx512vp2intersect"), (), Caches(12, 1 << 20)),  # Zen 5
    (("avx512fp16",), ("sse4a",), Caches(12, 2 << 20, 3)),  # Sapphire Rapids and later
    (("avx512vbmi2",), ("sse4a",), Caches(12, 5 << 18, 3)),  # Ice Lake
)


def find_caches(target: Target) -> Caches:
    """Return the caches of the target's core, or `COMMON_CACHES` if it is not known."""
    if find_architecture(target) is not Architecture.X86:
        return COMMON_CACHES
    for features, missing, caches in CACHES:
        has = all(has_feature(feature, target) for feature in features)
        if has and not any(has_feature(feature, target) for feature in missing):
            return caches
    return COMMON_CACHES
