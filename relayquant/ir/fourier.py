"""Module with `qnn.dft` -> the same module with products, for code generators, Relay and ONNX."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.ir.dialect.fourier import emit_products
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.function import mutate_functions

NAME = "relax.qnn.dft"


def write_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Write the transforms in all functions as products with constant matrices."""
    has_transforms = any(op_name(call) == NAME for call in list_calls(mod))
    return mutate_functions(mod, _Mutator(mod)) if has_transforms else mod


@relax.expr_functor.mutator
class _Mutator(relax.PyExprMutator):
    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited = self.visit_expr_post_order(call)
        return emit_products(self.builder_.emit, visited) if op_name(visited) == NAME else visited
