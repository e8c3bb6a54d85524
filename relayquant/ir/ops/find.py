"""The order in which rows match, and lookup of planned operators and their constants.

A planned operator is found again by value name in any graph that kept the names.
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
    """Return the row of a backend's pattern.

    Raises:
        ConfigError: The backend does not have this pattern.
    """
    return backend.find_pattern(name).pattern  # pyright: ignore[reportReturnType]


def order_rows(backend: BackendConfig) -> list[tuple[PatternConfig, ...]]:
    """Return the rows of a backend in matching order, in parts.

    Each part goes over the whole graph, from outputs to inputs, before the next part starts. Within
    a part, the order is the priority at each value.

    Rows with `match_first` come first, each as one part. The rest of the table follows. Both begin
    with their anchors, so that an add never takes the bias of a convolution.
    """

    def is_anchor(row: PatternConfig) -> bool:
        pattern: QuantOp = row.pattern  # pyright: ignore[reportAssignmentType]
        return pattern.kind is Kind.ANCHOR

    rows = sorted(backend.patterns, key=lambda row: not is_anchor(row))
    table = [row for row in rows if not row.match_first]
    parts = [(row,) for row in rows if row.match_first]
    parts += [tuple(filter(is_anchor, table)), tuple(row for row in table if not is_anchor(row))]
    return [part for part in parts if part]


def match_operator(graph: Graph, backend: BackendConfig, operator: OperatorPlan) -> Match:
    """Return the match of a planned operator.

    Raises:
        ModelError: The operator is gone: the graph was changed after the plan was made.
    """
    pattern = find_pattern(backend, operator.pattern)
    var = graph.vars.get(operator.name)
    match = pattern.pattern.match(graph, var) if var in graph.values else None
    if match is None:
        raise ModelError(
            f"The plan quantizes operator {operator.name!r} as {operator.pattern!r}, but the "
            "module does not have it. Make the plan from the module that is converted.",
            code="RQ105",
        )
    return match


def operand_constant(match: Match, operand: str) -> np.ndarray:
    """Return a constant operand as an array of real values.

    If the model holds integers, they are dequantized.

    Raises:
        ModelError: The operand is not constant.
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
    """Return the real values of the constant at the start of a chain of dequantize and quantize."""
    call = match.graph.call_of(expr)
    while call is not None and match.graph.call_of(call.args[0]) is not None:
        call = match.graph.call_of(call.args[0])
    values = [constant_value(arg) for arg in call.args[:3]] if call is not None else [None]
    if call is None or any(value is None for value in values):
        raise ModelError(
            f"The constant at operator {match.name!r} is dequantized with parameters that are not "
            "constants. Pass a model whose weights have constant scales and zero points.",
            code="RQ204",
        )
    return numpy_qnn.dequantize(*values, axis=int(call.attrs.axis))


def find_sum(graph: Graph, name: str) -> relax.Var | None:
    """Find the exact accumulator of an operator in an integer module, with the bias if there is
    one.

    It is the value before narrowing. Return None for an operator without sums of products.
    """
    found = (graph.vars.get(f"{name}.{suffix}") for suffix in TOTALS)
    return next((var for var in found if var is not None), None)


def find_register(graph: Graph, name: str) -> str:
    """Return the `LedgerRow.accumulator` of an operator that uses the accumulator of the
    kernels.
    """
    total = find_sum(graph, name)
    return NATIVE.description if total is not None and tensor_dtype(total) == "int64" else ""
