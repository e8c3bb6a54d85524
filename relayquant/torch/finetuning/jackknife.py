"""Outputs of validation data -> the standard error of a statistic of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

#: parts of the validation data that are left out in turn, to measure the chance in a score
FOLDS = 20
#: outputs of a model, for each batch
Batches = list[list[torch.Tensor]]


def estimate_error(
    statistic: Callable[[Sequence[Batches]], float], parts: Sequence[Batches]
) -> float:
    """Estimate the standard error of a statistic by a jackknife over folds of the samples.

    sqrt((n - 1) / n * sum((t_i - mean t)^2)) of n folds, each left out in turn (Efron 1982, chapter
    3). 0 for a single sample, whose error is unknown.

    Args:
        statistic: A function of several models' outputs of the same samples.
        parts: The outputs of each model.
    """
    places = list_samples(parts)
    count = min(FOLDS, len(places))
    if count < 2:
        return 0.0
    found = []
    for fold in range(count):
        kept = [place for i, place in enumerate(places) if i % count != fold]
        found.append(statistic([take_samples(batches, kept) for batches in parts]))
    return math.sqrt((count - 1) * float(np.var(found)))


def list_samples(parts: Sequence[Batches]) -> list[tuple[int, int | None]]:
    """Return (batch, row) of each sample. Row None for a batch whose outputs have different
    numbers of rows: it is one sample.
    """
    places: list[tuple[int, int | None]] = []
    for i, batches in enumerate(zip(*parts, strict=True)):
        sizes = {value.shape[0] if value.ndim else None for batch in batches for value in batch}
        size = sizes.pop() if len(sizes) == 1 else None
        places.extend((i, row) for row in ([None] if size is None else range(size)))
    return places


def take_samples(batches: Batches, places: Sequence[tuple[int, int | None]]) -> Batches:
    """Return the batches reduced to these samples. Empty batches are left out."""
    rows: dict[int, list[int | None]] = {}
    for batch, row in places:
        rows.setdefault(batch, []).append(row)
    return [
        batches[i] if kept == [None] else [value[kept] for value in batches[i]]
        for i, kept in rows.items()
    ]
