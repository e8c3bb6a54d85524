"""User rows that match an operator but do not take it: the reasons, for the plan and the ledger.

The reasons are found after all rows have matched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import relax

from relayquant.config import BackendConfig
from relayquant.ir.ops import BUILTIN_OPS
from relayquant.ir.ops.base import QuantOp
from relayquant.ir.ops.callbacks import run_match
from relayquant.ir.plan import PassedOver
from relayquant.ir.rewrite import Graph, Match, Pattern, Skip

#: value -> the row that took it, and its match
Owners = Mapping[relax.Var, tuple[QuantOp, Match]]


def find_passed_over(
    graph: Graph,
    backend: BackendConfig,
    owners: Owners,
    decline: Callable[[QuantOp, Match], Skip | None],
) -> dict[relax.Var, tuple[PassedOver, ...]]:
    """Find the user rows that match a value but did not take it, by value.

    A row that lost to another user row is not named, because the user chose their order.

    Args:
        decline: Returns why a row cannot take a match, or None if it can.
    """
    found: dict[relax.Var, list[PassedOver]] = {}
    for row in backend.patterns:
        pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
        for binding in graph.bindings if pattern not in BUILTIN_OPS else ():
            match = find_match(pattern, graph, binding.var)
            if match is None:
                continue
            left = [v for v in match.vars if v not in owners or owners[v][0] is not pattern]
            skip = find_obstacle(pattern, match, owners, decline) if left else None
            if skip is not None:
                passed = PassedOver(pattern.name, skip.reason, skip.advice)
                for var in left:
                    found.setdefault(var, []).append(passed)
    return {var: tuple(rows) for var, rows in found.items()}


def find_match(pattern: QuantOp, graph: Graph, var: relax.Var) -> Match | None:
    """Find the match of a row at a value, even if another operator reads a value inside it."""
    if isinstance(pattern.pattern, Pattern):
        return pattern.pattern.find(graph, var)
    return run_match(pattern, graph, var)


def find_obstacle(
    pattern: QuantOp,
    match: Match,
    owners: Owners,
    decline: Callable[[QuantOp, Match], Skip | None],
) -> Skip | None:
    """Find why a user row did not take a match. None if another user row took it."""
    inner = match.find_shared()
    if inner is not None:
        return Skip(
            f"it would take {inner.name!r}, which is an output of the model or is read by another "
            "operator too",
            "end the pattern at that value, or make it a part of the pattern",
        )
    skip = decline(pattern, match)
    if skip is not None:
        return skip
    taken = next((owners[var] for var in match.vars if var in owners), None)
    is_rival = taken is not None and taken[0] in BUILTIN_OPS
    return describe_owner(pattern, match, owners) if is_rival else None


def describe_owner(pattern: QuantOp, match: Match, owners: Owners) -> Skip:
    """Describe the earlier row that took a value of this match."""
    taken = next(var for var in match.vars if var in owners)
    owner, earlier = owners[taken]
    return Skip(
        f"pattern {pattern.name!r} takes it with {taken.name!r}, which pattern {owner.name!r} took "
        f"for {earlier.name!r} before",
        f"take out one of the two: backend.without_pattern({owner.name!r})",
    )
