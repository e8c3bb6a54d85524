"""Operators after an integer product -> the epilogue of its kernel.

product -> + bias -> requantize | qnn.add of a residual | dequantize -> leaky relu | prelu -> clip
becomes one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.integer.epilogue import (
    Epilogue,
    Residual,
    Slope,
    Store,
    has_small_results,
)
from relayquant.codegen.lowering.kernel_call import (
    KernelContext,
    is_activation,
    is_default_arithmetic,
    multiplier,
    vector,
)
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain, Take, follow_epilogue, take_clip
from relayquant.ir.rewrite.expressions import op_name, read_number
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype

SUMS = Epilogue(Store.ACCUMULATOR, "int32")
CLIPPED = Skip("the sums are clipped before")


@dataclass(frozen=True, eq=False)
class IntegerEpilogueChain(EpilogueChain):
    """The operators after a product of integers that its kernel also computes.

    Attributes:
        epilogue: How the sums are stored.
        multiplier: float32, one per channel or one for all; None for sums. (2, C) with a slope.
        rounds: See `Slope`.
    """

    epilogue: Epilogue = SUMS
    multiplier: np.ndarray | None = None
    rounds: bool = False

    @property
    def is_sums(self) -> bool:
        """Whether the chain still ends with the int32 sums."""
        return self.epilogue.output is Store.ACCUMULATOR

    @property
    def sum_bounds(self) -> dict[str, int]:
        """Bounds of a clip of the sums that excludes any of them, as fields of an epilogue."""
        limits = INTEGER_LIMITS["int32"]
        given = {"low": self.low, "high": self.high}
        bounds = {k: int(np.clip(v, *limits)) for k, v in given.items() if v is not None}
        return {name: value for name, value in bounds.items() if value not in limits}

    @property
    def offsets(self) -> np.ndarray:
        """The bias as int32, one number per channel; zeros without a bias."""
        values = None if self.bias is None else vector(self.bias, self.channels)
        return np.zeros(self.channels, "int32") if values is None else values

    @property
    def residuals(self) -> tuple[relax.Expr, ...]:
        """The second operand of the addition, if there is one."""
        return () if self.residual is None else (self.residual,)

    def bounded(self) -> IntegerEpilogueChain:
        """Return the chain with the bounds of a clip and `Epilogue.is_small` in its epilogue."""
        epilogue = self.epilogue
        if epilogue.output is not Store.REQUANTIZE:
            return replace(self, epilogue=replace(epilogue, **self.sum_bounds))
        if self.low is not None and self.high is not None:
            low, high = epilogue.bounds
            epilogue = replace(
                epilogue, low=int(max(self.low, low)), high=int(min(self.high, high))
            )
        if self.multiplier is not None:
            epilogue = replace(epilogue, is_small=has_small_results(self.multiplier, epilogue))
        return replace(self, epilogue=epilogue)


def take_bias(chain: IntegerEpilogueChain, call: Call) -> IntegerEpilogueChain | Skip:
    """Take sums + bias, where the bias is a constant."""
    other = chain.other_operand(call)
    if not chain.is_sums or chain.bias is not None or chain.is_bounded:
        return Skip("there is a bias already, or the sums are requantized or clipped")
    if constant_value(other) is None or not chain.is_per_channel(other):
        return Skip("the other operand is not a constant with one number per channel")
    return replace(chain, bias=other)


def take_requantize(chain: IntegerEpilogueChain, call: Call) -> IntegerEpilogueChain | Skip:
    """Take requantize(sums)."""
    if chain.is_bounded:
        return CLIPPED
    scale = read_scale(chain, call.args[1], call.args[2], int(call.attrs.axis))
    if isinstance(scale, Skip):
        return scale
    out_scale, out_zero = map(read_number, call.args[3:5])
    dtype = str(call.attrs.out_dtype)
    if out_scale is None or out_zero is None or not is_default_arithmetic(call):
        return Skip("the result has several scales, or the arithmetic is not the default")
    if dtype == "int32":
        return Skip("the result is int32")
    epilogue = Epilogue(Store.REQUANTIZE, dtype, int(out_zero))
    return replace(chain, epilogue=epilogue, multiplier=multiplier(scale, out_scale))


def take_dequantize(chain: IntegerEpilogueChain, call: Call) -> IntegerEpilogueChain | Skip:
    """Take dequantize(sums)."""
    scale = read_scale(chain, call.args[1], call.args[2], int(call.attrs.axis))
    if isinstance(scale, Skip):
        return scale
    if str(call.attrs.out_dtype) != "float32":
        return Skip(f"the result is {call.attrs.out_dtype}")
    epilogue = Epilogue(Store.DEQUANTIZE, "float32")
    return replace(chain, epilogue=epilogue, multiplier=np.asarray(scale, "float32"))


def take_residual(chain: IntegerEpilogueChain, call: Call) -> IntegerEpilogueChain | Skip:
    """Take qnn.add(sums, residual)."""
    if chain.is_bounded:
        return CLIPPED
    lhs, rhs, lhs_scale, lhs_zero, rhs_scale, rhs_zero, out_scale, out_zero = call.args
    if not lhs.same_as(chain.last) or not is_activation(rhs) or constant_value(rhs) is not None:
        return Skip("the second operand is not an 8- or 16-bit value")
    if str(rhs.ty.shape) != str(lhs.ty.shape) or not is_default_arithmetic(call):
        return Skip("the residual is broadcast, or the arithmetic is not the default")
    scale = read_scale(chain, lhs_scale, lhs_zero, int(call.attrs.lhs_axis))
    if isinstance(scale, Skip):
        return scale
    numbers = [read_number(expr) for expr in (rhs_scale, rhs_zero, out_scale, out_zero)]
    dtype = tensor_dtype(call)
    if None in numbers or not is_activation(call):
        return Skip(
            "the residual or the result has several scales, or the result is not 8 or 16 bits"
        )
    r_scale, r_zero, o_scale, o_zero = numbers
    factor = float(multiplier(r_scale, o_scale))  # pyright: ignore[reportArgumentType]
    residual = Residual(tensor_dtype(rhs), int(r_zero), factor)  # pyright: ignore[reportArgumentType]
    return replace(
        chain,
        epilogue=Epilogue(Store.REQUANTIZE, dtype, int(o_zero), residual=residual),  # pyright: ignore[reportArgumentType]
        multiplier=multiplier(scale, o_scale),  # pyright: ignore[reportArgumentType]
        residual=rhs,
    )


def take_slope(chain: IntegerEpilogueChain, call: Call) -> IntegerEpilogueChain | Skip:
    """Take leaky_relu(requantized sums) or prelu(requantized sums)."""
    before, numbers = chain.epilogue, [read_number(expr) for expr in call.args[1:5]]
    if chain.is_bounded or chain.multiplier is None or before.slope is not None:
        return Skip("the values are sums, bounded, or behind a slope")
    if None in numbers or before.output is not Store.REQUANTIZE:
        return Skip("the values are not integers, or have several scales")
    s_in, z_in, s_out, z_out = map(float, numbers)  # pyright: ignore[reportArgumentType]
    if z_in != before.zero_point:
        return Skip("the slope begins at another number than the zero point")
    if op_name(call) == "relax.qnn.leaky_relu":
        slopes, is_plain = np.float64(call.attrs.alpha), is_default_arithmetic(call)
    else:
        slopes, is_plain = vector(call.args[5], chain.channels), True
        if slopes is not None and call.args[5].ty.ndim:
            is_plain = int(call.attrs.axis) % chain.last.ty.ndim == chain.axis
    if slopes is None or not is_plain:
        return Skip("the slopes are not constants along the channels, or the arithmetic is another")
    low, high = (bound - before.zero_point for bound in before.bounds)
    above, below = multiplier(s_in, s_out), multiplier(s_in * np.asarray(slopes, "float64"), s_out)
    slope = Slope(low, high, float(above), chain.rounds)
    after = replace(before, dtype=tensor_dtype(call), zero_point=int(z_out), slope=slope)
    both = [np.broadcast_to(each, chain.channels) for each in (chain.multiplier, below)]
    if has_small_results(chain.multiplier, before) and (below >= 0).all():
        after = move_bounds(after, below)
    return replace(chain, epilogue=after, multiplier=np.stack(both).astype("float32"))


def move_bounds(epilogue: Epilogue, below: np.ndarray) -> Epilogue:
    """Move bounds before a slope behind it, where they become one number for all channels.

    The results before are finite, and no multiplier is negative: the slope keeps their order.

    `below`: multipliers of negative values.
    """
    slope, limits = epilogue.slope, INTEGER_LIMITS[epilogue.dtype]
    if slope is None or slope.low is None or slope.high is None:
        return epilogue

    def convert(bound: int, factors: np.ndarray | float) -> np.ndarray:
        values = np.rint(np.float32(bound) * np.asarray(factors, "float32"))
        return np.clip(values + epilogue.zero_point, *limits)

    low = convert(slope.low, below if slope.low < 0 else slope.multiplier)
    high = convert(slope.high, below if slope.high < 0 else slope.multiplier)
    if np.ptp(high) == 0:
        slope, epilogue = replace(slope, high=None), replace(epilogue, high=int(high.flat[0]))
    if np.ptp(low) == 0:
        slope, epilogue = replace(slope, low=None), replace(epilogue, low=int(low.flat[0]))
    return replace(epilogue, slope=slope)


def read_scale(
    chain: IntegerEpilogueChain, scale: relax.Expr, zero_point: relax.Expr, axis: int
) -> np.ndarray | Skip:
    """Read the scales of sums, one for each channel. Sums must not have a zero point."""
    values, zero = constant_value(scale), constant_value(zero_point)
    factors = vector(scale, chain.channels)
    if not chain.is_sums:
        return Skip("the sums are requantized already")
    if values is None or factors is None or zero is None or zero.any():
        return Skip("the sums have a zero point, or their scale is not constant")
    if values.size != 1 and axis % chain.last.ty.ndim != chain.axis:
        return Skip("the scales are not along the channels")
    return factors


def take_integer_clip(chain: IntegerEpilogueChain, call: Call) -> IntegerEpilogueChain | Skip:
    """Take clip(sums), or clip(requantized sums)."""
    if chain.epilogue.output is Store.DEQUANTIZE:
        return Skip("the clipped values are no integers")
    return take_clip(chain, call)


CLIP_TAKES: Mapping[str, Take[IntegerEpilogueChain]] = {"relax.clip": take_integer_clip}
#: For products whose kernels take no operand after the sums.
PLAIN_TAKES: Mapping[str, Take[IntegerEpilogueChain]] = {
    "relax.qnn.requantize": take_requantize,
    "relax.qnn.dequantize": take_dequantize,
    **CLIP_TAKES,
}
#: For products with constant weights.
CHANNEL_TAKES: Mapping[str, Take[IntegerEpilogueChain]] = {
    "relax.add": take_bias,
    "relax.qnn.leaky_relu": take_slope,
    "relax.qnn.prelu": take_slope,
}
#: For products whose kernels take a bias, and no residual.
LONE_TAKES: Mapping[str, Take[IntegerEpilogueChain]] = {**CHANNEL_TAKES, **PLAIN_TAKES}
#: For products whose kernels start their sums at 0.
UNBIASED_TAKES: Mapping[str, Take[IntegerEpilogueChain]] = {
    "relax.qnn.add": take_residual,
    **PLAIN_TAKES,
}
PRODUCT_TAKES: Mapping[str, Take[IntegerEpilogueChain]] = {**CHANNEL_TAKES, **UNBIASED_TAKES}


def follow_product(
    context: KernelContext,
    var: relax.Var,
    channels: int,
    takes: Mapping[str, Take[IntegerEpilogueChain]] = PRODUCT_TAKES,
) -> IntegerEpilogueChain:
    """Follow the longest chain after sums that one kernel can compute.

    `channels` is the length of the sums' last axis, 1 if all sums have one scale.
    """
    # Each target with fused multiply-adds rounds float32 by an instruction.
    chain = IntegerEpilogueChain((var,), var.ty.ndim - 1, channels, rounds=context.isa.has_fma)
    return follow_epilogue(context.graph, chain, takes).bounded()


def absorb_clip(
    context: KernelContext, var: relax.Var, zero_point: float
) -> tuple[tuple[relax.Var, ...], Epilogue]:
    """Return `var` and a clip after it, and the epilogue that requantizes to them."""
    epilogue = Epilogue(Store.REQUANTIZE, tensor_dtype(var), int(zero_point))
    chain = IntegerEpilogueChain((var,), var.ty.ndim - 1, 1, epilogue=epilogue)
    chain = follow_epilogue(context.graph, chain, CLIP_TAKES).bounded()
    return chain.vars, chain.epilogue
