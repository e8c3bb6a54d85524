"""QNN module -> the same module with 64-bit sums split into 32-bit sums, which kernels compute.

product(x, w) in int64 -> sum of int64(product(x_i, w_i) in int32) over chunks of the input
channels. There are as few chunks as int32 holds for any input. Some products cannot be split:
products in groups, or products where one channel alone exceeds int32. They keep int64 and the loop
nest of their legalization.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import is_op, wildcard

from relayquant.ir.dialect.accumulator_range import (
    BATCH_MATMUL,
    PRODUCTS,
    SUM_DTYPES,
    bound_sums,
    choose_sum_dtype,
    count_products,
)
from relayquant.ir.dialect.operator import replace_attrs
from relayquant.ir.rewrite import Emitter, Match, Pattern, Rule, Skip, apply_rules
from relayquant.ir.rewrite.graph import constant_value

#: First and last input channel (exclusive) of one chunk.
Chunk = tuple[int, int]


def split_int64_sums(mod: tvm.IRModule) -> tvm.IRModule:
    """Split the 64-bit sums of a module where that is possible."""
    return apply_rules(mod, SPLITTING_RULES)


def find_axes(call: Call) -> tuple[int, int]:
    """Find the axes of the input channels in both factors."""
    if call.op.name in ("relax.qnn.dense", BATCH_MATMUL):
        return call.args[0].ty.ndim - 1, call.args[1].ty.ndim - 1
    return str(call.attrs.data_layout).index("C"), str(call.attrs.kernel_layout).index("I")


def divide(channels: int, count: int) -> list[Chunk]:
    """Split channels into `count` neighbouring chunks of about the same size."""
    ends = [channels * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def find_chunks(call: Call) -> list[Chunk] | None:
    """Find few chunks whose sums int32 holds. None if there are none."""
    weight, axis = constant_value(call.args[1]), find_axes(call)[1]
    bounds = bound_sums(call)
    if bounds is None:
        return None
    largest, limit = max(-int(bounds[0].min()), int(bounds[1].max()), 1), 2**31 - 1
    if weight is None:
        length = count_products(call) if call.op.name == BATCH_MATMUL else None
        most = limit * length // largest if length else 0  # products in one sum of int32
        return divide(length, -(-length // most)) if length and most else None
    channels = weight.shape[axis]

    def fits(chunk: Chunk) -> bool:
        bounds = bound_sums(call, np.take(weight, range(*chunk), axis))
        return bounds is not None and choose_sum_dtype(*bounds) == SUM_DTYPES[0]

    count = max(largest // limit, 1)
    while count <= channels:
        chunks = divide(channels, count)
        if all(map(fits, chunks)):
            return chunks
        count = max(count + 1, count * 5 // 4)
    return None


def _split_sums(op: str) -> Rule:
    """Make the rule of one operator."""
    names = ("data", "weight", "input_zero", "kernel_zero")
    parts = {name: wildcard() for name in names}
    pattern = Pattern(is_op(op)(*parts.values(), varg_default_wildcard=True), parts)

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        call = match.call(op)
        if str(call.attrs.out_dtype) == SUM_DTYPES[0]:
            return Skip("the sums are int32 already")
        if int(getattr(call.attrs, "groups", 1)) != 1:
            return Skip("grouped: an output channel reads only some input channels")
        if constant_value(call.args[2]) is None or constant_value(call.args[3]) is None:
            return Skip("a zero point is a variable")
        found = find_chunks(call)
        if found is None:
            return Skip("one channel alone exceeds int32, or the number of channels is unknown")
        attrs = replace_attrs(call.attrs, out_dtype=SUM_DTYPES[0])
        axes, weight = find_axes(call), constant_value(call.args[1])

        def cut(operand: int, chunk: Chunk) -> relax.Expr:
            if operand == 1 and weight is not None:
                array = np.ascontiguousarray(np.take(weight, range(*chunk), axes[1]))
                return relax.const(array, str(array.dtype))
            value, axis = emitter.get(call.args[operand]), axes[operand]
            start, end = ([bound] for bound in chunk)
            slice_ = relax.op.strided_slice(value, [axis], start, end)
            return emitter.emit(slice_, f"{match.name}.part")

        total = None
        for chunk in found:
            operands = [cut(0, chunk), cut(1, chunk), *map(emitter.get, call.args[2:])]
            product = emitter.emit(Call(call.op, operands, attrs), f"{match.name}.product")
            wide = emitter.emit(relax.op.astype(product, SUM_DTYPES[1]), f"{match.name}.wide")
            if total is not None:
                wide = emitter.emit(relax.op.add(total, wide), f"{match.name}.total")
            total = wide
        return total if total is not None else Skip("there are no channels")

    return Rule(f"64-bit sums of {op}", pattern, rewrite)


SPLITTING_RULES: tuple[Rule, ...] = tuple(map(_split_sums, PRODUCTS))
