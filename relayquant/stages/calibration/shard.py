"""One step on one shard of the data: values and arguments -> what observers saw, and the values
that later steps read.

The unit of work of a calibration: it runs here or in another process, it is what a checkpoint
keeps, and its results are merged in the order of the shards, always, so that neither changes any
bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relayquant.base.qtypes import QParams, QSpec, ValueInfo
from relayquant.base.runtime import FunctionRunner, LoadModule, as_shape, limit_blas
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.files import reading
from relayquant.base.storage.module_file import parse_module
from relayquant.config.observers import Observer
from relayquant.stages.calibration.store import BEGIN_ANEW, Shard, ValueStore
from relayquant.stages.calibration.subgraphs import Segment
from relayquant.stages.calibration.weights.patches import LinearView
from relayquant.stages.calibration.weights.statistics import InputStatistics, round_to_grid

STATES_FORMAT = "relayquant.shard.1"
ARGUMENTS_FORMAT = "relayquant.arguments.1"
#: Bytes of a group's values that are observed together, and of an operator's input, of which a few
#: rows are looked at. The former are still in the second level cache.
MOST_SEEN_BYTES, MOST_SAMPLED_BYTES = 1 << 20, 1 << 24
#: Bytes that wait to be observed, of all groups together.
MOST_WAITING_BYTES = 1 << 25


@dataclass(frozen=True)
class GroupObservation:
    """A group whose values an observer sees: `points` are their names."""

    observer: Observer[Any]
    info: ValueInfo
    points: tuple[str, ...]

    def for_part(self, shard: Shard, batches: int) -> GroupObservation:
        """What sees a shard as long as `shard` of so many batches."""
        arrays = len(shard) * len(self.points)
        return replace(self, observer=self.observer.for_part(len(shard) / batches, arrays))


@dataclass(frozen=True)
class FitObservation:
    """An operator whose input is observed to fit its weight.

    Attributes:
        source: Name of the value that it reads, before it is rounded.
        view: The operator as matrix products.
        columns, most: Weights per output, and at most how many of them make up one block.
        with_gram: Whether second moments are needed.
        rows: Rows of a batch that are sampled.
        seed: Which rows depends on this and on the number of the batch.
        roundings: Parameters that the rows are rounded with, one after the other.
    """

    source: str
    view: LinearView
    columns: int
    most: int
    with_gram: bool
    rows: int
    seed: tuple[int, ...]
    roundings: tuple[tuple[QParams, QSpec], ...] = ()

    def start(self) -> InputStatistics:
        """Before any data."""
        return InputStatistics.empty(
            self.view.groups, self.columns, with_gram=self.with_gram, most=self.most
        )

    def update_all(
        self, statistics: InputStatistics, arrays: Sequence[np.ndarray], batch: int
    ) -> InputStatistics:
        """With the operator's data in several batches, the first of which is number `batch`."""
        rng = np.random.default_rng((*self.seed, batch))
        for _, some in groupby(arrays, key=lambda array: array.shape[1:]):
            same = list(some)
            statistics = statistics.add(self.view, same, self.rows * len(same), rng, self.round)
        return statistics

    def round(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the operator sees of values."""
        for qparams, spec in self.roundings:
            values = round_to_grid(values, qparams, spec)
        return values


@dataclass(frozen=True)
class ShardTask:
    """What is to be done: plain data, which may travel to another process.

    Attributes:
        segments: The functions that each batch passes, one after the other.
        shard: The batches to run it on.
        values: Where values are read and written.
        groups: By key of the group.
        fits: By name of the operator.
        stored: Values to write.
        symbols: Of each batch of the shard: its symbolic dimensions; empty when there are none.
    """

    segments: tuple[Segment, ...]
    shard: Shard
    values: ValueStore
    groups: Mapping[str, GroupObservation]
    fits: Mapping[str, FitObservation]
    stored: tuple[str, ...]
    symbols: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True, eq=False)
class ShardStates:
    """What was seen: states of observers by key of the group, statistics by operator."""

    groups: Mapping[str, Any]
    fits: Mapping[str, InputStatistics]

    @staticmethod
    def start(task: ShardTask) -> ShardStates:
        """Before any data."""
        return ShardStates(
            {key: seen.observer.start(seen.info) for key, seen in task.groups.items()},
            {name: seen.start() for name, seen in task.fits.items()},
        )

    @staticmethod
    def merge(task: ShardTask, first: ShardStates, second: ShardStates) -> ShardStates:
        """What was seen of two parts of the data, the one after the other; takes over `first`."""
        return ShardStates(
            {
                key: seen.observer.merge(first.groups[key], second.groups[key])
                for key, seen in task.groups.items()
            },
            {name: first.fits[name].merge(second.fits[name]) for name in task.fits},
        )

    def save(self, path: Path) -> None:
        """Write to a file that `load` reads, whole or not at all."""
        arrays: dict[str, np.ndarray] = {}
        for kind, states in (("groups", self.groups), ("fits", self.fits)):
            for key, state in states.items():
                found = state.to_arrays()
                arrays.update({f"{kind}/{key}/{name}": array for name, array in found.items()})
        write_archive(path, STATES_FORMAT, Archive({}, arrays))

    @staticmethod
    def load(path: Path, task: ShardTask) -> ShardStates:
        """What `save` wrote; DataError if it is damaged."""
        with reading(path, "part of a calibration", advice=BEGIN_ANEW):
            arrays = read_archive(path, STATES_FORMAT, "part of a calibration").arrays

            def select(prefix: str) -> dict[str, np.ndarray]:
                return {
                    n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)
                }

            return ShardStates(
                {
                    key: seen.observer.restore(seen.info, select(f"groups/{key}/"))
                    for key, seen in task.groups.items()
                },
                {
                    name: seen.start().restore(select(f"fits/{name}/"))
                    for name, seen in task.fits.items()
                },
            )


def run_shard(
    task: ShardTask,
    functions: FunctionRunner | None,
    arguments: Mapping[str, Any],
) -> ShardStates:
    """Run a step on every batch of a shard and observe what it computes.

    Args:
        task: What to do.
        functions: The segments; None when there is nothing to compute.
        arguments: Values that segments read or observe and that are the same for all batches.
    """
    watch = Watch(task)
    computed = {name for segment in task.segments for name in segment.outputs}
    read = {name for segment in task.segments for name in (*segment.inputs, *segment.observed)}
    with ExitStack() as stack:
        readers = {}
        for name in read - computed - set(arguments):
            readers[name] = task.values.read(name, task.shard)
            stack.callback(readers[name].close)
        writers = {
            name: stack.enter_context(task.values.write(name, task.shard)) for name in task.stored
        }
        for i in range(len(task.shard)):
            values = dict(arguments)
            values.update((name, next(reader)) for name, reader in readers.items())
            for segment in task.segments:
                if functions is not None and segment.function:
                    args = [values[name] for name in segment.inputs]
                    if segment.symbols:
                        args.append(as_shape(task.symbols[i][name] for name in segment.symbols))
                    results = functions.run(segment.function, args)
                    values.update(zip(segment.outputs, results, strict=True))
                watch.see(segment, values, i)
                for name in writers.keys() & segment.outputs:
                    writers[name].append(values[name])
                # Of a batch that passes many segments, no more is held than one of them needs.
                for name in segment.expired:
                    values.pop(name, None)
    return watch.finish()


class Watch:
    """What observers have seen of the batches so far."""

    def __init__(self, task: ShardTask) -> None:
        self.task = task
        states = ShardStates.start(task)
        self.groups, self.fits = dict(states.groups), dict(states.fits)
        self.seen_later = {key: WaitingArrays() for key in task.groups}
        self.fitted_later = {name: WaitingArrays() for name in task.fits}
        self.waiting_bytes = 0  # of all groups

    def see(self, segment: Segment, values: Mapping[str, np.ndarray], batch: int) -> None:
        """Observe what one segment computed, or read."""
        for key in segment.groups:
            if key in self.task.groups:
                waiting = self.seen_later[key]
                before = waiting.bytes
                waiting.add([values[name] for name in self.task.groups[key].points], batch)
                self.waiting_bytes += waiting.bytes - before
                if waiting.bytes >= MOST_SEEN_BYTES:
                    self.observe(key)
                if self.waiting_bytes >= MOST_WAITING_BYTES:
                    self.observe_all()
        for point in segment.fits:
            waiting = self.fitted_later[point.operator]
            waiting.add([values[point.source]], batch)
            if waiting.bytes >= MOST_SAMPLED_BYTES:
                self.sample(point.operator)

    def observe(self, key: str) -> None:
        """Show a group's arrays to its observer."""
        self.waiting_bytes -= self.seen_later[key].bytes
        arrays, _ = self.seen_later[key].take()
        self.groups[key] = self.task.groups[key].observer.update_all(self.groups[key], arrays)

    def observe_all(self) -> None:
        """Show all arrays that wait to their observers."""
        for key, waiting in self.seen_later.items():
            if waiting.arrays:
                self.observe(key)

    def sample(self, name: str) -> None:
        """Sample an operator's input."""
        arrays, first = self.fitted_later[name].take()
        first += self.task.shard.start
        self.fits[name] = self.task.fits[name].update_all(self.fits[name], arrays, first)

    def finish(self) -> ShardStates:
        """What was seen of all batches."""
        self.observe_all()
        for name, waiting in self.fitted_later.items():
            if waiting.arrays:
                self.sample(name)
        return ShardStates(self.groups, self.fits)


class WaitingArrays:
    """Arrays that are observed together: to observe one takes longer than to look at its values
    where these are few.
    """

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.bytes = 0
        self.first = 0  # batch of the first array

    def add(self, arrays: Sequence[np.ndarray], batch: int) -> None:
        """The arrays of one batch."""
        if not self.arrays:
            self.first = batch
        self.arrays.extend(arrays)
        self.bytes += sum(array.nbytes for array in arrays)

    def take(self) -> tuple[list[np.ndarray], int]:
        """(all arrays, number of the batch of the first); none is left."""
        taken, self.arrays, self.bytes = self.arrays, [], 0
        return taken, self.first


# --- In another process -------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteTask:
    """A task with the files that another process needs for it and leaves its result in.

    Attributes:
        task: What to do.
        module: The segments, as TVM writes them; None when there are none.
        arguments: Arguments of the segment.
        states: Where the result goes.
    """

    task: ShardTask
    module: Path | None
    arguments: Path
    states: Path


def run_shard_remotely(remote: RemoteTask, load_module: LoadModule) -> None:
    """`run_shard` from files to a file. Running it again gives the same file."""
    functions = None
    if remote.module is not None:
        functions = load_segments(str(remote.module), load_module)
    arguments = read_archive(remote.arguments, ARGUMENTS_FORMAT, "part of a calibration").arrays
    with limit_blas():
        run_shard(remote.task, functions, arguments).save(remote.states)


@functools.lru_cache(maxsize=1)
def load_segments(path: str, load_module: LoadModule) -> FunctionRunner:
    """The segments: a process loads them once. The path holds a digest of them."""
    with reading(path, "part of a calibration", advice=BEGIN_ANEW):
        segments = parse_module(Path(path).read_text("utf-8"))
    return load_module(segments)
