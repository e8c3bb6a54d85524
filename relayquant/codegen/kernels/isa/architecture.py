"""Which family of CPUs a target belongs to: asked of its triple, not of the machine at hand."""

from __future__ import annotations

import enum

from tvm.target import Target
from tvm.target.codegen import llvm_get_system_triple

#: First words of the triples of 64-bit x86 and Arm.
ARCHITECTURES_64 = frozenset(["x86_64", "amd64", "aarch64", "arm64"])


class Architecture(enum.Enum):
    """Families of CPUs for which there are kernels."""

    X86 = "x86"  #: 32 and 64 bit
    AARCH64 = "aarch64"  #: 64-bit Arm
    ARM32 = "arm32"  #: 32-bit Arm, as Armv7
    OTHER = "other"  #: whatever else TVM compiles for


def read_triple(target: Target) -> str:
    """Architecture, maker and system, of a target without a triple those of this machine."""
    return str(target.attrs.get("mtriple") or llvm_get_system_triple())


def find_architecture(target: Target) -> Architecture:
    """The family of `target`; of a target without a triple, that of the machine that compiles."""
    if target.kind.name != "llvm":
        return Architecture.OTHER
    name = read_triple(target).split("-")[0].lower()
    if name in ("x86_64", "amd64", "x86") or (name[:1] == "i" and name[2:] == "86"):
        return Architecture.X86
    if name.startswith(("aarch64", "arm64")):
        return Architecture.OTHER if name == "aarch64_be" else Architecture.AARCH64
    if name.startswith(("arm", "thumb")):
        return Architecture.OTHER if "eb" in name else Architecture.ARM32
    return Architecture.OTHER
