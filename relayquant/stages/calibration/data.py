"""The data of one calibration on disk: data set -> stored batches, later reduced to some of them.

The values that subgraphs compute are stored in the same folder (see `store`). Both are read shard
by shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from relayquant.base.events import CallbackList, ProgressEvent
from relayquant.data import Dataset, InputInfo, count_samples
from relayquant.ir.plan import SharedQParams
from relayquant.stages.calibration.checkpoint import (
    PART,
    DataRecord,
    Workspace,
    check_same_data,
    digest_batch,
)
from relayquant.stages.calibration.observer_selection import JudgedBatch, OutputJudge
from relayquant.stages.calibration.parameters import StoredSamples
from relayquant.stages.calibration.passes import choose_batches
from relayquant.stages.calibration.store import Shard, cut_shards


@dataclass(frozen=True, order=True)
class Largest:
    """The value of the data set with the largest magnitude, for messages."""

    value: float = 0.0
    sample: int = 0
    input: str = ""

    def __str__(self) -> str:
        return (
            f"The largest value of the data set is {self.value:g}, in sample {self.sample} of "
            f"input {self.input!r}"
        )


def find_largest(batch: Mapping[str, np.ndarray], sample: int) -> Largest:
    """Find the largest value of one batch, with index `sample`."""
    ends = {name: (array.max(), array.min()) for name, array in batch.items() if array.size}
    peaks = [Largest(max(abs(float(e)) for e in end), sample, name) for name, end in ends.items()]
    return max(peaks, default=Largest())


def read_symbols(inputs: Sequence[InputInfo], batch: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the values of the inputs' symbolic dimensions in one batch."""
    return {
        dim: size
        for info in inputs
        for dim, size in zip(info.shape, batch[info.name].shape, strict=True)
        if isinstance(dim, str)
    }


def find_starts(offsets: Mapping[str, Sequence[int]], count: int) -> dict[str, tuple[int, ...]]:
    """Return `ValueStore.starts`, computed from the offsets of each input's `count` batches."""
    shards = cut_shards(count)
    return {name: tuple(at[shard.start] for shard in shards) for name, at in offsets.items()}


class StoredData:
    """The batches that a calibration works on.

    Attributes:
        record: What is known of the batches; of fewer batches after `keep`.
        values: Stores the batches and what subgraphs computed from them.
        inputs: Names of the model's inputs.
        can_cut: Whether a batch may be cut to fewer samples.
        largest: The value with the largest magnitude.
        sample_count: Number of samples in all batches.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.record, self.values = DataRecord(0, {}), workspace.values
        self.inputs: tuple[InputInfo, ...] = ()
        self.can_cut = False
        self.largest, self.sample_count = Largest(), 0

    @property
    def count(self) -> int:
        """Number of batches."""
        return self.record.batches

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The batches, split into shards."""
        return cut_shards(self.count)

    def load(self, data: Dataset, used: Collection[str], callbacks: CallbackList) -> None:
        """Store the inputs in `used`. This is the only pass over the user's data.

        If a checkpoint already has them, the data is read and compared with the stored batches.
        """
        before = self.workspace.read_data()
        self.inputs = tuple(data.inputs)
        symbols: list[dict[str, int]] = []
        digests: list[str] = []
        offsets: dict[str, list[int]] = {info.name: [] for info in data.inputs if info.name in used}
        has_symbols = any(isinstance(dim, str) for info in data.inputs for dim in info.shape)
        firsts = {info.shape[0] if info.shape else 1 for info in data.inputs}
        # One name for the first dimension of all inputs, because it is the batch.
        self.can_cut = len(firsts) == 1 and all(isinstance(first, str) for first in firsts)
        count = 0
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(self.workspace.values.write_input(name))
                for name in (offsets if before is None else ())
            }
            for batch in data:
                if has_symbols:
                    symbols.append(read_symbols(data.inputs, batch))
                self.largest = max(self.largest, find_largest(batch, count))
                if self.workspace.is_kept:
                    digests.append(digest_batch(batch))
                for name, writer in writers.items():
                    offsets[name].append(writer.append(batch[name]))
                count += 1
                self.sample_count += count_samples(batch)
                callbacks.on_progress(ProgressEvent("read data", count, data.length))
        if before is not None:
            check_same_data(before, digests, self.workspace.path)
            self.record = before
        else:
            starts = find_starts(offsets, count)
            self.record = DataRecord(count, starts, tuple(symbols), tuple(digests))
            if self.workspace.is_kept:
                self.workspace.write_data(self.record)
        self.values = replace(self.workspace.values, starts=self.record.starts)

    def keep(self, chosen: Sequence[int]) -> None:
        """Continue with some of the batches. Later steps see no others."""
        if len(chosen) == self.count:
            return
        store, part = self.workspace.part, self.workspace.read_data(PART)
        if part is None:
            offsets: dict[str, list[int]] = {}
            for name in self.record.starts:
                with store.write_input(name) as writer:
                    offsets[name] = [writer.append(a) for a in self.read_chosen(name, chosen)]
            symbols = tuple(self.record.symbols[i] for i in chosen) if self.record.symbols else ()
            part = DataRecord(len(chosen), find_starts(offsets, len(chosen)), symbols)
            if self.workspace.is_kept:
                self.workspace.write_data(part, PART)
        for name in self.record.starts:
            self.values.drop(name, ())
        self.record, self.values = part, replace(store, starts=part.starts)

    def read_chosen(self, name: str, chosen: Sequence[int]) -> Iterator[np.ndarray]:
        """Read some batches of a value, in order."""
        wanted = set(chosen)
        for shard in self.shards:
            if wanted.isdisjoint(range(shard.start, shard.stop)):
                continue
            for i, array in enumerate(self.values.read(name, shard), shard.start):
                if i in wanted:
                    yield array

    def choose_judged(self, judge: OutputJudge) -> tuple[int, ...]:
        """Choose batches with `judge.samples` samples in total, evenly spread over the data. Return
        their indices; none if the judge reads no input.
        """
        names = self.find_judged(judge)
        if not names:
            return ()
        wanted = judge.samples
        if not self.can_cut_for(judge):
            # By the shape: if a calibration continues, the values may have been dropped.
            (shape,) = (info.shape for info in self.inputs if info.name == names[0])
            symbols = self.record.symbols[0] if self.record.symbols else {}
            sizes = [symbols[dim] if isinstance(dim, str) else dim for dim in shape[:1]]
            wanted = math.ceil(wanted / max(*sizes, 1)) if sizes else wanted
        return choose_batches(self.count, wanted)

    def find_judged(self, judge: OutputJudge) -> list[str]:
        """Return the inputs that the judge reads and that are stored."""
        return [name for name in judge.inputs if name in self.record.starts]

    def can_cut_for(self, judge: OutputJudge) -> bool:
        """Whether the judge accepts some of the samples of a batch."""
        return self.can_cut and not judge.subgraph.symbols

    def find_cut(self, judge: OutputJudge, numbers: Sequence[int]) -> int | None:
        """Return how many samples of each of these batches the judge uses. None: all."""
        if not self.can_cut_for(judge):
            return None
        most = math.ceil(judge.samples / max(len(numbers), 1))
        symbols = [self.record.symbols[number] for number in numbers]
        sizes = [of_batch[info.shape[0]] for of_batch in symbols for info in self.inputs]
        return most if max(sizes, default=0) > most else None

    def read_judged(self, judge: OutputJudge, results: Sequence[str]) -> list[JudgedBatch]:
        """Read the batches of `choose_judged`, with the float model's `results` if they are stored.
        A large batch is cut to its first samples if possible.
        """
        numbers = self.choose_judged(judge)
        most = self.find_cut(judge, numbers)
        batches = self.read_batches(numbers, *self.find_judged(judge))
        known = self.read_batches(numbers, *results) if results else itertools.repeat({})
        found = []
        for number, batch, of_batch in zip(numbers, batches, known, strict=False):
            symbols = self.record.symbols[number] if self.record.symbols else {}
            if most is not None:
                batch = {name: array[:most] for name, array in batch.items()}
            found.append(JudgedBatch(batch, symbols, of_batch))
        return found

    def read_batches(self, chosen: Sequence[int], *names: str) -> Iterator[dict[str, np.ndarray]]:
        """Read some batches of some values, in order."""
        for arrays in zip(*(self.read_chosen(name, chosen) for name in names), strict=True):
            yield dict(zip(names, arrays, strict=True))

    def samples(self, group: SharedQParams) -> StoredSamples:
        """Return one array per batch of a group's observed values. If there are several, they
        are flattened and joined.
        """

        def read() -> Iterator[np.ndarray]:
            for shard in self.shards:
                readers = [self.values.read(name, shard) for name in group.points]
                if len(readers) == 1:
                    # A callable may write into its arrays.
                    yield from (array.copy() for array in readers[0])
                    continue
                for arrays in zip(*readers, strict=True):
                    yield np.concatenate([array.reshape(-1) for array in arrays])

        return StoredSamples(group.info, read)
