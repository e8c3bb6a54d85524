"""Instruction sets with a matrix unit that is emulated or refused, and their targets."""

from __future__ import annotations

from dataclasses import replace

from machines import runnable_target
from memory_tiles import MemoryUnit, Refusal
from tvm.target import Target

from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.matrix_unit import MatrixUnit
from relayquant.codegen.kernels.isa.x86 import AMX, VNNI512

EMULATED = replace(AMX, unit=MemoryUnit(None))
REFUSED = replace(AMX, unit=MatrixUnit(Refusal("refuse", "")))
#: Instructions of a CPU with VNNI and tiles; without permission no tile instruction is executed.
WITH_TILES = Target({"kind": "llvm", "mcpu": "cascadelake", "mattr": ["+amx-tile", "+amx-int8"]})


def find_target(isa: Isa) -> Target:
    """Target for one of the units here, or for an instruction set that this machine can run."""
    if isa is EMULATED:
        return runnable_target(VNNI512)
    if isa is REFUSED:
        runnable_target(VNNI512)
        return WITH_TILES
    return runnable_target(isa)
