"""Errors of samples -> the samples that a report shows, with their images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relayquant.analysis.outputs import OutputGap
from relayquant.data import Dataset, count_samples
from relayquant.plots.report_data import SampleView

#: number of worst samples that are shown
WORST_SAMPLES = 8


def find_worst_samples(gaps: Sequence[OutputGap], data: Dataset) -> list[SampleView]:
    """Find the samples with the largest error of the integer model, the worst first."""
    each = [gap.each for gap in gaps]
    counts = [count_samples(batch) for batch in data]
    if not each or any(len(rated) != sum(counts) for rated in each):
        return []  # an output whose first axis does not count samples
    rated = np.min(np.array(each), axis=0)
    worst = [int(i) for i in np.argsort(rated, kind="stable")[:WORST_SAMPLES]]
    starts = np.cumsum([0, *counts])
    images: dict[int, tuple[np.ndarray, ...]] = {}
    for batch, start, count in zip(data, starts, counts, strict=False):
        for index in worst:
            if start <= index < start + count:
                samples = (a[index - start] for a in batch.values() if a.ndim == 4)
                drawn = map(draw_image, samples)
                images[index] = tuple(image for image in drawn if image is not None)
    return [SampleView(index, float(rated[index]), images.get(index, ())) for index in worst]


def draw_image(array: np.ndarray) -> np.ndarray | None:
    """Convert (C, H, W) or (H, W, C) with 1 or 3 channels to an (H, W, 3) uint8 image.

    None for any other shape. The user's preprocessing is not known, so the range of the values
    becomes black to white.
    """
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in (1, 3) or min(array.shape[:2]) < 8:
        return None
    step = -(-max(array.shape[:2]) // 96)
    image = np.nan_to_num(array[::step, ::step].astype("float64"))
    low, high = image.min(), image.max()
    scaled = (image - low) / max(high - low, 1e-30) * 255
    return np.broadcast_to(scaled.astype("uint8"), (*scaled.shape[:2], 3))
