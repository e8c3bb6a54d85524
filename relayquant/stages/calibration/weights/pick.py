"""Parameters of constants: prepared model -> parameters of constant operands, and the operators
whose weights can be fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from relayquant.base.qtypes import QParams
from relayquant.config.observers.base import call_observer
from relayquant.ir.ops.find import match_operator, operand_constant
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite import Graph
from relayquant.stages.calibration.parameters import (
    CalibrationContext,
    CallableCalibration,
    StoredSamples,
    resolve_observer,
)
from relayquant.stages.calibration.weights.patches import LinearView, make_linear_view
from relayquant.stages.prepared import FitPoint, PreparedModel


@dataclass(frozen=True, eq=False)
class OperatorFit:
    """An operator to be fitted: its place, its matrices, and its constants in the float model."""

    point: FitPoint
    view: LinearView
    weight: np.ndarray
    bias: np.ndarray | None
    group: SharedQParams

    @property
    def columns(self) -> int:
        """Weights per output."""
        return self.view.weight_to_rows(self.weight).shape[2]


def find_fits(prepared: PreparedModel) -> dict[str, OperatorFit]:
    """Return the operators whose weights can be fitted, by name, in topological order."""
    graph = Graph(prepared.mod)
    constants = prepared.graph.constants
    found = {}
    for point in prepared.graph.fits:
        operator = prepared.plan.operator(point.operator)
        view = make_linear_view(match_operator(graph, prepared.backend, operator))
        if view is not None:
            bias = constants.get(f"{operator.name}:bias")
            found[operator.name] = OperatorFit(
                point,
                view,
                constants[f"{operator.name}:weight"].value,
                bias.value if bias is not None else None,
                prepared.plan.group(dict(operator.operands)["weight"]),
            )
    return found


def pick_weight_parameters(prepared: PreparedModel) -> dict[str, QParams]:
    """Return the parameters of constant operands, computed from the constants."""
    graph = Graph(prepared.mod)
    parameters = {}
    for group in prepared.plan.weights:
        name, operand = group.constant or ("", "")
        match = match_operator(graph, prepared.backend, prepared.plan.operator(name))
        array = operand_constant(match, operand)
        observer = resolve_observer(group.observer)
        if isinstance(observer, CallableCalibration):
            samples = StoredSamples(group.info, lambda array=array: iter([array]))
            context = CalibrationContext(
                prepared.plan, prepared.graph, MappingProxyType(dict(parameters)), {}
            )
            parameters[group.key] = observer.qparams(samples, context)
        else:
            parameters[group.key] = call_observer(observer.observe, group.info, group.info, [array])
    return parameters
