"""Machine -> the instructions that Linux says it has."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

#: Machine -> first word of the line in /proc/cpuinfo. An emulator of another machine may show the
#: file of the one that it runs on, which has another word.
WORDS = {"x86_64": "flags", "i686": "flags", "aarch64": "Features"}
CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def read_flags() -> frozenset[str]:
    """Read Linux's names of what this machine has; empty where they cannot be read."""
    word = WORDS.get(platform.machine())
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return frozenset()
    rows = (line.partition(":") for line in lines)
    return frozenset(next((row[2].split() for row in rows if row[0].strip() == word), ()))
