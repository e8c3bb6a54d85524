"""QNN module -> the same module with weights whose zero point is 0, as kernels require.

The sum of (x - zx) * (w - zw) is the product with w alone, minus zw times the sum of x - zx over
the window. This sum is a product with ones. It has one channel and is cheap. All of it is in the
dtype of the sums; int32 is exact modulo 2^32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import is_op, wildcard

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.ir.rewrite import Emitter, Match, Pattern, Rule, Skip, apply_rules
from relayquant.ir.rewrite.graph import constant_value


@dataclass(frozen=True)
class Layout:
    """Channel axes of a linear operator in the weight and in the result."""

    weight_axis: Callable[[Call], int]
    result_axis: Callable[[Call], int]
    groups: Callable[[Call], int]


CONVOLUTION = Layout(
    lambda call: str(call.attrs.kernel_layout).index("O"),
    lambda call: str(call.attrs.data_layout).index("C"),
    lambda call: int(call.attrs.groups),
)
DENSE = Layout(lambda call: 0, lambda call: call.ty.ndim - 1, lambda call: 1)

LAYOUTS = {
    "relax.qnn.conv1d": CONVOLUTION,
    "relax.qnn.conv2d": CONVOLUTION,
    "relax.qnn.dense": DENSE,
}


def subtract_zero_points(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove the zero points of constant weights from products."""
    return apply_rules(mod, WEIGHT_RULES)


def _subtract_zero_point(op: str, layout: Layout) -> Rule:
    """Make the rule conv(x, w, zx, zw) -> conv(x, w - zw, zx, 0) if w - zw fits int8.

    Otherwise the result is conv(x, w, zx, 0) - conv(x, ones, zx, 0) * zw.
    """
    names = ("data", "weight", "input_zero", "kernel_zero")
    parts = {name: wildcard() for name in names}
    pattern = Pattern(is_op(op)(*parts.values(), varg_default_wildcard=True), parts)

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        call = match.call(op)
        weight = constant_value(match.parts["weight"])
        zero = constant_value(match.parts["kernel_zero"])
        if weight is None or zero is None or weight.dtype not in (np.int8, np.uint8):
            return Skip("the weights or their zero point are not 8-bit constants")
        if not zero.any() and weight.dtype == np.int8:
            return Skip("the zero point is 0")
        axis = layout.weight_axis(call)
        shape = shape_along(axis, weight.ndim)
        centred = weight.astype("int32") - (zero.reshape(shape) if zero.size > 1 else zero)

        def multiply(integers: np.ndarray) -> relax.Expr:
            """Call the operator with other weights, whose zero point is 0.

            Scales do not affect sums.
            """
            operands = [emitter.get(arg) for arg in call.args]
            operands[1] = relax.const(integers.astype("int8"), "int8")
            operands[3] = relax.const(0, "int32")
            if integers.shape != weight.shape:
                operands[5] = relax.const(1.0, "float32")
            return Call(call.op, operands, call.attrs, call.ty_args)

        low, high = INTEGER_LIMITS["int8"]
        if low <= centred.min() and centred.max() <= high:
            return multiply(centred)
        shift = 128 if weight.dtype == np.uint8 else 0
        # With groups, each output channel sees different inputs.
        ones = np.ones_like(weight)
        if layout.groups(call) == 1:
            ones = ones.take([0], axis)
        product = emitter.emit(multiply(weight.astype("int32") - shift), f"{match.name}.product")
        window = emitter.emit(multiply(ones), f"{match.name}.window")
        dtype = str(call.attrs.out_dtype)
        factor = (zero - shift).astype(dtype)
        if factor.size > 1:
            axis = layout.result_axis(call)
            factor = factor.reshape(shape_along(axis, match.root.ty.ndim))
        excess = relax.op.multiply(window, relax.const(factor, dtype))
        return relax.op.subtract(product, emitter.emit(excess, f"{match.name}.excess"))

    return Rule(f"zero point of the weights of {op}", pattern, rewrite)


WEIGHT_RULES: tuple[Rule, ...] = tuple(
    _subtract_zero_point(op, layout) for op, layout in LAYOUTS.items()
)
