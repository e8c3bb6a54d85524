"""Relax operators -> loop nests of our own, where those of TVM cost far more; part of `passes`."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx, topi
from tvm.ir import Call

from relayquant.rewrite.expressions import same_type
from relayquant.rewrite.graph import constant_value, tensor_dtype


def legalize_power(builder: relax.BlockBuilder, call: Call) -> Any:
    """power(x, 3) -> x * x * x, and the same of 4; of any other number LLVM sees which it is.

    A call of the C library for each element takes as long as the products of a layer (the cube in
    the tanh form of GELU).
    """
    base, exponent = call.args
    value, dtype = constant_value(exponent), tensor_dtype(base)
    is_number = value is not None and value.size == 1 and same_type(call, base)
    if value is None or not is_number or not dtype.startswith("float"):
        return builder.call_te(topi.power, base, exponent, primfunc_name_hint="power")
    number = float(value.item())

    def raise_to_number(x: Any) -> Any:
        if number == 3:
            return topi.multiply(topi.multiply(x, x), x)
        if number == 4:
            square = topi.multiply(x, x)
            return topi.multiply(square, square)
        return topi.power(x, tirx.FloatImm(dtype, number))

    return builder.call_te(raise_to_number, base, primfunc_name_hint="power")


def legalize_cosh(builder: relax.BlockBuilder, call: Call) -> Any:
    """cosh(x) -> (e^x + 1 / e^x) / 2, for which TVM has no function of LLVM."""
    return builder.call_te(compute_cosh, *call.args, primfunc_name_hint="cosh")


def legalize_sinh(builder: relax.BlockBuilder, call: Call) -> Any:
    """sinh(x) -> tanh(x) * cosh(x), which is as exact near 0."""

    def compute_sinh(x: Any) -> Any:
        return topi.multiply(topi.tanh(x), compute_cosh(x))

    return builder.call_te(compute_sinh, *call.args, primfunc_name_hint="sinh")


def compute_cosh(x: Any) -> Any:
    power, half = topi.exp(x), tirx.FloatImm(str(x.dtype), 0.5)
    one = tirx.FloatImm(str(x.dtype), 1)
    return topi.multiply(topi.add(power, topi.divide(one, power)), half)


#: For `relax.transform.LegalizeOps`.
LEGALIZATIONS = {
    "relax.power": legalize_power,
    "relax.sinh": legalize_sinh,
    "relax.cosh": legalize_cosh,
}
