"""How an instruction set multiplies words of codes by words of rows: what grouped products are of.

A word is four neighbours of a row. Codes are unsigned bytes in the lanes of a vector, the word of
one output each; rows are signed bytes (or float32), of which one word meets all lanes. So codes
stand where activations do in other kernels, and rows where their weights do: the dot product of x86
is of unsigned by signed bytes.

    BytesDot   vpdpbusd: whole words as they are in memory; SdotDot: sdot
    ShortDot   vpmaddubsw: the same in int16, which some words of codes of few bits do not fill
    NeonDot    smull, sadalp: bytes of two outputs at once; ShortNeonDot: smlal of codes of few bits
    PairsDot   vpmaddwd: even and odd bytes, widened to int16
    LanesDot   multiply-add of int32 or float32 lanes, one of the four after the other: any target
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import broadcast, constant, load_vector, vector
from relayquant.codegen.kernels.isa.arm import (
    ArmIsa,
    SdotIsa,
    SmlalIsa,
    SmmlaIsa,
    SmullIsa,
    join,
    load_pieces,
    repeat,
    split,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, MaddIsa, SmallWeightIsa, VnniIsa

#: Neighbours of a row in one word.
WORD = 4
#: Words of codes of at most 4 bits whose products with rows int16 holds the sums of.
SHORT_WORDS = 8


@dataclass(frozen=True)
class GroupedDot(ABC):
    """Words of codes by words of rows.

    Attributes:
        lanes: Outputs of one vector.
        rows: Rows of the highest tile: registers hold two sums for each, and some codes.
        has_fma: Whether float multiply-add is an instruction.
    """

    lanes: int
    rows: int
    has_fma: bool

    #: dtype and elements of a word of a row, as `read_word` finds it in memory
    row_dtype = "int8"
    sum_dtype = "int32"
    #: Whether bytes of codes are taken as signed: those of 8 bits are stored minus 128.
    is_signed = False

    @abstractmethod
    def read_word(self, rows: Buffer, offset: Expr) -> Expr:
        """Operand: the word at `offset` (in elements of `row_dtype`) for all lanes."""

    def read_words(self, rows: Buffer, offset: Expr, count: int) -> list[Expr]:
        """Operands: `count` neighbouring words from `offset` on."""
        return [self.read_word(rows, offset + number * WORD) for number in range(count)]

    def shift_codes(self, words: Expr, bits: int) -> Expr:
        """int32 lanes of four bytes, each byte moved down by so many bits; what comes in from above
        does not matter.
        """
        return T.shift_right(words, constant("int32", bits, self.lanes))

    @abstractmethod
    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        """Operand: one word of codes per lane, from int32 lanes; less `zero`, for floats only."""

    @abstractmethod
    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        """acc[lane] + sum over the word of code * row."""


@dataclass(frozen=True)
class BytesDot(GroupedDot):
    """Of an instruction set whose dot product takes bytes."""

    isa: Isa

    def read_word(self, rows: Buffer, offset: Expr) -> Expr:
        word = T.reinterpret("int32", rows.vload([offset], f"int8x{WORD}"))
        return T.reinterpret(f"int8x{WORD * self.lanes}", T.broadcast(word, self.lanes))

    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        dtype = "int8" if self.is_signed else "uint8"
        return T.reinterpret(f"{dtype}x{WORD * self.lanes}", words)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        return self.isa.dot(acc, codes, word)


@dataclass(frozen=True)
class SdotDot(BytesDot):
    """sdot: words of rows by lane index, from registers that hold four of them."""

    isa: SdotIsa
    is_signed = True

    def read_words(self, rows: Buffer, offset: Expr, count: int) -> list[Expr]:
        return self.isa.load_activations(rows, offset, count)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        return self.isa.dot(acc, word, codes)


@dataclass(frozen=True)
class PartsDot(BytesDot):
    """Of an instruction set whose products of bytes are narrow, or not of whole words: there are
    several sums for each lane, of `SHORT_WORDS` words, in vectors of their own, until `join`.
    """

    part_dtype = "int16"

    @property
    @abstractmethod
    def part_lanes(self) -> int:
        """Sums of one vector, of dtype `part_dtype`; `dot` takes these."""

    @abstractmethod
    def join(self, acc: Expr, part: Expr) -> Expr:
        """acc[lane] + all sums of the lane."""


@dataclass(frozen=True)
class ShortDot(PartsDot):
    """Of an instruction set that adds pairs of products of bytes, unsigned by signed, as int16.

    Two products are at most 2 * 15 * 128 = 3,840 with codes of 4 bits, and 8 * 3,840 fits: so the
    sums of `SHORT_WORDS` words, two in each lane, stay int16 until `join` adds them to int32.
    """

    isa: SmallWeightIsa

    @property
    def part_lanes(self) -> int:
        return 2 * self.lanes

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        """As others, of int16, twice as many lanes, one for each pair."""
        dtype = f"int16x{2 * self.lanes}"
        return acc + T.call_llvm_pure_intrin(self.isa.pairs, codes, word, dtype=dtype)

    def join(self, acc: Expr, part: Expr) -> Expr:
        """acc[lane] + both int16 of the lane."""
        ones = T.broadcast(T.int16(1), 2 * self.lanes)
        dtype = f"int32x{self.lanes}"
        return acc + T.call_llvm_pure_intrin(self.isa.intrinsic, part, ones, dtype=dtype)


@dataclass(frozen=True)
class NeonDot(PartsDot):
    """smull and sadalp, of signed bytes: each product exact as int16, its neighbour added as int32.

    A part has two sums for each output, as pairs of places of a word are added.
    """

    isa: SmullIsa
    is_signed = True
    part_dtype = "int32"

    def read_words(self, rows: Buffer, offset: Expr, count: int) -> list[Expr]:
        """Four words of a load; each is in both halves of a register."""
        return [
            self.repeat_word(rows.vload([offset + first * WORD], f"int8x{size * WORD}"), size, lane)
            for first, size in load_pieces(count)
            for lane in range(size)
        ]

    def repeat_word(self, loaded: Expr, size: int, lane: int) -> Expr:
        """The fence keeps LLVM from seeing that both halves are the same: it would have one only,
        and move codes to meet it, instead of multiplying the upper halves (smlal2).
        """
        words = T.reinterpret(f"int32x{size}" if size > 1 else "int32", loaded)
        word = repeat(words, size, lane, 4) if size > 1 else T.broadcast(words, 4)
        name = "llvm.arithmetic.fence.v4f32"
        word = T.call_llvm_pure_intrin(name, T.reinterpret("float32x4", word), dtype="float32x4")
        return T.reinterpret("int8x16", word)

    def shift_codes(self, words: Expr, bits: int) -> Expr:
        """By bytes, which leaves nothing to mask in the last codes of a byte."""
        count = WORD * self.lanes
        moved = T.shift_right(
            T.reinterpret(f"uint8x{count}", words), T.broadcast(T.uint8(bits), count)
        )
        return T.reinterpret(f"int32x{self.lanes}", moved)

    @property
    def part_lanes(self) -> int:
        return 2 * self.lanes

    def multiply(self, codes: Expr, word: Expr) -> list[Expr]:
        """All products as vectors of 8 int16, two outputs each."""
        count = WORD * self.lanes // 8
        halves = split(word, 16, 2) * (count // 2)
        return [
            T.call_llvm_pure_intrin(self.isa.intrinsic, *pair, dtype="int16x8")
            for pair in zip(split(codes, 8 * count, count), halves, strict=True)
        ]

    def add_pairs(self, vectors: list[Expr]) -> list[Expr]:
        """Neighbours of 8 int16 as 4 int32."""
        return [
            T.call_llvm_pure_intrin(self.isa.add_pairs, each, dtype="int32x4") for each in vectors
        ]

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        """As others, of a part."""
        return acc + join(self.add_pairs(self.multiply(codes, word)), self.part_lanes)

    def join(self, acc: Expr, part: Expr) -> Expr:
        return acc + self.join_pairs(split(part, self.part_lanes, self.part_lanes // 4))

    def join_pairs(self, vectors: list[Expr]) -> Expr:
        """Neighbours of 4 int32 added: one lane for each output."""
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        sums = [
            T.call_llvm_pure_intrin(self.isa.sum_pairs, *pair, dtype="int32x4") for pair in pairs
        ]
        return join(sums, self.lanes)


@dataclass(frozen=True)
class ShortNeonDot(NeonDot):
    """smlal of bytes, for codes of at most 4 bits: a product is at most 15 * 128 = 1,920, and int16
    holds 17 of those. So `SHORT_WORDS` of them are added to one int16 for each place of a word.
    """

    part_dtype = "int16"

    @property
    def part_lanes(self) -> int:
        return WORD * self.lanes

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        return acc + join(self.multiply(codes, word), self.part_lanes)

    def join(self, acc: Expr, part: Expr) -> Expr:
        vectors = split(part, self.part_lanes, self.part_lanes // 8)
        return acc + self.join_pairs(self.add_pairs(vectors))


@dataclass(frozen=True)
class PairsDot(GroupedDot):
    """Of an instruction set that multiplies pairs of int16: rows lie as x0 x2 x1 x3, int16."""

    isa: MaddIsa
    row_dtype = "int16"

    def read_word(self, rows: Buffer, offset: Expr) -> Expr:
        pairs = (rows.vload([offset + half], "int16x2") for half in (0, 2))
        words = (T.broadcast(T.reinterpret("int32", pair), self.lanes) for pair in pairs)
        return tuple(T.reinterpret(f"int16x{2 * self.lanes}", word) for word in words)

    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        return self.isa.as_activation(words)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        return self.isa.dot(acc, codes, word)


@dataclass(frozen=True)
class LanesDot(GroupedDot):
    """Ordinary vectors of int32."""

    def read_word(self, rows: Buffer, offset: Expr) -> Expr:
        # One load, of which LLVM makes one of each element where instructions take those from
        # memory. With four, `CompactBufferAllocation` would take ten seconds over their indices.
        word = T.Cast(vector(self.sum_dtype, WORD), load_vector(rows, offset, WORD))
        values = (T.Shuffle([word], [T.int32(place)]) for place in range(WORD))
        return tuple(broadcast(value, self.lanes) for value in values)

    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        lanes, mask = self.lanes, constant("int32", 0xFF, self.lanes)
        shifts = (constant("int32", 8 * place, lanes) for place in range(WORD))
        return tuple(T.bitwise_and(T.shift_right(words, shift), mask) for shift in shifts)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        for code, value in zip(codes, word, strict=True):
            acc = acc + code * value
        return acc


@dataclass(frozen=True)
class FloatDot(LanesDot):
    """Vectors of float32: rows as they are. Zero points leave the codes before the product, where
    the difference is exact; sums of codes with their zero points would cancel.
    """

    row_dtype = sum_dtype = "float32"

    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        codes = super().spread_codes(words, None)
        return tuple(T.Cast(f"float32x{self.lanes}", code - zero) for code in codes)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        for code, value in zip(codes, word, strict=True):
            acc = multiply_add(self, code, value, acc)
        return acc


def multiply_add(dot: GroupedDot, a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c of float32 vectors: one rounding where the target has the instruction."""
    if not dot.has_fma:
        return a * b + c
    name = f"llvm.fma.v{dot.lanes}f32"
    return T.call_llvm_pure_intrin(name, a, b, c, dtype=f"float32x{dot.lanes}")


def choose_dot(isa: Isa, is_float: bool, bits: int) -> GroupedDot:
    """The way of an instruction set, for rows of float32 or of int8 and codes of so many bits."""
    if isinstance(isa, SmmlaIsa):
        isa = isa.single
    is_arm = isinstance(isa, ArmIsa)
    # Arm reads a word of a row once for two of its short vectors.
    lanes = 2 * isa.lanes if is_arm else isa.lanes
    many = isa.registers > 16
    if is_float:
        return FloatDot(lanes, 4 if is_arm or not many else 8, isa.has_fma)
    if isinstance(isa, SdotIsa):
        return SdotDot(lanes, 4, isa.has_fma, replace(isa, lanes=lanes))
    if isinstance(isa, SmlalIsa) and isa.for_bytes is not None:
        kind = ShortNeonDot if bits < 8 else NeonDot
        return kind(lanes, 2, isa.has_fma, isa.for_bytes)
    if isinstance(isa, VnniIsa):
        return BytesDot(lanes, 12 if many else 4, isa.has_fma, isa)
    if isinstance(isa, MaddIsa) and isa.small is not None and bits < 8:
        return ShortDot(lanes, 8 if many else 4, isa.has_fma, isa.small)
    if isinstance(isa, MaddIsa):
        return PairsDot(lanes, 8 if many else 3, isa.has_fma, isa)
    return LanesDot(lanes, 4 if many else 2, isa.has_fma)
