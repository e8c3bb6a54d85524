"""Relax operators on truth values and on the bits of integers -> loop nests that mean the same on
every CPU, which those of TVM do not or do not compile; part of `legalization`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx, topi
from tvm.ir import Call

from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype


def legalize_of_truths(builder: relax.BlockBuilder, call: Call) -> Any:
    """f(a, b) of truth values -> f(a as 0 or 1, b as 0 or 1), which LLVM has instructions for.

    And a != b -> the opposite of a == b, of any type; see `negate_truth`. A comparison of floats
    with themselves -> whether they are numbers, which TVM takes for granted where it fuses.
    """
    name, dtype = call_name(call), tensor_dtype(call.args[0])
    is_negated, are_truths = name == "relax.not_equal", dtype == "bool"
    if name in REFLEXIVE and "float" in dtype and call.args[0].same_as(call.args[1]):

        def test_numbers(numbers: Any) -> Any:
            found = topi.isnan(numbers)
            return found if is_negated else negate_truth(found)

        return builder.call_te(test_numbers, call.args[0], primfunc_name_hint=name[6:])
    if not are_truths and not is_negated:
        return legalize_as_tvm(builder, call)
    compute: Any = OF_TRUTHS[name]

    def compute_of_truths(*operands: Any) -> Any:
        if are_truths:
            operands = tuple(topi.cast(each, "int8") for each in operands)
        result = compute(*operands)
        if result.dtype != "bool" and are_truths:
            result = is_true(result)
        return negate_truth(result) if is_negated else result

    return builder.call_te(compute_of_truths, *call.args, primfunc_name_hint=name[6:])


def legalize_logical(builder: relax.BlockBuilder, call: Call) -> Any:
    """f(a, b) of numbers -> f(a != 0, b != 0) as 0 or 1 in their type, which Relax gives it; TVM
    compiles it of truth values alone.
    """
    compute: Any = LOGICAL[call_name(call)]
    dtype = tensor_dtype(call.args[0])

    def compute_logical(*operands: Any) -> Any:
        if dtype == "bool":
            return compute(*operands)
        return topi.cast(compute(*map(is_true, operands)), dtype)

    return builder.call_te(compute_logical, *call.args, primfunc_name_hint=call_name(call)[6:])


def legalize_bitwise_not(builder: relax.BlockBuilder, call: Call) -> Any:
    """~a of truth values -> not a; of integers as TVM has it."""
    if tensor_dtype(call.args[0]) == "bool":
        return builder.call_te(negate_truth, *call.args, primfunc_name_hint="bitwise_not")
    return legalize_as_tvm(builder, call)


def legalize_as_tvm(builder: relax.BlockBuilder, call: Call) -> Any:
    """What TVM itself makes of a call."""
    legalize_op: Any = call.op.get_attr("FLegalize")
    return legalize_op(builder, call)


def is_true(numbers: Any) -> Any:
    """numbers != 0, also NaN."""
    return negate_truth(topi.equal(numbers, tirx.const(0, numbers.dtype)))


def negate_truth(truth: Any) -> Any:
    """The opposite of truth values, in a form that TVM keeps.

    It makes `a >= b` of `not a < b`, and a comparison by `!=` that LLVM has for numbers that are
    ordered: both are false of NaN.
    """
    return topi.bitwise_xor(truth, tirx.const(True, "bool"))


def legalize_shift(builder: relax.BlockBuilder, call: Call) -> Any:
    """a << n -> 0, and a >> n -> 0 or -1 by its sign, where a has no n bits, as in numpy and
    PyTorch: CPUs differ there.
    """
    data, count = call.args
    dtype, value = tensor_dtype(data), constant_value(count)
    if not dtype.startswith(("int", "uint")):
        return legalize_as_tvm(builder, call)
    bits = np.iinfo(dtype).bits
    if value is not None and ((value >= 0) & (value < bits)).all():
        return legalize_as_tvm(builder, call)
    is_signed_right = call_name(call) == "relax.right_shift" and dtype.startswith("int")
    shift_bits: Any = SHIFTS[call_name(call)]

    def shift(a: Any, n: Any) -> Any:
        is_inside = topi.logical_and(
            topi.greater_equal(n, tirx.const(0, dtype)),
            topi.less_equal(n, tirx.const(bits - 1, dtype)),
        )
        if is_signed_right:
            return topi.right_shift(a, topi.where(is_inside, n, topi.full_like(n, bits - 1)))
        shifted = shift_bits(a, topi.where(is_inside, n, topi.full_like(n, 0)))
        return topi.where(is_inside, shifted, topi.full_like(shifted, 0))

    return builder.call_te(shift, data, count, primfunc_name_hint="shift")


#: What `legalize_of_truths` computes of 0 and 1.
OF_TRUTHS: dict[str, Callable[..., Any]] = {
    "relax.equal": topi.equal,
    "relax.not_equal": topi.equal,  # negated
    "relax.less": topi.less,
    "relax.less_equal": topi.less_equal,
    "relax.greater": topi.greater,
    "relax.greater_equal": topi.greater_equal,
    "relax.maximum": topi.maximum,
    "relax.minimum": topi.minimum,
    "relax.add": topi.add,
    "relax.multiply": topi.multiply,
}

#: Comparisons that say of a value and itself whether it is a number.
REFLEXIVE = ("relax.equal", "relax.not_equal", "relax.less_equal", "relax.greater_equal")

LOGICAL: dict[str, Callable[..., Any]] = {
    "relax.logical_and": topi.logical_and,
    "relax.logical_or": topi.logical_or,
    "relax.logical_xor": topi.bitwise_xor,
    "relax.logical_not": negate_truth,
}

SHIFTS: dict[str, Callable[..., Any]] = {
    "relax.left_shift": topi.left_shift,
    "relax.right_shift": topi.right_shift,
}

#: For `relax.transform.LegalizeOps`.
BITS = {
    **dict.fromkeys(OF_TRUTHS, legalize_of_truths),
    **dict.fromkeys(LOGICAL, legalize_logical),
    "relax.bitwise_not": legalize_bitwise_not,
    **dict.fromkeys(SHIFTS, legalize_shift),
}
