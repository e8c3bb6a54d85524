"""Arm's instruction sets: `smmla` and `sdot` if the target has them, else widening multiplies.

Activations are int8, as the `arm` backend quantizes them. The top bit of uint8 activations is
flipped when they are read, as for int8 activations on x86. sdot and smlal read one word of
activations by lane index from a register that holds several words. So one load serves them all and
no word has to be broadcast to a vector:

    sdot   v0.4s, v1.16b, v2.4b[i]     4 products per lane       (Armv8.2 dot product)
    smlal  v0.4s, v1.4h, v2.h[i]       1 product per lane        (every AArch64; vmlal.s16 on Armv7)

smmla multiplies matrices, 2 pixels x 8 products by 8 products x 2 channels (Armv8.6, FEAT_I8MM):

    smmla  v0.4s, v1.16b, v2.16b       8 products per lane

It does 32 multiply-adds where sdot does 16, but needs the words of two pixels in one register. That
takes a load of 16 bytes per pixel and a zip per 16 bytes, while sdot needs only the load.
Instructions of the main loops, for 16 bytes of each pixel (a load of weights reads two vectors):

    sdot    5 pixels x 16   80 dot products, 5 loads of activations,  8 of weights, 0 zips     93
    smmla   4 pixels x 20   40 dot products, 4 loads of activations, 10 of weights, 4 zips     58

About six more move pointers, prefetch and jump. To share them, a loop has two loads of words. Of
the 32 registers, 20 hold sums. The others hold one pair of weight vectors, which is used for all
pixels before the next pair is loaded, and the words of all pixels for both loads. With fewer
registers LLVM's schedule for some CPUs spills to the stack. Tiles of up to 24 sums have loops with
one load.

With one pixel half of the work of smmla is lost, and short reductions are rounded up to 8 products
instead of 4: `choose_plan` counts instructions for each shape. Depthwise convolutions use
sdot. Only instructions are counted; how fast a core executes them was not measured.

CPUs without sdot and smmla can multiply constant weights as bytes. They take bytes of one pixel and
one channel at a time, with one register of sums for each (`SmullIsa`):

    smull   v0.8h, v1.8b, v2.8b        products as int16
    smlal2  v0.8h, v1.16b, v2.16b      for weights without -128; else smull2 and one more sadalp
    sadalp  v3.4s, v0.8h               adds neighbours to int32

Instructions of the main loops, and byte products per instruction:

    smlal   7 pixels x 8     56 smlal and 23 others                              2.8
    bytes   2 pixels x 8     64 smull, smull2, sadalp and 9 others               3.5
    pairs   2 pixels x 8     48 smull, smlal2, sadalp and 8 others               4.6

Words of 16 bytes stay partly empty more often than words of 4: `choose_plan` counts
again. Weights packed at run time (products of two activations) and depthwise convolutions use
smlal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.isa.base import (
    Buffer,
    Expr,
    Isa,
    PackedIsa,
    find_largest,
    join,
    load_word,
    split,
    take,
)

#: int32 lanes of a 128-bit register.
PART = 4
#: Up to this magnitude of weights, two products with int8 fit int16: 2 * 128 * 127 = 32,512.
LARGEST_PAIRED = 127


def repeat(value: Expr, lanes: int, lane: int, count: int) -> Expr:
    """Repeat one lane of a vector of `lanes` `count` times.

    LLVM makes it the index of an instruction.
    """
    copies = -(-count // lanes)  # a Shuffle returns no more lanes than it reads
    return T.Shuffle([value] * copies, [T.int32(lane)] * count)


def load_pieces(count: int) -> list[tuple[int, int]]:
    """Return (first word, words) of the loads that read `count` words: 4, 8 or 16 bytes each."""
    pieces, first = [], 0
    while first < count:
        size = 1 << (min(count - first, 4).bit_length() - 1)
        pieces.append((first, size))
        first += size
    return pieces


@dataclass(frozen=True)
class ArmIsa(Isa):
    """Base of both families. `intrinsic` works on one 128-bit register of accumulators."""

    intrinsic: str = ""
    #: Registers besides sums and words of pixels: a pair of weights, and one more.
    spare: int = 3
    #: Whether a loop with two loads of words needs fewer instructions per load.
    has_two_loads: bool = False

    def count_registers(self, pixels: int, blocks: int, sums: int) -> int:
        return sums + pixels + self.spare

    def time_word(self, pixels: int, blocks: int, latency: float) -> float:
        """Count all instructions of one word.

        They include loads of weights, each of which reads two vectors, and about six per loop to
        move pointers and prefetch.
        """
        dots = max(pixels * blocks * self.dot_cost, latency)
        size = blocks * self.weight_vector * np.dtype(self.weight_dtype).itemsize
        steps = self.count_steps(pixels, blocks, pixels * blocks)
        return dots + pixels * self.word_cost + size / 32 + 6 / (self.words_per_load * steps)

    def count_steps(self, pixels: int, blocks: int, sums: int) -> int:
        """Return two if registers hold the words of both loads, which LLVM overlaps."""
        registers = self.count_registers(pixels, blocks, sums) + pixels - 1
        return 2 if self.has_two_loads and registers <= self.registers else 1

    def for_depthwise(self, channels: int) -> Isa:
        """Return twice the lanes: rows are then handled by 8 bytes instead of 4."""
        return replace(self, lanes=2 * PART) if channels >= 2 * PART else self

    def load_activation(self, buffer: Buffer, offset: Expr) -> Expr:
        return self.load_activations(buffer, offset, 1)[0]


@dataclass(frozen=True)
class SdotIsa(PackedIsa, ArmIsa):
    """sdot: four int8 x int8 products added to an int32 lane, without saturation."""

    @property
    def is_fused(self) -> bool:
        return True

    @property
    def repeats_sums(self) -> bool:
        return self.lanes > PART

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        operands = []
        for first, size in load_pieces(count):
            start = offset + first * self.products
            if size == 1:
                operands.append(self.as_activation(load_word(buffer, start, self.lanes)))
                continue
            words = buffer.vload([start], f"{self.activation}x{size * self.products}")
            words = T.reinterpret(f"int32x{size}", words)
            spread = [repeat(words, size, lane, self.lanes) for lane in range(size)]
            operands += map(self.as_activation, spread)
        return operands

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        parts = self.lanes // PART
        sums = [
            self.multiply(*operands)
            for operands in zip(
                split(acc, self.lanes, parts),
                split(weights, self.weight_vector, parts),
                split(activation, self.weight_vector, parts),
                strict=True,
            )
        ]
        return join(sums, self.lanes)

    def multiply(self, acc: Expr, a: Expr, b: Expr) -> Expr:
        """Emit the instruction: a register of sums plus the products of two registers."""
        return T.call_llvm_pure_intrin(self.intrinsic, acc, a, b, dtype=f"int32x{PART}")


@dataclass(frozen=True)
class SmmlaIsa(SdotIsa):
    """smmla: products of 2x8 and 8x2 int8 matrices added to 2x2 int32, without saturation.

    An accumulator has two pixels (p, q) and four channels, in two registers:

        (p0, p1, q0, q1)  (p2, p3, q2, q3)

    The packed weights of four channels, 8 products each, are two registers for them. The operand
    that `load_activations` returns is one word of a pixel, as an int64. `single` is the instruction
    set of the same CPUs for single pixels.
    """

    single: Isa = field(kw_only=True)

    @property
    def word_dtype(self) -> str:
        return "int64"

    def repeat_word(self, word: int) -> Expr:
        return self.as_activation(T.broadcast(T.int64(word), self.pixels))

    def for_depthwise(self, channels: int) -> Isa:
        return self.single.for_depthwise(channels)

    @property
    def companion(self) -> Isa:
        return self.single

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        words = []
        for first in range(0, count, 2):
            size = min(2, count - first)
            start = offset + first * self.products
            value = buffer.vload([start], f"{self.activation}x{size * self.products}")
            value = T.reinterpret("int64" if size == 1 else "int64x2", value)
            words += [value] if size == 1 else [take(value, i, 1) for i in range(size)]
        return words

    def as_activation(self, words: Expr) -> Expr:
        """Reinterpret an int64 vector that holds the word of each pixel."""
        return T.reinterpret(f"{self.activation}x{self.pixels * self.products}", words)

    def join_words(self, words: list[Expr]) -> Expr:
        return self.as_activation(T.Shuffle(words, [T.int32(i) for i in range(self.pixels)]))

    def join_sums(self, sums: list[Expr]) -> Expr:
        return T.Shuffle(sums, [T.int32(i) for i in (0, 1, 4, 5, 2, 3, 6, 7)])

    def split_sums(self, acc: Expr) -> list[Expr]:
        orders = (0, 1, 4, 5), (2, 3, 6, 7)
        return [T.Shuffle([acc], [T.int32(i) for i in order]) for order in orders]

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        sums = [
            self.multiply(part, activation, pair)
            for part, pair in zip(
                split(acc, self.accumulator_lanes, 2),
                split(weights, self.weight_vector, 2),
                strict=True,
            )
        ]
        return join(sums, self.accumulator_lanes)


@dataclass(frozen=True)
class SmlalIsa(ArmIsa):
    """smlal: int16 products added to int32 lanes, the products of a word one after the other.

    8-bit activations stay 8 bits in memory and are widened in registers. Weights are stored as
    int16: all lanes of the first product, then of the next. Depthwise convolutions use words of one
    row: nothing is interleaved, and no product is with a zero.
    """

    for_bytes: SmullIsa | None = None  #: used by the same CPUs for constant weights
    for_pairs: SmullIsa | None = None  #: and for constant weights without -128

    def for_weights(self, weight: NDArray[np.int8]) -> Isa:
        best = self.for_pairs if find_largest(weight) <= LARGEST_PAIRED else self.for_bytes
        return best or self

    def for_depthwise(self, channels: int) -> Isa:
        return replace(super().for_depthwise(channels), products=1)

    @property
    def row_dtype(self) -> str:
        return "int16" if self.products == 1 else super().row_dtype

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
        if self.products == 1:
            return (words,)
        rows = T.reinterpret(f"{self.activation}x{self.weight_vector}", words)
        rows = split(rows, self.weight_vector, self.products)
        return tuple(T.Cast(f"int16x{self.lanes}", row) for row in rows)

    def interleave(self, rows: list[Expr]) -> Expr:
        """Put the rows one after the other, as in the weights, so no value changes its lane.

        A single row is widened here, once for all uses.
        """
        if self.products == 1:
            row = T.reinterpret(f"{self.activation}x{self.lanes}", rows[0])
            return T.Cast(f"int16x{self.lanes}", row)
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


@dataclass(frozen=True)
class SmullIsa(PackedIsa, ArmIsa):
    """smull, sadalp: products of bytes as int16, whose neighbours are added to int32 lanes.

    A word is 16 bytes of one pixel, multiplied by 16 bytes of one channel. An accumulator has four
    sums for each of its four channels, which are added at the end.

    `is_paired`: two products are first added in int16 (smlal2), so 16 products take three
    instructions instead of four. This overflows only if both products are -128 by -128. So weights
    must not contain -128 (`LARGEST_PAIRED`), as in symmetric quantization.
    """

    add_pairs: str = ""  #: intrinsic that adds neighbours of int16 lanes as int32
    sum_pairs: str = ""  #: intrinsic that adds neighbours of two int32 vectors
    is_paired: bool = False
    single: Isa = field(kw_only=True)  #: used by the same CPUs if words would be nearly empty

    @property
    def companion(self) -> Isa:
        return self.single

    @property
    def accumulator_lanes(self) -> int:
        return self.lanes * PART

    def for_depthwise(self, channels: int) -> Isa:
        return self.single.for_depthwise(channels)

    def count_registers(self, pixels: int, blocks: int, sums: int) -> int:
        return super().count_registers(pixels, blocks, sums * self.lanes)

    def arrange_weights(self, words: NDArray[np.int8]) -> NDArray[Any]:
        if self.is_paired and find_largest(words) > LARGEST_PAIRED:
            raise ValueError(
                f"{self.name} adds two products in int16, where two products of -128 by -128 "
                "do not fit. Allowed: weights of -127 to 127. Use the result of Isa.for_weights.",
            )
        return super().arrange_weights(words)

    def load_activation(self, buffer: Buffer, offset: Expr) -> Expr:
        return buffer.vload([offset], f"int8x{self.products}")

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        return [self.load_activation(buffer, offset + i * self.products) for i in range(count)]

    def join_sums(self, sums: list[Expr]) -> Expr:
        """Return an accumulator with these sums, and three zeros for each sum."""
        (vector,) = sums
        zeros = T.broadcast(T.int32(0), self.lanes)
        order = [i // PART if i % PART == 0 else self.lanes for i in range(self.accumulator_lanes)]
        return T.Shuffle([vector] + [zeros] * (PART - 1), [T.int32(i) for i in order])

    def split_sums(self, acc: Expr) -> list[Expr]:
        vectors = split(acc, self.accumulator_lanes, self.lanes)
        while len(vectors) > 1:
            vectors = [
                T.call_llvm_pure_intrin(self.sum_pairs, *pair, dtype=f"int32x{PART}")
                for pair in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        size = self.products // 2
        wide, sums = f"int16x{size}", []
        for total, row in zip(
            split(acc, self.accumulator_lanes, self.lanes),
            split(weights, self.weight_vector, self.lanes),
            strict=True,
        ):
            products = [
                T.call_llvm_pure_intrin(self.intrinsic, *halves, dtype=wide)
                for halves in zip(
                    split(activation, self.products, 2), split(row, self.products, 2), strict=True
                )
            ]
            if self.is_paired:
                products = [products[0] + products[1]]
            for each in products:
                total = total + T.call_llvm_pure_intrin(self.add_pairs, each, dtype=f"int32x{PART}")
            sums.append(total)
        return join(sums, self.accumulator_lanes)


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
    has_two_loads=True,
    word_cost=1 / 4,  # a load of 16 bytes
    max_pixels=8,
    may_spill=False,
    blocks_first=True,
    intrinsic="llvm.aarch64.neon.sdot.v4i32.v16i8",
    wide=NEON_WIDE,
)
NEON_WORDS = replace(
    NEON_WIDE,
    name="neon",
    products=4,
    activation="int8",
    word_cost=2,  # a load of 4 bytes, widened
    dot_cost=4,
    wide=NEON_WIDE,
)
NEON_BYTES = SmullIsa(
    name="neon bytes",
    features=("neon",),
    lanes=4,
    products=16,
    accumulators=4,
    dots_in_flight=1,
    activation="int8",
    weight_dtype="int8",
    max_blocks=2,
    word_cost=1.5,  # a load of 16 bytes, and some of its address
    dot_cost=16,
    max_pixels=8,
    may_spill=False,
    blocks_first=True,
    spare=4,
    intrinsic="llvm.aarch64.neon.smull.v8i16",
    add_pairs="llvm.aarch64.neon.saddlp.v4i32.v8i16",
    sum_pairs="llvm.aarch64.neon.addp.v4i32",
    wide=NEON_WIDE,
    single=NEON_WORDS,
)
NEON_PAIRS = replace(NEON_BYTES, name="neon pairs", dot_cost=12, is_paired=True)
NEON = replace(NEON_WORDS, for_bytes=NEON_BYTES, for_pairs=NEON_PAIRS)
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
    has_two_loads=True,
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
#: For targets that name i8mm but not dotprod. LLVM derives neither from the other.
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
