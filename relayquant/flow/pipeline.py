"""The data flow on one page: load -> prepare -> equalize -> annotate -> simulate -> calibrate ->
convert -> expand -> fold -> lower.

The only module that knows all stages. Each stage takes values and gives new ones; none edits its
input. Loops go back: `refine` proposes and judges, and what is built for it is said here.
`steps` and `quantizer` are what users call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.accumulators import fit_scales, measure_sums
from relayquant.analysis.sensitivity import Metric
from relayquant.codegen.eager import EagerModule
from relayquant.config import (
    BackendConfig,
    BiasCorrection,
    Effort,
    Guard,
    Order,
    OverflowBound,
    QConfigMapping,
)
from relayquant.config.observers import Fixed
from relayquant.config.observers.base import NotFiniteError
from relayquant.data import SpreadSample, StreamedDataset, open_share
from relayquant.data.item import describe_inputs
from relayquant.flow.mapping_choice import choose_mapping
from relayquant.flow.refine.drift import follow_streams
from relayquant.flow.refine.guard import (
    Guarded,
    check_samples,
    explain_deviation,
    find_promise,
    judge_look,
)
from relayquant.flow.refine.kept_samples import (
    choose_share,
    finish_watching,
    pick_few,
    start_watching,
    warn_few,
)
from relayquant.flow.refine.levels import keep_nearer
from relayquant.flow.refine.look import look_again, look_at_samples
from relayquant.flow.refine.loudness import follow_loudness
from relayquant.flow.refine.prepared_edit import Changes, change_operators, review_prepared
from relayquant.flow.refine.recurrent_data import widen_recurrent_data
from relayquant.flow.refine.reverting import find_suspects, revert_operators, write_reverted
from relayquant.flow.refine.search import open_search, start_search
from relayquant.flow.refine.search_result import Choice, SearchOutcome
from relayquant.flow.refine.speed import (
    Stopwatch,
    find_faster_parts,
    list_trials,
    start_stopwatch,
    time_beside,
    time_first,
)
from relayquant.flow.refine.wide_values import keep_wide
from relayquant.flow.settings import CalibrateSettings, PrepareSettings, QuantizeSettings
from relayquant.ir.dialect.legality import Stage, check_stage
from relayquant.ir.ledger import find_ledger, read_ledger, write_ledger
from relayquant.stages.annotation import add_biases, annotate
from relayquant.stages.backends import resolve_backend
from relayquant.stages.calibration.overflow import avoid_rounding
from relayquant.stages.calibration.runner import pick_parameters
from relayquant.stages.conversion import (
    build_reference,
    describe_interface,
    expand_affine,
    fold_qnn,
    realize_qnn,
    request_interface,
    set_interface,
)
from relayquant.stages.conversion.partial import (
    check_quantized,
    check_unfinished,
    find_known,
    fix_parameters,
    has_quantized_values,
    realize_quantized,
)
from relayquant.stages.effort import EFFORTS, choose_order, describe_work
from relayquant.stages.equalization import add_scales, move_scales
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.canonical import apply_fusers
from relayquant.stages.preparation.finite import check_planned
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.simulation import build_calibration_graph


def quantize_model(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    settings: QuantizeSettings,
) -> tvm.IRModule:
    """Float model + data -> integer module: all stages once, then with operators in float where
    that is faster, if asked for, and where the outputs do not follow the float model.

    Arguments and errors as for `relayquant.quantize`.
    """
    backend, run = resolve_backend(settings.backend), settings.events.run_stage
    shown = choose_share(dataset, settings)
    prepared = prepare_model(mod, params, shown, settings.qconfig_mapping, backend, settings)
    review_prepared(prepared, settings.strict)
    watched, sample = start_watching(prepared, dataset, settings)
    calibrated = warn_few(calibrate_model(prepared, watched, settings.calibrating))
    if sample is None:
        return run("lower", lower_module, run("convert", convert_model, calibrated), backend)

    def build_level(lower: QuantizeSettings) -> Guarded:
        other = prepare_model(mod, params, shown, lower.qconfig_mapping, backend, lower)
        data = open_share(shown, describe_inputs(other.mod))
        return finish_model(calibrate_model(other, data, lower.calibrating), dataset, lower, sample)

    made = finish_model(calibrated, dataset, settings, sample)
    below = EFFORTS[settings.level].below
    return keep_nearer(made, sample, settings, below, build_level).tell_user()


def finish_model(
    calibrated: PreparedModel, dataset: Any, settings: QuantizeSettings, sample: SpreadSample
) -> Guarded:
    """Calibrated model -> integer module, with operators in float as `quantize_model` says."""
    run, few = settings.events.run_stage, pick_few(calibrated, sample)
    calibrated = keep_wide(calibrated, few, settings, recalibrate(dataset, settings))
    calibrated = widen_recurrent_data(calibrated, few, settings, recalibrate(dataset, settings))
    qmod = run("lower", lower_module, run("convert", convert_model, calibrated), calibrated.backend)
    if settings.only_if_faster:
        stopwatch = start_stopwatch(dataset, calibrated)
        calibrated, qmod = run(
            "keep faster", keep_faster, calibrated, qmod, stopwatch, dataset, settings
        )
    made = run("guard", guard_module, calibrated, qmod, dataset, settings, sample)
    if not isinstance(dataset, StreamedDataset):
        return made
    look = partial(look_again, calibrated, dataset, settings, sample)
    return run("guard", follow_streams, made, dataset, settings, rebuild, look)


def keep_faster(
    calibrated: PreparedModel,
    qmod: tvm.IRModule,
    stopwatch: Stopwatch,
    dataset: Any,
    settings: QuantizeSettings,
    accept: Callable[[tvm.IRModule], bool] = lambda _: True,
) -> tuple[PreparedModel, tvm.IRModule]:
    """(calibrated model, integer module) -> the same, with operators in float where this machine
    runs the whole model faster so; `accept` says whether a faster module will do otherwise.
    """
    parts = find_faster_parts(calibrated, qmod, stopwatch)
    best = time_first(calibrated, qmod, stopwatch)
    for names in list_trials(parts):
        changed, module = rebuild(calibrated, dict.fromkeys(names), dataset, settings)
        trial = time_beside(qmod, changed, module, names, stopwatch)
        if trial.is_faster_than(best) and accept(module):
            best = trial
    return best.explain(parts)


def guard_module(
    calibrated: PreparedModel,
    qmod: tvm.IRModule,
    dataset: Any,
    settings: QuantizeSettings,
    sample: SpreadSample | None = None,
) -> Guarded:
    """The integer module, or one with operators in float whose outputs follow the float model; its
    ledger says what was seen. `sample` is what was kept of the data while it was read.
    """
    if settings.guarding.find_action(calibrated.effort) is Guard.OFF:
        return Guarded(calibrated, qmod)

    def build(changes: Changes) -> tvm.IRModule:
        return rebuild(calibrated, changes, dataset, settings)[1]

    sample = finish_watching(calibrated, dataset, settings, sample)
    look = look_at_samples(calibrated, qmod, sample, settings)
    qmod, look = follow_loudness(calibrated, qmod, look, sample, settings, build)
    made = Guarded(calibrated, qmod, check_samples(calibrated, look))
    seen = judge_look(calibrated, qmod, look, settings)
    promise = find_promise(calibrated, settings)
    if promise or not seen.deviates:
        module = write_ledger(qmod, replace(read_ledger(qmod), guard=seen))
        return made.change(module, explain_deviation(seen, promise, calibrated.effort))
    suspects = find_suspects(calibrated, qmod, look, settings)
    found = revert_operators(suspects, build)
    # What was mended on some samples is mended less on others.
    wide = look_at_samples(calibrated, found.module, sample, settings, 2 * len(look.numbers))
    speed = read_ledger(qmod).speed
    return made.change(*write_reverted(found, wide, seen, suspects, speed))


def rebuild(
    calibrated: PreparedModel, changes: Changes, dataset: Any, settings: QuantizeSettings
) -> tuple[PreparedModel, tvm.IRModule]:
    """As `change_operators`, with the integer module, the only form of it that is checked."""
    changed = change_operators(calibrated, changes, recalibrate(dataset, settings))
    return changed, lower_module(build_reference(changed), changed.backend)


def recalibrate(dataset: Any, settings: QuantizeSettings) -> Callable[..., PreparedModel]:
    """What picks the parameters of a changed model anew, where they cannot stay as they are."""
    again, shown = CalibrateSettings(observer=settings.observer), choose_share(dataset, settings)
    return lambda bare: calibrate_model(bare, open_share(shown, describe_inputs(bare.mod)), again)


def search_module(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    metric: Metric,
    settings: QuantizeSettings,
) -> SearchOutcome:
    """As `quantize_model`, and in place of the guard: the fewest operators are put back that keep
    the metric within its bound. Each choice is calibrated anew.
    """
    start, backend = time.monotonic(), resolve_backend(settings.backend)
    prepared = prepare_model(mod, params, dataset, settings.qconfig_mapping, backend, settings)
    review_prepared(prepared, settings.strict)
    basis = open_search(prepared, dataset, settings, start)
    calibrated = warn_few(calibrate_model(prepared, dataset, settings.calibrating))
    search = start_search(calibrated, basis, metric, settings)

    def build(choice: Choice) -> tuple[PreparedModel, tvm.IRModule]:
        if choice == Choice():
            return calibrated, lower_prepared(calibrated)
        mapping = search.find_mapping(choice)
        changed = prepare_model(mod, params, dataset, mapping, backend, settings)
        changed = calibrate_model(changed, dataset, settings.calibrating)
        return changed, lower_prepared(changed)

    for choice in search.propose():
        search.measure(choice, build)
    changed, module = search.take_best(build)
    if settings.only_if_faster:
        stopwatch = start_stopwatch(basis.data, calibrated)
        accept = search.accept_faster
        changed, module = keep_faster(changed, module, stopwatch, dataset, settings, accept)
    return search.finish(changed, module)


def prepare_model(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    mapping: QConfigMapping | None,
    backend: BackendConfig,
    settings: PrepareSettings,
) -> PreparedModel:
    """Float model -> canonical module, plan and calibration graph.

    Nothing is said of what the mapping asks for in vain (see `review_prepared`): it may not be the
    user's own.
    """
    level, run = EFFORTS[settings.level], settings.events.run_stage
    keep = {row.pattern.op for row in backend.patterns}
    canonical = run("prepare", partial(prepare_module, keep=keep, needs_finite=True), mod, params)
    canonical = apply_fusers(canonical, backend.fusers, keep)
    is_quantized = has_quantized_values(canonical)
    if is_quantized:  # by another tool: what it quantized becomes integer operators
        check_unfinished(canonical)
        canonical = realize_quantized(canonical, backend)
    inputs, outputs = describe_interface(
        canonical, settings.input_dtypes or {}, settings.output_dtypes or {}
    )
    kept = {value.name for value in inputs if value.is_integer}
    mapping, model_type = choose_mapping(canonical, dataset, mapping, backend, settings)
    if dataset is not None or model_type is not None:
        canonical = run("equalize", add_scales, canonical, dataset, kept, model_type)

    wanted = {value.name for value in outputs if value.is_integer}
    plan = run("annotate", annotate, canonical, backend, mapping, wanted)
    known = find_known(canonical) if is_quantized else {}
    plan = fix_parameters(canonical, plan, known, settings.qparams, Fixed)
    if level.equalizes_layers and dataset is not None:
        canonical = run("equalize layers", move_scales, canonical, plan, dataset)
    if level.fit.bias is not BiasCorrection.NONE:
        canonical, plan = add_biases(canonical, plan, backend, mapping)
    graph = run("simulate", build_calibration_graph, canonical, plan, backend)
    check_stage(graph.mod, Stage.SIMULATED, with_integers=is_quantized)
    check_planned(canonical, plan, graph.constants, backend.name_mapping(mapping))
    made = PreparedModel(canonical, plan, graph, backend, inputs=inputs, outputs=outputs)
    return replace(made, effort=settings.level.value, mapping=mapping)


def calibrate_model(
    prepared: PreparedModel, dataset: Any, settings: CalibrateSettings
) -> PreparedModel:
    """Calibration graph + data -> the model with parameters, fitted weights and biases."""
    events, effort = settings.events, Effort(prepared.effort)
    observer, fit = settings.observer, settings.fit or EFFORTS[effort].fit
    order = first = settings.order or choose_order(prepared.plan, observer, effort)

    def pick(order: Order, min_scales: Mapping[str, np.ndarray]) -> PreparedModel:
        return pick_parameters(
            prepared,
            dataset,
            load_module=EagerModule,
            observer=observer,
            order=order,
            callbacks=events,
            fit=fit,
            min_scales=min_scales,
            # Rounds after the first begin with what it found: they are no part of the checkpoint.
            checkpoint=None if min_scales or order is not first else settings.checkpoint,
            workers=settings.workers,
            worker_timeout=settings.worker_timeout,
        ).put_into(prepared)

    try:
        calibrated = events.run_stage("calibrate", pick, order, {})
    except NotFiniteError as error:
        order = avoid_rounding(error, prepared, dataset, order, settings.order is None)
        calibrated = events.run_stage("calibrate", pick, order, {})
    bounds = {op.accumulator.bound for op in prepared.plan.operators if op.accumulator}
    if bounds - {OverflowBound.NONE}:
        calibrated = events.run_stage(
            "fit accumulators",
            fit_scales,
            calibrated,
            lambda model: measure_sums(lower_alone(model), dataset),
            partial(pick, order),
        )
    why = {"order": f"{order.value}: rounding made a value NaN or infinite"}
    choices = describe_work(calibrated, observer, fit) | (why if order is not first else {})
    return replace(calibrated, choices=choices)


def convert_model(calibrated: PreparedModel) -> tvm.IRModule:
    """Plan + parameters -> reference form: dequantize - float operator - quantize."""
    reference = build_reference(calibrated)
    is_finished = find_ledger(calibrated.mod) is not None
    check_stage(reference, Stage.REFERENCE, with_integers=is_finished)
    return reference


def lower_prepared(calibrated: PreparedModel) -> tvm.IRModule:
    """Calibrated model -> integer module."""
    return lower_module(convert_model(calibrated), calibrated.backend)


def lower_alone(calibrated: PreparedModel) -> tvm.IRModule:
    """As `lower_prepared`, with main as in the float model, whatever dtypes were asked for."""
    return lower_prepared(replace(calibrated, inputs=(), outputs=()))


def lower_module(
    reference: tvm.IRModule,
    backend: BackendConfig,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
) -> tvm.IRModule:
    """Reference form -> integer module: realize, expand, fold.

    Args:
        input_dtypes, output_dtypes: As for `relayquant.quantize`, of a reference form without a
            ledger; with one, that says what main takes and gives.
    """
    if find_ledger(reference) is None:
        canonical = prepare_module(reference)
        check_quantized(canonical)
        lowered = realize_quantized(canonical, backend)
        asked = request_interface(lowered, input_dtypes or {}, output_dtypes or {})
        integer = set_interface(asked)
    else:
        integer = set_interface(fold_qnn(expand_affine(realize_qnn(reference, backend), backend)))
    check_stage(integer, Stage.QNN)
    return integer
