"""Relax operators on booleans and on bits of integers -> loop nests; part of `table`.

The loop nests give the same result on every CPU. TVM's own loop nests do not, or do not compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx, topi
from tvm.ir import Call

from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype


def legalize_of_truths(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize f(a, b) of booleans as f on 0 and 1, for which LLVM has instructions.

    For any type, a != b becomes the negation of a == b (see `negate_truth`). A comparison of a
    float value with itself becomes a NaN test. TVM would assume when fusing that it is no NaN.
    """
    name, dtype = call_name(call), tensor_dtype(call.args[0])
    is_negated, are_truths = name == "relax.not_equal", dtype == "bool"
    if name in REFLEXIVE and "float" in dtype and call.args[0].same_as(call.args[1]):

        def test_numbers(numbers: Any) -> Any:
            found = topi.isnan(topi.cast(numbers, "float32") if dtype == "bfloat16" else numbers)
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
    """Legalize f(a, b) of numbers as f(a != 0, b != 0), cast to 0 or 1 in the operands' type.

    Relax declares this type. TVM compiles the operators for booleans only.
    """
    compute: Any = LOGICAL[call_name(call)]
    dtype = tensor_dtype(call.args[0])

    def compute_logical(*operands: Any) -> Any:
        if dtype == "bool":
            return compute(*operands)
        return topi.cast(compute(*map(is_true, operands)), dtype)

    return builder.call_te(compute_logical, *call.args, primfunc_name_hint=call_name(call)[6:])


def legalize_bitwise_not(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize ~a of booleans as not a, and of integers as TVM does."""
    if tensor_dtype(call.args[0]) == "bool":
        return builder.call_te(negate_truth, *call.args, primfunc_name_hint="bitwise_not")
    return legalize_as_tvm(builder, call)


def legalize_as_tvm(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a call by TVM's own function."""
    legalize_op: Any = call.op.get_attr("FLegalize")
    return legalize_op(builder, call)


def is_true(numbers: Any) -> Any:
    """Compute numbers != 0. NaN is true."""
    return negate_truth(topi.equal(numbers, tirx.const(0, numbers.dtype)))


def negate_truth(truth: Any) -> Any:
    """Negate booleans in a form that TVM does not simplify.

    TVM would turn `not a < b` into `a >= b`, and `!=` into LLVM's comparison of ordered numbers.
    Both are false for NaN.
    """
    return topi.bitwise_xor(truth, tirx.const(True, "bool"))


def legalize_shift(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize shifts by n bits where the type has fewer than n bits, as numpy and PyTorch do.

    a << n gives 0. a >> n gives 0 or -1 by the sign of a. CPUs differ there.
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


#: What `legalize_of_truths` computes on 0 and 1.
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

#: Comparisons of a value with itself that test for NaN.
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

#: Legalizations for `relax.transform.LegalizeOps`.
BITS = {
    **dict.fromkeys(OF_TRUTHS, legalize_of_truths),
    **dict.fromkeys(LOGICAL, legalize_logical),
    "relax.bitwise_not": legalize_bitwise_not,
    **dict.fromkeys(SHIFTS, legalize_shift),
}
