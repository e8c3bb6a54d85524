"""Relax powers -> loop nests of multiplications where the exponent allows them; part of `table`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from relayquant.ir.rewrite.expressions import same_type
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype


def legalize_power(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize power(x, 3) as x * x * x, and power(x, 4) alike.

    Other constant exponents become visible to LLVM.

    Calling the C library for each element takes as long as the products of a layer. GELU has a cube
    in its tanh form. TVM has no power of integers. Integer powers wrap around, see
    `raise_to_integers`.
    """
    base, exponent = call.args
    value, dtype = constant_value(exponent), tensor_dtype(base)
    is_number = value is not None and value.size == 1 and same_type(call, base)
    is_float, is_integer = dtype.startswith("float"), dtype.startswith(("int", "uint"))
    if value is None or not is_number or not (is_float or value.item() >= 0):
        if not is_integer:
            return builder.call_te(topi.power, base, exponent, primfunc_name_hint="power")
        bits = count_bits(dtype, value)
        return builder.call_te(raise_to_integers, base, exponent, bits, primfunc_name_hint="power")
    number = float(value.item())

    def raise_to_number(x: Any) -> Any:
        if not is_float:
            return raise_integers(x, int(value.item()))
        if number == 3:
            return topi.multiply(topi.multiply(x, x), x)
        if number == 4:
            square = topi.multiply(x, x)
            return topi.multiply(square, square)
        return topi.power(x, tirx.FloatImm(dtype, number))

    return builder.call_te(raise_to_number, base, primfunc_name_hint="power")


def raise_integers(x: Any, exponent: int) -> Any:
    """Compute x ** n = (x ** (n / 2)) ** 2, times x if n is odd."""
    if exponent < 2:
        return topi.identity(x) if exponent else topi.full_like(x, 1)
    root = raise_integers(x, exponent // 2)
    square = topi.multiply(root, root)
    return topi.multiply(square, x) if exponent % 2 else square


def count_bits(dtype: str, exponent: np.ndarray | None) -> int:
    """Count the bits of the largest constant exponent, else of the type without its sign."""
    if exponent is not None and (exponent >= 0).all():
        return max(int(exponent.max(initial=0)).bit_length(), 1)
    return int(np.iinfo(dtype).max).bit_length()


def raise_to_integers(base: te.Tensor, exponent: te.Tensor, bits: int) -> Any:
    """Compute x ** n of integers, modulo 2^bits.

    For n < 0 the result is 1 / x ** -n truncated: 0 unless x is 1 or -1. For x = 0 it is 0, as in
    PyTorch. Square and multiply from the highest of the `bits` of n to the lowest: r = r * r, times
    x if the bit is set.
    """
    dtype = str(base.dtype)
    one = tirx.const(1, dtype)

    def choose_factor(bit: int) -> Any:
        shifted = topi.right_shift(exponent, tirx.const(bit, dtype))
        is_set = topi.equal(topi.bitwise_and(shifted, one), one)
        return topi.where(is_set, base, topi.full_like(base, 1))

    power = choose_factor(bits - 1)
    for bit in reversed(range(bits - 1)):
        power = topi.multiply(topi.multiply(power, power), choose_factor(bit))
    if dtype.startswith("uint"):
        return power
    is_unit = topi.logical_or(topi.equal(base, one), topi.equal(base, tirx.const(-1, dtype)))
    sign = choose_factor(0)
    fraction = topi.where(is_unit, sign, topi.full_like(sign, 0))
    return topi.where(topi.less(exponent, tirx.const(0, dtype)), fraction, power)
