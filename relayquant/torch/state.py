"""Find state that a PyTorch module keeps in Python between calls, by calling the module.

An export records one call. An attribute, a list, a global or a counter that the module's code
changes would become a constant of the integer module. Changing buffers are in the exported program,
and become state of the integer module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

from relayquant.errors import ModelError

#: attributes of every module that are not the user's state
_OWN = frozenset(torch.nn.Module().__dict__)
#: allowed difference of results for equal inputs, relative to the largest: float32 sums in another
#: order
TOLERANCE = 1e-3
#: Number of attributes in a message.
MOST_NAMES = 5
ADVICE = (
    "An integer module keeps tensors only. Register the state as a buffer, or make it an input and "
    "the new state an output; or use relayquant.torch.prepare, which runs the code of the model."
)


def check_stateless(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> None:
    """Check that a module gives the same results for the same inputs, whatever calls were made in
    between.

    Args:
        module: In evaluation mode. Its parameters and buffers are not changed.
        args, kwargs: Example inputs. They are not changed.

    Raises:
        ModelError: the results differ. Names the attributes that a call has changed.
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
        f"{name} gives different results when called again with the same inputs: it keeps state "
        f"in {shown or 'a global, a hook or a closure, as no attribute has changed'}. {ADVICE}",
        code="RQ206",
    )


def call_module(
    module: torch.nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """Call a module with copied inputs and return the leaves of its result. Random numbers are
    the same each time.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), keep_buffers(module):
        torch.manual_seed(0)
        given, named = pytree.tree_map_only(torch.Tensor, change, (args, dict(kwargs)))
        return [copy_leaf(leaf) for leaf in pytree.tree_leaves(module(*given, **named))]


@contextlib.contextmanager
def keep_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Give the buffers of a module and its submodules their tensors and values back at the end.

    A tensor that did not change is not written: PyTorch counts writes, and whoever reads the count
    (`rq.torch.prepare`) would take the buffer for one that the model changes.
    """
    held = [(part, dict(part._buffers)) for part in module.modules()]
    tensors = [each for _, buffers in held for each in buffers.values() if each is not None]
    values = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for part, buffers in held:
            part._buffers.update(buffers)
        for tensor, value in zip(tensors, values, strict=True):
            if not torch.equal(tensor, value):
                tensor.copy_(value)


def add_noise(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same form: numbers from 0 to 1 are added to floats."""
    return tensor + torch.rand_like(tensor) if tensor.is_floating_point() else tensor.clone()


def copy_leaf(leaf: Any) -> Any:
    """Copy a tensor that the module may write into later. Other leaves are returned unchanged."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def is_same_leaf(a: Any, b: Any) -> bool:
    """Whether two results are equal. Leaves that are neither tensors nor numbers count as equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
            return False  # left in the state by the export
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        finite = a[a.isfinite()].abs()
        most = float(finite.max()) if finite.numel() else 0.0
        return torch.allclose(a, b, rtol=0, atol=TOLERANCE * most, equal_nan=True)
    is_plain = isinstance(a, int | float | bool | str)
    return type(a) is type(b) and (not is_plain or a == b)


#: path of an attribute -> its contents, at any depth of lists and dicts
Attributes = Mapping[str, list[tuple[Any, int]]]


def list_attributes(module: torch.nn.Module) -> Attributes:
    """List the present contents of the user's attributes in a module and its submodules:
    objects, and the number of writes into tensors.
    """
    found: dict[str, list[tuple[Any, int]]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                leaves = pytree.tree_leaves(value)
                found[f"{path}.{name}" if path else name] = [(x, read_version(x)) for x in leaves]
    return found


def read_version(value: Any) -> int:
    """Return the number of writes into a tensor. 0 for a tensor that does not count them."""
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def find_changed(before: Attributes, after: Attributes) -> list[str]:
    """Return the paths of the attributes whose contents have changed."""
    return [
        path
        for path in (*before, *(path for path in after if path not in before))
        if not is_held(before.get(path, []), after.get(path, []))
    ]


def is_held(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    """Whether an attribute still has its contents."""

    def is_same(old: tuple[Any, int], new: tuple[Any, int]) -> bool:
        (a, count), (b, now) = old, new
        is_plain = isinstance(a, int | float | bool | str)
        return count == now and (a is b or (is_plain and type(a) is type(b) and a == b))

    return len(before) == len(after) and all(map(is_same, before, after))
