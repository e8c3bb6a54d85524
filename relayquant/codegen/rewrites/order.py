"""Medians -> sorts; running sums and products of nothing -> nothing. Runs before `type_promotion`.

TVM's median of bfloat16 is wrong, the one of all values ignores NaN, and the one of nothing is
whatever the memory held. It does not compile a scan along an axis of size 0.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call

from relayquant.codegen.legalization.reductions import find_axes, refuse_nothing
from relayquant.ir.rewrite.expressions import shape_of
from relayquant.ir.rewrite.function import mutate_functions
from relayquant.ir.rewrite.graph import call_name, tensor_dtype

SCANS = ("relax.cumsum", "relax.cumprod")


def order_values(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the medians and the empty scans of every function of a module.

    Raises:
        ModelError: a median is over an axis of size 0.
    """
    return mutate_functions(mod, Ordering(mod))


@relax.expr_functor.mutator
class Ordering(relax.PyExprMutator):
    """Mutator that replaces medians and empty scans."""

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        if not isinstance(visited, Call) or not isinstance(visited.op, tvm.ir.Op):
            return visited
        name = call_name(visited)
        if name in SCANS and 0 in shape_of(visited):
            return relax.op.zeros(shape_of(visited), tensor_dtype(visited))
        if name == "relax.median" and shape_of(visited.args[0]):
            return self.sort_median(visited)
        return visited

    def sort_median(self, call: Call) -> relax.Expr:
        """Return the last value of the smaller half, and its index if the median is along one axis.

        If one of the values is NaN, it is the first NaN, as in PyTorch.
        """
        refuse_nothing(call, "median")
        emit, builder = self.builder_.emit, self.builder_
        (data,), axes = call.args, find_axes(call)
        extents = shape_of(data)
        kept = [axis for axis in range(len(extents)) if axis not in axes]
        count: Any = tirx.const(1, "int64")
        for axis in axes:
            count = count * extents[axis]
        if kept + axes != [*range(len(extents))]:
            data = emit(relax.op.permute_dims(data, kept + axes))
        rows = emit(relax.op.reshape(data, [*(extents[axis] for axis in kept), count]))
        order = emit(relax.op.argsort(rows, -1, False, "int64"))
        index = emit(builder.call_te(read_middle, order, primfunc_name_hint="middle"))
        if "float" in tensor_dtype(rows):
            is_nan = emit(relax.op.not_equal(rows, rows))
            first = emit(relax.op.argmax(is_nan, -1, True))
            found = emit(relax.op.max(is_nan, -1, True))
            index = emit(relax.op.where(found, first, index))
        value = emit(relax.op.gather_elements(rows, index, -1))
        if isinstance(call.ty, relax.TensorType):
            return relax.op.reshape(value, shape_of(call))
        results = zip((value, index), call.ty.fields, strict=True)
        return relax.Tuple([emit(relax.op.reshape(each, ty.shape)) for each, ty in results])


def read_middle(order: te.Tensor) -> Any:
    """Return the middle of each row, the lower one of two."""
    *rows, count = order.shape
    return te.compute(
        [*rows, 1], lambda *at: order(*at[:-1], tirx.floordiv(count - 1, 2)), name="middle"
    )
