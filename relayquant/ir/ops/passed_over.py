"""User rows that match an operator but do not take it: the reasons, for the plan and the ledger.

The reasons are found after all rows have matched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import relax

from relayquant.config import BackendConfig, PatternConfig
from relayquant.ir.ops import BUILTIN_OPS
from relayquant.ir.ops.base import QuantOp
from relayquant.ir.ops.callbacks import run_limit, run_match
from relayquant.ir.plan import PassedOver
from relayquant.ir.rewrite import Graph, Match, Pattern, Skip

#: value -> the row that took it, and its match
Owners = Mapping[relax.Var, tuple[QuantOp, Match]]


def find_passed_over(
    graph: Graph,
    backend: BackendConfig,
    owners: Owners,
    decline: Callable[[PatternConfig, Match], Skip | None],
) -> dict[relax.Var, tuple[PassedOver, ...]]:
    """Find the user rows that match a value but did not take it, by value. So are built-in rows
    whose check of the backend declined; of several with one reason the first is named.

    A row that lost to another user row is not named, because the user chose their order.

    Args:
        decline: Returns why a row cannot take a match, or None if it can.
    """
    found: dict[relax.Var, dict[str, PassedOver]] = {}
    for row in backend.patterns:
        pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
        is_own = pattern not in BUILTIN_OPS
        find = find_obstacle if is_own else find_limit
        for binding in graph.bindings if is_own or row.check is not None else ():
            match = find_match(pattern, graph, binding.var)
            if match is None:
                continue
            values = match.vars if is_own else find_main(pattern, match)
            left = [v for v in values if v not in owners or owners[v][0] is not pattern]
            skip = find(row, match, owners, decline) if left else None
            if skip is not None:
                passed = PassedOver(pattern.name, skip.reason, skip.advice)
                for var in left:
                    found.setdefault(var, {}).setdefault(skip.reason, passed)
    return {var: tuple(rows.values()) for var, rows in found.items()}


def find_limit(
    row: PatternConfig,
    match: Match,
    owners: Owners,
    decline: Callable[[PatternConfig, Match], Skip | None],
) -> Skip | None:
    """Find why the backend's check keeps a built-in row from a match. None if another operator took
    the match's main operator in.
    """
    pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
    main = find_main(pattern, match)
    is_taken = any(owners[v][0].op != pattern.op for v in main if v in owners)
    if is_taken or match.find_shared() is not None:
        return None
    return ask_limit(row, match, decline)


def find_main(pattern: QuantOp, match: Match) -> list[relax.Var]:
    """Return the values of a match that the pattern's operator computes."""
    return [v for v in match.vars if match.graph.op_name(v) == pattern.op] or [match.root]


def ask_limit(
    row: PatternConfig, match: Match, decline: Callable[[PatternConfig, Match], Skip | None]
) -> Skip | None:
    """Return what a backend's check says of a match that nothing else keeps from the row."""
    skip = None if row.check is None else decline(row, match)
    return skip if skip is not None and skip == run_limit(row, match) else None


def find_match(pattern: QuantOp, graph: Graph, var: relax.Var) -> Match | None:
    """Find the match of a row at a value, even if another operator reads a value inside it."""
    if isinstance(pattern.pattern, Pattern):
        return pattern.pattern.find(graph, var)
    return run_match(pattern, graph, var)


def find_obstacle(
    row: PatternConfig,
    match: Match,
    owners: Owners,
    decline: Callable[[PatternConfig, Match], Skip | None],
) -> Skip | None:
    """Find why a user row did not take a match. None if another user row took it."""
    pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
    inner = match.find_shared()
    if inner is not None:
        return Skip(
            f"it would take {inner.name!r}, which is an output of the model or is read by another "
            "operator too",
            "end the pattern at that value, or make it a part of the pattern",
        )
    skip = decline(row, match)
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
