"""Large data -> an object file that a linker joins to a library, with one symbol for its start.

LLVM's assembler would hold the data twice in memory. The file is an ELF object of 64 bits
(https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html) with the sections

    data, .note.GNU-stack (nothing needs an executable stack), .symtab, .strtab, .shstrtab

On x86-64 code reaches 2 GiB. There data is in `.lrodata`, which linkers place behind everything
that code reads (System V ABI for AMD64, 4.2.1). On AArch64 code reaches 4 GiB, and there is no
such section.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from relayquant.base.storage.files import TEMPORARY, writing
from relayquant.errors import ModelError

#: What an ELF file of 64 bits with little-endian numbers begins with.
IDENT = b"\x7fELF\x02\x01\x01" + bytes(9)
#: Formats of the header, of a section header and of a symbol.
HEADER, SECTION, SYMBOL = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ"
RELOCATABLE, PROGBITS, SYMTAB, STRTAB = 1, 1, 2, 3
#: Flags of a section: in memory; beyond the reach of code.
ALLOC, LARGE = 0x2, 0x10000000
#: Kind of a global symbol of data, and its visibility: in this library only.
GLOBAL_OBJECT, HIDDEN = 0x11, 2


@dataclass(frozen=True)
class DataSection:
    """Where the object files of an architecture have large data.

    Attributes:
        machine: Number of the architecture.
        most: Bytes that a library can have. 0: any number.
    """

    machine: int
    name: str
    flags: int = ALLOC
    most: int = 0


X86_64 = DataSection(62, ".lrodata.relayquant", ALLOC | LARGE)
#: Code, its data and its constants must be within 4 GiB, too.
AARCH64 = DataSection(183, ".rodata.relayquant", most=(1 << 32) - (64 << 20))


@contextmanager
def writing_object(
    path: Path, section: DataSection, symbol: str, alignment: int
) -> Iterator[BinaryIO]:
    """Write an object file. Yields a file that takes the data of its section.

    Raises:
        FileError: there is no space for it.
        ModelError: the linkers of the architecture do not take so much data.
    """
    names = b"\0".join([b"", section.name.encode(), b".note.GNU-stack", b".symtab"])
    names += b"\0.strtab\0.shstrtab\0"

    def place(name: str) -> int:
        return names.index(b"\0" + name.encode() + b"\0") + 1

    start = -(-struct.calcsize(HEADER) // alignment) * alignment
    with writing(path, TEMPORARY), path.open("wb") as file:
        file.write(bytes(start))
        yield file
        size = file.tell() - start
        if 0 < section.most < size:
            raise ModelError(
                f"The library would have {size / 1e9:.2f} GB of constants; linkers of this "
                f"architecture take up to {section.most / 1e9:.2f} GB. Use fewer bits: "
                "relayquant.compress_weights.",
                code="RQ203",
            )
        file.write(bytes(-file.tell() % 8))
        symbols = file.tell()
        file.write(struct.pack(SYMBOL, 0, 0, 0, 0, 0, 0))
        file.write(struct.pack(SYMBOL, 1, GLOBAL_OBJECT, HIDDEN, 1, 0, size))
        texts = file.tell()
        file.write(f"\0{symbol}\0".encode())
        shown = file.tell()
        file.write(names + bytes(-(shown + len(names)) % 8))
        headers = file.tell()
        # name, kind, flags, address, offset, size, link, info, alignment, size of an entry
        for header in (
            (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            (place(section.name), PROGBITS, section.flags, 0, start, size, 0, 0, alignment, 0),
            (place(".note.GNU-stack"), PROGBITS, 0, 0, symbols, 0, 0, 0, 1, 0),
            (place(".symtab"), SYMTAB, 0, 0, symbols, texts - symbols, 4, 1, 8, 24),
            (place(".strtab"), STRTAB, 0, 0, texts, shown - texts, 0, 0, 1, 0),
            (place(".shstrtab"), STRTAB, 0, 0, shown, len(names), 0, 0, 1, 0),
        ):
            file.write(struct.pack(SECTION, *header))
        file.seek(0)
        whole = (IDENT, RELOCATABLE, section.machine, 1, 0, 0, headers, 0, 64, 0, 0, 64, 6, 5)
        file.write(struct.pack(HEADER, *whole))
