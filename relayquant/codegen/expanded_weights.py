"""Calls of a lowered module that expand weights -> constants, for a module in memory; or functions
that a library does it with.

    w = relayquant_expand_int16(taps); conv2d(x, w, y)   ->   conv2d(x, c, y)

Rules emit the calls. `mmap_constants` says how a library answers them.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.base.runtime import view_constant
from relayquant.codegen.kernels.expansion import Expanded, build_expansion
from relayquant.codegen.kernels.floating import winograd as floating
from relayquant.codegen.kernels.integer import winograd as integer
from relayquant.ir.rewrite.graph import call_name

#: What frees a value after its last use; constants are not freed.
KILL = "relax.vm.kill_object"
EXPANSIONS = {rule.name: rule for rule in (integer.EXPANSION, floating.EXPANSION)}


def call_expansion(weights: Expanded) -> Call:
    """The call, in a dataflow block, that gives the weights."""
    ty = relax.TensorType([weights.size], weights.rule.dtype)
    taps = relax.const(tvm.runtime.tensor(weights.taps))
    call: Any = relax.op.call_pure_packed(weights.rule.name, taps, ty_args=ty)
    return call


def read_expansion(expr: relax.Expr) -> Expanded | None:
    """The weights of a call in a lowered module that expands some."""
    if not isinstance(expr, Call) or not isinstance(expr.op, relax.ExternFunc):
        return None
    rule = EXPANSIONS.get(expr.op.global_symbol)
    return None if rule is None else Expanded(rule, view_constant(expr.args[0].value))


def expand_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """The lowered module with constants in place of the calls."""
    mutator = ExpansionCalls(mod)
    functions = {
        gvar: mutator.visit_expr(func) if isinstance(func, relax.Function) else func
        for gvar, func in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


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
        """Whether a value frees what is a constant now."""
        is_kill = isinstance(value, Call) and call_name(value) == KILL
        return is_kill and value.args[0] in self.constants


def add_expanders(mod: tvm.IRModule) -> tvm.IRModule:
    """The lowered module with the functions of C that expand its weights in a library."""
    found: set[str] = set()

    def visit(expr: relax.Expr) -> None:
        weights = read_expansion(expr)
        if weights is not None:
            found.add(weights.rule.name)

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    added = {tvm.ir.GlobalVar(name): build_expansion(EXPANSIONS[name]) for name in sorted(found)}
    return tvm.IRModule({**dict(mod.functions_items()), **added}, attrs=mod.attrs)


#: `expand_weights` as a pass.
EXPAND_WEIGHTS: tvm.transform.Pass = tvm.transform.module_pass(  # pyright: ignore[reportAssignmentType]
    lambda mod, _context: expand_weights(mod), opt_level=0, name="relayquant.expand_weights"
)
