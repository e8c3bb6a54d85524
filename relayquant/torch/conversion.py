"""Prepared PyTorch models -> what runs on integers: `convert`; or a torch module in reference form
(dequantize - float operator - quantize): `convert_to_reference`.

Behind `prepare`, `prepare_qat` and `from_relax`; what they return knows how it is converted.
PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from relayquant.base.arguments import check_arguments
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import convert_model
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.training import import_trainable


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
    """The quantized model of what `prepare`, `prepare_qat` or `from_relax` gave.

    Of the latter two, the integer module of the normal pipeline, with its ledger; of a model that
    is not quantized, the float module. The module in evaluation mode and the integer module agree
    within one step in every value that is computed from the same integers.

    Of `prepare`, an object that is called like the model. Where `torch.export` takes the model as a
    whole, it is one integer module, the same that `quantize` gives (`.mod`). Elsewhere the user's
    code runs, and its regions of operators are integer modules (`.regions`), called without
    copies; where one feeds the next, integers pass. `.modules` are the integer modules of either
    kind, and `.ledger` says of every operator, also of those in PyTorch, what became of it.

    Raises:
        ConfigError: `prepared` is nothing of that kind; training diverged, or has not begun and
            there was no data for calibration; or a line of the QConfigMapping decides for no
            operator.
    """
    if not isinstance(prepared, Convertible):
        raise ConfigError(
            "convert takes what prepare, prepare_qat or from_relax gave, got "
            f"{type(prepared).__name__}. For a module that is neither calibrated nor trained, use "
            "relayquant.torch.quantize(module, example_inputs, dataset).",
            code="RQ105",
        )
    prepared.check_ranges()
    return prepared.to_quantized()


@check_arguments
def convert_to_reference(prepared: Any) -> Any:
    """The reference form of a calibrated or trained model, as a `torch.nn.Module`.

    It quantizes and dequantizes by the operators of `torch.ops.quantized_decomposed`, those of
    PyTorch's own quantized programs, so that `torch.export` gives a program that other tools read;
    `load` of that program, with `relayquant.lower`, gives the integers that `convert` gives, as far
    as none depends on an operator that stays in float, which PyTorch rounds its own way. Weights
    are integers, in buffers. Run by PyTorch itself, its quantize multiplies by 1 / scale: a value
    half-way between two steps may get the other one.

    Args:
        prepared: A calibrated model, as `relayquant.calibrate` returns it; or what `prepare_qat` or
            `from_relax` gave, as it is trained now.

    Returns:
        A module that takes the model's inputs, in order, and gives what the model gives. It does
        not train: it holds no parameters.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ConfigError: the model is not calibrated, or is nothing of that kind; training diverged.
        ModelError: operators have no torch form; all of them are listed.
    """
    trainable = import_trainable()
    if isinstance(prepared, trainable.TrainableModule):
        prepared.check_ranges()
        return prepared.to_reference()
    if not isinstance(prepared, PreparedModel):
        raise ConfigError(
            "relayquant.torch.convert_to_reference takes a calibrated model, or what prepare_qat "
            f"or from_relax gave, got {type(prepared).__name__}.",
            code="RQ105",
        )
    from relayquant.torch.reference_module import ReferenceModule

    return ReferenceModule(convert_model(prepared), prepared.graph.inputs)
