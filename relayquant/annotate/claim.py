"""First step of annotate: which pattern takes which operators, by priority, with a reason for each
refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm import relax

from relayquant.config import (
    Accumulator,
    BackendConfig,
    FloatConfig,
    MappingRule,
    ObservationType,
    OperatorSite,
    PatternConfig,
    QConfig,
    QConfigMapping,
    Selector,
)
from relayquant.ops import Kind, Operand, Output, QuantOp
from relayquant.plan import Plan, Support
from relayquant.qtypes import QSpec, Role
from relayquant.rewrite import Graph, Match, Skip
from relayquant.rewrite.graph import call_name, tensor_dtype
from relayquant.rewrite.sources import read_sources


@dataclass(frozen=True, eq=False)
class Claim:
    """An operator of the graph: its match and QConfig if it can be quantized, else why not."""

    root: relax.Var
    vars: tuple[relax.Var, ...]
    op: str
    pattern: QuantOp | None
    match: Match | None
    qconfig: QConfig | None
    skip: Skip | None
    sources: tuple[str, ...]
    support: Support = Support.SERVED
    rule: MappingRule | None = None  #: the line of the mapping that decided
    row: PatternConfig | None = None  #: the row of the backend that took it
    compute: str = ""  #: narrow float dtype that it is computed in

    @property
    def accumulator(self) -> Accumulator | None:
        """What holds its sums of products; None for the kernels' own, or where it has none."""
        if self.pattern is None or self.pattern.accumulator_axis is None:
            return None
        if self.row is None or self.qconfig is None:
            return None
        dtypes = self.row.find_dtypes(self.qconfig, **find_roles(self.pattern))
        return None if dtypes is None or dtypes.register.is_native else dtypes.register

    @property
    def can_quantize(self) -> bool:
        return self.skip is None and self.qconfig is not None

    @property
    def dynamic(self) -> QSpec | None:
        """Specification of its data where that gets parameters of the run time, else None."""
        if self.qconfig is None or not self.can_quantize or not self.qconfig.is_dynamic:
            return None
        return self.qconfig.activation.spec

    @property
    def kind(self) -> Kind | None:
        """What makes the operator worth quantizing; a result that shares the input's grid moves
        with it.
        """
        if self.pattern is None:
            return None
        return Kind.SHARING if self.output is Output.SHARED else self.pattern.kind

    @property
    def output(self) -> Output | None:
        """Where the result's parameters come from: the backend's word, else the pattern's."""
        if self.pattern is None:
            return None
        observation = self.row.observation if self.row is not None else None
        if observation is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
            return Output.SHARED
        if observation is ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT:
            return Output.OWN if self.pattern.output is Output.SHARED else self.pattern.output
        return self.pattern.output

    @property
    def has_own_output(self) -> bool:
        return self.output is Output.OWN

    @property
    def keeps_values(self) -> bool:
        """Whether the operator only moves or clamps values that are on a grid, so that they stay on
        it.
        """
        return self.pattern is not None and self.pattern.output is Output.SHARED

    def operands(self) -> Iterator[tuple[str, relax.Expr, Operand]]:
        """(name, expression, row) of every quantized operand; tuples are taken apart as name.0,
        name.1.
        """
        if self.pattern is None or self.match is None:
            return
        for operand in self.pattern.operands:
            expr = self.match.parts[operand.name]
            if isinstance(expr, relax.Tuple):
                for i, part in enumerate(expr.fields):
                    yield f"{operand.name}.{i}", part, operand
            else:
                yield operand.name, expr, operand

    def inputs(self) -> list[relax.Var]:
        """Operands that are computed values."""
        return [
            expr
            for _, expr, operand in self.operands()
            if operand.role is Role.ACTIVATION and isinstance(expr, relax.Var)
        ]


def claim_operators(
    graph: Graph, backend: BackendConfig, mapping: QConfigMapping
) -> tuple[Claim, ...]:
    """Every operator of the graph, in topological order, with the first pattern that accepts it.

    Goes from the outputs to the inputs, so that the longest pattern ends at the last of its
    operators.
    """
    sites = Sites(graph)
    claimed: set[relax.Var] = set()
    claims = []
    for binding in reversed(graph.bindings):
        var = binding.var
        if var in claimed or graph.call_of(var) is None:
            continue
        claim = choose_float(_claim(graph, var, backend, mapping, sites, claimed), backend)
        claimed.update(claim.vars)
        claims.append(claim)
    return tuple(reversed(claims))


def choose_float(claim: Claim, backend: BackendConfig) -> Claim:
    """The claim, computed in a narrow float dtype if the configuration says so and the backend
    can.
    """
    config = claim.rule.qconfig if claim.rule is not None else None
    if not isinstance(config, FloatConfig) or tensor_dtype(claim.root) != "float32":
        return claim
    if config.dtype in backend.float_dtypes:
        reason = f"computed in {config.dtype} by the configuration ({claim.rule.description})"
        return replace(claim, skip=Skip(reason), support=Support.SERVED, compute=config.dtype)
    skip = Skip(
        f"backend {backend.name!r} does not compute in {config.dtype}",
        "choose a backend whose float_dtypes have it, or None for float32",
    )
    return replace(claim, skip=skip, support=Support.DTYPE_UNSUPPORTED)


class Sites:
    """Operators as the lines of a mapping see them."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.sources = graph, read_nodes(graph)

    @cached_property
    def order(self) -> tuple[dict[str, tuple[tuple[str, ...], ...]], dict[relax.Var, int]]:
        """(names of all operators by type, place of each value among those of its type)."""
        peers: dict[str, list[tuple[str, ...]]] = {}
        places: dict[relax.Var, int] = {}
        for binding in self.graph.bindings:
            same = peers.setdefault(self.graph.op_name(binding.var), [])
            places[binding.var] = len(same)
            same.append(self.names((binding.var,)))
        return {op: tuple(same) for op, same in peers.items()}, places

    def nodes(self, variables: Sequence[relax.Var]) -> tuple[str, ...]:
        """Names of the source model's nodes that values came from."""
        return tuple(self.sources[var.name] for var in variables if var.name in self.sources)

    def names(self, variables: Sequence[relax.Var]) -> tuple[str, ...]:
        """Names of values and of the nodes they came from."""
        return (*(var.name for var in variables), *self.nodes(variables))

    def site(self, variables: Sequence[relax.Var], op: str, pattern: str) -> OperatorSite:
        """The operator that binds these values."""
        main = next((v for v in variables if self.graph.op_name(v) == op), variables[-1])
        peers, places = self.order
        return OperatorSite(
            self.names(variables), op, pattern, places.get(main, 0), peers.get(op, ())
        )


def find_sites(mod: tvm.IRModule, plan: Plan) -> dict[str, OperatorSite]:
    """The operators of a module's plan, by name, as the lines of a mapping see them."""
    graph = Graph(mod)
    sites = Sites(graph)
    return {
        row.name: sites.site([graph.vars[value] for value in row.values], row.op, row.pattern)
        for row in plan.operators
    }


def _claim(
    graph: Graph,
    var: relax.Var,
    backend: BackendConfig,
    mapping: QConfigMapping,
    sites: Sites,
    claimed: set[relax.Var],
) -> Claim:
    refusal: Claim | None = None
    for row in backend.patterns:
        pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
        match = pattern.pattern.match(graph, var)
        if match is None or any(inner in claimed for inner in match.inner):
            continue
        nodes = sites.nodes(match.vars)
        rule = mapping.find_rule(sites.site(match.vars, pattern.op, pattern.name))
        qconfig = rule.qconfig if rule is not None else None
        qconfig = backend.adapt_qconfig(qconfig) if isinstance(qconfig, QConfig) else None
        skip = pattern.find_refusal(match)
        if skip is None:
            skip, support = find_refusal(row, pattern, rule, qconfig, backend.name)
            return Claim(
                var,
                match.vars,
                pattern.op,
                pattern,
                match,
                qconfig,
                skip,
                nodes,
                support,
                rule,
                row,
            )
        if refusal is None and graph.op_name(var) == pattern.op:
            nodes = sites.nodes((var,))
            support = Support.NOT_ASKED if qconfig is None else Support.FORM_UNSUPPORTED
            refusal = Claim(
                var, (var,), pattern.op, pattern, None, None, skip, nodes, support, rule, row
            )
    if refusal is not None:
        return refusal
    op, nodes = call_name(graph.values[var]), sites.nodes((var,))
    rule = mapping.find_rule(sites.site((var,), op, ""))
    dtype = tensor_dtype(var)
    if dtype and not dtype.startswith("float"):
        skip, support = Skip(f"its result is {dtype}, not float"), Support.NOT_ASKED
    else:
        support = Support.NOT_ASKED
        if rule is not None and rule.qconfig is not None:
            support = Support.PATTERN_UNKNOWN
        skip = Skip(
            f"backend {backend.name!r} has no pattern for {op}",
            "add one with backend.with_pattern(...), or leave it in float",
        )
    return Claim(var, (var,), op, None, None, None, skip, nodes, support, rule)


def find_refusal(
    row: PatternConfig,
    pattern: QuantOp,
    rule: MappingRule | None,
    qconfig: QConfig | None,
    backend: str,
) -> tuple[Skip | None, Support]:
    """Why an operator that matches a row of the backend stays in float (None: it does not), and
    what that means.
    """
    if rule is None:
        reason = "no line of the QConfigMapping selects it"
        return Skip(reason, "add set_global or set_object_type"), Support.NOT_ASKED
    if qconfig is None:
        reason = f"kept in float by the configuration ({rule.description})"
        return Skip(reason), Support.NOT_ASKED
    if row.observation is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        reason = f"backend {backend!r} runs {pattern.name} in float on purpose"
        return Skip(reason), Support.NOT_ASKED
    if qconfig.is_dynamic and pattern.kind is not Kind.ANCHOR and rule.kind is Selector.GLOBAL:
        reason = "parameters of the run time are for operators with weights, it has none"
        return Skip(reason), Support.NOT_ASKED
    skip = find_dtype_conflict(row, pattern, qconfig, backend)
    if skip is None and qconfig.is_dynamic and pattern.realize_dynamic is None:
        reason = f"pattern {pattern.name!r} has no callback for parameters of the run time"
        skip = Skip(reason, "give its QuantOp a realize_dynamic")
    return skip, Support.SERVED if skip is None else Support.DTYPE_UNSUPPORTED


def find_dtype_conflict(
    row: PatternConfig, pattern: QuantOp, qconfig: QConfig, backend: str
) -> Skip | None:
    """Why the backend cannot run the pattern with this QConfig; None when one of its DTypeConfigs
    fits.
    """
    conflict = row.find_conflict(qconfig, **find_roles(pattern))
    if conflict is None:
        return None
    allowed = "; ".join(dtypes.description for dtypes in row.dtypes) or "nothing"
    return Skip(
        f"backend {backend!r} cannot run {pattern.name} so: {conflict}",
        f"choose a QConfig with {allowed}",
    )


def find_roles(pattern: QuantOp) -> dict[str, bool]:
    """Which constant operands a pattern has."""
    roles = {operand.role for operand in pattern.operands}
    return {"has_weight": Role.WEIGHT in roles, "has_bias": Role.BIAS in roles}


def read_nodes(graph: Graph) -> dict[str, str]:
    """Value name -> name of the source model's node, as the importer recorded it."""
    table = read_sources(graph.func)
    return {value: row["node"] for value, row in table.items() if row.get("node")}
