"""Exact numpy models of the kernels, and the means to compile and call one."""

from __future__ import annotations

import numpy as np
import tvm
from machines import compile_kernel
from tvm.target import Target

from relayquant.codegen.kernels.floating.row_norm import RowNorm
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Slope, Store
from relayquant.ir.reference.row_arithmetic import sum_rows

F32 = np.float32


def exact_fma(a, b, c):
    """a * b + c of float32 arrays with one rounding to nearest even.

    The product is exact in float64. Where the float64 sum is inexact and its last bit even, it is
    moved to the neighbour on the side of the exact sum (round to odd); rounding that to float32
    rounds the exact sum (Boldo and Melquiond 2008).
    """
    product = np.asarray(a, "float64") * np.asarray(b, "float64")
    c = np.asarray(c, "float64")
    total = product + c
    back = total - product  # Knuth's two-sum: total + error is the exact sum
    error = (product - (total - back)) + (c - back)
    is_even = total.view("int64") % 2 == 0
    neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even, neighbour, total).astype("float32")


def store(value, out: Epilogue):
    """float32 values rounded, clamped and moved as `out` says."""
    low, high = out.bounds
    z = out.zero_point
    if out.dtype == "int32":  # the largest float32 that fits
        high = 2**31 - 128
    clamped = np.clip(np.rint(value).astype("float64"), low - z, high - z)
    return (clamped.astype("int64") + z).astype(out.dtype)


def finish(acc, epilogue: Epilogue, multiplier=None, residual=None):
    """The epilogue in numpy; acc int64 (..., C), wrapped to int32 as the kernels wrap it."""
    acc = acc.astype("int64").astype("uint32").view("int32")
    if epilogue.output is Store.ACCUMULATOR:
        return acc
    first = multiplier if epilogue.slope is None else multiplier[0]
    value = acc.astype("float32") * np.asarray(first, "float32")
    if epilogue.output is Store.DEQUANTIZE:
        return value
    if epilogue.residual is not None:
        r = (residual.astype("int32") - epilogue.residual.zero_point).astype("float32")
        value = exact_fma(r, F32(epilogue.residual.multiplier), value)
    if epilogue.slope is not None:
        value = bend(value, epilogue.slope, multiplier[1])
    return store(value, epilogue)


def bend(value, slope: Slope, below):
    """A prelu of float32 values that are rounded and bounded first; what is below 0 has factors."""
    low, high = (-np.inf if slope.low is None else slope.low), slope.high
    value = np.clip(np.rint(value), F32(low), None if high is None else F32(high))
    return value * np.where(value < 0, below, F32(slope.multiplier))


def centre(values, zero_point):
    """float32(int32(values) - zero_point)."""
    return (values.astype("int32") - zero_point).astype("float32")


def state_row_norm(spec: RowNorm, x, factors):
    """The arithmetic of a norm along rows, each operation rounded to float32."""
    width, one = F32(x.shape[-1]), F32(1)
    if spec.is_centred:
        x = x - sum_rows(x) / width
    root = np.sqrt(sum_rows(x * x) / width + F32(spec.epsilon))
    y = x / root if spec.divides else x * (one / root)
    y = y * factors[0] if spec.weight else y
    return y + factors[1] if spec.bias else y


def random_values(rng, shape, dtype):
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)


def random_weights(rng, shape):
    return rng.integers(-127, 128, shape).astype("int8")


def random_multiplier(rng, w):
    """Per channel, such that most results are within the range of 8 bits and some are not."""
    spread = np.sqrt(w[0].size) * 127 * 80
    return (rng.uniform(20, 90, len(w)) / spread).astype("float32")


def random_multipliers(rng, w, epilogue: Epilogue):
    """As `Constants` has them, of any sign below a slope."""
    if not epilogue.has_multiplier:
        return None
    first = random_multiplier(rng, w)
    if epilogue.slope is None:
        return first
    return np.stack([first, rng.uniform(-0.5, 1.5, len(w)).astype("float32")])


#: Values of a result before a kernel writes it.
GARBAGE = 77


def call_kernel(func, target: Target, inputs, out_shape, out_dtype):
    """Compile, run and return the output, which starts as garbage."""
    kernel = compile_kernel(func, target)
    y = tvm.runtime.tensor(np.full(out_shape, GARBAGE, out_dtype))
    kernel(*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in inputs], y)
    return y.numpy()
