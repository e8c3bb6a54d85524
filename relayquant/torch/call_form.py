"""How an exported module is called: arguments -> tensors, tensors -> its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True, eq=False)
class CallForm:
    """How a module is called, and what it returns, as trees of tensors.

    Attributes:
        inputs: (args, kwargs) of a call, as a tree.
        outputs: The result, as a tree.
        constants: Leaves of the result that are not tensors, by number.
        shapes: Input shapes of the integer module. None for any number of samples.
    """

    inputs: Any
    outputs: Any
    constants: Mapping[int, Any]
    shapes: tuple[tuple[int, ...], ...] | None

    @staticmethod
    def read(
        program: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, is_free: bool
    ) -> CallForm:
        """Read how an exported module is called. `is_free`: the integer module also has free
        sizes.
        """
        leaves, form = pytree.tree_flatten((inputs, dict(kwargs or {})))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        results = [spec.arg for spec in program.graph_signature.output_specs]
        constants = {i: each.value for i, each in enumerate(results) if hasattr(each, "value")}
        outputs = program.call_spec.out_spec
        return CallForm(form, outputs, constants, None if is_free else shapes)

    def read_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call, in the order of the model's inputs. Also for a call with
        these tensors only.

        Raises:
            DataError: the structure differs from the example inputs, or an argument is an array of
                another package.
        """
        if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
            return list(args)
        try:
            leaves = self.inputs.flatten_up_to((args, dict(kwargs)))
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
