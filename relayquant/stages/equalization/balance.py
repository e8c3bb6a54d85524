"""Equalize, after the plan: channels between two layers whose weights have a scale per channel
are scaled so that one scale serves the values between them.

linear(relu(linear(x, w1) + b1), w2) -> linear(relu(linear(x, w1 / s) + b1 / s), s * w2), as in
`cross_layer`. There the ranges of weights are made equal. Here the scales of w1 take any s, and
those of a depthwise w2 too; but the value between the layers has one scale, which leaves a channel
of a hundredth of the range one bit. Its own range r would be the best s, were it not that other
layers pay for it with the resolution of w2. So s = r^a / (range of w2)^(1 - a), SmoothQuant's
(https://arxiv.org/abs/2211.10438, equation 4), with the a at which the noise of both together, by
`channels.estimate_noise` and what samples show of the channels, is least.

Measured on a convolution, a depthwise and another one with relu between them, the ranges of whose
channels lie between e^-3 and e^3: the outputs go from 6 to 32 dB. MobileNet 0.75, ResNet-20 and
DS-CNN, trained with batch norms that keep channels alike, gain nothing: they are left as they are.
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
#: the estimated noise must fall by this factor
WORTHWHILE_GAIN = 4.0
#: steps squared over their variance as noise
VARIANCE = 12.0
#: and be above this share of the signal: 8 bits cannot do much better
NOTABLE_NOISE = 1e-3


def choose_balanced(
    mod: tvm.IRModule,
    statistics: Mapping[str, ChannelStatistics],
    layers: Collection[str],
    peaks: Mapping[str, np.ndarray] | None = None,
) -> Exponents:
    """Factors of the pairs of layers between which one scale for all channels costs much, by the
    name of the first layer; see `cross_layer.scale_layers`.

    Args:
        mod: The prepared module.
        statistics: Of the last value between the layers of each pair, by its name.
        layers: First layers of the pairs that are considered; all weights have scales per channel.
        peaks: As for `cross_layer.choose_exponents`; None: the peaks of clipped values are those
            of `statistics`.
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
    """log2 of the factor of each channel, integers (C,): zeros unless they are worth it.

    Args:
        pair: The layers.
        weight: Of the second one.
        seen: The channels that it reads.
        limits: Smallest and largest exponents.
    """
    rows = pair.reads.split(weight).astype("float64")

    def noise(exponents: np.ndarray) -> float:
        return estimate_noise(*join_taps(rows, seen, np.exp2(exponents)))

    matrix, channels = join_taps(rows, seen, np.ones(len(seen.largest)))
    signal = (np.square(matrix).sum(axis=-1) * channels.mean_square).sum()
    still = np.zeros(len(seen.largest), "int64")
    before = noise(still)
    if not before / VARIANCE > NOTABLE_NOISE * signal:
        return still
    ranges = np.abs(rows).max(axis=(1, 3)).reshape(-1)
    tried = [share_range(seen.largest, ranges, power, limits) for power in POWERS]
    best = min(tried, key=noise)
    return best if before > WORTHWHILE_GAIN * noise(best) else still


def share_range(
    largest: np.ndarray, ranges: np.ndarray, power: float, limits: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """log2 of largest^power / ranges^(1 - power) per channel, rounded, around their median; 0 where
    one of them is 0.
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
    """What `estimate_noise` takes of channels divided by `scales` (C,), and of the weights that
    they meet, (groups, outputs, inputs, taps): every tap of a channel as a channel of its own.
    """
    groups, outputs, inputs, taps = rows.shape
    each = scales.reshape(groups, inputs, 1)
    matrix = (rows * each[:, None]).reshape(groups, outputs, -1).transpose(0, 2, 1)
    scaled = seen.divide(scales)

    def repeat(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.reshape(groups, inputs), taps, axis=1)

    return matrix, ChannelStatistics(repeat(scaled.largest), repeat(scaled.mean_square))
