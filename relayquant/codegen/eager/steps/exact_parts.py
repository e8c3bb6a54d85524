"""Weight of integers -> weights that add up to it, with sums that float32 holds.

Float kernels compute integers exactly up to 2^24. A sum of 1,152 products of 8 bits may be twice as
large. Two kernels of half of the weight, whose results are added as integers, take a fifth of the
time of numpy's float64.
"""

from __future__ import annotations

import numpy as np

#: Parts, at most. Each takes as long as the whole weight.
MOST_PARTS = 4
#: float32 holds smaller integers, and int32.
LARGEST_FLOAT, LARGEST_SUM = 1 << 24, 1 << 31


def split_weight(weight: np.ndarray, axis: int, largest: int) -> list[np.ndarray]:
    """Return float32 weights of the same shape that add up to a weight of integers, with outputs at
    `axis`. float32 holds each part's sums of products with integers up to the magnitude `largest`.

    A part has neighbouring columns of the weight, and zeros elsewhere. Empty if it takes more than
    `MOST_PARTS`, or if int32 does not hold the sums.
    """
    columns = [size for place, size in enumerate(weight.shape) if place != axis]
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    sums = np.abs(rows).cumsum(axis=1, dtype="float64") * largest
    if sums.max(initial=0) >= LARGEST_SUM:
        return []
    starts, before = [0], np.zeros((len(rows), 1))
    while (sums - before).max(initial=0) >= LARGEST_FLOAT:
        start = int(((sums - before).max(axis=0) >= LARGEST_FLOAT).argmax())
        if start == starts[-1] or len(starts) == MOST_PARTS:
            return []
        starts.append(start)
        before = sums[:, start - 1 : start]
    ends = [*starts[1:], rows.shape[1]]
    place = np.expand_dims(np.arange(rows.shape[1]).reshape(columns), axis)
    return [
        np.where((start <= place) & (place < end), weight, 0).astype("float32")
        for start, end in zip(starts, ends, strict=True)
    ]
