"""Instruction sets as values for the kernel generators, and the portable one.

An `Isa` is a frozen value with the few primitives in which instruction sets differ: how a word of
activations is broadcast to a vector, how a vector of packed weights is read, and their dot product.
The generators (convolution, matrix product, depthwise) are written once, over these primitives. A
new family (see `x86` and `arm`) needs a subclass with its values, and a line in `select`.

    vector of sums       `lanes` int32 values, one output channel each, of one pixel
    accumulator          the sums of `pixels` pixels, in the order of the dot product (opaque)
    word                 `products` consecutive activations, one dot step of one lane
    operand              result of `load_activation` / `load_weights`, argument of `dot` (opaque)
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.isa.matrix_unit import Buffer, Expr, MatrixUnit
from relayquant.codegen.kernels.isa.timing import COMMON, Timing

IsaT = TypeVar("IsaT", bound="Isa")
#: Bytes that `load_word` reads.
BYTES_PER_WORD = 4


@dataclass(frozen=True)
class Narrowing:
    """x86 instructions that narrow vectors with rounding and saturation, as LLVM intrinsics."""

    to_int32: str  #: float32 -> int32, half to even; overflow gives -2**31
    to_int16: str  #: packssdw
    to_int8: str  #: packsswb
    to_uint8: str  #: packuswb

    def round(self, value: Expr, lanes: int) -> Expr:
        """Round `value` half to even to an int32 vector. It must be below 2**31."""
        dtype = f"int32x{lanes}"
        if lanes < 16:
            return T.call_llvm_pure_intrin(self.to_int32, value, dtype=dtype)
        unused, every, current = T.broadcast(T.int32(0), lanes), T.int16(-1), T.int32(4)
        return T.call_llvm_pure_intrin(self.to_int32, value, unused, every, current, dtype=dtype)

    def pack_words(self, a: Expr, b: Expr, lanes: int) -> Expr:
        """Pack two int32 vectors to int16, saturated, interleaved by 128-bit blocks."""
        return T.call_llvm_pure_intrin(self.to_int16, a, b, dtype=f"int16x{2 * lanes}")

    def add_words(self, a: Expr, b: Expr, lanes: int) -> Expr:
        """Compute a + b in int16, saturated."""
        name = f"llvm.sadd.sat.v{2 * lanes}i16"
        return T.call_llvm_pure_intrin(name, a, b, dtype=f"int16x{2 * lanes}")

    def pack_bytes(self, a: Expr, b: Expr, dtype: str, lanes: int) -> Expr:
        """Pack two int16 vectors to uint8 or int8, saturated, interleaved by 128-bit blocks."""
        name = self.to_uint8 if dtype == "uint8" else self.to_int8
        return T.call_llvm_pure_intrin(name, a, b, dtype=f"{dtype}x{4 * lanes}")


@dataclass(frozen=True)
class Isa(ABC):
    """One instruction set, as the kernel generators see it.

    `activation` is the dtype that the dot product takes. If it is uint8 or int8, activations of the
    other dtype are stored with the top bit flipped, which shifts the zero point by 128 (see
    `zero_point_shift`). int16 activations have a separate instruction set (`for_activations`).
    """

    name: str
    features: tuple[str, ...]  #: LLVM features, all needed
    lanes: int  #: int32 lanes of one vector
    products: int  #: multiply-adds per lane and dot step
    accumulators: int  #: vectors a register tile may keep as accumulators
    dots_in_flight: int  #: independent accumulators that hide the latency of the dot product
    activation: str  #: dtype of activations the dot product takes
    weight_dtype: str  #: dtype in which packed weights are stored
    narrowing: Narrowing | None = None  #: saturating packs, if there are any
    max_blocks: int = 4  #: vectors of weights a register tile may keep besides the accumulators
    words_per_load: int = 1  #: best number of consecutive words for `load_activations`
    #: pixels of one accumulator: one `dot` multiplies a word of each by the same weights
    pixels: int = 1
    #: pixels whose sums share one vector register; an accumulator is `pixels / sharing` registers
    sharing: int = 1
    word_cost: float = 1.0  #: instructions that load one word of one pixel for the dot product
    dot_cost: float = 1.0  #: instructions of the dot product, per vector of sums
    registers: int = 32  #: number of vector registers
    early_loads: int = 0  #: registers for what LLVM loads early in a loop that it unrolls
    max_pixels: int = 32  #: most pixels of a register tile, if their words need registers
    may_spill: bool = True  #: whether a tile that exceeds the registers can be the best
    blocks_first: bool = False  #: use a vector of weights for all pixels before the next is loaded
    has_fma: bool = True  #: whether float32 fma is an instruction (otherwise a library call)
    wide: Isa | None = None  #: for int16 activations on the same CPUs; None: this instruction set
    timing: Timing = COMMON  #: timing of the target's core
    unit: MatrixUnit | None = None  #: for products of many rows; the rest takes vectors

    @property
    def sum_dtype(self) -> str:
        """Dtype of the lanes of an accumulator."""
        return "int32"

    @property
    def is_fused(self) -> bool:
        """Whether one instruction multiplies and adds to the sums."""
        return False

    @property
    def repeats_sums(self) -> bool:
        """Whether the result of `dot` contains its input sums more than once."""
        return False

    @property
    def joins_ends(self) -> bool:
        """Whether `load_joined` makes words of activations that are not consecutive.

        This takes as many scalar instructions as a word has activations. It pays if a dot product
        is a single instruction for all of them.
        """
        return False

    @property
    def weight_vector(self) -> int:
        """Elements of packed weights for one accumulator vector and one word."""
        return self.lanes * self.products

    @property
    def accumulator_lanes(self) -> int:
        """int32 lanes of one accumulator."""
        return self.lanes * self.pixels

    @property
    def word_dtype(self) -> str:
        """Integer type for words. A shorter word fills its low bytes."""
        return "int32"

    def repeat_word(self, word: int) -> Expr:
        """Return the operand of `dot` with the same word, given as bits, in all lanes.

        It is also the same for all pixels.
        """
        return self.as_activation(T.broadcast(T.int32(word), self.lanes))

    def zero_point_shift(self, dtype: str) -> int:
        """Number to add to zero points (and, modulo 256, to values) of activations of `dtype`."""
        if self.activation in (dtype, "int16"):
            return 0
        return 128 if dtype == "int8" else -128

    def arrange_weights(self, words: NDArray[np.int8]) -> NDArray[Any]:
        """Arrange weights: [..., lanes, products] int8 -> [..., weight_vector] weight_dtype."""
        flat = words.reshape(*words.shape[:-2], self.weight_vector)
        return flat.astype(self.weight_dtype)

    def count_registers(self, pixels: int, blocks: int, sums: int) -> int:
        """Count the vector registers of a tile: sums, weights and one word of activations."""
        return sums + blocks + 1

    def count_steps(self, pixels: int, blocks: int, sums: int) -> int:
        """Count the loads of words for which a tile's loop is unrolled."""
        return 1

    def time_word(self, pixels: int, blocks: int, latency: float) -> float:
        """Return the time of one word of a tile, in dot products.

        It is the number of dot products, but at least the time of the loads, one for each pixel and
        block, and at least the `latency` of a dot product.
        """
        loads = pixels * self.timing.tiles.activation + blocks
        return max(self.time_dots(pixels, blocks), loads, latency) + self.timing.tiles.word

    def time_dots(self, pixels: int, blocks: int) -> float:
        """Return the time for which one word of a tile keeps the units of the dot products busy."""
        return pixels * blocks

    def with_timing(self: IsaT, timing: Timing) -> IsaT:
        """Return the same, and all related instruction sets, for a core with this timing."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        own = {k: v.with_timing(timing) for k, v in values.items() if isinstance(v, Isa)}
        latency = timing.tiles.dots_in_flight or self.dots_in_flight
        return replace(self, timing=timing, dots_in_flight=latency, **own)

    def for_activations(self, dtype: str) -> Isa:
        """Return the target's instruction set for activations of `dtype`: uint8, int8 or int16."""
        return self.wide if dtype == "int16" and self.wide is not None else self

    def for_weights(self, weight: NDArray[np.int8]) -> Isa:
        """Return the target's instruction set for these constant weights."""
        return self

    def for_convolution(self, dtype: str) -> Isa:
        """Like `for_activations`, for sums that read every activation many times.

        It may be an instruction set for int16: bytes are then widened once, by the copy that pads
        them.
        """
        return self.for_activations(dtype)

    def for_depthwise(self, channels: int) -> Isa:
        """Return the same with vectors for a depthwise convolution of `channels` channels."""
        return self

    def for_wrapping_sums(self) -> Isa:
        """Return the same for sums that may exceed the range of int32: they wrap modulo 2**32."""
        return self

    @property
    def forms(self) -> tuple[Isa, ...]:
        """This instruction set, and others of the same CPUs with the same `activation`.

        The estimated time of a convolution decides, where it is known for all of them.
        """
        return (self,)

    @property
    def companion(self) -> Isa:
        """Instruction set of the target for sizes that do not fill this one: few pixels, short
        runs.

        It has the same `activation`. It is this instruction set if there is no other.
        """
        return self

    def join_words(self, words: list[Expr]) -> Expr:
        """Make the operand of `dot` from the `load_activations` operands of `pixels` pixels."""
        (word,) = words
        return word

    def join_sums(self, sums: list[Expr]) -> Expr:
        """Make an accumulator from `pixels` vectors of sums."""
        (vector,) = sums
        return vector

    def split_sums(self, acc: Expr) -> list[Expr]:
        """Return the vectors of sums that `join_sums` joined."""
        return [acc]

    def load_activation(self, buffer: Buffer, offset: Expr) -> Expr:
        """Load an operand: `products` values at `offset` of a flat buffer, in all lanes."""
        return self.as_activation(load_word(buffer, offset, self.lanes))

    def load_joined(self, buffer: Buffer, offsets: list[Expr], count: int) -> Expr:
        """Load an operand from several offsets: `count` values (1 or 2) at each, then zeros.

        The word is repeated in all lanes. Only for instruction sets with `joins_ends`.
        """
        raise NotImplementedError(self.name)

    def load_activations(self, buffer: Buffer, offset: Expr, count: int) -> list[Expr]:
        """Load the operands of `count` consecutive words."""
        return [self.load_activation(buffer, offset + i * self.products) for i in range(count)]

    @abstractmethod
    def as_activation(self, words: Expr) -> Expr:
        """Make an operand with one word per lane, from a vector made by `interleave`."""

    @property
    def row_dtype(self) -> str:
        """Dtype of the lanes of the result of `interleave`."""
        return "int32"

    def interleave(self, rows: list[Expr]) -> Expr:
        """Make the vector whose lane l is the word (rows[0][l], .., rows[products - 1][l])."""
        lanes, products = self.lanes, self.products
        order = [T.int32(row * lanes + lane) for lane in range(lanes) for row in range(products)]
        return T.reinterpret(f"int32x{lanes}", T.Shuffle(rows, order))

    @abstractmethod
    def load_weights(self, buffer: Buffer, index: Expr) -> Expr:
        """Load an operand: packed weight vector number `index` of a flat buffer."""

    @abstractmethod
    def store_weights(self, buffer: Buffer, index: Expr, words: Expr) -> None:
        """Write packed weight vector number `index`, from one word per lane (of `word_dtype`).

        This is the counterpart of `arrange_weights` at run time.
        """

    @abstractmethod
    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        """Compute acc[lane] + sum over products of activation * weight, exact modulo 2**32."""


class Wrapping(enum.Enum):
    """LLVM operations on integer vectors whose results wrap."""

    ADD = "add"
    SUBTRACT = "sub"
    MULTIPLY = "mul"
    SHIFT_LEFT = "shl"
    SHIFT_RIGHT = "ashr"  #: arithmetic


def emit_wrapping(operation: Wrapping, a: Expr, b: Expr, lanes: int) -> Expr:
    """Combine int32 vectors a and b modulo 2**32.

    TVM's own int32 operations tell LLVM that nothing overflows, which LLVM may rely on. Masked
    vector operations do not say so. Here their mask selects all lanes.
    """
    name = f"llvm.vp.{operation.value}.v{lanes}i32"
    every = T.broadcast(T.bool(True), lanes)
    return T.call_llvm_pure_intrin(name, a, b, every, T.int32(lanes), dtype=f"int32x{lanes}")


def load_word(buffer: Buffer, offset: Expr, lanes: int) -> Expr:
    """Load four consecutive bytes as one int32, repeated in `lanes` lanes (vpbroadcastd)."""
    count = BYTES_PER_WORD // np.dtype(buffer.dtype).itemsize
    word = buffer.vload([offset], f"{buffer.dtype}x{count}")
    return T.broadcast(T.reinterpret("int32", word), lanes)


def take(value: Expr, first: int, count: int) -> Expr:
    """Take `count` lanes of a vector from `first` on."""
    return T.Shuffle([value], [T.int32(first + i) for i in range(count)])


def split(value: Expr, lanes: int, count: int) -> list[Expr]:
    """Split a vector of `lanes` into `count` vectors of equal length."""
    size = lanes // count
    return [value] if count == 1 else [take(value, i * size, size) for i in range(count)]


def join(values: list[Expr], lanes: int) -> Expr:
    """Join vectors to the vector of `lanes` that `split` took apart."""
    return values[0] if len(values) == 1 else T.Shuffle(values, [T.int32(i) for i in range(lanes)])


def fence(value: Expr, lanes: int) -> Expr:
    """Return a float32 vector that LLVM takes as it is: nothing before is merged with its users.

    A product is rounded here, and not contracted with the operation after it.
    """
    dtype = f"float32x{lanes}" if lanes > 1 else "float32"
    name = f"llvm.arithmetic.fence.{'' if lanes == 1 else f'v{lanes}'}f32"
    return T.call_llvm_pure_intrin(name, value, dtype=dtype)


@dataclass(frozen=True)
class PackedIsa(Isa):
    """Dot products whose operands have the same order in registers and in memory."""

    def as_activation(self, words: Expr) -> Expr:
        return T.reinterpret(f"{self.activation}x{self.weight_vector}", words)

    def load_weights(self, buffer: Buffer, index: Expr) -> Expr:
        return buffer.vload(
            [index * self.weight_vector], f"{self.weight_dtype}x{self.weight_vector}"
        )

    def store_weights(self, buffer: Buffer, index: Expr, words: Expr) -> None:
        size = self.weight_vector
        value = T.reinterpret(f"{self.weight_dtype}x{size}", words)
        T.buffer_store(buffer, value, [T.ramp(index * size, 1, size)])


def find_largest(weight: NDArray[np.int8]) -> int:
    """Return the largest magnitude of the weights. For -128 it is 128."""
    return int(np.abs(weight.astype("int16")).max(initial=0))


@dataclass(frozen=True)
class PlainIsa(Isa):
    """Ordinary vector TIR with one int32 multiply-add per lane. Any LLVM target compiles it."""

    def load_activation(self, buffer: Buffer, offset: Expr) -> Expr:
        return T.broadcast(T.Cast("int32", buffer.vload([offset])), self.lanes)

    def as_activation(self, words: Expr) -> Expr:
        return words

    def interleave(self, rows: list[Expr]) -> Expr:
        row = T.reinterpret(f"{self.activation}x{self.lanes}", rows[0])
        return T.Cast(f"int32x{self.lanes}", row)

    def load_weights(self, buffer: Buffer, index: Expr) -> Expr:
        vector = buffer.vload([index * self.weight_vector], f"int8x{self.weight_vector}")
        return T.Cast(f"int32x{self.lanes}", vector)

    def store_weights(self, buffer: Buffer, index: Expr, words: Expr) -> None:
        value = T.Cast(f"int8x{self.lanes}", words)
        T.buffer_store(buffer, value, [T.ramp(index * self.lanes, 1, self.lanes)])

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        return acc + activation * weights


PORTABLE_WIDE = PlainIsa(
    name="portable int16",
    features=(),
    lanes=4,
    products=1,
    has_fma=False,
    accumulators=8,
    dots_in_flight=8,
    activation="int16",
    weight_dtype="int8",
)
PORTABLE = replace(PORTABLE_WIDE, name="portable", activation="uint8", wide=PORTABLE_WIDE)
