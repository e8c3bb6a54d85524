"""Dialect: matrix products and gathers with grouped low-bit weights, and row-wise quantization.

A grouped weight is three operands (see `base.packing`):

- codes of `bits` bits, packed in bytes: uint8 (N, count_bytes(K, bits));
- scales: float32 or float16 (N, G), one for each of the G groups of `group_size` neighbours in a
  row;
- zero points: uint8 (N, G), or () for all groups: real = scale * (code - zero point). Or offsets:
  float32 or float16 (N, G): real = scale * code + offset.

With `levels`, a code of 4 bits stands for one of 16 integers, 0..255 each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Attrs, Call, TupleType
from tvm.relax import BlockBuilder
from tvm_ffi import Array
from tvm_ffi.dataclasses import field

from relayquant.base.packing import CODE_BITS, LEVEL_BITS, count_bytes, count_groups
from relayquant.errors import QnnError, format_count
from relayquant.ir.dialect.construct import Operand, Parameter, make_call
from relayquant.ir.dialect.loops import OPAQUE, make_loops, name_hint
from relayquant.ir.dialect.operands import (
    Argument,
    CheckedOperand,
    get_operands,
    is_known_different,
    scale_argument,
    show_dimension,
    show_shape,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, compute_tensor
from relayquant.ir.rewrite.graph import static_size

__all__ = ["grouped_dense", "grouped_take", "quantize_rows"]

#: What reads a float weight -> the operator that reads a grouped one.
GROUPED_FORMS = {
    "matmul": "grouped_dense",
    "take": "grouped_take",
    "expert_dense": "grouped_expert_dense",
}
#: Largest magnitude in the result of `quantize_rows`.
ROW_LIMIT = 127

GROUPED_WEIGHT = (Argument("weight"), Argument("weight_scale"), Argument("weight_zero_point"))
ROWS_OPERANDS = (Argument("data"),)
DENSE_OPERANDS = (Argument("data"), scale_argument("data_scale"), *GROUPED_WEIGHT)
TAKE_OPERANDS = (Argument("indices"), *GROUPED_WEIGHT)


@define_attrs("relayquant.attrs.QGroupedAttrs")
class QGroupedAttrs(Attrs):
    """Attributes of qnn.grouped_dense and qnn.grouped_take."""

    bits: int
    group_size: int
    features: int
    levels: Array = field(default_factory=lambda: Array([]))


# ---------------------------------------------------------------- constructors


def quantize_rows(data: Operand) -> Call:
    """Quantize each row: float32 (..., K) -> int8 (..., K) and row scales, float32 (..., 1).

    scale = max(|row|) / 127. If this is 0 in float32, the scale is 1. The result is row / scale,
    rounded half to even. It is undefined for a row with NaN or infinity.
    """
    return make_call("quantize_rows", ROWS_OPERANDS, (data,), None)


def grouped_dense(
    data: Operand,
    data_scale: Parameter,
    weight: Operand,
    weight_scale: Operand,
    weight_zero_point: Operand,
    bits: int = 4,
    group_size: int = 32,
    features: int = 0,
    levels: Sequence[int] = (),
) -> Call:
    """Multiply data (..., K) by a grouped weight of K = `features` columns -> float32 (..., N).

    data is float32 with data_scale 1, or int8 with row scales (..., 1) from `quantize_rows`. For
    int8 data, the sum over a group is exact in int32. Each sum is converted to float32, multiplied
    by the group scale and added in group order. Multiplication and addition share one rounding
    (fma). With offsets, each group then adds the sum of its data times its offset in the same way.

    int8 data may have a scale for each of the G groups of a row, too: data_scale (..., G). It is
    multiplied with the group scale, and with the sum of the data, before. `quantize_rows` of the
    data as (..., G, group_size) makes such integers.
    """
    values = (data, data_scale, weight, weight_scale, weight_zero_point)
    attrs = QGroupedAttrs(int(bits), int(group_size), int(features), Array(list(levels)))
    return make_call("grouped_dense", DENSE_OPERANDS, values, attrs)


def grouped_take(
    indices: Operand,
    weight: Operand,
    weight_scale: Operand,
    weight_zero_point: Operand,
    bits: int = 4,
    group_size: int = 32,
    features: int = 0,
    levels: Sequence[int] = (),
) -> Call:
    """Gather rows of a grouped weight of K = `features` columns -> float32 (*indices.shape, K).

    `indices` are int32 or int64 of any shape. A value is float32(code - zero point) * scale. With
    offsets it is fma(float32(code), scale, offset).

    An index is taken modulo the number of rows, as in `take` with mode="wrap": -1 is the last row.
    Nothing outside the weight is read.
    """
    values = (indices, weight, weight_scale, weight_zero_point)
    attrs = QGroupedAttrs(int(bits), int(group_size), int(features), Array(list(levels)))
    return make_call("grouped_take", TAKE_OPERANDS, values, attrs)


# ---------------------------------------------------------------- types


def infer_quantize_rows(call: Call, _builder: Any) -> Any:
    """Infer float32 (..., K) -> int8 (..., K), float32 (..., 1)."""
    (data,) = get_operands(call, ROWS_OPERANDS)
    data.check_dtype(("float32",), "Cast it first.")
    data.check_min_rank(1)
    if data.shape is None:
        kinds = ("int8", "float32")
        return TupleType(
            [relax.TensorType(None, kind, data.ty.vdevice, data.ndim) for kind in kinds]
        )
    rows = [*data.shape[:-1], tirx.IntImm("int64", 1)]
    return TupleType(
        [
            relax.TensorType(data.shape, "int8", data.ty.vdevice),
            relax.TensorType(rows, "float32", data.ty.vdevice),
        ]
    )


def check_grouped_weight(call: Call, operands: Sequence[CheckedOperand]) -> Any:
    """Raise unless the three operands of a weight match. Return its rows N, or None if unknown."""
    weight, scale, zero_point = operands
    bits, group_size, features = (
        int(getattr(call.attrs, name)) for name in ("bits", "group_size", "features")
    )
    where = weight.operator
    if bits not in CODE_BITS:
        raise QnnError(
            f"{where}: bits={bits}; allowed: {', '.join(map(str, CODE_BITS))}.", code="RQ601"
        )
    if group_size < 1 or features < 1:
        raise QnnError(
            f"{where}: group_size={group_size}, features={features}; allowed: integers from 1 on. "
            "`features` is the number of columns before packing.",
            code="RQ601",
        )
    check_levels(where, bits, [int(level) for level in call.attrs.levels])
    weight.check_dtype(("uint8",), "Pack its codes first: relayquant.base.packing.pack_codes.")
    scale.check_dtype(("float32", "float16"))
    zero_point.check_dtype(
        ("uint8", "float32", "float16"), "A zero point is a code, an offset is a float."
    )
    weight.check_rank(2)
    scale.check_rank(2)
    rows, groups = weight.dimension(0), count_groups(features, group_size)
    expected = tirx.IntImm("int64", count_bytes(features, bits))
    if is_known_different(weight.dimension(1), expected):
        raise weight.fail(
            f"has rows whose length in bytes is {show_dimension(weight.dimension(1))}",
            f"allowed: {int(expected)}, for {format_count(features, 'code')} of {bits} bits",
        )
    may_be_scalar = zero_point.dtype == "uint8"
    for each in (scale, zero_point):
        if each is zero_point and may_be_scalar and each.ndim in (-1, 0):
            continue
        each.check_rank(2)
        sizes = (rows, tirx.IntImm("int64", groups))
        if any(is_known_different(each.dimension(i), size) for i, size in enumerate(sizes)):
            raise each.fail(
                f"has shape {show_shape(each.shape or [])}",
                f"allowed: ({show_dimension(rows)}, {groups}), one for each group of {group_size} "
                f"of {format_count(features, 'column')}"
                + (", or ()" if each is zero_point and may_be_scalar else ""),
            )
    return rows


def check_levels(where: str, bits: int, levels: Sequence[int]) -> None:
    """Raise unless there are no levels, or one for each code of 4 bits."""
    fits = len(levels) == 1 << LEVEL_BITS and bits == LEVEL_BITS
    if levels and not (fits and all(0 <= level <= 255 for level in levels)):
        raise QnnError(
            f"{where}: bits={bits}, levels={list(levels)}; allowed: no levels, or with "
            f"bits={LEVEL_BITS} one integer of 0..255 for each code, "
            f"{format_count(1 << LEVEL_BITS, 'level')}.",
            code="RQ601",
        )


def infer_grouped_dense(call: Call, _builder: Any) -> Any:
    """Infer float32 or int8 (..., K) -> float32 (..., N)."""
    data, data_scale, *weight = get_operands(call, DENSE_OPERANDS)
    data.check_min_rank(1)
    rows = check_grouped_weight(call, weight)
    check_rows(call, data, data_scale)
    if data.shape is None or rows is None:
        return relax.TensorType(None, "float32", data.ty.vdevice, data.ndim)
    return relax.TensorType([*data.shape[:-1], rows], "float32", data.ty.vdevice)


def check_rows(call: Call, data: CheckedOperand, data_scale: CheckedOperand) -> None:
    """Raise unless rows and their scales fit a grouped weight."""
    data.check_dtype(("float32", "int8"), "Cast it, or quantize its rows: qnn.quantize_rows.")
    data_scale.check_dtype(("float32",))
    if data.dtype == "float32" and data_scale.ndim > 0:
        raise data_scale.fail(
            f"has rank {data_scale.ndim}",
            "allowed: rank 0, the number 1, because the data is float32",
        )
    if data.dtype == "int8" and data_scale.ndim not in (-1, 0, data.ndim):
        raise data_scale.fail(
            f"has rank {data_scale.ndim}", f"allowed: rank {data.ndim}, one scale for each row"
        )
    groups = count_groups(int(call.attrs.features), int(call.attrs.group_size))
    scales = None if data_scale.ndim < 1 else static_size(data_scale.dimension(data_scale.ndim - 1))
    if scales not in (None, 1, groups):
        raise data_scale.fail(
            f"has shape {show_shape(data_scale.shape or [])}",
            f"allowed: (..., 1), one scale for each row, or (..., {groups}), one for each group of "
            f"{format_count(int(call.attrs.group_size), 'column')}",
        )
    features = tirx.IntImm("int64", int(call.attrs.features))
    if data.shape is not None and is_known_different(data.shape[-1], features):
        raise data.fail(
            f"has shape {show_shape(data.shape)}", f"allowed: (..., {int(features)}), as the weight"
        )


def infer_grouped_take(call: Call, _builder: Any) -> Any:
    """Infer int32 or int64 (...) -> float32 (..., K)."""
    indices, *weight = get_operands(call, TAKE_OPERANDS)
    indices.check_dtype(("int32", "int64"))
    check_grouped_weight(call, weight)
    if indices.shape is None:
        ndim = -1 if indices.ndim < 0 else indices.ndim + 1
        return relax.TensorType(None, "float32", indices.ty.vdevice, ndim)
    features = tirx.IntImm("int64", int(call.attrs.features))
    return relax.TensorType([*indices.shape, features], "float32", indices.ty.vdevice)


# ---------------------------------------------------------------- loop nests


def legalize_quantize_rows(builder: BlockBuilder, call: Call) -> Any:
    """Make two passes over a row: one for its largest magnitude, one for its integers."""

    def te_rows(data: te.Tensor) -> list[te.Tensor]:
        lead, width = list(data.shape)[:-1], data.shape[-1]
        k = te.reduce_axis((0, width), name="k")
        largest = compute_tensor(
            lead, lambda *i: te.max(tirx.abs(data(*i, k)), axis=k), name="largest"
        )
        one, limit = tirx.const(1.0, "float32"), tirx.const(float(ROW_LIMIT), "float32")

        def scale_of(*row: PrimExpr) -> PrimExpr:
            step = largest(*row) / limit
            return tirx.Select(step > tirx.const(0.0, "float32"), step, one)

        scale = compute_tensor([*lead, 1], lambda *i: scale_of(*i[:-1]), name="scale")

        def element(*i: PrimExpr) -> PrimExpr:
            rounded = tirx.nearbyint(data(*i) / scale(*i[:-1], 0))
            return tirx.max(tirx.min(rounded, limit), -limit).astype("int8")

        return [compute_tensor(data.shape, element, name="rows"), scale]

    return make_loops(builder, call, te_rows, call.args)


def read_value(weight: te.Tensor, attrs: Any) -> Callable[[PrimExpr, PrimExpr], PrimExpr]:
    """Return a function (row, column) -> value of the code, int32."""
    read, levels = read_code(weight, int(attrs.bits)), [int(level) for level in attrs.levels]
    if not levels:
        return read

    def find(row: PrimExpr, column: PrimExpr) -> PrimExpr:
        code, value = read(row, column), tirx.const(levels[0], "int32")
        for number, level in enumerate(levels[1:], 1):
            value = tirx.Select(code == number, tirx.const(level, "int32"), value)
        return value

    return find


def read_code(weight: te.Tensor, bits: int) -> Callable[[PrimExpr, PrimExpr], PrimExpr]:
    """Return a function (row, column) -> code, int32."""
    mask = tirx.const((1 << bits) - 1, "int32")
    last = weight.shape[1] - 1

    def read(row: PrimExpr, column: PrimExpr) -> PrimExpr:
        if bits == 8:
            return weight(row, column).astype("int32")
        start = column * bits
        at, shift = start // 8, (start % 8).astype("int32")
        word = weight(row, at).astype("int32")
        if 8 % bits:  # a code may span two bytes
            word = word | (weight(row, tirx.min(at + 1, last)).astype("int32") << 8)
        return (word >> shift) & mask

    return read


def subtract_zero_points(
    call: Call, weight: te.Tensor, zero_point: te.Tensor
) -> Callable[[PrimExpr, PrimExpr], PrimExpr]:
    """Return a function (row, column) -> code - zero point, int32. Offsets are not subtracted."""
    size, read = int(call.attrs.group_size), read_value(weight, call.attrs)
    if has_offsets(zero_point):
        return read

    def subtract(row: PrimExpr, column: PrimExpr) -> PrimExpr:
        zero = zero_point(row, column // size) if len(zero_point.shape) else zero_point()
        return read(row, column) - zero.astype("int32")

    return subtract


def has_offsets(zero_point: te.Tensor) -> bool:
    """Tell whether the operand for zero points has offsets."""
    return zero_point.dtype != "uint8"


def has_scale_of_each_group(data_scale: Any, groups: int) -> bool:
    """Tell whether an operand of known shape has a scale for each of several groups of a row."""
    shape = data_scale.shape
    return len(shape) > 0 and groups > 1 and static_size(shape[len(shape) - 1]) == groups


def legalize_grouped_dense(builder: BlockBuilder, call: Call) -> Any:
    """Sum data * (code - zero point) over each group, then over the groups with their scales."""

    def te_dense(data: te.Tensor, data_scale: te.Tensor, *weight: te.Tensor) -> te.Tensor:
        return sum_groups(call, data, data_scale, *weight, lambda *row: row, lambda *i: i[-1])

    return make_loops(builder, call, te_dense, call.args, pattern=OPAQUE)


def sum_groups(
    call: Call,
    data: te.Tensor,
    data_scale: te.Tensor,
    weight: te.Tensor,
    scale: te.Tensor,
    zero: te.Tensor,
    find_data: Callable[..., Sequence[PrimExpr]],
    find_weight: Callable[..., PrimExpr],
) -> te.Tensor:
    """Sum data * (code - zero point) over each group, then over the groups with their scales.

    Args:
        find_data: Place of an element without the last axis -> its row of the data.
        find_weight: Place of an element -> its row of the weight.
    """
    size, features = int(call.attrs.group_size), int(call.attrs.features)
    groups, shape = count_groups(features, size), list(call.ty.shape)
    is_float = data.dtype == "float32"
    dtype = "float32" if is_float else "int32"
    integers = subtract_zero_points(call, weight, zero)
    g = te.reduce_axis((0, groups), name="g")

    def sum_group(group: PrimExpr, term: Callable[[PrimExpr], PrimExpr]) -> PrimExpr:
        k = te.reduce_axis((0, min(size, features)), name="k")
        column = group * size + k
        value = term(tirx.min(column, features - 1)).astype(dtype)
        if features % size and groups > 1:
            value = tirx.if_then_else(column < features, value, tirx.const(0, dtype))
        return te.sum(value, axis=k)

    def product(*i: PrimExpr) -> PrimExpr:
        *place, group = i
        row, number = find_data(*place[:-1]), find_weight(*place)
        return sum_group(
            group, lambda k: data(*row, k).astype(dtype) * integers(number, k).astype(dtype)
        )

    sums = compute_tensor([*shape, groups], product, name="sums")
    row_sums = compute_tensor(
        [*shape[:-1], groups],
        lambda *i: sum_group(i[-1], lambda k: data(*find_data(*i[:-1]), k)),
        name="row_sums",
    )
    has_group_scales = has_scale_of_each_group(data_scale, groups)

    def total(*i: PrimExpr) -> PrimExpr:
        row, number = find_data(*i[:-1]), find_weight(*i)
        own = data_scale(*row, g) if has_group_scales else tirx.const(1.0, "float32")
        factor = own * scale(number, g).astype("float32")
        value = sums(*i, g).astype("float32") * factor
        if has_offsets(zero):
            offset = zero(number, g).astype("float32")
            value = value + own * row_sums(*i[:-1], g).astype("float32") * offset
        return te.sum(value, axis=g)

    added = compute_tensor(shape, total, name="added")
    if is_float or has_group_scales:
        return added

    def scaled(*i: PrimExpr) -> PrimExpr:
        row = data_scale(*find_data(*i[:-1]), 0) if len(data_scale.shape) else data_scale()
        return added(*i) * row

    return compute_tensor(shape, scaled, name=name_hint(call))


def legalize_grouped_take(builder: BlockBuilder, call: Call) -> Any:
    """Compute the values of the rows at `indices`."""
    size = int(call.attrs.group_size)

    def te_take(
        indices: te.Tensor, weight: te.Tensor, scale: te.Tensor, zero: te.Tensor
    ) -> te.Tensor:
        integers = subtract_zero_points(call, weight, zero)

        def element(*i: PrimExpr) -> PrimExpr:
            row, column = indices(*i[:-1]) % weight.shape[0], i[-1]
            step = scale(row, column // size).astype("float32")
            value = integers(row, column).astype("float32") * step
            if has_offsets(zero):
                return value + zero(row, column // size).astype("float32")
            return value

        return compute_tensor(list(call.ty.shape), element, name=name_hint(call))

    return make_loops(builder, call, te_take, call.args, pattern=OPAQUE)


OPERATORS: tuple[Operator, ...] = (
    Operator("quantize_rows", None, ROWS_OPERANDS, infer_quantize_rows, legalize_quantize_rows),
    Operator(
        "grouped_dense", QGroupedAttrs, DENSE_OPERANDS, infer_grouped_dense, legalize_grouped_dense
    ),
    Operator(
        "grouped_take", QGroupedAttrs, TAKE_OPERANDS, infer_grouped_take, legalize_grouped_take
    ),
)
