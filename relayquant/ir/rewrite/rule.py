"""Rules as data: where a rewrite is tried, and the rewrite, which gives a new value or says why it
declines. One shape for rewrites of Relax, for edits of a model and for choosing kernels.
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
from relayquant.ir.rewrite.pattern import Match, Matcher
from relayquant.ir.rewrite.walker import Emitter, rewrite_main, tidy_module

logger = logging.getLogger("relayquant.ir.rewrite")


@check_fields
@dataclass(frozen=True)
class Skip:
    """A rule declines: `reason` says why, `advice` what the user may do about it."""

    reason: str
    advice: str = ""


@functools.cache
def decline(reason: str) -> Skip:
    """The Skip of a reason that names no values, made once: rules decline thousands of times."""
    return Skip(reason)


ContextT = TypeVar("ContextT")
PlaceT = TypeVar("PlaceT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False)
class Rule(Generic[ContextT, PlaceT, ResultT]):
    """A local rewrite.

    Attributes:
        name: What traces and messages call it.
        pattern: Where it is tried: a `Matcher`, whose Match is the place; or kinds of values, such
            as operator names, a variable of that kind being the place; no kinds are all operators.
        rewrite: `rewrite(context, place)` returns what stands there from now on, or Skip, and then
            leaves all as it was. The context is what builds the result, and knows the rest.
    """

    name: str
    pattern: Matcher | frozenset[str]
    rewrite: Callable[[ContextT, PlaceT], ResultT | Skip]


#: Hears of a rule that declined: its name, the name of the value, and why.
OnSkip = Callable[[str, str, Skip], None]


def log_skip(rule: str, name: str, skip: Skip) -> None:
    """Log what declined, for the logger "relayquant.ir.rewrite" at level DEBUG."""
    logger.debug("%s declines at %s: %s", rule, name, skip.reason)


def make_rule(
    rewrite: Callable[[ContextT, relax.Var], ResultT | Skip], *kinds: str
) -> Rule[ContextT, relax.Var, ResultT]:
    """The rule of a function, under its name, for values of these kinds."""
    return Rule(rewrite.__name__, frozenset(kinds), rewrite)


def select_rules(
    rules: Sequence[Rule[ContextT, relax.Var, ResultT]], kind: str
) -> list[Rule[ContextT, relax.Var, ResultT]]:
    """Those that are tried at values of a kind."""
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
    on_skip: OnSkip,
) -> tuple[Rule[ContextT, PlaceT, ResultT], ResultT] | None:
    """The first rule that accepts its place, at the value `name`, and what it makes of it."""
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

    Order of `rules`, which have a Matcher, is priority. Raises RuntimeError after `max_rounds`
    rounds: the rules undo one another.
    """
    fired: list[str] = []
    for _ in range(max_rounds):
        graph = Graph(mod)
        fired = []

        def visit(
            emitter: Emitter,
            binding: relax.VarBinding,
            graph: Graph = graph,
            fired: list[str] = fired,
        ) -> relax.Expr:
            matches = ((rule, rule.pattern.match(graph, binding.var)) for rule in rules)
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
        f"{sorted(set(fired))}. "
        "Two rules undo one another; make one of them decline."
    )
