"""Analysis: the difference of two arrays, summed over batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from relayquant.base.runtime import find_memory_axes

#: Elements that are summed at a time. They stay in the cache, and they are too few for BLAS to wake
#: its threads, which takes longer than the sum.
BLOCK = 1 << 13


@dataclass(frozen=True)
class NoiseSums:
    """Running sums of one value over all batches, in float64: those that its SQNR needs."""

    signal: float = 0.0  #: sum of x^2
    noise: float = 0.0  #: sum of (y - x)^2

    def update(self, expected: np.ndarray, got: np.ndarray) -> NoiseSums:
        """Return the sums with one more pair of arrays of equal shape."""
        sums = np.zeros(2)
        for x, y in iterate_blocks(expected, got):
            error = y - x
            sums += x @ x, error @ error
        signal, noise = sums.tolist()
        return NoiseSums(self.signal + signal, self.noise + noise)

    @property
    def sqnr(self) -> float:
        """10 log10(signal / noise) in dB. inf if nothing differs."""
        if self.noise == 0:
            return float("inf")
        return float(10 * np.log10(max(self.signal, 1e-300) / self.noise))


@dataclass(frozen=True)
class ErrorSums(NoiseSums):
    """All running sums of one value."""

    count: int = 0
    dot: float = 0.0  #: sum of x y
    energy: float = 0.0  #: sum of y^2
    absolute: float = 0.0  #: sum of |y - x|
    largest: float = 0.0  #: max of |y - x|

    def update(self, expected: np.ndarray, got: np.ndarray) -> ErrorSums:
        """Return the sums with one more pair of arrays of equal shape."""
        sums, largest = np.zeros(5), self.largest
        for x, y in iterate_blocks(expected, got):
            error = np.abs(y - x)
            sums += x @ x, error @ error, x @ y, y @ y, error.sum()
            largest = max(largest, float(error.max()))
        signal, noise, dot, energy, absolute = sums.tolist()
        return ErrorSums(
            self.signal + signal,
            self.noise + noise,
            self.count + expected.size,
            self.dot + dot,
            self.energy + energy,
            self.absolute + absolute,
            largest,
        )

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both. 1 if both are 0."""
        norm = np.sqrt(self.signal * self.energy)
        return float(self.dot / norm) if norm > 0 else float(self.signal == self.energy)

    @property
    def mean(self) -> float:
        """The mean absolute error."""
        return self.absolute / max(self.count, 1)


def iterate_blocks(
    expected: np.ndarray, got: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over both arrays in float64, `BLOCK` elements at a time.

    The order is the memory order of `expected`. In another order, channels that lie last in memory
    would be copied to where they are first.
    """
    axes = find_memory_axes(expected)
    x, y = (array.transpose(axes).reshape(-1) for array in (expected, got))
    for start in range(0, x.size, BLOCK):
        yield x[start : start + BLOCK].astype("float64"), y[start : start + BLOCK].astype("float64")
