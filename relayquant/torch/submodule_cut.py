"""Cut submodules out of a module: a separate graph with a placeholder for each of their calls.

The arguments of a call become further results of the graph, and the results of the call become
further inputs. So a submodule may be anything that PyTorch can call, and the rest is prepared,
calibrated and trained like any module.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from relayquant.errors import ModelError
from relayquant.torch.exporting import evaluation_mode

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TensorTree:
    """Structure of a result, without its tensors.

    Attributes:
        spec: Tree of the leaves.
        rest: The leaves, with None in place of tensors.
        are_tensors: Which leaves are tensors.
    """

    spec: Any
    rest: tuple[Any, ...]
    are_tensors: tuple[bool, ...]

    @staticmethod
    def split(value: Any) -> tuple[TensorTree, Tensors]:
        """Split a value into (tree, tensors)."""
        leaves, spec = pytree.tree_flatten(value)
        marks = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        rest = (None if mark else leaf for leaf, mark in zip(leaves, marks, strict=True))
        tensors = (leaf for leaf, mark in zip(leaves, marks, strict=True) if mark)
        return TensorTree(spec, tuple(rest), marks), tuple(tensors)

    def join(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Insert these tensors into the tree."""
        given = iter(tensors)
        leaves = [
            next(given) if mark else leaf
            for leaf, mark in zip(self.rest, self.are_tensors, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, eq=False)
class SubmoduleCall:
    """One call of a submodule: arguments and results."""

    path: str
    taken: Tensors
    form: TensorTree
    given: Tensors


@dataclass(frozen=True)
class Placeholder:
    """A call of a submodule in a graph.

    Attributes:
        path: Path of the submodule.
        taken: Numbers of the graph's results that are its arguments.
        given: Numbers of the graph's inputs that are its results.
    """

    path: str
    taken: tuple[int, ...]
    given: tuple[int, ...]


def record_calls(
    module: nn.Module, paths: Sequence[str], batches: Sequence[Tensors]
) -> list[list[SubmoduleCall]]:
    """Record the calls of submodules, in order, while the module runs on each batch.

    Raises:
        ModelError: a submodule is not called, or an argument is not a tensor; or the calls differ
            between batches.
    """
    calls: list[list[SubmoduleCall]] = []

    def listen(path: str) -> Iterator[Any]:
        began: list[Tensors] = []

        def begin(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs or not all(isinstance(value, torch.Tensor) for value in args):
                raise ModelError(
                    f"Module {path!r} is to be quantized separately, but is not called with "
                    "positional tensors only. Choose an inner or an outer module.",
                    code="RQ206",
                )
            began.append(tuple(value.detach().clone() for value in args))

        def end(part: nn.Module, args: Any, result: Any) -> None:
            form, tensors = TensorTree.split(result)
            given = tuple(tensor.detach().clone() for tensor in tensors)
            calls[-1].append(SubmoduleCall(path, began.pop(), form, given))

        part = module.get_submodule(path)
        yield part.register_forward_pre_hook(begin, with_kwargs=True)
        yield part.register_forward_hook(end)

    handles = [handle for path in paths for handle in listen(path)]
    try:
        with evaluation_mode(module), torch.no_grad():
            for batch in batches:
                calls.append([])
                module(*batch)
    finally:
        for handle in handles:
            handle.remove()
    check_calls(calls, paths)
    return calls


def check_calls(calls: Sequence[Sequence[SubmoduleCall]], paths: Sequence[str]) -> None:
    """Check that every batch calls the same submodules in the same order.

    Raises:
        ModelError: it does not, or one is not called.
    """
    rows = [[call.path for call in row] for row in calls]
    for path in paths:
        if not any(path in row for row in rows):
            raise ModelError(
                f"Module {path!r} is to be quantized separately, but the model does not call it.",
                code="RQ206",
            )
    for row in rows[1:]:
        if row != rows[0]:
            raise ModelError(
                "The order in which the model calls its standalone and custom modules depends on "
                f"the input: {', '.join(rows[0])} or {', '.join(row)}. A graph cannot do that. "
                "Use relayquant.torch.prepare, which runs the model's own code.",
                code="RQ206",
            )


class Stub(nn.Module):
    """Replaces a submodule: records its arguments and returns given results."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self.visit = visit

    def forward(self, *args: torch.Tensor) -> Any:
        return self.visit.call(args)


class Visit:
    """One run of a module with placeholders."""

    def __init__(self, calls: Sequence[SubmoduleCall]) -> None:
        self._forms = [call.form for call in calls]
        self._count = 0
        self._given: list[torch.Tensor] = []
        self.taken: list[torch.Tensor] = []

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """Start with the results of all calls."""
        self._count, self._given, self.taken = 0, list(given), []

    def call(self, args: Tensors) -> Any:
        """Return the result of the next call."""
        form = self._forms[self._count]
        self._count += 1
        self.taken.extend(value.clone() for value in args)  # it may be written into later
        size = sum(form.are_tensors)
        given, self._given = self._given[:size], self._given[size:]
        return form.join(given)


@dataclass(frozen=True, eq=False)
class CutModule:
    """A module with placeholders.

    Attributes:
        module: After its own inputs it takes the results of submodule calls. After its own results
            it returns their arguments.
        placeholders: The calls.
        form: Structure of its own results.
        count: Number of tensors in its own results.
    """

    module: nn.Module
    placeholders: tuple[Placeholder, ...]
    form: TensorTree
    count: int


def cut_module(
    module: nn.Module, names: Sequence[str], example: Tensors, calls: Sequence[SubmoduleCall]
) -> CutModule:
    """Copy a module with a placeholder for each of these calls, which it makes for an example.

    x -> f(part(g(x))) becomes x, given -> f(given), g(x).

    Args:
        names: Names of the module's inputs.
    """
    twin = copy.deepcopy(module)
    visit, call_twin, count = Visit(calls), twin.forward, len(names)
    stub = Stub(visit)
    place(twin, {call.path: stub for call in calls})

    def forward(*values: torch.Tensor) -> Tensors:
        visit.begin(values[count:])
        _, tensors = TensorTree.split(call_twin(*values[:count]))
        return (*tensors, *visit.taken)

    visit.begin([tensor for call in calls for tensor in call.given])
    with evaluation_mode(twin), torch.no_grad():
        form, results = TensorTree.split(call_twin(*example))
    inputs, outputs = len(names), len(results)
    placeholders: list[Placeholder] = []
    for call in calls:
        taken = tuple(range(outputs, outputs := outputs + len(call.taken)))
        given = tuple(range(inputs, inputs := inputs + len(call.given)))
        placeholders.append(Placeholder(call.path, taken, given))
    given_names = (f"given_{i}" for i in range(inputs - len(names)))
    forward.__signature__ = list_parameters([*names, *given_names])  # names of the graph's inputs
    twin.forward = forward
    return CutModule(twin, tuple(placeholders), form, len(results))


def name_parameter(key: str) -> str:
    """Return a name that torch allows: torch reserves dots."""
    return key.replace(".", "/")


class Parts(nn.ModuleDict):
    """Modules called at placeholders, by path. Dots are written as slashes, because torch does
    not allow dots.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__({name_parameter(path): part for path, part in parts.items()})

    def find(self, path: str) -> nn.Module:
        """Find the module at a path."""
        return self[name_parameter(path)]

    def make_filler(self, placeholders: Sequence[Placeholder]) -> Callable[[int, Any], Tensors]:
        """Make the function that `TorchProgram.run` calls at placeholders."""

        def fill(number: int, taken: Sequence[torch.Tensor]) -> Tensors:
            return TensorTree.split(self.find(placeholders[number].path)(*taken))[1]

        return fill


def place(module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Set modules at these paths, and at other paths of the same module."""
    for path, part in parts.items():
        old = module.get_submodule(path)
        shown = [p for p, m in module.named_modules(remove_duplicate=False) if m is old]
        for each in shown:
            parent, _, name = each.rpartition(".")
            setattr(module.get_submodule(parent), name, part)


def list_parameters(names: Sequence[str]) -> inspect.Signature:
    """Return a signature with these names."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])
