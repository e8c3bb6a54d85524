"""Metadata of rotary positions -> frequencies.

The formulas are those of `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.causal_lm.config import Rotary
from relayquant.formats.readers.causal_lm.fields import Fields

#: Most elements of a head that are believed of a file.
MOST_TURNED = 1 << 16
#: (frequencies, metadata of the scaling, length of the cache) -> frequencies, magnitude
Scaling = Callable[[np.ndarray, Fields, int], tuple[np.ndarray, float]]


def make_rotary(
    base: float, size: int, scaling: Fields, length: int, factors: Sequence[float] | None = None
) -> Rotary:
    """Make the frequencies base ** (-2 i / size), scaled as the metadata says.

    Args:
        size: Number of elements of a head that are turned.
        scaling: "rope_type" (a key of `SCALINGS`) and its numbers.
        length: Longest sequence.
        factors: Divisors of the frequencies, stored in a file.

    Raises:
        ModelError: the kind of scaling is unknown, or its numbers are wrong.
    """
    if not 2 <= size <= MOST_TURNED or size % 2:
        raise ModelError(
            f"The model turns {format_count(size, 'element')} of a head; allowed: even numbers "
            f"from 2 to {MOST_TURNED}.",
            code="RQ204",
        )
    if base <= 0:
        raise ModelError(f"The base of rotary positions is {base}; allowed: above 0.", code="RQ204")
    kind = scaling.text("rope_type", "type", default="default")
    if kind not in SCALINGS:
        raise ModelError(
            f"The model scales rotary positions by {kind!r}; supported: {', '.join(SCALINGS)}.",
            code="RQ202",
        )
    frequencies = base ** (-np.arange(0, size, 2) / size)
    frequencies, magnitude = SCALINGS[kind](frequencies, scaling, length)
    if factors is not None:
        frequencies = divide_by(frequencies, factors)
    if not np.isfinite(frequencies).all() or not math.isfinite(magnitude):
        raise ModelError("Frequencies of rotary positions are not finite.", code="RQ204")
    return Rotary(tuple(frequencies.tolist()), magnitude)


def divide_by(frequencies: np.ndarray, factors: Sequence[float]) -> np.ndarray:
    """Divide each frequency by its factor.

    Raises:
        ModelError: there are more or fewer factors, or one is not above 0.
    """
    array = np.asarray(factors, "float64")
    if array.shape != frequencies.shape or not (array > 0).all():
        raise ModelError(
            f"The model has {format_count(array.size, 'factor')} of rotary positions; needed: "
            f"{frequencies.size}, above 0.",
            code="RQ204",
        )
    return frequencies / array


def positive(scaling: Fields, name: str, default: float | None = None) -> float:
    """Return a number above 0 of a scaling's metadata."""
    value = scaling.number(name, default=default)
    if value <= 0:
        raise scaling.refuse((name,), value, "a number above 0")
    return value


def scale_linearly(
    frequencies: np.ndarray, scaling: Fields, length: int
) -> tuple[np.ndarray, float]:
    """Divide all frequencies by a factor."""
    return frequencies / positive(scaling, "factor"), 1.0


def scale_as_llama3(
    frequencies: np.ndarray, scaling: Fields, length: int
) -> tuple[np.ndarray, float]:
    """Divide low frequencies by a factor, keep high ones, and interpolate between them."""
    factor = positive(scaling, "factor")
    low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
    turns = positive(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    if high <= low:
        raise scaling.refuse(("high_freq_factor",), high, f"a number above {low}")
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * frequencies / factor + share * frequencies, 1.0


def scale_as_yarn(
    frequencies: np.ndarray, scaling: Fields, length: int
) -> tuple[np.ndarray, float]:
    """YaRN: as llama3, with a ramp over the index of the frequency. arXiv 2309.00071."""
    size = 2 * len(frequencies)
    factor, base = positive(scaling, "factor"), frequencies[-1] ** (-size / max(size - 2, 1))
    known = positive(scaling, "original_max_position_embeddings")

    def find_index(turns: float) -> float:
        return size * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = find_index(positive(scaling, "beta_fast", 32.0))
    high = find_index(positive(scaling, "beta_slow", 1.0))
    if scaling.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)

    def find_magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = [scaling.number(name, default=0.0) for name in ("mscale", "mscale_all_dim")]
    magnitude = find_magnitude(1.0)
    if all(weights):
        magnitude = find_magnitude(weights[0]) / find_magnitude(weights[1])
    magnitude = scaling.number("attention_factor", default=magnitude)
    return frequencies / factor * ramp + frequencies * (1 - ramp), magnitude


def scale_by_length(
    frequencies: np.ndarray, scaling: Fields, length: int
) -> tuple[np.ndarray, float]:
    """LongRoPE: factors for lengths up to the original one, and others beyond. The length of the
    cache decides. arXiv 2402.13753.
    """
    known = positive(scaling, "original_max_position_embeddings")
    name = "short_factor" if length <= known else "long_factor"
    values = scaling.items(len(frequencies), name)
    if values is None or not all(isinstance(value, int | float) for value in values):
        raise scaling.refuse((name,), values, f"{format_count(len(frequencies), 'number')}")
    factor = positive(scaling, "factor", positive(scaling, "max_position_embeddings") / known)
    magnitude = (
        1.0 if factor <= 1 or known <= 1 else math.sqrt(1 + math.log(factor) / math.log(known))
    )
    return divide_by(frequencies, values), scaling.number("attention_factor", default=magnitude)


def scale_by_share(
    frequencies: np.ndarray, scaling: Fields, length: int
) -> tuple[np.ndarray, float]:
    """Keep the first ones, a share of all, and turn the others by nothing."""
    share = scaling.number("partial_rotary_factor", default=1.0)
    kept = np.arange(len(frequencies)) < int(share * 2 * len(frequencies) // 2)
    return np.where(kept, frequencies / positive(scaling, "factor", 1.0), 0.0), 1.0


#: Name in config.json -> how frequencies are scaled.
SCALINGS: dict[str, Scaling] = {
    "default": lambda frequencies, _scaling, _length: (frequencies, 1.0),
    "linear": scale_linearly,
    "llama3": scale_as_llama3,
    "yarn": scale_as_yarn,
    "longrope": scale_by_length,
    "proportional": scale_by_share,
}
