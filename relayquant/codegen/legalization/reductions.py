"""Relax reductions -> loop nests that also hold over an axis of size 0; part of `table`.

TVM's loop nests leave such results unwritten, do not compile, or divide integers by 0, which ends
the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx, topi
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
    """Legalize argmax or argmin as the first place of the extreme value.

    Raises:
        ModelError: an axis has size 0, so there is no place.
    """
    refuse_nothing(call, "extreme value")
    if not shape_of(call.args[0]):
        return legalize_as_tvm(builder, call)
    axes, is_highest = find_axes(call), call_name(call) == "relax.argmax"

    def compute(x: Any) -> Any:
        places = search_extreme(x, axes, is_highest, tensor_dtype(call))
        removed = axes if call.attrs.keepdims else ()

        def read(*at: Any) -> Any:
            return places(*(index for axis, index in enumerate(at) if axis not in removed))

        return te.compute(shape_of(call), read, name=call_name(call)[6:])

    return builder.call_te(compute, call.args[0], primfunc_name_hint=call_name(call)[6:])


def search_extreme(x: Any, axes: Sequence[int], is_highest: bool, dtype: str) -> Any:
    """Return the first place of the extreme value along the axes, counted along all of them.

    TVM begins at place -1 with the lowest number and keeps this place if no value is higher: among
    uint8 that are all 0, the maximum was at -1. Here the search begins at place 0. If no value is
    higher than the lowest number, all of them are equal to it, and the first one is right. NaN is
    further than all numbers, as in numpy.
    """
    starts = find_limits(str(x.dtype))
    asked = "float64" if str(x.dtype) == "float64" else "float32"
    along = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes}
    place: Any = tirx.const(0, dtype)
    for axis, k in along.items():
        place = place * tirx.Cast(dtype, x.shape[axis]) + tirx.Cast(dtype, k.var)

    def combine(left: Any, right: Any) -> Any:
        is_further = left[1] > right[1] if is_highest else left[1] < right[1]
        is_equal = left[1] == right[1]
        if "float" in str(x.dtype):
            odd = [tirx.isnan(tirx.Cast(asked, each[1])) for each in (left, right)]
            is_further = tirx.any(is_further, tirx.all(odd[0], tirx.Not(odd[1])))
            is_equal = tirx.any(is_equal, tirx.all(*odd))
        is_first = tirx.any(is_further, tirx.all(is_equal, left[0] < right[0]))
        return tirx.Select(is_first, left[0], right[0]), tirx.Select(is_further, left[1], right[1])

    def begin(of_place: Any, of_value: Any) -> Any:
        return tirx.const(0, of_place), tirx.const(starts[not is_highest], of_value)

    def reduce(*at: Any) -> Any:
        rest = iter(at)
        value = x(*(along[axis] if axis in along else next(rest) for axis in range(x.ndim)))
        return first((place, value), axis=[*along.values()])

    first = te.comm_reducer(combine, begin, name="first_extreme")
    others = [size for axis, size in enumerate(x.shape) if axis not in along]
    places, _ = te.compute(others, reduce, name="extreme")
    return places


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
