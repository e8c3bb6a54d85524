"""PyTorch module -> exported program -> Relax module.

PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.base.garbage import spare_older_objects
from relayquant.base.optional import needed
from relayquant.errors import ModelError
from relayquant.formats.readers import import_torch

#: Part of torch.export's message if an earlier trace left a tensor where the module reads it.
LEFT_BEHIND = "fake tensor in the exported program"


@check_arguments
def export(
    module: Any,
    example_inputs: tuple[Any, ...],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Any:
    """Export a module in evaluation mode to a `torch.export.ExportedProgram`, which `load` accepts.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: torch.export cannot export the module.
    """
    check_module(module)
    import torch  # pyright: ignore[reportMissingImports]

    try:
        with evaluation_mode(module), torch.no_grad():
            return torch.export.export(
                module,
                example_inputs,
                dict(example_kwargs) if example_kwargs else None,
                dynamic_shapes=dynamic_shapes,
            )
    except Exception as error:
        message = (
            f"torch.export cannot export {type(module).__name__}: {type(error).__name__}: {error}"
        )
        if LEFT_BEHIND in str(error):
            from relayquant.torch.state import ADVICE

            message += f" It keeps state in a global, a hook or a closure. {ADVICE}"
        raise ModelError(message, code="RQ207") from error


def load(program: Any) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Convert a program without state to a Relax module. ModelError if it changes something."""
    return import_torch(program, may_have_state=False)


def load_module(
    module: Any,
    example_inputs: tuple[Any, ...],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    may_have_state: bool = False,
) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Convert a module in evaluation mode to a Relax module. Arguments as for `export` and
    `import_torch`.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: torch.export cannot export the module, an operator is not supported, or the
            module keeps state in Python between calls.
    """
    shaping = {"example_kwargs": example_kwargs, "dynamic_shapes": dynamic_shapes}
    with spare_older_objects():
        program = export(module, example_inputs, **shaping)
        loaded = import_torch(program, may_have_state=may_have_state)
    check_state(module, example_inputs, example_kwargs)
    return loaded


def check_state(
    module: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Check that a module in evaluation mode keeps no state in Python. See `check_stateless`.

    Raises:
        ModelError: it does.
    """
    from relayquant.torch.state import check_stateless

    with evaluation_mode(module):
        check_stateless(module, inputs, kwargs)


def free_batch(inputs: Any) -> Any:
    """Return dynamic shapes for example inputs, at any depth of lists and dicts.

    The first axis is free if it holds more than one sample and the module allows it. None if no
    input has such an axis.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

    def free(value: Any) -> Any:
        is_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] > 1
        return {0: torch.export.Dim.AUTO} if is_batch else None

    leaves, form = pytree.tree_flatten(inputs)
    freed = list(map(free, leaves))
    return pytree.tree_unflatten(freed, form) if any(freed) else None


def check_module(module: Any) -> None:
    """Check that the argument is a module of PyTorch.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: it is not a module.
    """
    with needed("Quantizing a PyTorch module needs PyTorch", "relayquant[torch]"):
        import torch  # pyright: ignore[reportMissingImports]
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"relayquant.torch takes a torch.nn.Module, got {type(module).__name__}. "
            "For an exported program or a .pt2 file, use relayquant.load.",
            code="RQ201",
        )


@contextlib.contextmanager
def evaluation_mode(module: Any) -> Iterator[None]:
    """Run `module.eval()`. At the end each submodule returns to its previous mode."""
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()
    except NotImplementedError:  # a program that PyTorch exported, whose mode changes nothing
        for part in training:
            part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
