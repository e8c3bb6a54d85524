"""The register in which hardware sums products: its width, and what becomes of sums too large.

Part of a DTypeConfig; annotate hands it to the plan, simulate and convert make the sums behave so.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import numpy as np

from relayquant.base.arguments import check_fields
from relayquant.base.plain_data import PlainSettings, read_fields
from relayquant.errors import ConfigError

#: width of the sums of this package's own kernels: no sum of products passes it
NATIVE_BITS = 64
#: widest register that is emulated
WIDEST_BITS = 32
ALLOWED_BITS = f"allowed: 8 to {WIDEST_BITS}, or {NATIVE_BITS}, which is that of the kernels"


class Overflow(enum.Enum):
    """What becomes of a sum that does not fit."""

    SATURATE = "saturate"  #: the nearest end of the range
    WRAP = "wrap"  #: modulo 2 ** bits, two's complement


class OverflowBound(enum.Enum):
    """What calibration sees to fit, by raising the scales of weights."""

    NONE = "none"  #: nothing: parameters are taken as they were picked
    OBSERVED = "observed"  #: every sum on the calibration data
    #: the sum, and every partial sum in any order, for any input; OBSERVED for products of two
    #: activations, whose integers are as large whatever the scales
    WORST_CASE = "worst_case"


@check_fields
@dataclass(frozen=True)
class Accumulator(PlainSettings):
    """A register of `bits` bits, signed, that holds sum(x * w) + bias in units of data scale x
    weight scale.

    The sum is exact, and is brought into range once, when it is complete with its bias: with WRAP
    that is what hardware does in whatever order it adds; with SATURATE it is what hardware does
    whose partial sums fit, and of which the order therefore does not matter.
    `OverflowBound.WORST_CASE` guarantees that, for all inputs.

    Attributes:
        bits: 8 to 32, or 64, that of this package's kernels: it holds every sum, so that the
            other two say nothing. Kernels use 32 bits of it where no input can pass them.
        overflow, bound: See the enums.
    """

    bits: int = NATIVE_BITS
    overflow: Overflow = Overflow.SATURATE
    bound: OverflowBound = OverflowBound.OBSERVED

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise ConfigError(f"Accumulator.bits is {self.bits!r}; {ALLOWED_BITS}.", code="RQ101")
        if not (8 <= self.bits <= WIDEST_BITS or self.bits == NATIVE_BITS):
            raise ConfigError(f"Accumulator.bits is {self.bits}; {ALLOWED_BITS}.", code="RQ101")
        for name, kind in (("overflow", Overflow), ("bound", OverflowBound)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"Accumulator.{name} is {getattr(self, name)!r}; allowed: a member of "
                    f"{kind.__name__}.",
                    code="RQ101",
                )

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest sum that fits."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def is_native(self) -> bool:
        """Whether it is the register of the kernels: nothing has to be emulated."""
        return self.bits == NATIVE_BITS

    @property
    def description(self) -> str:
        """ "int14 saturate", "int64" for that of the kernels; `parse` reads it."""
        if self.is_native:
            return f"int{self.bits}"
        return f"int{self.bits} {self.overflow.value}"

    @staticmethod
    def parse(text: object, where: str = "Accumulator") -> Accumulator:
        """The accumulator that "int14", "int14 saturate" or "int14 wrap" names.

        Raises:
            ConfigError: it names none.
        """
        found = re.fullmatch(r"int(\d+)(?: (saturate|wrap))?", text) if isinstance(text, str) else 0
        if not found:
            raise ConfigError(
                f"{where} is {text!r}; allowed: int8 to int{WIDEST_BITS}, with ' saturate' or "
                f"' wrap' behind it, e.g. 'int14 wrap', or int{NATIVE_BITS}.",
                code="RQ101",
            )
        return Accumulator(int(found[1]), Overflow(found[2] or Overflow.SATURATE.value))

    def narrow(self, sums: np.ndarray) -> np.ndarray:
        """Exact integer sums as the register holds them, same shape, int64."""
        low, high = self.limits
        sums = sums.astype("int64")
        if self.is_native:
            return sums
        if self.overflow is Overflow.SATURATE:
            return np.clip(sums, low, high)
        return (sums - low) % 2**self.bits + low

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Accumulator:
        """What `to_dict` wrote, or a text for `parse`."""
        where = where or cls.__name__
        if isinstance(data, str):
            return Accumulator.parse(data, where)
        return read_fields(Accumulator, data, where, ("bits",))


#: what the kernels of this package sum in
NATIVE = Accumulator()
