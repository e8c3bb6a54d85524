"""A model between the stages: float module, plan, calibration graph, and the parameters picked so
far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.qtypes import QParams
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.errors import ConfigError, format_count
from relayquant.ir.ledger import InterfaceValue
from relayquant.ir.plan import Plan

#: dtype code of the simulated operators that passes values through in float
PASS_THROUGH = 0


@dataclass(frozen=True, eq=False)
class GroupVariables:
    """Parameters of main that hold one group.

    dtype code int32 (), scale float32 and zero point int32 (n,); `bounds`, where the integers use
    less than their dtype has: the smallest and the largest of them (`limits`), float32 ().
    """

    key: str
    code: int
    length: int
    dtype: relax.Var
    scale: relax.Var
    zero_point: relax.Var
    bounds: tuple[relax.Var, ...] = ()
    limits: tuple[int, int] = (0, 0)

    @property
    def vars(self) -> tuple[relax.Var, ...]:
        return self.dtype, self.scale, self.zero_point, *self.bounds

    def arrays(self, qparams: QParams | None) -> tuple[np.ndarray, ...]:
        """Values of the variables; None passes the value through in float."""
        if qparams is None:
            code, scale, zero_point, limits = PASS_THROUGH, 1.0, 0, (-np.inf, np.inf)
        else:
            code, scale, zero_point = self.code, qparams.scale, qparams.zero_point
            limits = self.limits
        return (
            np.array(code, "int32"),
            np.full(self.length, scale, "float32"),
            np.full(self.length, zero_point, "int32"),
            *(np.array(limit, "float32") for limit in limits if self.bounds),
        )


@dataclass(frozen=True, eq=False)
class ConstantVariable:
    """Parameter of main that holds a weight or a bias, and its value in the float model."""

    var: relax.Var
    value: np.ndarray


@dataclass(frozen=True)
class FitPoint:
    """An operator whose weight is a variable.

    Attributes:
        operator: Its name.
        source: Value that becomes its data once it is rounded by the groups `roundings` (keys), one
            after the other; () when the value is its data.
        weight: Value that it reads as weight.
    """

    operator: str
    source: str
    roundings: tuple[str, ...]
    weight: str


@dataclass(frozen=True, eq=False)
class CalibrationGraph:
    """The simulated module: main(inputs, group variables, constants) -> the outputs of the model.

    Attributes:
        mod: The module.
        variables: Parameters of main by group key.
        inputs: Names of the model's own inputs, the first parameters of main.
        constants: Weights and biases by "<operator>:weight" and "<operator>:bias", the last
            parameters.
        fits: Operators with such weights, in topological order.
    """

    mod: tvm.IRModule
    variables: Mapping[str, GroupVariables]
    inputs: tuple[str, ...]
    constants: Mapping[str, ConstantVariable] = field(default_factory=dict)
    fits: tuple[FitPoint, ...] = ()

    def __repr__(self) -> str:
        values = format_count(len(self.variables), "value")
        return f"CalibrationGraph(of {', '.join(self.inputs)}: parameters of {values})"

    def arguments(
        self,
        parameters: Mapping[str, QParams] | None = None,
        constants: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """What to pass for the parameters of main after the inputs, by name and in order.

        Groups without parameters pass through in float; `constants` replaces those of the float
        model.
        """
        values = {}
        for key in self.variables:
            values.update(self.group_arguments(key, (parameters or {}).get(key)))
        for key, constant in self.constants.items():
            values[constant.var.name] = (constants or {}).get(key, constant.value)
        return values

    def group_arguments(self, key: str, qparams: QParams | None) -> dict[str, np.ndarray]:
        """Those of `arguments` that belong to one group."""
        variables = self.variables[key]
        names = [var.name for var in variables.vars]
        return dict(zip(names, variables.arrays(qparams), strict=True))


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """What an observer has seen of one group in float: mergeable with what another process has
    seen.
    """

    observer: Any
    state: Any


@dataclass(frozen=True)
class TunedBatches:
    """Batches that calibration did more with than to watch ranges: the model follows better on
    them than on others.

    Attributes:
        judged: Their places in the data, of those that ranges were chosen by.
        fitted: Of those that weights and biases were fitted to.
    """

    judged: tuple[int, ...] = ()
    fitted: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """What `prepare` gives, and `calibrate` once more with parameters.

    Attributes:
        mod: The prepared float module.
        plan: What is quantized and how.
        graph: The calibration graph.
        backend: The backend the plan was made for.
        parameters: Group key -> parameters; empty before calibration.
        constants: "<operator>:weight" -> weight that stands on the grid of its parameters, float32
            in the weight's layout, and "<operator>:bias" -> corrected bias; where calibration
            changed them.
        inputs, outputs: What main takes and returns, with the dtypes that the user asked for.
        mapping: The configuration that the plan was made from.
        statistics: By group key, what observers saw in a calibration with Order.PARALLEL; empty
            after any other: in topological order what is seen of a value depends on the parameters
            picked before, so that the states of two processes do not belong together.
        effort: Level of effort (`relayquant.stages.effort.Effort`), for the ledger.
        choices: What calibration worked with, in words, for the ledger.
        observers: By group key, the name of what picked its parameters, of all activations that
            were calibrated.
        tuned: The batches that more than ranges came from. Not saved with the model.
    """

    mod: tvm.IRModule
    plan: Plan
    graph: CalibrationGraph
    backend: BackendConfig
    parameters: Mapping[str, QParams] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    effort: str = "balanced"
    inputs: tuple[InterfaceValue, ...] = ()
    outputs: tuple[InterfaceValue, ...] = ()
    mapping: QConfigMapping | None = None
    statistics: Mapping[str, GroupStatistics] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    observers: Mapping[str, str] = field(default_factory=dict)
    tuned: TunedBatches = field(default_factory=TunedBatches)

    def __repr__(self) -> str:
        """A line: the ledger of what becomes of it names every operator."""
        operators = self.plan.operators
        taken = sum(operator.quantized for operator in operators)
        known = sum(group.key in self.parameters for group in self.plan.groups)
        return (
            f"PreparedModel(for {self.backend.name!r}: {taken} of "
            f"{format_count(len(operators), 'operator')} to quantize, parameters of {known} of "
            f"{format_count(len(self.plan.groups), 'value')})"
        )

    def require_parameters(self) -> Mapping[str, QParams]:
        """The parameters of all groups.

        Raises:
            ConfigError: the model was not calibrated, or not completely.
        """
        missing = [group.key for group in self.plan.groups if group.key not in self.parameters]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {format_count(len(self.plan.groups), 'value')} without "
                f"parameters yet, the first is {missing[0]!r}. Run relayquant.calibrate(prepared, "
                "dataset) first and pass on what it returns.",
                code="RQ105",
            )
        return self.parameters
