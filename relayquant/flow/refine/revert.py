"""After calibration: calibrated model -> the same with some operators back in float."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from relayquant.analysis.sensitivity import add_float_lines
from relayquant.config import QConfigMapping
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import calibrate_model
from relayquant.flow.refine.prepared_edit import replace_plan
from relayquant.flow.settings import CalibrateSettings
from relayquant.stages.annotation import annotate
from relayquant.stages.prepared import PreparedModel


def keep_parameters(
    prepared: PreparedModel, names: Collection[str], dataset: Any, calibration: Any
) -> PreparedModel:
    """The calibrated model with operators in float, and all parameters as they were picked.

    A value of a new group takes the parameters that its former group had in the same format. Only
    where there were none, which no built-in pattern brings about, is calibrated anew.
    """
    if prepared.mapping is None:
        raise ConfigError(
            "The model lacks the QConfigMapping that it was prepared with.", code="RQ105"
        )
    mapping = add_float_lines(prepared, list(names), prepared.mapping)
    wanted = {value.name for value in prepared.outputs if value.is_integer}
    plan = annotate(prepared.mod, prepared.backend, mapping, wanted)
    changed = replace(replace_plan(prepared, plan), mapping=mapping)
    parameters, observers = dict(changed.parameters), dict(changed.observers)
    for group in plan.activations:
        if group.key in parameters:
            continue
        former = [
            old
            for old in prepared.plan.activations
            if old.info.spec == group.info.spec and set(old.members) & set(group.members)
            if old.key in prepared.parameters
        ]
        if not former:
            return calibrate_model(changed, dataset, CalibrateSettings(calibration=calibration))
        parameters[group.key] = prepared.parameters[former[0].key]
        observers[group.key] = prepared.observers.get(former[0].key, "")
    return replace(changed, parameters=parameters, observers=observers)


def describe_mapping(mapping: QConfigMapping) -> dict[str, Any] | None:
    """What `QConfigMapping.from_dict` reads; None where the mapping holds a callable."""
    try:
        return mapping.to_dict()
    except ConfigError:
        return None
