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


#: For `relax.transform.LegalizeOps`.
LEGALIZATIONS = {"relax.power": legalize_power}
