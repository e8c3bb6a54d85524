"""Calibrated model -> the QConfigs with which its products read their data's range at run time.

A step between calibrated ranges and float. A signal that is loud at one time and quiet at another
uses few of the steps of a calibrated range; with its own range it uses all, and the product still
runs on integers. The guard and `drift` try this before they put operators back into float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relayquant.analysis.sensitivity import Simulation, add_lines
from relayquant.base.qtypes import Granularity, QParams, QSpec, Role, choose_qparams
from relayquant.config import PatternConfig, QConfig, QConfigMapping, TensorConfig
from relayquant.flow.refine.prepared_edit import Changes
from relayquant.ir.plan import OperatorPlan
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.stages.annotation import annotate
from relayquant.stages.prepared import PreparedModel


def find_run_time_qconfigs(prepared: PreparedModel) -> dict[str, QConfig]:
    """Return a QConfig for each operator on integers that the backend can run so, in order."""
    found = list_candidates(prepared)
    # The plan may say that an operator cannot run so after all.
    mapping = add_lines(prepared, found, prepared.mapping or QConfigMapping())
    plan = annotate(prepared.source, prepared.backend, mapping, prepared.integer_outputs)
    served = {operator.name for operator in plan.operators if operator.dynamic is not None}
    return {name: qconfig for name, qconfig in found.items() if name in served}


def list_candidates(prepared: PreparedModel) -> dict[str, QConfig]:
    """Return a QConfig for each operator whose row takes ranges of the run time, in order.

    A range that belongs to a whole tensor is taken only where the tensor is one sample: the result
    for a sample may not depend on its neighbours in a batch.
    """
    values = prepared.source.vars
    found: dict[str, QConfig] = {}
    for operator in prepared.plan.operators:
        if not operator.quantized or operator.has_float_data:
            continue
        weight = find_weight(prepared, operator)
        if weight is None:
            continue
        row = prepared.backend.find_pattern(operator.pattern)
        is_sample = (tensor_shape(values[operator.name]) or (0,))[0] == 1
        if (data := find_data(row, weight, is_sample=is_sample)) is not None:
            found[operator.name] = QConfig(TensorConfig(data), weight)
    return found


def bound_sqnr(simulation: Simulation) -> float:
    """Return the worst output's SQNR in dB with exact data: only the weights of operators that may
    have ranges of the run time are rounded. Such ranges hardly give more.
    """
    prepared = simulation.prepared
    names, plan = list_candidates(prepared), prepared.plan
    rounded = [
        replace(
            operator,
            operands=tuple(
                (part, key)
                for part, key in operator.operands
                if plan.group(key).info.role is Role.WEIGHT
            ),
            output=None,
        )
        for operator in plan.operators
        if operator.name in names
    ]
    return simulation.sqnr(rounded)


def measure_ranges(
    simulation: Simulation, qconfigs: Mapping[str, QConfig]
) -> list[dict[str, QParams]]:
    """Return for each batch, by group key, the parameters that operators with these QConfigs would
    compute of their data. To be called while the simulation holds the values of the float model.

    A group is left out where the calibration graph cannot round its values so: with a range for
    each row, in another dtype, or where its values were not kept.
    """
    prepared = simulation.prepared
    points = {point.operator: point for point in prepared.graph.fits}
    found: list[dict[str, QParams]] = []
    for recording in simulation.recordings:
        values, known = {var.name: value for var, value in recording.values.items()}, {}
        for name, qconfig in qconfigs.items():
            spec, point = qconfig.data.spec, points.get(name)
            if point is None or len(point.roundings) != 1 or point.source not in values:
                continue
            (key,), data = point.roundings, values[point.source]
            is_same = prepared.plan.group(key).info.spec.dtype == spec.dtype
            if is_same and spec.granularity is Granularity.PER_TENSOR and data.size:
                known[key] = choose_qparams(float(data.min()), float(data.max()), spec)
        found.append(known)
    return found


def forecast_sqnr(
    simulation: Simulation, changes: Changes, ranges: Sequence[Mapping[str, QParams]]
) -> float:
    """Return the worst output's SQNR in dB with these changes, on the calibration graph. Data with
    ranges of the run time is rounded by `ranges` (see `measure_ranges`), and not at all where these
    lack, or where an operator without such a range reads it too.
    """
    prepared = simulation.prepared
    mapping = add_lines(prepared, changes, prepared.mapping or QConfigMapping())
    plan = annotate(prepared.source, prepared.backend, mapping, prepared.integer_outputs)
    dynamic = {operator.name for operator in plan.operators if operator.dynamic is not None}
    others = {
        key
        for operator in prepared.plan.operators
        if operator.name not in dynamic
        for _, key in operator.operands
    }
    own = [{key: known[key] for key in known.keys() - others} for known in ranges]
    quantized = [operator for operator in plan.operators if operator.quantized]
    return simulation.compare(simulation.run_each(quantized, own))


def find_weight(prepared: PreparedModel, operator: OperatorPlan) -> TensorConfig | None:
    """Return how the plan quantizes an operator's weight, or None if it has none."""
    groups = [prepared.plan.group(key) for _, key in operator.operands]
    for group in groups:
        if group.info.role is Role.WEIGHT:
            return TensorConfig(group.info.spec, group.observer)
    return None


def find_data(row: PatternConfig, weight: TensorConfig, *, is_sample: bool) -> QSpec | None:
    """Return the specification of run-time data that a backend's row takes; the first that fits,
    with a range for each row of data where there can be one.
    """
    for granularity in (Granularity.PER_ROW, Granularity.PER_TENSOR):
        if granularity is Granularity.PER_TENSOR and not is_sample:
            continue
        for dtypes in row.dtypes:
            if not dtypes.is_dynamic:
                continue
            data = QSpec(
                dtypes.constraints("input").dtype, granularity=granularity, is_dynamic=True
            )
            if dtypes.find_conflict(QConfig(TensorConfig(data), weight)) is None:
                return data
    return None
