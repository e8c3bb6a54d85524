"""How an exported module is called: arguments -> tensors, tensors -> its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from relayquant.errors import DataError


def refuse_arrays(leaves: Iterable[Any]) -> None:
    """Refuse arrays of other packages among the arguments of a module.

    Raises:
        DataError: there is one.
    """
    for leaf in leaves:
        if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
            raise DataError(
                f"An argument of the module is a {type(leaf).__name__}; allowed: a "
                "torch.Tensor. For an array x: torch.from_numpy(x).",
                code="RQ302",
            )


def read_signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Read the parameters of a function, without annotations and with None as each default, which
    any process can unpickle.
    """
    found = inspect.signature(forward).parameters.values()
    return inspect.Signature(
        [
            each.replace(
                annotation=each.empty, default=each.empty if each.default is each.empty else None
            )
            for each in found
        ]
    )


@dataclass(frozen=True, eq=False)
class CallForm:
    """How a module is called, and what it returns, as trees of tensors.

    Attributes:
        inputs: (args, kwargs) of a call, as a tree.
        outputs: The result, as a tree.
        constants: Leaves of the result that are not tensors, by number.
        shapes: Input shapes of the integer module. None for any number of samples.
        signature: Parameters of the float module's `forward`, see `read_signature`.
        named: Parameters that the example inputs give by name.
    """

    inputs: Any
    outputs: Any
    constants: Mapping[int, Any]
    shapes: tuple[tuple[int, ...], ...] | None
    signature: inspect.Signature
    named: tuple[str, ...]

    @staticmethod
    def read(
        module: torch.nn.Module,
        program: Any,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        *,
        is_free: bool,
    ) -> CallForm:
        """Read how an exported module is called. `is_free`: the integer module also has free
        sizes.
        """
        leaves, form = pytree.tree_flatten((inputs, dict(kwargs or {})))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        results = [spec.arg for spec in program.graph_signature.output_specs]
        constants = {i: each.value for i, each in enumerate(results) if hasattr(each, "value")}
        outputs = program.call_spec.out_spec
        signature = read_signature(module.forward)
        named = tuple(kwargs or ())
        return CallForm(form, outputs, constants, None if is_free else shapes, signature, named)

    def place(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, by position or by name as in the example inputs.

        Raises:
            DataError: the float module's `forward` does not take such arguments.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DataError(
                f"The arguments do not fit the model: {error}; allowed: {self.signature}.",
                code="RQ302",
            ) from error
        given = bound.arguments
        named = {name: given.pop(name) for name in self.named if name in given}
        return bound.args, {**bound.kwargs, **named}

    def read_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call, in the order of the model's inputs. Also for a call with
        these tensors only.

        Raises:
            DataError: the structure differs from the example inputs, or an argument is an array of
                another package.
        """
        if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
            return list(args)
        args, kwargs = self.place(args, kwargs)
        try:
            leaves = self.inputs.flatten_up_to((args, kwargs))
        except ValueError as error:
            raise DataError(
                f"The arguments have another structure than the example inputs: {error}",
                code="RQ302",
            ) from error
        refuse_arrays(leaves)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def build_result(self, result: Any) -> Any:
        """Build the model's result from the tensors that it computes."""
        tensors = iter(result if isinstance(result, tuple) else (result,))
        count = self.outputs.num_leaves
        leaves = [self.constants[i] if i in self.constants else next(tensors) for i in range(count)]
        return pytree.tree_unflatten(leaves, self.outputs)
