"""Analysis: the difference of two arrays, summed over batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Elements that are summed at a time. They stay in the cache, and they are too few for BLAS to wake
#: its threads, which takes longer than the sum.
BLOCK = 1 << 13


@dataclass(frozen=True)
class ErrorSums:
    """Running sums of one value over all batches, in float64."""

    count: int = 0
    signal: float = 0.0  #: sum of x^2
    noise: float = 0.0  #: sum of (y - x)^2
    dot: float = 0.0  #: sum of x y
    energy: float = 0.0  #: sum of y^2
    absolute: float = 0.0  #: sum of |y - x|
    largest: float = 0.0  #: max of |y - x|

    def update(self, expected: np.ndarray, got: np.ndarray) -> ErrorSums:
        """Return the sums with one more pair of arrays of equal shape."""
        x, y = expected.reshape(-1), got.reshape(-1)
        sums = np.zeros(5)
        largest = self.largest
        for start in range(0, x.size, BLOCK):
            a, b = (array[start : start + BLOCK].astype("float64") for array in (x, y))
            error = np.abs(b - a)
            sums += a @ a, error @ error, a @ b, b @ b, error.sum()
            largest = max(largest, float(error.max()))
        signal, noise, dot, energy, absolute = sums.tolist()
        return ErrorSums(
            self.count + x.size,
            self.signal + signal,
            self.noise + noise,
            self.dot + dot,
            self.energy + energy,
            self.absolute + absolute,
            largest,
        )

    @property
    def sqnr(self) -> float:
        """10 log10(signal / noise) in dB. inf if nothing differs."""
        if self.noise == 0:
            return float("inf")
        return float(10 * np.log10(max(self.signal, 1e-300) / self.noise))

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both. 1 if both are 0."""
        norm = np.sqrt(self.signal * self.energy)
        return float(self.dot / norm) if norm > 0 else float(self.signal == self.energy)

    @property
    def mean(self) -> float:
        """The mean absolute error."""
        return self.absolute / max(self.count, 1)
