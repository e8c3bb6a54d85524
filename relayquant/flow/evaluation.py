"""After the data flow: how near a quantized module is to its float model and to the numpy
reference, which operators cost accuracy, and what the hardware's registers have to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm

from relayquant.analysis.accumulators import AccumulatorReport, measure_sums
from relayquant.analysis.compare import CompareReport, compare_modules
from relayquant.analysis.loader import bind_loader
from relayquant.analysis.sensitivity import Metric, SensitivityReport, measure_sensitivity
from relayquant.analysis.verify import Verifier, VerifyReport
from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback, CallbackList
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import lower_alone
from relayquant.ir.ledger import Ledger, read_ledger
from relayquant.ir.rewrite.bind import Model, bind_model, split_model
from relayquant.ir.rewrite.entry import name_main
from relayquant.stages.compilation import compile, compile_draft
from relayquant.stages.equalization.cross_layer import add_exponents, read_exponents, scale_layers
from relayquant.stages.preparation import prepare_module
from relayquant.stages.prepared import PreparedModel


@check_arguments
def ledger(mod: Model) -> Ledger:
    """What became of every operator of the float model.

    Raises:
        ModelError: the module was not quantized by this package.
    """
    return read_ledger(bind_model(mod))


@check_arguments
def verify(mod: Model, inputs: Any, target: Any = None) -> VerifyReport:
    """Compare the module compiled for `target` (one this machine can run) with the numpy reference.

    Integer values must be equal bit for bit, floats within 1e-4 relative.

    Raises:
        DataError: the inputs do not fit the module.
    """
    return compile_to_verify(bind_model(mod), target).compare(inputs)


def compile_to_verify(mod: tvm.IRModule, target: Any = None) -> Verifier:
    """`verify` of a module compiled once, whose `compare` takes one inputs after the other."""
    return Verifier(mod, lambda module: compile(module, target))


@check_arguments
def compare(
    mod: Model,
    params: Mapping[str, Any] | None,
    qmod: Model,
    dataset: Any,
) -> CompareReport:
    """How far every value of a quantized module is from the float model, and where it starts.

    Args:
        mod: The float module, as it was given to `quantize`.
        params: Parameters of the float module; None if they are bound.
        qmod: What `quantize` made of it.
        dataset: As for `quantize`; a few dozen samples tell enough.

    Raises:
        ModelError: the quantized module was not made from this float module.
        DataError: the data does not fit the model.
    """
    mod, params = split_model(mod, params)
    canonical, quantized = align_modules(mod, bind_model(qmod), params)
    data = open_dataset(dataset, describe_inputs(canonical))
    # The first batch is read: what is wrong with the data shows before anything is compiled.
    return compare_modules(canonical, quantized, data, bind_loader(data, compile_draft))


def align_modules(
    mod: tvm.IRModule, quantized: tvm.IRModule, params: Mapping[str, Any] | None
) -> tuple[tvm.IRModule, tvm.IRModule]:
    """The canonical float module with its values in the units that they have in the quantized one,
    and that, its function called main.

    Raises:
        ModelError: the quantized module has no ledger.
    """
    read_ledger(quantized)
    canonical, quantized = prepare_module(mod, params), name_main(quantized)
    missing = add_exponents(read_exponents(quantized), read_exponents(canonical), sign=-1)
    return scale_layers(canonical, missing), quantized


@check_arguments
def sensitivity(
    prepared: PreparedModel,
    dataset: Any,
    metric: Metric | None = None,
    *,
    samples: int = 64,
    callbacks: Iterable[Callback] | Callback = (),
) -> SensitivityReport:
    """Rank operators by the damage that quantizing each alone does.

    Args:
        prepared: A calibrated model, as `relayquant.calibrate` returned it.
        dataset: As for `quantize`.
        metric: `(float outputs, quantized outputs) -> float`, higher is better; both are lists with
            one array for each output of the model, samples along axis 0. None: SQNR of the worst
            output in dB.
        samples: Measure on the first batches that hold so many samples; time grows with samples x
            operators.
        callbacks: Told of progress.

    Raises:
        ConfigError: the model is not calibrated, or the metric returns no number.
        DataError: the data does not fit the model.
    """
    if not isinstance(prepared, PreparedModel):
        raise ConfigError(
            f"sensitivity got {type(prepared).__name__}; it takes a calibrated model: "
            "calibrate(prepare(mod, params), dataset).",
            code="RQ105",
        )
    data = open_dataset(dataset, describe_inputs(prepared.mod))
    return measure_sensitivity(
        prepared, data, metric, samples=samples, callbacks=CallbackList.of(callbacks)
    )


@check_arguments
def accumulator_report(model: PreparedModel | Model, dataset: Any) -> AccumulatorReport:
    """Which sums of products do not fit the accumulators that the backend has, by channel.

    Args:
        model: A calibrated model, or what `quantize` or `lower` returned.
        dataset: As for `quantize`.

    Raises:
        ConfigError: the model is not calibrated.
        DataError: the data does not fit the model.
    """
    known = lower_alone(model) if isinstance(model, PreparedModel) else bind_model(model)
    return measure_sums(known, dataset)
