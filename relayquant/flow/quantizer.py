"""The one call: arguments -> settings, which `pipeline` is told, with the guard or with the search
that a metric asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import tvm

from relayquant.analysis.sensitivity import Metric
from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback
from relayquant.base.qtypes import QParams
from relayquant.config import BackendConfig, Effort, Guard, GuardSettings, ModelType, QConfigMapping
from relayquant.errors import AccuracyWarning, ConfigError, format_count, warn_user
from relayquant.flow.pipeline import quantize_model, search_module
from relayquant.flow.settings import MAX_DROP, QuantizeSettings
from relayquant.ir.rewrite.bind import Model, split_model


@check_arguments
def quantize(
    mod: Model,
    params: Mapping[str, Any] | None,
    dataset: Any,
    *,
    backend: BackendConfig | str | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    calibration: Any = None,
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
    validation: Any = None,
    search_state: str | Path | None = None,
    only_if_faster: bool = False,
    workers: futures.Executor | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> tvm.IRModule:
    """Quantize a float model after training, or what is still float of one that is quantized in
    part.

    Args:
        mod: Module with a Relax function main, float32; the only function, or the only public one,
            may have another name and is main in what is returned. What has quantization parameters
            already (quantize and dequantize operators) keeps them. Or the pair that `load` gives.
        params: {name: array}; None when they are bound already, or in the pair.
        dataset: Representative inputs, a few hundred samples: anything re-iterable that yields
            dicts {input: array}, tuples in input order, or single arrays; a path to an .npz; or a
            function that returns an iterator. None where nothing needs data: every quantized
            operator gets the parameters of its data at run time (`QSpec(is_dynamic=True)`) or
            from the user (`Fixed`). The guard has nothing to look at then.
        backend: "x86", "x86-7bit", "arm", "generic", or a BackendConfig; None for that of this
            machine. To run elsewhere, `relayquant.get_backend_config(target=target)`.
        qconfig_mapping: Which operator is quantized how; the backend's default for all when None.
        calibration: Observer, or callable `(ValueInfo, samples) -> QParams`, for all activations;
            a callable with a third parameter gets a `CalibrationContext`: the calibration graph,
            and what was picked so far.
        effort: "fast", "balanced" or "best": how much work calibration does for accuracy; see
            `Effort`.
        model_type: "transformer" for transformers: matrix products and convolutions alone
            are quantized (unless a `qconfig_mapping` says otherwise), and where a few channels of
            what products with weights read are far larger than the rest, the weights take part of
            that (`smooth_activations`). More accurate, less fast. None: all operators.
        input_dtypes, output_dtypes: {name or index: integer dtype} of what main is to take and
            return as integers, e.g. {"x": "uint8"} or {0: "uint8"}. `ledger(qmod).inputs` and
            `.outputs` hold their scales and zero points.
        qparams: {value: QParams} that are not calibrated any more; see `load_qparams`.
        callbacks: See `relayquant.base.events.Callback`.
        strict: Raise one error that lists every operator whose QConfig cannot be served, instead of
            keeping them in float.
        checkpoint, workers: See `calibrate`.
        guard: What happens when the integer model does not follow the float model on samples of
            the data. None: operators that cause it are reverted to float, with a
            warning; with effort "fast", and where it follows but loosely, there is only the
            warning. See `Guard`, `GuardSettings`.
        metric: `(float outputs, quantized outputs) -> float`, higher is better; lists with one
            array for each output of the model, samples along axis 0 in the order of `validation`.
            For an accuracy, close over the labels:
            `lambda expected, got: (got[0].argmax(1) == labels).mean()`. The fewest operators are
            put back to int16 or float that keep it within `max_drop` of what the float model has
            against itself. It takes the place of the guard; `ledger(qmod).search` says what was
            found, and its `mapping` makes the module again.
        max_drop: How far the metric may be below that of the float model against itself.
        budget: Seconds after which no further trial of the search begins; what it has found by
            then is still built and measured, with a warning if the bound is not met. None: no
            bound.
        validation: Samples that the metric is measured on, or, without a metric, that the guard
            looks at; `dataset` if None. What calibration did not read tells more of other data.
        search_state: A JSON file that is written, whole, after every measurement: what was
            measured, and the best mapping so far. A search that finds it there goes on from it, if
            model, settings and data are the same, and the metric of the float model is.
        only_if_faster: Time the kernels of both models on this machine, on the first batch, and
            keep operators in float that are faster so; only if the whole model is, and with a
            metric only as long as that is within the bound, or no worse. What was measured is in
            `ledger(qmod).speed`, with the mapping that makes the module again anywhere.

    Returns:
        A module with the same inputs and outputs that computes on integers. `tvm.compile` takes it
        as it is; `relayquant.compile` makes it fast. It carries its `ledger`. A weight that two
        operators use is one constant, also when saved, unless its rounding is fitted to the data
        of each use, which efforts other than "fast" do: then there are two of integers.

    Raises:
        ModelError, DataError, ConfigError: the model, the data or the configuration is wrong.
    """
    settings = QuantizeSettings(
        backend=backend,
        qconfig_mapping=qconfig_mapping,
        calibration=calibration,
        effort=effort,
        model_type=model_type,
        input_dtypes=input_dtypes,
        output_dtypes=output_dtypes,
        qparams=qparams,
        strict=strict,
        guard=guard,
        metric=metric,
        max_drop=max_drop,
        budget=budget,
        validation=validation,
        search_state=search_state,
        only_if_faster=only_if_faster,
        workers=workers,
        checkpoint=checkpoint,
        callbacks=callbacks,
    )
    if settings.only_if_faster and dataset is None:
        raise ConfigError(
            "quantize(only_if_faster=True) runs the model on its data: dataset=None does not go "
            "with it.",
            code="RQ102",
        )
    mod, params = split_model(mod, params)
    if settings.metric is not None:
        return quantize_within(mod, params, dataset, settings.metric, settings)
    return quantize_model(mod, params, dataset, settings)


def quantize_within(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    metric: Metric,
    settings: QuantizeSettings,
) -> tvm.IRModule:
    """The module with the fewest operators put back that keep the metric within its bound; warns
    where none does.
    """
    found = search_module(mod, params, dataset, metric, settings)
    if not found.is_met:
        remedy = "Allow a larger max_drop; there is nothing left to put back."
        if settings.budget is not None:
            remedy = "A longer budget may help; it goes on from search_state, if one is given."
        warn_user(
            f"The metric is {found.score:.6g} and not within {settings.max_drop:g} of "
            f"{found.float_score:.6g} with "
            f"{format_count(len(found.reverted), 'operator')} put back. {remedy}",
            AccuracyWarning,
            code="RQ401",
        )
    return found.mod
