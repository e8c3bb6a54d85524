"""lint: float module + data set -> problems of the calibration data, found before it is used.

Every check is a heuristic. Each states its threshold and the source of the threshold. The
thresholds were measured on models with their authors' preprocessing, and on the same data broken on
purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.analysis.finding import Finding, Severity
from relayquant.analysis.label_scores import check_labels
from relayquant.analysis.normalization import PIXEL_SLACK, PixelForm, find_form, list_forms
from relayquant.base.arguments import check_arguments
from relayquant.data import Dataset, count_samples, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import DataError, format_count
from relayquant.ir.reference import run as run_reference
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.state import get_state
from relayquant.stages.calibration.subgraphs import build_function, collect_ancestors
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.norms import NormStatistics, read_norm_statistics
from relayquant.stages.streams import follow_state

#: fewer samples than this are too few; ranges of activations settle within a few hundred
FEW_SAMPLES = 16
#: largest magnitude / 99.9th percentile of the magnitudes that are not 0
OUTLIER_RATIO = 20.0
#: how much the second half of the samples may widen the range of the first half
GROWTH = 0.1
#: share of samples that may be copies of other samples
DUPLICATES = 0.1
#: Bias / spread of the first layer (see `check_scale`). Eight models on their own data: 0.10 to
#: 5.8, except MNIST on 0..255 without input scaling: 0.0007. On data 255 times too small: 26 to
#: 1500. On data 255 times too large: 0.0006 to 0.04.
BIAS_TOO_LARGE, BIAS_TOO_SMALL = 20.0, 0.05
#: Above this spread, the first layer's results are far from unit scale. On fitting data the spread
#: was 0.25 to 1.1.
LARGE_SPREAD = 5.0
#: Roughness of an image read in the other layout / roughness as given (see `check_layout`).
#: Photographs: 1.8 to 2.2. Scrambled ones: 0.2 to 0.54.
ROUGHNESS_RATIO = 0.7
#: Spread of the first layer's results / spread in training, which its batch norm stores. On fitting
#: data of four networks: 0.43 to 1.01. On data that is too small (pixels of 0 to 1 instead of
#: normalized ones): 0.21 and less. On pixels of 0 to 255: 46 and more.
LEAST_SPREAD, MOST_SPREAD = 0.25, 4.0
#: Error of the first layer's means, in standard deviations of the training data: as given minus
#: with reversed channels. Differences on photographs: -0.093 to -0.056 in the right order, 0.056 to
#: 0.093 in the wrong order, with standard errors of 0.01 to 0.04.
ORDER_DIFFERENCE, ORDER_ERRORS = 0.03, 2.0
#: Another preprocessing is reported (see `check_normalization`) if its misfit is at most this share
#: of the misfit of the data as given, and lower by at least this difference.
FORM_RATIO, FORM_DIFFERENCE = 0.6, 0.3
#: approximate number of samples on which other preprocessings are tried
FORM_SAMPLES = 24
#: minimum number of samples to check the order of channels
ORDER_SAMPLES = 16
#: samples that the first layer is computed on
PROBE_SAMPLES = 64
#: A sample is odd if its magnitude differs from the median magnitude by this factor, and by this
#: multiple of the usual deviation, since some samples differ much by nature (silence and speech).
ODD_RATIO, ODD_DEVIATIONS = 10.0, 8.0
#: share of the samples that may be odd; above it, none is reported
ODD_SHARE = 0.2
#: samples whose magnitudes are kept
KEPT_SAMPLES = 1 << 13
#: torchvision subtracts the mean and divides by the deviation. Caffe only subtracts. In channel
#: order.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CAFFE_MEAN = (103.939, 116.779, 123.68)
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


@dataclass(frozen=True)
class FirstLayer:
    """A convolution or matmul with a constant bias that reads an input directly.

    Attributes:
        name: Name of the value that it computes.
        bias: (C,).
        axis: Channel axis of its result.
        layout: Data layout of a 2-D convolution, else "".
        mod: Function main from the input to the result before the bias.
        result: Name of the value with the bias.
        channel: Axis of the input's channels. None for a matrix product.
    """

    name: str
    bias: np.ndarray
    axis: int
    layout: str
    mod: tvm.IRModule
    result: str
    channel: int | None = None


@check_arguments
def lint(
    mod: Model,
    params: Mapping[str, Any] | None,
    dataset: Any,
    labels: Any = None,
) -> list[Finding]:
    """Check calibration data. Return what looks wrong; an empty list if nothing does.

    Wrong data is not an error here. Data that `quantize` would refuse (NaN, wrong shapes, no
    samples) is a finding of severity ERROR, and the data before it is still checked.

    Args:
        mod, params, dataset: As for `quantize`.
        labels: The class of each sample, (samples,) integers. With labels, the float model also
            runs, on the pictures as given and with other known preprocessing, and the first
            output's arg max is compared.

    Raises:
        ModelError: the model cannot be read.
        DataError: labels are not integers, their number differs from the number of samples, or the
            first output holds no scores.
    """
    mod, params = split_model(mod, params)
    prepared, norms = prepare_module(mod, params), read_norm_statistics(mod, params)
    layers = find_first_layers(prepared)
    findings, statistics, probe, seen, samples = [], {}, {}, set(), 0
    try:
        dataset = follow_state(prepared, dataset)
        for batch in read_batches(open_dataset(dataset, describe_inputs(prepared))):
            if samples < PROBE_SAMPLES:
                for name, array in batch.items():
                    probe.setdefault(name, []).append(array)
            samples += count_samples(batch)
            for name, array in batch.items():
                before, layer = statistics.get(name, InputSummary()), layers.get(name)
                statistics[name] = before.update(array, samples, layer and layer.channel)
            seen.update(hash_samples(batch))
    except DataError as error:
        findings.append(
            Finding(Severity.ERROR, "data", "", str(error), "Nothing after it was read.")
        )
    states = {value.name for value in get_state(prepared)}
    for info in describe_inputs(prepared):
        if info.name in statistics:
            findings += check_range(info.name, info.dtype, statistics[info.name], samples)
            findings += check_channels(info.name, statistics[info.name])
            if info.name not in states:  # a state is zeros where a sequence begins
                findings += check_batches(info.name, statistics[info.name])
    for name, layer in layers.items():
        if name in probe:
            findings += check_layer(
                name, layer, statistics[name], probe[name], norms.get(layer.result)
            )
    if samples:
        findings += check_samples(samples, len(seen))
    if labels is not None and not any(f.severity is Severity.ERROR for f in findings):
        findings = add_scores(findings, check_labels(prepared, dataset, labels))
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def find_unchecked(mod: tvm.IRModule, params: Mapping[str, Any] | None) -> list[str]:
    """Find picture inputs whose normalization cannot be checked without labels.

    No batch norm follows their first layer, or it was folded before the export.

    Raises:
        ModelError: the model cannot be read.
    """
    prepared, norms = prepare_module(mod, params), read_norm_statistics(mod, params)
    layers = find_first_layers(prepared)
    found = []
    for info in describe_inputs(prepared):
        is_picture = len(info.shape) == 4 and {info.shape[1], info.shape[3]} & {1, 3}
        layer = layers.get(info.name)
        if is_picture and (layer is None or layer.result not in norms):
            found.append(info.name)
    return found


def add_scores(findings: list[Finding], scored: list[Finding]) -> list[Finding]:
    """Add findings from labels. They replace findings on the same fact that are only likely
    without labels.
    """
    known = {finding.check for finding in scored}
    return [finding for finding in findings if finding.check not in known] + scored


def lint_samples(
    prepared: tvm.IRModule, batches: Sequence[Mapping[str, np.ndarray]]
) -> list[Finding]:
    """Check a few samples of float inputs: constant or equal samples, far outliers, a scale or
    layout different from the training data.

    A small part of `lint` for samples that are at hand. It costs the first layer, in numpy.

    Args:
        prepared: A prepared module.
        batches: Inputs by name, without NaN.
    """
    layers = find_first_layers(prepared)
    statistics: dict[str, InputSummary] = {}
    seen: set[bytes] = set()
    samples = 0
    for batch in batches:
        hashes = hash_samples(batch)
        samples, seen = samples + len(hashes), seen | set(hashes)
        for name, array in batch.items():
            if array.dtype.kind == "f" and array.size:
                before, layer = statistics.get(name, InputSummary()), layers.get(name)
                array = array.astype("float32")
                statistics[name] = before.update(array, samples, layer and layer.channel)
    findings = []
    for name, found in statistics.items():
        findings += check_range(name, "float32", found, samples)
        findings += check_channels(name, found)
        arrays = [batch[name].astype("float32") for batch in batches]
        if found.low < found.high and name in layers:
            findings += check_layer(name, layers[name], found, arrays)
    if samples > 1 and len(seen) == 1:
        findings += check_samples(samples, 1)
    return [finding for finding in findings if finding.severity is not Severity.INFO]


@check_arguments
def measure_growth(
    mod: Model, params: Mapping[str, Any] | None, dataset: Any
) -> dict[str, list[tuple[int, float]]]:
    """Return how the range of each input grows: (samples, share of the final range) at each growth.

    If the curve is flat from some number of samples on, more samples do not help.

    Raises:
        ModelError: the model cannot be read.
        DataError: the data does not fit it.
    """
    statistics: dict[str, InputSummary] = {}
    samples = 0
    prepared = prepare_module(*split_model(mod, params))
    for batch in open_dataset(follow_state(prepared, dataset), describe_inputs(prepared)):
        samples += count_samples(batch)
        for name, array in batch.items():
            statistics[name] = statistics.get(name, InputSummary()).update(array, samples)
    return {
        name: [(count, width / max(found.high - found.low, 1e-30)) for count, width in found.widths]
        for name, found in statistics.items()
    }


def read_batches(data: Dataset) -> Iterator[dict[str, np.ndarray]]:
    """Read the batches, floats in at least single precision."""
    for batch in data:
        yield {n: a.astype("float32") if a.dtype == "float16" else a for n, a in batch.items()}


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


def check_layer(
    name: str,
    layer: FirstLayer,
    found: InputSummary,
    batches: list[np.ndarray],
    norm: NormStatistics | None = None,
) -> list[Finding]:
    """Check an input with its first layer: scale, layout, order of channels."""
    findings = check_layout(name, layer.layout, batches)
    if norm is None or norm.mean.size != layer.bias.size or findings:
        return [*check_scale(name, layer, batches, is_caffe=is_caffe_like(found)), *findings]
    moments = measure_moments(name, layer, batches)
    wrong = check_spread(name, layer, found, moments, norm)
    if wrong and (better := find_better_form(name, layer, found, batches, norm)):
        fits = f"Prepared as {better[1].text!r}, they would fit."
        wrong = [replace(finding, advice=f"{finding.advice} {fits}") for finding in wrong]
    wrong = wrong or check_normalization(name, layer, found, batches, norm)
    return wrong or check_order(name, layer, found, batches, moments, norm)


def is_caffe_like(found: InputSummary) -> bool:
    """Whether channels are pixels of 0 to 255 minus the mean of each channel, in either order."""
    for mean in (np.array(CAFFE_MEAN), np.array(CAFFE_MEAN[::-1])):
        if is_between(found, -mean, 255 - mean):
            return True
    return False


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and mean square of the first layer's results for each sample and channel, (n, C)."""

    means: np.ndarray
    squares: np.ndarray

    def take(self, rows: np.ndarray) -> Moments:
        """Return the moments of some samples."""
        return Moments(self.means[rows], self.squares[rows])

    def spread(self) -> np.ndarray:
        """Return the standard deviation of each channel over all samples."""
        with np.errstate(all="ignore"):
            variance = self.squares.mean(0) - np.square(self.means.mean(0))
        # Infinite if the layer overflowed.
        return np.sqrt(np.where(np.isfinite(variance), np.maximum(variance, 0), np.inf))


def measure_moments(name: str, layer: FirstLayer, batches: list[np.ndarray]) -> Moments:
    """Measure the moments of `PROBE_SAMPLES` samples, with the bias."""
    means, squares, (param,) = [], [], layer.mod["main"].params
    shape = tensor_shape(param) or (0,)
    is_single = len(shape) == 1  # one sample, without a batch axis
    is_cut = not is_single and not isinstance(shape[0], int)
    count = 0
    for array in batches:
        array = array[: PROBE_SAMPLES - count] if is_cut else array
        (result,) = run_reference(layer.mod, {name: array})
        rows = np.moveaxis(result, layer.axis, -1).astype("float64")
        size = 1 if is_single else len(array)
        rows = rows.reshape(size, -1, layer.bias.size) + layer.bias
        with np.errstate(all="ignore"):
            means.append(rows.mean(1))
            squares.append(np.square(rows).mean(1))
        count += size
        if count >= PROBE_SAMPLES:
            break
    return Moments(np.concatenate(means), np.concatenate(squares))


def check_spread(
    name: str, layer: FirstLayer, found: InputSummary, moments: Moments, norm: NormStatistics
) -> list[Finding]:
    """Check whether the first layer's results vary as in training, which its batch norm stores."""
    with np.errstate(all="ignore"):
        ratio = float(np.median(moments.spread() / np.maximum(norm.deviation, 1e-12)))
    if LEAST_SPREAD <= ratio <= MOST_SPREAD:
        return []
    many, word = ("times", "large") if ratio > 1 else ("of what", "small")
    compared = f"{ratio:.3g} {many}" + (" what" if ratio > 1 else "")
    what = (
        f"values from {found.low:.4g} to {found.high:.4g} make the first layer ({layer.name!r}) "
        f"vary {compared} its batch norm saw in training: they look too {word}."
    )
    advice = "Preprocess as in training (division by 255, mean and standard deviation)."
    return [Finding(Severity.WARNING, "scale", name, what, advice)]


def check_normalization(
    name: str,
    layer: FirstLayer,
    found: InputSummary,
    batches: list[np.ndarray],
    norm: NormStatistics,
) -> list[Finding]:
    """Check whether another known preprocessing of pictures is nearer to the training data.

    `measure_misfit` compares the first layer's results with its batch norm. Measured on three
    networks:

    | pictures | misfit |
    |---|---|
    | prepared as in training | 0.05 to 0.27 |
    | prepared in a way that hardly differs | 0.07 more |
    | prepared in a way that differs | 0.7 and more |

    A bootstrap over samples shows whether the difference is significant.
    """
    better = find_better_form(name, layer, found, batches, norm)
    if better is None:
        return []
    given, form, misfit, least = better
    seen = f"look prepared as {given.text!r}" if given.text else "have no known form"
    what = (
        f"pictures prepared as {form.text!r} are nearer to the training data: compared with its "
        f"batch norm, results of the first layer ({layer.name!r}) are off by {least:.2f} instead "
        f"of {misfit:.2f} standard deviations in mean and spread. The pictures given here {seen}."
    )
    advice = (
        f"Preprocess as in training; --preprocess {form.text} does this. Pass labels to see the "
        "accuracy of each preprocessing."
    )
    return [Finding(Severity.WARNING, "normalization", name, what, advice)]


def find_better_form(
    name: str,
    layer: FirstLayer,
    found: InputSummary,
    batches: list[np.ndarray],
    norm: NormStatistics,
) -> tuple[PixelForm, PixelForm, float, float] | None:
    """Return (preprocessing that the pictures seem to have, better preprocessing, misfit of each).

    None if no other preprocessing is clearly better. See `check_normalization`.
    """
    if layer.channel is None or (found.lows >= found.highs).any():
        return None
    forms = list_forms(found.lows.size)
    given = find_form(found.lows, found.highs, forms)
    batches = take_first(batches, FORM_SAMPLES)
    as_is = measure_moments(name, layer, batches)
    if len(as_is.means) < ORDER_SAMPLES:
        return None
    misfit = measure_misfit(as_is, norm)
    best, least, nearest = given, misfit, as_is
    for form in forms:
        if form.is_same(given):
            continue
        converted = [given.convert(x, layer.channel, form) for x in batches]
        moments = measure_moments(name, layer, converted)
        if (other := measure_misfit(moments, norm)) < least:
            best, least, nearest = form, other, moments
    if best is given or least > FORM_RATIO * misfit:
        return None
    rng, count = np.random.default_rng(0), len(as_is.means)
    drawn = [rng.integers(count, size=count) for _ in range(64)]
    differences = [
        measure_misfit(as_is.take(i), norm) - measure_misfit(nearest.take(i), norm) for i in drawn
    ]
    if misfit - least < max(FORM_DIFFERENCE, ORDER_ERRORS * float(np.std(differences))):
        return None
    return given, best, misfit, least


def take_first(batches: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
    """Return the first batches with at least `samples` samples."""
    found: list[np.ndarray] = []
    for array in batches:
        if sum(map(len, found)) >= samples:
            break
        found.append(array)
    return found


def measure_misfit(moments: Moments, norm: NormStatistics) -> float:
    """Return the distance of results from the statistics in a batch norm.

    It is the mean error of the channel means, in standard deviations, plus the median error of the
    standard deviations, as a logarithm.
    """
    used = norm.deviation > 0.05 * np.median(norm.deviation)
    shifts = np.abs(moments.means.mean(0) - norm.mean) / np.maximum(norm.deviation, 1e-12)
    ratios = np.maximum(moments.spread(), 1e-12) / np.maximum(norm.deviation, 1e-12)
    return float(shifts[used].mean() + np.median(np.abs(np.log(ratios[used]))))


def check_order(
    name: str,
    layer: FirstLayer,
    found: InputSummary,
    batches: list[np.ndarray],
    moments: Moments,
    norm: NormStatistics,
) -> list[Finding]:
    """Check whether pictures with red and blue exchanged are nearer to the training data.

    The means of the first layer's results are compared with its batch norm. A bootstrap over
    samples shows whether the difference is significant.
    """
    channel = layer.channel
    if channel is None or found.lows.size != 3 or len(moments.means) < ORDER_SAMPLES:
        return []
    if (found.lows >= found.highs).any():
        return []
    shape = [1] * batches[0].ndim
    shape[channel] = 3
    low = found.lows.reshape(shape)
    width = found.highs.reshape(shape) - low
    # Scaled to pixels of 0 to 1, because each channel has different constants.
    swapped = [(low + np.flip((x - low) / width, channel) * width).astype(x.dtype) for x in batches]
    other = measure_moments(name, layer, swapped)
    used = norm.deviation > 0.05 * np.median(norm.deviation)

    def measure_shift(means: np.ndarray) -> float:
        return float((np.abs(means.mean(0) - norm.mean) / norm.deviation)[used].mean())

    difference = measure_shift(moments.means) - measure_shift(other.means)
    rng, count = np.random.default_rng(0), len(moments.means)
    drawn = [rng.integers(count, size=count) for _ in range(64)]
    errors = np.std(
        [measure_shift(moments.means[i]) - measure_shift(other.means[i]) for i in drawn]
    )
    if difference < max(ORDER_DIFFERENCE, ORDER_ERRORS * float(errors)):
        return []
    what = (
        "with red and blue exchanged, its pictures are nearer to the training data: the first "
        f"layer ({layer.name!r}) is off by {measure_shift(other.means):.2f} standard deviations "
        f"instead of {measure_shift(moments.means):.2f}."
    )
    advice = "Reverse the channels of each picture before it is normalized (order=bgr or rgb)."
    return [Finding(Severity.WARNING, "order", name, what, advice)]


def check_scale(
    name: str, layer: FirstLayer, batches: list[np.ndarray], *, is_caffe: bool = False
) -> list[Finding]:
    """Check the magnitude of values against the training data: 0..255 or 0..1.

    A layer's bias (with a batch norm: beta - gamma mean / std) is of the order of the spread of w x
    over the training data, per channel. Values too large by a factor make |bias| / spread small by
    that factor. The median over the channels is compared. This needs a bias and detects factors of
    about 20 and more. Pixels minus a mean, as Caffe has them, are no warning: networks for such
    pixels have such a first layer.
    """
    spread = measure_moments(name, layer, batches).spread()
    ratio = float(np.median(np.abs(layer.bias) / np.maximum(spread, 1e-12)))
    low, high = (min(a.min() for a in batches), max(a.max() for a in batches))
    where = f"values from {low:.4g} to {high:.4g} make the first layer ({layer.name!r})"
    advice = "Preprocess as in training (division by 255, mean and standard deviation)."
    if ratio > BIAS_TOO_LARGE:
        what = f"{where} vary {ratio:.3g} times less than its bias: they look too small."
        return [Finding(Severity.WARNING, "scale", name, what, advice)]
    if ratio < BIAS_TOO_SMALL and np.median(spread) > LARGE_SPREAD:
        what = (
            f"{where} vary by {np.median(spread):.3g}, {1 / max(ratio, 1e-12):.3g} times its "
            "bias: they look too large."
        )
        if is_caffe:
            what = "values are pixels minus the mean of each channel, without division."
            advice = (
                "This is right only for networks of Caffe (blue first) and TF-Slim (red first)."
            )
            return [Finding(Severity.INFO, "scale", name, what, advice)]
        advice += " Ignore this if the model was trained on such values."
        return [Finding(Severity.WARNING, "scale", name, what, advice)]
    return []


def check_layout(name: str, layout: str, batches: list[np.ndarray]) -> list[Finding]:
    """Check whether images were reshaped from one layout to the other instead of transposed.

    The shape fits then, but neighbours are no longer neighbours: the image is smoother when read in
    the other layout. Only for 2 to 4 channels and images of at least 8 x 8.
    """
    if layout not in ("NCHW", "NHWC"):
        return []
    as_is, other = [], []
    for array in batches:
        image = array if layout == "NCHW" else array.transpose(0, 3, 1, 2)
        n, c, h, w = image.shape
        if not 2 <= c <= 4 or min(h, w) < 8:
            return []
        reshaped = (
            array.reshape(n, h, w, c).transpose(0, 3, 1, 2)
            if layout == "NCHW"
            else array.reshape(n, c, h, w)
        )
        as_is.append(measure_roughness(image))
        other.append(measure_roughness(reshaped))
    if np.mean(other) >= ROUGHNESS_RATIO * np.mean(as_is):
        return []
    wrong = "NHWC" if layout == "NCHW" else "NCHW"
    axes = "0, 3, 1, 2" if layout == "NCHW" else "0, 2, 3, 1"
    what = f"its images look like {wrong} data in the {layout} shape that the model takes."
    advice = f"Use x.transpose({axes}) instead of reshape."
    return [Finding(Severity.WARNING, "layout", name, what, advice)]


def measure_roughness(images: np.ndarray) -> float:
    """Return the mean difference of neighbours / standard deviation of images (N, C, H, W)."""
    x = images.astype("float64")
    steps = np.abs(np.diff(x, axis=-1)).mean() + np.abs(np.diff(x, axis=-2)).mean()
    return float(steps / max(x.std(), 1e-30))


def find_first_layers(mod: tvm.IRModule) -> dict[str, FirstLayer]:
    """Map each input of a prepared module to its first layer. Inputs without one are left out."""
    graph = Graph(mod)
    found = {}
    for param in graph.func.params:
        for var in graph.users[param]:
            layer = read_first_layer(graph, param, var)
            if layer is not None:
                found[param.name] = layer
                break
    return found


def read_first_layer(graph: Graph, param: relax.Var, var: relax.Var) -> FirstLayer | None:
    """Return the layer that computes `var`, if it is a layer with a bias."""
    call, op = graph.call_of(var), graph.op_name(var)
    is_layer = op in ("relax.nn.conv1d", "relax.nn.conv2d", "relax.matmul")
    if (
        not is_layer
        or call is None
        or call.args[0] != param
        or constant_value(call.args[1]) is None
    ):
        return None
    if tensor_dtype(param) != "float32" or len(graph.users[var]) != 1:
        return None
    add = graph.call_of(graph.users[var][0])
    if add is None or graph.op_name(graph.users[var][0]) != "relax.add":
        return None
    biases = [value for arg in add.args if (value := constant_value(arg)) is not None]
    axis, layout, channel = -1, "", None
    if op != "relax.matmul":
        channel = str(call.attrs.data_layout).index("C")
        axis = str(call.attrs.out_layout or call.attrs.data_layout).index("C")
        layout = str(call.attrs.data_layout) if op == "relax.nn.conv2d" else ""
    needed = collect_ancestors(graph, [var], set())
    function, symbols = build_function(graph, needed, [param], [var])
    if len(biases) != 1 or symbols:
        return None
    sizes = var.ty.shape.values
    if biases[0].size != int(sizes[axis]):
        return None
    sub = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    bias = biases[0].reshape(-1).astype("float64")
    result = graph.users[var][0].name
    return FirstLayer(var.name, bias, axis, layout, sub, result, channel)
