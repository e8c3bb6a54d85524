"""Specification of a table lookup by bytes -> its kernel, as TIR. A table has 256 values.

    y[i] = table[x[i] as uint8]

If the instruction set can look up many bytes at once (`ByteShuffle`), tables of bytes are held in
vector registers. Other tables, and other targets, take one load per value: no target gathers bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    build_kernel,
    constant,
    declare_argument,
    emit_shared_loop,
    flat_view,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr

#: Values in a table: one for each byte.
TABLE_SIZE = 256
#: From this many values on, threads share the work, if each value takes a load; else from 8 times
#: as many.
PARALLEL_VALUES = 1 << 14
#: Values that are loaded per step of the loop.
SCALARS = 8
#: emit(offset, lanes)
EmitValues = Callable[[Expr, int], None]


@dataclass(frozen=True)
class ByteShuffle(ABC):
    """Instructions that look bytes up in a section of the table, held in registers."""

    name: str
    features: tuple[str, ...]  #: LLVM features, all needed
    lanes: int  #: bytes looked up at once
    intrinsic: str

    @abstractmethod
    def emit(self, table: Buffer, index: Expr) -> Expr:
        """Look up the bytes of a uint8 table (TABLE_SIZE,) at `index`, a uint8 vector."""

    def call(self, *operands: Expr) -> Expr:
        dtype = vector("uint8", self.lanes)
        return T.call_llvm_pure_intrin(self.intrinsic, *operands, dtype=dtype)


@dataclass(frozen=True)
class TwoRegisterShuffle(ByteShuffle):
    """vpermi2b: looks up 128 bytes in two registers and ignores the top bit of an index."""

    def emit(self, table: Buffer, index: Expr) -> Expr:
        parts = [load_vector(table, at, self.lanes) for at in range(0, TABLE_SIZE, self.lanes)]
        low, high = self.call(parts[0], index, parts[1]), self.call(parts[2], index, parts[3])
        return T.Select(index >= constant("uint8", 128, self.lanes), high, low)


@dataclass(frozen=True)
class PartShuffle(ByteShuffle):
    """pshufb: looks up 16 bytes per 128-bit block; 0 if the index has its top bit set.

    Indices of other sections of the table get this bit by a saturating addition.
    """

    def emit(self, table: Buffer, index: Expr) -> Expr:
        size, result = 16, None
        add = f"llvm.uadd.sat.v{self.lanes}i8"
        for first in range(0, TABLE_SIZE, size):
            part = load_vector(table, first, size)
            copies = self.lanes // size
            part = T.Shuffle([part] * copies, [T.int32(i % size) for i in range(self.lanes)])
            own = T.bitwise_xor(index, constant("uint8", first, self.lanes))
            operands = own, constant("uint8", 128 - size, self.lanes)
            own = T.call_llvm_pure_intrin(add, *operands, dtype=vector("uint8", self.lanes))
            found = self.call(part, own)
            result = found if result is None else T.bitwise_or(result, found)
        return result


@dataclass(frozen=True)
class RegisterListShuffle(ByteShuffle):
    """tbl: looks up 64 bytes in four registers; 0 if the index is larger."""

    def emit(self, table: Buffer, index: Expr) -> Expr:
        result, size = None, 4 * self.lanes
        for first in range(0, TABLE_SIZE, size):
            parts = [load_vector(table, first + i * self.lanes, self.lanes) for i in range(4)]
            found = self.call(*parts, index - constant("uint8", first, self.lanes))
            result = found if result is None else T.bitwise_or(result, found)
        return result


VPERMI2B = TwoRegisterShuffle(
    "vpermi2b", ("avx512vbmi", "avx512bw"), 64, "llvm.x86.avx512.vpermi2var.qi.512"
)
PSHUFB_512 = PartShuffle("pshufb512", ("avx512bw",), 64, "llvm.x86.avx512.pshuf.b.512")
PSHUFB_256 = PartShuffle("pshufb256", ("avx2",), 32, "llvm.x86.avx2.pshuf.b")
TBL = RegisterListShuffle("tbl", ("neon",), 16, "llvm.aarch64.neon.tbl4.v16i8")

#: Fastest first.
X86_SHUFFLES: tuple[ByteShuffle, ...] = (VPERMI2B, PSHUFB_512, PSHUFB_256)
AARCH64_SHUFFLES: tuple[ByteShuffle, ...] = (TBL,)


@dataclass(frozen=True)
class Lookup:
    """table[x as uint8]. The table has 256 values of `out_dtype`. None: an extent of the run
    time.
    """

    shape: tuple[int | None, ...]
    dtype: str
    out_dtype: str


def build_lookup(spec: Lookup, shuffle: ByteShuffle | None = None) -> PrimFunc:
    """Make PrimFunc(x, table (256,), y).

    For tables of bytes it uses `shuffle`, if the target has one.
    """
    if spec.dtype not in ("uint8", "int8"):
        raise ValueError(f"Lookup: data is {spec.dtype!r}; allowed: uint8, int8.")
    if spec.out_dtype not in ("uint8", "int8"):
        shuffle = None

    def body() -> None:
        arguments = [
            declare_argument("x", spec.shape, spec.dtype),
            declare_argument("table", (TABLE_SIZE,), spec.out_dtype),
            declare_argument("y", spec.shape, spec.out_dtype),
        ]
        data, table, out = map(flat_view, arguments)
        (size,) = data.shape

        def load_each(at: Expr, lanes: int) -> None:
            for i in range(lanes):
                index = T.Cast("int32", T.reinterpret("uint8", data.vload([at + i])))
                T.buffer_store(out, table.vload([index]), [at + i])

        if shuffle is None:
            emit_values(size, SCALARS, load_each, load_each, PARALLEL_VALUES)
            return
        bits = T.decl_buffer((TABLE_SIZE,), "uint8", data=table.data)

        def look_up(at: Expr, lanes: int) -> None:
            index = T.reinterpret(vector("uint8", lanes), load_vector(data, at, lanes))
            found = shuffle.emit(bits, index)
            store_vector(out, T.reinterpret(vector(spec.out_dtype, lanes), found), at, lanes)

        emit_values(size, shuffle.lanes, look_up, load_each, 8 * PARALLEL_VALUES)

    return build_kernel("qnn_lookup", body)


def emit_values(
    size: Expr, lanes: int, emit: EmitValues, emit_rest: EmitValues, parallel_values: int
) -> None:
    """Emit whole vectors of `size` values, on threads from `parallel_values` on, then the rest, one
    by one.
    """
    whole = T.floordiv(size, lanes)
    emit_shared_loop(whole, size >= parallel_values, lambda index: emit(index * lanes, lanes))
    with T.serial(size - whole * lanes) as index:
        emit_rest(whole * lanes + index, 1)
