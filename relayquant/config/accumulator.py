"""The accumulator of the hardware: its width, and the overflow behaviour.

It is part of a DTypeConfig. annotate puts it into the plan. simulate and convert reproduce its
overflow.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import numpy as np

from relayquant.base.arguments import check_fields
from relayquant.base.plain_data import PlainSettings, read_fields
from relayquant.errors import ConfigError

#: accumulator width of this package's kernels: no sum of products overflows it
NATIVE_BITS = 64
#: widest accumulator that is emulated
WIDEST_BITS = 32
ALLOWED_BITS = f"allowed: 8 to {WIDEST_BITS}, or {NATIVE_BITS}, the accumulator of the kernels"


class Overflow(enum.Enum):
    """The result for a sum that overflows."""

    SATURATE = "saturate"  #: the nearest end of the range
    WRAP = "wrap"  #: modulo 2 ** bits, two's complement


class OverflowBound(enum.Enum):
    """The sums that must not overflow. Calibration raises weight scales to ensure it."""

    NONE = "none"  #: none: parameters are not adapted
    OBSERVED = "observed"  #: every sum on the calibration data
    #: the sum and every partial sum in any order, for any input; products of two activations use
    #: OBSERVED, because scales do not change the size of their integers
    WORST_CASE = "worst_case"


@check_fields
@dataclass(frozen=True)
class Accumulator(PlainSettings):
    """A signed accumulator of `bits` bits for sum(x * w) + bias, with scale data scale x weight
    scale.

    The sum with bias is computed exactly and then brought into range once. With WRAP, hardware
    gives the same result for any order of additions. With SATURATE, hardware gives the same result
    if no partial sum overflows. `OverflowBound.WORST_CASE` guarantees this for all inputs.

    Attributes:
        bits: 8 to 32, or 64 for the accumulator of this package's kernels. 64 bits hold every sum,
            so that the other two fields have no effect. Kernels use int32 if no input can overflow
            it.
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
        """The smallest and the largest sum that fits."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def is_native(self) -> bool:
        """Whether it is the accumulator of the kernels, so that nothing has to be emulated."""
        return self.bits == NATIVE_BITS

    @property
    def description(self) -> str:
        """A text such as "int14 saturate", or "int64" for the kernels' accumulator. `parse` reads
        it.
        """
        if self.is_native:
            return f"int{self.bits}"
        return f"int{self.bits} {self.overflow.value}"

    @staticmethod
    def parse(text: object, where: str = "Accumulator") -> Accumulator:
        """Read a text such as "int14", "int14 saturate" or "int14 wrap".

        Raises:
            ConfigError: The text does not name an accumulator.
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
        """Bring exact integer sums into range -> int64, same shape."""
        low, high = self.limits
        sums = sums.astype("int64")
        if self.is_native:
            return sums
        if self.overflow is Overflow.SATURATE:
            return np.clip(sums, low, high)
        return (sums - low) % 2**self.bits + low

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Accumulator:
        """Read the data of `to_dict`, or a text for `parse`."""
        where = where or cls.__name__
        if isinstance(data, str):
            return Accumulator.parse(data, where)
        return read_fields(Accumulator, data, where, ("bits",))


#: the accumulator of this package's kernels
NATIVE = Accumulator()
