"""Whether this process may use the tile registers of AMX, and whether a library does."""

from __future__ import annotations

import ctypes
import platform
import sys

#: System call arch_prctl with ARCH_REQ_XCOMP_PERM for XTILEDATA, from Linux's asm/prctl.h.
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18
#: A library's byte with the answer that it got when it asked, which it keeps; 0 before it asks.
ANSWER, GRANTED = "relayquant_tile_permission", 1


def may_use_tiles() -> bool:
    """Ask Linux whether this process may use tiles, as the libraries do."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0


def uses_tiles(library: ctypes.CDLL) -> bool:
    """Whether a library runs on tiles: as Linux answered the library, or as Linux answers now if
    the library has not asked. Filters of system calls and signal stacks come and go between.
    """
    try:
        answer = ctypes.c_uint8.in_dll(library, ANSWER).value
    except ValueError:  # no kernel asks
        answer = 0
    return answer == GRANTED if answer else may_use_tiles()
