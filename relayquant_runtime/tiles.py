"""Whether this process may use the tile registers of AMX."""

from __future__ import annotations

import ctypes
import platform
import sys

#: System call arch_prctl with ARCH_REQ_XCOMP_PERM for XTILEDATA, from Linux's asm/prctl.h.
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18


def may_use_tiles() -> bool:
    """Ask Linux whether this process may use tiles, as the libraries do."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0
