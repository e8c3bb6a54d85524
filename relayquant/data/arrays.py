"""Data sets of arrays: samples along axis 0 -> batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from relayquant.data.item import (
    Batch,
    InputInfo,
    check_dims,
    check_names,
    list_names,
    to_array,
)
from relayquant.errors import ConfigError, DataError, format_count


def convert_mapping(arrays: Mapping[Any, Any]) -> dict[str, NDArray[Any]]:
    return {str(k): to_array(v, str(k), "the data set") for k, v in arrays.items()}


@dataclass(frozen=True)
class Cut:
    """How arrays with samples along axis 0 are cut into batches."""

    count: int  #: length of axis 0 of every array
    size: int  #: entries per batch
    stacked: bool  #: every entry is a whole batch
    partial: bool  #: a smaller last batch is allowed

    @property
    def batches(self) -> int:
        if self.stacked:
            return self.count
        return -(-self.count // self.size) if self.partial else self.count // self.size

    def sizes(self) -> Iterator[int]:
        """Number of entries of each batch, in order."""
        for i in range(self.batches):
            yield min(self.size, self.count - i * self.size)


def plan_cut(
    shapes: Mapping[str, tuple[int, ...]], inputs: tuple[InputInfo, ...], batch_size: int | None
) -> Cut:
    """Plan how to cut arrays of these shapes. DataError if they do not fit the inputs."""
    if not inputs:
        raise DataError(
            "The model has no inputs, so its results never change and no data applies to it.",
            code="RQ302",
        )
    counts = {name: shape[0] for name, shape in shapes.items() if shape}
    if len(counts) < len(shapes) or len(set(counts.values())) > 1:
        listed = ", ".join(f"{name!r}: {shape}" for name, shape in shapes.items())
        raise DataError(
            f"The arrays of the data set need the same number of samples along axis 0; shapes are "
            f"{listed}.",
            code="RQ302",
        )
    count = next(iter(counts.values()))
    if count == 0:
        raise DataError(
            "The arrays of the data set hold no sample: axis 0 has length 0. Give at least one, "
            "and a few hundred for good ranges.",
            code="RQ303",
        )
    extra = {len(shapes[info.name]) - len(info.shape) for info in inputs}
    if extra not in ({0}, {1}):
        listed = "; ".join(
            f"{i.name!r} has shape {shapes[i.name]}, the model takes {i.shape_text}" for i in inputs
        )
        raise DataError(
            f"The arrays of the data set do not have the rank of the inputs: {listed}. Give arrays "
            "with samples along axis 0 and otherwise the shape of the input.",
            code="RQ302",
        )
    stacked = extra == {1}
    for info in inputs:
        check_dims(shapes[info.name][1:], info.shape[0 if stacked else 1 :], info, "The data set")
    if stacked:
        if batch_size is not None:
            raise ConfigError(
                "batch_size does not apply: the arrays have one axis more than the inputs, so each "
                "entry of axis 0 is a whole batch.",
                code="RQ301",
            )
        return Cut(count, 1, True, False)
    fixed = {info.shape[0] for info in inputs if isinstance(info.shape[0], int)}
    if len(fixed) > 1:
        raise DataError(
            f"The inputs {list_names(inputs)} have different fixed batches {sorted(fixed)}, so "
            "arrays cannot be cut along axis 0; pass a list of dicts, one per sample.",
            code="RQ302",
        )
    if batch_size is not None and (
        isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
    ):
        raise ConfigError(f"batch_size is {batch_size!r}; allowed: an integer >= 1.", code="RQ301")
    size = next(iter(fixed), batch_size or 1)
    if batch_size not in (None, size):
        raise ConfigError(
            f"batch_size is {batch_size}, but the model's batch is fixed at {size}; leave it out.",
            code="RQ301",
        )
    if fixed and count < size:
        raise DataError(
            f"The data set has "
            f"{format_count(count, 'sample')}, fewer than one batch of the model ({size}).",
            code="RQ303",
        )
    return Cut(count, size, False, not fixed)


def cut_arrays(
    arrays: Mapping[str, NDArray[Any]], inputs: tuple[InputInfo, ...], batch_size: int | None
) -> tuple[int, Callable[[int], Batch]]:
    """Return (number of batches, function that returns a batch by its index)."""
    check_names(set(arrays), inputs, "The data set")
    cut = plan_cut({info.name: arrays[info.name].shape for info in inputs}, inputs, batch_size)

    def read_item(index: int) -> Batch:
        start = index * cut.size
        part = index if cut.stacked else slice(start, start + cut.size)
        return {info.name: arrays[info.name][part] for info in inputs}

    return cut.batches, read_item
