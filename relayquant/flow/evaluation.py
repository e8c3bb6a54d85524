"""Evaluation after quantization: quantized module (+ float module, data) -> reports on its
accuracy, on the operators that cost accuracy, and on accumulator ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import tvm

from relayquant.analysis.accumulators import AccumulatorReport, measure_sums
from relayquant.analysis.compare import CompareReport, compare_modules
from relayquant.analysis.loader import bind_loader
from relayquant.analysis.sensitivity import Metric, SensitivityReport, measure_sensitivity
from relayquant.analysis.verify import Verifier, VerifyReport
from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback, CallbackList
from relayquant.data import StreamedDataset, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import lower_alone
from relayquant.flow.refine.drift import StreamMeter
from relayquant.ir.ledger import Ledger, read_ledger
from relayquant.ir.rewrite.bind import Model, bind_model, split_model
from relayquant.ir.rewrite.entry import name_main
from relayquant.ir.state import add_initial_state
from relayquant.stages.compilation import compile_draft, compile_silently
from relayquant.stages.equalization.cross_layer import add_exponents, read_exponents, scale_layers
from relayquant.stages.preparation import prepare_module
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.streams import open_streams


@check_arguments
def ledger(mod: Model) -> Ledger:
    """Return the ledger: what became of every operator of the float model.

    Raises:
        ModelError: the module was not quantized by this package.
    """
    return read_ledger(bind_model(mod))


@check_arguments
def verify(mod: Model, inputs: Any, target: Any = None) -> VerifyReport:
    """Compare the module compiled for `target` (one this machine can run) with the numpy reference.

    Integer values must be equal bit for bit, floats within 1e-4 relative.

    Args:
        inputs: As for `relayquant.reference.run`. State that they lack is the initial one.

    Raises:
        DataError: the inputs do not fit the module.
    """
    bound = name_main(bind_model(mod))
    return compile_to_verify(bound, target).compare(add_initial_state(bound, inputs))


def compile_to_verify(mod: tvm.IRModule, target: Any = None) -> Verifier:
    """Compile a module once for `verify`. The result's `compare` takes one set of inputs after
    the other.
    """
    return Verifier(mod, lambda module: compile_silently(module, target))


@check_arguments
def compare(
    mod: Model,
    params: Mapping[str, Any] | None,
    qmod: Model,
    dataset: Any,
) -> CompareReport:
    """Compare every value of a quantized module with the float model, to find where errors start.

    Args:
        mod: The float module, as passed to `quantize`.
        params: Parameters of the float module; None if they are bound.
        qmod: The result of `quantize`.
        dataset: As for `quantize`; a few dozen samples are enough.

    Raises:
        ModelError: the quantized module was not made from this float module.
        DataError: the data does not fit the model.
    """
    mod, params = split_model(mod, params)
    canonical, quantized = align_modules(mod, bind_model(qmod), params)
    streams = open_streams(canonical, None, dataset)
    data = open_dataset(streams, describe_inputs(canonical))
    # The first batch is read here, so that wrong data is reported before anything is compiled.
    report = compare_modules(canonical, quantized, data, bind_loader(data, compile_draft))
    meter = StreamMeter.of(canonical, streams) if isinstance(streams, StreamedDataset) else None
    return report if meter is None else replace(report, stream_sqnr=meter.measure(quantized))


def align_modules(
    mod: tvm.IRModule, quantized: tvm.IRModule, params: Mapping[str, Any] | None
) -> tuple[tvm.IRModule, tvm.IRModule]:
    """Return the canonical float module, with values in the units of the quantized module, and the
    quantized module with its function called main.

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
        samples: Number of samples to measure on, from the first batches. Time grows with samples x
            operators.
        callbacks: Called with progress.

    Raises:
        ConfigError: the model is not calibrated, or the metric does not return a number.
        DataError: the data does not fit the model.
    """
    if not isinstance(prepared, PreparedModel):
        raise ConfigError(
            f"sensitivity got {type(prepared).__name__}; it takes a calibrated model: "
            "calibrate(prepare(mod, params), dataset).",
            code="RQ105",
        )
    streams = open_streams(prepared.mod, None, dataset)
    data = open_dataset(streams, describe_inputs(prepared.mod))
    return measure_sensitivity(
        prepared, data, metric, samples=samples, callbacks=CallbackList.of(callbacks)
    )


@check_arguments
def accumulator_report(model: PreparedModel | Model, dataset: Any) -> AccumulatorReport:
    """Report which sums of products do not fit the backend's accumulators, by channel.

    Args:
        model: A calibrated model, or the result of `quantize` or `lower`.
        dataset: As for `quantize`.

    Raises:
        ConfigError: the model is not calibrated.
        DataError: the data does not fit the model.
    """
    known = lower_alone(model) if isinstance(model, PreparedModel) else bind_model(model)
    return measure_sums(known, dataset)
