"""Entry point of annotation: prepared float module -> plan. It matches operators, decides which are
quantized and groups the values that share parameters.

An anchor (conv, matmul) is quantized wherever the backend allows it. A follower (add, mean) is
quantized if all its inputs are quantized or if an anchor reads its result. A connector (add,
multiply, a table) is quantized only between quantized operators. A sharing operator (reshape,
max_pool, relu) is quantized if its input is, or if its output is wanted as integers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relax

from relayquant.config import BackendConfig, QConfigMapping
from relayquant.config.mapping import MappingRule, OperatorSite, Selector, is_type
from relayquant.config.relay_names import RELAY_NAMES
from relayquant.errors import ConfigError
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.ops import Kind
from relayquant.ir.plan import OperatorPlan, Plan
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.annotation.match import Claim, Sites, claim_operators
from relayquant.stages.annotation.shared_qparams import build_groups


def annotate(
    mod: tvm.IRModule,
    backend: BackendConfig,
    mapping: QConfigMapping,
    wanted: Collection[str] = (),
) -> Plan:
    """Return the plan for a prepared float module.

    Args:
        wanted: Names of the outputs that the module returns as integers.

    Raises:
        ConfigError: a line of the mapping selects nothing.
        ModelError: the module has no main, or it is not in normal form.
    """
    graph = Graph(mod)
    claims = claim_operators(graph, backend, mapping)
    check_mapping(graph, claims, mapping)
    quantized = decide_quantized(graph, claims, wanted)
    check_wanted(claims, quantized, wanted)
    found = build_groups(graph, claims, quantized, wanted)
    operators = []
    for claim in claims:
        row = OperatorPlan(
            name=claim.root.name,
            op=claim.op,
            values=tuple(var.name for var in claim.vars),
            pattern=claim.pattern.name if claim.pattern is not None and claim.match else "",
            sources=claim.sources,
            support=claim.support,
            rule=claim.rule.description if claim.rule is not None else "",
            is_explicit=claim.rule is not None and claim.rule.kind is not Selector.GLOBAL,
            passed_over=claim.passed_over,
        )
        if claim.root in quantized:
            name = claim.root.name
            row = replace(
                row,
                quantized=True,
                operands=found.operands[name],
                output=found.outputs.get(name),
                accumulator=claim.accumulator,
                dynamic=claim.dynamic,
                grouped=claim.grouped,
            )
        else:
            skip = claim.skip
            row = replace(
                row,
                reason=skip.reason if skip else "neither its input nor its result is quantized",
                advice=skip.advice if skip else "",
                compute=claim.compute,
            )
        operators.append(row)
    return Plan(tuple(operators), found.groups, found.value_groups)


def check_mapping(graph: Graph, claims: Sequence[Claim], mapping: QConfigMapping) -> None:
    """Raise ConfigError for lines that select no operator: the name is misspelt, or the operator
    was folded away.
    """
    sites = Sites(graph)
    for rule in mapping.rules:
        if rule.kind is Selector.GLOBAL or rule.optional:
            continue
        if not any(rule.selects(find_site(sites, claim)) for claim in claims):
            names = sorted({claim.root.name for claim in claims})
            by_type = rule.kind is Selector.OBJECT_TYPE
            known = sorted({claim.op for claim in claims}) if by_type else names
            raise ConfigError(
                f"QConfigMapping: {rule.description} selects no operator of the model. "
                f"{find_fused(graph, claims, rule)}{suggest_type(claims, rule)}"
                f"Known: {', '.join(known[:40])}{' ...' if len(known) > 40 else ''}.",
                code="RQ103",
            )


def find_site(sites: Sites, claim: Claim) -> OperatorSite:
    """Describe a matched operator in the form that mapping lines are compared with."""
    return sites.site(claim.vars, claim.op, claim.pattern.name if claim.pattern else "")


def suggest_type(claims: Sequence[Claim], rule: MappingRule) -> str:
    """Return a sentence with the type name that a line by type may mean; "" if no name is near."""
    wanted = rule.object_type or (rule.key if rule.kind is Selector.OBJECT_TYPE else "")
    names = {claim.op.removeprefix("relax.") for claim in claims} | set(RELAY_NAMES)
    names |= {claim.pattern.name for claim in claims if claim.pattern}
    near = difflib.get_close_matches(wanted, sorted(names), 1) if wanted not in names else []
    return f"Did you mean {near[0]!r}? " if near else ""


def find_fused(graph: Graph, claims: Sequence[Claim], rule: MappingRule) -> str:
    """Return a sentence on the operator that a line by type means if a pattern absorbed that
    operator; else "".
    """
    wanted = rule.object_type or (rule.key if rule.kind is Selector.OBJECT_TYPE else "")
    for claim in claims:
        for var in claim.vars if wanted and claim.pattern else ():
            op = graph.op_name(var)
            if op != claim.op and is_type(op, "", wanted):
                name = op.removeprefix("relax.")
                return (
                    f"{name} is part of {claim.root.name!r} ({claim.pattern.name}); select that. "
                )
    return ""


def check_wanted(
    claims: Sequence[Claim], quantized: frozenset[relax.Var], wanted: Collection[str]
) -> None:
    """Raise ConfigError for outputs that are wanted as integers but are computed in float."""
    for claim in claims:
        is_float = claim.root not in quantized or claim.has_float_data
        if claim.root.name in wanted and is_float:
            reason = claim.skip.reason if claim.skip else "none of its inputs is quantized"
            if claim.dynamic is not None:
                reason = "its data has parameters of the run time"
            if claim.grouped is not None:
                reason = "its weight alone is quantized, in groups"
            raise ConfigError(
                f"output_dtypes: output {claim.root.name!r} ({claim.op.removeprefix('relax.')}) is "
                "computed in "
                f"float: {reason}. Leave it out of output_dtypes, or quantize the operator.",
                code="RQ103",
            )


def decide_quantized(
    graph: Graph, claims: Sequence[Claim], wanted: Collection[str] = ()
) -> frozenset[relax.Var]:
    """Return the roots of the operators that run on integers.

    Start with every operator that may be quantized. Then repeat until nothing changes: remove each
    operator that is not worth quantizing (see `is_worthwhile`), and each connector that a float
    operator reads.
    """
    # An operator with dynamic parameters or with weights in groups reads and returns float values,
    # so it neither needs nor provides integers for its neighbours.
    alone = {claim.root for claim in claims if claim.has_float_data}
    quantized = {
        claim.root: claim for claim in claims if claim.can_quantize and claim.root not in alone
    }
    owner = {var: claim.root for claim in claims for var in claim.vars}
    given = find_given(graph)
    while True:
        below = reach_down(quantized.values(), given)
        above = reach_up(quantized.values(), wanted)
        removed = [
            root
            for root, claim in quantized.items()
            if not is_worthwhile(claim, [var in below for var in claim.inputs()], root in above)
            or (claim.kind is Kind.CONNECTOR and has_float_reader(graph, root, owner, quantized))
        ]
        if not removed:
            return frozenset(quantized) | alone
        for root in removed:
            del quantized[root]


def find_given(graph: Graph) -> list[relax.Var]:
    """Return the values that the model already holds as integers. Constants that the model
    dequantizes count as ordinary constants.
    """
    return [
        var
        for var in graph.order
        if graph.op_name(var) == DEQUANTIZE and constant_value(graph.values[var].args[0]) is None
    ]


def is_worthwhile(claim: Claim, available: Sequence[bool], wanted: bool) -> bool:
    """Decide whether an operator should run on integers.

    Args:
        available: For each input, whether it is available as integers.
        wanted: Whether an anchor wants the result as integers.
    """
    if claim.kind is Kind.ANCHOR:
        return True
    if claim.kind is Kind.SHARING:
        return any(available) or wanted
    if claim.kind is Kind.CONNECTOR:
        return bool(available) and all(available) and wanted
    return (bool(available) and all(available)) or (any(available) and wanted)


def has_float_reader(
    graph: Graph,
    root: relax.Var,
    owner: Mapping[relax.Var, relax.Var],
    quantized: Mapping[relax.Var, Claim],
) -> bool:
    """Whether a float operator reads the value. It would read the value after rounding to 8 bits.

    So the residual stream of a transformer, which layer norms read, stays in float.
    """
    return any(owner.get(user) not in quantized for user in graph.users[root])


def reach_down(quantized: Iterable[Claim], given: Iterable[relax.Var]) -> set[relax.Var]:
    """Return the values that carry integers: an anchor's result, the values that the model
    already holds as integers (`given`), and everything computed from them by quantized
    operators.
    """
    reached = set(given)
    for claim in quantized:  # in topological order
        if claim.kind is Kind.ANCHOR or any(var in reached for var in claim.inputs()):
            reached.add(claim.root)
    return reached


def reach_up(quantized: Iterable[Claim], wanted: Collection[str] = ()) -> set[relax.Var]:
    """Return the values that an anchor or the user wants as integers, directly or through other
    quantized operators.
    """
    reached = {claim.root for claim in quantized if claim.root.name in wanted}
    for claim in reversed(list(quantized)):
        if claim.kind is Kind.ANCHOR or claim.root in reached:
            reached.update(claim.inputs())
    return reached
