"""PyTorch modules in: what a module keeps between calls in Python is found by calling it.

Around the export, which records one call: an attribute, a list, a global or a counter that the code
of a module changes would be a constant of the integer module. Buffers that change stand in the
program, where the importer refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

from relayquant.errors import ModelError

#: attributes of every module that are no state of the user's
_OWN = frozenset(torch.nn.Module().__dict__)
#: how far apart answers of the same inputs may be, of the largest: sums of float32 in another order
TOLERANCE = 1e-3
#: How many attributes a message shows.
MOST_NAMES = 5
ADVICE = (
    "An integer module keeps nothing between calls. Take the state as an input and return the new "
    "one as an output; or use relayquant.torch.prepare, which runs the code of the model."
)


def check_stateless(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """That a module gives the same answer for the same inputs, whatever it was called with between.

    Args:
        module: In evaluation mode; its parameters and buffers stay as they are.
        args, kwargs: Example inputs, which are not changed.

    Raises:
        ModelError: it does not; names the attributes that a call has changed.
    """

    name, before = type(module).__name__, list_attributes(module)
    try:
        first, _, again = (
            call_module(module, change, args, kwargs or {})
            for change in (torch.clone, add_noise, torch.clone)
        )
    except Exception as error:
        raise ModelError(
            f"{name} cannot be called again after its export: {type(error).__name__}: {error}. "
            f"{ADVICE}",
            code="RQ206",
        ) from error
    if len(first) == len(again) and all(map(is_same_leaf, first, again)):
        return
    names = find_changed(before, list_attributes(module))
    shown = ", ".join(map(repr, names[:MOST_NAMES])) + (", ..." if len(names) > MOST_NAMES else "")
    raise ModelError(
        f"{name} gives another answer when it is called again with the same inputs: it keeps state "
        f"in {shown or 'a global, a hook or a closure, as no attribute has changed'}. {ADVICE}",
        code="RQ206",
    )


def call_module(
    module: torch.nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """The leaves of what a module gives for inputs that are changed; random numbers are the same
    each time.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        given, named = pytree.tree_map_only(torch.Tensor, change, (args, dict(kwargs)))
        return [copy_leaf(leaf) for leaf in pytree.tree_leaves(module(*given, **named))]


def add_noise(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of that form: floats get numbers from 0 to 1 added."""
    return tensor + torch.rand_like(tensor) if tensor.is_floating_point() else tensor.clone()


def copy_leaf(leaf: Any) -> Any:
    """A tensor as it is now, which the module may write into later; anything else itself."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def is_same_leaf(a: Any, b: Any) -> bool:
    """Whether two answers are the same; what is neither a tensor nor a number says nothing."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
            return False  # what the export has left in the state
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        finite = a[a.isfinite()].abs()
        most = float(finite.max()) if finite.numel() else 0.0
        return torch.allclose(a, b, rtol=0, atol=TOLERANCE * most, equal_nan=True)
    is_plain = isinstance(a, int | float | bool | str)
    return type(a) is type(b) and (not is_plain or a == b)


#: path of an attribute -> what it holds, at any depth of lists and dicts
Attributes = Mapping[str, list[tuple[Any, int]]]


def list_attributes(module: torch.nn.Module) -> Attributes:
    """What the user's attributes of a module and of its parts hold now: each object, and how often
    a tensor was written into.
    """
    found: dict[str, list[tuple[Any, int]]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                leaves = pytree.tree_leaves(value)
                found[f"{path}.{name}" if path else name] = [(x, read_version(x)) for x in leaves]
    return found


def read_version(value: Any) -> int:
    """How often a tensor was written into; 0 for what does not count it."""
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def find_changed(before: Attributes, after: Attributes) -> list[str]:
    """Paths of the attributes that hold something else."""
    return [
        path
        for path in (*before, *(path for path in after if path not in before))
        if not is_held(before.get(path, []), after.get(path, []))
    ]


def is_held(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    """Whether an attribute holds what it held."""

    def is_same(old: tuple[Any, int], new: tuple[Any, int]) -> bool:
        (a, count), (b, now) = old, new
        is_plain = isinstance(a, int | float | bool | str)
        return count == now and (a is b or (is_plain and type(a) is type(b) and a == b))

    return len(before) == len(after) and all(map(is_same, before, after))
