"""Patterns: a `relax.dpl` pattern with named parts, and its matches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from tvm import relax
from tvm.ir import Call, Op
from tvm.relax.dpl import (
    AndPattern,
    CallPattern,
    DFPattern,
    ExprPattern,
    NotPattern,
    OrPattern,
    TupleGetItemPattern,
    TuplePattern,
    WildcardPattern,
)

from relayquant.errors import ConfigError
from relayquant.ir.rewrite.graph import Graph, free_vars, tensor_shape

#: nodes of a dpl pattern for an operator or a tuple, as opposed to wildcards
STRUCTURE = (CallPattern, TuplePattern, TupleGetItemPattern)

#: fields of a dpl pattern that hold patterns
INNER_PATTERNS = ("op", "args", "fields", "tuple", "left", "right", "pattern")


@dataclass(frozen=True, eq=False)
class Match:
    """A pattern found in a graph.

    `parts` maps the pattern's names to variables or constants of the graph. `inner` are the
    variables bound inside the match, in topological order, without the root.
    """

    graph: Graph = field(repr=False)
    root: relax.Var
    parts: Mapping[str, relax.Expr]
    inner: tuple[relax.Var, ...]

    @property
    def name(self) -> str:
        """Name of the matched operator, which is the name of the value that it computes."""
        return self.root.name

    @property
    def vars(self) -> tuple[relax.Var, ...]:
        """All variables bound by the match. The root is last."""
        return (*self.inner, self.root)

    def call(self, op_name: str) -> Call:
        """Return the matched call of this operator."""
        for var in self.vars:
            call = self.graph.call_of(var)
            if call is not None and self.graph.op_name(var) == op_name:
                return call
        raise KeyError(f"{op_name} is not part of the match at {self.name!r}")

    def find_sizes(self, part: str) -> dict[str, int | str]:
        """Return the sizes of a convolution's "data" or "weight" by the letters of its layout:
        {"O": 8, "I": 4, "H": 3, "W": 3} for OIHW and HWIO. Symbolic sizes are text.
        """
        name = {"data": "data_layout", "weight": "kernel_layout"}[part]
        calls = (self.graph.call_of(var) for var in self.vars)
        layouts = (getattr(call.attrs, name, None) for call in calls if call is not None)
        layout = next((str(layout) for layout in layouts if layout), "")
        return dict(zip(layout, tensor_shape(self.parts[part]) or (), strict=False))

    def find_shared(self) -> relax.Var | None:
        """Find a value inside that is returned or read by an operator outside, or None."""
        members = {*self.inner, self.root}
        for inner in self.inner:
            if inner in self.graph.outputs or not members.issuperset(self.graph.users[inner]):
                return inner
        return None

    def find_call(self, op_name: str) -> Call | None:
        """Return the matched call of this operator, or None if the match does not have it."""
        for var in self.vars:
            if self.graph.op_name(var) == op_name:
                return self.graph.call_of(var)
        return None


@runtime_checkable
class Matcher(Protocol):
    """Interface that finds matches: a `Pattern`, or code that walks the graph."""

    def match(self, graph: Graph, var: relax.Var) -> Match | None:
        """Find the match with its result bound to `var`, or None."""
        ...


def refuse_dpl(matcher: object, where: str) -> None:
    """Raise ConfigError for a bare dpl pattern, which has a method `match` of its own."""
    if isinstance(matcher, DFPattern):
        raise ConfigError(
            f"{where} is a pattern of tvm.relax.dpl; allowed: Pattern(root, parts), which names "
            "the operands, for instance Pattern(is_op('relax.add')(x, y), {'x': x, 'y': y}).",
            code="RQ106",
        )


def may_match(matcher: Any, op_name: str) -> bool:
    """Whether a matcher can find anything at a value that this operator computes."""
    return not isinstance(matcher, Pattern) or matcher.op_name in ("", op_name)


def list_nodes(node: DFPattern) -> Iterator[DFPattern]:
    """List the nodes of a dpl pattern, with repetitions."""
    yield node
    for name in INNER_PATTERNS:
        inner = getattr(node, name, None)
        for each in [inner] if isinstance(inner, DFPattern) else inner or ():
            yield from list_nodes(each)


def is_open(node: Any) -> bool:
    """Whether a node in the place of an operator, or of its result, may be any operator."""
    if isinstance(node, OrPattern):
        return is_open(node.left) or is_open(node.right)
    if isinstance(node, AndPattern):
        return is_open(node.left) and is_open(node.right)
    if isinstance(node, TupleGetItemPattern):
        return is_open(node.tuple)
    if hasattr(node, "pattern"):  # with a condition: a dtype, a shape, an attribute
        return is_open(node.pattern)
    return isinstance(node, WildcardPattern | NotPattern)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A dpl pattern and names for some of its nodes.

    A match ends at the named parts. Everything between them and the root is inside. If a value
    inside is returned or used elsewhere, there is no match, because it could not be rewritten as
    one.
    """

    root: Any  #: tvm.relax.dpl.DFPattern
    parts: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Pattern({self.op_name or 'any operator'}, parts={[*self.parts]})"

    @cached_property
    def op_name(self) -> str:
        """Operator of the root, "" for any operator. It alone rules out most bindings."""
        callee = getattr(self.root, "op", None)
        return str(callee.expr.name) if isinstance(callee, ExprPattern) else ""

    @cached_property
    def op_names(self) -> frozenset[str]:
        """Operators that a match may have. Empty: the pattern leaves open which."""
        nodes = list(list_nodes(self.root))
        callees = [node.op for node in nodes if isinstance(node, CallPattern)]
        if any(map(is_open, [self.root, *callees])):
            return frozenset()
        exprs = [node.expr for node in nodes if isinstance(node, ExprPattern)]
        return frozenset(str(expr.name) for expr in exprs if isinstance(expr, Op))

    def match(self, graph: Graph, var: relax.Var) -> Match | None:
        """Find the match with its result bound to `var`, or None."""
        found = self.find(graph, var)
        return None if found is None or found.find_shared() is not None else found

    def find(self, graph: Graph, var: relax.Var) -> Match | None:
        """Find the match at `var`, even if a value inside is used elsewhere
        (`Match.find_shared`).

        Raises:
            ConfigError: a part is not among the nodes that matched.
        """
        if self.op_name and graph.op_name(var) != self.op_name:
            return None
        found = self.root.extract_matched_expr(var, graph.var2val)
        if not found:
            return None
        foreign = [name for name, node in self.parts.items() if node not in found]
        if foreign:
            raise ConfigError(
                f"{self!r}: part {foreign[0]!r} is no node of what matched. Build the root and the "
                "parts from the same wildcard() or is_const(), and give each alternative of an "
                "or-pattern a Pattern of its own.",
                code="RQ106",
            )
        # The matcher looks through variables: for a variable it returns the bound value.
        parts = {
            name: graph.bound.get(found[node], found[node]) for name, node in self.parts.items()
        }
        ends = list(parts.values())
        named = list(self.parts.values())
        matched = {
            expr
            for node, expr in found.items()
            if isinstance(node, STRUCTURE) and not any(node.same_as(part) for part in named)
        }
        if any(graph.values.get(end) in matched for end in ends if isinstance(end, relax.Var)):
            return None  # add(f(x), f(x)) as f(x) + residual: the value is both inside and outside
        inside: set[relax.Var] = set()
        stack = [var]
        while stack:
            for arg in free_vars(graph.values[stack.pop()]):
                if arg in inside or any(arg.same_as(end) for end in ends):
                    continue
                # Values at wildcards, also in a tuple, are not inside.
                if graph.values.get(arg) in matched:
                    inside.add(arg)
                    stack.append(arg)
        return Match(graph, var, parts, tuple(sorted(inside, key=graph.order.__getitem__)))
