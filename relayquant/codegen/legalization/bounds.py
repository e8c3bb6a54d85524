"""Relax operators that bound floats -> loop nests that keep NaN, as in ONNX and PyTorch; part of
`table`.

TVM compiles max(a, b) as a > b ? a : b, which is b if one of them is NaN. So a constant bound comes
first: max(0, x) costs as much as max(x, 0), and keeps a NaN in x.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm, legalize_of_truths
from relayquant.ir.rewrite.expressions import read_number, same_type
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype

#: Types of which LLVM can ask whether a number is NaN.
ASKED = ("float32", "float64")
#: Types that LLVM's maximum and minimum take. Both keep NaN.
COMPARED = ("float16", *ASKED)


def legalize_relu(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize relu(x) of floats as max(0, x)."""
    (data,) = call.args
    if "float" not in tensor_dtype(data):
        return legalize_as_tvm(builder, call)

    def compute(x: Any) -> Any:
        zero = tirx.const(0.0, x.dtype)
        return te.compute(x.shape, lambda *at: tirx.max(zero, x(*at)), tag=topi.tag.ELEMWISE)

    return builder.call_te(compute, data, primfunc_name_hint="relu")


def legalize_clip(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize clip(x, low, high) of floats as min(high, max(low, x)). A bound of NaN or of a
    symbolic size is left to TVM.
    """
    data, *bounds = call.args
    dtype = tensor_dtype(data)
    limits = [read_limit(bound, dtype) for bound in bounds] if "float" in dtype else [None]
    if None in limits:
        return legalize_as_tvm(builder, call)

    def compute(x: Any) -> Any:
        low, high = (tirx.const(limit, dtype) for limit in limits)

        def bound(*at: Any) -> Any:
            return tirx.min(high, tirx.max(low, x(*at)))

        return te.compute(x.shape, bound, tag=topi.tag.ELEMWISE)

    return builder.call_te(compute, data, primfunc_name_hint="tir_clip")


def read_limit(bound: Any, dtype: str) -> float | None:
    """Return a bound of a clip, infinite if it is beyond a dtype. None: no number, or NaN."""
    number = read_number(bound)
    if number is None or math.isnan(number):
        return None
    most = float(tirx.max_value(dtype).value)
    return number if abs(number) <= most else math.copysign(math.inf, number)


def legalize_extreme(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize maximum or minimum of floats: a constant comes first. Of two values LLVM's maximum
    is taken, which keeps a NaN of either, and is vectorized.
    """
    left, right = call.args
    name, dtype = call_name(call)[6:], tensor_dtype(left)
    if "float" not in dtype:
        return legalize_of_truths(builder, call)
    choose: Any = topi.maximum if name == "maximum" else topi.minimum
    array = constant_value(right)
    if array is not None and not np.isnan(array.astype("float64")).any():
        is_number = array.size == 1 and (array.ndim == 0 or same_type(call, left))
        bound = tirx.const(array.item(), dtype) if is_number else right
        return builder.call_te(choose, bound, left, primfunc_name_hint=name)
    arrays = [constant_value(each) for each in call.args]
    if dtype not in COMPARED or any(each is not None and each.ndim == 0 for each in arrays):
        return legalize_as_tvm(builder, call)

    def compute(a: Any, b: Any) -> Any:
        shape = choose(a, b).shape
        a, b = (topi.broadcast_to(x, shape) if len(shape) else x for x in (a, b))

        def compare(*at: Any) -> Any:
            return tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}", a(*at), b(*at))

        return te.compute(shape, compare, tag=topi.tag.ELEMWISE)

    return builder.call_te(compute, left, right, primfunc_name_hint=name)


#: Legalizations for `relax.transform.LegalizeOps`.
BOUNDS = {
    "relax.nn.relu": legalize_relu,
    "relax.clip": legalize_clip,
    "relax.maximum": legalize_extreme,
    "relax.minimum": legalize_extreme,
}
