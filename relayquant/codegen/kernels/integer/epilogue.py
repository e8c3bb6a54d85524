"""int32 accumulators -> stored values: requantize, dequantize, or store them as they are.

The arithmetic is the package's default (round half to even, float32), bit for bit:

    t = RN(float32(acc) * m)                                  one IEEE multiply
    t = fma(float32(r - z_r), m_r, t)                         with a residual operand
    t = curve(t) * f                                          with a function of single numbers
    t = p * (m_p if p >= 0 else f), p = integer of t          with a slope below zero
    q = int(min(max(rne(t), low - z), high - z)) + z          clamp in float, zero point as integer

rne(t) and the clamp commute, because the bounds are integers. Clamping first keeps the value small
enough to round by adding 1.5 * 2**23, where float32 has steps of 1. That is one addition on every
target and needs no rounding instruction. LLVM cannot contract it into an FMA, since the clamp is
between the product and the sum.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.curve import Curve, keep
from relayquant.codegen.kernels.emit import constant, vector
from relayquant.codegen.kernels.isa.base import Expr, fence

#: 1.5 * 2**23: float32 numbers from 2**23 to 2**24 are the integers.
ROUNDING_MAGIC = 12582912.0
ROUNDING_MAGIC_BITS = 0x4B400000


class Store(enum.Enum):
    """Kinds of stored values."""

    REQUANTIZE = "requantize"  #: integers of another affine space
    DEQUANTIZE = "dequantize"  #: float32(acc) * multiplier
    ACCUMULATOR = "accumulator"  #: the int32 sums as they are


@dataclass(frozen=True)
class Residual:
    """A second operand added in real space before rounding: fma(r - zero_point, multiplier, t)."""

    dtype: str  #: uint8, int8 or int16; same shape as the output
    zero_point: int
    multiplier: float  #: float32(double(s_r) / double(s_out)); negative to subtract


@dataclass(frozen=True)
class Slope:
    """A leaky relu or prelu of requantized integers, which have one multiplier from 0 on.

    Below, the second multiplier of each channel counts. The integers are less their zero point, and
    bounded by `low` and `high`. None: the bounds of the results are enough.
    """

    low: int | None
    high: int | None
    multiplier: float
    rounds: bool = False  #: whether the target has an instruction that rounds float32

    def apply(self, value: Expr, below: Expr, lanes: int) -> Expr:
        """Emit the function of a float32 vector without NaN. `below` has the multipliers."""
        if self.low is not None:
            value = T.max(value, constant("float32", self.low, lanes))
        if self.high is not None:
            value = T.min(value, constant("float32", self.high, lanes))
        if self.rounds:
            value = keep(T.nearbyint(value), lanes)
        else:  # numbers from 2**22 on are not rounded, but remain beyond all bounds
            magic = constant("float32", ROUNDING_MAGIC, lanes)
            value = keep(fence(value + magic, lanes) - magic, lanes)
        above = constant("float32", self.multiplier, lanes)
        return value * T.Select(value < constant("float32", 0, lanes), below, above)


@dataclass(frozen=True)
class Epilogue:
    """Conversion of int32 accumulators to stored values.

    `low`, `high` bound the stored integers (a merged relu or clip); None: the limits of the dtype.
    If results are not requantized they bound the int32 sums.
    `is_small`: no multiplier exceeds 1/2 (`has_small_results`), so every result fits int32 before
    it is clamped.
    `curve`: a function such as GELU between two multipliers of each channel, with finite results.
    `slope`: a prelu behind the first multiplier and the residual.
    """

    output: Store = Store.REQUANTIZE
    dtype: str = "uint8"
    zero_point: int = 0
    low: int | None = None
    high: int | None = None
    residual: Residual | None = None
    is_small: bool = False
    curve: Curve | None = None
    slope: Slope | None = None

    def __post_init__(self) -> None:
        allowed = {
            Store.REQUANTIZE: ("uint8", "int8", "int16", "uint16", "int32"),
            Store.DEQUANTIZE: ("float32",),
            Store.ACCUMULATOR: ("int32",),
        }[self.output]
        if self.dtype not in allowed:
            raise ValueError(
                f"Epilogue: a kernel that stores {self.output.value} values cannot store "
                f"{self.dtype!r}; allowed: {', '.join(allowed)}.",
            )
        if self.output is not Store.REQUANTIZE:
            if self.residual or self.zero_point or self.curve or self.slope:
                raise ValueError(
                    f"Epilogue: {self.output.value} takes no residual, curve, slope or zero point; "
                    "use Store.REQUANTIZE.",
                )
            return
        if self.curve and (self.residual or self.slope):
            raise ValueError(
                "Epilogue: there is a residual or a slope beside a curve; allowed: a curve alone."
            )
        low, high = self.bounds
        limits = INTEGER_LIMITS[self.dtype]
        if not limits[0] <= low <= high <= limits[1]:
            raise ValueError(
                f"Epilogue: bounds {low}..{high} are not a range within {self.dtype} "
                f"({limits[0]}..{limits[1]}).",
            )
        if self.dtype == "int32" and self.zero_point:
            raise ValueError("Epilogue: int32 output takes no zero point.")
        if not limits[0] <= self.zero_point <= limits[1]:
            raise ValueError(f"Epilogue: zero point {self.zero_point} is outside {self.dtype}.")

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest integer that is stored."""
        low, high = INTEGER_LIMITS[self.dtype]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @property
    def is_unbounded(self) -> bool:
        """Whether the bounds are the limits of the dtype."""
        return self.bounds == INTEGER_LIMITS[self.dtype]

    @property
    def has_multiplier(self) -> bool:
        """Whether the kernel takes a float32 multiplier per channel."""
        return self.output is not Store.ACCUMULATOR

    @property
    def multipliers(self) -> int:
        """Count the float32 multipliers of each channel."""
        return self.has_multiplier + (self.curve is not None or self.slope is not None)

    def emit(
        self, acc: Expr, multipliers: Sequence[Expr], residual: Expr | None, lanes: int
    ) -> Expr:
        """Compute the stored vector from an int32 vector (and the vectors it is combined with)."""
        if self.output is not Store.REQUANTIZE:
            if self.low is not None:
                acc = T.max(acc, constant("int32", self.low, lanes))
            if self.high is not None:
                acc = T.min(acc, constant("int32", self.high, lanes))
        if self.output is Store.ACCUMULATOR:
            return acc
        if residual is not None:
            residual = T.Cast(vector("int32", lanes), residual)
        value = self.emit_real(acc, multipliers, residual, lanes)
        if self.output is Store.DEQUANTIZE:
            return value
        return self.emit_rounded(value, lanes)

    def emit_real(
        self,
        acc: Expr,
        multipliers: Sequence[Expr],
        residual: Expr | None,
        lanes: int,
        moved: int = 0,
    ) -> Expr:
        """Compute the float32 vector before rounding.

        `residual` is int32: its values plus `moved`.
        """
        value = T.Cast(vector("float32", lanes), acc) * multipliers[0]
        if self.curve is not None:
            return keep(self.curve.apply(value, lanes) * multipliers[1], lanes)
        if self.residual is not None:
            other = residual
            if self.residual.zero_point + moved:
                other = other - constant("int32", self.residual.zero_point + moved, lanes)
            factor = constant("float32", self.residual.multiplier, lanes)
            value = emit_fma(T.Cast(vector("float32", lanes), other), factor, value, lanes)
        if self.slope is not None:
            value = self.slope.apply(value, multipliers[1], lanes)
        return value

    def emit_rounded(self, value: Expr, lanes: int) -> Expr:
        """Round and clamp a float32 vector without NaN, and add the zero point."""
        return emit_round_clamp(value, self.dtype, self.zero_point, self.bounds, lanes)


def has_small_results(multiplier: NDArray[np.float32], epilogue: Epilogue) -> bool:
    """Whether |acc * multiplier| is at most 2**30, and a residual adds at most 2**28.

    Both before a slope and behind it. `multiplier` has two rows with a slope.
    """
    residual, slope = epilogue.residual, epilogue.slope
    first, below = (multiplier, 0.0) if slope is None else multiplier
    growth = 1.0 if slope is None else max(1.0, slope.multiplier, float(np.abs(below).max()))
    added = 0.0 if residual is None else abs(residual.multiplier)
    largest = float(np.max(np.abs(first), initial=0.0))
    return largest * growth <= 0.5 and added * growth <= 2.0**20


def emit_fma(a: Expr, b: Expr, c: Expr, lanes: int) -> Expr:
    """Compute a * b + c in float32 with one rounding, if needed by a library call.

    c is fenced: if b is 1, LLVM makes a sum of it, and would contract a product c with that sum.
    """
    suffix = "f32" if lanes == 1 else f"v{lanes}f32"
    name, dtype = f"llvm.fma.{suffix}", vector("float32", lanes)
    return T.call_llvm_pure_intrin(name, a, b, fence(c, lanes), dtype=dtype)


def emit_round_clamp(
    value: Expr, dtype: str, zero_point: int, bounds: tuple[int, int], lanes: int
) -> Expr:
    """Compute int(min(max(rne(value), low - z), high - z)) + z as `dtype`. `value` is not NaN."""
    low, high = bounds[0] - zero_point, bounds[1] - zero_point
    if dtype == "int32":
        value = T.nearbyint(value)
        value = T.max(value, constant("float32", -largest_float32(-low), lanes))
        value = T.min(value, constant("float32", largest_float32(high), lanes))
        return T.Cast(vector("int32", lanes), value)
    value = T.max(value, constant("float32", low, lanes))
    value = T.min(value, constant("float32", high, lanes))
    return emit_round(value, dtype, zero_point, lanes)


def emit_round(value: Expr, dtype: str, zero_point: int, lanes: int) -> Expr:
    """Compute int(rne(value)) + zero_point as `dtype`, which must hold it.

    |value| is below 2**22.
    """
    value = value + constant("float32", ROUNDING_MAGIC, lanes)
    bits = T.reinterpret(vector("int32", lanes), value)
    bits = bits - constant("int32", ROUNDING_MAGIC_BITS - zero_point, lanes)
    return T.Cast(vector(dtype, lanes), bits)


def largest_float32(value: int) -> int:
    """Return the largest float32 <= value, as an integer."""
    bits = max(abs(value).bit_length() - 24, 0)
    return (value >> bits) << bits
