"""Relax operators that bound floats -> loop nests that keep NaN, as in ONNX and PyTorch; part of
`table`.

TVM compiles max(a, b) as a > b ? a : b, which is b if one of them is NaN. So a constant bound comes
first: max(0, x) costs as much as max(x, 0), and keeps a NaN in x.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm, legalize_of_truths
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype

#: Types that LLVM can ask whether a number is NaN.
ASKED = ("float32", "float64")


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
    """Legalize clip(x, low, high) of floats as max(low, min(high, x)). A bound of NaN is left to
    TVM.
    """
    data, *bounds = call.args
    limits = [float(getattr(bound, "value", bound)) for bound in bounds]
    if "float" not in tensor_dtype(data) or any(np.isnan(limits)):
        return legalize_as_tvm(builder, call)

    def compute(x: Any) -> Any:
        low, high = (tirx.const(limit, x.dtype) for limit in limits)

        def bound(*at: Any) -> Any:
            return tirx.max(low, tirx.min(high, x(*at)))

        return te.compute(x.shape, bound, tag=topi.tag.ELEMWISE)

    return builder.call_te(compute, data, primfunc_name_hint="tir_clip")


def legalize_extreme(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize maximum or minimum of floats: a constant comes first, and of two values the first is
    asked whether it is NaN.
    """
    left, right = call.args
    name, dtype = call_name(call)[6:], tensor_dtype(left)
    if "float" not in dtype:
        return legalize_of_truths(builder, call)
    choose: Any = topi.maximum if name == "maximum" else topi.minimum
    array = constant_value(right)
    if array is not None and not np.isnan(array.astype("float64")).any():
        bound = tirx.const(array.item(), dtype) if array.shape == () else right
        return builder.call_te(choose, bound, left, primfunc_name_hint=name)
    if constant_value(left) is not None or dtype not in ASKED:
        return legalize_as_tvm(builder, call)

    def compute(a: Any, b: Any) -> Any:
        return topi.where(topi.isnan(a), a, choose(a, b))

    return builder.call_te(compute, left, right, primfunc_name_hint=name)


#: Legalizations for `relax.transform.LegalizeOps`.
BOUNDS = {
    "relax.nn.relu": legalize_relu,
    "relax.clip": legalize_clip,
    "relax.maximum": legalize_extreme,
    "relax.minimum": legalize_extreme,
}
