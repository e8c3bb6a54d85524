"""Bit allocation: weights found + a size limit -> the format of each weight. It runs before
fitting. Weights that lose most accuracy per byte keep 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from relayquant.base.grouping import GroupFormat, quantize_groups
from relayquant.base.packing import count_bytes, count_groups
from relayquant.errors import ConfigError, format_count
from relayquant.flow.compression.find import WeightKey, WeightUse
from relayquant.flow.compression.fit import Gram
from relayquant.flow.compression.fit_layers import MOST_BITS, CompressData, Formats, measure_loss


def choose_formats(
    uses: Sequence[WeightUse], forms: Formats, data: CompressData
) -> tuple[dict[WeightKey, GroupFormat], dict[WeightKey, str]]:
    """Return the format of each weight, and why some of them have 8 bits.

    The loss of a weight is the share of its product's result that rounding to nearest changes, with
    all other weights in float.

    Raises:
        ConfigError: there is not enough room even for the fewest bits.
    """
    forms, settings = dict(forms), data.settings
    weights = {use.key: use for use in uses}
    limit = settings.max_size
    if settings.max_bits is not None:
        count = sum(math.prod(use.shape) for use in weights.values())
        limit = int(settings.max_bits * count / 8)
    if limit is None:
        return forms, {}
    sizes = {key: count_size(use, forms[key]) for key, use in weights.items()}
    room = limit - sum(sizes.values())
    if room < 0:
        raise ConfigError(
            f"compress_weights: the weights of bits={settings.bits} and "
            f"embedding_bits={settings.embedding_bits} take "
            f"{format_count(sum(sizes.values()), 'byte')} with their scales, "
            f"allowed are {limit} by max_size or max_bits. Use fewer bits or larger groups.",
            code="RQ102",
        )
    losses = measure_losses(weights, forms, data)
    wide = {key: replace(form, bits=MOST_BITS) for key, form in forms.items()}
    costs = {key: count_size(weights[key], wide[key]) - sizes[key] for key in losses}
    kept: dict[WeightKey, str] = {}
    for key in sorted(losses, key=lambda key: -losses[key] / costs[key]):
        if costs[key] > room:
            continue
        room -= costs[key]
        kept[key] = (
            f"{MOST_BITS} bits, because {forms[key].bits} lose {losses[key]:.2g} of the result, "
            "and there is room"
        )
        forms[key] = wide[key]
    return forms, kept


def count_size(use: WeightUse, form: GroupFormat) -> int:
    """Return the bytes of a weight in a format."""
    rows, features = use.shape
    groups = rows * count_groups(features, form.size(features))
    zeros = 1 if form.is_symmetric else groups
    return (
        rows * count_bytes(features, form.bits)
        + groups * (2 if form.scale_dtype == "float16" else 4)
        + zeros
    )


def measure_losses(
    weights: Mapping[WeightKey, WeightUse], forms: Formats, data: CompressData
) -> dict[WeightKey, float]:
    """Measure the loss of each weight with fewer than 8 bits."""
    losses: dict[WeightKey, float] = {}

    def measure(use: WeightUse, gram: Gram | None) -> None:
        form = forms[use.key]
        if use.key not in losses and form.bits < MOST_BITS:
            importance = None if gram is None else gram.importance
            array = use.array
            losses[use.key] = measure_loss(array, quantize_groups(array, form, importance), gram)

    def meet(use: WeightUse, gram: Gram | None) -> np.ndarray:
        measure(use, gram)
        return use.array

    data.walk(meet)
    for use in weights.values():
        measure(use, None)
    return losses
