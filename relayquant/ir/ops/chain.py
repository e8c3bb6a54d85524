"""Chains of elementwise operators that compute a function of one value.

Example: x * 0.5 * (1 + tanh(0.798 * (x + 0.0447 * x * x * x))) is a function of x. One table
replaces all nine operators and the 8-bit rounding after each of them. The chain is found by walking
the graph, so that the model may write it in any way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from relayquant.base.qtypes import QParams, Rounding
from relayquant.ir.ops.conv import CONV_FAMILIES
from relayquant.ir.ops.dense import MATMUL
from relayquant.ir.reference import run as run_numpy
from relayquant.ir.reference.lookup_table import build_table
from relayquant.ir.reference.unary import RELAX_UNARY
from relayquant.ir.rewrite import Graph, Match
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import constant_value, free_vars, tensor_dtype

#: a single one of these needs no table: it is merged into the operator before it
CLAMPS = ("relax.nn.relu", "relax.clip")

TABLES = {op: row for op, row in RELAX_UNARY.items() if row.is_table}

#: operators that compute each element from the same element of each operand, and from scalars
ELEMENTWISE = frozenset(
    {
        *(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "power")),
        *("relax.maximum", "relax.minimum", "relax.nn.leakyrelu", *CLAMPS, *TABLES),
    }
)

#: attributes of these operators; the evaluation of a chain uses them
CHAIN_ATTRIBUTES = ("alpha", *(name for row in TABLES.values() for name in row.attributes))

#: operators that take the addition of a constant behind them as bias
LINEAR = frozenset({MATMUL, *(family.op for family in CONV_FAMILIES)})

#: a single one of these is an operator of the dialect, but a square is best a table
BINARY = ("relax.add", "relax.subtract", "relax.multiply")


@dataclass(frozen=True)
class ChainPattern:
    """Matcher of the longest chain that ends at a value. The only part is `data`.

    A chain is two or more elementwise operators. It is also a single operator that uses its operand
    twice or has no other integer form (division by a scalar). Values inside a chain have no reader
    outside.
    """

    def match(self, graph: Graph, var: relax.Var) -> Match | None:
        """Return the chain with its result bound to `var`, or None."""
        inside: set[relax.Var] = set()
        pending = {var}
        best: tuple[relax.Var, frozenset[relax.Var]] | None = None
        while pending:
            last = max(pending, key=graph.order.__getitem__)
            if not self._may_enter(graph, last, var, inside):
                break
            if best is not None and pending == {last} and is_of_producer(graph, last):
                # better merged into the operator that computes its operand, to keep the table's
                # resolution
                break
            inside.add(last)
            pending.remove(last)
            pending.update(free_vars(graph.values[last]))
            if len(pending) == 1:
                best = (next(iter(pending)), frozenset(inside))
        if best is None or not self._is_worthwhile(graph, best[1]):
            return None
        data, members = best
        inner = sorted(members - {var}, key=graph.order.__getitem__)
        return Match(graph, var, {"data": data}, tuple(inner))

    @staticmethod
    def _may_enter(graph: Graph, var: relax.Var, root: relax.Var, inside: set[relax.Var]) -> bool:
        """Whether the operator that computes `var` may be part of the chain."""
        call = graph.call_of(var)
        if call is None or graph.op_name(var) not in ELEMENTWISE or tensor_dtype(var) != "float32":
            return False
        is_inner = not var.same_as(root)
        if is_inner and (
            var in graph.outputs or any(user not in inside for user in graph.users[var])
        ):
            return False
        operands = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        computed = [arg for arg in operands if constant_value(arg) is None]
        # A scalar of rank 4 would raise the rank of the result.
        return bool(computed) and all(
            is_uniform(arg) and arg.ty.ndim <= var.ty.ndim
            if constant_value(arg) is not None
            else str(arg.ty.shape) == str(var.ty.shape)
            for arg in operands
        )

    @staticmethod
    def _is_worthwhile(graph: Graph, members: frozenset[relax.Var]) -> bool:
        """Whether a table is the best form for the operators."""
        if len(members) > 1:
            return True
        (var,) = members
        op, call = graph.op_name(var), graph.call_of(var)
        if op in BINARY and call is not None:
            return op == "relax.multiply" and call.args[0].same_as(call.args[1])
        return op in ("relax.divide", "relax.power", "relax.maximum", "relax.minimum")


def is_of_producer(graph: Graph, var: relax.Var) -> bool:
    """Whether `var` belongs to the operator before it, as a clamp or as the bias of a product."""
    if graph.op_name(var) in CLAMPS:
        return True
    args = graph.values[var].args
    is_sum = graph.op_name(var) == "relax.add" and constant_value(args[1]) is not None
    return is_sum and graph.op_name(args[0]) in LINEAR


def is_uniform(expr: relax.Expr) -> bool:
    """Whether all elements of a constant are equal, so that it acts as a scalar."""
    array = constant_value(expr)
    return array is not None and array.size > 0 and bool((array == array.flat[0]).all())


def evaluate_chain(match: Match, values: np.ndarray) -> np.ndarray:
    """Evaluate a chain at float32 `values` (rank 1, any length) with the numpy reference."""
    data = relax.Var("x", relax.TensorType(values.shape, "float32"))
    new: dict[relax.Var, relax.Expr] = {}

    def translate(arg: relax.Expr) -> relax.Expr:
        constant = constant_value(arg)
        if constant is not None:
            return relax.const(constant.flat[0], str(constant.dtype))
        if arg.same_as(match.parts["data"]):
            return data
        return new[arg] if isinstance(arg, relax.Var) else arg

    def emit(builder: relax.BlockBuilder) -> relax.Expr:
        for var in match.vars:
            call = match.graph.values[var]
            args = [translate(arg) for arg in call.args]
            new[var] = builder.emit(with_operands(call, args))
        return new[match.root]

    with np.errstate(all="ignore"):  # such as log of a negative value
        (outcome,) = run_numpy(make_main([data], emit), [values])
    return outcome


def build_chain_table(match: Match, data: QParams, output: QParams) -> np.ndarray:
    """Build the 256 entries of `qnn.lookup` for a chain. Entry i is for bit pattern i of the
    data.
    """
    return build_table(
        lambda values: evaluate_chain(match, values.astype("float32")),
        data,
        output,
        Rounding.TONEAREST_EVEN,
    )
