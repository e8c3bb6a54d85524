"""Products of bfloat16 with sums in float32, on 64-bit Arm (Armv8.6, FEAT_BF16).

    bfmmla  v0.4s, v1.8h, v2.8h        2 pixels x 4 products by 4 products x 2 channels
    bfdot   v0.4s, v1.8h, v2.2h[i]     4 channels x 2 products of one pixel
    bfcvtn  v0.4h, v1.4s               rounds to nearest, ties to even

One bfmmla does 16 multiply-adds, where fmla does 4. Both products add the two products of a pair
before they add them to the sum, and round to odd in between, unless the CPU computes them exactly
(FEAT_EBF16). They take denormal numbers as zero. So two CPUs may differ in the last bits of a sum.
Source: Arm Architecture Reference Manual, BFMMLA and BFDOT (vector).

Words of pixels are joined in pairs, as for smmla; a single pixel takes bfdot, as it takes sdot.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import vector
from relayquant.codegen.kernels.isa.arm import PART, SdotIsa, SmmlaIsa
from relayquant.codegen.kernels.isa.base import Expr
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa, round_integers
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS


@dataclass(frozen=True)
class ArmBf16Isa(Bf16Isa, SdotIsa):
    """bfdot. `intrinsic` is a function of `code`."""

    @property
    def file(self) -> str:
        return "arm_bf16.ll"

    @property
    def rounded_lanes(self) -> int:
        return 2 * PART

    def round(self, value: Expr, lanes: int) -> Expr:
        if lanes not in (PART, 2 * PART):
            return round_integers(value, lanes)
        name = f"relayquant_round_bf16_{lanes}"
        return T.call_extern(name, value, dtype=vector(BF16_BITS, lanes))

    def multiply(self, acc: Expr, a: Expr, b: Expr) -> Expr:
        operands = (T.reinterpret(f"int32x{PART}", each) for each in (a, b))
        return T.call_extern(self.intrinsic, acc, *operands, dtype=f"float32x{PART}")


@dataclass(frozen=True)
class BfmmlaIsa(ArmBf16Isa, SmmlaIsa):
    """bfmmla, with `single` for single pixels."""


BFDOT = ArmBf16Isa(
    name="bfdot",
    features=("neon", "bf16"),
    lanes=4,
    products=2,
    accumulators=24,
    dots_in_flight=8,
    activation=BF16_BITS,
    weight_dtype=BF16_BITS,
    words_per_load=4,
    has_two_loads=True,
    word_cost=1 / 4,  # a load of 16 bytes
    max_pixels=8,
    may_spill=False,
    blocks_first=True,
    intrinsic="relayquant_bfdot",
)
BFMMLA = BfmmlaIsa(
    name="bfmmla",
    features=("neon", "bf16"),
    lanes=4,
    products=4,
    accumulators=24,
    dots_in_flight=8,
    activation=BF16_BITS,
    weight_dtype=BF16_BITS,
    words_per_load=2,
    has_two_loads=True,
    pixels=2,
    word_cost=1,  # half a load of 16 bytes, half a zip
    max_pixels=8,
    max_blocks=6,
    may_spill=False,
    blocks_first=True,
    intrinsic="relayquant_bfmmla",
    single=BFDOT,
)
