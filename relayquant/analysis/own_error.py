"""own_error: calibrated model + a few samples -> the error that each operator without products adds
by itself.

An operator may amplify what its operand loses: a square root in 8 bits has a tenth of the accuracy
of its operand. So an operator is run on the values of the float model, with its operands and its
result rounded, and compared with the float operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax

from relayquant.analysis.error_statistics import NoiseSums
from relayquant.analysis.sensitivity import find_groups, find_rounding_operators
from relayquant.base.runtime import limit_blas
from relayquant.codegen.eager import EagerModule
from relayquant.codegen.eager.incremental import select_steps
from relayquant.codegen.eager.module import run_steps
from relayquant.codegen.eager.plan import Step
from relayquant.ir.ops import Kind
from relayquant.ir.ops.find import find_pattern
from relayquant.ir.plan import OperatorPlan
from relayquant.ir.reference.frame import Frame
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.lifetimes import find_ends
from relayquant.stages.prepared import PreparedModel


@dataclass(frozen=True)
class OwnError:
    """SQNR of an operator's result in dB, with the values of the float model as operands.

    Attributes:
        name: The operator.
        rounded: With operands and result rounded.
        floating: With the result rounded, if an integer operator reads it in any case. inf if none
            does.
    """

    name: str
    rounded: float
    floating: float

    @property
    def gain(self) -> float:
        """How many dB the result gains if the operator runs in float."""
        return self.floating - self.rounded


def measure_own_errors(
    prepared: PreparedModel, batches: Iterable[Mapping[str, np.ndarray]]
) -> list[OwnError]:
    """Measure the operators of the plan that compute no products, in order.

    Args:
        prepared: A calibrated model.
        batches: Inputs of the float model by name.
    """
    kinds = {
        operator.name: find_pattern(prepared.backend, operator.pattern).kind
        for operator in prepared.plan.operators
        if operator.quantized and operator.pattern
    }
    operators = [
        operator
        for operator in find_rounding_operators(prepared)
        if kinds.get(operator.name, Kind.ANCHOR) is not Kind.ANCHOR
    ]
    if not operators:
        return []
    graph = Graph(prepared.mod)
    owners = {value: row.name for row in prepared.plan.operators for value in row.values}
    meter = _Meter(prepared, operators)
    with limit_blas():
        for batch in batches:
            meter.measure(batch)
    found = []
    for operator in operators:
        rounded, result = meter.sums[operator.name]
        readers = [owners.get(user.name, "") for user in graph.users[graph.vars[operator.name]]]
        # Operators that run only between integers go to float together with this one.
        is_read = any(kinds.get(name) not in (None, Kind.CONNECTOR) for name in readers)
        floating = result.sqnr if is_read else float("inf")
        found.append(OwnError(operator.name, rounded.sqnr, floating))
    return found


@dataclass(frozen=True, eq=False)
class OperatorPart:
    """A part of the calibration graph: one operator.

    Attributes:
        operator: The operator.
        root: Its result before rounding.
        view: Its result as its readers see it.
        steps: The steps from its operands to `view`.
        reads: The values that they read.
    """

    operator: OperatorPlan
    root: relax.Var
    view: relax.Var
    steps: list[Step]
    reads: tuple[relax.Var, ...]


class _Meter:
    """The calibration graph step by step, and the error sums of each operator so far."""

    def __init__(self, prepared: PreparedModel, operators: Sequence[OperatorPlan]) -> None:
        self.prepared = prepared
        self.program = EagerModule(prepared.graph.mod).programs["main"]
        self.vars = {step.var.name: step.var for step in self.program.steps}
        self.vars |= {param.name: param for param in self.program.params}
        floats = {self.vars[name] for name in Graph(prepared.mod).vars if name in self.vars}
        known = floats | set(self.program.params)
        self.parts = {}
        for operator in operators:
            part = self.find_part(operator, known)
            self.parts.setdefault(part.view, []).append(part)
        #: operator -> (operands and result rounded, result rounded)
        self.sums = {operator.name: (NoiseSums(), NoiseSums()) for operator in operators}
        reads = ((*step.reads, *self.list_reads(step.var)) for step in self.program.steps)
        pairs = zip(reads, self.program.steps, strict=True)
        self.dead = find_ends(((*read, step.var) for read, step in pairs), set())

    def find_part(self, operator: OperatorPlan, known: Collection[relax.Var]) -> OperatorPart:
        """Return an operator's part of the graph; its operands are values of the float model."""
        root = self.vars[operator.name]
        view = self.vars.get(f"{operator.name}.d", root)
        own = {self.vars[name] for name in operator.values if name in self.vars}
        steps = select_steps(self.program.steps, frozenset({view}), set(known) - own)
        reads = {var: None for step in steps for var in step.reads if var in known}
        return OperatorPart(operator, root, view, steps, (root, *reads))

    def list_reads(self, view: relax.Var) -> list[relax.Var]:
        """Return the values that are needed when `view` was computed."""
        return [var for part in self.parts.get(view, ()) for var in part.reads]

    def measure(self, batch: Mapping[str, np.ndarray]) -> None:
        """Add one batch."""
        frame = Frame(self.program.mod)
        for name, value in (self.prepared.graph.arguments() | dict(batch)).items():
            self.program.bind(frame, self.vars[name], value)
        for step, dead in zip(self.program.steps, self.dead, strict=True):
            run_steps(frame, [step], [()])
            for part in self.parts.get(step.var, ()):
                self.add(frame, part)
            for var in dead:
                frame.values.pop(var, None)

    def add(self, frame: Frame, part: OperatorPart) -> None:
        """Add the error of one operator, given the float values of its operands and result."""
        operator, expected = part.operator, frame.values[part.root]
        results = [operator.output] if operator.output is not None else []
        first, second = self.sums[operator.name]
        self.sums[operator.name] = (
            first.update(expected, self.compute(frame, part, find_groups(operator))),
            second.update(expected, self.compute(frame, part, results)),
        )

    def compute(self, frame: Frame, part: OperatorPart, groups: Iterable[str]) -> np.ndarray:
        """Return a result with the values of these groups rounded."""
        changed = Frame(self.program.mod, dict(frame.values), dict(frame.symbols))
        for key in groups:
            values = self.prepared.graph.group_arguments(key, self.prepared.parameters[key])
            changed.values.update((self.vars[name], value) for name, value in values.items())
        run_steps(changed, part.steps, [()] * len(part.steps))
        return changed.values[part.view]
