"""x86's instruction sets: AMX, VNNI, and `pmaddwd` and `pmaddubsw` of older CPUs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.isa.base import (
    BYTES_PER_WORD,
    Isa,
    Narrowing,
    PackedIsa,
    Wrapping,
    emit_wrapping,
    fence,
    find_largest,
    join,
    split,
)
from relayquant.codegen.kernels.isa.matrix_unit import AMX_INT8, Buffer, Expr


@dataclass(frozen=True)
class VnniIsa(PackedIsa):
    """vpdpbusd: four uint8 x int8 products added to an int32 lane, without saturation.

    vpdpwssd does the same with two int16 products.
    """

    intrinsic: str = ""
    halved: HalvedIsa | None = None  #: for channels that leave half a vector empty

    @property
    def forms(self) -> tuple[Isa, ...]:
        if self.halved is None or isinf(self.timing.tiles.join):
            return (self,)
        return self, self.halved

    @property
    def companion(self) -> Isa:
        return self if self.unit is None else VNNI512.with_timing(self.timing)

    def for_convolution(self, dtype: str) -> Isa:
        isa = self.for_activations(dtype)
        if isa.unit is None:
            return isa
        return replace(isa, activation=dtype)  # a matrix unit takes both kinds of bytes

    @property
    def is_fused(self) -> bool:
        return True

    @property
    def joins_ends(self) -> bool:
        # With 16 registers LLVM keeps half of the sums on the stack while words are joined.
        return self.products == BYTES_PER_WORD and self.registers >= 32

    def load_joined(self, buffer: Buffer, offsets: list[Expr], count: int) -> Expr:
        bits, word = 8 * count, T.uint32(0)
        for i, offset in enumerate(offsets):
            piece = buffer.vload([offset], f"uint8x{count}" if count > 1 else "uint8")
            piece = T.Cast("uint32", T.reinterpret(f"uint{bits}", piece))
            word = T.bitwise_or(word, T.shift_left(piece, T.uint32(i * bits)))
        return self.as_activation(T.broadcast(T.reinterpret("int32", word), self.lanes))

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        dtype = f"int32x{self.accumulator_lanes}"
        return T.call_llvm_pure_intrin(self.intrinsic, acc, activation, weights, dtype=dtype)


@dataclass(frozen=True)
class HalvedIsa(VnniIsa):
    """The same on vectors whose halves belong to two pixels, each with half of the lanes.

    24 channels of two pixels are three vectors, where each pixel alone takes two. Weights are
    loaded to both halves; the words of two pixels take one instruction more.
    """

    def time_dots(self, pixels: int, blocks: int) -> float:
        return super().time_dots(pixels, blocks) / self.sharing + self.timing.tiles.join

    def as_activation(self, words: Expr) -> Expr:
        # Otherwise LLVM permutes two words that it loads alone, which takes longer.
        fenced = fence(T.reinterpret(f"float32x{self.lanes}", words), self.lanes)
        return super().as_activation(fenced)

    def join_words(self, words: list[Expr]) -> Expr:
        return join(words, self.accumulator_lanes * self.products)

    def join_sums(self, sums: list[Expr]) -> Expr:
        return join(sums, self.accumulator_lanes)

    def split_sums(self, acc: Expr) -> list[Expr]:
        return split(acc, self.accumulator_lanes, self.pixels)

    def load_weights(self, buffer: Buffer, index: Expr) -> Expr:
        return self.join_words([super().load_weights(buffer, index)] * self.pixels)


@dataclass(frozen=True)
class MaddIsa(Isa):
    """vpmaddwd: two int16 products per int32 lane, twice per word of four activations.

    The word is broadcast first and split in registers: even bytes by a mask, odd bytes by a shift.
    So activations stay 8 bits in memory. The weights are stored as int16, even then odd. vpmaddubsw
    needs no widening, but saturates its int16 sums and gives wrong results unless weights are
    small: see `SmallWeightIsa`.

    Two instructions and a register for every word are too many if 16 registers hold the sums. Then
    convolutions read a copy that is already int16 (`for_convolution`).
    """

    intrinsic: str = ""
    small: SmallWeightIsa | None = None  #: used by the same CPUs for small weights

    def for_weights(self, weight: NDArray[np.int8]) -> Isa:
        if self.small is None or find_largest(weight) > SMALL_WEIGHT:
            return self
        return self.small

    def for_convolution(self, dtype: str) -> Isa:
        return self.wide or self

    def arrange_weights(self, words: NDArray[np.int8]) -> NDArray[Any]:
        halves = np.stack([words[..., 0::2], words[..., 1::2]], axis=-3)
        return halves.reshape(*words.shape[:-2], self.weight_vector).astype(self.weight_dtype)

    def as_activation(self, words: Expr) -> Expr:
        pairs = self.lanes * 2
        even = T.bitwise_and(words, T.broadcast(T.int32(0x00FF00FF), self.lanes))
        shift = T.Broadcast(T.uint16(8), pairs)
        odd = T.shift_right(T.reinterpret(f"uint16x{pairs}", words), shift)
        return T.reinterpret(f"int16x{pairs}", even), T.reinterpret(f"int16x{pairs}", odd)

    def load_weights(self, buffer: Buffer, index: Expr) -> Expr:
        pairs = self.lanes * 2
        start = index * self.weight_vector
        return tuple(buffer.vload([start + half], f"int16x{pairs}") for half in (0, pairs))

    def store_weights(self, buffer: Buffer, index: Expr, words: Expr) -> None:
        pairs = self.lanes * 2
        start = index * self.weight_vector
        shift = T.Broadcast(T.int16(8), pairs)
        odd = T.reinterpret(f"int16x{pairs}", words)
        even = T.reinterpret(f"int16x{pairs}", words << T.Broadcast(T.int32(8), self.lanes))
        # The left shift leaves byte 1 in the low half of the upper int16. The right shift drops it.
        for half, value in ((0, even), (pairs, odd)):
            value = T.shift_right(value, shift)
            T.buffer_store(buffer, value, [T.ramp(start + half, 1, pairs)])

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        dtype = f"int32x{self.lanes}"
        for x, w in zip(activation, weights, strict=True):
            acc = acc + T.call_llvm_pure_intrin(self.intrinsic, x, w, dtype=dtype)
        return acc


#: Largest magnitude of weights for which `SmallWeightIsa` is exact. It adds two products of
#: activations up to 255 in int16: 2 * 255 * 64 = 32,640 fits, 2 * 255 * 65 does not.
SMALL_WEIGHT = 64


@dataclass(frozen=True)
class SmallWeightIsa(PackedIsa):
    """vpmaddubsw adds two uint8 x int8 products in int16; vpmaddwd by 1 adds two of these sums.

    The first instruction saturates, but not with weights of -64..64 (`SMALL_WEIGHT`). Four products
    of each lane take three instructions; `MaddIsa` and `PairIsa` need four.
    """

    pairs: str = ""  #: intrinsic of vpmaddubsw
    intrinsic: str = ""  #: of vpmaddwd

    def arrange_weights(self, words: NDArray[np.int8]) -> NDArray[Any]:
        largest = find_largest(words)
        if largest > SMALL_WEIGHT:
            raise ValueError(
                f"{self.name} adds products in int16, which saturates with a weight of magnitude "
                f"{largest}. Allowed: up to {SMALL_WEIGHT}. Use the result of Isa.for_weights.",
            )
        return super().arrange_weights(words)

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        count = 2 * self.lanes
        pairs = T.call_llvm_pure_intrin(self.pairs, activation, weights, dtype=f"int16x{count}")
        ones = T.broadcast(T.int16(1), count)
        dtype = f"int32x{self.lanes}"
        return acc + T.call_llvm_pure_intrin(self.intrinsic, pairs, ones, dtype=dtype)


@dataclass(frozen=True)
class PairIsa(PackedIsa):
    """vpmaddwd for int16 activations. The sum of two products fits, since weights have 8 bits."""

    intrinsic: str = ""

    def for_wrapping_sums(self) -> Isa:
        return WrappingPairIsa(**{each.name: getattr(self, each.name) for each in fields(self)})

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        return acc + self.multiply(activation, weights)

    def multiply(self, activation: Expr, weights: Expr) -> Expr:
        """Return the sum of two products for each lane."""
        dtype = f"int32x{self.lanes}"
        return T.call_llvm_pure_intrin(self.intrinsic, activation, weights, dtype=dtype)


@dataclass(frozen=True)
class WrappingPairIsa(PairIsa):
    """The same for sums that may exceed the range of int32."""

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        products = self.multiply(activation, weights)
        return emit_wrapping(Wrapping.ADD, acc, products, self.lanes)


def on_bytes(wide: PairIsa, name: str, small: SmallWeightIsa | None = None) -> MaddIsa:
    """Make the instruction set for bytes of the CPUs of `wide`, with the same instruction."""
    shared = {field.name: getattr(wide, field.name) for field in fields(wide)}
    changed = {"name": name, "products": 4, "activation": "uint8", "wide": wide, "small": small}
    return MaddIsa(**{**shared, **changed})


def on_small_weights(wide: PairIsa, name: str, pairs: str, accumulators: int) -> SmallWeightIsa:
    """Make the instruction set for bytes and small weights of the CPUs of `wide`.

    A vector of ones takes a register, which `accumulators` must leave free.
    """
    shared = {field.name: getattr(wide, field.name) for field in fields(wide)}
    changed = {"name": name, "products": 4, "activation": "uint8", "weight_dtype": "int8"}
    changed |= {"wide": wide, "pairs": pairs, "accumulators": accumulators}
    return SmallWeightIsa(**{**shared, **changed})


def halve(whole: VnniIsa, accumulators: int) -> HalvedIsa:
    """Make the instruction set with two pixels in each vector of `whole`.

    Words that are joined take a few registers, which `accumulators` must leave free.
    """
    shared = {field.name: getattr(whole, field.name) for field in fields(whole)}
    changed = {"name": f"{whole.name} halved", "lanes": whole.lanes // 2}
    changed |= {"accumulators": accumulators, "pixels": 2, "sharing": 2}
    return HalvedIsa(**{**shared, **changed})


NARROWING_512 = Narrowing(
    to_int32="llvm.x86.avx512.mask.cvtps2dq.512",
    to_int16="llvm.x86.avx512.packssdw.512",
    to_int8="llvm.x86.avx512.packsswb.512",
    to_uint8="llvm.x86.avx512.packuswb.512",
)

NARROWING_256 = Narrowing(
    to_int32="llvm.x86.avx.cvt.ps2dq.256",
    to_int16="llvm.x86.avx2.packssdw",
    to_int8="llvm.x86.avx2.packsswb",
    to_uint8="llvm.x86.avx2.packuswb",
)

NARROWING_128 = Narrowing(
    to_int32="llvm.x86.sse2.cvtps2dq",
    to_int16="llvm.x86.sse2.packssdw.128",
    to_int8="llvm.x86.sse2.packsswb.128",
    to_uint8="llvm.x86.sse2.packuswb.128",
)

VNNI512_WIDE = VnniIsa(
    name="vnni512 int16",
    features=("avx512vnni", "avx512bw", "avx512vl"),
    lanes=16,
    products=2,
    accumulators=28,
    dots_in_flight=10,
    activation="int16",
    weight_dtype="int16",
    narrowing=NARROWING_512,
    early_loads=2,
    intrinsic="llvm.x86.avx512.vpdpwssd.512",
)

VNNI512_WHOLE = replace(
    VNNI512_WIDE,
    name="vnni512",
    products=4,
    activation="uint8",
    weight_dtype="int8",
    intrinsic="llvm.x86.avx512.vpdpbusd.512",
    wide=VNNI512_WIDE,
)

VNNI512 = replace(VNNI512_WHOLE, halved=halve(VNNI512_WHOLE, accumulators=24))

AMX = replace(
    VNNI512_WHOLE, name="amx", features=(*VNNI512.features, "amx-tile", "amx-int8"), unit=AMX_INT8
)

VNNI256_WIDE = VnniIsa(
    name="vnni256 int16",
    features=("avxvnni", "avx2"),
    lanes=8,
    products=2,
    registers=16,
    accumulators=12,
    max_blocks=2,
    dots_in_flight=10,
    activation="int16",
    weight_dtype="int16",
    narrowing=NARROWING_256,
    intrinsic="llvm.x86.avx512.vpdpwssd.256",
)

VNNI256 = replace(
    VNNI256_WIDE,
    name="vnni256",
    products=4,
    activation="uint8",
    weight_dtype="int8",
    intrinsic="llvm.x86.avx512.vpdpbusd.256",
    wide=VNNI256_WIDE,
)

AVX512BW_WIDE = PairIsa(
    name="avx512bw int16",
    features=("avx512bw", "avx512vl"),
    lanes=16,
    products=2,
    accumulators=24,
    dots_in_flight=8,
    activation="int16",
    weight_dtype="int16",
    narrowing=NARROWING_512,
    intrinsic="llvm.x86.avx512.pmaddw.d.512",
)

AVX512BW_SMALL = on_small_weights(
    AVX512BW_WIDE, "avx512bw 7 bits", "llvm.x86.avx512.pmaddubs.w.512", accumulators=24
)

AVX512BW = on_bytes(AVX512BW_WIDE, "avx512bw", AVX512BW_SMALL)

AVX2_WIDE = PairIsa(
    name="avx2 int16",
    features=("avx2",),
    lanes=8,
    products=2,
    registers=16,
    accumulators=12,
    max_blocks=2,
    dots_in_flight=8,
    activation="int16",
    weight_dtype="int16",
    narrowing=NARROWING_256,
    intrinsic="llvm.x86.avx2.pmadd.wd",
)

AVX2_SMALL = on_small_weights(
    AVX2_WIDE, "avx2 7 bits", "llvm.x86.avx2.pmadd.ub.sw", accumulators=10
)

AVX2 = on_bytes(AVX2_WIDE, "avx2", AVX2_SMALL)

SSE2_WIDE = PairIsa(
    name="sse2 int16",
    features=("sse2",),
    lanes=4,
    products=2,
    registers=16,
    has_fma=False,
    accumulators=8,
    max_blocks=2,
    dots_in_flight=8,
    activation="int16",
    weight_dtype="int16",
    narrowing=NARROWING_128,
    intrinsic="llvm.x86.sse2.pmadd.wd",
)

SSE2 = on_bytes(SSE2_WIDE, "sse2")

#: Fastest first.
X86_ISAS: tuple[Isa, ...] = (AMX, VNNI512, VNNI256, AVX512BW, AVX2, SSE2)
