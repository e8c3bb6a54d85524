"""The model between the stages: float module, plan, calibration graph and the parameters chosen
so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.qtypes import QParams
from relayquant.base.runtime import freeze_array
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.errors import ConfigError, format_count
from relayquant.ir.ledger import InterfaceValue
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite import Graph

#: dtype code with which the simulated operators pass values through in float
PASS_THROUGH = 0


@dataclass(frozen=True, eq=False)
class GroupVariables:
    """Parameters of main that hold the quantization parameters of one group.

    The dtype code is int32 with shape (), scale is float32 and zero point int32 with shape (n,).
    `bounds` are the smallest and the largest integer (see `limits`), float32 with shape (). They
    exist if the integers use less than the range of their dtype.
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
        """Return values for the variables, frozen, so that `codegen.eager` need not compare them in
        each call. None passes the value through in float.
        """
        if qparams is None:
            code, scale, zero_point, limits = PASS_THROUGH, 1.0, 0, (-np.inf, np.inf)
        else:
            code, scale, zero_point = self.code, qparams.scale, qparams.zero_point
            limits = self.limits
        arrays = (
            np.array(code, "int32"),
            np.full(self.length, scale, "float32"),
            np.full(self.length, zero_point, "int32"),
            *(np.array(limit, "float32") for limit in limits if self.bounds),
        )
        return tuple(map(freeze_array, arrays))


@dataclass(frozen=True, eq=False)
class ConstantVariable:
    """Parameter of main that holds a weight or a bias, and its value in the float model, frozen."""

    var: relax.Var
    value: np.ndarray


@dataclass(frozen=True)
class FitPoint:
    """An operator whose weight is a variable.

    Attributes:
        operator: The operator's name.
        source: The value that becomes the operator's data after rounding by the groups `roundings`;
            the operator's result if its weight multiplies that, as in a recurrent layer.
        roundings: Group keys, applied one after the other. () if the value is the data itself.
        weight: The value that the operator reads as weight.
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
        inputs: Names of the model's inputs, the first parameters of main.
        constants: Weights and biases by "<operator>:weight" and "<operator>:bias", the last
            parameters.
        fits: Operators with variable weights, in topological order.
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
        """Return the arguments for the parameters of main after the inputs, by name and in order.

        Groups without parameters pass values through in float. `constants` replace the constants of
        the float model.
        """
        values = {}
        for key in self.variables:
            values.update(self.group_arguments(key, (parameters or {}).get(key)))
        for key, constant in self.constants.items():
            values[constant.var.name] = (constants or {}).get(key, constant.value)
        return values

    def group_arguments(self, key: str, qparams: QParams | None) -> dict[str, np.ndarray]:
        """Return the entries of `arguments` that belong to one group."""
        variables = self.variables[key]
        names = [var.name for var in variables.vars]
        return dict(zip(names, variables.arrays(qparams), strict=True))


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """What an observer has seen of one group in float. Two processes can merge their statistics."""

    observer: Any
    state: Any


@dataclass(frozen=True)
class TunedBatches:
    """Batches that calibration used for more than ranges. On these batches the quantized model
    follows the float model better than on others.

    Attributes:
        samples: Number of samples in all batches. 0 if calibration read no data.
        judged: Indices in the dataset of the batches by which ranges were chosen.
        fitted: Indices of the batches to which weights and biases were fitted.
    """

    judged: tuple[int, ...] = ()
    fitted: tuple[int, ...] = ()
    samples: int = 0


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """The result of `prepare`. `calibrate` returns it once more with parameters.

    Attributes:
        mod: The prepared float module.
        plan: Which operators are quantized and how.
        graph: The calibration graph.
        backend: The backend that the plan was made for.
        parameters: Group key -> parameters; empty before calibration.
        constants: Constants that calibration changed. "<operator>:weight" -> weight on the grid of
            its parameters, float32 in the weight's layout. "<operator>:bias" -> corrected bias.
        inputs, outputs: The inputs and outputs of main, with the dtypes that the user asked for.
        mapping: The configuration that the plan was made from.
        statistics: Group key -> what the observers saw in a calibration with Order.PARALLEL. Empty
            after any other order: in topological order a value depends on the parameters chosen
            before, so statistics of two processes cannot be merged.
        effort: Level of effort (`relayquant.stages.effort.Effort`), for the ledger.
        choices: The choices of calibration in words, for the ledger.
        observers: Group key -> name of the observer that chose its parameters, for all activations
            that were calibrated.
        tuned: The batches that calibration used for more than ranges. Not saved with the model.
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

    @cached_property
    def integer_outputs(self) -> frozenset[str]:
        """Names of the outputs that the module returns as integers. Any plan made anew has them."""
        return frozenset(value.name for value in self.outputs if value.is_integer)

    @cached_property
    def source(self) -> Graph:
        """The graph of `mod`, for those who make several plans of it."""
        return Graph(self.mod)

    def __repr__(self) -> str:
        """Return one line. The ledger of the converted model names every operator."""
        operators = self.plan.operators
        taken = sum(operator.quantized for operator in operators)
        known = sum(group.key in self.parameters for group in self.plan.groups)
        return (
            f"PreparedModel(for {self.backend.name!r}: {taken} of "
            f"{format_count(len(operators), 'operator')} to quantize, parameters of {known} of "
            f"{format_count(len(self.plan.groups), 'value')})"
        )

    def require_parameters(self) -> Mapping[str, QParams]:
        """Return the parameters of all groups.

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
