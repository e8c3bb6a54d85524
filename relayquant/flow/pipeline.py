"""The data flow on one page: load -> prepare -> equalize -> annotate -> simulate -> calibrate ->
convert -> expand -> fold -> lower.

The only module that knows all stages. Each stage takes values and gives new ones; none edits its
input. `steps` and `quantizer` are what users call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.accumulators import AccumulatorReport, fit_scales, measure_accumulators
from relayquant.analysis.loader import bind_loader
from relayquant.codegen.eager import EagerModule
from relayquant.config import BackendConfig, BiasCorrection, Effort, OverflowBound, QConfigMapping
from relayquant.config.observers import Fixed
from relayquant.config.observers.base import NotFiniteError
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ModelError, format_count
from relayquant.flow.settings import CalibrateSettings, PrepareSettings, QuantizeSettings
from relayquant.ir.dialect.legality import Stage, check_stage
from relayquant.ir.ledger import find_ledger
from relayquant.stages.annotation import add_biases, annotate, review_plan
from relayquant.stages.backends import resolve_backend
from relayquant.stages.calibration.overflow import find_cause
from relayquant.stages.calibration.runner import pick_parameters
from relayquant.stages.compilation import compile_draft
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
    find_known,
    fix_parameters,
    has_quantized_values,
    realize_quantized,
)
from relayquant.stages.effort import (
    EFFORTS,
    choose_order,
    default_mapping,
    describe_choices,
    describe_observers,
)
from relayquant.stages.equalization import add_scales, move_scales, read_exponents
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.canonical import apply_fusers
from relayquant.stages.preparation.finite import check_planned
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.simulation import build_calibration_graph


def quantize_once(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    settings: QuantizeSettings,
    watch: Callable[[PreparedModel, Any], Any] = lambda _, dataset: dataset,
) -> tuple[PreparedModel, tvm.IRModule]:
    """All stages, once: the calibrated model and its integer module.

    Arguments and errors as for `relayquant.quantize`, which looks at the result as well. `watch`
    gives what calibration reads in place of the data set.
    """
    backend, run = resolve_backend(settings.backend), settings.events.run_stage
    prepared = prepare_model(mod, params, dataset, settings.qconfig_mapping, backend, settings)
    review_prepared(prepared, settings.strict)
    calibrated = calibrate_model(prepared, watch(prepared, dataset), settings.calibrating)
    reference = run("convert", convert_model, calibrated)
    return calibrated, run("lower", lower_module, reference, backend)


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
    if mapping is None:
        mapping = default_mapping(backend, settings.level, settings.model_type)
    keep = {row.pattern.op for row in backend.patterns}
    canonical = run("prepare", partial(prepare_module, keep=keep, needs_finite=True), mod, params)
    canonical = apply_fusers(canonical, backend.fusers, keep)
    is_quantized = has_quantized_values(canonical)
    canonical = adopt_quantized(canonical, backend) if is_quantized else canonical
    inputs, outputs = describe_interface(
        canonical, settings.input_dtypes or {}, settings.output_dtypes or {}
    )
    kept = {value.name for value in inputs if value.is_integer}
    if dataset is not None or settings.model_type is not None:
        canonical = run("equalize", add_scales, canonical, dataset, kept, settings.model_type)

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
    check_planned(canonical, plan, graph.constants)
    return PreparedModel(
        canonical,
        plan,
        graph,
        backend,
        effort=settings.level.value,
        inputs=inputs,
        outputs=outputs,
        mapping=mapping,
    )


def adopt_quantized(canonical: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """A model that another tool quantized in part -> what it quantized as integer operators."""
    if find_ledger(canonical) is not None:
        raise ModelError(
            "The module was quantized by relayquant and cannot be quantized again. Start from "
            "the float model, or from what load gave for a model quantized elsewhere.",
            code="RQ205",
        )
    return realize_quantized(canonical, backend)


def review_prepared(prepared: PreparedModel, strict: bool) -> None:
    """Warn of what the user's mapping asks for in vain; with `strict` that is an error."""
    mapping, is_partial = prepared.mapping or QConfigMapping(), has_quantized_values(prepared.mod)
    review_plan(
        prepared.mod, prepared.plan, mapping, prepared.backend, strict=strict, is_partial=is_partial
    )


def calibrate_model(
    prepared: PreparedModel, dataset: Any, settings: CalibrateSettings
) -> PreparedModel:
    """Calibration graph + data -> the model with parameters, fitted weights and biases."""
    events, effort = settings.events, Effort(prepared.effort)
    calibration, fit = settings.calibration, settings.fit or EFFORTS[effort].fit
    order = settings.order or choose_order(prepared.plan, calibration, effort)

    def pick(min_scales: Mapping[str, np.ndarray]) -> PreparedModel:
        found = pick_parameters(
            prepared,
            dataset,
            load_module=EagerModule,
            calibration=calibration,
            order=order,
            callbacks=events,
            fit=fit,
            min_scales=min_scales,
            # Rounds after the first begin with what it found: they are no part of the checkpoint.
            checkpoint=None if min_scales else settings.checkpoint,
            workers=settings.workers,
            worker_timeout=settings.worker_timeout,
        )
        return replace(
            prepared,
            parameters=found.parameters,
            constants=found.constants,
            statistics=found.statistics,
            observers=found.observers,
            tuned=found.tuned,
        )

    try:
        calibrated = events.run_stage("calibrate", pick, {})
    except NotFiniteError as error:
        raise find_cause(error, prepared, dataset) from error
    bounds = {op.accumulator.bound for op in prepared.plan.operators if op.accumulator}
    if bounds - {OverflowBound.NONE}:
        calibrated = events.run_stage(
            "fit accumulators", fit_scales, calibrated, lambda m: measure_sums(m, dataset), pick
        )
    choices = describe_choices(prepared, calibration, fit)
    if equalized := read_exponents(prepared.mod):
        choices["equalized"] = f"channels between {format_count(len(equalized), 'pair')} of layers"
    choices |= describe_observers(prepared.plan, calibration, calibrated.observers)
    return replace(calibrated, choices=choices)


def measure_sums(model: PreparedModel | tvm.IRModule, dataset: Any) -> AccumulatorReport:
    """Calibrated model or integer module + data -> how large its sums of products are."""
    is_prepared = isinstance(model, PreparedModel)
    integer = lower_prepared(replace(model, inputs=(), outputs=())) if is_prepared else model
    data = open_dataset(dataset, describe_inputs(integer))
    return measure_accumulators(integer, data, bind_loader(data, compile_draft))


def convert_model(calibrated: PreparedModel) -> tvm.IRModule:
    """Plan + parameters -> reference form: dequantize - float operator - quantize."""
    reference = build_reference(calibrated)
    is_finished = find_ledger(calibrated.mod) is not None
    check_stage(reference, Stage.REFERENCE, with_integers=is_finished)
    return reference


def lower_prepared(calibrated: PreparedModel) -> tvm.IRModule:
    """Calibrated model -> integer module."""
    return lower_module(convert_model(calibrated), calibrated.backend)


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
        lowered = lower_adopted(reference, backend)
        asked = request_interface(lowered, input_dtypes or {}, output_dtypes or {})
        lowered = set_interface(asked)
        check_stage(lowered, Stage.QNN)
        return lowered
    integer = realize_qnn(reference, backend)
    expanded = expand_affine(integer, backend)
    folded = set_interface(fold_qnn(expanded))
    check_stage(folded, Stage.QNN)
    return folded


def lower_adopted(reference: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """As `lower_module`, for a model without a ledger: one that another tool quantized."""
    canonical = prepare_module(reference)
    if not has_quantized_values(canonical):
        raise ModelError(
            "The module holds no quantized value, so there is nothing to lower. Quantize it: "
            "relayquant.quantize(mod, params, dataset).",
            code="RQ205",
        )
    return realize_quantized(canonical, backend)
