"""Rules as data: a place, and a rewrite that returns a new value or a reason to decline.

Rewrites of Relax, edits of a model and the choice of kernels all use this form.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import tvm
from tvm import relax

from relayquant.base.arguments import check_fields
from relayquant.ir.rewrite.graph import Graph
from relayquant.ir.rewrite.pattern import Match, Matcher, may_match, refuse_dpl
from relayquant.ir.rewrite.walker import Emitter, rewrite_main, tidy_module

logger = logging.getLogger("relayquant.ir.rewrite")


@check_fields
@dataclass(frozen=True)
class Skip:
    """A rule declines. `reason` says why, `advice` says what the user can do."""

    reason: str
    advice: str = ""


@functools.cache
def decline(reason: str) -> Skip:
    """Return a cached Skip for a fixed reason. Rules decline thousands of times."""
    return Skip(reason)


ContextT = TypeVar("ContextT")
PlaceT = TypeVar("PlaceT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False)
class Rule(Generic[ContextT, PlaceT, ResultT]):
    """A local rewrite.

    Attributes:
        name: Name in traces and messages.
        pattern: Where the rule is tried. A `Matcher`: the place is its Match. Kinds of values, such
            as operator names: the place is a variable of this kind. No kinds: all operators.
        rewrite: `rewrite(context, place)` returns the replacement. Or it changes nothing and
            returns Skip. The context builds the result and holds all further data.
    """

    name: str
    pattern: Matcher | frozenset[str]
    rewrite: Callable[[ContextT, PlaceT], ResultT | Skip]

    def __post_init__(self) -> None:
        refuse_dpl(self.pattern, f"Rule {self.name!r}: pattern")


#: Called for a rule that declined, with the rule's name, the value's name and the Skip.
OnSkip = Callable[[str, str, Skip], None]


def log_skip(rule: str, name: str, skip: Skip) -> None:
    """Log a declined rule to the logger "relayquant.ir.rewrite" at level DEBUG."""
    logger.debug("%s declines at %s: %s", rule, name, skip.reason)


def make_rule(
    rewrite: Callable[[ContextT, relax.Var], ResultT | Skip], *kinds: str
) -> Rule[ContextT, relax.Var, ResultT]:
    """Make a rule from a function, with the function's name, for values of these kinds."""
    return Rule(rewrite.__name__, frozenset(kinds), rewrite)


def select_rules(
    rules: Sequence[Rule[ContextT, relax.Var, ResultT]], kind: str
) -> list[Rule[ContextT, relax.Var, ResultT]]:
    """Return the rules that are tried at values of a kind."""
    any_kind = frozenset({kind} if kind.startswith("relax.") else ())
    return [
        rule
        for rule in rules
        if isinstance(rule.pattern, frozenset) and kind in (rule.pattern or any_kind)
    ]


def fire_first(
    tried: Iterable[tuple[Rule[ContextT, PlaceT, ResultT], PlaceT]],
    context: ContextT,
    name: str,
    on_skip: OnSkip = log_skip,
) -> tuple[Rule[ContextT, PlaceT, ResultT], ResultT] | None:
    """Return the first rule that accepts its place at value `name`, and its replacement."""
    for rule, place in tried:
        outcome = rule.rewrite(context, place)
        if not isinstance(outcome, Skip):
            return rule, outcome
        on_skip(rule.name, name, outcome)
    return None


def apply_rules(
    mod: tvm.IRModule,
    rules: Sequence[Rule[Emitter, Match, relax.Expr]],
    *,
    max_rounds: int = 100,
    on_skip: OnSkip = log_skip,
) -> tvm.IRModule:
    """Rewrite main by the first rule that accepts, at every binding, until no rule fires.

    `rules` have a Matcher and are ordered by priority. If rules still fire after `max_rounds`
    rounds, they undo one another: this raises RuntimeError.
    """
    fired: list[str] = []
    of_operator: dict[str, list[Rule[Emitter, Match, relax.Expr]]] = {}
    for _ in range(max_rounds):
        graph = Graph(mod)
        fired = []

        def visit(
            emitter: Emitter,
            binding: relax.VarBinding,
            graph: Graph = graph,
            fired: list[str] = fired,
        ) -> relax.Expr:
            name = graph.op_name(binding.var)
            if name not in of_operator:
                of_operator[name] = [rule for rule in rules if may_match(rule.pattern, name)]
            matches = ((rule, rule.pattern.match(graph, binding.var)) for rule in of_operator[name])
            tried = ((rule, match) for rule, match in matches if match is not None)
            found = fire_first(tried, emitter, binding.var.name, on_skip)
            if found is None:
                return emitter.get(binding.value)
            fired.append(found[0].name)
            return found[1]

        rebuilt = rewrite_main(graph.mod, visit, tidy=False)
        if not fired:
            return graph.mod
        mod = tidy_module(rebuilt)
    raise RuntimeError(
        f"Rewrite rules did not settle after {max_rounds} rounds; last fired: "
        f"{sorted(set(fired))}. Two rules undo one another; make one of them decline."
    )
