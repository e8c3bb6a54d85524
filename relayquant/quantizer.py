"""The one call: all stages of `pipeline` in order, then a look at what came out: the guard, or the
search that a metric asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import tvm

from relayquant.analysis.sensitivity import Metric
from relayquant.arguments import check_arguments
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.datasets import SpreadSample, open_dataset
from relayquant.datasets.inputs import describe_inputs
from relayquant.effort import Effort
from relayquant.errors import AccuracyWarning, ConfigError, format_count, warn_user
from relayquant.events import Callback, CallbackList
from relayquant.pipeline import quantize_once, run_stage
from relayquant.prepared import PreparedModel
from relayquant.qtypes import QParams
from relayquant.refine.guard import Guard, GuardSettings, guard_module, start_sample
from relayquant.refine.search import MAX_DROP, fallback
from relayquant.refine.speed import Stopwatch, keep_faster_float


@check_arguments
def quantize(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    *,
    backend: BackendConfig | str | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    calibration: Any = None,
    effort: Effort | str = Effort.BALANCED,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
    parameters: Mapping[str, QParams] | None = None,
    callbacks: Iterable[Callback] | Callback = (),
    strict: bool = False,
    checkpoint: str | Path | None = None,
    executor: futures.Executor | None = None,
    guard: Guard | GuardSettings | None = None,
    metric: Metric | None = None,
    max_drop: float = MAX_DROP,
    budget: float | None = None,
    validation: Any = None,
    search_state: str | Path | None = None,
    keep_faster: bool = False,
) -> tvm.IRModule:
    """Quantize a float model after training, or what is still float of one that is quantized in
    part.

    Args:
        mod: Module with a Relax function main, float32; the only function, or the only public one,
            may have another name and is main in what is returned. What has quantization parameters
            already (quantize and dequantize operators) keeps them.
        params: {name: array}, or None when they are bound already.
        dataset: Representative inputs, a few hundred samples: anything re-iterable that yields
            dicts {input: array}, tuples in input order, or single arrays; a path to an .npz; or a
            function that returns an iterator. None where nothing needs data: every quantized
            operator gets the parameters of its data at run time (`QSpec(is_dynamic=True)`) or
            from the user (`Fixed`). The guard has nothing to look at then.
        backend: "x86", "arm", "generic", or a BackendConfig; None for that of this machine. To run
            elsewhere, `relayquant.default_backend(target)`.
        qconfig_mapping: Which operator is quantized how; the backend's default for all when None.
        calibration: Observer, or callable `(ValueInfo, samples) -> QParams`, for all activations;
            a callable with a third parameter gets a `CalibrationContext`: the calibration graph,
            and what was picked so far.
        effort: "fast", "balanced" or "best": how much work calibration does for accuracy; see
            `Effort`.
        input_dtypes, output_dtypes: {name or index: integer dtype} of what main is to take and
            return as integers, e.g. {"x": "uint8"} or {0: "uint8"}. `ledger(qmod).inputs` and
            `.outputs` hold their scales and zero points.
        parameters: {value: QParams} that are not calibrated any more; see `load_qparams`.
        callbacks: See `relayquant.events.Callback`.
        strict: Raise one error that lists every operator whose QConfig cannot be served, instead of
            keeping them in float.
        checkpoint, executor: See `calibrate`.
        guard: What happens when the integer model does not follow the float model on some of the
            calibration samples. None: operators that cause it are put back to float, with a
            warning; with effort "fast", and where it follows but loosely, there is only the
            warning. See `Guard`, `GuardSettings`.
        metric: `(float outputs, quantized outputs) -> float`, higher is better, over all of
            `validation`: the fewest operators are put back to int16 or float that keep it within
            `max_drop` of what the float model has against itself, with a warning if `budget`
            seconds (`relayquant.minutes`) do not suffice. It takes the place of the guard. See
            `relayquant.fallback`, also for `validation` and `search_state`;
            `ledger(qmod).search.mapping` makes the module again.
        keep_faster: Time the kernels of both models on this machine, on the first batch, and keep
            operators in float that are faster so; only if the whole model is. What was measured is
            in `ledger(qmod).speed`, with the mapping that makes the module again anywhere.

    Returns:
        A module with the same inputs and outputs that computes on integers. `tvm.compile` takes it
        as it is; `relayquant.compile` makes it fast. It carries its `ledger`. A weight that two
        operators use is one constant, also when saved, unless its rounding is fitted to the data
        of each use, which efforts other than "fast" do: then there are two of integers.

    Raises:
        ModelError, DataError, ConfigError: the model, the data or the configuration is wrong.
    """
    events, settings = CallbackList.of(callbacks), GuardSettings.of(guard)
    if keep_faster and (input_dtypes or output_dtypes or strict or dataset is None):
        raise ConfigError(
            "quantize(keep_faster=True) puts operators back to float and runs the model on its "
            "data: strict, input_dtypes, output_dtypes and dataset=None do not go with it."
        )
    if metric is None:
        unused = {
            "max_drop": None if max_drop == MAX_DROP else max_drop,
            "budget": budget,
            "validation": validation,
            "search_state": search_state,
        }
        names = [name for name, value in unused.items() if value is not None]
        if names:
            raise ConfigError(
                f"quantize got {', '.join(names)} but no metric: without one nothing is searched. "
                "Pass metric=, a function (float outputs, quantized outputs) -> number."
            )
    if metric is not None:
        if input_dtypes or output_dtypes or strict or parameters or checkpoint or executor:
            raise ConfigError(
                "quantize(metric=) quantizes several times and may put any operator back to float: "
                "strict, input_dtypes, output_dtypes, parameters, checkpoint and executor do not "
                "apply. Search without them, then quantize with "
                "qconfig_mapping=QConfigMapping.from_dict(ledger(qmod).search.mapping) and them."
            )
        found = fallback(
            mod,
            params,
            dataset,
            metric,
            max_drop=max_drop,
            budget=budget,
            validation=validation,
            backend=backend,
            qconfig_mapping=qconfig_mapping,
            calibration=calibration,
            effort=effort,
            search_state=search_state,
            keep_faster=keep_faster,
            callbacks=events,
        )
        if not found.is_met:
            remedy = "Allow a larger max_drop; there is nothing left to put back."
            if budget is not None:
                remedy = "A longer budget may help; it goes on from search_state, if one is given."
            warn_user(
                f"The metric is {found.score:.6g} and not within {max_drop:g} of "
                f"{found.float_score:.6g} with "
                f"{format_count(len(found.reverted), 'operator')} put back. {remedy}",
                AccuracyWarning,
            )
        return found.mod
    samples: list[SpreadSample] = []

    def watch(prepared: PreparedModel, dataset: Any) -> Any:
        if dataset is None or settings.find_action(prepared.effort) is Guard.OFF:
            return dataset
        samples.append(start_sample(prepared, settings))
        return samples[0].watch(open_dataset(dataset, describe_inputs(prepared.mod)))

    prepared, qmod = quantize_once(
        mod,
        params,
        dataset,
        backend=backend,
        qconfig_mapping=qconfig_mapping,
        calibration=calibration,
        effort=effort,
        input_dtypes=input_dtypes,
        output_dtypes=output_dtypes,
        parameters=parameters,
        callbacks=events,
        strict=strict,
        checkpoint=checkpoint,
        executor=executor,
        watch=watch,
    )
    if dataset is None:
        return qmod
    if keep_faster:
        batch = next(iter(open_dataset(dataset, describe_inputs(prepared.mod))))
        stopwatch = Stopwatch.on_this_machine([*batch.values()])
        prepared, qmod = run_stage(
            events,
            "keep faster",
            lambda: keep_faster_float(prepared, qmod, stopwatch, dataset, calibration=calibration),
        )
    return run_stage(
        events,
        "guard",
        lambda: guard_module(
            prepared,
            qmod,
            dataset,
            settings,
            calibration=calibration,
            strict=strict,
            callbacks=events,
            sample=samples[0] if samples and samples[0].kept else None,
        ),
    )
