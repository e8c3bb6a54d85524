"""First bytes of a library -> the kind of CPU that it is made for."""

from __future__ import annotations

#: Machine numbers of ELF files (elf.h), bytes 18 and 19.
MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
MAGIC = b"\x7fELF"
#: Bytes that say it.
HEAD = 20


def read_machine(head: bytes) -> str:
    """Return the kind of CPU, as `platform.machine()` says it; "" if it is not known."""
    number = int.from_bytes(head[18:HEAD], "little")
    return MACHINES.get(number, "") if head.startswith(MAGIC) else ""
