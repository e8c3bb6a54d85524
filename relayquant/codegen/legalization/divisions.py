"""Relax products, divisions, remainders -> loop nests that are safe on every CPU; part of `table`.

No division ends the process. A product or quotient of floats with a constant 0 is NaN where IEEE
754 says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx, topi
from tvm.ir import Call

from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm, legalize_of_truths
from relayquant.ir.rewrite.expressions import read_number
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype


def legalize_division(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a / b, or a remainder, by TVM's own code where that is exact.

    Other cases go to `divide_by_zero`, `divide_integers` or `divide_floats`.
    """
    name, dtype = call_name(call), tensor_dtype(call.args[0])
    is_float, divisor = "float" in dtype, constant_value(call.args[1])  # bfloat16, too
    if name == "relax.divide" and is_float and divisor is not None and not divisor.any():
        return divide_by_zero(builder, call, divisor)
    if name == "relax.divide" and is_zero(call.args[0]):
        return builder.call_te(topi.divide, *call.args, primfunc_name_hint="divide")
    kept = is_float and name in ("relax.divide", "relax.mod")
    if kept or dtype == "bool" or (not is_float and is_harmless(divisor)):
        return legalize_as_tvm(builder, call)
    divide = divide_floats if is_float else divide_integers
    if is_float and has_exact_quotients(name, divisor):
        divide = divide_exactly

    def compute(a: Any, b: Any) -> Any:
        return divide(name, dtype, a, b)

    return builder.call_te(compute, *call.args, primfunc_name_hint=name[6:])


def divide_by_zero(builder: relax.BlockBuilder, call: Call, divisor: np.ndarray[Any, Any]) -> Any:
    """Legalize a / 0 as a * infinity. TVM does not compile a division by a constant 0."""
    factor = relax.const(np.copysign(np.inf, divisor).astype(divisor.dtype))
    return builder.call_te(topi.multiply, call.args[0], factor, primfunc_name_hint="divide")


def legalize_product(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a * b. TVM would take x * 0 as 0, although it is NaN if x is NaN or infinite. So a
    constant 0 is an operand of the loop nest.
    """
    if any(map(is_zero, call.args)):
        return builder.call_te(topi.multiply, *call.args, primfunc_name_hint="multiply")
    return legalize_of_truths(builder, call)


def is_zero(operand: relax.Expr) -> bool:
    """Whether an operand is the number 0 of a float type, which TVM writes into its loop nest."""
    return "float" in tensor_dtype(operand) and read_number(operand) == 0


def is_harmless(divisor: np.ndarray[Any, Any] | None) -> bool:
    """Whether TVM's division by these constant integers is right for all dividends: none is 0 or
    -1.
    """
    if divisor is None:
        return False
    return bool(((divisor != 0) & (divisor != np.array(-1).astype(divisor.dtype))).all())


def has_exact_quotients(name: str, divisor: np.ndarray[Any, Any] | None) -> bool:
    """Whether a quotient by these constants, of any float, is exact, infinite or below 1: they are
    powers of 2.

    For a remainder, no quotient nor its product with the constant may be infinite: the constant is
    at least 1, and divides the largest numbers.
    """
    if divisor is None or divisor.dtype.kind != "f":
        return False
    is_power, limits = np.abs(np.frexp(divisor)[0]) == 0.5, np.finfo(divisor.dtype)
    is_middle = (np.abs(divisor) >= 1) & (np.abs(divisor) < limits.max * (limits.eps / 2))
    return bool((is_power & ((name not in REMAINDERS) | is_middle)).all())


def divide_exactly(name: str, dtype: str, a: Any, b: Any) -> Any:
    """Compute what `divide_floats` does for `has_exact_quotients`, in vectors: fmod is a call.

    A quotient that is too small for its type is rounded to 0, below which its floor may be.
    """
    zero = tirx.const(0, dtype)
    whole = topi.floor(topi.divide(a, b))
    differs = topi.bitwise_xor(topi.less(a, zero), topi.less(b, zero))
    is_lost = topi.logical_and(topi.equal(whole, zero), topi.not_equal(a, zero))
    lower = topi.subtract(whole, topi.cast(topi.logical_and(is_lost, differs), dtype))
    if name in REMAINDERS:
        return topi.subtract(a, topi.multiply(b, lower))
    return topi.where(topi.isfinite(a), lower, topi.full_like(a, np.nan))


def divide_integers(name: str, dtype: str, a: Any, b: Any) -> Any:
    """Compute the quotient or remainder of integers.

    Division by 0 gives 0; division by -1 wraps around.

    numpy and Arm's instruction do the same. The x86 instruction ends the process for a divisor of
    0, and for the smallest integer divided by -1.
    """
    by_zero = topi.equal(b, tirx.const(0, dtype))
    is_signed = dtype.startswith("int")
    by_minus_one = topi.equal(b, tirx.const(-1, dtype)) if is_signed else by_zero
    divisor = topi.where(topi.logical_or(by_zero, by_minus_one), topi.full_like(b, 1), b)
    result = DIVISIONS[name](a, divisor)  # a remainder by 1 is 0
    if name in REMAINDERS:
        return result
    if is_signed:
        result = topi.where(by_minus_one, topi.negative(result), result)
    return topi.where(by_zero, topi.full_like(result, 0), result)


def divide_floats(name: str, dtype: str, a: Any, b: Any) -> Any:
    """Compute floor(a / b) or a - b * floor(a / b) as Python's `float_divmod` does.

    numpy and PyTorch do the same: 1 // 0.1 is 9, though 1 / 0.1 is 10. The result follows from the
    exact remainder of C's fmod, which has the sign of a.
    """
    remainder = topi.mod(a, b)
    zero = tirx.const(0, dtype)
    differs = topi.bitwise_xor(topi.less(remainder, zero), topi.less(b, zero))
    is_below = topi.logical_and(topi.not_equal(remainder, zero), differs)
    if name in REMAINDERS:
        return topi.where(is_below, topi.add(remainder, b), remainder)
    exact = topi.divide(topi.subtract(a, remainder), b)
    exact = topi.subtract(exact, topi.cast(is_below, dtype))
    whole = topi.floor(exact)
    is_above = topi.greater(topi.subtract(exact, whole), tirx.const(0.5, dtype))
    lower = topi.add(whole, topi.cast(is_above, dtype))
    return topi.where(topi.equal(b, zero), topi.divide(a, b), lower)


#: operator -> its plain computation
DIVISIONS: dict[str, Callable[..., Any]] = {
    "relax.divide": topi.divide,
    "relax.floor_divide": topi.floor_divide,
    "relax.floor_mod": topi.floor_mod,
    "relax.mod": topi.mod,
}
REMAINDERS = ("relax.floor_mod", "relax.mod")

#: Legalizations for `relax.transform.LegalizeOps`.
DIVISION_LEGALIZATIONS = {
    **dict.fromkeys(DIVISIONS, legalize_division),
    "relax.multiply": legalize_product,
}
