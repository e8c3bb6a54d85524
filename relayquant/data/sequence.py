"""Sequences: samples in order, for models with state. State runs on within a sequence and begins
anew with the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.data.archive import list_arrays
from relayquant.data.dataset import Dataset, open_dataset
from relayquant.data.item import Batch, InputInfo, convert_item, is_array
from relayquant.data.iterable import read_items, read_one
from relayquant.errors import DataError, find_near_name

#: (inputs by name) -> the new values of the state by name
Step = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class SampleSequence:
    """Samples of a model with state, in order, as one item of a data set.

    Attributes:
        samples: Each is what the model takes in one call, without its state: a dict, a tuple in
            input order, or for one input an array. Anything that can be read repeatedly.
    """

    samples: Iterable[Any]

    def __post_init__(self) -> None:
        if isinstance(self.samples, Iterator):
            raise DataError(
                f"A SampleSequence got {type(self.samples).__name__}, which can be read only once. "
                "Pass a list of the samples.",
                code="RQ303",
            )


@dataclass(frozen=True)
class StreamedDataset(Dataset):
    """A data set of a model with state: every step is a batch, with the state that the float model
    has come to.

    Attributes:
        sequences: Returns the sequences: lists of batches without state.
    """

    sequences: Callable[[], Iterator[list[Batch]]] = lambda: iter(())


def open_sequences(
    dataset: Any,
    inputs: Sequence[InputInfo],
    initial: Mapping[str, np.ndarray],
    step: Step,
) -> StreamedDataset:
    """Open the data set of a model with state.

    An array, a dict of arrays or an .npz is one sequence, with its steps along axis 0. An item of a
    list that is no `SampleSequence` is a sequence of one step. Data that has the state too stays as
    it is. Messages count the items, and the steps in one: "Sample 1, step 2".

    Args:
        inputs: All inputs, state included.
        initial: State -> its initial value.
        step: Runs the float model once.

    Raises:
        DataError: as `open_dataset`, or a sequence is empty, or a file has some states and lacks
            others, or an array with nearly a state's name.
    """
    given = tuple(info for info in inputs if info.name not in initial)
    if isinstance(dataset, (str, os.PathLike, Mapping)) or is_array(dataset):
        stacked = open_dataset(dataset, given)
        names = find_names(dataset)
        is_whole = initial.keys() <= names
        if isinstance(dataset, (str, os.PathLike)) and not is_whole:
            check_states(Path(dataset), names, given, initial)
        dataset = open_dataset(dataset, inputs) if is_whole else SampleSequence(stacked)
    if isinstance(dataset, SampleSequence):
        dataset = [dataset]
    whole = open_dataset(dataset, given)

    def read_sequences() -> Iterator[tuple[list[Batch], Mapping[str, np.ndarray] | None]]:
        for index, item in enumerate(whole.open_items()):
            if isinstance(item, Mapping) and initial.keys() <= item.keys():
                batch = convert_item(item, tuple(inputs), f"Sample {index}")
                yield [{info.name: batch[info.name] for info in given}], batch
            elif isinstance(item, SampleSequence):
                yield read_samples(item.samples, index), None
            else:
                yield [convert_item(item, given, f"Sample {index}")], None

    def read_samples(samples: Iterable[Any], index: int) -> list[Batch]:
        where = f"Sample {index}"
        opened = read_one(samples, where, lambda: iter(samples))
        items = enumerate(read_items(samples, opened, f"{where}, step"))
        steps = [convert_item(item, given, f"{where}, step {at}") for at, item in items]
        if not steps:
            raise DataError(
                f"The sequence at sample {index} is empty. Give it samples.", code="RQ303"
            )
        return steps

    def read_steps() -> Iterator[Batch]:
        for steps, complete in read_sequences():
            if complete is not None:
                yield dict(complete)
                continue
            state: Mapping[str, np.ndarray] = initial
            for number, batch in enumerate(steps):
                full = {**batch, **state}
                yield full
                if number + 1 < len(steps):
                    state = step(full)

    return StreamedDataset(
        tuple(inputs),
        None,
        read_steps,
        sequences=lambda: (steps for steps, complete in read_sequences() if complete is None),
    )


def check_states(
    path: Path, names: Collection[str], given: Sequence[InputInfo], initial: Mapping[str, Any]
) -> None:
    """Raise DataError for an .npz in which a state is misspelled, or has some states only. Other
    arrays, such as labels, are allowed.
    """
    taken = {info.name for info in given}
    missing = [name for name in initial if name not in names]
    others = [name for name in sorted(names) if name not in taken and name not in initial]
    near = [(name, found) for name in others if (found := find_near_name(name, missing))]
    have = [name for name in initial if name in names]
    if near or have:
        found = f"; its array {near[0][0]!r} is no input" if near else ""
        name = near[0][1] if near else missing[0]
        what = f"it has the state {have[0]!r}, and" if have else "it"
        raise DataError(
            f"The data set {path}: {what} lacks the state {name!r}{found}; allowed: all states, or "
            "none of them. Name each array as an input of the model.",
            code="RQ302",
        )


def find_names(dataset: Any) -> set[str]:
    """Return the names of the arrays in a dict or an .npz; none for a single array."""
    if isinstance(dataset, (str, os.PathLike)):
        return set(list_arrays(Path(dataset)))
    return set(dataset) if isinstance(dataset, Mapping) else set()
