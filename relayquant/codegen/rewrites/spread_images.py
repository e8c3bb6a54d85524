"""Images that are taken with indices which end at the last pixel -> images that are spread by a
loop that fuses with its readers. Runs before `layout`.

    take(x, minimum(0 ... n - 1, size - 1), axis)    ->    resize2d(x, n), marked as a spread

Readers of ONNX broadcast sizes of the run time in this way: `size` is 1 or n. The indices would
keep the image in NCHW, and copy it. A resize passes through ConvertLayout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call

from relayquant.codegen.legalization.resizing import SPREAD
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.expressions import list_bindings, op_name, shape_of
from relayquant.ir.rewrite.function import list_functions, mutate_functions
from relayquant.ir.rewrite.graph import constant_value


def mark_spreads(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite such reads of images along height or width in every function of a module."""
    if not any(op_name(call) == "relax.take" for call in list_calls(mod)):
        return mod
    bindings = (each for func in list_functions(mod).values() for each in list_bindings(func))
    casts = {each.var: each.value for each in bindings if isinstance(each, relax.MatchCast)}
    return mutate_functions(mod, SpreadMutator(mod, casts))


@relax.expr_functor.mutator
class SpreadMutator(relax.PyExprMutator):
    """Mutator that rewrites them. `casts` has what a match_cast binds a variable to."""

    def __init__(self, mod: tvm.IRModule, casts: Mapping[relax.Var, relax.Expr]) -> None:
        super().__init__(mod)
        self._casts = casts

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        if not isinstance(visited, Call) or op_name(visited) != "relax.take":
            return visited
        image, indices = visited.args
        axis, shape = visited.attrs.axis, shape_of(image)
        if len(shape) != 4 or axis is None or int(axis) not in (2, 3):
            return visited
        if not self.ends_at(indices, shape[int(axis)]):
            return visited
        size = shape[2:]
        (size[int(axis) - 2],) = shape_of(indices)
        return relax.op.image.resize2d(
            image,
            relax.ShapeExpr(size),
            layout="NCHW",
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
            cubic_exclude=SPREAD,
        )

    def ends_at(self, indices: relax.Expr, size: Any) -> bool:
        """Whether indices are minimum(0 ... n - 1, size - 1)."""
        bounded = self.find(indices)
        if op_name(bounded) != "relax.minimum":
            return False
        ramp, last = (self.find(each) for each in bounded.args)
        if op_name(ramp) != "relax.arange" or op_name(last) != "relax.subtract":
            return False
        start, _, step = ramp.args[:3]
        if (int(getattr(start, "value", 1)), int(getattr(step, "value", 0))) != (0, 1):
            return False
        have, one = self.find(last.args[0]), constant_value(last.args[1])
        if op_name(have) != "relax.shape_to_tensor" or one is None or one.tolist() != 1:
            return False
        shape = have.args[0]
        values = getattr(shape, "values", ())
        return len(values) == 1 and bool(tvm_ffi.structural_equal(values[0], size))

    def find(self, expr: relax.Expr) -> Any:
        """Return what a variable is bound to, also behind the cast of its type."""
        while isinstance(expr, relax.Var):
            value = self._casts.get(expr)
            value = self.lookup_binding(expr) if value is None else value
            if value is None:
                return expr
            expr = value
        return expr
