"""The one call: arguments -> settings -> quantized module of `pipeline`, with the guard, or with
the search if there is a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm

from relayquant.analysis.sensitivity import Metric
from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback, SummaryEvent
from relayquant.base.garbage import spare_older_objects
from relayquant.base.qtypes import QParams
from relayquant.base.storage.lock import reserve_file
from relayquant.config import (
    BackendConfig,
    Effort,
    Guard,
    GuardSettings,
    ModelType,
    Precision,
    QConfigMapping,
)
from relayquant.errors import AccuracyWarning, ConfigError, format_count, warn_user
from relayquant.flow.pipeline import quantize_model, search_module
from relayquant.flow.settings import DEFAULT_CALLBACKS, MAX_DROP, QuantizeSettings
from relayquant.ir.float_precision import ask_float_precision
from relayquant.ir.ledger import read_ledger
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.stages.streams import open_streams


@check_arguments
def quantize(
    mod: Model,
    params: Mapping[str, Any] | None,
    dataset: Any,
    *,
    backend: BackendConfig | str | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    observer: Any = None,
    effort: Effort | str = Effort.BALANCED,
    model_type: ModelType | str | None = None,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
    qparams: Mapping[str, QParams] | None = None,
    strict: bool = False,
    guard: Guard | GuardSettings | str | None = None,
    metric: Metric | None = None,
    max_drop: float = MAX_DROP,
    budget: float | None = None,
    validation_dataset: Any = None,
    search_state: str | Path | None = None,
    only_if_faster: bool = False,
    float_precision: Precision = Precision.FLOAT32,
    workers: futures.Executor | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Iterable[Callback] | Callback = DEFAULT_CALLBACKS,
) -> tvm.IRModule:
    """Quantize a float model after training, or the float part of a partly quantized model.

    Args:
        mod: Module with a Relax function main, float32. The only function, or the only public one,
            may have another name and is main in the result. Values that already have quantization
            parameters (quantize and dequantize operators) keep them. Or the pair that `load`
            returns.
        params: {name: array}; None if they are bound already, or in the pair.
        dataset: Representative inputs, a few hundred samples: anything re-iterable that yields
            dicts {input: array}, tuples in input order, or single arrays; a path to an .npz; or a
            function that returns an iterator. None if no operator needs data: the parameters of all
            data are computed at run time (`QSpec(is_dynamic=True)`) or given by the user (`Fixed`).
            Without data there is no guard.
        backend: "x86", "x86-7bit", "arm", "generic", or a BackendConfig; None for the backend of
            this machine. To run elsewhere, `relayquant.get_backend_config(target=target)`.
        qconfig_mapping: Which operator is quantized how. None: the backend's default for all.
        observer: For all activations: an observer, its name ("minmax", "average-max",
            "moving-average", "percentile", "mse", "kl"), or a callable `(ValueInfo, samples) ->
            QParams`. A callable with a third parameter gets a `CalibrationContext`: the
            calibration graph and the parameters chosen so far.
        effort: "fast", "balanced" or "best": how much work calibration does for accuracy; see
            `Effort`.
        model_type: "transformer" for transformers: only matrix products and convolutions are
            quantized (unless a `qconfig_mapping` says otherwise), and a part of the range of the
            channels that products with weights read moves to the weights (`smooth_activations`).
            More accurate, less fast. "general": all operators are quantized. None: "transformer" if
            the model has attention and a few channels of a norm are far larger than the rest, and
            neither a mapping nor `strict` nor integer inputs or outputs are asked for; else
            "general".
        input_dtypes, output_dtypes: {name or index: integer dtype} for inputs and outputs of main
            that are integers, e.g. {"x": "uint8"} or {0: "uint8"}. `ledger(qmod).inputs` and
            `.outputs` hold their scales and zero points.
        qparams: {value: QParams} for values that are not calibrated; see `load_qparams`.
        callbacks: Called with progress, and with one line at the end; see
            `relayquant.Callback`. By default the line goes to standard error; () is
            silent.
        strict: Raise one error that lists every operator whose QConfig is not supported, instead of
            keeping them in float.
        checkpoint, workers: See `calibrate`.
        guard: What happens if the integer model deviates from the float model on samples of the
            data. None: operators that cause it read their data's range at run time, or get weights
            of 8 bits instead of fewer; if neither is enough, they are reverted to float. There is a
            warning. With effort "fast", or if the model deviates only slightly, there is only the
            warning. See `Guard`, `GuardSettings`.
        metric: `(float outputs, quantized outputs) -> float`, higher is better. Both are lists with
            one array for each output of the model, samples along axis 0 in the order of
            `validation_dataset`. For an accuracy, close over the labels: `lambda expected, got:
            (got[0].argmax(1) == labels).mean()`. The search reverts the fewest operators to int16
            or float that keep the metric within `max_drop` of the float model compared with itself.
            Operators whose weights have fewer than 8 bits get weights of 8 bits instead, where that
            is enough. With a metric, the guard is off. `ledger(qmod).search` has the result, and
            its `mapping` makes the same module again.
        max_drop: How far the metric may fall below the metric of the float model compared with
            itself.
        budget: Seconds after which the search starts no further trial. The best mapping so far is
            still built and measured, with a warning if the bound is not met. None: no limit.
        validation_dataset: Samples for the metric, or for the guard if there is no metric; None:
            `dataset`. Samples that calibration did not read say more about other data.
        search_state: A JSON file that is written after every measurement: the measurements, and the
            best mapping so far. If the file exists, the search continues from it, provided that
            model, settings, data and the float model's metric are the same. One search at a time
            uses it.
        only_if_faster: Time the kernels of both models on this machine, on the first batch, and
            keep operators in float that are faster in float. This is done only if the whole model
            gets faster. With a metric, it must also stay within the bound or get no worse. The
            measurements are in `ledger(qmod).speed`, with the mapping that makes the same module
            anywhere.
        float_precision: Operands of the convolutions and matrix products that stay in float. With
            "bf16", `compile` rounds them to bfloat16 as its own `precision="bf16"` does, on CPUs
            that have the instructions. On other CPUs `compile` raises an error, unless it is called
            with `precision="float32"`. Calibration, guard, metric and `only_if_faster` run these
            operators in float32. The module keeps the setting in files of modules, not in ONNX.

    Returns:
        A module with the same inputs and outputs that computes on integers. `tvm.compile` accepts
        it, and `relayquant.compile` makes it fast. It has a `ledger`. A weight that two operators
        use is one constant, also in a file. With efforts other than "fast", its rounding may be
        fitted to the data of each use. Then there are two integer weights.

    Raises:
        ModelError, DataError, ConfigError: the model, the data or the configuration is wrong.
    """
    settings = QuantizeSettings.read_call(locals())
    if settings.only_if_faster and dataset is None:
        raise ConfigError(
            "quantize(only_if_faster=True) runs the model on its data: dataset=None does not go "
            "with it.",
            code="RQ102",
        )
    mod, params = split_model(mod, params)
    dataset = open_streams(mod, params, dataset)
    settings = replace(
        settings, validation_dataset=open_streams(mod, params, settings.validation_dataset)
    )
    with spare_older_objects():
        if settings.metric is not None:
            qmod = quantize_within(mod, params, dataset, settings.metric, settings)
        else:
            qmod = quantize_model(mod, params, dataset, settings)
    settings.events.on_summary(SummaryEvent(read_ledger(qmod).summarize()))
    return ask_float_precision(qmod, settings.float_precision)


def quantize_within(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    metric: Metric,
    settings: QuantizeSettings,
) -> tvm.IRModule:
    """Return the module with the fewest reverted operators whose metric is within its bound.
    Warn if there is none.
    """
    with reserve_file(settings.search_state, "search_state", "search"):
        found = search_module(mod, params, dataset, metric, settings)
    if not found.is_met:
        remedy = "Pass a larger max_drop=; there is nothing left to revert."
        if settings.budget is not None:
            remedy = "A longer budget= may help. With search_state= the next search continues."
        warn_user(
            f"The metric is {found.score:.6g} and not within {settings.max_drop:g} of "
            f"{found.float_score:.6g} with "
            f"{format_count(len(found.reverted), 'operator')} reverted. {remedy}",
            AccuracyWarning,
            code="RQ401",
        )
    return found.mod
