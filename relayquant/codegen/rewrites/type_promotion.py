"""Relax operators on types that TVM cannot compute or sort -> the same in wider types.

This includes operators whose result in TVM has another type than declared. The results are cast
back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx, topi
from tvm.ir import Call

from relayquant.codegen.legalization.reductions import REDUCTION_LEGALIZATIONS, is_over_nothing
from relayquant.ir.rewrite.function import mutate_functions
from relayquant.ir.rewrite.graph import call_name, tensor_dtype

#: TVM rounds sums of bfloat16 after each addition. Its powers are wrong, and it has no code for
#: rests and for constants that are spread.
WIDE_SUMS = {"bfloat16": "float32"}
HALVES = {"float16": "float32", "bfloat16": "float32"}
TRUTHS = {"bool": "int8"}
TRUTHS_AND_SUMS = {**TRUTHS, **WIDE_SUMS}
SUMS = {"bool": "int64", **WIDE_SUMS}
MEANS = {"bool": "float32", **WIDE_SUMS}
SORTED = {
    **HALVES,
    **dict.fromkeys(("bool", "int8", "uint8", "int16"), "int32"),
    **dict.fromkeys(("uint16", "uint32"), "int64"),
}

SORTS = ("relax.argsort", "relax.sort", "relax.topk")
#: Types that TVM sorts only without NaN, or not at all -> integers with as many bits.
KEYS = {"float32": "int32", "float64": "int64", "uint64": "int64"}
UNSIGNED = frozenset(["uint64"])

#: operator -> type of its operands -> type in which TVM computes it
WIDE_TYPES: dict[str, dict[str, str]] = {
    "relax.acos": HALVES,
    "relax.acosh": HALVES,
    "relax.asin": HALVES,
    "relax.asinh": HALVES,
    "relax.atan": HALVES,
    "relax.atan2": HALVES,
    "relax.atanh": HALVES,
    "relax.nn.gelu": HALVES,
    "relax.nn.gelu_tanh": HALVES,
    "relax.nn.softplus": HALVES,
    **dict.fromkeys(("relax.cosh", "relax.sinh", "relax.tanh"), HALVES),
    **dict.fromkeys(SORTS, SORTED),
    "relax.broadcast_to": WIDE_SUMS,
    "relax.collapse_sum_to": WIDE_SUMS,
    **dict.fromkeys(("relax.floor_divide", "relax.floor_mod"), WIDE_SUMS),
    "relax.image.grid_sample": WIDE_SUMS,
    "relax.index_put": WIDE_SUMS,
    "relax.mod": WIDE_SUMS,
    **dict.fromkeys(("relax.argmax", "relax.argmin", "relax.cumprod"), TRUTHS_AND_SUMS),
    "relax.cumsum": SUMS,
    **dict.fromkeys(("relax.isfinite", "relax.isinf", "relax.isnan"), WIDE_SUMS),
    "relax.max": {"bool": "uint8"},  # whose lowest and highest value are false and true
    **dict.fromkeys(("relax.maximum", "relax.minimum"), WIDE_SUMS),  # TVM loses NaN
    "relax.mean": MEANS,
    "relax.min": {"bool": "uint8"},
    "relax.nn.batch_norm": HALVES,  # of which TVM returns float32
    "relax.nn.group_norm": WIDE_SUMS,
    "relax.nn.instance_norm": WIDE_SUMS,
    "relax.nn.layer_norm": WIDE_SUMS,
    "relax.nn.pad": WIDE_SUMS,
    "relax.nn.rms_norm": WIDE_SUMS,
    "relax.power": WIDE_SUMS,
    "relax.prod": WIDE_SUMS,
    "relax.scatter_elements": WIDE_SUMS,
    "relax.scatter_nd": WIDE_SUMS,
    "relax.sign": HALVES,  # NaN
    "relax.std": MEANS,
    "relax.sum": WIDE_SUMS,
    "relax.variance": MEANS,
    "relax.vision.roi_align": HALVES,  # of which TVM returns float32
}


def widen_types(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite f(x: narrow) -> cast(f(cast(x, wide)), narrow) in every function of a module.

    Sorts of some types become sorts of integer keys (see `KEYS`).
    """
    return mutate_functions(mod, Widening(mod))


@relax.expr_functor.mutator
class Widening(relax.PyExprMutator):
    """Mutator that computes the calls listed in `WIDE_TYPES` in the wider type."""

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        wide = find_wide_type(visited)
        if wide is None:
            return self.sort_keys(visited) if has_keys(visited) else visited
        emit = self.builder_.emit
        narrow = tensor_dtype(visited.args[0])
        operands = [
            emit(relax.op.astype(each, wide)) if tensor_dtype(each) == narrow else each
            for each in visited.args
        ]
        widened = Call(visited.op, operands, visited.attrs, visited.ty_args)
        result = self.sort_keys(widened) if has_keys(widened) else widened
        return self.cast(emit(result), visited.ty)

    def sort_keys(self, call: Call) -> relax.Expr:
        """Replace sort, argsort and topk by the same operator on the integers of `make_keys`.

        NaN is larger than all other values, as in numpy and PyTorch. TVM compares floats, and does
        not sort them if one is NaN. It has no code for uint64.
        """
        builder, (data,) = self.builder_, call.args
        keys = builder.emit(builder.call_te(make_keys, data, primfunc_name_hint="sort_keys"))
        result = builder.emit(Call(call.op, [keys], call.attrs, call.ty_args))
        kind = str(call.attrs.ret_type) if call_name(call) == "relax.topk" else "values"
        if call_name(call) == "relax.argsort" or kind == "indices":
            return result

        def read(value: relax.Expr) -> relax.Expr:
            hint = "sorted_values"
            own = builder.call_te(read_keys, value, tensor_dtype(data), primfunc_name_hint=hint)
            return builder.emit(own)

        if kind == "values":
            return read(result)
        values, indices = (builder.emit(relax.TupleGetItem(result, k)) for k in range(2))
        return relax.Tuple([read(values), indices])

    def cast(self, value: relax.Expr, ty: Any) -> relax.Expr:
        """Cast a value, or each field of a tuple, to a type of the same shape."""
        if isinstance(ty, tvm.ir.TupleType):
            parts = [relax.TupleGetItem(value, k) for k in range(len(ty.fields))]
            pairs = zip(map(self.builder_.emit, parts), ty.fields, strict=True)
            return relax.Tuple([self.cast(*pair) for pair in pairs])
        if str(ty.dtype) == tensor_dtype(value):
            return value
        return self.builder_.emit(relax.op.astype(value, str(ty.dtype)))


def has_keys(call: Any) -> bool:
    """Whether a call sorts values of a type with keys."""
    if not isinstance(call, Call) or not isinstance(call.op, tvm.ir.Op):
        return False
    return call_name(call) in SORTS and tensor_dtype(call.args[0]) in KEYS


def find_wide_type(call: Any) -> str | None:
    """Return the type to compute a call in, None if it is the operands' own type."""
    if not isinstance(call, Call) or not isinstance(call.op, tvm.ir.Op) or not call.args:
        return None
    if getattr(call.attrs, "reduction", "") == "update" or not getattr(
        call.attrs, "accumulate", True
    ):
        return None  # values are written as they are
    if call_name(call) in REDUCTION_LEGALIZATIONS and is_over_nothing(call):
        return None  # nothing is computed
    types = WIDE_TYPES.get(call_name(call))
    return None if types is None else types.get(tensor_dtype(call.args[0]))


def make_keys(numbers: Any) -> Any:
    """Return integers in the same order as the numbers.

    0 and -0 have equal keys; NaN has the largest key.

    The bits of positive floats are in this order already; the bits of negative floats are in
    reverse order. Unsigned integers are in this order once their highest bit is flipped.
    """
    if str(numbers.dtype) in UNSIGNED:
        return flip_sign(topi.reinterpret(numbers, KEYS[str(numbers.dtype)]))
    dtype = KEYS[str(numbers.dtype)]
    most = tirx.const(np.iinfo(dtype).max, dtype)
    infinity, nan = (
        tirx.const(int(np.array(each, str(numbers.dtype)).view(dtype)), dtype)
        for each in (np.inf, np.nan)  # a NaN of other bits may become 0 when cast to bfloat16
    )
    bits = topi.reinterpret(numbers, dtype)
    size = topi.bitwise_and(bits, most)
    is_negative = topi.less(bits, tirx.const(0, dtype))
    keys = topi.where(is_negative, topi.negative(size), bits)
    return topi.where(topi.greater(size, infinity), topi.full_like(keys, nan), keys)


def read_keys(keys: Any, dtype: str) -> Any:
    """Return the numbers of keys of `make_keys`. -0 becomes 0."""
    if dtype in UNSIGNED:
        return topi.reinterpret(flip_sign(keys), dtype)
    least = tirx.const(np.iinfo(str(keys.dtype)).min, keys.dtype)
    negative = topi.bitwise_or(topi.negative(keys), least)
    is_negative = topi.less(keys, tirx.const(0, keys.dtype))
    return topi.reinterpret(topi.where(is_negative, negative, keys), dtype)


def flip_sign(integers: Any) -> Any:
    """Flip the highest bit of each integer."""
    dtype = str(integers.dtype)
    return topi.bitwise_xor(integers, tirx.const(np.iinfo(dtype).min, dtype))
