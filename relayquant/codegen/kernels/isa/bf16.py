"""Products of bfloat16 with sums in float32, on x86: tiles of AMX, or vectors. `arm_bf16` has those
of Arm.

    tdpbf16ps    16 rows x 16 channels x 32 products       Sapphire Rapids and later Xeons
    vdpbf16ps    16 channels x 2 products                  also Cooper Lake, Zen 4 and later

Both take denormal numbers as zero, round to nearest even whatever the mode is, and raise no
exceptions. They add the products of a pair in different orders, so two CPUs may differ in the last
bits of a sum. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2,
TDPBF16PS and VDPBF16PS.
"""

from __future__ import annotations

import importlib.resources
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import constant, vector
from relayquant.codegen.kernels.isa.base import Expr, PackedIsa
from relayquant.codegen.kernels.isa.matrix_unit import AMX_BF16, BF16_BITS

#: Bits of a float32 that a bfloat16 lacks; and the place of the bit that makes a NaN quiet.
LOW_BITS, QUIET_BIT = 16, 22
#: Bits of a float32 without its sign; of these, those of infinity.
MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000


@dataclass(frozen=True)
class Bf16Isa(PackedIsa):
    """Products of bfloat16, which kernels hold as `BF16_BITS`."""

    @property
    def sum_dtype(self) -> str:
        return "float32"

    @property
    @abstractmethod
    def file(self) -> str:
        """LLVM code next to this module, with functions for `dot` and `round`."""

    @property
    def code(self) -> str:
        """Functions in LLVM's language that a kernel has to import for `dot` and `round`."""
        return importlib.resources.files(__package__).joinpath(self.file).read_text("utf-8")

    @property
    @abstractmethod
    def rounded_lanes(self) -> int:
        """Most lanes that `round` takes."""

    @abstractmethod
    def round(self, value: Expr, lanes: int) -> Expr:
        """Round float32 numbers to the bits of bfloat16, ties to even. NaN stays NaN."""


@dataclass(frozen=True)
class X86Bf16Isa(Bf16Isa):
    """vdpbf16ps, and tiles if there are any. Words are pairs of activations."""

    @property
    def file(self) -> str:
        return "dot_bf16.ll"

    @property
    def rounded_lanes(self) -> int:
        return 16

    def dot(self, acc: Expr, activation: Expr, weights: Expr) -> Expr:
        a, b = (T.reinterpret(f"int32x{self.lanes}", each) for each in (activation, weights))
        return T.call_extern("relayquant_dot_bf16", acc, a, b, dtype=f"float32x{self.lanes}")

    def round(self, value: Expr, lanes: int) -> Expr:
        if lanes == self.rounded_lanes:
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            rounded = T.call_llvm_pure_intrin(name, value, dtype=f"bfloat16x{lanes}")
            return T.reinterpret(f"{BF16_BITS}x{lanes}", rounded)
        return round_integers(value, lanes)


def round_integers(value: Expr, lanes: int) -> Expr:
    """Round float32 numbers to the bits of bfloat16 by operations on integers."""

    def number(value: int) -> Expr:
        return constant("uint32", value, lanes)

    bits = T.reinterpret(vector("uint32", lanes), value)
    magnitude = T.bitwise_and(bits, number(MAGNITUDE))
    # Minima and maxima, as LLVM makes no vectors of a choice. A NaN is quiet, and is not rounded.
    is_nan = T.min(T.max(magnitude, number(INFINITY)) - number(INFINITY), number(1))
    quiet = T.bitwise_or(magnitude, T.shift_left(is_nan, number(QUIET_BIT)))
    magnitude = T.min(quiet, number(INFINITY | 1 << QUIET_BIT))
    odd = T.bitwise_and(T.shift_right(bits, number(LOW_BITS)), number(1))
    rounded = magnitude + number((1 << LOW_BITS - 1) - 1) + odd
    sign = T.bitwise_and(bits, number(1 << 31))
    whole = T.shift_right(T.bitwise_or(rounded, sign), number(LOW_BITS))
    return T.Cast(vector(BF16_BITS, lanes), whole)


def join_pairs(low: Expr, high: Expr, lanes: int) -> Expr:
    """Round two vectors of float32 to pairs of bfloat16: 2 * `lanes` `BF16_BITS`, ties away from 0.

    This is fewer operations than `Bf16Isa.round` and `interleave`. A NaN whose low 16 bits are not
    0 may become 0.
    """
    half = constant("uint32", 1 << LOW_BITS - 1, lanes)
    low, high = (T.reinterpret(vector("uint32", lanes), each) + half for each in (low, high))
    joined = T.bitwise_or(
        T.shift_right(low, constant("uint32", LOW_BITS, lanes)),
        T.bitwise_and(high, constant("uint32", 0xFFFF0000, lanes)),
    )
    return T.reinterpret(vector(BF16_BITS, 2 * lanes), joined)


VECTORS_BF16 = X86Bf16Isa(
    name="avx512bf16",
    features=("avx512bf16", "avx512bw", "avx512vl"),
    lanes=16,
    products=2,
    accumulators=24,
    dots_in_flight=10,
    activation=BF16_BITS,
    weight_dtype=BF16_BITS,
)
TILES_BF16 = replace(
    VECTORS_BF16,
    name="amx bf16",
    features=(*VECTORS_BF16.features, "amx-tile", "amx-bf16"),
    unit=AMX_BF16,
)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 numbers to the bits of bfloat16, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, "float32").view("uint32")
    rounded = (bits + np.uint32(0x7FFF) + (bits >> LOW_BITS & 1)) >> LOW_BITS
    return np.where(np.isnan(values), (bits | 1 << QUIET_BIT) >> LOW_BITS, rounded).astype("uint16")
