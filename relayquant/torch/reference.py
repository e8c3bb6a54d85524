"""A calibrated model as a torch module in reference form: dequantize - float operator - quantize.

Behind calibration or training, beside `relayquant.convert_to_reference`, whose module it computes.
PyTorch is an extra and is imported when the function here is called.
"""

from __future__ import annotations

from typing import Any

from relayquant.base.arguments import check_arguments
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import convert_model
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.training import import_trainable


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
            `from_module` gave, as it is trained now.

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
            f"or from_module gave, got {type(prepared).__name__}.",
            code="RQ102",
        )
    from relayquant.torch.reference_module import ReferenceModule

    return ReferenceModule(convert_model(prepared), prepared.graph.inputs)
