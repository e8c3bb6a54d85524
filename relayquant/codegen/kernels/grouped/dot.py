"""Instruction set -> how grouped products multiply words of codes by words of rows.

A word is four neighbours of a row. Codes are unsigned bytes in the lanes of a vector, one word of
an output per lane. Rows are signed bytes (or float32), and one word of a row is used for all lanes.
So codes take the place that activations have in other kernels, and rows the place of weights: the
dot product of x86 multiplies unsigned by signed bytes.

    BytesDot   vpdpbusd: whole words as they are in memory; SdotDot: sdot
    ShortDot   vpmaddubsw: the same in int16, which holds sums of some words of codes with few bits
    NeonDot    smull, sadalp: bytes of two outputs at once; ShortNeonDot: smlal for codes of few
        bits
    PairsDot   vpmaddwd: even and odd bytes, widened to int16
    LanesDot   multiply-add of int32 or float32 lanes, the four of a word in turn: any target
    TableDot   the same for float32 lanes and codes of 4 bits, whose values vpermps looks up
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, fence
from relayquant.codegen.kernels.isa.x86 import MaddIsa, SmallWeightIsa, VnniIsa

#: Neighbours of a row in one word.
WORD = 4
#: Codes of 4 bits, and lanes of the vectors of AVX512 that hold their values.
TABLE_SIZE = 16
#: Words of codes of at most 4 bits for which int16 holds the sums of products with rows.
SHORT_WORDS = 8


@dataclass(frozen=True)
class GroupedDot(ABC):
    """Products of words of codes and words of rows.

    Attributes:
        lanes: Outputs of one vector.
        rows: Rows of the highest tile: registers hold two sums for each, and some codes.
        has_fma: Whether float multiply-add is an instruction.
    """

    lanes: int
    rows: int
    has_fma: bool

    #: dtype of a word of a row in memory, as `read_word` reads it
    row_dtype = "int8"
    sum_dtype = "int32"
    #: Whether bytes of codes are signed. Then codes of 8 bits are stored minus 128.
    is_signed = False
    #: Multiply-adds of a word.
    steps = 1
    #: Whether `spread_codes` reads only the lowest code of each byte, whatever is above.
    reads_low_bits = False

    @abstractmethod
    def read_word(self, rows: Buffer, offset: Expr) -> Expr:
        """Read the word at `offset` (in elements of `row_dtype`) as an operand for all lanes."""

    def read_words(self, rows: Buffer, offset: Expr, count: int) -> list[Expr]:
        """Read `count` neighbouring words from `offset` on as operands."""
        return [self.read_word(rows, offset + number * WORD) for number in range(count)]

    def shift_codes(self, words: Expr, bits: int) -> Expr:
        """Shift each byte of int32 lanes right by `bits`. The incoming bits do not matter."""
        return T.shift_right(words, constant("int32", bits, self.lanes))

    @abstractmethod
    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        """Make an operand with one word of codes per lane, from int32 lanes.

        Floats subtract `zero`.
        """

    @abstractmethod
    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        """Compute acc[lane] + sum over the word of code * row."""


@dataclass(frozen=True)
class BytesDot(GroupedDot):
    """For an instruction set whose dot product takes bytes."""

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
    """sdot: words of rows by lane index, from registers that hold four words."""

    isa: SdotIsa
    is_signed = True

    def read_words(self, rows: Buffer, offset: Expr, count: int) -> list[Expr]:
        return self.isa.load_activations(rows, offset, count)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        return self.isa.dot(acc, word, codes)


@dataclass(frozen=True)
class PartsDot(BytesDot):
    """For an instruction set whose byte products are narrow, or do not sum whole words.

    There are several sums for each lane, over `SHORT_WORDS` words, in separate vectors until
    `join`.
    """

    part_dtype = "int16"

    @property
    @abstractmethod
    def part_lanes(self) -> int:
        """Number of sums of dtype `part_dtype` in one vector, the accumulator of `dot`."""

    @abstractmethod
    def join(self, acc: Expr, part: Expr) -> Expr:
        """Compute acc[lane] + all sums of the lane."""


@dataclass(frozen=True)
class ShortDot(PartsDot):
    """For an instruction set that adds pairs of byte products, unsigned by signed, as int16.

    With codes of 4 bits two products are at most 2 * 15 * 128 = 3,840, and 8 * 3,840 fits int16. So
    the sums of `SHORT_WORDS` words, two in each lane, stay int16 until `join` adds them to int32.
    """

    isa: SmallWeightIsa

    @property
    def part_lanes(self) -> int:
        return 2 * self.lanes

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        """Add the products as int16 to twice as many lanes, one for each pair."""
        dtype = f"int16x{2 * self.lanes}"
        return acc + T.call_llvm_pure_intrin(self.isa.pairs, codes, word, dtype=dtype)

    def join(self, acc: Expr, part: Expr) -> Expr:
        """Compute acc[lane] + both int16 of the lane."""
        ones = T.broadcast(T.int16(1), 2 * self.lanes)
        dtype = f"int32x{self.lanes}"
        return acc + T.call_llvm_pure_intrin(self.isa.intrinsic, part, ones, dtype=dtype)


@dataclass(frozen=True)
class NeonDot(PartsDot):
    """smull and sadalp, for signed bytes: exact products as int16, neighbours added as int32.

    A vector of sums has two for each output, since pairs of places of a word are added.
    """

    isa: SmullIsa
    is_signed = True
    part_dtype = "int32"

    def read_words(self, rows: Buffer, offset: Expr, count: int) -> list[Expr]:
        """Load four words at a time. Each word is in both halves of a register."""
        return [
            self.repeat_word(rows.vload([offset + first * WORD], f"int8x{size * WORD}"), size, lane)
            for first, size in load_pieces(count)
            for lane in range(size)
        ]

    def repeat_word(self, loaded: Expr, size: int, lane: int) -> Expr:
        """Repeat a word in both halves of a register.

        Without the fence LLVM would see that both halves are equal. It would keep only one, and
        move codes to it instead of multiplying the upper halves (smlal2).
        """
        words = T.reinterpret(f"int32x{size}" if size > 1 else "int32", loaded)
        word = repeat(words, size, lane, 4) if size > 1 else T.broadcast(words, 4)
        return T.reinterpret("int8x16", fence(T.reinterpret("float32x4", word), 4))

    def shift_codes(self, words: Expr, bits: int) -> Expr:
        """Shift bytes separately. Then the last codes of a byte need no mask."""
        count = WORD * self.lanes
        moved = T.shift_right(
            T.reinterpret(f"uint8x{count}", words), T.broadcast(T.uint8(bits), count)
        )
        return T.reinterpret(f"int32x{self.lanes}", moved)

    @property
    def part_lanes(self) -> int:
        return 2 * self.lanes

    def multiply(self, codes: Expr, word: Expr) -> list[Expr]:
        """Compute all products as vectors of 8 int16, for two outputs each."""
        count = WORD * self.lanes // 8
        halves = split(word, 16, 2) * (count // 2)
        return [
            T.call_llvm_pure_intrin(self.isa.intrinsic, *pair, dtype="int16x8")
            for pair in zip(split(codes, 8 * count, count), halves, strict=True)
        ]

    def add_pairs(self, vectors: list[Expr]) -> list[Expr]:
        """Add neighbours of 8 int16 to 4 int32."""
        return [
            T.call_llvm_pure_intrin(self.isa.add_pairs, each, dtype="int32x4") for each in vectors
        ]

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        """Add the products to a vector of `part_lanes` sums."""
        return acc + join(self.add_pairs(self.multiply(codes, word)), self.part_lanes)

    def join(self, acc: Expr, part: Expr) -> Expr:
        return acc + self.join_pairs(split(part, self.part_lanes, self.part_lanes // 4))

    def join_pairs(self, vectors: list[Expr]) -> Expr:
        """Add neighbours of 4 int32: one lane for each output."""
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        sums = [
            T.call_llvm_pure_intrin(self.isa.sum_pairs, *pair, dtype="int32x4") for pair in pairs
        ]
        return join(sums, self.lanes)


@dataclass(frozen=True)
class ShortNeonDot(NeonDot):
    """smlal of bytes, for codes of at most 4 bits.

    A product is at most 15 * 128 = 1,920, and int16 holds the sum of 17 products. So `SHORT_WORDS`
    products are added to one int16 for each place of a word.
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
    """For an instruction set that multiplies pairs of int16.

    Rows are stored as x0 x2 x1 x3, int16.
    """

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

    steps = WORD

    def read_word(self, rows: Buffer, offset: Expr) -> Expr:
        # One load, which LLVM splits into loads of each element if instructions read these from
        # memory. With four loads, `CompactBufferAllocation` would take ten seconds for their
        # indices.
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
    """Vectors of float32, for rows as they are.

    Zero points are subtracted from the codes before the product, where the difference is exact.
    Subtracting sums afterwards would cancel digits.
    """

    row_dtype = sum_dtype = "float32"

    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        codes = super().spread_codes(words, None)
        return tuple(T.Cast(f"float32x{self.lanes}", code - zero) for code in codes)

    def dot(self, acc: Expr, codes: Expr, word: Expr) -> Expr:
        for code, value in zip(codes, word, strict=True):
            acc = multiply_add(self.has_fma, code, value, acc, self.lanes)
        return acc


@dataclass(frozen=True)
class TableDot(FloatDot):
    """The same with AVX512, for codes of 4 bits: a register has the values of all codes, which may
    be levels.

    vpermps reads the low 4 bits of an int32 lane, so a code takes a shift and vpermps. Otherwise it
    would take a shift, a mask, a subtraction and a conversion.

    Attributes:
        zero: The zero point if it is the same for all groups, else None.
        levels: The value of each code.
    """

    zero: int | None
    levels: tuple[int, ...]
    reads_low_bits = True

    def spread_codes(self, words: Expr, zero: Expr | None) -> Expr:
        dtype = f"float32x{self.lanes}"
        values = [level - (self.zero or 0) for level in self.levels]
        codes = [look_up_floats(values, words, 8 * place) for place in range(WORD)]
        return tuple(
            code if self.zero is not None else code - T.Cast(dtype, zero) for code in codes
        )


def look_up_floats(values: Sequence[int], words: Expr, bit: int) -> Expr:
    """Look up 16 values as float32, by the 4 bits of each int32 of 16 lanes from `bit` on (AVX512:
    vpermps, which ignores the other bits).
    """
    lanes = TABLE_SIZE
    table = T.Shuffle([T.float32(value) for value in values], [T.int32(i) for i in range(lanes)])
    at = T.shift_right(words, constant("int32", bit, lanes)) if bit else words
    name = "llvm.x86.avx512.permvar.sf.512"
    return T.call_llvm_pure_intrin(name, table, at, dtype=f"float32x{lanes}")


@dataclass(frozen=True)
class LevelShuffle:
    """Instruction that looks up `lanes` bytes at once, each in 16 bytes of a register."""

    lanes: int
    intrinsic: str

    def look_up(self, codes: Expr, levels: Sequence[int], lanes: int) -> Expr:
        """Return the levels, one byte each, of codes 0..15 in the bytes of an int32 vector."""
        own = self.lanes // WORD
        words = [int.from_bytes(bytes(levels[i : i + WORD]), "little") for i in range(0, 16, WORD)]
        numbers = [T.reinterpret("int32", T.uint32(word)) for word in words] * (own // len(words))
        table = T.Shuffle(numbers, [T.int32(i) for i in range(own)])
        dtype = f"uint8x{self.lanes}"
        found = [
            T.call_llvm_pure_intrin(self.intrinsic, T.reinterpret(dtype, table), part, dtype=dtype)
            for part in split(
                T.reinterpret(f"uint8x{WORD * lanes}", codes), WORD * lanes, lanes // own
            )
        ]
        return T.reinterpret(f"int32x{lanes}", join(found, WORD * lanes))


PSHUFB_512 = LevelShuffle(64, "llvm.x86.avx512.pshuf.b.512")
PSHUFB_256 = LevelShuffle(32, "llvm.x86.avx2.pshuf.b")
TBL = LevelShuffle(16, "llvm.aarch64.neon.tbl1.v16i8")


def choose_shuffle(isa: Isa) -> LevelShuffle | None:
    """Choose how levels are looked up. None if no instruction does so."""
    if isinstance(isa, SdotIsa) or (isinstance(isa, SmlalIsa) and isa.for_bytes is not None):
        return TBL
    if "avx512bw" in isa.features:
        return PSHUFB_512
    return PSHUFB_256 if "avx2" in isa.features else None


def multiply_add(has_fma: bool, a: Expr, b: Expr, c: Expr, lanes: int) -> Expr:
    """Compute a * b + c of float32 vectors, with one rounding if the target has the instruction."""
    if not has_fma:
        return a * b + c
    name = f"llvm.fma.v{lanes}f32" if lanes > 1 else "llvm.fma.f32"
    return T.call_llvm_pure_intrin(name, a, b, c, dtype=vector("float32", lanes))


def choose_dot(
    isa: Isa, is_float: bool, bits: int, zero: int | None = None, levels: tuple[int, ...] = ()
) -> GroupedDot:
    """Choose the dot product for float32 or int8 rows and codes whose values have `bits` bits.

    `zero` is the zero point of all groups. None if each has its own. `levels` are the values of
    codes of 4 bits, if these are not the codes.
    """
    if isinstance(isa, SmmlaIsa):
        isa = isa.single
    is_arm = isinstance(isa, ArmIsa)
    # Arm reads a word of a row once for two of its short vectors.
    lanes = 2 * isa.lanes if is_arm else isa.lanes
    many = isa.registers > 16
    if is_float and (bits == 4 or levels) and isa.lanes == TABLE_SIZE:
        return TableDot(lanes, 12, isa.has_fma, zero, levels or tuple(range(TABLE_SIZE)))
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
