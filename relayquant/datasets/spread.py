"""Data sets, samples: a few of a stream, spread over all of it, kept while others read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from relayquant.datasets.dataset import Dataset
from relayquant.datasets.item import Batch, InputInfo, count_samples


class SpreadSample:
    """A few samples of the batches that pass by, about evenly spread, the same ones every time.

    Every 2^k-th batch is kept, k growing as more come by: memory does not grow with the data, and
    its length need not be known. Of a batch whose size is free only some rows are kept.
    """

    def __init__(self, inputs: tuple[InputInfo, ...], count: int) -> None:
        self.count = count
        self.is_cut = has_free_batch(inputs)
        self.clear()

    def clear(self) -> None:
        """Before any batch."""
        self.kept: list[Batch] = []
        self.stride, self.passed = 1, 0

    def note(self, batch: Batch) -> None:
        """Another batch; what is kept of it is copied."""
        if self.passed % self.stride == 0:
            rows = -(-self.count // (len(self.kept) + 1))
            self.kept.append(self.cut(batch, rows))
            if len(self.kept) == 2 * self.count:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.passed += 1

    def watch(self, data: Dataset) -> Dataset:
        """The same batches, noted as they are read; every reading begins anew."""

        def items() -> Iterator[Batch]:
            self.clear()
            for batch in data:
                self.note(batch)
                yield batch

        return replace(data, open_items=items, read_item=None)

    def cut(self, batch: Batch, rows: int) -> Batch:
        """So many rows of a batch, spread over it; all where its size is fixed."""
        size = count_samples(batch)
        if not self.is_cut or size <= rows:
            return {name: array.copy() for name, array in batch.items()}
        chosen = np.arange(rows) * size // rows
        return {name: array[chosen] for name, array in batch.items()}

    def batches(self) -> list[Batch]:
        """About `count` samples, in the order of the data; as one batch where its size is free and
        they have one shape: numpy takes as long for one sample as for a few.
        """
        each = max(count_samples(self.kept[0]) if self.kept and not self.is_cut else 1, 1)
        wanted = min(-(-self.count // each), len(self.kept))
        rows = -(-self.count // max(wanted, 1))
        found: list[Batch] = []
        left = self.count
        for i in range(wanted):
            part = self.cut(self.kept[i * len(self.kept) // wanted], min(rows, max(left, 1)))
            left -= count_samples(part)
            shapes = [{k: v.shape[1:] for k, v in batch.items()} for batch in (part, *found[-1:])]
            if self.is_cut and found and shapes[0] == shapes[1]:
                found[-1] = {k: np.concatenate([v, part[k]]) for k, v in found[-1].items()}
            else:
                found.append(part)
            if left <= 0:
                break
        return found


def has_free_batch(inputs: Sequence[InputInfo]) -> bool:
    """Whether batches may have any size: the first dimension of all inputs has one name."""
    firsts = {info.shape[0] if info.shape else 1 for info in inputs}
    return len(firsts) == 1 and all(isinstance(first, str) for first in firsts)
