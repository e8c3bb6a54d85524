"""First bytes of a library -> the kind of CPU that it is made for, and how long the file is."""

from __future__ import annotations

#: Machine numbers of ELF files (elf.h), bytes 18 and 19.
MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
MAGIC = b"\x7fELF"
#: Bytes at the beginning of a file that the functions below read.
HEAD = 64
#: Class of a file, byte 4 -> where its head says where the table of sections begins, how long an
#: entry is, and how many there are: place and bytes of a number.
SECTIONS = {1: ((32, 4), (46, 2), (48, 2)), 2: ((40, 8), (58, 2), (60, 2))}


def read_machine(head: bytes) -> str:
    """Return the kind of CPU, as `platform.machine()` says it; "" if it is not known."""
    number = int.from_bytes(head[18:20], "little")
    return MACHINES.get(number, "") if head.startswith(MAGIC) else ""


def read_length(head: bytes) -> int:
    """Return how many bytes the file has at least: linkers write the table of sections last. 0 if
    the head does not say it.
    """
    if not head.startswith(MAGIC) or len(head) < HEAD or head[4] not in SECTIONS:
        return 0
    start, size, count = (
        int.from_bytes(head[at : at + width], "little") for at, width in SECTIONS[head[4]]
    )
    return start + size * count
