"""Calls of user-written callbacks of operator rows.

A callback that raises or returns a wrong value becomes an error that names operator, row and
callback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from relayquant.base.qtypes import Role
from relayquant.base.user_calls import call_user
from relayquant.config import PatternConfig
from relayquant.errors import ConfigError, QnnError
from relayquant.ir.ops.base import (
    DynamicContext,
    GroupedContext,
    Operand,
    QuantOp,
    RealizeContext,
    SimulateContext,
)
from relayquant.ir.rewrite import Emitter, Graph, Match, Skip
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape


def run_match(row: QuantOp, graph: Graph, var: relax.Var) -> Match | None:
    """Return the match of a row at a value, or None. The row is asked once for each graph.

    Raises:
        ConfigError: The row's matcher raised, or returned something else.
    """
    if (row, var) in graph.found:
        return graph.found[row, var]
    where = describe_place(row, var.name, "pattern.match")
    match = call_user(where, lambda: row.pattern.match(graph, var))
    if match is not None and not isinstance(match, Match):
        raise ConfigError(
            f"{where} returned {describe(match)}; allowed: a Match, or None.", code="RQ106"
        )
    graph.found[row, var] = match
    return match


def run_check(row: PatternConfig, match: Match) -> Skip | None:
    """Return why the row of a backend does not take a match, or None if it does: first what the
    operator row says, then what the backend says.

    Raises:
        ConfigError: A callback raised, or returned something else.
    """
    pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
    return _ask(pattern, match, pattern.find_refusal) or run_limit(row, match)


def run_limit(row: PatternConfig, match: Match) -> Skip | None:
    """Return what the check of a backend's row says of a match."""
    pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
    return None if row.check is None else _ask(pattern, match, row.check)


def _ask(row: QuantOp, match: Match, check: Callable[[Match], Any]) -> Skip | None:
    """Call a check, once for each match."""
    if (check, match) in match.graph.found:
        return match.graph.found[check, match]
    where = describe_place(row, match.name, "check")
    skip = call_user(where, lambda: check(match))
    if skip is not None and not isinstance(skip, Skip):
        raise ConfigError(
            f"{where} returned {describe(skip)}; allowed: a Skip(reason), or None.", code="RQ106"
        )
    match.graph.found[check, match] = skip
    return skip


def run_axis(row: QuantOp, operand: Operand, match: Match) -> int | None:
    """Return the channel axis of an operand, or None if it has none. For a bias, which may have
    fewer axes than the result, it is an axis of the result.

    Raises:
        ConfigError: The callback raised, or did not return an axis of the operand.
    """
    if operand.role is Role.BIAS:
        return run_accumulator_axis(row, match)
    what = f"axis of {operand.name!r}"
    return call_axis(row, match, what, operand.axis, match.parts[operand.name], "operand")


def run_accumulator_axis(row: QuantOp, match: Match) -> int | None:
    """Return the axis of the result along which the accumulator is per-channel, or None.

    Raises:
        ConfigError: The callback raised, or did not return an axis of the result.
    """
    return call_axis(row, match, "accumulator_axis", row.accumulator_axis, match.root, "result")


def call_axis(
    row: QuantOp,
    match: Match,
    name: str,
    function: Callable[[Match], int | None] | None,
    value: relax.Expr,
    kind: str,
) -> int | None:
    """Return what a callback that names an axis of `value` returns."""
    if function is None:
        return None
    where = describe_place(row, match.name, name)
    axis = call_user(where, lambda: function(match))
    rank = getattr(value.ty, "ndim", -1)
    is_axis = isinstance(axis, int) and not isinstance(axis, bool)
    if axis is not None and not (is_axis and (rank < 0 or 0 <= axis < rank)):
        raise ConfigError(
            f"{where} returned {axis!r}; allowed: an axis of the {kind}, 0 to {rank - 1}, or None.",
            code="RQ106",
        )
    return axis


def run_simulate(row: QuantOp, context: SimulateContext) -> relax.Expr:
    """Return the new value of the root in the calibration graph.

    Raises:
        ConfigError: The callback raised, or did not return an expression of the root's shape and
            dtype.
    """
    where = describe_place(row, context.match.name, "simulate")
    value = call_user(where, lambda: row.simulate(context))
    return check_value(context.emitter, value, context.match.root, where, "an expression")


def run_realize(row: QuantOp, context: RealizeContext) -> relax.Expr | Skip:
    """Return the root computed on integers, or Skip.

    Raises:
        ConfigError: The callback raised, or returned neither an expression of the root's shape and
            dtype nor a Skip.
        QnnError: The callback passed a wrong argument to an operator of the dialect.
    """
    return _realize(row, row.realize, context, "realize")


def run_realize_dynamic(row: QuantOp, context: DynamicContext) -> relax.Expr | Skip:
    """Return the root as `run_realize` does, for data with run-time parameters."""
    return _realize(row, row.realize_dynamic, context, "realize_dynamic")


def run_realize_grouped(row: QuantOp, context: GroupedContext) -> relax.Expr | Skip:
    """Return the root as `run_realize` does, for grouped weights."""
    return _realize(row, row.realize_grouped, context, "realize_grouped")


def _realize(
    row: QuantOp,
    function: Callable[[Any], relax.Expr | Skip] | None,
    context: RealizeContext | DynamicContext | GroupedContext,
    name: str,
) -> relax.Expr | Skip:
    where = describe_place(row, context.match.name, name)
    if function is None:
        return Skip(f"pattern {row.name!r} has no {name} callback")
    value = call_user(where, lambda: function(context), (QnnError,))
    if isinstance(value, Skip):
        return value
    allowed = "a Skip(reason), or an expression (usually a dequantize)"
    return check_value(context.emitter, value, context.match.root, where, allowed)


def check_value(
    emitter: Emitter, value: object, root: relax.Var, where: str, allowed: str
) -> relax.Expr:
    """Return `value` if it is an expression that can replace `root`.

    Raises:
        ConfigError: It is not an expression, or has another shape or dtype.
    """
    wanted = describe_tensor(root)
    if not isinstance(value, relax.Expr):
        raise ConfigError(
            f"{where} returned {describe(value)}; allowed: {allowed} of {wanted}, which is what "
            "the float operator computes.",
            code="RQ106",
        )
    found = call_user(where, lambda: emitter.normalize(value, root.name))
    if tensor_dtype(found) != tensor_dtype(root) or not has_shape_of(found, root):
        raise ConfigError(
            f"{where} returned {describe_tensor(found)}; allowed: {allowed} of {wanted}, which is "
            "what the float operator computes.",
            code="RQ106",
        )
    return found


def has_shape_of(value: relax.Expr, root: relax.Expr) -> bool:
    """Whether two expressions have the same rank, and the same sizes where both are known."""
    have, want = tensor_shape(value), tensor_shape(root)
    if have is None or want is None:
        return getattr(value.ty, "ndim", -1) in (-1, getattr(root.ty, "ndim", -1))
    if len(have) != len(want):
        return False
    pairs = zip(have, want, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def describe_place(row: QuantOp, operator: str, callback: str) -> str:
    """Describe operator, row and callback for messages."""
    return f"Operator {operator!r}, pattern {row.name!r}: callback {callback}"


def describe(value: object) -> str:
    """Describe a wrong value for messages: None, or its type."""
    return "None" if value is None else f"a {type(value).__name__}"


def describe_tensor(expr: relax.Expr) -> str:
    """Describe dtype and shape for messages, as "float32 (1, 4, 6, 6)"."""
    shape = tensor_shape(expr)
    if shape is None:
        return f"{tensor_dtype(expr)} of rank {getattr(expr.ty, 'ndim', 'unknown')}"
    return f"{tensor_dtype(expr)} ({', '.join(map(str, shape))})"
