"""Rules as data: pattern, then a rewrite that either gives a new value or says why it declines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relayquant.arguments import check_fields
from relayquant.rewrite.graph import Graph
from relayquant.rewrite.pattern import Match, Matcher
from relayquant.rewrite.walker import Emitter, rewrite_main


@check_fields
@dataclass(frozen=True)
class Skip:
    """A rule declines: `reason` says why, `advice` what the user may do about it."""

    reason: str
    advice: str = ""


@dataclass(frozen=True, eq=False)
class Rule:
    """`rewrite(emitter, match)` returns the new value of the root, in new expressions, or Skip."""

    name: str
    pattern: Matcher
    rewrite: Callable[[Emitter, Match], relax.Expr | Skip]


def apply_rules(
    mod: tvm.IRModule,
    rules: Sequence[Rule],
    *,
    max_rounds: int = 100,
    on_skip: Callable[[Rule, Match, Skip], None] | None = None,
) -> tvm.IRModule:
    """Rewrite main by the first rule that accepts, at every binding, until no rule fires.

    Order of `rules` is priority. Raises RuntimeError after `max_rounds` rounds: the rules undo one
    another.
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
            for rule in rules:
                match = rule.pattern.match(graph, binding.var)
                if match is None:
                    continue
                outcome = rule.rewrite(emitter, match)
                if isinstance(outcome, Skip):
                    if on_skip is not None:
                        on_skip(rule, match, outcome)
                    continue
                fired.append(rule.name)
                return outcome
            return emitter.get(binding.value)

        rewritten = rewrite_main(graph.mod, visit)
        if not fired:
            return graph.mod
        mod = rewritten
    raise RuntimeError(
        f"Rewrite rules did not settle after {max_rounds} rounds; last fired: "
        f"{sorted(set(fired))}. "
        "Two rules undo one another; make one of them decline."
    )
