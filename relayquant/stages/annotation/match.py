"""First step of annotation: graph + backend + configuration -> operators, each matched by the
first pattern that accepts it, or kept in float with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm import relax

from relayquant.base.qtypes import Granularity, QSpec, Role
from relayquant.config import (
    Accumulator,
    BackendConfig,
    FloatConfig,
    ObservationType,
    PatternConfig,
    QConfig,
    QConfigMapping,
    Support,
)
from relayquant.config.mapping import MappingRule, OperatorSite, Selector
from relayquant.ir.dialect.qnn.recurrent import RECURRENT_OPERATORS
from relayquant.ir.ops import Kind, Operand, Output, QuantOp
from relayquant.ir.ops.callbacks import run_check, run_match
from relayquant.ir.ops.find import order_rows
from relayquant.ir.ops.passed_over import ask_limit, describe_owner, find_passed_over
from relayquant.ir.plan import PassedOver, Plan
from relayquant.ir.rewrite import Graph, Match, Skip
from relayquant.ir.rewrite.function import read_sources
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype
from relayquant.ir.rewrite.pattern import may_match

#: number of patterns named in the reason for an operator that matches none of them
MOST_NAMES = 4

#: suffix for the name of a value before its bias is added
UNBIASED = "_unbiased"

#: name of the operand that a row adds to the sums of products
RESIDUAL = "residual"


@dataclass(frozen=True, eq=False)
class OperatorMatch:
    """An operator of the graph: its match and QConfig if it can be quantized, else the reason."""

    root: relax.Var
    vars: tuple[relax.Var, ...]
    op: str
    pattern: QuantOp | None
    match: Match | None
    qconfig: QConfig | None
    skip: Skip | None
    sources: tuple[str, ...]
    support: Support = Support.SERVED
    rule: MappingRule | None = None  #: the mapping line that decided
    row: PatternConfig | None = None  #: the backend row that matched
    compute: str = ""  #: narrow float dtype of the computation
    passed_over: tuple[PassedOver, ...] = ()  #: the user's rows that match but were not used
    remedy: str = ""  #: code that gives it a QConfig that its row runs

    @cached_property
    def accumulator(self) -> Accumulator | None:
        """The accumulator of the sums of products. None if the kernel chooses it or if there are
        no sums.
        """
        if self.pattern is None or self.pattern.accumulator_axis is None:
            return None
        if self.row is None or self.qconfig is None:
            return None
        dtypes = self.row.find_dtypes(self.qconfig, **find_roles(self.pattern))
        return None if dtypes is None or dtypes.register.is_native else dtypes.register

    @property
    def can_quantize(self) -> bool:
        return self.skip is None and self.qconfig is not None

    @cached_property
    def data_spec(self) -> QSpec:
        """Specification that the operator wants for its computed operands."""
        return self.require_qconfig().tensor(Role.ACTIVATION).spec.stored

    @cached_property
    def result_spec(self) -> QSpec:
        """Specification of the operator's result."""
        return self.require_qconfig().tensor(Role.OUTPUT).spec.stored

    def require_qconfig(self) -> QConfig:
        """Return the QConfig of an operator that is quantized."""
        if self.qconfig is None:
            raise ValueError(f"operator {self.root.name!r} is not quantized")
        return self.qconfig

    @cached_property
    def dynamic(self) -> QSpec | None:
        """Specification of the data if its parameters are computed at run time, else None."""
        if self.qconfig is None or not self.can_quantize or not self.qconfig.is_dynamic:
            return None
        return self.qconfig.data.spec

    @cached_property
    def grouped(self) -> QSpec | None:
        """Specification of the weight if it is quantized in groups, else None."""
        if self.qconfig is None or not self.can_quantize or not self.qconfig.is_grouped:
            return None
        return self.qconfig.weight.spec

    @cached_property
    def has_float_data(self) -> bool:
        """Whether the operator is quantized but reads and returns float values."""
        is_chosen = self.dynamic is not None or self.grouped is not None
        return is_chosen or self.has_constants_only

    @cached_property
    def has_constants_only(self) -> bool:
        """Whether the operator is quantized, but its row has no operand for data."""
        return (
            self.can_quantize
            and self.pattern is not None
            and not any(operand.role is Role.ACTIVATION for operand in self.pattern.operands)
        )

    @cached_property
    def kind(self) -> Kind | None:
        """The role of the operator in the decision what to quantize. An operator whose result
        shares the parameters of its input is a sharing operator.
        """
        if self.pattern is None:
            return None
        return Kind.SHARING if self.output is Output.SHARED else self.pattern.kind

    @cached_property
    def output(self) -> Output | None:
        """Where the result's parameters come from: the backend's choice, else the pattern's."""
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
        """Whether the operator only moves or clamps values, so that quantized values stay on
        their grid.
        """
        return self.pattern is not None and self.pattern.output is Output.SHARED

    @cached_property
    def operands(self) -> tuple[tuple[str, relax.Expr, Operand], ...]:
        """(name, expression, row) of every quantized operand. A tuple is split into name.0,
        name.1.
        """
        if self.pattern is None or self.match is None:
            return ()
        found: list[tuple[str, relax.Expr, Operand]] = []
        for operand in self.pattern.operands:
            expr = self.match.parts[operand.name]
            if isinstance(expr, relax.Tuple):
                parts = enumerate(expr.fields)
                found += [(f"{operand.name}.{i}", part, operand) for i, part in parts]
            else:
                found.append((operand.name, expr, operand))
        return tuple(found)

    @cached_property
    def inputs(self) -> list[relax.Var]:
        """The operands that are computed values."""
        return [
            expr
            for _, expr, operand in self.operands
            if operand.role is Role.ACTIVATION and isinstance(expr, relax.Var)
        ]


def match_operators(
    graph: Graph, backend: BackendConfig, mapping: QConfigMapping
) -> tuple[OperatorMatch, ...]:
    """Match every operator of the graph, in topological order, with the first pattern that accepts
    it.

    Each section of rows (see `order_rows`) is tried from the outputs to the inputs, so that the
    longest pattern wins at its last operator. An operator that no row matches becomes an entry of
    its own, with the reason.
    """
    matching = _Matching(graph, backend, mapping)
    for rows in order_rows(backend):
        of_operator: dict[str, list[PatternConfig]] = {}
        for binding in reversed(graph.bindings):
            name = graph.op_name(binding.var)
            if name not in of_operator:
                of_operator[name] = [row for row in rows if may_match(row.pattern.pattern, name)]
            matching.try_rows(binding.var, of_operator[name])
    for binding in graph.bindings:
        if binding.var not in matching.owners and graph.call_of(binding.var) is not None:
            matching.add(matching.explain(binding.var))
    matches = (choose_float(matched, backend) for matched in matching.name_passed_over())
    return tuple(sorted(matches, key=lambda matched: graph.order[matched.root]))


def choose_float(matched: OperatorMatch, backend: BackendConfig) -> OperatorMatch:
    """Return the operator, computed in a narrow float dtype if the configuration asks for one
    and the backend supports it.
    """
    config = matched.rule.qconfig if matched.rule is not None else None
    if not isinstance(config, FloatConfig) or tensor_dtype(matched.root) != "float32":
        return matched
    keep = f"mapping.set_module_name({matched.root.name!r}, None)"
    if matched.op in RECURRENT_OPERATORS:
        skip = Skip("recurrent layers compute in float32", keep)
        return replace(matched, skip=skip, support=Support.DTYPE_UNSUPPORTED)
    if config.dtype in backend.float_dtypes:
        reason = f"computed in {config.dtype} by the configuration ({matched.rule.description})"
        return replace(matched, skip=Skip(reason), support=Support.SERVED, compute=config.dtype)
    skip = Skip(
        f"backend {backend.name!r} does not compute in {config.dtype}",
        f"{keep}; or pass a backend whose float_dtypes have it",
    )
    return replace(matched, skip=skip, support=Support.DTYPE_UNSUPPORTED)


class Sites:
    """Operators in the form that mapping lines are compared with."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.sources = graph, read_nodes(graph)
        self.known: dict[tuple[tuple[relax.Var, ...], str, str], OperatorSite] = {}

    @staticmethod
    def of(graph: Graph) -> Sites:
        """Return the operators of a graph, the same for each reader."""
        if Sites not in graph.found:
            graph.found[Sites] = Sites(graph)
        return graph.found[Sites]

    @cached_property
    def order(self) -> tuple[dict[str, tuple[tuple[str, ...], ...]], dict[relax.Var, int]]:
        """Return (names of all operators by type, index of each value among the operators of its
        type). Additions of an added bias are not operators of the model and have no index.
        """
        peers: dict[str, list[tuple[str, ...]]] = {}
        places: dict[relax.Var, int] = {}
        for binding in self.graph.bindings:
            if is_added_bias(self.graph, binding.var):
                places[binding.var] = -1
                continue
            same = peers.setdefault(self.graph.op_name(binding.var), [])
            places[binding.var] = len(same)
            same.append(self.names((binding.var,)))
        return {op: tuple(same) for op, same in peers.items()}, places

    def nodes(self, variables: Sequence[relax.Var]) -> tuple[str, ...]:
        """Return the names of the source model's nodes that the values came from."""
        return tuple(self.sources[var.name] for var in variables if var.name in self.sources)

    def names(self, variables: Sequence[relax.Var]) -> tuple[str, ...]:
        """Return the names of the values and of the nodes they came from."""
        return (*(var.name for var in variables), *self.nodes(variables))

    def site(self, variables: Sequence[relax.Var], op: str, pattern: str) -> OperatorSite:
        """Describe the operator that computes these values."""
        key = (*variables,), op, pattern
        if key not in self.known:
            self.known[key] = self.describe(*key)
        return self.known[key]

    def describe(self, variables: tuple[relax.Var, ...], op: str, pattern: str) -> OperatorSite:
        """Return a new `site`."""
        main = next((v for v in variables if self.graph.op_name(v) == op), variables[-1])
        peers, places = self.order
        return OperatorSite(
            self.names(variables),
            op,
            pattern,
            places.get(main, 0),
            peers.get(op, ()),
            self.names((main,)),
        )


def is_added_bias(graph: Graph, var: relax.Var) -> bool:
    """Whether a value is the sum with a bias of zeros that `add_biases` added."""
    if graph.op_name(var) != "relax.add":
        return False
    product, bias = graph.values[var].args
    array = constant_value(bias)
    name = getattr(product, "name", "")
    return array is not None and not array.any() and name.startswith(f"{var.name}{UNBIASED}")


def find_sites(mod: tvm.IRModule | Graph, plan: Plan) -> dict[str, OperatorSite]:
    """Map the operators of a module's plan, by name, to the form that mapping lines are compared
    with.
    """
    graph = Graph.of(mod)
    sites = Sites.of(graph)
    return {
        row.name: sites.site([graph.vars[value] for value in row.values], row.op, row.pattern)
        for row in plan.operators
    }


class _Matching:
    """State of one pass over the rows: the operators matched so far."""

    def __init__(self, graph: Graph, backend: BackendConfig, mapping: QConfigMapping) -> None:
        self.graph, self.backend, self.mapping = graph, backend, mapping
        self.sites, self.code = Sites.of(graph), backend.name_mapping(mapping)
        self.qconfigs: dict[str, str] = {}  # pattern -> code of a QConfig that its row runs
        self.operators: list[OperatorMatch] = []
        self.owners: dict[relax.Var, OperatorMatch] = {}
        self.takers: dict[relax.Var, tuple[QuantOp, Match]] = {}
        self.matches: dict[str, list[Match]] = {}

    def add(self, matched: OperatorMatch) -> None:
        self.operators.append(matched)
        self.owners.update(dict.fromkeys(matched.vars, matched))
        if matched.pattern is not None and matched.match is not None:
            self.takers.update(dict.fromkeys(matched.vars, (matched.pattern, matched.match)))

    def find_rule(
        self, variables: Sequence[relax.Var], op: str, pattern: str
    ) -> tuple[MappingRule | None, QConfig | None]:
        """Return the line that decides for an operator, and its QConfig as the backend runs it."""
        rule = self.mapping.find_rule(self.sites.site(variables, op, pattern))
        qconfig = rule.qconfig if rule is not None else None
        return rule, self.backend.adapt_qconfig(qconfig) if isinstance(qconfig, QConfig) else None

    def try_rows(self, var: relax.Var, rows: Sequence[PatternConfig]) -> None:
        """Match the operator that ends at a value with the first of the rows that accepts it."""
        if var in self.owners or self.graph.call_of(var) is None:
            return
        for row in rows:
            pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
            match = run_match(pattern, self.graph, var)
            if match is None or any(inner in self.owners for inner in match.inner):
                continue
            if self.decline(row, match) is not None:
                continue
            rule, qconfig = self.find_rule(match.vars, pattern.op, pattern.name)
            remedy = self.name_remedy(var, pattern)
            skip, support = find_refusal(row, match, rule, qconfig, self.backend.name, remedy)
            nodes = self.sites.nodes(match.vars)
            self.add(
                OperatorMatch(
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
                    remedy=remedy,
                )
            )
            return

    def name_remedy(self, var: relax.Var, pattern: QuantOp) -> str:
        """Return code that gives an operator a QConfig that its row runs, or float if none is."""
        if pattern.name not in self.qconfigs:
            has_qconfig = next(self.backend.list_qconfigs(pattern.name), None) is not None
            found = f"{self.backend.code}.find_qconfig({pattern.name!r})" if has_qconfig else "None"
            self.qconfigs[pattern.name] = found
        return f"{self.code}.set_module_name({var.name!r}, {self.qconfigs[pattern.name]})"

    def decline(self, row: PatternConfig, match: Match) -> Skip | None:
        """Return why a row is not used for a match; None if it is used."""
        pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
        skip = run_check(row, match)
        if skip is not None or not adds_residual(pattern):
            return skip
        _, qconfig = self.find_rule(match.vars, pattern.op, pattern.name)
        if qconfig is None or not (qconfig.is_dynamic or qconfig.is_grouped):
            return None
        remedy = self.name_remedy(match.root, pattern)
        return Skip(
            "the QConfig makes the result of the product float32 (parameters of the run time, or "
            "weights in groups), and the row adds a computed value to its integer sums",
            f"{remedy}; or add a row for the product without the sum",
        )

    def name_passed_over(self) -> list[OperatorMatch]:
        """Return all operators, each with the user's rows that match it but were not used. The
        reason of an operator in float is not repeated.
        """
        passed = find_passed_over(self.graph, self.backend, self.takers, self.decline)
        if not passed:
            return self.operators
        return [
            replace(
                matched,
                passed_over=tuple(
                    dict.fromkeys(
                        row
                        for var in matched.vars
                        for row in passed.get(var, ())
                        if matched.skip is None or matched.skip.reason != row.reason
                    )
                ),
            )
            for matched in self.operators
        ]

    def explain(self, var: relax.Var) -> OperatorMatch:
        """Return an entry for a value that no row matched, with the reason.

        The reason comes from a row for this operator, from the operator that absorbed a part of the
        row's match, or says that the backend has no such row.
        """
        op, nodes = call_name(self.graph.values[var]), self.sites.nodes((var,))
        found = self.find_candidates(var, op)
        limits = ((*each, ask_limit(*each, self.decline)) for each in found)
        limited = next((each for each in limits if each[2] is not None), None)
        for row, match in found if limited is None else [limited[:2]]:
            pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
            if pattern.op != op:
                continue
            rule, qconfig = self.find_rule((var,), op, pattern.name)
            support = Support.NOT_ASKED if qconfig is None else Support.FORM_UNSUPPORTED
            skip = self.decline(row, match) or describe_owner(pattern, match, self.takers)
            return OperatorMatch(
                var, (var,), op, pattern, None, None, skip, nodes, support, rule, row
            )
        rule, _ = self.find_rule((var,), op, "")
        dtype = tensor_dtype(var)
        if dtype and not dtype.startswith("float"):
            skip, support = Skip(f"its result is {dtype}, not float"), Support.NOT_ASKED
        elif limited is not None:
            _, match, declined = limited
            skip = replace(declined, reason=f"part of {match.name!r}: {declined.reason}")
            support = Support.NOT_ASKED
        else:
            support = Support.NOT_ASKED
            if rule is not None and rule.qconfig is not None:
                support = Support.PATTERN_UNKNOWN
            known = [row.pattern.name for row in self.backend.patterns if row.pattern.op == op]
            reason = f"backend {self.backend.name!r} has no pattern for {op}"
            if known:
                reason = f"no pattern of backend {self.backend.name!r} for {op} looks as here"
                reason += f": {', '.join(known[:MOST_NAMES])}"
                reason += " ..." if len(known) > MOST_NAMES else ""
            skip = Skip(
                reason,
                "add one with backend.with_pattern(...), or with_affine_rule(...) if it only moves "
                "values, or leave it in float",
            )
        return OperatorMatch(var, (var,), op, None, None, None, skip, nodes, support, rule)

    def find_candidates(self, var: relax.Var, op: str) -> list[tuple[PatternConfig, Match]]:
        """Return the rows that would take a value, with their matches: rows of its operator, and
        rows with a check of the backend.
        """
        found = []
        for row in self.backend.patterns:
            pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
            if pattern.op == op or row.check is not None:
                found += [(row, m) for m in self.find_matches(pattern) if var in m.vars]
        return found

    def find_matches(self, pattern: QuantOp) -> list[Match]:
        """Return all matches of a pattern, the last of the graph first."""
        if pattern.name not in self.matches:
            places = [
                binding.var
                for binding in reversed(self.graph.bindings)
                if may_match(pattern.pattern, self.graph.op_name(binding.var))
            ]
            found = (run_match(pattern, self.graph, var) for var in places)
            self.matches[pattern.name] = [match for match in found if match is not None]
        return self.matches[pattern.name]


def adds_residual(pattern: QuantOp) -> bool:
    """Whether the pattern adds a computed value to the sums of products."""
    return any(operand.name == RESIDUAL for operand in pattern.operands)


def find_refusal(
    row: PatternConfig,
    match: Match,
    rule: MappingRule | None,
    qconfig: QConfig | None,
    backend: str,
    remedy: str,
) -> tuple[Skip | None, Support]:
    """Return why an operator that matches a row of the backend stays in float, and the kind of
    support. None if it does not stay in float. `remedy` is code that gives it another QConfig.
    """
    pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
    if rule is None:
        reason = "no line of the QConfigMapping selects it"
        return Skip(reason, remedy), Support.NOT_ASKED
    if qconfig is None:
        reason = f"kept in float by {rule.origin or f'the configuration ({rule.description})'}"
        return Skip(reason), Support.NOT_ASKED
    if row.observation is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        reason = f"backend {backend!r} runs {pattern.name} in float on purpose"
        return Skip(reason), Support.NOT_ASKED
    is_anchor = pattern.kind is Kind.ANCHOR
    if qconfig.is_grouped and not is_anchor and rule.kind is Selector.GLOBAL:
        return Skip("weights in groups are asked for, it has none"), Support.NOT_ASKED
    if qconfig.is_dynamic and not is_anchor and rule.kind is Selector.GLOBAL:
        reason = "parameters of the run time are for operators with weights, it has none"
        return Skip(reason), Support.NOT_ASKED
    skip = find_dtype_conflict(row, pattern, qconfig, backend, remedy)
    if skip is None and qconfig.is_grouped and pattern.realize_grouped is None:
        reason = f"pattern {pattern.name!r} has no callback for weights in groups"
        skip = Skip(reason, f"{remedy}; or give its QuantOp a realize_grouped")
    is_dynamic = qconfig.is_dynamic and not qconfig.is_grouped
    if skip is None and is_dynamic and pattern.realize_dynamic is None:
        reason = f"pattern {pattern.name!r} has no callback for parameters of the run time"
        skip = Skip(reason, f"{remedy}; or give its QuantOp a realize_dynamic")
    if skip is None and is_dynamic and qconfig.data.spec.granularity is Granularity.PER_ROW:
        skip = find_row_conflict(match, remedy)
    return skip, Support.SERVED if skip is None else Support.DTYPE_UNSUPPORTED


def find_row_conflict(match: Match, remedy: str) -> Skip | None:
    """Return why rows of an operator's data cannot have separate parameters; None if they can."""
    if match.parts["data"].ty.shape is not None:
        return None
    return Skip(
        "the shape of its data is not known, whose rows are to have parameters of their own "
        "(Granularity.PER_ROW)",
        f"{remedy}; or load the model with fixed shapes",
    )


def find_dtype_conflict(
    row: PatternConfig, pattern: QuantOp, qconfig: QConfig, backend: str, remedy: str
) -> Skip | None:
    """Return why the backend cannot run the pattern with this QConfig; None if one of its
    DTypeConfigs fits.
    """
    conflict = row.find_conflict(qconfig, **find_roles(pattern))
    if conflict is None:
        return None
    return Skip(
        f"backend {backend!r} cannot run {pattern.name} so: {conflict}",
        remedy,
    )


def find_roles(pattern: QuantOp) -> dict[str, bool]:
    """Return the roles of the constant operands of a pattern."""
    roles = {operand.role for operand in pattern.operands}
    return {"has_weight": Role.WEIGHT in roles, "has_bias": Role.BIAS in roles}


def read_nodes(graph: Graph) -> dict[str, str]:
    """Map each value's name to its node's name in the source model, as the importer recorded it."""
    table = read_sources(graph.func)
    return {value: row["node"] for value, row in table.items() if row.get("node")}
