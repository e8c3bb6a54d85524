"""Prepared PyTorch models -> integer modules (`convert`) or a torch module in reference form
(`convert_to_reference`).

The reference form is dequantize - float operator - quantize. The models come from `prepare`,
`prepare_qat` and `from_relax`. PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from relayquant.base.arguments import check_arguments
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import convert_model
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.training.entry import import_trainable


@runtime_checkable
class Convertible(Protocol):
    """The result of a function of this package that prepares a model."""

    def check_ranges(self) -> None:
        """Raise ConfigError if a range is not known."""
        ...

    def to_quantized(self) -> Any:
        """Return the quantized model."""
        ...


def convert(prepared: Any) -> Any:
    """Convert the result of `prepare`, `prepare_qat` or `from_relax` to a quantized model.

    From `prepare_qat` and `from_relax`: the integer module of the normal pipeline with its ledger,
    or the float module if the model is not quantized. The module in evaluation mode and the integer
    module agree within one step in every value that is computed from the same integers.

    From `prepare`: an object that is called like the model. If `torch.export` accepts the whole
    model, it is one integer module (`.mod`), the same as from `quantize`. Otherwise the user's code
    runs, and its regions of operators are integer modules (`.regions`), called without copies.
    Integers pass directly from one region to the next. In both cases `.modules` are the integer
    modules, and `.ledger` describes every operator, including operators that stay in PyTorch.

    Raises:
        ConfigError: `prepared` is something else; training diverged, or has not started and there
            was no calibration data; or a line of the QConfigMapping has no effect.
    """
    if not isinstance(prepared, Convertible):
        raise ConfigError(
            "convert takes the result of prepare, prepare_qat or from_relax, "
            f"got {type(prepared).__name__}. For a module that is neither calibrated nor trained, "
            "use relayquant.torch.quantize(module, example_inputs, dataset).",
            code="RQ105",
        )
    prepared.check_ranges()
    return prepared.to_quantized()


@check_arguments
def convert_to_reference(prepared: Any) -> Any:
    """Return the reference form of a calibrated or trained model, as a `torch.nn.Module`.

    It quantizes and dequantizes with `torch.ops.quantized_decomposed`, as PyTorch's own quantized
    programs do. So `torch.export` gives a program that other tools can read. `load` of that program
    and `relayquant.lower` give the same integers as `convert`, except where they depend on a float
    operator, which PyTorch rounds differently. Weights are integers, in buffers. When PyTorch runs
    the module, its quantize multiplies by 1 / scale, so a value half-way between two steps may get
    the other step.

    Args:
        prepared: A calibrated model from `relayquant.calibrate`, or the current state of a module
            from `prepare_qat` or `from_relax`.

    Returns:
        A module with the model's inputs and outputs. It has no parameters and cannot be trained.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ConfigError: the model is not calibrated, or is something else; training diverged.
        ModelError: operators have no torch form; all of them are listed.
    """
    trainable = import_trainable()
    if isinstance(prepared, trainable.TrainableModule):
        prepared.check_ranges()
        return prepared.to_reference()
    if not isinstance(prepared, PreparedModel):
        raise ConfigError(
            "relayquant.torch.convert_to_reference takes a calibrated model, or the result of "
            f"prepare_qat or from_relax, got {type(prepared).__name__}.",
            code="RQ105",
        )
    from relayquant.torch.interpreter.reference_module import ReferenceModule

    return ReferenceModule(convert_model(prepared), prepared.graph.inputs)
