"""In which order rows claim operators; finding a planned operator again in a graph whose values
kept their names, and its constant operands.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.config import BackendConfig, PatternConfig
from relayquant.config.accumulator import NATIVE
from relayquant.errors import ModelError
from relayquant.ir.ops.base import TOTALS, Kind, QuantOp
from relayquant.ir.ops.build import source_constant
from relayquant.ir.plan import OperatorPlan
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.rewrite import Graph, Match
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype


def find_pattern(backend: BackendConfig, name: str) -> QuantOp:
    """The row of a backend's pattern.

    Raises:
        ConfigError: the backend has no such pattern.
    """
    return backend.find_pattern(name).pattern  # pyright: ignore[reportReturnType]


def order_rows(backend: BackendConfig) -> list[tuple[PatternConfig, ...]]:
    """The rows of a backend in the order in which they claim: each part goes over the whole graph,
    from the outputs to the inputs, before the next; within a part, order is priority at each value.

    First come rows with `claims_first`, one by one, then the backend's own table; of both, anchors
    before all others, so that an add never takes the bias of a convolution.
    """

    def is_anchor(row: PatternConfig) -> bool:
        pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
        return pattern.kind is Kind.ANCHOR

    rows = sorted(backend.patterns, key=lambda row: not is_anchor(row))
    table = [row for row in rows if not row.claims_first]
    parts = [(row,) for row in rows if row.claims_first]
    parts += [tuple(filter(is_anchor, table)), tuple(row for row in table if not is_anchor(row))]
    return [part for part in parts if part]


def match_operator(graph: Graph, backend: BackendConfig, operator: OperatorPlan) -> Match:
    """The match of a planned operator.

    Raises:
        ModelError: the graph has no such operator any more: it was changed after the plan was made.
    """
    pattern = find_pattern(backend, operator.pattern)
    var = graph.vars.get(operator.name)
    match = pattern.pattern.match(graph, var) if var in graph.values else None
    if match is None:
        raise ModelError(
            f"The plan quantizes operator {operator.name!r} as {operator.pattern!r}, but the "
            "module has "
            "no such operator. Make the plan from the module that is converted.",
            code="RQ105",
        )
    return match


def operand_constant(match: Match, operand: str) -> np.ndarray:
    """The array of a constant operand, in real values: those that it dequantizes, if the model has
    it as integers.

    Raises:
        ModelError: the operand is not constant.
    """
    expr = match.parts[operand]
    constant = source_constant(match.graph, expr)
    value = constant_value(constant) if constant is not None else None
    if value is None:
        raise ModelError(
            f"Operand {operand!r} of operator {match.name!r} is not a constant.", code="RQ204"
        )
    return value if value.dtype.kind == "f" else dequantize_constant(match, expr)


def dequantize_constant(match: Match, expr: relax.Expr) -> np.ndarray:
    """The real values of integers that a chain of dequantizes and quantizes starts at."""
    call = match.graph.call_of(expr)
    while call is not None and match.graph.call_of(call.args[0]) is not None:
        call = match.graph.call_of(call.args[0])
    values = [constant_value(arg) for arg in call.args[:3]] if call is not None else [None]
    if call is None or any(value is None for value in values):
        raise ModelError(
            f"The constant at operator {match.name!r} is dequantized by parameters that are not "
            "constants. Pass a model whose weights have constant scales and zero points.",
            code="RQ204",
        )
    return numpy_qnn.dequantize(*values, axis=int(call.attrs.axis))


def find_sum(graph: Graph, name: str) -> relax.Var | None:
    """The exact sum of products of an operator of an integer module, with its bias if it has one,
    before it is brought into range; None for an operator without.
    """
    found = (graph.vars.get(f"{name}.{suffix}") for suffix in TOTALS)
    return next((var for var in found if var is not None), None)


def find_register(graph: Graph, name: str) -> str:
    """What `LedgerRow.accumulator` says of an operator whose accumulator is that of the kernels."""
    total = find_sum(graph, name)
    return NATIVE.description if total is not None and tensor_dtype(total) == "int64" else ""
