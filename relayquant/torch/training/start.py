"""Prepared model -> what training may begin with: allowed operators, and weights."""

from __future__ import annotations

import numpy as np

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import QParams, Role
from relayquant.errors import ConfigError
from relayquant.stages.prepared import PreparedModel

#: distance of a fitted weight from the boundary of its cell, in steps: on the boundary, the first
#: optimizer step would undo the fit
MARGIN = 0.25


def check_trainable(prepared: PreparedModel) -> None:
    """Refuse operators that the calibration graph does not compute as the integer module does.

    Raises:
        ConfigError: names the operator and why.
    """
    for operator in prepared.plan.operators:
        reason = ""
        if operator.accumulator is not None:
            reason = (
                "has a narrow accumulator, whose overflow has no gradient: prepare for a backend "
                "without one, and use relayquant.analysis.accumulator_report on the result"
            )
        elif operator.grouped is not None:
            reason = (
                "has a weight with scales by group, which do not train: leave it in float, and "
                "use relayquant.compress_weights on the result"
            )
        elif operator.dynamic is not None:
            reason = (
                "gets its parameters at run time: use an activation that is not dynamic, or "
                "leave it in float"
            )
        if reason:
            raise ConfigError(
                f"Operator {operator.name!r} cannot be trained: it {reason}.", code="RQ206"
            )
    prepared.require_parameters()


def start_constant(prepared: PreparedModel, key: str) -> np.ndarray:
    """Return the start value of a weight or bias for training.

    A weight that calibration fitted is a multiple of its scale. Training starts from the point in
    that step's cell that is nearest to the float weight, so that both the fit and the rounding
    error are kept.
    """
    original, fitted = prepared.graph.constants[key].value, prepared.constants.get(key)
    if fitted is None:
        return original
    group = next((g for g in prepared.plan.groups if g.key == key), None)
    if group is None or group.info.role is not Role.WEIGHT:
        return fitted
    step = reshape_scale(prepared.parameters[key], fitted.ndim)
    half = (0.5 - MARGIN) * step
    return np.clip(original, fitted - half, fitted + half).astype("float32")


def reshape_scale(qparams: QParams, ndim: int) -> np.ndarray:
    """Reshape a scale to broadcast."""
    if qparams.axis is None:
        return qparams.scale
    return qparams.scale.reshape(shape_along(qparams.axis, ndim))
