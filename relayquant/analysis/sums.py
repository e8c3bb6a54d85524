"""Analysis: how far two arrays are apart, summed over batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ErrorSums:
    """Running sums of one value over all batches; everything in float64."""

    count: int = 0
    signal: float = 0.0  #: sum of x^2
    noise: float = 0.0  #: sum of (y - x)^2
    dot: float = 0.0  #: sum of x y
    energy: float = 0.0  #: sum of y^2
    absolute: float = 0.0  #: sum of |y - x|
    largest: float = 0.0  #: max of |y - x|

    def update(self, expected: np.ndarray, got: np.ndarray) -> ErrorSums:
        """The sums with one more pair of arrays of one shape."""
        x, y = expected.astype("float64").reshape(-1), got.astype("float64").reshape(-1)
        error = np.abs(y - x)
        return ErrorSums(
            self.count + x.size,
            self.signal + float(x @ x),
            self.noise + float(error @ error),
            self.dot + float(x @ y),
            self.energy + float(y @ y),
            self.absolute + float(error.sum()),
            max(self.largest, float(error.max(initial=0.0))),
        )

    @property
    def sqnr(self) -> float:
        """10 log10(signal / noise) in dB; inf when nothing differs."""
        if self.noise == 0:
            return float("inf")
        return float(10 * np.log10(max(self.signal, 1e-300) / self.noise))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; 1 when both are 0."""
        norm = np.sqrt(self.signal * self.energy)
        return float(self.dot / norm) if norm > 0 else float(self.signal == self.energy)

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return self.absolute / max(self.count, 1)
