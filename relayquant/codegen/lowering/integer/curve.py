"""A function of single numbers behind an integer product, with quantized results -> its epilogue.

    y = dequantize(sums);  q = quantize(curve(y) * factors)    ->    q = epilogue(sums)

A network that is quantized with equalization has such factors, one for each channel, behind GELU.
Between kernels the values would be float32 in memory: four bytes where the result has one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.integer.epilogue import Store
from relayquant.codegen.lowering.curve import follow_curve
from relayquant.codegen.lowering.integer.elementwise import read_quantize
from relayquant.codegen.lowering.integer.epilogue import IntegerEpilogueChain
from relayquant.codegen.lowering.kernel_call import KernelContext, multiplier, vector
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.rule import log_skip

#: Bound of finite numbers, with room for a rounding of each step.
LARGEST = 2.0**126
#: Bound of results that fit int32 before they are clamped, as `has_small_results` has it.
SMALL = 2.0**30


def follow_quantized_curve(
    context: KernelContext, chain: IntegerEpilogueChain
) -> IntegerEpilogueChain:
    """Extend a chain that ends with dequantized sums by a curve, factors and a quantization.

    Returns the chain as it is, where the values behind it are others.
    """
    if chain.epilogue.output is not Store.DEQUANTIZE:
        return chain
    if chain.is_bounded or chain.multiplier is None:
        return chain
    inside, curve = follow_curve(context.block, chain.last)
    if curve is None:
        return chain
    inside, factors = follow_factors(context, chain, inside)
    quantize = context.next(inside[-1], "relax.qnn.quantize")
    if quantize is None or not context.block.is_free(quantize):
        return chain
    found = read_quantize(context, quantize)
    if isinstance(found, Skip):
        log_skip(follow_quantized_curve.__name__, quantize.name, found)
        return chain
    vars_, quantized = found
    curve, factor = curve.split_factor()
    after = multiplier(factors * np.float64(factor), quantized.scale)
    largest = float(np.abs(chain.multiplier).max(initial=0)) * -INTEGER_LIMITS["int32"][0]
    bounds = curve.find_bounds(largest)
    bounds.append(bounds[-1] * float(np.abs(after).max(initial=0)))
    if not max(bounds) <= LARGEST:
        skip = Skip("a result of the curve may be infinite")
        log_skip(follow_quantized_curve.__name__, quantize.name, skip)
        return chain
    both = np.stack([np.broadcast_to(each, chain.channels) for each in (chain.multiplier, after)])
    return replace(
        chain,
        vars=(*chain.vars, *inside, *vars_),
        epilogue=replace(quantized.out, curve=curve, is_small=bounds[-1] <= SMALL),
        multiplier=both.astype("float32"),
    )


def follow_factors(
    context: KernelContext, chain: IntegerEpilogueChain, inside: tuple[relax.Var, ...]
) -> tuple[tuple[relax.Var, ...], np.ndarray]:
    """Find a product of the last value with a constant of one number per channel.

    Returns the values with it, and the numbers: ones without it.
    """
    scaled = context.next(inside[-1], "relax.multiply")
    if scaled is not None and context.block.is_free(scaled):
        behind = replace(chain, vars=(*chain.vars, *inside))
        other = behind.other_operand(context.call(scaled))
        factors = vector(other, chain.channels) if behind.is_per_channel(other) else None
        if factors is not None:
            return (*inside, scaled), factors
    return inside, np.ones(chain.channels, "float32")
