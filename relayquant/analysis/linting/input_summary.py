"""Arrays of one input as they stream by -> statistics of bounded size -> what looks
wrong in these alone.

Each check states its threshold and the source of the threshold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.linting.normalization import PIXEL_SLACK
from relayquant.errors import format_count

#: fewer samples than this are too few; ranges of activations settle within a few hundred
FEW_SAMPLES = 16
#: largest magnitude / 99.9th percentile of the magnitudes that are not 0
OUTLIER_RATIO = 20.0
#: how much the second half of the samples may widen the range of the first half
GROWTH = 0.1
#: share of samples that may be copies of other samples
DUPLICATES = 0.1
#: A sample is odd if its magnitude differs from the median magnitude by this factor, and by this
#: multiple of the usual deviation, since some samples differ much by nature (silence and speech).
ODD_RATIO, ODD_DEVIATIONS = 10.0, 8.0
#: share of the samples that may be odd; above it, none is reported
ODD_SHARE = 0.2
#: samples whose magnitudes are kept
KEPT_SAMPLES = 1 << 13
#: torchvision subtracts the mean from pixels of 0 to 1 and divides by the deviation; red first
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: elements of an input that are kept for percentiles
KEPT_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class InputSummary:
    """Statistics of one input while the data streams by. The size is bounded.

    Attributes:
        low, high: Extremes.
        widths: (samples, high - low) after each batch that widened the range.
        magnitudes: Some of the magnitudes that are not 0.
        stride: One of every `stride` magnitudes was kept.
        lows, highs: Extremes of each channel, (C,). Empty if the channels are not known.
        sizes: Magnitude of each of the first samples: the squared mean root, which a few elements
            change little.
        batches: Number of these samples in each batch.
    """

    low: float = float("inf")
    high: float = float("-inf")
    widths: tuple[tuple[int, float], ...] = ()
    magnitudes: np.ndarray = field(default_factory=lambda: np.empty(0, "float32"))
    stride: int = 1
    lows: np.ndarray = field(default_factory=lambda: np.empty(0, "float32"))
    highs: np.ndarray = field(default_factory=lambda: np.empty(0, "float32"))
    sizes: tuple[float, ...] = ()
    batches: tuple[int, ...] = ()

    def update(self, array: np.ndarray, samples: int, axis: int | None = None) -> InputSummary:
        """Return the summary with one more batch, after which there are `samples`. Channels are
        on `axis`.
        """
        low, high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        widths = self.widths
        if (low, high) != (self.low, self.high):
            widths = (*widths[-1023:], (samples, high - low))
        flat = np.abs(array.reshape(-1)[:: self.stride])
        magnitudes, stride = np.concatenate([self.magnitudes, flat[flat > 0]]), self.stride
        while magnitudes.size > KEPT_ELEMENTS:
            magnitudes, stride = magnitudes[::2], stride * 2
        lows, highs = self.lows, self.highs
        if axis is not None:
            rest = tuple(i for i in range(array.ndim) if i != axis)
            lows, highs = array.min(rest), array.max(rest)
            if self.lows.size:
                lows, highs = np.minimum(lows, self.lows), np.maximum(highs, self.highs)
        sizes, batches = self.sizes, self.batches
        if len(sizes) < KEPT_SAMPLES and array.ndim and array.dtype.kind == "f":
            rows = array.reshape(len(array), -1).astype("float64")
            sizes = (*sizes, *np.square(np.sqrt(np.abs(rows)).mean(1)).tolist())
            batches = (*batches, len(array))
        return InputSummary(low, high, widths, magnitudes, stride, lows, highs, sizes, batches)

    def width_after(self, samples: int) -> float:
        """Return high - low of the first samples."""
        return max((width for count, width in self.widths if count <= samples), default=0.0)


def hash_samples(batch: Mapping[str, np.ndarray]) -> list[bytes]:
    """Hash each sample over all inputs with a batch axis."""
    arrays = [array for array in batch.values() if array.ndim]
    hashes = []
    for parts in zip(*arrays, strict=False):
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(np.ascontiguousarray(part))
        hashes.append(digest.digest())
    return hashes


def check_range(name: str, dtype: str, found: InputSummary, samples: int) -> list[Finding]:
    """Check for constant inputs, ranges made by a few outliers, and ranges that still grow."""
    if found.low == found.high:
        what = f"every element is {found.low:.6g} in {format_count(samples, 'sample')}."
        advice = (
            "A constant says nothing about the range of real data: check how the samples are read."
        )
        if dtype.startswith("float"):
            return [Finding(Severity.WARNING, "constant", name, what, advice)]
        advice = (
            "This is usual for a mask of full length and for a single kind of token. Otherwise "
            "check how it is read."
        )
        return [Finding(Severity.INFO, "constant", name, what, advice)]
    if not dtype.startswith("float"):
        return []
    findings = []
    largest = max(abs(found.low), abs(found.high))
    # With few elements, the percentile is the maximum itself.
    if found.magnitudes.size >= 1000:
        usual = float(np.percentile(found.magnitudes, 99.9))
        if largest > OUTLIER_RATIO * usual:
            what = f"the largest magnitude is {largest:.4g}, but 99.9 % are below {usual:.4g}."
            advice = (
                "Few outliers take most of the 8-bit range: remove them if they are faults, or "
                "calibrate with Percentile() or MSE()."
            )
            findings.append(Finding(Severity.WARNING, "outliers", name, what, advice))
    half = found.width_after(samples // 2)
    growth = (found.high - found.low) / half - 1 if half > 0 else 0.0
    if samples >= FEW_SAMPLES and growth > GROWTH:
        what = f"the second half of the {samples} samples still makes the range {growth:.0%} wider."
        findings.append(
            Finding(
                Severity.INFO, "growth", name, what, "More samples would help, or shuffled ones."
            )
        )
    return findings


def check_samples(samples: int, different: int) -> list[Finding]:
    """Check for too few samples and for many equal samples."""
    findings = []
    if samples < FEW_SAMPLES:
        what = f"the data has only {format_count(samples, 'sample')}."
        findings.append(Finding(Severity.INFO, "samples", "", what, "Use a few hundred."))
    if samples - different > DUPLICATES * samples:
        what = f"copies of others are {samples - different} of {format_count(samples, 'sample')}."
        advice = "Check that the reader advances, and that its buffer is copied."
        findings.append(Finding(Severity.WARNING, "duplicates", "", what, advice))
    return findings


def check_channels(name: str, found: InputSummary) -> list[Finding]:
    """Check for constant channels among varying ones, and pixels normalized with the constants
    of another channel order.
    """
    if found.low == found.high:
        return []
    findings = []
    fixed = np.flatnonzero(found.lows == found.highs).tolist()
    if fixed:
        is_one = len(fixed) == 1
        which = f"channel {fixed[0]}" if is_one else f"channels {', '.join(map(str, fixed[:8]))}"
        values = ", ".join(f"{value:.6g}" for value in dict.fromkeys(found.lows[fixed].tolist()))
        what = f"{which} of {found.lows.size} {'is' if is_one else 'are'} {values} everywhere."
        advice = "Calibration finds no range for it: check how channels are read and put together."
        findings.append(Finding(Severity.WARNING, "channel", name, what, advice))
    mean, std = np.array(IMAGENET_MEAN), np.array(IMAGENET_STD)
    ends = (0 - mean) / std, (1 - mean) / std
    if is_between(found, ends[0][::-1], ends[1][::-1]) and not is_between(found, *ends):
        what = (
            "its channels are normalized with ImageNet's constants in reverse order: the first "
            "channel with the constants of blue."
        )
        advice = (
            "Normalize red with mean 0.485, green with 0.456 and blue with 0.406, then reorder "
            "the channels."
        )
        findings.append(Finding(Severity.WARNING, "order", name, what, advice))
    return findings


def is_between(found: InputSummary, lows: np.ndarray, highs: np.ndarray) -> bool:
    """Whether the channels have the extremes that pixels of 0 and 255 would get."""
    if found.lows.size != len(lows):
        return False
    slack = PIXEL_SLACK * (highs - lows)
    distance = np.maximum(abs(found.lows - lows), abs(found.highs - highs))
    return bool((distance < slack).all())


def check_batches(name: str, found: InputSummary) -> list[Finding]:
    """Find a few samples that are far larger or smaller than the others, and their batches.

    The logarithm of the magnitude is compared with its median and the median deviation from it.
    """
    sizes = np.array(found.sizes)
    if len(sizes) < 5 or not np.median(sizes) > 0:
        return []
    with np.errstate(divide="ignore"):
        distances = np.abs(np.log(sizes / np.median(sizes)))
    usual = 1.4826 * np.median(distances)
    odd = distances > max(np.log(ODD_RATIO), ODD_DEVIATIONS * usual)
    if not odd.any() or odd.mean() > ODD_SHARE:
        return []
    numbers = np.repeat(np.arange(len(found.batches)), found.batches)
    batches = np.unique(numbers[odd])
    shown = ", ".join(map(str, batches[:8])) + (", ..." if len(batches) > 8 else "")
    worst = int(np.argmax(np.where(odd, distances, 0)))
    what = (
        f"{format_count(int(odd.sum()), 'sample')} of {len(sizes)}, in batch {shown}, "
        f"{'is' if odd.sum() == 1 else 'are'} of another magnitude: sample {worst} has "
        f"{sizes[worst]:.3g}, the median is {np.median(sizes):.3g}."
    )
    advice = "Check it: a wrong file, a missing preprocessing step or an empty sample."
    return [Finding(Severity.WARNING, "batch", name, what, advice)]
