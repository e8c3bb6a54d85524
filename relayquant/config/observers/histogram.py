"""A histogram for observers that streams, grows and merges exactly.

The bin width is 2**exponent. Edges are integer multiples of the width, so that zero is always an
edge. If a value falls outside, the width doubles and neighbours are summed. This equals binning
with the wider bins from the start: floor(floor(x / w) / 2) == floor(x / 2w). The exponent is a
function of the largest magnitude. The result therefore does not depend on the order of the data or
on its split over processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.errors import ConfigError, DataError, format_count

#: Smallest exponent of the bin width. float32 needs exponents down to -149 - log2(bins).
SMALLEST_EXPONENT = -200
#: Number of elements binned at a time. It bounds the temporary arrays and keeps them in cache.
CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of real values in `bins` bins on each side of zero.

    Attributes:
        bins: Bins per side, a power of two. On the side of the largest magnitude, at least half of
            them are in use.
        exponent: log2 of the bin width.
        counts: int64, shape (2 * bins,). Entry i counts the values x with
            (i - bins) * width <= x < (i - bins + 1) * width, zeros excepted.
        zeros: Number of exact zeros. Zero is representable with any parameters and often a spike
            (after a ReLU, padding), so it is counted separately.
        low, high: Exact smallest and largest value. +inf and -inf without values.
    """

    bins: int
    exponent: int
    counts: NDArray[np.int64]
    zeros: int
    low: float
    high: float

    @staticmethod
    def empty(bins: int = 4096) -> Histogram:
        """Make an empty histogram.

        Raises:
            ConfigError: bins is not a power of two from 64 to 2**20.
        """
        if not isinstance(bins, int) or not 64 <= bins <= 2**20 or bins & (bins - 1):
            raise ConfigError(
                f"bins is {bins!r}; allowed: a power of two from 64 to {2**20}, for instance 2048.",
                code="RQ101",
            )
        return Histogram(
            bins, SMALLEST_EXPONENT, np.zeros(2 * bins, "int64"), 0, math.inf, -math.inf
        )

    @property
    def width(self) -> float:
        """Bin width in real units."""
        return math.ldexp(1.0, self.exponent)

    @property
    def total(self) -> int:
        """Number of counted values, with zeros."""
        return int(self.counts.sum()) + self.zeros

    def add(self, values: NDArray[Any]) -> Histogram:
        """Return this histogram plus the elements of `values` (any shape, finite floats)."""
        if values.size == 0:
            return self
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DataError(
                "A histogram takes finite values only; these hold NaN or infinity.", code="RQ302"
            )
        # Adding 0.0 makes 0.0 of -0.0: which of them min picks depends on the order.
        low, high = min(self.low, low) + 0.0, max(self.high, high) + 0.0
        grown = self._widen(find_exponent(max(-low, high), self.bins))
        counts, nonzero = grown.counts.copy(), 0
        # Exact: a power of two in float64, where nothing underflows that does in float32.
        per_width = math.ldexp(1.0, -grown.exponent)
        for chunk in iterate_chunks(values):
            scaled = np.multiply(chunk, per_width, dtype="float64")
            np.floor(scaled, out=scaled)
            scaled += self.bins
            counts += np.bincount(scaled.astype("int64"), minlength=2 * self.bins)
            nonzero += int(np.count_nonzero(chunk))
        zeros = int(values.size) - nonzero
        counts[self.bins] -= zeros
        return replace(grown, counts=counts, zeros=self.zeros + zeros, low=low, high=high)

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of the data of both. It is exactly associative and commutative.

        Raises:
            ConfigError: the histograms have different numbers of bins.
        """
        if self.bins != other.bins:
            raise ConfigError(
                f"Histograms of {self.bins} and {format_count(other.bins, 'bin')} cannot be "
                "merged; use the same number of bins in every process.",
                code="RQ105",
            )
        exponent = max(self.exponent, other.exponent)
        a, b = self._widen(exponent), other._widen(exponent)
        return replace(
            a,
            counts=a.counts + b.counts,
            zeros=a.zeros + b.zeros,
            low=min(a.low, b.low),
            high=max(a.high, b.high),
        )

    def _widen(self, exponent: int) -> Histogram:
        steps = exponent - self.exponent
        if steps <= 0:
            return self
        shift = min(steps, self.bins.bit_length())  # floor(i / 2**shift) is 0 or -1 from there on
        counts = np.zeros_like(self.counts)
        target = (np.arange(-self.bins, self.bins) >> shift) + self.bins
        np.add.at(counts, target, self.counts)
        return replace(self, exponent=exponent, counts=counts)

    def occupied(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return edges (n + 1,) and counts (n,) from the first to the last bin in use.

        The range always touches zero. n is at least 1.
        """
        used = np.flatnonzero(self.counts)
        first = min(int(used[0]), self.bins) if used.size else self.bins
        last = max(int(used[-1]), self.bins - 1) if used.size else self.bins
        edges = np.ldexp(np.arange(first, last + 2, dtype="float64") - self.bins, self.exponent)
        return edges, self.counts[first : last + 1]

    def find_quantile(self, fraction: float) -> float:
        """Return the quantile at `fraction` (0..1), interpolated linearly within a bin.

        It is within one bin width of the exact quantile, and never outside [low, high].

        Raises:
            DataError: the histogram is empty.
        """
        edges, counts = self.occupied()
        mass = np.concatenate([[0.0], np.cumsum(counts, dtype="float64")])
        zero = int(np.searchsorted(edges, 0.0))
        # The edge at zero is repeated: before and after the step of the exact zeros.
        points = np.concatenate([edges[: zero + 1], edges[zero:]])
        steps = np.concatenate([mass[: zero + 1], mass[zero:] + self.zeros])
        return self._interpolate(fraction, steps, points, self.low, self.high)

    def find_magnitude_quantile(self, fraction: float) -> float:
        """Return the quantile of |x|, as `find_quantile` does."""
        counts = self.counts[self.bins :] + self.counts[: self.bins][::-1]
        edges = np.ldexp(np.arange(self.bins + 1, dtype="float64"), self.exponent)
        points = np.concatenate([[0.0], edges])
        steps = np.cumsum(np.concatenate([[0, self.zeros], counts]), dtype="float64")
        return self._interpolate(fraction, steps, points, 0.0, max(self.high, -self.low))

    def _interpolate(
        self,
        fraction: float,
        steps: NDArray[np.float64],
        points: NDArray[np.float64],
        low: float,
        high: float,
    ) -> float:
        if self.total == 0:
            raise DataError("The histogram is empty: it has no quantiles.", code="RQ303")
        if fraction >= 1.0:
            return high
        return min(max(float(np.interp(fraction * self.total, steps, points)), low), high)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return arrays for an .npz file. `from_arrays` reads them back exactly."""
        return {
            "exponent": np.asarray(self.exponent, "int64"),
            "counts": self.counts,
            "zeros": np.asarray(self.zeros, "int64"),
            "range": np.asarray([self.low, self.high], "float64"),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, Any]) -> Histogram:
        """Read a histogram from the arrays of `to_arrays`.

        Raises:
            DataError: an array is missing, or has the wrong shape or values.
        """
        missing = {"exponent", "counts", "zeros", "range"} - set(arrays)
        if missing:
            raise DataError(f"A saved histogram lacks {', '.join(sorted(missing))}.", code="RQ502")
        counts = np.asarray(arrays["counts"], "int64")
        bounds = np.asarray(arrays["range"], "float64")
        if counts.ndim != 1 or bounds.shape != (2,) or counts.size % 2 or (counts < 0).any():
            raise DataError(
                f"A saved histogram has counts of shape {counts.shape} and a range of shape "
                f"{bounds.shape}; expected (2 * bins,), none negative, and (2,).",
                code="RQ502",
            )
        return replace(
            Histogram.empty(counts.size // 2),
            exponent=int(arrays["exponent"]),
            counts=counts,
            zeros=int(arrays["zeros"]),
            low=float(bounds[0]),
            high=float(bounds[1]),
        )


def find_exponent(magnitude: float, bins: int) -> int:
    """Return log2 of the narrowest bin width with +-magnitude inside `bins` bins per side."""
    if magnitude == 0:
        return SMALLEST_EXPONENT
    # magnitude = m * 2**e with m in [0.5, 1), thus magnitude < 2**e == bins * 2**(e - log2(bins)).
    return max(math.frexp(magnitude)[1] - (bins.bit_length() - 1), SMALLEST_EXPONENT)


def iterate_chunks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Iterate over flat pieces of at most CHUNK elements, in any order.

    A contiguous array is not copied.
    """
    flat = values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]
