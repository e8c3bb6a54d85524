"""Prepared PyTorch models -> what runs on integers: `convert(prepared)`.

Behind `prepare` and `prepare_qat`; what they return knows how it is converted.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from relayquant.errors import ModelError


@runtime_checkable
class Convertible(Protocol):
    """What a function of this package that prepares returns."""

    def to_quantized(self) -> Any:
        """The quantized model."""
        ...


def convert(prepared: Convertible) -> Any:
    """The quantized model of what `prepare` or `prepare_qat` returned.

    Of `prepare`: an object that is called like the model. Where `torch.export` takes the model as a
    whole, it is one integer module, the same that `quantize` gives (`.mod`). Elsewhere the user's
    code runs, and its straight runs of operators are integer modules (`.runs`), called without
    copies; where one feeds the next, integers pass. `.modules` are the integer modules of either
    kind, and `.ledger` says of every operator, also of those in PyTorch, what became of it.

    Raises:
        ModelError: `prepared` is nothing of that kind.
        ConfigError: a line of the QConfigMapping decides for no operator.
    """
    if not isinstance(prepared, Convertible):
        raise ModelError(
            f"relayquant.torch.convert takes what relayquant.torch.prepare returned, got "
            f"{type(prepared).__name__}. For a module that is neither calibrated nor trained, use "
            "relayquant.torch.quantize(module, example_inputs, dataset)."
        )
    return prepared.to_quantized()
