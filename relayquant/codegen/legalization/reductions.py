"""Relax reductions -> loop nests that also hold over an axis of size 0; part of `table`.

TVM's loop nests leave such results unwritten, do not compile, or divide integers by 0, which ends
the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx, topi
from tvm.ir import Call

from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm
from relayquant.errors import ModelError
from relayquant.ir.reference.relax.numpy_library import find_limits
from relayquant.ir.reference.relax.row import list_axes
from relayquant.ir.rewrite.expressions import shape_of
from relayquant.ir.rewrite.graph import call_name, tensor_dtype


def legalize_extreme(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a maximum or minimum. Over nothing it is the start: the lowest or highest value."""
    if not is_over_nothing(call):
        return legalize_as_tvm(builder, call)
    dtype = tensor_dtype(call)
    lowest, highest = find_limits(dtype)
    return fill(builder, call, lowest if call_name(call) == "relax.max" else highest)


def legalize_place_of_extreme(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize argmax or argmin.

    Raises:
        ModelError: the axis has size 0, so there is no place.
    """
    refuse_nothing(call, "extreme value")
    return legalize_as_tvm(builder, call)


def refuse_nothing(call: Call, sought: str) -> None:
    """Raise an error if something is sought among no values.

    Raises:
        ModelError: an axis that is reduced has size 0.
    """
    if is_over_nothing(call):
        raise ModelError(
            f"Operator {call_name(call)} reads an axis of size 0, which has no {sought}. "
            "Give the axis a size of 1 or more.",
            code="RQ206",
        )


def legalize_average(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a mean, variance or standard deviation.

    Over nothing it is NaN, of integers 0. An integer result has its declared type; TVM leaves the
    sums in a wider type.

    A sum of uint64 is divided as uint64: from 2^63 on, int64 has no form for it. So is a sum of
    squares of any type. Modulo 2^64 a square does not depend on the sign of its root.
    """
    dtype, name = tensor_dtype(call), call_name(call)
    if is_over_nothing(call):
        nothing = math.nan if "float" in dtype else dtype == "bool"  # NaN is true
        return fill(builder, call, nothing)
    if "float" in dtype or not shape_of(call.args[0]):
        return legalize_as_tvm(builder, call)
    axes, keepdims = find_axes(call), bool(call.attrs.keepdims)

    def average(x: Any, keepdims: bool) -> Any:
        wide = "uint64" if x.dtype == "uint64" else "int64"
        count: Any = tirx.const(1, wide)
        for axis in axes:
            count = count * tirx.Cast(wide, x.shape[axis])
        total = topi.cast(topi.sum(x, axes, keepdims), wide)
        return topi.divide(total, tirx.max(count, tirx.const(1, wide)))

    def compute(x: Any) -> Any:
        if name == "relax.mean":
            return average(x, keepdims)
        centred = topi.cast(topi.subtract(x, average(x, True)), "uint64")
        variance = average(topi.multiply(centred, centred), keepdims)
        if name == "relax.variance":
            return variance
        return topi.cast(topi.sqrt(topi.cast(variance, "float64")), "int64")

    result = builder.call_te(compute, call.args[0], primfunc_name_hint=name[6:])
    return relax.op.astype(builder.emit(result), dtype)


def find_axes(call: Call) -> list[int]:
    """Return the axes that a call reduces, counted from 0."""
    return list_axes(call.attrs.axis, len(shape_of(call.args[0])))


def is_over_nothing(call: Call) -> bool:
    """Whether an axis that is reduced has size 0, known when the model is compiled."""
    extents: Sequence[Any] = shape_of(call.args[0])
    return bool(extents) and any(
        isinstance(extents[axis], int | tirx.IntImm) and int(extents[axis]) == 0
        for axis in find_axes(call)
    )


def fill(builder: relax.BlockBuilder, call: Call, value: Any) -> Any:
    """Return the call's shape and dtype filled with a value."""
    dtype = tensor_dtype(call)
    constant = tirx.const(value, dtype)
    return builder.call_te(topi.full, shape_of(call), dtype, constant, primfunc_name_hint="full")


#: Legalizations for `relax.transform.LegalizeOps`.
REDUCTION_LEGALIZATIONS = {
    **dict.fromkeys(("relax.max", "relax.min"), legalize_extreme),
    **dict.fromkeys(("relax.argmax", "relax.argmin"), legalize_place_of_extreme),
    **dict.fromkeys(("relax.mean", "relax.std", "relax.variance"), legalize_average),
}
