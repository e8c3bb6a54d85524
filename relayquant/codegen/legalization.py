"""Relax operators -> loop nests of our own, where those of TVM cost far more, do not compile, or
read memory that is not theirs; part of `passes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx, topi
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


def legalize_index_tensor(builder: relax.BlockBuilder, call: Call) -> Any:
    """index_tensor(x, (i, j)): as TVM has it, of indices that are there."""
    data, indices = call.args
    fields = [builder.emit(relax.TupleGetItem(indices, i)) for i in range(len(indices.ty.fields))]

    def read(x: Any, *parts: Any) -> Any:
        return topi.index_tensor(
            x, [bound_indices(part, [x.shape[i]]) for i, part in enumerate(parts)]
        )

    return builder.call_te(read, data, *fields, primfunc_name_hint="index_tensor")


def legalize_gather_elements(builder: relax.BlockBuilder, call: Call) -> Any:
    """gather_elements(x, i): as TVM has it, of indices that are there."""
    axis = int(call.attrs.axis) % call.args[0].ty.ndim

    def read(x: Any, indices: Any) -> Any:
        return topi.gather(x, axis, bound_indices(indices, [x.shape[axis]]))

    return builder.call_te(read, *call.args, primfunc_name_hint="gather_elements")


def legalize_gather_nd(builder: relax.BlockBuilder, call: Call) -> Any:
    """gather_nd(x, i): as TVM has it, of indices that are there."""
    first = int(call.attrs.batch_dims)

    def read(x: Any, indices: Any) -> Any:
        extents = x.shape[first : first + int(indices.shape[-1])]
        last = len(indices.shape) - 1
        inside = topi.transpose(bound_indices(indices, extents), [last, *range(last)])
        return topi.gather_nd(x, inside, first)

    return builder.call_te(read, *call.args, primfunc_name_hint="gather_nd")


def bound_indices(indices: te.Tensor, extents: Sequence[Any]) -> Any:
    """Indices that count from the end where they are negative -> the nearest within an axis.

    Args:
        extents: Of the axis; of several, whose indices lie along the last axis of `indices`.
    """

    def bound(*at: Any) -> Any:
        index = indices(*at)
        extent = tirx.Cast(indices.dtype, extents[-1])
        for i, other in enumerate(extents[:-1]):
            extent = tirx.Select(at[-1] == i, tirx.Cast(indices.dtype, other), extent)
        counted = tirx.Select(index < 0, index + extent, index)
        return tirx.max(tirx.min(counted, extent - 1), tirx.const(0, indices.dtype))

    return te.compute(indices.shape, bound, name="indices")


#: For `relax.transform.LegalizeOps`.
LEGALIZATIONS = {
    "relax.power": legalize_power,
    "relax.sinh": legalize_sinh,
    "relax.cosh": legalize_cosh,
    "relax.index_tensor": legalize_index_tensor,
    "relax.gather_elements": legalize_gather_elements,
    "relax.gather_nd": legalize_gather_nd,
}
