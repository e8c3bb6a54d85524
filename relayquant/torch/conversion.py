"""Prepared PyTorch models -> what runs on integers: `convert(prepared)`.

Behind `prepare`, `prepare_qat` and `from_module`; what they return knows how it is converted.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from relayquant.errors import ConfigError


@runtime_checkable
class Convertible(Protocol):
    """What a function of this package that prepares returns."""

    def check_ranges(self) -> None:
        """Raise ConfigError if a range is not known."""
        ...

    def to_quantized(self) -> Any:
        """The quantized model."""
        ...


def convert(prepared: Any) -> Any:
    """The quantized model of what `prepare`, `prepare_qat` or `from_module` gave.

    Of the latter two, the integer module of the normal pipeline, with its ledger; of a model that
    is not quantized, the float module. The module in evaluation mode and the integer module agree
    within one step in every value that is computed from the same integers.

    Of `prepare`, an object that is called like the model. Where `torch.export` takes the model as a
    whole, it is one integer module, the same that `quantize` gives (`.mod`). Elsewhere the user's
    code runs, and its straight runs of operators are integer modules (`.runs`), called without
    copies; where one feeds the next, integers pass. `.modules` are the integer modules of either
    kind, and `.ledger` says of every operator, also of those in PyTorch, what became of it.

    Raises:
        ConfigError: `prepared` is nothing of that kind; training diverged, or has not begun and
            there was no data for calibration; or a line of the QConfigMapping decides for no
            operator.
    """
    if not isinstance(prepared, Convertible):
        raise ConfigError(
            "convert takes what prepare, prepare_qat or from_module gave, got "
            f"{type(prepared).__name__}. For a module that is neither calibrated nor trained, use "
            "relayquant.torch.quantize(module, example_inputs, dataset).",
            code="RQ102",
        )
    prepared.check_ranges()
    return prepared.to_quantized()
