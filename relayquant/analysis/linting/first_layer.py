"""The layer that reads an input, with its batch norm -> whether the data is scaled,
laid out and ordered as the training data was.

Each check states its threshold and the source of the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.linting.input_summary import InputSummary, is_between
from relayquant.analysis.linting.normalization import PixelForm, find_form, list_forms
from relayquant.base.axes import shape_along
from relayquant.data import count_first
from relayquant.ir.reference import run as run_reference
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.stages.calibration.subgraphs import build_function, collect_ancestors
from relayquant.stages.preparation.norm_statistics import NormStatistics

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
#: Operators with constants that prepare pictures within a graph.
NORMALIZING = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")
#: what Caffe subtracts from pixels of 0 to 255, without a division; blue first
CAFFE_MEAN = (103.939, 116.779, 123.68)


@dataclass(frozen=True)
class FirstLayer:
    """A convolution or matmul with a constant bias that reads an input, directly or behind the
    `NORMALIZING` operators of the graph.

    Attributes:
        name: Name of the value that it computes.
        bias: (C,).
        axis: Channel axis of its result.
        layout: Layout of the input of a 2-D convolution, else "".
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
    batches = batches[: count_first(map(len, batches), FORM_SAMPLES)]
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
    shape = shape_along(channel, batches[0].ndim)
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
    pixels have such a first layer. A bias of zeros, as `stages.annotation.bias` adds, says nothing,
    and neither do results without any spread, as of one row.
    """
    spread = measure_moments(name, layer, batches).spread()
    if not layer.bias.any() or not spread.any():
        return []
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
        read, axes = skip_normalization(graph, param)
        for var in graph.users[read]:
            layer = read_first_layer(graph, param, read, axes, var)
            if layer is not None:
                found[param.name] = layer
                break
    return found


def skip_normalization(graph: Graph, param: relax.Var) -> tuple[relax.Var, tuple[int, ...]]:
    """Return the value behind the operators that normalize or transpose an input, and for each of
    its axes the axis of the input.
    """
    value, axes = param, tuple(range(len(tensor_shape(param) or ())))
    while len(graph.users[value]) == 1:
        (user,) = graph.users[value]
        call, op = graph.call_of(user), graph.op_name(user)
        if call is None or len(tensor_shape(user) or ()) != len(axes):
            break
        if op == "relax.permute_dims":
            order = call.attrs.axes or reversed(range(len(axes)))
            axes = tuple(axes[int(axis)] for axis in order)
        elif op not in NORMALIZING or all(constant_value(arg) is None for arg in call.args):
            break
        value = user
    return value, axes


def read_first_layer(
    graph: Graph, param: relax.Var, read: relax.Var, axes: tuple[int, ...], var: relax.Var
) -> FirstLayer | None:
    """Return the layer that computes `var` from `read`, the normalized `param`, if it is a layer
    with a bias.
    """
    call, op = graph.call_of(var), graph.op_name(var)
    is_layer = op in ("relax.nn.conv1d", "relax.nn.conv2d", "relax.matmul")
    if not is_layer or call is None or call.args[0] != read or constant_value(call.args[1]) is None:
        return None
    if tensor_shape(param) is None or tensor_shape(var) is None:
        return None
    if tensor_dtype(param) != "float32" or len(graph.users[var]) != 1:
        return None
    add = graph.call_of(graph.users[var][0])
    if add is None or graph.op_name(graph.users[var][0]) != "relax.add":
        return None
    biases = [value for arg in add.args if (value := constant_value(arg)) is not None]
    axis, layout, channel = -1, "", None
    if op != "relax.matmul":
        data_layout = str(call.attrs.data_layout)
        channel = axes[data_layout.index("C")]
        axis = str(call.attrs.out_layout or call.attrs.data_layout).index("C")
        letters = (data_layout[axes.index(at)] for at in range(len(axes)))
        layout = "".join(letters) if op == "relax.nn.conv2d" else ""
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
