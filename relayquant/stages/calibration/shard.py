"""One step on one shard: stored values + arguments -> observer states, and the values that later
steps read.

A shard is the unit of work of a calibration. It runs here or in another process, and a checkpoint
stores its states. Results are always merged in shard order, so the result is the same bit for bit.
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
from relayquant.config.observers.base import call_observer
from relayquant.stages.calibration.store import BEGIN_ANEW, Shard, ValueStore
from relayquant.stages.calibration.subgraphs import Subgraph
from relayquant.stages.calibration.weights.patches import LinearView
from relayquant.stages.calibration.weights.statistics import InputStatistics, round_to_grid

STATES_FORMAT = "relayquant.shard.2"
ARGUMENTS_FORMAT = "relayquant.arguments.2"
#: Bytes of a group's values, and of an operator's input, that are observed together. The group's
#: values still fit the second-level cache. Only a few rows of the input are read.
MOST_SEEN_BYTES, MOST_SAMPLED_BYTES = 1 << 20, 1 << 24
#: total bytes, over all groups, that wait to be observed
MOST_WAITING_BYTES = 1 << 25


@dataclass(frozen=True)
class GroupObservation:
    """A group whose values an observer sees. `points` are the names of the values."""

    observer: Observer[Any]
    info: ValueInfo
    points: tuple[str, ...]

    def for_part(self, shard: Shard, batches: int) -> GroupObservation:
        """Return the observation for a shard as long as `shard` of this many batches."""
        arrays = len(shard) * len(self.points)
        return replace(self, observer=self.observer.for_part(len(shard) / batches, arrays))


@dataclass(frozen=True)
class FitObservation:
    """An operator whose input is observed to fit its weight.

    Attributes:
        source: Name of the value that it reads, before rounding.
        view: The operator as matrix products.
        columns: Weights per output.
        most: Largest number of columns in one block.
        with_gram: Whether second moments are needed.
        rows: Rows sampled per batch.
        seed: Seed that chooses the rows, together with the index of the batch.
        roundings: Parameters that the rows are rounded with, one after the other.
        with_real: Whether the same rows of the float model are observed too.
    """

    source: str
    view: LinearView
    columns: int
    most: int
    with_gram: bool
    rows: int
    seed: tuple[int, ...]
    roundings: tuple[tuple[QParams, QSpec], ...] = ()
    with_real: bool = False

    def start(self) -> InputStatistics:
        """Return the statistics before any data."""
        return InputStatistics.empty(
            self.view.groups,
            self.columns,
            with_gram=self.with_gram,
            most=self.most,
            with_real=self.with_real,
        )

    def update_all(
        self,
        statistics: InputStatistics,
        arrays: Sequence[np.ndarray],
        batch: int,
        real: Sequence[np.ndarray] = (),
    ) -> InputStatistics:
        """Add the operator's data in several batches, of which the first has index `batch`, and
        its data in the float model if that is observed.
        """
        rng = np.random.default_rng((*self.seed, batch))
        pairs = zip(arrays, real if self.with_real else arrays, strict=True)
        for _, some in groupby(pairs, key=lambda pair: pair[0].shape[1:]):
            found, known = zip(*some, strict=True)
            statistics = statistics.add(
                self.view, found, self.rows * len(found), rng, self.round, known
            )
        return statistics

    def round(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Round values as the operator reads them."""
        for qparams, spec in self.roundings:
            values = round_to_grid(values, qparams, spec)
        return values


@dataclass(frozen=True, eq=False)
class StepArguments:
    """Values that subgraphs read or observe and that are the same for all batches.

    Attributes:
        own: With the parameters and weights chosen so far.
        real: In the float model. None if it does not run beside.
    """

    own: Mapping[str, Any]
    real: Mapping[str, Any] | None = None

    def save(self, path: Path) -> None:
        """Write to a file that `load` reads."""
        sides = {"own": self.own, "real": self.real or {}}
        arrays = {f"{kind}/{name}": a for kind, side in sides.items() for name, a in side.items()}
        write_archive(path, ARGUMENTS_FORMAT, Archive({"real": self.real is not None}, arrays))

    @staticmethod
    def load(path: Path) -> StepArguments:
        """Read what `save` wrote."""
        archive = read_archive(path, ARGUMENTS_FORMAT, "part of a calibration")
        own, real = (
            {n.removeprefix(kind): a for n, a in archive.arrays.items() if n.startswith(kind)}
            for kind in ("own/", "real/")
        )
        return StepArguments(own, real if archive.header["real"] else None)


@dataclass(frozen=True)
class ShardTask:
    """The work on one shard, as plain data that can be sent to another process.

    Attributes:
        subgraphs: The functions that each batch runs through, one after the other.
        shard: The batches to run on.
        values: Where values are read and written.
        groups: By group key.
        fits: By operator name.
        stored: Values to write.
        symbols: Symbolic dimensions of each batch of the shard; empty if there are none.
    """

    subgraphs: tuple[Subgraph, ...]
    shard: Shard
    values: ValueStore
    groups: Mapping[str, GroupObservation]
    fits: Mapping[str, FitObservation]
    stored: tuple[str, ...]
    symbols: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True, eq=False)
class ShardStates:
    """The states of one shard: observer states by group key, statistics by operator."""

    groups: Mapping[str, Any]
    fits: Mapping[str, InputStatistics]

    @staticmethod
    def start(task: ShardTask) -> ShardStates:
        """Return the states before any data."""
        return ShardStates(
            {
                key: call_observer(seen.observer.start, seen.info, seen.info)
                for key, seen in task.groups.items()
            },
            {name: seen.start() for name, seen in task.fits.items()},
        )

    @staticmethod
    def merge(task: ShardTask, first: ShardStates, second: ShardStates) -> ShardStates:
        """Merge the states of two consecutive parts of the data. The result reuses the arrays of
        `first`.
        """
        return ShardStates(
            {
                key: call_observer(
                    seen.observer.merge, seen.info, first.groups[key], second.groups[key]
                )
                for key, seen in task.groups.items()
            },
            {name: first.fits[name].merge(second.fits[name]) for name in task.fits},
        )

    def save(self, path: Path) -> None:
        """Write to a file that `load` reads. The file is never incomplete."""
        arrays: dict[str, np.ndarray] = {}
        for kind, states in (("groups", self.groups), ("fits", self.fits)):
            for key, state in states.items():
                found = state.to_arrays()
                arrays.update({f"{kind}/{key}/{name}": array for name, array in found.items()})
        write_archive(path, STATES_FORMAT, Archive({}, arrays))

    @staticmethod
    def load(path: Path, task: ShardTask) -> ShardStates:
        """Read what `save` wrote. Raise DataError if it is damaged."""
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


def name_real(name: str) -> str:
    """The name under which a value of the float model is stored. No value's name has a NUL."""
    return f"float\0{name}"


class ShardSide:
    """A run of the subgraphs on a shard: with what was chosen so far, or of the float model."""

    def __init__(
        self, task: ShardTask, arguments: Mapping[str, Any], stack: ExitStack, *, is_real: bool
    ) -> None:
        self.arguments = arguments
        computed = {name for subgraph in task.subgraphs for name in subgraph.outputs}
        read = {n for subgraph in task.subgraphs for n in (*subgraph.inputs, *subgraph.observed)}

        def find_stored(name: str) -> str:
            return name_real(name) if is_real and name not in task.values.starts else name

        self.readers = {}
        for name in read - computed - set(arguments):
            self.readers[name] = task.values.read(find_stored(name), task.shard)
            stack.callback(self.readers[name].close)
        self.writers = {
            name: stack.enter_context(task.values.write(find_stored(name), task.shard))
            for name in task.stored
        }
        self.values: dict[str, Any] = {}

    def begin(self) -> None:
        """Take the next batch."""
        self.values = dict(self.arguments)
        self.values.update((name, next(reader)) for name, reader in self.readers.items())

    def run(
        self, functions: FunctionRunner | None, subgraph: Subgraph, symbols: Mapping[str, int]
    ) -> None:
        """Run one subgraph on the batch."""
        if functions is None or not subgraph.function:
            return
        args = [self.values[name] for name in subgraph.inputs]
        if subgraph.symbols:
            args.append(as_shape(symbols[name] for name in subgraph.symbols))
        results = functions.run(subgraph.function, args)
        self.values.update(zip(subgraph.outputs, results, strict=True))

    def finish(self, subgraph: Subgraph) -> None:
        """Write what later steps read, and forget what no later subgraph reads."""
        for name in self.writers.keys() & subgraph.outputs:
            self.writers[name].append(self.values[name])
        # If a batch runs through many subgraphs, only the values that one of them needs are kept.
        for name in subgraph.expired:
            self.values.pop(name, None)


def run_shard(
    task: ShardTask,
    functions: FunctionRunner | None,
    arguments: StepArguments,
) -> ShardStates:
    """Run a step on every batch of a shard and observe what it computes.

    Args:
        task: The work.
        functions: The subgraphs; None if there is nothing to compute.
        arguments: Values that are the same for all batches.
    """
    watch = Watch(task)
    with ExitStack() as stack:
        own = ShardSide(task, arguments.own, stack, is_real=False)
        sides = [own]
        if arguments.real is not None:
            sides.append(ShardSide(task, arguments.real, stack, is_real=True))
        for i in range(len(task.shard)):
            symbols = task.symbols[i] if task.symbols else {}
            for side in sides:
                side.begin()
            for subgraph in task.subgraphs:
                for side in sides:
                    side.run(functions, subgraph, symbols)
                watch.see(subgraph, own.values, sides[-1].values, i)
                for side in sides:
                    side.finish(subgraph)
    return watch.finish()


class Watch:
    """What observers have seen of the batches so far."""

    def __init__(self, task: ShardTask) -> None:
        self.task = task
        states = ShardStates.start(task)
        self.groups, self.fits = dict(states.groups), dict(states.fits)
        self.seen_later = {key: WaitingArrays() for key in task.groups}
        self.fitted_later = {name: WaitingArrays() for name in task.fits}
        self.real_later = {name: WaitingArrays() for name in task.fits}
        self.waiting_bytes = 0  # of all groups

    def see(
        self,
        subgraph: Subgraph,
        values: Mapping[str, np.ndarray],
        real: Mapping[str, np.ndarray],
        batch: int,
    ) -> None:
        """Observe the values that one subgraph computed or read; `real` are those of the float
        model, if it runs beside.
        """
        for key in subgraph.groups:
            if key in self.task.groups:
                waiting = self.seen_later[key]
                before = waiting.bytes
                waiting.add([values[name] for name in self.task.groups[key].points], batch)
                self.waiting_bytes += waiting.bytes - before
                if waiting.bytes >= MOST_SEEN_BYTES:
                    self.observe(key)
                if self.waiting_bytes >= MOST_WAITING_BYTES:
                    self.observe_all()
        for point in subgraph.fits:
            waiting = self.fitted_later[point.operator]
            waiting.add([values[point.source]], batch)
            if self.task.fits[point.operator].with_real:
                self.real_later[point.operator].add([real[point.source]], batch)
            if waiting.bytes >= MOST_SAMPLED_BYTES:
                self.sample(point.operator)

    def observe(self, key: str) -> None:
        """Show a group's arrays to its observer."""
        self.waiting_bytes -= self.seen_later[key].bytes
        arrays, _ = self.seen_later[key].take()
        seen = self.task.groups[key]
        state = call_observer(seen.observer.update_all, seen.info, self.groups[key], arrays)
        self.groups[key] = state

    def observe_all(self) -> None:
        """Show all waiting arrays to their observers."""
        for key, waiting in self.seen_later.items():
            if waiting.arrays:
                self.observe(key)

    def sample(self, name: str) -> None:
        """Sample an operator's input."""
        arrays, first = self.fitted_later[name].take()
        real, _ = self.real_later[name].take()
        first += self.task.shard.start
        self.fits[name] = self.task.fits[name].update_all(self.fits[name], arrays, first, real)

    def finish(self) -> ShardStates:
        """Return the states after all batches."""
        self.observe_all()
        for name, waiting in self.fitted_later.items():
            if waiting.arrays:
                self.sample(name)
        return ShardStates(self.groups, self.fits)


class WaitingArrays:
    """Arrays that are observed together. For small arrays, one call per array would take longer
    than reading its values.
    """

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.bytes = 0
        self.first = 0  # index of the batch of the first array

    def add(self, arrays: Sequence[np.ndarray], batch: int) -> None:
        """Add the arrays of one batch."""
        if not self.arrays:
            self.first = batch
        self.arrays.extend(arrays)
        self.bytes += sum(array.nbytes for array in arrays)

    def take(self) -> tuple[list[np.ndarray], int]:
        """Return (all arrays, batch index of the first) and empty the list."""
        taken, self.arrays, self.bytes = self.arrays, [], 0
        return taken, self.first


# --- In another process -------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteTask:
    """A task with the files through which another process gets its input and returns its result.

    Attributes:
        task: The work.
        module: The subgraphs, as TVM writes them; None if there are none.
        arguments: Arguments of the subgraphs.
        states: File for the result.
    """

    task: ShardTask
    module: Path | None
    arguments: Path
    states: Path


def run_shard_remotely(remote: RemoteTask, load_module: LoadModule) -> None:
    """Run `run_shard` from files to a file. A second run writes the same file."""
    functions = None
    if remote.module is not None:
        functions = load_subgraphs(str(remote.module), load_module)
    arguments = StepArguments.load(remote.arguments)
    with limit_blas():
        run_shard(remote.task, functions, arguments).save(remote.states)


@functools.lru_cache(maxsize=1)
def load_subgraphs(path: str, load_module: LoadModule) -> FunctionRunner:
    """Load the subgraphs. A process loads them once, because the path holds their digest."""
    with reading(path, "part of a calibration", advice=BEGIN_ANEW):
        subgraphs = parse_module(Path(path).read_text("utf-8"))
    return load_module(subgraphs)
