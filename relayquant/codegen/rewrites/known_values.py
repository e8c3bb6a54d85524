"""Operators on constants -> constants, in every function of a module, before there are kernels."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.ir.reference.folding import fold_call
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.function import mutate_functions
from relayquant.ir.rewrite.graph import free_vars


def fold_known_values(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite f(constants) -> constant, or a tuple of constants, and tuples -> their fields.

    The results are the reference's, see `fold_call`.
    """
    return mutate_functions(mod, Folding(mod))


@relax.expr_functor.mutator
class Folding(relax.PyExprMutator):
    """Mutator that computes calls on constants."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._mod = mod

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        if not isinstance(visited, Call):
            return visited
        operands = [self.look_up(arg) for arg in visited.args]
        if any(map(free_vars, operands)):
            return visited
        known = self.builder_.normalize(with_operands(visited, operands))
        result = fold_call(known, self._mod)
        return visited if isinstance(result, str) else result

    def visit_tuple_getitem_(self, op: relax.TupleGetItem) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(op)
        value = self.look_up(visited.tuple_value)
        field = value.fields[visited.index] if isinstance(value, relax.Tuple) else None
        return field if isinstance(field, GenericConst) else visited

    def look_up(self, operand: relax.Expr) -> relax.Expr:
        """Return what an operand is bound to, if that is a constant, or a tuple of constants."""
        if isinstance(operand, relax.Tuple):
            return relax.Tuple([self.look_up(field) for field in operand.fields])
        if not isinstance(operand, relax.Var):
            return operand
        value = self.lookup_binding(operand)
        if isinstance(value, GenericConst | relax.ShapeExpr):
            return value
        return self.look_up(value) if isinstance(value, relax.Var | relax.Tuple) else operand
