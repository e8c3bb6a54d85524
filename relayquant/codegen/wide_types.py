"""Relax operators of types that TVM has no code for, or whose results it gives another type than it
declares -> the same in a type it has, and a cast; the first of `passes`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.rewrite.graph import call_name, tensor_dtype

HALVES = {"float16": "float32"}
TRUTHS = {"bool": "int8"}
SMALL = {
    **dict.fromkeys(("bool", "int8", "uint8", "int16"), "int32"),
    **dict.fromkeys(("uint16", "uint32"), "int64"),
}

#: operator -> type of its operands -> type that TVM computes it in
WIDE_TYPES: dict[str, dict[str, str]] = {
    "relax.acos": HALVES,
    "relax.acosh": HALVES,
    "relax.asin": HALVES,
    "relax.asinh": HALVES,
    "relax.atan": HALVES,
    "relax.atan2": HALVES,
    "relax.argsort": SMALL,
    "relax.sort": SMALL,
    "relax.topk": SMALL,
    "relax.argmax": TRUTHS,
    "relax.argmin": TRUTHS,
    "relax.cumprod": TRUTHS,
    "relax.cumsum": TRUTHS,
    "relax.max": TRUTHS,
    "relax.min": TRUTHS,
}


def widen_types(mod: tvm.IRModule) -> tvm.IRModule:
    """f(x: narrow) -> cast(f(cast(x, wide)), narrow), in every function of a module."""
    widening = Widening(mod)
    for var, func in mod.functions_items():
        if isinstance(func, relax.Function):
            widened = widening.visit_expr(func)
            if not widened.same_as(func):
                widening.builder_.update_func(var, widened)
    return widening.builder_.get()


@relax.expr_functor.mutator
class Widening(relax.PyExprMutator):
    """Calls of rows of `WIDE_TYPES` in the type that TVM has."""

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        wide = find_wide_type(visited)
        if wide is None:
            return visited
        emit = self.builder_.emit
        operands = [emit(relax.op.astype(each, wide)) for each in visited.args]
        result = emit(Call(visited.op, operands, visited.attrs, visited.ty_args))
        return self.cast(result, visited.ty)

    def cast(self, value: relax.Expr, ty: Any) -> relax.Expr:
        """A value in a type of the same shape."""
        if isinstance(ty, tvm.ir.TupleType):
            parts = [relax.TupleGetItem(value, k) for k in range(len(ty.fields))]
            pairs = zip(map(self.builder_.emit, parts), ty.fields, strict=True)
            return relax.Tuple([self.cast(*pair) for pair in pairs])
        if str(ty.dtype) == tensor_dtype(value):
            return value
        return self.builder_.emit(relax.op.astype(value, str(ty.dtype)))


def find_wide_type(call: Any) -> str | None:
    """The type to compute a call in, None where it is that of its operands."""
    if not isinstance(call, Call) or not isinstance(call.op, tvm.ir.Op) or not call.args:
        return None
    types = WIDE_TYPES.get(call_name(call))
    return None if types is None else types.get(tensor_dtype(call.args[0]))
