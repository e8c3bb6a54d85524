"""Matrix units as values for the kernel generators: the tile registers of Intel's AMX.

A unit has eight tile registers of up to 16 rows of 64 bytes. One instruction multiplies two of them
and adds to a third:

    sums (16 rows x 16 int32)  +=  A (16 rows x 64 bytes)  x  B (16 words x 16 channels x 4 bytes)

The bytes are integers, or pairs of bfloat16 with sums in float32. A word of B is a vector of 64
bytes as vpdpbusd or vdpbf16ps takes it, so kernels for vectors read the same packed weights. A
product takes the same time for one row as for sixteen. Source: Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

#: Dtype in which kernels hold bfloat16: its bits. TVM would compute bfloat16 itself in float32.
BF16_BITS = "uint16"
#: Dtypes of activations and weights -> instruction that multiplies tiles.
PRODUCTS = {
    ("uint8", "int8"): "tdpbusd",
    ("int8", "int8"): "tdpbssd",
    ("int8", "uint8"): "tdpbsud",
    (BF16_BITS, BF16_BITS): "tdpbf16ps",
}

#: A TIR expression or buffer. TVM gives them no useful static type.
Expr = Any
Buffer = Any
#: Loads or stores a tile: (number, buffer, first element, distance of rows).
MoveTile = Callable[[int, Buffer, Expr, int], None]


@dataclass(frozen=True)
class Question:
    """A function of the library that asks the system something. It has no parameters."""

    function: str  #: it returns int32
    file: str  #: LLVM code with the function, next to this module

    @property
    def code(self) -> str:
        return importlib.resources.files(__package__).joinpath(self.file).read_text("utf-8")


@dataclass(frozen=True)
class MatrixUnit:
    """Sizes and instructions of the tile registers."""

    #: whether this process may use the unit: 0 for no. None: kernels use it without asking
    permission: Question | None
    rows: int = 16  #: most rows of a tile
    row_bytes: int = 64  #: most bytes of a row
    registers: int = 8
    product_cycles: int = 20  #: between two products whose operands are loaded
    load_cycles: int = 9  #: of a tile in the first-level cache
    store_cycles: int = 26  #: of a tile: the load of its bias, and the store of its sums

    def configure(self, shapes: Sequence[tuple[Expr | int, int]]) -> Tiles:
        """Emit the configuration of the tile registers: (rows, bytes of a row) of each.

        The rows may be known only at run time.
        """
        memory = np.zeros(64, "uint8")  # palette 1, then bytes at 16 and rows at 48
        memory[0] = 1
        memory[16 : 16 + 2 * len(shapes)] = np.array([size for _, size in shapes], "<u2").view("u1")
        config = T.alloc_buffer((8,), "int64")
        for i, word in enumerate(memory.view("<i8")):
            T.buffer_store(config, T.int64(int(word)), [i])
        heights: Expr = T.int64(0)
        for i, (rows, _) in enumerate(shapes):
            heights = heights + T.Cast("int64", rows) * T.int64(1 << 8 * i)
        T.buffer_store(config, heights, [6])
        emit_instruction("ldtilecfg", T.address_of(config[0]))
        return Tiles()


@dataclass(frozen=True)
class Tiles:
    """Configured tile registers, by number. Distances of rows are in elements of the buffer."""

    def clear(self, tile: int) -> None:
        """Fill a tile with zeros."""
        emit_instruction("tilezero", T.int8(tile))

    def load(self, tile: int, buffer: Buffer, at: Expr, distance: int) -> None:
        """Load a tile whose first row begins at element `at`. Distance 0 repeats one row."""
        self.move("tileloadd64", tile, buffer, at, distance)

    def stream(self, tile: int, buffer: Buffer, at: Expr, distance: int) -> None:
        """Do the same without keeping the bytes in the first-level cache."""
        self.move("tileloaddt164", tile, buffer, at, distance)

    def store(self, tile: int, buffer: Buffer, at: Expr, distance: int) -> None:
        """Store a tile."""
        self.move("tilestored64", tile, buffer, at, distance)

    def move(self, name: str, tile: int, buffer: Buffer, at: Expr, distance: int) -> None:
        size = np.dtype(buffer.dtype).itemsize
        address = T.address_of(buffer[at])
        emit_instruction(name, T.int8(tile), address, T.int64(distance * size))

    def multiply(self, sums: int, a: int, b: int, dtypes: tuple[str, str]) -> None:
        """Add the products of tiles a and b, whose dtypes are a key of `PRODUCTS`."""
        emit_instruction(PRODUCTS[dtypes], T.int8(sums), T.int8(a), T.int8(b))

    def release(self) -> None:
        """Emit the end of all use: the tiles then cost nothing at a change of threads."""
        emit_instruction("tilerelease")


def emit_instruction(name: str, *args: Expr) -> None:
    T.evaluate(T.call_llvm_intrin(f"llvm.x86.{name}", *args, dtype="void"))


#: How many threads a parallel loop has, on Linux.
COUNT_THREADS = Question("relayquant_count_threads", "thread_count.ll")
AMX_INT8 = MatrixUnit(Question("relayquant_may_use_tiles", "tile_permission.ll"))
#: The same registers. CPUs have both kinds of products.
AMX_BF16 = AMX_INT8
