"""lint: float module + data set -> what looks wrong with the calibration data, before it is used.

Every check is a heuristic that says what it saw; each states its threshold, and where the threshold
is from. They are measured on models with data preprocessed as their authors say, and on the same
data broken on purpose.
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
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.stages.calibration.subgraphs import build_function, collect_ancestors
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.norms import NormStatistics, read_norm_statistics

#: fewer samples than this are few; ranges of activations settle within some hundred
FEW_SAMPLES = 16
#: the largest magnitude, over the 99.9th percentile of those that are not 0
OUTLIER_RATIO = 20.0
#: how much the second half of the samples may widen the range of the first
GROWTH = 0.1
#: share of samples that may be copies of others
DUPLICATES = 0.1
#: Bias over spread of the first layer (see `check_scale`). Eight models on their own data: 0.0007
#: (MNIST on 0..255, without input scaling), else 0.10 to 5.8; on data 255 times too small 26 to
#: 1500, too large 0.0006 to 0.04.
BIAS_TOO_LARGE, BIAS_TOO_SMALL = 20.0, 0.05
#: spread of the first layer's results above which they are far from unit scale; on fitting data it
#: was 0.25 to 1.1
LARGE_SPREAD = 5.0
#: Roughness of an image read in the other layout over that as it is (see `check_layout`):
#: photographs 1.8 to 2.2, scrambled ones 0.2 to 0.54.
ROUGHNESS_RATIO = 0.7
#: Spread of a first layer's results over that of the training data, where a batch norm behind it
#: remembers that: 0.43 to 1.01 on fitting data of four networks, 0.21 and less on data that is too
#: small (pixels of 0 to 1 for normalized ones), 46 and more on pixels of 0 to 255.
LEAST_SPREAD, MOST_SPREAD = 0.25, 4.0
#: What a mean of the first layer is off by, in standard deviations of the training data, as it is
#: over the same with channels in reverse: the differences on photographs were -0.093 to -0.056 in
#: the right order and 0.056 to 0.093 in the wrong one, with standard errors of 0.01 to 0.04.
ORDER_DIFFERENCE, ORDER_ERRORS = 0.03, 2.0
#: The best of other ways to prepare pictures (see `check_normalization`): its misfit over that of
#: the data as it is, at most, and how much less it is, at least.
FORM_RATIO, FORM_DIFFERENCE = 0.6, 0.3
#: samples that other ways are tried on, about
FORM_SAMPLES = 24
#: samples that tell the order of channels, at least
ORDER_SAMPLES = 16
#: samples that the first layer is computed on
PROBE_SAMPLES = 64
#: Magnitude of a sample over that of the median one, or the inverse; and how many times the usual
#: deviation from it, where samples differ much by nature (silence and speech).
ODD_RATIO, ODD_DEVIATIONS = 10.0, 8.0
#: share of the samples that may be odd: of more, none is
ODD_SHARE = 0.2
#: samples whose magnitudes are kept
KEPT_SAMPLES = 1 << 13
#: What torchvision subtracts and divides by, and Caffe subtracts, in the order of the channels.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CAFFE_MEAN = (103.939, 116.779, 123.68)
#: elements of an input that are kept for percentiles
KEPT_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class InputSummary:
    """What is kept of one input while the data streams by; its size is bounded.

    Attributes:
        low, high: Extremes.
        widths: (samples, high - low) after each batch that made the range wider.
        magnitudes: Some of the magnitudes that are not 0.
        stride: One of so many magnitudes was kept.
        lows, highs: Extremes of each channel, (C,); empty where channels are not known.
        sizes: Magnitude of each of the first samples: the square of the mean root, which a few
            elements change little.
        batches: How many of them the batches hold.
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
        """With one more batch, after which there are `samples`; channels are on `axis`."""
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
        """high - low of the first samples."""
        return max((width for count, width in self.widths if count <= samples), default=0.0)


@dataclass(frozen=True)
class FirstLayer:
    """A convolution or matmul with a constant bias that reads an input directly.

    Attributes:
        name: Value it computes.
        bias: (C,).
        axis: Channel axis of its result.
        layout: Data layout of a 2-D convolution, else "".
        mod: Function main from the input to the result before the bias.
        result: Value with the bias.
        channel: Axis of the input's channels; None of a matrix product.
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
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    labels: Any = None,
) -> list[Finding]:
    """What looks wrong with calibration data; an empty list if nothing does.

    Wrong data is what it looks for, so it is no error: data that `quantize` would refuse (NaN,
    wrong shapes, no samples) is a finding of severity ERROR, and what came before it is still
    looked at.

    Args:
        mod, params, dataset: As for `quantize`.
        labels: The class of each sample, (samples,) integers: then the float model is run, too,
            also on pictures prepared in other known ways, and the first output's arg max compared.

    Raises:
        ModelError: the model cannot be read.
        DataError: labels are no integers, or not as many as samples, or the first output holds no
            scores.
    """
    prepared, norms = prepare_module(mod, params), read_norm_statistics(mod, params)
    layers = find_first_layers(prepared)
    findings, statistics, probe, seen, samples = [], {}, {}, set(), 0
    try:
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
    for info in describe_inputs(prepared):
        if info.name in statistics:
            findings += check_range(info.name, info.dtype, statistics[info.name], samples)
            findings += check_channels(info.name, statistics[info.name])
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
    """Inputs that take pictures, of which nothing but labels tells whether they are normalized as
    in training: no batch norm follows the first layer, or it was folded before the export.

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
    """Findings with what labels say: in place of the same that is only likely without them."""
    known = {finding.check for finding in scored}
    return [finding for finding in findings if finding.check not in known] + scored


def lint_samples(
    prepared: tvm.IRModule, batches: Sequence[Mapping[str, np.ndarray]]
) -> list[Finding]:
    """What looks wrong with a few samples of float inputs: all of them constant or the same, far
    outliers, another scale than that of the training data, another layout.

    A small part of `lint`, for samples that are at hand; costs the first layer, in numpy.

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
    mod: tvm.IRModule, params: Mapping[str, Any] | None, dataset: Any
) -> dict[str, list[tuple[int, float]]]:
    """How the range of each input grows: (samples, share of the final range) where it grew.

    A curve that is flat from some number of samples on says that more of them do not help.

    Raises:
        ModelError: the model cannot be read.
        DataError: the data does not fit it.
    """
    statistics: dict[str, InputSummary] = {}
    samples = 0
    for batch in open_dataset(dataset, describe_inputs(prepare_module(mod, params))):
        samples += count_samples(batch)
        for name, array in batch.items():
            statistics[name] = statistics.get(name, InputSummary()).update(array, samples)
    return {
        name: [(count, width / max(found.high - found.low, 1e-30)) for count, width in found.widths]
        for name, found in statistics.items()
    }


def read_batches(data: Dataset) -> Iterator[dict[str, np.ndarray]]:
    """The batches, floats in at least single precision."""
    for batch in data:
        yield {n: a.astype("float32") if a.dtype == "float16" else a for n, a in batch.items()}


def hash_samples(batch: Mapping[str, np.ndarray]) -> list[bytes]:
    """One hash for each sample, over all inputs that have a batch axis."""
    arrays = [array for array in batch.values() if array.ndim]
    hashes = []
    for parts in zip(*arrays, strict=False):
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            digest.update(np.ascontiguousarray(part))
        hashes.append(digest.digest())
    return hashes


def check_range(name: str, dtype: str, found: InputSummary, samples: int) -> list[Finding]:
    """Constant inputs, ranges made by a few outliers, ranges that still grow."""
    if found.low == found.high:
        what = f"every element is {found.low:.6g} in {format_count(samples, 'sample')}."
        advice = (
            "A constant says nothing about the range of real data: check how the samples are read."
        )
        if dtype.startswith("float"):
            return [Finding(Severity.WARNING, "constant", name, what, advice)]
        advice = "Usual for a mask of full length or one kind of token; else check how it is read."
        return [Finding(Severity.INFO, "constant", name, what, advice)]
    if not dtype.startswith("float"):
        return []
    findings = []
    largest = max(abs(found.low), abs(found.high))
    # Of few elements, the percentile is the maximum itself.
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
    """Too few samples, or many that are the same."""
    findings = []
    if samples < FEW_SAMPLES:
        what = f"there is no more than {format_count(samples, 'sample')}."
        findings.append(Finding(Severity.INFO, "samples", "", what, "Use a few hundred."))
    if samples - different > DUPLICATES * samples:
        what = f"copies of others are {samples - different} of {format_count(samples, 'sample')}."
        advice = "Check that the reader advances, and that its buffer is copied."
        findings.append(Finding(Severity.WARNING, "duplicates", "", what, advice))
    return findings


def check_channels(name: str, found: InputSummary) -> list[Finding]:
    """Channels that never change among others that do, and pixels that were normalized with the
    constants of another order.
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
        advice = "What it feeds gets no range: check how channels are read and put together."
        findings.append(Finding(Severity.WARNING, "channel", name, what, advice))
    mean, std = np.array(IMAGENET_MEAN), np.array(IMAGENET_STD)
    ends = (0 - mean) / std, (1 - mean) / std
    if is_between(found, ends[0][::-1], ends[1][::-1]) and not is_between(found, *ends):
        what = (
            "its channels have the extremes of ImageNet's mean and deviation in reverse: the first "
            "one those of blue."
        )
        advice = "Normalize red, green and blue with 0.485, 0.456, 0.406 each, then order them."
        findings.append(Finding(Severity.WARNING, "order", name, what, advice))
    return findings


def is_between(found: InputSummary, lows: np.ndarray, highs: np.ndarray) -> bool:
    """Whether the extremes of the channels are these, which pixels of 0 and 255 become."""
    if found.lows.size != len(lows):
        return False
    slack = PIXEL_SLACK * (highs - lows)
    distance = np.maximum(abs(found.lows - lows), abs(found.highs - highs))
    return bool((distance < slack).all())


def check_batches(name: str, found: InputSummary) -> list[Finding]:
    """A few samples that are far larger or smaller than the others, by the batches they are in.

    By the logarithm of their magnitude, against its median and the median deviation from that.
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
        f"{sizes[worst]:.3g}, the median one {np.median(sizes):.3g}."
    )
    advice = "Look at it: another file, a missing step of the preprocessing, or an empty sample."
    return [Finding(Severity.WARNING, "batch", name, what, advice)]


def check_layer(
    name: str,
    layer: FirstLayer,
    found: InputSummary,
    batches: list[np.ndarray],
    norm: NormStatistics | None = None,
) -> list[Finding]:
    """What the first layer says of its input: scale, layout, order of channels."""
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
    """Whether channels are pixels of 0 to 255 minus the mean of each, in either order."""
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
        """The moments of some samples."""
        return Moments(self.means[rows], self.squares[rows])

    def spread(self) -> np.ndarray:
        """Standard deviation of each channel over all samples."""
        with np.errstate(all="ignore"):
            variance = self.squares.mean(0) - np.square(self.means.mean(0))
        # Infinite where the layer overflowed.
        return np.sqrt(np.where(np.isfinite(variance), np.maximum(variance, 0), np.inf))


def measure_moments(name: str, layer: FirstLayer, batches: list[np.ndarray]) -> Moments:
    """Of `PROBE_SAMPLES`, with the bias."""
    means, squares, (param,) = [], [], layer.mod["main"].params
    shape = tensor_shape(param) or (0,)
    is_single = len(shape) == 1  # one sample, with no axis for more
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
    """Whether the first layer's results vary as in training, which its batch norm remembers."""
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
    """Whether pictures that are prepared in another known way are nearer to what the model was
    trained on.

    How far the first layer's results are from what its batch norm remembers (`measure_misfit`) was
    0.05 to 0.27 of pictures prepared as in training, for three networks, and 0.07 more where two
    ways hardly differ; 0.7 and more where they do. How sure the difference is say samples drawn
    again (bootstrap).
    """
    better = find_better_form(name, layer, found, batches, norm)
    if better is None:
        return []
    given, form, misfit, least = better
    seen = f"look prepared as {given.text!r}" if given.text else "have no known form"
    what = (
        f"pictures prepared as {form.text!r} are nearer to what the model was trained on: against "
        f"its batch norm, results of the first layer ({layer.name!r}) are off by {least:.2f} in "
        f"place of {misfit:.2f} standard deviations in mean and spread. Those here {seen}."
    )
    advice = (
        f"Preprocess as in training; --preprocess {form.text} tries this one, and with labels "
        "lint says what each scores."
    )
    return [Finding(Severity.WARNING, "normalization", name, what, advice)]


def find_better_form(
    name: str,
    layer: FirstLayer,
    found: InputSummary,
    batches: list[np.ndarray],
    norm: NormStatistics,
) -> tuple[PixelForm, PixelForm, float, float] | None:
    """(how the pictures look prepared, how they should be, misfit of each); None if no other way is
    clearly better; see `check_normalization`.
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
    """The first batches, which hold so many samples."""
    found: list[np.ndarray] = []
    for array in batches:
        if sum(map(len, found)) >= samples:
            break
        found.append(array)
    return found


def measure_misfit(moments: Moments, norm: NormStatistics) -> float:
    """How far results are from what a batch norm remembers: the mean of what the channels' means
    are off by, in standard deviations, and the median of what those are off by, as a logarithm.
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
    """Whether pictures with red and blue exchanged are nearer to what the model was trained on.

    The means of the first layer's results are compared with those that its batch norm remembers;
    how sure that is say samples drawn again (bootstrap).
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
    # As pixels of 0 to 1: each channel has constants of its own.
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
        f"with red and blue exchanged, its pictures are nearer to what the model was trained on: "
        f"the first layer ({layer.name!r}) is off by {measure_shift(other.means):.2f} standard "
        f"deviations in place of {measure_shift(moments.means):.2f}."
    )
    advice = "Reverse the channels of each picture before it is normalized (order=bgr or rgb)."
    return [Finding(Severity.WARNING, "order", name, what, advice)]


def check_scale(
    name: str, layer: FirstLayer, batches: list[np.ndarray], *, is_caffe: bool = False
) -> list[Finding]:
    """Whether values are of the magnitude that the model was trained on: 0..255 or 0..1.

    A layer's bias (with a batch norm, beta - gamma mean / std) is of the order of the spread of w x
    over the data it was trained on, per channel; the median over the channels of |bias| / spread
    tells: values too large by a factor make it small by that factor. Needs a bias; sees factors of
    about 20 and more. Pixels minus a mean, as Caffe has them, are not called wrong: networks that
    take them have such a first layer.
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
            advice = "Right for networks of Caffe (blue first) and TF-Slim (red first) alone."
            return [Finding(Severity.INFO, "scale", name, what, advice)]
        advice += " Ignore this if the model was trained on such values."
        return [Finding(Severity.WARNING, "scale", name, what, advice)]
    return []


def check_layout(name: str, layout: str, batches: list[np.ndarray]) -> list[Finding]:
    """Whether images were reshaped from one layout to the other, not transposed.

    The shape fits then, but neighbours are not neighbours any more: read in the other layout, the
    image is smoother. Only for 2 to 4 channels and images of at least 8 x 8.
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
    advice = f"Use x.transpose({axes}) in place of reshape."
    return [Finding(Severity.WARNING, "layout", name, what, advice)]


def measure_roughness(images: np.ndarray) -> float:
    """Mean difference of neighbours over the standard deviation; (N, C, H, W)."""
    x = images.astype("float64")
    steps = np.abs(np.diff(x, axis=-1)).mean() + np.abs(np.diff(x, axis=-2)).mean()
    return float(steps / max(x.std(), 1e-30))


def find_first_layers(mod: tvm.IRModule) -> dict[str, FirstLayer]:
    """Input -> its first layer, in a prepared module; inputs without one are left out."""
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
    """The layer that `var` is the result of, if it has the form of one and a bias."""
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
