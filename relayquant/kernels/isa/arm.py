"""Instruction sets of Arm: `smmla` and `sdot` where the target has them, else widening multiplies.

Activations are int8, as the `arm` backend quantizes them; uint8 ones have their top bit flipped on
the way in, like int8 ones on x86. sdot and smlal take the word of an activation by lane index from
a register that holds several words, so that one load serves them all and nothing has to be spread
over a vector:

    sdot   v0.4s, v1.16b, v2.4b[i]     4 products per lane       (Armv8.2 dot product)
    smlal  v0.4s, v1.4h, v2.h[i]       1 product per lane        (every AArch64; vmlal.s16 on Armv7)

smmla multiplies matrices, 2 pixels x 8 products by 8 products x 2 channels (Armv8.6, FEAT_I8MM):

    smmla  v0.4s, v1.16b, v2.16b       8 products per lane

It does 32 multiply-adds where sdot does 16, but needs the words of two pixels in one register: a
load of 16 bytes per pixel and a zip per 16 bytes, where sdot needs the load only. In the main
loops, for 16 bytes of each pixel (loads of weights bring two vectors):

    sdot    7 pixels x 12   84 dot products, 7 loads of activations,  6 of weights, 0 zips     97
    smmla   4 pixels x 24   48 dot products, 4 loads of activations, 12 of weights, 4 zips     68

Up to 24 of the 32 registers are sums. The rest holds the words of all pixels and one pair of
vectors of weights, which meets all pixels before the next one is loaded, and one is left: with none
LLVM's schedule for some CPUs goes to the stack.

With one pixel half of its work is lost, and short reductions are rounded up to 8 products instead
of 4: `conv_plan.choose_plan` counts for each shape. Depthwise convolutions stay with sdot. What is
counted is instructions; how fast a core executes them was not measured.

A pairwise smull, smlal, sadalp would do more products per instruction, but its int16 sums overflow
when two weights of -128 meet activations of -128.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.kernels.isa.base import Buffer, Expr, Isa, PackedIsa, load_word

#: int32 lanes of a 128-bit register.
PART = 4


def take(value: Expr, first: int, count: int) -> Expr:
    """`count` lanes of a vector from `first` on."""
    return T.Shuffle([value], [T.int32(first + i) for i in range(count)])


def split(value: Expr, lanes: int, count: int) -> list[Expr]:
    """A vector of `lanes` as `count` vectors of as many lanes each."""
    size = lanes // count
    return [value] if count == 1 else [take(value, i * size, size) for i in range(count)]


def join(values: list[Expr], lanes: int) -> Expr:
    """The vector of `lanes` that `split` had."""
    return values[0] if len(values) == 1 else T.Shuffle(values, [T.int32(i) for i in range(lanes)])


def repeat(value: Expr, lanes: int, lane: int, count: int) -> Expr:
    """One lane of a vector of `lanes`, `count` times: to LLVM, the index of an instruction."""
    copies = -(-count // lanes)  # a Shuffle gives no more lanes than it takes
    return T.Shuffle([value] * copies, [T.int32(lane)] * count)


def load_pieces(count: int) -> list[tuple[int, int]]:
    """(first word, words) of the loads that bring `count` words: 4, 8 or 16 bytes each."""
    pieces, first = [], 0
    while first < count:
        size = 1 << (min(count - first, 4).bit_length() - 1)
        pieces.append((first, size))
        first += size
    return pieces


@dataclass(frozen=True)
class ArmIsa(Isa):
    """What both families share; `intrinsic` works on one 128-bit register of accumulators."""

    intrinsic: str = ""
    #: registers beside those of the sums and of the words of pixels: a pair of weights, one more
    spare: int = 3

    def count_registers(self, pixels: int, blocks: int, sums: int) -> int:
        return sums + pixels + self.spare

    def time_word(self, pixels: int, blocks: int, latency: float) -> float:
        """All instructions count: loads of weights, of which there are two in one, and of a loop
        two and one for each pointer.
        """
        dots = max(pixels * blocks * self.dot_cost, latency)
        size = blocks * self.weight_vector * np.dtype(self.weight_dtype).itemsize
        return dots + pixels * self.word_cost + size / 32 + 4 / self.words_per_load

    def for_depthwise(self, channels: int) -> Isa:
        """Twice the lanes: rows are then loaded, interleaved and stored by 8 bytes instead of 4."""
        return replace(self, lanes=2 * PART) if channels >= 2 * PART else self

    def load_activation(self, buffer: Buffer, offset: Expr) -> Expr:
        return self.load_activations(buffer, offset, 1)[0]


@dataclass(frozen=True)
class SdotIsa(PackedIsa, ArmIsa):
    """sdot: four int8 x int8 products added to an int32 lane, without saturation."""

    @property
    def is_fused(self) -> bool:
        return True

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        operands = []
        for first, size in load_pieces(count):
            start = offset + first * self.products
            if size == 1:
                operands.append(self.as_activation(load_word(buffer, start, self.lanes)))
                continue
            words = buffer.vload([start], f"int8x{size * self.products}")
            words = T.reinterpret(f"int32x{size}", words)
            spread = [repeat(words, size, lane, self.lanes) for lane in range(size)]
            operands += map(self.as_activation, spread)
        return operands

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        parts = self.lanes // PART
        sums = [
            T.call_llvm_pure_intrin(self.intrinsic, *operands, dtype=f"int32x{PART}")
            for operands in zip(
                split(acc, self.lanes, parts),
                split(weights, self.weight_vector, parts),
                split(activation, self.weight_vector, parts),
                strict=True,
            )
        ]
        return join(sums, self.lanes)


@dataclass(frozen=True)
class SmmlaIsa(SdotIsa):
    """smmla: products of 2x8 and 8x2 int8 matrices added to 2x2 int32, without saturation.

    An accumulator is of two pixels (p, q) and four channels, in two registers:

        (p0, p1, q0, q1)  (p2, p3, q2, q3)

    The packed weights of four channels, 8 products of each, are the two registers beside them. The
    operand that `load_activations` gives is one word of a pixel, as an int64. `single` is what the
    same CPUs have for pixels that come alone.
    """

    single: Isa = field(kw_only=True)

    @property
    def word_dtype(self) -> str:
        return "int64"

    def repeat_word(self, word: int) -> Expr:
        return self.as_activation(T.broadcast(T.int64(word), self.pixels))

    def for_depthwise(self, channels: int) -> Isa:
        return self.single.for_depthwise(channels)

    def for_single_pixels(self) -> Isa:
        return self.single

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        words = []
        for first in range(0, count, 2):
            size = min(2, count - first)
            start = offset + first * self.products
            value = buffer.vload([start], f"int8x{size * self.products}")
            value = T.reinterpret("int64" if size == 1 else "int64x2", value)
            words += [value] if size == 1 else [take(value, i, 1) for i in range(size)]
        return words

    def as_activation(self, words: Expr) -> Expr:
        """Of an int64 vector: the word of each pixel."""
        return T.reinterpret(f"int8x{self.pixels * self.products}", words)

    def join_words(self, words: list[Expr]) -> Expr:
        return self.as_activation(T.Shuffle(words, [T.int32(i) for i in range(self.pixels)]))

    def join_sums(self, sums: list[Expr]) -> Expr:
        return T.Shuffle(sums, [T.int32(i) for i in (0, 1, 4, 5, 2, 3, 6, 7)])

    def split_sums(self, acc: Expr) -> list[Expr]:
        orders = (0, 1, 4, 5), (2, 3, 6, 7)
        return [T.Shuffle([acc], [T.int32(i) for i in order]) for order in orders]

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        sums = [
            T.call_llvm_pure_intrin(self.intrinsic, part, activation, pair, dtype=f"int32x{PART}")
            for part, pair in zip(
                split(acc, self.accumulator_lanes, 2),
                split(weights, self.weight_vector, 2),
                strict=True,
            )
        ]
        return join(sums, self.accumulator_lanes)


@dataclass(frozen=True)
class SmlalIsa(ArmIsa):
    """smlal: int16 products added to int32 lanes, one product of a word after the other.

    Activations of 8 bits stay so in memory and are widened in registers; weights are stored as
    int16, the lanes of one product after the other.
    """

    def arrange_weights(self, words: NDArray[np.int8]) -> NDArray[Any]:
        return super().arrange_weights(np.ascontiguousarray(words.swapaxes(-1, -2)))

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        operands = []
        for first, size in load_pieces(count):
            start, values = offset + first * self.products, size * self.products
            loaded = buffer.vload([start], f"{self.activation}x{values}")
            wide = T.Cast(f"int16x{values}", loaded)
            for word in range(size):
                lanes = range(word * self.products, (word + 1) * self.products)
                operands.append(tuple(repeat(wide, values, lane, self.lanes) for lane in lanes))
        return operands

    def as_activation(self, words: Expr) -> Expr:
        rows = T.reinterpret(f"{self.activation}x{self.weight_vector}", words)
        rows = split(rows, self.weight_vector, self.products)
        return tuple(T.Cast(f"int16x{self.lanes}", row) for row in rows)

    def interleave(self, rows: list[Expr]) -> Expr:
        """Row after row, as the weights are: nothing has to change places."""
        order = [T.int32(i) for i in range(self.weight_vector)]
        return T.reinterpret(f"int32x{self.lanes}", T.Shuffle(rows, order))

    def load_weights(self, buffer: Buffer, index: Expr) -> Expr:
        start = index * self.weight_vector
        vectors = range(0, self.weight_vector, self.lanes)
        return tuple(buffer.vload([start + at], f"int16x{self.lanes}") for at in vectors)

    def store_weights(self, buffer: Buffer, index: Expr, words: Expr) -> None:
        size = self.weight_vector
        order = [
            T.int32(lane * self.products + product)
            for product in range(self.products)
            for lane in range(self.lanes)
        ]
        value = T.Shuffle([T.reinterpret(f"{self.activation}x{size}", words)], order)
        T.buffer_store(buffer, T.Cast(f"int16x{size}", value), [T.ramp(index * size, 1, size)])

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        for a, w in zip(activation, weights, strict=True):
            parts = self.lanes // PART
            products = [
                T.call_llvm_pure_intrin(self.intrinsic, *operands, dtype=f"int32x{PART}")
                for operands in zip(
                    split(w, self.lanes, parts), split(a, self.lanes, parts), strict=True
                )
            ]
            acc = acc + join(products, self.lanes)
        return acc


NEON_WIDE = SmlalIsa(
    name="neon int16",
    features=("neon",),
    lanes=4,
    products=2,
    accumulators=16,
    dots_in_flight=4,
    activation="int16",
    weight_dtype="int16",
    word_cost=1 / 4,  # a load of 16 bytes
    dot_cost=2,
    max_pixels=8,
    max_blocks=2,  # weights of one are two registers for each half of a word
    intrinsic="llvm.aarch64.neon.smull.v4i32",
)
SDOT = SdotIsa(
    name="sdot",
    features=("neon", "dotprod"),
    lanes=4,
    products=4,
    accumulators=24,
    dots_in_flight=8,
    activation="int8",
    weight_dtype="int8",
    words_per_load=4,
    word_cost=1 / 4,  # a load of 16 bytes
    max_pixels=8,
    may_spill=False,
    blocks_first=True,
    intrinsic="llvm.aarch64.neon.sdot.v4i32.v16i8",
    wide=NEON_WIDE,
)
NEON = replace(
    NEON_WIDE,
    name="neon",
    products=4,
    activation="int8",
    word_cost=1 / 2,  # a load of 16 bytes, widened to two vectors
    dot_cost=4,
    wide=NEON_WIDE,
)
SMMLA = SmmlaIsa(
    name="smmla",
    features=("neon", "dotprod", "i8mm"),
    lanes=4,
    products=8,
    accumulators=24,
    dots_in_flight=8,
    activation="int8",
    weight_dtype="int8",
    words_per_load=2,
    pixels=2,
    word_cost=1,  # half a load of 16 bytes, half a zip
    max_pixels=8,
    max_blocks=6,
    may_spill=False,
    blocks_first=True,
    intrinsic="llvm.aarch64.neon.smmla.v4i32.v16i8",
    wide=NEON_WIDE,
    single=SDOT,
)
#: For targets that name i8mm and not dotprod; LLVM concludes neither from the other.
SMMLA_NEON = replace(SMMLA, name="smmla+neon", features=("neon", "i8mm"), single=NEON)
NEON32_WIDE = SmlalIsa(
    name="neon32 int16",
    features=("neon",),
    lanes=4,
    products=2,
    registers=16,
    has_fma=False,
    accumulators=8,
    dots_in_flight=4,
    activation="int16",
    weight_dtype="int16",
    max_pixels=4,
    intrinsic="llvm.arm.neon.vmulls.v4i32",
)
NEON32 = replace(NEON32_WIDE, name="neon32", products=4, activation="int8", wide=NEON32_WIDE)

#: Fastest first.
AARCH64_ISAS: tuple[Isa, ...] = (SMMLA, SMMLA_NEON, SDOT, NEON)
ARM32_ISAS: tuple[Isa, ...] = (NEON32,)
