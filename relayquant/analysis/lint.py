"""lint: float module + data set -> what looks wrong with the calibration data, before it is used.

Every check is a heuristic that says what it saw; each states its threshold, and where the threshold
is from. They are measured on models with data preprocessed as their authors say, and on the same
data broken on purpose.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.arguments import check_arguments
from relayquant.calibration.segments import build_function, collect_ancestors
from relayquant.datasets import Dataset, count_samples, open_dataset
from relayquant.datasets.inputs import describe_inputs
from relayquant.errors import DataError, format_count
from relayquant.preparation import prepare_module
from relayquant.reference import run as run_reference
from relayquant.rewrite import Graph
from relayquant.rewrite.graph import constant_value, tensor_dtype, tensor_shape

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
#: samples that the first layer is computed on
PROBE_SAMPLES = 8
#: elements of an input that are kept for percentiles
KEPT_ELEMENTS = 1 << 18


class Severity(enum.Enum):
    """How sure and how bad a finding is."""

    ERROR = "error"  #: calibration would refuse the data
    WARNING = "warning"  #: the quantized model is likely to be bad
    INFO = "info"  #: worth knowing


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    Attributes: severity: See `Severity`. check: Name of the check: "data", "constant", "outliers",
        "scale", "layout", "samples", "growth", "duplicates". where: Name of the input, "" for the
        data set as a whole. what: What was seen. advice: What to do.
    """

    severity: Severity
    check: str
    where: str
    what: str
    advice: str

    def __str__(self) -> str:
        place = f"input {self.where!r}: " if self.where else ""
        return f"{self.severity.value}: {place}{self.what} {self.advice}"


@dataclass(frozen=True)
class InputSummary:
    """What is kept of one input while the data streams by; its size is bounded.

    Attributes:
        low, high: Extremes.
        widths: (samples, high - low) after each batch that made the range wider.
        magnitudes: Some of the magnitudes that are not 0.
        stride: One of so many magnitudes was kept.
    """

    low: float = float("inf")
    high: float = float("-inf")
    widths: tuple[tuple[int, float], ...] = ()
    magnitudes: np.ndarray = field(default_factory=lambda: np.empty(0, "float32"))
    stride: int = 1

    def update(self, array: np.ndarray, samples: int) -> InputSummary:
        """With one more batch, after which there are `samples`."""
        low, high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        widths = self.widths
        if (low, high) != (self.low, self.high):
            widths = (*widths[-1023:], (samples, high - low))
        flat = np.abs(array.reshape(-1)[:: self.stride])
        magnitudes, stride = np.concatenate([self.magnitudes, flat[flat > 0]]), self.stride
        while magnitudes.size > KEPT_ELEMENTS:
            magnitudes, stride = magnitudes[::2], stride * 2
        return InputSummary(low, high, widths, magnitudes, stride)

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
    """

    name: str
    bias: np.ndarray
    axis: int
    layout: str
    mod: tvm.IRModule


@check_arguments
def lint(mod: tvm.IRModule, params: Mapping[str, Any] | None, dataset: Any) -> list[Finding]:
    """What looks wrong with calibration data; an empty list if nothing does.

    Wrong data is what it looks for, so it is no error: data that `quantize` would refuse (NaN,
    wrong shapes, no samples) is a finding of severity ERROR, and what came before it is still
    looked at.

    Args:
        mod, params, dataset: As for `quantize`.

    Raises:
        ModelError: the model cannot be read.
    """
    prepared = prepare_module(mod, params)
    findings, statistics, probe, seen, samples = [], {}, {}, set(), 0
    try:
        for batch in read_batches(open_dataset(dataset, describe_inputs(prepared))):
            samples += count_samples(batch)
            for name, array in batch.items():
                before = statistics.get(name, InputSummary())
                statistics[name] = before.update(array, samples)
            if sum(len(arrays[0]) for arrays in probe.values()) < PROBE_SAMPLES * len(batch):
                for name, array in batch.items():
                    probe.setdefault(name, []).append(array)
            seen.update(hash_samples(batch))
    except DataError as error:
        findings.append(
            Finding(Severity.ERROR, "data", "", str(error), "Nothing after it was read.")
        )
    for info in describe_inputs(prepared):
        if info.name in statistics:
            findings += check_range(info.name, info.dtype, statistics[info.name], samples)
    for name, layer in find_first_layers(prepared).items():
        if name in probe:
            findings += check_scale(name, layer, probe[name])
            findings += check_layout(name, layer.layout, probe[name])
    if samples:
        findings += check_samples(samples, len(seen))
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


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
    statistics: dict[str, InputSummary] = {}
    seen: set[bytes] = set()
    samples = 0
    for batch in batches:
        hashes = hash_samples(batch)
        samples, seen = samples + len(hashes), seen | set(hashes)
        for name, array in batch.items():
            if array.dtype.kind == "f" and array.size:
                before = statistics.get(name, InputSummary())
                statistics[name] = before.update(array.astype("float32"), samples)
    findings = []
    layers = find_first_layers(prepared)
    for name, found in statistics.items():
        findings += check_range(name, "float32", found, samples)
        arrays = [batch[name].astype("float32") for batch in batches]
        if found.low < found.high and name in layers:
            findings += check_scale(name, layers[name], arrays)
            findings += check_layout(name, layers[name].layout, arrays)
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


def check_scale(name: str, layer: FirstLayer, batches: list[np.ndarray]) -> list[Finding]:
    """Whether values are of the magnitude that the model was trained on: 0..255 or 0..1.

    A layer's bias (with a batch norm, beta - gamma mean / std) is of the order of the spread of w x
    over the data it was trained on, per channel; the median over the channels of |bias| / spread
    tells: values too large by a factor make it small by that factor. Needs a bias; sees factors of
    about 20 and more.
    """
    results = []
    (param,) = layer.mod["main"].params
    is_cut = not isinstance((tensor_shape(param) or (0,))[0], int)
    for array in batches:
        (result,) = run_reference(layer.mod, {name: array[:PROBE_SAMPLES] if is_cut else array})
        results.append(np.moveaxis(result, layer.axis, -1).reshape(-1, layer.bias.size))
    with np.errstate(all="ignore"):
        spread = np.concatenate(results).astype("float64").std(axis=0)
    spread[~np.isfinite(spread)] = np.inf  # the layer overflowed
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
    axis, layout = -1, ""
    if op != "relax.matmul":
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
    return FirstLayer(var.name, biases[0].reshape(-1).astype("float64"), axis, layout, sub)
