"""Stored tensors: what a source has -> weights as the network wants them, read when they are used.

A model may be larger than memory is, so tensors are turned, cut and joined before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np

from relayquant.base.grouping import GroupedWeight
from relayquant.errors import format_count

#: The values of a tensor: float32, or a matrix of codes and scales.
Weight: TypeAlias = np.ndarray | GroupedWeight

#: Kind of a tensor of floats. Any other kind is a kind of blocks.
FLOATS = "floats"


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a source.

    Attributes:
        shape: Outermost axis first, (outputs, inputs) for a weight, (experts, outputs, inputs) for
            a stack. Blocks of a stack are read as one matrix.
        kind: `FLOATS`, or how the source stores blocks: "Q4_0". Blocks of equal kinds can be
            joined.
        read: Returns the values. Each call reads them again. Not to be changed by the caller.
        refusal: Why no network can have this tensor, "" if one can: "is I64; supported: ...". A
            file may have it beside the tensors that are used.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Weight]
    refusal: str = ""

    @property
    def is_float(self) -> bool:
        """Whether the values are floats."""
        return self.kind == FLOATS

    def read_floats(self) -> np.ndarray:
        """Read the values as float32, dequantized."""
        weight = self.read()
        return weight.decode() if isinstance(weight, GroupedWeight) else weight

    def take_rows(self, rows: slice | np.ndarray) -> StoredTensor:
        """Return some rows, in the order of an index."""
        count = len(range(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows)
        return StoredTensor(
            (count, *self.shape[1:]), self.kind, lambda: index_rows(self.read(), rows)
        )

    def flatten(self, kept: int = 1) -> StoredTensor:
        """Return the rows of all matrices of a stack (E, N, K), (E * N, K). `kept`: axes behind the
        joined ones.
        """
        split = len(self.shape) - kept
        shape = (prod(self.shape[:split]), *self.shape[split:])

        def read() -> Weight:
            weight = self.read()
            return weight if isinstance(weight, GroupedWeight) else weight.reshape(shape)

        return StoredTensor(shape, self.kind, read, self.refusal)

    def transpose(self) -> StoredTensor:
        """Return a matrix, or each of a stack, with its axes swapped, as floats."""
        *outer, rows, columns = self.shape
        shape = (*outer, columns, rows)
        return StoredTensor(shape, FLOATS, lambda: self.read_floats().swapaxes(-1, -2))

    def map_floats(self, function: Callable[[np.ndarray], np.ndarray]) -> StoredTensor:
        """Return a function of the values, as floats. It changes no shape."""
        return StoredTensor(self.shape, FLOATS, lambda: function(self.read_floats()))


def index_rows(weight: Weight, rows: slice | np.ndarray) -> Weight:
    """Return some rows of a weight."""
    if not isinstance(weight, GroupedWeight):
        return weight[rows]
    zero_point = weight.zero_point
    return replace(
        weight,
        codes=weight.codes[rows],
        scale=weight.scale[rows],
        zero_point=zero_point[rows] if zero_point.ndim else zero_point,
    )


def join_tensors(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Join tensors of one kind by rows."""
    if len(tensors) == 1:
        return tensors[0]
    first = tensors[0]
    rows = sum(tensor.shape[0] for tensor in tensors)
    return StoredTensor(
        (rows, *first.shape[1:]),
        first.kind,
        lambda: join_weights([tensor.read() for tensor in tensors]),
    )


def join_weights(weights: Sequence[Weight]) -> Weight:
    """Join weights of one kind by rows."""
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if not grouped:
        return np.concatenate([np.asarray(weight) for weight in weights])
    first = grouped[0]
    zero_point = first.zero_point
    if zero_point.ndim:
        zero_point = np.concatenate([weight.zero_point for weight in grouped])
    return replace(
        first,
        codes=np.concatenate([weight.codes for weight in grouped]),
        scale=np.concatenate([weight.scale for weight in grouped]),
        zero_point=zero_point,
    )


@dataclass(frozen=True, eq=False)
class CausalLMParams(Mapping[str, np.ndarray]):
    """Name of a parameter -> its values, float32, read at each access and not kept."""

    tensors: Mapping[str, StoredTensor]

    def __getitem__(self, name: str) -> np.ndarray:
        """Read the values of one parameter.

        Raises:
            ModelError: its file is gone or truncated.
        """
        return np.ascontiguousarray(self.tensors[name].read_floats())

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"CausalLMParams({format_count(len(self), 'tensor')})"
