"""Entry point of annotation: prepared float module -> plan. It matches operators, decides which are
quantized and groups the values that share parameters.

An anchor (conv, matmul) is quantized wherever the backend allows it. A follower (add, mean) is
quantized if all its inputs are quantized or if an anchor reads its result. A connector (add,
multiply, a table) is quantized only between quantized operators. A sharing operator (reshape,
max_pool, relu) is quantized if its input is, or if its output is wanted as integers. Where sums of
products reach only float operators and outputs of the model, nothing that moves them is quantized:
the sums are exact, and would be rounded to 8 bits.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import tvm
from tvm import relax

from relayquant.config import BackendConfig, QConfigMapping
from relayquant.config.mapping import MappingRule, OperatorSite, Selector, is_below, is_type
from relayquant.config.onnx_names import ONNX_NAMES
from relayquant.config.relay_names import RELAY_NAMES
from relayquant.errors import ConfigError
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.ops import Kind
from relayquant.ir.ops.shape import SELECTIONS
from relayquant.ir.plan import OperatorPlan, Plan
from relayquant.ir.rewrite import Graph, Skip
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.annotation.match import OperatorMatch, Sites, match_operators
from relayquant.stages.annotation.shared_qparams import NamedSets, build_groups


def annotate(
    mod: tvm.IRModule | Graph,
    backend: BackendConfig,
    mapping: QConfigMapping,
    wanted: Collection[str] = (),
) -> Plan:
    """Return the plan for a prepared float module.

    Args:
        mod: The module; or its graph, which knows what earlier plans found in it.
        wanted: Names of the outputs that the module returns as integers.

    Raises:
        ConfigError: a line of the mapping selects nothing.
        ModelError: the module has no main, or it is not in normal form.
    """
    graph = Graph.of(mod)
    matches = match_operators(graph, backend, mapping)
    check_mapping(graph, matches, mapping)
    return make_plan(graph, matches, wanted)


def plan_without(
    graph: Graph, backend: BackendConfig, mapping: QConfigMapping, wanted: Collection[str]
) -> Callable[[Collection[str]], list[OperatorPlan]]:
    """Return a function from the names of operators that go to float to the rows of a plan for what
    still runs on integers then; arguments as of `annotate`. Operators are matched once for all its
    calls, and nothing is said of groups but their keys.
    """
    matches = match_operators(graph, backend, mapping)

    def revert(matched: OperatorMatch) -> OperatorMatch:
        rule = MappingRule(Selector.MODULE_NAME, matched.root.name, None)
        return replace(matched, qconfig=None, rule=rule)

    def find(names: Collection[str]) -> list[OperatorPlan]:
        left = [revert(m) if m.root.name in names else m for m in matches]
        quantized = decide_quantized(graph, left, wanted)
        found = NamedSets.of(graph, left, quantized, wanted)
        return [
            plan_integers(m, found.operands(m), found.output(m))
            for m in left
            if m.root in quantized
        ]

    return find


def make_plan(graph: Graph, matches: Sequence[OperatorMatch], wanted: Collection[str] = ()) -> Plan:
    """Decide which of the matched operators are quantized, and group the values; see `annotate`."""
    quantized = decide_quantized(graph, matches, wanted)
    check_wanted(matches, quantized, wanted)
    found = build_groups(graph, matches, quantized, wanted)
    operators = []
    integers = {var for matched in matches if matched.root in quantized for var in matched.vars}
    sums = find_moved_sums(graph, matches)
    for matched in matches:
        if matched.root in quantized:
            name = matched.root.name
            row = plan_integers(matched, found.operands[name], found.outputs.get(name))
        else:
            skip = matched.skip or explain_neighbours(graph, matched, integers, sums)
            row = replace(
                describe_operator(matched),
                reason=skip.reason,
                advice=skip.advice,
                compute=matched.compute,
            )
        operators.append(row)
    return Plan(tuple(operators), found.groups, found.value_groups)


def plan_integers(
    matched: OperatorMatch, operands: tuple[tuple[str, str], ...], output: str | None
) -> OperatorPlan:
    """The row of an operator that runs on integers.

    Args:
        operands: (operand, group key) for each quantized operand.
        output: Group key of its result.
    """
    return replace(
        describe_operator(matched),
        quantized=True,
        operands=operands,
        output=output,
        accumulator=matched.accumulator,
        dynamic=matched.dynamic,
        grouped=matched.grouped,
        has_constants_only=matched.has_constants_only,
    )


def describe_operator(matched: OperatorMatch) -> OperatorPlan:
    """What the row of an operator says wherever it runs."""
    return OperatorPlan(
        name=matched.root.name,
        op=matched.op,
        values=tuple(var.name for var in matched.vars),
        pattern=matched.pattern.name if matched.pattern is not None and matched.match else "",
        sources=matched.sources,
        support=matched.support,
        rule=matched.rule.description if matched.rule is not None else "",
        is_explicit=matched.rule is not None and matched.rule.kind is not Selector.GLOBAL,
        passed_over=matched.passed_over,
    )


def explain_neighbours(
    graph: Graph, matched: OperatorMatch, integers: Set[relax.Var], sums: Set[relax.Var]
) -> Skip:
    """Say why an operator that could run on integers stays in float.

    Args:
        integers: All values inside operators that run on integers.
        sums: See `find_moved_sums`.
    """
    if matched.root in sums:
        reason = "it moves sums of products to float operators or outputs, and they stay exact"
        return Skip(reason, matched.remedy)
    neighbours = [*matched.inputs, *graph.users[matched.root]]
    floats = [v.name for v in neighbours if v not in integers and graph.call_of(v) is not None]
    advice = f"relayquant.ledger(qmod).row({floats[0]!r}).reason is the cause" if floats else ""
    if not floats and matched.root in graph.outputs and matched.inputs:
        dtype = matched.result_spec.dtype
        advice = f"output_dtypes={{{matched.root.name!r}: {dtype!r}}} makes the output integers"
    if not integers.isdisjoint(neighbours):
        return Skip("it computes no products, and an operator next to it runs in float", advice)
    return Skip("neither its input nor its result is quantized", advice if floats else "")


def check_mapping(graph: Graph, matches: Sequence[OperatorMatch], mapping: QConfigMapping) -> None:
    """Raise ConfigError for lines that select no operator: the name is misspelt, or the operator
    was folded away.
    """
    sites = Sites.of(graph)
    for rule in mapping.rules:
        if rule.kind is Selector.MODULE_CLASS and not rule.modules:
            raise ConfigError(
                f"QConfigMapping: {rule.description} names a class of PyTorch modules, but a Relax "
                "module does not know the classes. Call relayquant.torch.quantize, prepare or "
                'prepare_qat, or select the operator ("nn.dense" or torch.nn.functional.linear for '
                "torch.nn.Linear).",
                code="RQ102",
            )
        if rule.kind is Selector.GLOBAL or rule.optional:
            continue
        if not any(rule.selects(find_site(sites, matched)) for matched in matches):
            names = sorted({matched.root.name for matched in matches})
            by_type = rule.kind is Selector.OBJECT_TYPE
            known = sorted({matched.op for matched in matches}) if by_type else names
            raise ConfigError(
                f"QConfigMapping: {rule.description} selects no operator of the model. "
                f"{find_fused(graph, matches, rule)}{suggest_type(matches, rule)}"
                f"Known: {', '.join(known[:40])}{' ...' if len(known) > 40 else ''}.",
                code="RQ103",
            )


def find_site(sites: Sites, matched: OperatorMatch) -> OperatorSite:
    """Describe a matched operator in the form that mapping lines are compared with."""
    return sites.site(matched.vars, matched.op, matched.pattern.name if matched.pattern else "")


def suggest_type(matches: Sequence[OperatorMatch], rule: MappingRule) -> str:
    """Return a sentence with the type name that a line by type may mean; "" if no name is near."""
    wanted = rule.object_type or (rule.key if rule.kind is Selector.OBJECT_TYPE else "")
    names = {matched.op.removeprefix("relax.") for matched in matches} | {*RELAY_NAMES, *ONNX_NAMES}
    names |= {matched.pattern.name for matched in matches if matched.pattern}
    near = difflib.get_close_matches(wanted, sorted(names), 1) if wanted not in names else []
    return f"Did you mean {near[0]!r}? " if near else ""


def find_fused(graph: Graph, matches: Sequence[OperatorMatch], rule: MappingRule) -> str:
    """Return a sentence on the operator that a line by type or class means if a pattern absorbed
    that operator; else "".
    """
    wanted = rule.object_type or (rule.key if rule.kind is Selector.OBJECT_TYPE else "")
    for matched in matches:
        for path in rule.modules:
            if any(is_below(var.name, path) for var in matched.vars) and matched.pattern:
                whole = f"{matched.root.name!r} ({matched.pattern.name})"
                return f"Module {path!r} is part of {whole}; select that by its name. "
        for var in matched.vars if wanted and matched.pattern else ():
            op = graph.op_name(var)
            if op != matched.op and is_type(op, "", wanted):
                name = op.removeprefix("relax.")
                whole = f"{matched.root.name!r} ({matched.pattern.name})"
                return f"{name} is part of {whole}; select that. "
    return ""


def check_wanted(
    matches: Sequence[OperatorMatch], quantized: frozenset[relax.Var], wanted: Collection[str]
) -> None:
    """Raise ConfigError for outputs that are wanted as integers but are computed in float."""
    for matched in matches:
        is_float = matched.root not in quantized or matched.has_float_data
        if matched.root.name in wanted and is_float:
            reason = matched.skip.reason if matched.skip else "none of its inputs is quantized"
            if matched.dynamic is not None:
                reason = "its data has parameters of the run time"
            if matched.grouped is not None:
                reason = "its weight alone is quantized, in groups"
            if matched.has_constants_only:
                reason = "its weight alone is quantized"
            raise ConfigError(
                f"output_dtypes: output {matched.root.name!r} "
                f"({matched.op.removeprefix('relax.')}) is computed in float: {reason}. Leave it "
                "out of output_dtypes, or quantize the operator.",
                code="RQ103",
            )


def decide_quantized(
    graph: Graph, matches: Sequence[OperatorMatch], wanted: Collection[str] = ()
) -> frozenset[relax.Var]:
    """Return the roots of the operators that run on integers.

    Start with every operator that may be quantized. Then repeat until nothing changes: remove each
    operator that is not worth quantizing (see `is_worthwhile`), each connector that a float
    operator reads, and each operator that only moves exact sums to float operators and outputs.
    """
    # An operator with dynamic parameters or with weights in groups reads and returns float values,
    # so it neither needs nor provides integers for its neighbours.
    alone = {matched.root for matched in matches if matched.has_float_data}
    quantized = {
        matched.root: matched
        for matched in matches
        if matched.can_quantize and matched.root not in alone
    }
    owner = {var: matched.root for matched in matches for var in matched.vars}
    given, sums = find_given(graph), find_moved_sums(graph, matches)

    def readers(root: relax.Var) -> list[bool]:
        return list_integer_readers(graph, root, owner, quantized)

    while True:
        below = reach_down(quantized.values(), given)
        above = reach_up(quantized.values(), wanted)
        moved = sums - above
        removed = [
            root
            for root, matched in quantized.items()
            if not is_worthwhile(matched, [var in below for var in matched.inputs], root in above)
            or (matched.kind is Kind.CONNECTOR and not all(readers(root)))
            or (root in moved and not any(readers(root)))
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


def is_worthwhile(matched: OperatorMatch, available: Sequence[bool], wanted: bool) -> bool:
    """Decide whether an operator should run on integers.

    Args:
        available: For each input, whether it is available as integers.
        wanted: Whether an anchor wants the result as integers.
    """
    if matched.kind is Kind.ANCHOR:
        return True
    if matched.kind is Kind.SHARING:
        return any(available) or wanted
    if matched.kind is Kind.CONNECTOR:
        return bool(available) and all(available) and wanted
    return (bool(available) and all(available)) or (any(available) and wanted)


def list_integer_readers(
    graph: Graph,
    root: relax.Var,
    owner: Mapping[relax.Var, relax.Var],
    quantized: Mapping[relax.Var, OperatorMatch],
) -> list[bool]:
    """Return for each reader of a value whether it runs on integers. A float operator would read
    the value after rounding to 8 bits.

    So the residual stream of a transformer, which layer norms read, stays in float.
    """
    return [owner.get(user) in quantized for user in graph.users[root]]


def find_moved_sums(graph: Graph, matches: Sequence[OperatorMatch]) -> set[relax.Var]:
    """Return the results of operators that only move sums of products which nothing else reads.
    A concatenation counts if one of its parts is such a value. An operator that a line of the
    mapping names does not count.
    """
    moves = {
        matched.root
        for matched in matches
        if matched.op in SELECTIONS
        and (matched.rule is None or matched.rule.kind is Selector.GLOBAL)
    }
    moved: set[relax.Var] = set()
    for matched in matches:  # in topological order
        if matched.kind is Kind.ANCHOR and not matched.has_float_data:
            if moves.issuperset(graph.users[matched.root]):
                moved.add(matched.root)
        elif matched.root in moves and not moved.isdisjoint(matched.inputs):
            moved.add(matched.root)
    return moved & moves


def reach_down(quantized: Iterable[OperatorMatch], given: Iterable[relax.Var]) -> set[relax.Var]:
    """Return the values that carry integers: an anchor's result, the values that the model
    already holds as integers (`given`), and everything computed from them by quantized
    operators.
    """
    reached = set(given)
    for matched in quantized:  # in topological order
        if matched.kind is Kind.ANCHOR or any(var in reached for var in matched.inputs):
            reached.add(matched.root)
    return reached


def reach_up(quantized: Iterable[OperatorMatch], wanted: Collection[str]) -> set[relax.Var]:
    """Return the values that an anchor or the user wants as integers, directly or through other
    quantized operators.
    """
    reached = {matched.root for matched in quantized if matched.root.name in wanted}
    for matched in reversed(list(quantized)):
        if matched.kind is Kind.ANCHOR or matched.root in reached:
            reached.update(matched.inputs)
    return reached
