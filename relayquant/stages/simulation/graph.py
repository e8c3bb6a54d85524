"""build_calibration_graph: float module + plan -> the same module with simulated quantization.

v -> v, q = simulated_quantize(v, dtype, scale, zero_point), d = simulated_dequantize(q, ...). The
variables dtype, scale and zero_point are parameters of main, so one compiled graph serves all
values. dtype 0 passes values through, so the graph also computes the float model. Data with dynamic
parameters stays float here, because nothing has to be chosen for it. Only its weights are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import tvm
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS, Role
from relayquant.base.runtime import freeze_array
from relayquant.config import BackendConfig
from relayquant.errors import ConfigError
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import Kind, SimulateContext
from relayquant.ir.ops.callbacks import run_simulate
from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.ops.planned_walk import PlannedWalk
from relayquant.ir.plan import OperatorPlan, Plan, SharedQParams
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.prepared import CalibrationGraph, ConstantVariable, FitPoint, GroupVariables
from relayquant.stages.simulation.accumulator import make_narrow

#: dtype operand of the simulated operators, by (dtype, quant_min, quant_max); 0 passes through
SIMULATED_CODES: Mapping[tuple[str, int, int], int] = {
    ("int8", -128, 127): 1,
    ("uint8", 0, 255): 2,
    ("int32", -(2**31), 2**31 - 1): 3,
    ("int4", -8, 7): 4,
    ("int16", -32768, 32767): 5,
    ("int8", -127, 127): 6,
    ("uint16", 0, 65535): 7,
}


def build_calibration_graph(
    mod: tvm.IRModule, plan: Plan, backend: BackendConfig
) -> CalibrationGraph:
    """Build the calibration graph of a prepared module.

    main(inputs..., key.dtype, key.scale, key.zero_point (and bounds) for each group...,
    constants...) -> the outputs of the model. The constants are the weights and biases of anchors.
    As parameters, fitted ones can replace them.

    Raises:
        ConfigError: a group's dtype and limits have no simulated form.
    """
    graph = Graph(mod)
    taken = set(graph.vars)
    variables = {group.key: make_variables(group, taken) for group in plan.groups}
    constants = find_constants(graph, plan, backend)
    builder = _Simulation(graph, plan, backend, variables, constants)
    params = [*graph.func.params]
    for group in variables.values():
        params += group.vars
    params += [constant.var for constant in constants.values()]
    simulated = rewrite_main(
        mod,
        builder.visit,
        params=params,
        before=builder.quantize_inputs,
        attrs={"num_input": len(params)},
    )
    inputs = tuple(param.name for param in graph.func.params)
    return CalibrationGraph(simulated, variables, inputs, constants, tuple(builder.fits))


def find_constants(graph: Graph, plan: Plan, backend: BackendConfig) -> dict[str, ConstantVariable]:
    """Return weights and biases of quantized anchors, as new function parameters."""
    found: dict[str, ConstantVariable] = {}
    for operator in plan.operators:
        if not operator.quantized or not operator.pattern:
            continue
        pattern = find_pattern(backend, operator.pattern)
        if pattern.kind is not Kind.ANCHOR:
            continue
        match = match_operator(graph, backend, operator)
        for operand in pattern.operands:
            value = None
            if operand.role in (Role.WEIGHT, Role.BIAS):
                value = constant_value(match.parts[operand.name])
            if value is not None and value.dtype == "float32":
                key = f"{operator.name}:{operand.name}"
                var = relax.Var(key, relax.TensorType(value.shape, "float32"))
                found[key] = ConstantVariable(var, freeze_array(value))
    return found


def make_variables(group: SharedQParams, taken: Set[str]) -> GroupVariables:
    """Return new function parameters for one group, with names that are not in `taken`."""
    spec = group.info.spec
    length = 1
    if spec.is_per_channel and group.info.axis is not None:
        length = int(group.info.shape[group.info.axis])
    code = SIMULATED_CODES.get((spec.dtype, *spec.limits))
    is_narrow = code is None
    if is_narrow:
        code = SIMULATED_CODES.get((spec.dtype, *INTEGER_LIMITS[spec.dtype]))
    if code is None:
        known = sorted({dtype for dtype, _, _ in SIMULATED_CODES})
        raise ConfigError(
            f"Value {group.key!r} is to be {spec.dtype}, which has no simulated form. "
            f"Allowed: {', '.join(known)}.",
            code="RQ101",
        )
    prefix = group.key
    parts = ("dtype", "scale", "zero_point", "low", "high")
    while any(f"{prefix}.{part}" in taken for part in parts):
        prefix += ".q"
    bounds = ()
    if is_narrow:
        bounds = tuple(
            relax.Var(f"{prefix}.{end}", relax.TensorType((), "float32")) for end in ("low", "high")
        )
    return GroupVariables(
        group.key,
        code,
        length,
        relax.Var(f"{prefix}.dtype", relax.TensorType((), "int32")),
        relax.Var(f"{prefix}.scale", relax.TensorType((length,), "float32")),
        relax.Var(f"{prefix}.zero_point", relax.TensorType((length,), "int32")),
        bounds,
        spec.limits,
    )


class _Simulation(PlannedWalk):
    """State of one build: the expression for each value as quantized by a group."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        backend: BackendConfig,
        variables: Mapping[str, GroupVariables],
        constants: Mapping[str, ConstantVariable],
    ) -> None:
        super().__init__(graph, plan, backend)
        self.variables, self.constants = variables, constants
        self.fits: list[FitPoint] = []
        #: (value, group key) -> (value before rounding, groups that round it)
        self.sources: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
        self.rounded = {(v, g.key) for g in plan.groups for v in (*g.points, *g.clamped)}

    def add_views(self, emitter: Emitter, name: str, value: relax.Expr) -> relax.Expr:
        """Round `value` once for each of its groups. Return the primary view, or the value
        itself if it has no group.
        """
        first, roundings = value, ()
        for i, key in enumerate(self.plan.value_groups.get(name, ())):
            view, passed = first, roundings
            # A further group converts the result of the first group, wherever the value is.
            if i > 0 or (name, key) in self.rounded:
                view = self.simulate(emitter, first, key, name if i == 0 else key)
                passed = (*roundings, key)
            self.views[name, key] = view
            if isinstance(value, relax.Var):
                self.sources[name, key] = value.name, passed
            if i == 0:
                first, roundings = view, passed
        return first

    def simulate(
        self, emitter: Emitter, value: relax.Expr, key: str, name: str, axis: int = -1
    ) -> relax.Expr:
        """Return simulated_dequantize(simulated_quantize(value)) with the variables of a group."""
        dtype, scale, zero_point, *bounds = self.variables[key].vars
        quantized = qnn.simulated_quantize(value, dtype, scale, zero_point, axis=axis)
        if bounds:
            low, high = bounds
            wide = emitter.emit(quantized, f"{name}.unclipped")
            above = emitter.emit(relax.op.maximum(wide, low), f"{name}.unclipped")
            quantized = relax.op.minimum(above, high)
        quantized = emitter.emit(quantized, f"{name}.q")
        return emitter.emit(
            qnn.simulated_dequantize(quantized, dtype, scale, zero_point, axis=axis), f"{name}.d"
        )

    def repeat_operator(self, emitter: Emitter, operator: OperatorPlan) -> relax.Expr:
        """Run the operator's simulate callback on its operands, rounded as the plan says."""
        pattern = find_pattern(self.backend, operator.pattern)
        match = match_operator(self.graph, self.backend, operator)
        keys = dict(operator.operands)
        operands: dict[str, relax.Expr] = {}
        for operand in pattern.operands:
            expr = match.parts[operand.name]
            constant = self.constants.get(f"{operator.name}:{operand.name}")
            if isinstance(expr, relax.Tuple):
                fields = [
                    self.view(emitter, part, keys.get(f"{operand.name}.{i}"))
                    for i, part in enumerate(expr.fields)
                ]
                operands[operand.name] = relax.Tuple(fields)
            elif operand.name in keys and self.plan.group(keys[operand.name]).constant:
                key = keys[operand.name]
                axis = self.plan.group(key).info.axis
                source = emitter.get(expr) if constant is None else constant.var
                operands[operand.name] = self.simulate(
                    emitter, source, key, key, -1 if axis is None else axis
                )
            elif constant is not None:
                operands[operand.name] = constant.var
            else:
                operands[operand.name] = self.view(emitter, expr, keys.get(operand.name))
        data, weight = operands.get("data"), operands.get("weight")
        has_fit = f"{operator.name}:weight" in self.constants and operator.grouped is None
        if has_fit and pattern.feeds_back:
            self.fits.append(FitPoint(operator.name, match.root.name, (), weight.name))
        elif has_fit and isinstance(data, relax.Var):
            part = match.parts["data"]
            source = self.sources.get((part.name, keys.get("data", "")), (data.name, ()))
            self.fits.append(FitPoint(operator.name, *source, weight.name))
        narrow = None
        if operator.accumulator is not None and pattern.accumulator_axis is not None:
            factors = [self.variables[keys[operand.name]] for operand in pattern.operands[:2]]
            narrow = make_narrow(emitter, match, pattern, factors, operator.accumulator)
        return run_simulate(pattern, SimulateContext(emitter, match, operands, narrow))
