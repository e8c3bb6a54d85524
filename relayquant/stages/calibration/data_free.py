"""calibrate without data: the parameters of observers that look at none, and who needs some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relayquant.base.events import CallbackList, ParametersEvent
from relayquant.base.qtypes import QParams
from relayquant.config.observers import Observer
from relayquant.errors import format_count
from relayquant.ir.plan import Plan
from relayquant.stages.calibration.parameters import raise_scale
from relayquant.stages.calibration.result import CalibrationResult


def is_data_free(picker: object) -> bool:
    """Whether it picks parameters without having seen a value."""
    return isinstance(picker, Observer) and not picker.needs_data


def pick_given(
    plan: Plan,
    pickers: Sequence[Any],
    weights: Mapping[str, QParams],
    callbacks: CallbackList,
    min_scales: Mapping[str, np.ndarray],
) -> CalibrationResult:
    """The parameters of observers that look at no data, beside those of the weights."""
    parameters, observers = dict(weights), dict[str, str]()
    for group, picker in zip(plan.activations, pickers, strict=True):
        picked = picker.qparams(picker.start(group.info), group.info)
        if group.key in min_scales:
            picked = raise_scale(picked, group, min_scales)
        parameters[group.key], observers[group.key] = picked, picker.name
        callbacks.on_parameters(ParametersEvent(group.info, picked))
    return CalibrationResult(parameters, {}, observers=observers)


def describe_needs(plan: Plan, pickers: Sequence[object]) -> str:
    """A message for a plan without data: which operators have parameters that data decides."""
    names = {
        group.key
        for group, picker in zip(plan.activations, pickers, strict=True)
        if not is_data_free(picker)
    }
    rows = [
        f"{op.name} ({op.op.removeprefix('relax.')})"
        for op in plan.operators
        if op.quantized and names.intersection((*dict(op.operands).values(), op.output))
    ]
    return (
        f"dataset is None, but data decides parameters of {format_count(len(rows), 'operator')}: "
        f"{', '.join(rows)}. Pass a dataset, or set for these "
        "QSpec(is_dynamic=True), which matrix products with constant weights take, the observer "
        "Fixed, or None to keep them in float."
    )
