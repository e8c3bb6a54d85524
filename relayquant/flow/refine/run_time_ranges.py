"""Calibrated model -> the QConfigs with which its products read their data's range at run time.

A step between calibrated ranges and float. A signal that is loud at one time and quiet at another
uses few of the steps of a calibrated range; with its own range it uses all, and the product still
runs on integers. The guard and `drift` try this before they put operators back into float.
"""

from __future__ import annotations

from relayquant.analysis.sensitivity import Simulation, add_lines
from relayquant.base.qtypes import Granularity, QSpec, Role
from relayquant.config import PatternConfig, QConfig, QConfigMapping, TensorConfig
from relayquant.flow.refine.prepared_edit import Changes
from relayquant.ir.plan import OperatorPlan
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.stages.annotation import annotate
from relayquant.stages.prepared import PreparedModel


def find_run_time_qconfigs(prepared: PreparedModel) -> dict[str, QConfig]:
    """Return a QConfig for each operator on integers that the backend can run so, in order.

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
    # The plan may say that an operator cannot run so after all.
    mapping = add_lines(prepared, found, prepared.mapping or QConfigMapping())
    plan = annotate(prepared.source, prepared.backend, mapping)
    served = {operator.name for operator in plan.operators if operator.dynamic is not None}
    return {name: qconfig for name, qconfig in found.items() if name in served}


def bound_sqnr(simulation: Simulation, changes: Changes) -> float:
    """Return the worst output's SQNR in dB with these changes, but for the rounding of data with
    ranges of the run time: on the calibration graph, such a product rounds only its weights.
    """
    prepared = simulation.prepared
    mapping = add_lines(prepared, changes, prepared.mapping or QConfigMapping())
    plan = annotate(prepared.source, prepared.backend, mapping)
    return simulation.sqnr([operator for operator in plan.operators if operator.quantized])


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
