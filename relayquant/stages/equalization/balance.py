"""Channel balance after planning: two layers with per-channel weight scales -> factors between
them, so that one scale suits the values in between.

linear(relu(linear(x, w1) + b1), w2) -> linear(relu(linear(x, w1 / s) + b1 / s), s * w2), as in
`cross_layer`. That module makes the ranges of the weights equal. Here the weight scales adapt to
any s: the scales of w1, and of a depthwise w2. But the value between the layers has one scale, so a
channel with a hundredth of the range has one bit left.

With s equal to the channel's range r, the value would be quantized best, but w2 would lose
resolution. So s = r^a / (range of w2)^(1 - a), as in SmoothQuant (https://arxiv.org/abs/2211.10438,
equation 4). The power a is the one with the smallest total noise, estimated by
`channels.estimate_noise` from samples of the channels.

Measured on three convolutions (the middle one depthwise) with relu between them and channel ranges
between e^-3 and e^3: the outputs improve from 6 to 32 dB. ResNet-20 was trained with batch norms,
which keep channels alike. It gains nothing and is left unchanged.

A depthwise w2 takes any s. So smaller gains count there. NNCF has a scale for each channel of what
a depthwise convolution reads, which is the same. But if every channel has rare large values,
calibration cuts these off where one channel has the largest ones, and no longer once all channels
reach as far. So the noise is also measured, on sampled values with their best range. SQNR in dB on
other samples (DS-CNN 300, the others 64), without factors before depthwise layers, by the estimate
alone, and with both:

    iris landmarks               35.7, 32.5    35.6, 32.4    37.2, 32.7
    face detector, full range    20.9, 25.7    20.7, 25.5    22.5, 26.7
    PP-OCR detection             17.7          19.3          19.3
    DS-CNN                       35.4          34.0          35.5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import tvm

from relayquant.ir.rewrite import Graph
from relayquant.stages.equalization.channels import (
    ChannelStatistics,
    divide_range,
    estimate_noise,
    measure_noise,
)
from relayquant.stages.equalization.cross_layer import (
    MOST_OCTAVES,
    Exponents,
    LayerPair,
    find_limits,
    find_pairs,
    read_constants,
)

#: the powers a that are tried
POWERS = (0.5, 0.75, 1.0)
#: factor by which the estimated noise must fall, and share of the signal that it must exceed, as 8
#: bits cannot do much better
WORTHWHILE_GAIN, NOTABLE_NOISE = 4.0, 1e-3
#: the same if the second layer is depthwise: its weight scales take any factor, so none costs
DEPTHWISE_GAIN, DEPTHWISE_NOISE = 1.5, 1e-4
#: factor by which the noise of sampled values must then fall
MEASURED_GAIN = 2.0
#: squared step / variance of its rounding noise
VARIANCE = 12.0


def choose_balanced(
    mod: tvm.IRModule,
    statistics: Mapping[str, ChannelStatistics],
    layers: Collection[str],
    peaks: Mapping[str, np.ndarray] | None = None,
) -> Exponents:
    """Return the factors of the pairs of layers between which one scale for all channels costs
    much, by the name of the first layer; see `cross_layer.scale_layers`.

    Args:
        mod: The prepared module.
        statistics: Statistics of the last value between the layers of each pair, by its name.
        layers: First layers of the pairs to consider. All weights have per-channel scales.
        peaks: As for `cross_layer.choose_exponents`. None: the peaks of clipped values are taken
            from `statistics`.
    """
    graph = Graph(mod)
    pairs = [pair for pair in find_pairs(graph, with_clips=True)[0] if pair.first.name in layers]
    arrays = read_constants(graph, pairs)
    chosen: dict[str, list[int]] = {}
    for pair in pairs:
        seen = statistics[pair.between[-1].name]
        highest = dict.fromkeys((clip.name for clip in pair.clips), seen.largest)
        limits = find_limits(pair, arrays[pair.first], highest if peaks is None else peaks)
        exponents = balance_pair(pair, arrays[pair.second], seen, limits)
        if exponents.any():
            chosen[pair.first.name] = exponents.tolist()
    return chosen


def balance_pair(
    pair: LayerPair,
    weight: np.ndarray,
    seen: ChannelStatistics,
    limits: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return log2 of the factor of each channel, integers (C,). Zeros if the factors gain too
    little.

    Args:
        pair: The layers.
        weight: Weight of the second layer.
        seen: Statistics of the channels that the second layer reads.
        limits: Smallest and largest exponents.
    """
    rows = pair.reads.split(weight).astype("float64")

    def noise(exponents: np.ndarray) -> float:
        return estimate_noise(*join_taps(rows, seen, np.exp2(exponents)))

    matrix, channels = join_taps(rows, seen, np.ones(len(seen.largest)))
    signal = (np.square(matrix).sum(axis=-1) * channels.mean_square).sum()
    still = np.zeros(len(seen.largest), "int64")
    before = noise(still)
    is_free = rows.shape[2] == 1  # one input for each output: its weight scale divides the factor
    least = DEPTHWISE_NOISE if is_free else NOTABLE_NOISE
    if not before / VARIANCE > least * signal:
        return still
    ranges = np.abs(rows).max(axis=(1, 3)).reshape(-1)
    tried = [share_range(seen.largest, ranges, power, limits) for power in POWERS]
    best = min(tried, key=noise)
    gain = DEPTHWISE_GAIN if is_free else WORTHWHILE_GAIN
    pays = before > gain * noise(best)
    if pays and is_free and len(seen.rows):
        pays = lowers_measured_noise(best, rows, seen)
    return best if pays else still


def lowers_measured_noise(exponents: np.ndarray, rows: np.ndarray, seen: ChannelStatistics) -> bool:
    """Whether factors lower the noise of sampled values clearly. `rows` are weights as
    `ChannelReads.split` returns them.
    """
    importance = np.square(rows).sum(axis=(1, 3)).reshape(-1)
    scales = np.exp2(exponents)
    before = measure_noise(seen.rows, np.ones_like(scales), importance)
    return before > MEASURED_GAIN * measure_noise(seen.rows, scales, importance)


def share_range(
    largest: np.ndarray, ranges: np.ndarray, power: float, limits: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Return log2 of largest^power / ranges^(1 - power) per channel, rounded, relative to the
    median; 0 if one of the two is 0.
    """
    usable = (largest > 0) & (ranges > 0)
    logs = divide_range(largest, ranges, power)
    logs[usable] -= np.median(logs[usable]) if usable.any() else 0.0
    low, high = limits
    most = np.clip(np.rint(logs), -MOST_OCTAVES, MOST_OCTAVES)
    return np.clip(most, low, high).astype("int64")


def join_taps(
    rows: np.ndarray, seen: ChannelStatistics, scales: np.ndarray
) -> tuple[np.ndarray, ChannelStatistics]:
    """Return the arguments of `estimate_noise` for channels divided by `scales` (C,) and the
    weights that read them, (groups, outputs, inputs, taps). Every tap of a channel counts as a
    separate channel.
    """
    groups, outputs, inputs, taps = rows.shape
    each = scales.reshape(groups, inputs, 1)
    matrix = (rows * each[:, None]).reshape(groups, outputs, -1).transpose(0, 2, 1)
    scaled = seen.divide(scales)

    def repeat(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.reshape(groups, inputs), taps, axis=1)

    return matrix, ChannelStatistics(repeat(scaled.largest), repeat(scaled.mean_square))
