"""Samples of a data set: a few, spread over all of it, that are kept while another reader
iterates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relayquant.data.dataset import Dataset, open_dataset
from relayquant.data.item import Batch, InputInfo, count_samples
from relayquant.errors import ConfigError

#: Index of the first batch that is held back, and distance to the next one. A data set of up to 23
#: batches is calibrated with whole. From the 24th batch on, every eighth is held back.
FIRST_HELD, HELD_STEP = 23, 8


def is_held_back(place: int) -> bool:
    """Whether the batch with this index is left out of calibration, to measure the result on it."""
    return place >= FIRST_HELD and (place - FIRST_HELD) % HELD_STEP == 0


@dataclass(frozen=True)
class CalibrationShare:
    """A data set of the user without the batches that are held back; see `open_share`."""

    dataset: object


def open_share(dataset: object, inputs: Iterable[InputInfo]) -> Dataset:
    """Open a data set, without what is held back if it is a `CalibrationShare`."""
    if not isinstance(dataset, CalibrationShare):
        return open_dataset(dataset, inputs)
    whole = open_dataset(dataset.dataset, inputs)
    read, length, shown = whole.read_item, whole.length, None

    def items() -> Iterator[Batch]:
        return (batch for place, batch in enumerate(whole) if not is_held_back(place))

    if read is not None and length is not None:
        places = [place for place in range(length) if not is_held_back(place)]
        shown, length = (lambda i: read(places[i])), len(places)
    return replace(whole, open_items=items, read_item=shown, length=length, limit=None)


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Some rows of a batch.

    Attributes:
        numbers: The index of each row among all samples of the data.
        batch: The rows.
        place: Index of the batch that the first rows are from.
    """

    numbers: np.ndarray
    batch: Batch
    place: int

    def cut(self, rows: int) -> KeptRows:
        """Return at most `rows` rows, evenly spread."""
        size = len(self.numbers)
        return self if size <= rows else self.take(np.arange(rows) * size // rows)

    def take(self, rows: np.ndarray) -> KeptRows:
        """Return these rows, copied."""
        batch = {name: array[rows] for name, array in self.batch.items()}
        return KeptRows(self.numbers[rows], batch, self.place)

    def has_shapes_of(self, other: KeptRows) -> bool:
        """Return whether both fit into one batch."""
        shapes = [{k: v.shape[1:] for k, v in part.batch.items()} for part in (self, other)]
        return shapes[0] == shapes[1]

    def join(self, other: KeptRows) -> KeptRows:
        """Join both into one batch."""
        joined = {k: np.concatenate([v, other.batch[k]]) for k, v in self.batch.items()}
        return KeptRows(np.concatenate([self.numbers, other.numbers]), joined, self.place)


class SpreadSample:
    """Keeps some samples of the batches that are read, about evenly spread and always the same
    ones.

    Every 2^k-th batch is kept, and k grows with the number of batches. So memory does not grow with
    the data, and the length of the data need not be known. If the batch size is free, only some
    rows of a batch are kept.

    Attributes:
        count: About how many samples `parts` can return.
        total: Number of samples read.
        held: What was held back, if anything is.
    """

    def __init__(
        self, inputs: tuple[InputInfo, ...], count: int, *, holds_back: bool = False
    ) -> None:
        self.count = count
        self.is_cut = has_free_batch(inputs)
        self.held = SpreadSample(inputs, count) if holds_back else None
        self.clear()

    def clear(self) -> None:
        """Forget all batches."""
        self.kept: list[KeptRows] = []
        self.stride, self.passed, self.total = 1, 0, 0
        if self.held is not None:
            self.held.clear()

    def hold_back(self, batch: Batch) -> None:
        """Take another batch that nobody else reads. Only with `holds_back`."""
        if self.held is not None:
            self.held.total = self.total
            self.held.note(batch)
            self.total = self.held.total

    def note(self, batch: Batch) -> None:
        """Take another batch. The kept rows are copied."""
        size = count_samples(batch)
        part = KeptRows(self.total + np.arange(size), batch, self.passed)
        if self.passed % self.stride == 0:
            rows = -(-self.count // (len(self.kept) + 1))
            cut = part.cut(rows) if self.is_cut else part
            copied = {k: v.copy() for k, v in batch.items()} if cut is part else cut.batch
            self.kept.append(replace(cut, batch=copied))
            if len(self.kept) == 2 * self.count:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.passed, self.total = self.passed + 1, self.total + size

    def watch(self, data: Dataset) -> Dataset:
        """Return the same data set, with every batch noted when it is read, without the batches
        that are held back. Each pass starts anew.
        """

        def items() -> Iterator[Batch]:
            self.clear()
            for place, batch in enumerate(data):
                if self.held is not None and is_held_back(place):
                    self.hold_back(batch)
                    continue
                self.note(batch)
                yield batch

        length = data.length
        if length is not None and self.held is not None:
            length = sum(not is_held_back(place) for place in range(length))
        return replace(data, open_items=items, read_item=None, length=length)

    def parts(self, count: int, kept: Sequence[KeptRows]) -> list[KeptRows]:
        """Return about `count` of the kept samples, in the order of the data.

        If the batch size is free, samples of one shape are joined into one batch, because numpy
        needs as long for one sample as for a few.
        """
        each = max(len(kept[0].numbers) if kept and not self.is_cut else 1, 1)
        wanted = min(-(-count // each), len(kept))
        rows = -(-count // max(wanted, 1))
        found: list[KeptRows] = []
        left = count
        for i in range(wanted):
            part = kept[i * len(kept) // wanted]
            found.append(part.cut(min(rows, max(left, 1))) if self.is_cut else part)
            left -= len(found[-1].numbers)
            if left <= 0:
                break
        return self.join_parts(found)

    def batches(self) -> list[Batch]:
        """Return about `count` samples, see `parts`."""
        return [part.batch for part in self.parts(self.count, self.kept)]

    @property
    def all_numbers(self) -> set[int]:
        """The indices of all kept samples."""
        return {int(number) for part in self.kept for number in part.numbers}

    def find_numbers(self, places: Collection[int]) -> set[int]:
        """Return the indices of the kept samples that are from these batches."""
        chosen = [part for part in self.kept if part.place in places]
        return {int(number) for part in chosen for number in part.numbers}

    def rounds(
        self, counts: Sequence[int], used: Sequence[Collection[int]] = ()
    ) -> Iterator[list[KeptRows]]:
        """Yield samples for several rounds: first `parts`, then random ones of the rest. Samples
        that were held back come before all others.

        Random samples matter because patterns in the data may repeat with the same period as evenly
        spread samples.

        Args:
            counts: About how many samples there are in total after each round.
            used: Sets of batch indices to leave out. The first set that leaves enough samples for
                the first round is used, or none if no set does.
        """
        kept = self.kept
        for places in used:
            others = [part for part in self.kept if part.place not in places]
            if sum(len(part.numbers) for part in others) >= counts[0]:
                kept = others
                break
        held = [] if self.held is None else self.held.kept
        first = self.parts(counts[0], held)
        left = counts[0] - sum(len(part.numbers) for part in first)
        if left > 0:
            first += self.parts(left, kept)
        seen = {int(number) for part in first for number in part.numbers}
        yield first
        rows = -(-counts[-1] // max(len(kept) + len(held), 1))
        rest = self.draw_rest(kept, rows, seen) + self.draw_rest(held, rows, seen)
        drawn, first_read = len(seen), set() if self.held is None else self.held.all_numbers
        for count in counts[1:]:
            fresh: list[tuple[int, KeptRows]] = []
            while rest and drawn < count:
                fresh.append(rest.pop())
                drawn += len(fresh[-1][1].numbers)
            if fresh:
                fresh.sort(key=lambda row: row[0])
                ours = [part for number, part in fresh if number in first_read]
                others = [part for number, part in fresh if number not in first_read]
                yield self.join_parts(ours) + self.join_parts(others)

    def draw_rest(
        self, kept: Sequence[KeptRows], rows: int, seen: Collection[int]
    ) -> list[tuple[int, KeptRows]]:
        """Return (number, sample) in random order, the same every time, without the samples in
        `seen`.

        At most `rows` rows of each batch are drawn. If the batch size is fixed, whole batches are
        drawn.
        """
        units = list(kept)
        if self.is_cut:
            cut = [part.cut(rows) for part in kept]
            units = [part.take(np.array([i])) for part in cut for i in range(len(part.numbers))]
        found = [(int(part.numbers[0]), part) for part in units if part.numbers[0] not in seen]
        return [found[i] for i in np.random.default_rng(0).permutation(len(found))]

    def join_parts(self, parts: Sequence[KeptRows]) -> list[KeptRows]:
        """Join neighbours of one shape into one batch, if the batch size is free."""
        found: list[KeptRows] = []
        for part in parts:
            if self.is_cut and found and part.has_shapes_of(found[-1]):
                found[-1] = found[-1].join(part)
            else:
                found.append(part)
        return found


def has_free_batch(inputs: Sequence[InputInfo]) -> bool:
    """Return whether batches may have any size: the first dimension of all inputs has the same
    name.
    """
    firsts = {info.shape[0] if info.shape else 1 for info in inputs}
    return len(firsts) == 1 and all(isinstance(first, str) for first in firsts)


def take_samples(data: Dataset, samples: int) -> Dataset:
    """Return the first batches that hold at least `samples` samples, or all."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"samples is {samples!r}; allowed: an integer >= 1.", code="RQ101")
    return data.head(count_first(map(count_samples, data), samples))


def count_first(sizes: Iterable[int], samples: int) -> int:
    """Return how many batches of these sizes hold at least `samples` samples: the first ones, or
    all.
    """
    batches = found = 0
    for size in sizes:
        batches, found = batches + 1, found + size
        if found >= samples:
            break
    return batches
