"""Data sets: the user's data, in any accepted form, as an iterable of checked batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relayquant.data.archive import open_archive
from relayquant.data.arrays import convert_mapping, cut_arrays
from relayquant.data.item import (
    Batch,
    InputInfo,
    convert_item,
    is_array,
    list_names,
    to_array,
)
from relayquant.data.iterable import find_length, is_sequence, open_iterable, read_by_index
from relayquant.errors import ConfigError, DataError


@dataclass(frozen=True)
class Dataset:
    """Checked batches; iterating starts from the beginning each time.

    Yields `{input name: array}` in input order; arrays are C-contiguous and have the input's dtype
    and rank. They may share memory with the user's arrays: do not write into them.

    Attributes:
        inputs: Model inputs that the batches are checked against.
        length: Number of batches, or None if it is not known beforehand.
        limit: Maximum number of batches.
        read_item: Returns a raw item by index, if items can be read in any order.
    """

    inputs: tuple[InputInfo, ...]
    length: int | None
    open_items: Callable[[], Iterator[Any]]  #: yields raw items from the beginning
    limit: int | None = None
    read_item: Callable[[int], Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield checked batches.

        Raises:
            DataError: there is no batch, or one does not fit the inputs. Names sample and input.
        """
        found = False
        if self.limit is not None and self.limit < 1:
            return
        for index, item in enumerate(self.open_items()):
            found = True
            yield convert_item(item, self.inputs, f"Sample {index}")
            if self.limit is not None and index + 1 >= self.limit:
                break
        if not found:
            raise DataError(
                "The data set yields no sample; calibration needs at least one, and a few hundred "
                "representative ones to be good. If it is a function, it must return a fresh "
                "iterator at every call.",
                code="RQ303",
            )

    def pick(self, count: int) -> list[Batch]:
        """Return `count` batches, or all if there are fewer: evenly spread if items can be read in
        any order, else the first ones.
        """
        if self.read_item is None or not self.length:
            return list(self.head(count))
        count = min(count, self.length)
        numbers = [i * self.length // count for i in range(count)]
        return [convert_item(self.read_item(i), self.inputs, f"Sample {i}") for i in numbers]

    def head(self, count: int) -> Dataset:
        """Return the first `count` batches, or all if there are fewer.

        Raises:
            ConfigError: count is not an integer >= 1.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"Dataset.head takes an integer >= 1, got {count!r}.", code="RQ101")
        limit = count if self.limit is None else min(count, self.limit)
        length = None if self.length is None else min(self.length, limit)
        return replace(self, limit=limit, length=length)


def open_dataset(
    dataset: object, inputs: Iterable[InputInfo], *, batch_size: int | None = None
) -> Dataset:
    """Open `dataset` as checked batches for a model with `inputs`.

    `dataset` is one of
    - an iterable that can be read repeatedly and yields dicts `{input: array}`, tuples or lists in
      input order, or (one input) single arrays: each item is one batch;
    - a path to an .npz with an array per input, samples along axis 0 (other arrays in it, such as
      labels, are ignored; with one input and one array the name does not matter), or (one input) to
      an .npy. It is read batch by batch and never loaded as a whole;
    - a dict of arrays with samples along axis 0, or (one input) one such array. An array is always
      cut along axis 0. To use it as one batch, put it in a list;
    - a function without arguments that returns a new iterator of items at every call;
    - an object with `__len__` and `__getitem__`.

    Arrays with samples along axis 0 are cut into batches of `batch_size`: by default the model's
    own fixed batch, else 1. Remaining samples that do not fill a fixed batch are left out. Arrays
    with one axis more than the input hold one whole batch per entry of axis 0.

    Arrays with samples along axis 0 are cut into batches of `batch_size`. The default is the
    model's fixed batch size, or else 1. Samples at the end that do not fill a fixed batch are left
    out. If arrays have one axis more than the input, each entry of axis 0 is a whole batch.

    An item without axis 0 gets it if the model's first dimension is 1 or symbolic. Floats are cast
    to the input's float dtype, integers to floats, and integers to integer dtypes that hold their
    values. Floats are never cast to integers. NaN and infinity are errors.

    Raises:
        DataError: the data set cannot be read, can be read only once, or does not fit the inputs.
            Items are checked while iterating, arrays and archives also at once.
        ConfigError: batch_size is not an integer >= 1, or differs from the model's fixed batch
            size.
    """
    inputs = tuple(inputs)
    if isinstance(dataset, Dataset):
        return replace(dataset, inputs=inputs)
    if isinstance(dataset, (str, os.PathLike)):
        return Dataset(inputs, *open_archive(Path(dataset), inputs, batch_size))
    if isinstance(dataset, Mapping):
        return open_arrays(convert_mapping(dataset), inputs, batch_size)
    if is_array(dataset):
        if len(inputs) != 1:
            raise DataError(
                f"The data set is one array, but the model has {len(inputs)} inputs "
                f"({list_names(inputs)}); pass a dict of arrays.",
                code="RQ302",
            )
        arrays = {inputs[0].name: to_array(dataset, inputs[0].name, "the data set")}
        return open_arrays(arrays, inputs, batch_size)
    if batch_size is not None:
        raise ConfigError(
            "batch_size applies to arrays, .npz and .npy files; an iterable yields batches as they "
            "are.",
            code="RQ301",
        )
    read_item = read_by_index(dataset) if is_sequence(dataset) else None
    return Dataset(inputs, find_length(dataset), open_iterable(dataset), read_item=read_item)


def open_arrays(
    arrays: Mapping[str, Any], inputs: tuple[InputInfo, ...], batch_size: int | None
) -> Dataset:
    """Cut arrays with samples along axis 0 into batches."""
    length, read_item = cut_arrays(arrays, inputs, batch_size)
    return Dataset(inputs, length, lambda: map(read_item, range(length)), read_item=read_item)
