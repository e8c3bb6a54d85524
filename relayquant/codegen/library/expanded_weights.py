"""Calls of a lowered module that expand weights -> constants, or C functions for a library.

    w = relayquant_expand_int16(taps); conv2d(x, w, y)   ->   conv2d(x, c, y)

Rules emit the calls. A module in memory gets constants. A library gets functions that expand the
weights (see `mmap_constants`).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.base.runtime import view_constant
from relayquant.codegen.kernels.expansion import Expanded, build_expansion
from relayquant.codegen.kernels.floating.convolution import winograd as floating
from relayquant.codegen.kernels.integer.convolution import winograd as integer
from relayquant.ir.rewrite.function import add_functions, list_functions, map_functions
from relayquant.ir.rewrite.graph import call_name

#: Frees a value after its last use. Constants are not freed.
KILL = "relax.vm.kill_object"
EXPANSIONS = {rule.name: rule for rule in (integer.EXPANSION, floating.EXPANSION)}


def call_expansion(weights: Expanded) -> Call:
    """Make the call that returns the expanded weights, for a dataflow block."""
    ty = relax.TensorType([weights.size], weights.rule.dtype)
    taps = relax.const(tvm.runtime.tensor(weights.taps))
    call: Any = relax.op.call_pure_packed(weights.rule.name, taps, ty_args=ty)
    return call


def read_expansion(expr: relax.Expr) -> Expanded | None:
    """Read the weights of a call that expands weights in a lowered module.

    None for any other expression.
    """
    if not isinstance(expr, Call) or not isinstance(expr.op, relax.ExternFunc):
        return None
    rule = EXPANSIONS.get(expr.op.global_symbol)
    return None if rule is None else Expanded(rule, view_constant(expr.args[0].value))


def expand_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace the calls of a lowered module that expand weights by constants."""
    return map_functions(mod, ExpansionCalls(mod).visit_expr)


@relax.expr_functor.mutator
class ExpansionCalls(relax.PyExprMutator):
    """w = relayquant_expand_int16(taps); conv2d(x, w, y); kill_object(w)  ->  conv2d(x, c, y)"""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.constants: dict[relax.Var, GenericConst] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value, weights = binding.value, read_expansion(binding.value)
        if weights is not None:
            self.constants[binding.var] = relax.const(tvm.runtime.tensor(weights.expand()))
        elif not self.is_kill(value):
            super().visit_var_binding_(binding)

    def visit_var_(self, op: relax.Var) -> relax.Expr:
        constant = self.constants.get(op)
        return super().visit_var_(op) if constant is None else constant

    def is_kill(self, value: relax.Expr) -> bool:
        """Whether `value` frees a variable that became a constant."""
        is_kill = isinstance(value, Call) and call_name(value) == KILL
        return is_kill and value.args[0] in self.constants


def add_expanders(mod: tvm.IRModule) -> tvm.IRModule:
    """Add the C functions that expand the weights of a lowered module in a library."""
    found: set[str] = set()

    def visit(expr: relax.Expr) -> None:
        weights = read_expansion(expr)
        if weights is not None:
            found.add(weights.rule.name)

    for func in list_functions(mod).values():
        relax.analysis.post_order_visit(func, visit)
    added = {tvm.ir.GlobalVar(name): build_expansion(EXPANSIONS[name]) for name in sorted(found)}
    return add_functions(mod, added)


#: `expand_weights` as a pass.
EXPAND_WEIGHTS: tvm.transform.Pass = tvm.transform.module_pass(  # pyright: ignore[reportAssignmentType]
    lambda mod, _context: expand_weights(mod), opt_level=0, name="relayquant.expand_weights"
)
