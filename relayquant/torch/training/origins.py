"""Which tensors of a PyTorch module the constants of a prepared model come from: what is frozen in
the module stays frozen in training, and what is tied stays tied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from relayquant.errors import ConfigError
from relayquant.ir.rewrite.function import read_sources
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.interpreter.program import ConstantPlace

#: relative difference of a weight from itself, after a batch norm was folded into it and taken out
TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Tie:
    """A constant that is another one, with its axes in another order.

    Attributes:
        source: Name of the other one, as in `named_parameters` of the trainable module.
        axes: Axes of the other one, in the order in which this one has them.
    """

    source: str
    axes: tuple[int, ...]


class Origins:
    """Tensors of a module, by the values of a prepared model that read them."""

    def __init__(self, module: nn.Module, prepared: PreparedModel) -> None:
        self.sources = read_sources(prepared.mod["main"])
        self.operators = {operator.name: operator.values for operator in prepared.plan.operators}
        self.tensors: dict[str, torch.Tensor] = {
            **dict(module.named_buffers(remove_duplicate=False)),
            **dict(module.named_parameters(remove_duplicate=False)),
        }

    def list_read(self, values: Iterable[str]) -> list[torch.Tensor]:
        """Return the tensors that values read, each once, in order. If they read none, what else
        the nodes read that they come from: a view is the last value of a matrix product.
        """
        rows = [self.sources[value] for value in values if value in self.sources]
        if not any(row.get("constants") for row in rows):
            nodes = {row["node"] for row in rows}
            rows = [row for row in self.sources.values() if row["node"] in nodes]
        names = (name for row in rows for name in row.get("constants", ()))
        read = (self.tensors[name] for name in names if name in self.tensors)
        return list({id(tensor): tensor for tensor in read}.values())

    def find_constant(self, key: str, size: int) -> list[torch.Tensor]:
        """Return the tensors that a constant of a quantized operator is made from. The one with as
        many elements is the weight, and the others, of a bias and a batch norm, are the bias.
        """
        name, _, part = key.rpartition(":")
        read = self.list_read(self.operators.get(name, (name,)))
        if part == "bias":
            weight = max(read, key=lambda each: each.ndim, default=None)
            return [each for each in read if each is not weight] or read
        return [each for each in read if each.numel() == size] or read

    def find_float(self, place: ConstantPlace, value: np.ndarray) -> list[torch.Tensor]:
        """Return the tensors that a constant of a float operator may be: of several with as many
        elements, those with the same values.
        """
        read = [each for each in self.list_read([place[0]]) if each.numel() == value.size]
        ordered = np.sort(value, axis=None)
        same = [each for each in read if np.array_equal(sort_values(each), ordered)]
        return same or read

    def covers(self, found: Iterable[Sequence[torch.Tensor]]) -> bool:
        """Whether all trained tensors that the model reads are among those found. Then a constant
        of unknown origin is none that the module would train.
        """
        known = {id(tensor) for tensors in found for tensor in tensors}
        names = {name for row in self.sources.values() for name in row.get("constants", ())}
        read = (self.tensors[name] for name in names if name in self.tensors)
        return all(id(each) in known or not each.requires_grad for each in read)

    def find_norm(self, name: str) -> list[torch.Tensor]:
        """Return gamma and beta of a batch norm. Nothing if it has none."""
        return [each for each in self.list_read([name]) if isinstance(each, nn.Parameter)]


def is_frozen(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a constant that is made from these tensors must not change. One of unknown origin
    may.
    """
    return bool(tensors) and not any(each.requires_grad for each in tensors)


def find_ties(
    origins: Mapping[str, Sequence[torch.Tensor]], values: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Tie]]:
    """Find the constants that are one tensor of the module. Parts of a tensor, such as the three
    projections of an attention, are not tied to each other.

    Args:
        origins: Name of a trained constant -> what it is made from.
        values: Name -> its float values.

    Raises:
        ConfigError: they became different in the preparation. Names them.
    """
    first: dict[int, str] = {}
    for name, tensors in origins.items():
        if len(tensors) != 1 or tensors[0].numel() != values[name].numel():
            continue
        source = first.setdefault(id(tensors[0]), name)
        if source == name:
            continue
        axes = find_order(values[source], values[name])
        if axes is None:
            raise ConfigError(
                f"prepare_qat: the constants {source!r} and {name!r} are one parameter of the "
                "module, and became different when it was prepared (a batch norm folded into it, "
                "or scales between channels), so that they cannot train as one. Pass "
                "effort='fast' and batch_norm='live'; or give each its own: module.weight = "
                "torch.nn.Parameter(module.weight.detach().clone()).",
                code="RQ206",
            )
        yield name, Tie(source, axes)


def find_order(source: torch.Tensor, other: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of axes in which a tensor equals another one. None: in no order."""
    for axes in itertools.permutations(range(source.ndim)):
        turned = source.permute(axes)
        if turned.shape == other.shape and torch.allclose(turned, other, rtol=TOLERANCE, atol=0):
            return axes
    return None


def sort_values(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's values as float32, in order."""
    return np.sort(tensor.detach().float().numpy(), axis=None)
