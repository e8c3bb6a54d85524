"""Last step of annotation if weights are fitted: module and plan -> both with a bias of zeros at
linear operators that have none. Calibration later stores the bias correction there.

y = linear(x, w) becomes y_unbiased = linear(x, w); y = y_unbiased + 0, with one number per output
channel. The function stays the same. A bias costs nothing in integers, because kernels initialize
the accumulator with it. If the model itself has a bias of zeros, the canonical form keeps it and
expands a scalar to one number per channel.

The plan is not built anew. All biases are added first, and the operators are matched once more. An
operator that another row or another line of the mapping would now match stays without a bias, and
so does one whose sum keeps a reader from being matched as planned. The rows of the others are
updated.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import Role
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.ir.ops import Kind
from relayquant.ir.ops.callbacks import run_accumulator_axis
from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.plan import OperatorPlan, Plan, SharedQParams
from relayquant.ir.rewrite import Emitter, Graph, Match, rewrite_main
from relayquant.ir.rewrite.function import SOURCES_ATTR, read_sources
from relayquant.ir.rewrite.graph import constant_value, free_vars, tensor_shape
from relayquant.stages.annotation.match import UNBIASED, OperatorMatch, match_operators
from relayquant.stages.annotation.shared_qparams import weight_group

#: products and convolutions that take a bias
LINEAR = frozenset(
    {
        "relax.matmul",
        "relax.nn.conv1d",
        "relax.nn.conv2d",
        "relax.nn.conv1d_transpose",
        "relax.nn.conv2d_transpose",
    }
)
#: maps the value of a product or convolution to its bias
Biases = Mapping[str, np.ndarray]


def add_biases(
    canonical: tvm.IRModule, plan: Plan, backend: BackendConfig, mapping: QConfigMapping
) -> tuple[tvm.IRModule, Plan]:
    """Return (module, plan) with a bias per channel at every operator that the plan quantizes with
    a constant weight. Both are returned unchanged if no bias is added.

    An operator stays without a bias in three cases: a line of the mapping selects the pattern
    without a bias, another line would decide for the pattern with a bias, or the backend has no row
    for the pattern with a bias. An operator whose data has dynamic parameters gets no bias either.
    The bias would be one more float operator, and there may be no data to correct it with.
    """
    missing = find_missing_biases(Graph(canonical), plan, backend, mapping)
    while missing:
        changed, products = insert_biases(canonical, dict(missing.values()))
        graph = Graph(changed)
        matches = {each.root.name: each for each in match_operators(graph, backend, mapping)}
        spoilt = find_spoilt(graph, plan, matches, missing)
        taken = {
            name: matches[name]
            for name, (linear, _) in missing.items()
            if name in matches
            and name not in spoilt
            and is_same(plan.operator(name), matches[name], products[linear])
        }
        if len(taken) == len(missing):
            moved = find_moved(plan, matches, missing)
            return changed, refine_plan(plan, taken | moved, products, graph.vars)
        # Without one bias, another operator may match otherwise: ask again.
        missing = {name: missing[name] for name in taken}
    return canonical, plan


def find_spoilt(
    graph: Graph, plan: Plan, matches: Mapping[str, OperatorMatch], missing: Collection[str]
) -> set[str]:
    """Return the operators that must stay without a bias, since a reader of their sum would not be
    matched as planned: add(conv, conv_with_bias) reads two sums then, and a row takes either.
    """
    spoilt: set[str] = set()
    for operator in plan.operators:
        if not operator.quantized or operator.name in missing:
            continue
        if not is_as_planned(operator, matches.get(operator.name)):
            values = [graph.values[graph.vars[name]] for name in operator.values]
            read = {var.name for value in values for var in free_vars(value)}
            spoilt |= read.intersection(missing) or set(missing)
    return spoilt


def find_moved(
    plan: Plan, matches: Mapping[str, OperatorMatch], missing: Collection[str]
) -> dict[str, OperatorMatch]:
    """Return the operators without a new bias that another row of the backend matches now: its
    operands stand in the other order.
    """
    return {
        operator.name: matches[operator.name]
        for operator in plan.operators
        if operator.quantized
        and operator.name not in missing
        and (row := matches[operator.name].pattern) is not None
        and row.name != operator.pattern
    }


def find_missing_biases(
    graph: Graph, plan: Plan, backend: BackendConfig, mapping: QConfigMapping
) -> dict[str, tuple[str, np.ndarray]]:
    """Map each operator without a bias to (value of its product or convolution, new bias)."""
    selected = {key for rule in mapping.rules for key in (rule.key, rule.object_type) if key}
    found: dict[str, tuple[str, np.ndarray]] = {}
    for operator in plan.operators:
        if not operator.quantized or operator.has_float_data or operator.pattern in selected:
            continue
        bias = find_missing_bias(graph, backend, operator)
        if bias is not None:
            found[operator.name] = bias
    return found


def find_missing_bias(
    graph: Graph, backend: BackendConfig, operator: OperatorPlan
) -> tuple[str, np.ndarray] | None:
    """Return (value of the product or convolution, bias to add). The bias is zeros in float32,
    shaped to broadcast. None if the operator has a bias or if none could be corrected.
    """
    row = find_pattern(backend, operator.pattern) if operator.pattern else None
    if row is None or row.kind is not Kind.ANCHOR or row.accumulator_axis is None:
        return None
    if Role.WEIGHT not in {operand.role for operand in row.operands}:
        return None
    match = match_operator(graph, backend, operator)
    axis, linear = run_accumulator_axis(row, match), find_linear(match)
    if "bias" in match.parts or axis is None or linear is None:
        return None
    shape = tensor_shape(linear)
    if shape is None:  # the bias is added to a value of known rank
        return None
    channels, rank = int(shape[axis]), len(shape)
    # The bias gets the rank of the result, as importers write it: any other form that broadcasts
    # keeps its layout.
    shape = shape_along(axis, rank, channels) if axis < rank - 1 else [channels]
    return linear.name, np.zeros(shape, "float32")


def find_linear(match: Match) -> relax.Var | None:
    """Return the value that a matched product or convolution with a constant float32 weight
    computes.
    """
    weight = constant_value(match.parts["weight"])
    if weight is None or weight.dtype != np.float32:
        return None
    for var in match.vars:
        call = match.graph.call_of(var)
        if call is not None and match.graph.op_name(var) in LINEAR:
            return var
    return None


def insert_biases(mod: tvm.IRModule, biases: Biases) -> tuple[tvm.IRModule, dict[str, str]]:
    """Return (module with these biases, value -> name of the value before the bias is added)."""
    sources = read_sources(mod["main"])
    products: dict[str, str] = {}

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        value, name = emitter.get(binding.value), binding.var.name
        if name not in biases:
            return value
        product = emitter.emit(value, f"{name}{UNBIASED}")
        products[name] = product.name
        if name in sources:
            sources[product.name] = sources[name]
        return relax.op.add(product, relax.const(biases[name], "float32"))

    changed = rewrite_main(mod, visit) if biases else mod
    if not sources or not biases:
        return changed, products
    note = {SOURCES_ATTR: json.dumps(sources)}
    same = rewrite_main(changed, lambda emitter, binding: emitter.get(binding.value), attrs=note)
    return same, products


def is_same(operator: OperatorPlan, matched: OperatorMatch, product: str) -> bool:
    """Whether the planned operator, with a bias, was matched as a whole and by the same line."""
    values = (*operator.values, product)
    return matched.kind is Kind.ANCHOR and is_as_planned(replace(operator, values=values), matched)


def is_as_planned(operator: OperatorPlan, matched: OperatorMatch | None) -> bool:
    """Whether the values of a quantized operator were matched as a whole and by the same line."""
    if matched is None or not matched.can_quantize:
        return False
    rule = matched.rule.description if matched.rule is not None else ""
    return {var.name for var in matched.vars} == {*operator.values} and rule == operator.rule


def refine_plan(
    plan: Plan,
    matches: Mapping[str, OperatorMatch],
    products: Mapping[str, str],
    known: Collection[str],
) -> Plan:
    """Return the plan with these operators as they are matched now. All other decisions stay.

    Args:
        products: The new names of the values that the operators' readers read.
        known: The names of all values of the changed module.
    """
    operators, groups = list(plan.operators), list(plan.groups)
    for i, operator in enumerate(operators):
        if operator.name in matches:
            matched = matches[operator.name]
            added = group_bias(matched)
            operators[i] = refine_operator(operator, matched, added)
            if not added:
                continue
            at = [group.constant == (operator.name, "weight") for group in groups].index(True)
            groups[at + 1 : at + 1] = added
    renamed = [
        group if group.constant else rename_consumers(group, products, known) for group in groups
    ]
    return replace(plan, operators=tuple(operators), groups=tuple(renamed))


def refine_operator(
    operator: OperatorPlan, matched: OperatorMatch, added: Collection[SharedQParams]
) -> OperatorPlan:
    """Return the plan's row for an operator with a bias."""
    keys = dict(operator.operands)
    keys.update((group.constant[1], group.key) for group in added if group.constant)
    return replace(
        operator,
        values=tuple(var.name for var in matched.vars),
        pattern=matched.pattern.name if matched.pattern is not None else "",
        operands=tuple((name, keys[name]) for name, *_ in matched.operands if name in keys),
        sources=matched.sources,
        accumulator=matched.accumulator,
        passed_over=matched.passed_over,
    )


def group_bias(matched: OperatorMatch) -> list[SharedQParams]:
    """Return the group of the bias if the bias has its own parameters."""
    if matched.qconfig is None or not matched.qconfig.has_own_bias:
        return []
    rows = [row for row in matched.operands if row[2].role is Role.BIAS]
    return [weight_group(matched, name, expr, operand) for name, expr, operand in rows]


def rename_consumers(
    group: SharedQParams, products: Mapping[str, str], known: Collection[str]
) -> SharedQParams:
    """Rename the readers of a group's values, and drop the readers that are gone."""
    renamed = (products.get(name, name) for name in group.info.consumers)
    consumers = tuple(name for name in renamed if name in known)
    return replace(group, info=replace(group.info, consumers=consumers))
