"""Optional last step of prepare: linear operators without a bias get one, of zeros, so that
calibration has where to put what rounding the weights changes in the mean.

y = linear(x, w) -> y_unbiased = linear(x, w); y = y_unbiased + 0, one number per output channel:
the same function. In integers a bias costs nothing: kernels begin their sums with it. (Zeros that a
model has itself stay in the canonical form, and a single number becomes one for each channel.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from relayquant.base.qtypes import Role
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.ir.ops import Kind
from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.plan import OperatorPlan, Plan
from relayquant.ir.rewrite import Emitter, Graph, Match, rewrite_main
from relayquant.ir.rewrite.function import SOURCES_ATTR, read_sources
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.stages.preparation.dense import LINEAR


def add_planned_biases(
    canonical: tvm.IRModule,
    plan: Plan,
    mapping: QConfigMapping,
    backend: BackendConfig,
    make_plan: Callable[[tvm.IRModule], Plan],
) -> tuple[tvm.IRModule, Plan]:
    """(module, plan) with a bias at every operator whose weights are fitted, for its correction;
    without it where a line of the mapping is for the pattern without a bias, and where the backend
    has no row for an operator with one.
    """
    selected = {key for rule in mapping.rules for key in (rule.key, rule.object_type)}
    skip = {row.name for row in plan.operators if row.pattern and row.pattern in selected}
    fixed = {group.key: group for group in plan.groups if group.is_fixed}

    def list_quantized(plan: Plan) -> dict[str, str]:
        return {row.name: row.rule for row in plan.operators if row.quantized}

    before = list_quantized(plan)
    while True:
        changed = add_biases(canonical, plan, backend, skip)
        if changed is canonical:
            return canonical, plan
        new = make_plan(changed)
        after = list_quantized(new)
        lost = {name for name, rule in before.items() if after.get(name) != rule}
        if lost <= skip:
            groups = tuple(fixed.get(group.key, group) for group in new.groups)
            return changed, replace(new, groups=groups)
        skip |= lost


def add_biases(
    mod: tvm.IRModule, plan: Plan, backend: BackendConfig, skip: Collection[str] = ()
) -> tvm.IRModule:
    """The prepared module with a bias per channel at every operator that the plan quantizes with a
    constant weight, but those named in `skip`; `mod` itself if all have one. A changed module needs
    a new plan. Where data gets parameters of the run time, a bias is a float operator more, and
    there may be no data to correct it by: those get none.
    """
    graph = Graph(mod)
    operators = [
        op
        for op in plan.operators
        if op.quantized and not op.has_float_data and op.name not in skip
    ]
    biases: dict[relax.Var, np.ndarray] = {}
    for operator in operators:
        biases.update(find_missing_bias(graph, backend, operator))
    if not biases:
        return mod
    sources = read_sources(graph.func)

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        value = emitter.get(binding.value)
        if binding.var not in biases:
            return value
        bias = relax.const(biases[binding.var], "float32")
        name = binding.var.name
        product = emitter.emit(value, f"{name}_unbiased")
        if name in sources:
            sources[product.name] = sources[name]
        return relax.op.add(product, bias)

    rewritten = rewrite_main(mod, visit)
    if not sources:
        return rewritten
    note = {SOURCES_ATTR: json.dumps(sources)}
    return rewrite_main(rewritten, lambda emitter, binding: emitter.get(binding.value), attrs=note)


def find_missing_bias(
    graph: Graph, backend: BackendConfig, operator: OperatorPlan
) -> dict[relax.Var, np.ndarray]:
    """The linear operator -> the bias that it is to have, zeros float32, shaped to broadcast; empty
    where it has one, or none could be corrected.
    """
    row = find_pattern(backend, operator.pattern) if operator.pattern else None
    if row is None or row.kind is not Kind.ANCHOR or row.accumulator_axis is None:
        return {}
    if Role.WEIGHT not in {operand.role for operand in row.operands}:
        return {}
    match = match_operator(graph, backend, operator)
    axis, linear = row.accumulator_axis(match), find_linear(match)
    if "bias" in match.parts or axis is None or linear is None:
        return {}
    shape = tensor_shape(linear)
    if shape is None:  # what it is added to must have its rank
        return {}
    channels, rank = int(shape[axis]), len(shape)
    # Of the rank of the result, as importers write it: what else broadcasts keeps its layout.
    shape = [channels if i == axis else 1 for i in range(rank)] if axis < rank - 1 else [channels]
    return {linear: np.zeros(shape, "float32")}


def find_linear(match: Match) -> relax.Var | None:
    """The value that a matched product or convolution with a constant float32 weight computes."""
    weight = constant_value(match.parts["weight"])
    if weight is None or weight.dtype != np.float32:
        return None
    for var in match.vars:
        call = match.graph.call_of(var)
        if call is not None and match.graph.op_name(var) in LINEAR:
            return var
    return None
