"""Narrow accumulators in the calibration graph: a sum of products -> its value after clipping or
wrapping.

v -> simulated_dequantize(clip or wrap(simulated_quantize(v))) in units of data scale x weight
scale, if both factors are quantized. If one factor passes through in float, v stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from relayquant.config import Accumulator, Overflow
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import QuantOp
from relayquant.ir.ops.callbacks import run_accumulator_axis
from relayquant.ir.rewrite import Emitter, Match
from relayquant.stages.prepared import GroupVariables

#: dtype code of the simulated operators for int32
INT32 = 3


def make_narrow(
    emitter: Emitter,
    match: Match,
    pattern: QuantOp,
    factors: Sequence[GroupVariables],
    accumulator: Accumulator,
) -> Callable[[relax.Expr], relax.Expr]:
    """Return the function for `SimulateContext.narrow`.

    Sums are float32 here, which is exact up to 2 ** 24. Sums of wider accumulators may differ in
    the last bits, and a sum that int32 cannot hold saturates before it wraps. The integer form is
    exact.
    """
    op = relax.op
    axis = run_accumulator_axis(pattern, match)
    axis = -1 if axis is None else axis
    low, high = (relax.const(np.float32(limit)) for limit in accumulator.limits)
    size = relax.const(np.float32(2.0**accumulator.bits))

    def emit(expr: relax.Expr, suffix: str) -> relax.Expr:
        return emitter.emit(expr, f"{match.name}.accumulator.{suffix}")

    def narrow(value: relax.Expr) -> relax.Expr:
        data, weight = factors
        one = relax.const(np.int32(1))
        # 1 if both factors are quantized; a code is 0 if a value passes through
        codes = [emit(op.minimum(factor.dtype, one), "on") for factor in (data, weight)]
        is_on = emit(op.multiply(*codes), "on")
        code = emit(op.multiply(is_on, relax.const(np.int32(INT32))), "dtype")
        scale = emit(op.multiply(data.scale, weight.scale), "scale")
        length = max(data.length, weight.length)
        zero = relax.const(np.zeros(length, "int32"))
        wide = emit(qnn.simulated_quantize(emit(value, "real"), code, scale, zero, axis=axis), "q")
        if accumulator.overflow is Overflow.SATURATE:
            inside = op.minimum(emit(op.maximum(wide, low), "low"), high)
        else:
            above = emit(op.subtract(wide, low), "above")
            turns = emit(op.floor(emit(op.divide(above, size), "share")), "turns")
            inside = op.subtract(wide, emit(op.multiply(turns, size), "over"))
        is_narrow = emit(op.greater(is_on, relax.const(np.int32(0))), "narrow")
        chosen = emit(op.where(is_narrow, emit(inside, "inside"), wide), "chosen")
        return qnn.simulated_dequantize(chosen, code, scale, zero, axis=axis)

    return narrow
