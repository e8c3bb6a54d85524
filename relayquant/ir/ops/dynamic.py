"""Run-time parameters: the range of a tensor is measured when the model runs.

quantize(x, scale, zero point) gets both parameters from min(x) and max(x), over the tensor or over
each row. Its product with a constant weight runs on the kernels for constant parameters.

Used by the operator rows, by convert and by the ONNX reader, which has the same operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.grouping import GroupedWeight
from relayquant.base.qtypes import INTEGER_LIMITS, Granularity, QSpec
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.accumulator_range import SUM_DTYPES, choose_accumulator_dtype
from relayquant.ir.dialect.qnn.grouped import ROW_LIMIT
from relayquant.ir.ops.base import IntegerRows, RunTimeQuantized
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.graph import constant_value, tensor_shape

#: binds an expression to a variable with a name that ends in the text
Emit = Callable[[relax.Expr, str], relax.Expr]


def round_at_run_time(emit: Emit, data: relax.Expr, spec: QSpec) -> relax.Expr:
    """Emit dequantize(quantize(data)) with run-time parameters: float32, same shape.

    With rows, a tensor of two axes becomes dequantize(quantize(x, axis=0), axis=0). A tensor of
    another rank is reshaped before and after. The plan ensures that its shape is known.
    """
    flat = data
    if spec.granularity is Granularity.PER_ROW and data.ty.ndim != 2:
        flat = emit(relax.op.reshape(data, (-1, data.ty.shape.values[-1])), "rows")
    if spec.granularity is Granularity.PER_ROW and spec.is_symmetric and spec.dtype == "int8":
        pair = emit(qnn.quantize_rows(flat), "pair")
        scale = emit(relax.op.squeeze(emit(pair[1], "scales"), [1]), "scale")
        quantized = RunTimeQuantized(emit(pair[0], "q"), scale, relax.const(0, "int32"))
    else:
        quantized = quantize_at_run_time(
            emit,
            flat,
            spec.dtype,
            spec.limits,
            is_row=spec.granularity is Granularity.PER_ROW,
            middle=spec.symmetric_zero_point if spec.is_symmetric else None,
        )
    scale, zero_point = quantized.scale, quantized.zero_point
    view = emit(qnn.dequantize(quantized.value, scale, zero_point, axis=0), "dq")
    return view if flat is data else emit(relax.op.reshape(view, data.ty.shape), "dq.shaped")


def quantize_at_run_time(
    emit: Emit,
    data: relax.Expr,
    dtype: str = "uint8",
    limits: tuple[int, int] | None = None,
    *,
    is_row: bool = False,
    middle: int | None = None,
) -> RunTimeQuantized:
    """Quantize float32 `data` with parameters that are computed from its values.

    Any shape is allowed, with `is_row` (M, K). The parameters come from `choose_at_run_time`. A
    symmetric scale comes from `choose_scale`, with the zero point `middle`.
    """
    lowest, highest = limits or INTEGER_LIMITS[dtype]
    if middle is not None:
        scale = choose_scale(emit, data, highest - middle, is_row=is_row)
        zero_point: relax.Expr = relax.const(middle, "int32")
    else:
        scale, zero_point = choose_at_run_time(emit, data, lowest, highest, is_row=is_row)
    value = qnn.quantize(data, scale, zero_point, axis=0, out_dtype=dtype)
    if (lowest, highest) != INTEGER_LIMITS[dtype]:
        bounds = (tvm.tirx.IntImm(dtype, bound) for bound in (lowest, highest))
        value = relax.op.clip(emit(value, "unclipped"), *bounds)
    return RunTimeQuantized(emit(value, "q"), scale, zero_point)


def choose_at_run_time(
    emit: Emit, data: relax.Expr, lowest: int, highest: int, *, is_row: bool = False
) -> tuple[relax.Expr, relax.Expr]:
    """Compute scale (float32) and zero point (int32) that cover float32 `data` of any shape.

    With `is_row`, both are computed over the last axis.

    scale = (max(x, 0) - min(x, 0)) / (highest - lowest), or 1 for a tensor of zeros. Zero point =
    clip(round(lowest - min(x, 0) / scale)). Source: ONNX, operator DynamicQuantizeLinear, where
    lowest and highest are 0 and 255.
    """
    zero = relax.const(0.0, "float32")
    axis = -1 if is_row else None
    least = emit(relax.op.min(data, axis), "min")
    most = emit(relax.op.max(data, axis), "max")
    low = emit(relax.op.minimum(least, zero), "low")
    high = emit(relax.op.maximum(most, zero), "high")
    span = emit(relax.op.subtract(high, low), "span")
    step = emit(relax.op.divide(span, relax.const(float(highest - lowest), "float32")), "step")
    is_zero = emit(relax.op.equal(step, zero), "is_zero")
    scale = emit(relax.op.where(is_zero, relax.const(1.0, "float32"), step), "scale")
    below = emit(relax.op.divide(low, scale), "below")
    shift = emit(relax.op.subtract(relax.const(float(lowest), "float32"), below), "shift")
    rounded = emit(relax.op.round(shift), "rounded")
    clipped = emit(relax.op.clip(rounded, float(lowest), float(highest)), "clipped")
    return scale, emit(relax.op.astype(clipped, "int32"), "zero_point")


def choose_scale(emit: Emit, data: relax.Expr, highest: int, *, is_row: bool) -> relax.Expr:
    """Compute the symmetric scale max(|data|) / highest, float32, or 1 for a tensor of zeros.

    With `is_row`, there is one scale for each row.
    """
    zero = relax.const(0.0, "float32")
    largest = emit(relax.op.max(emit(relax.op.abs(data), "abs"), -1 if is_row else None), "largest")
    step = emit(relax.op.divide(largest, relax.const(float(highest), "float32")), "step")
    is_zero = emit(relax.op.equal(step, zero), "is_zero")
    return emit(relax.op.where(is_zero, relax.const(1.0, "float32"), step), "scale")


def quantize_rows_at_run_time(
    emit: Emit, data: relax.Expr, spec: QSpec, group_size: int | None = None
) -> IntegerRows:
    """Quantize each row of float32 `data` (..., K) to int8, for products with grouped weights.

    Symmetric rows use `qnn.quantize_rows`. Affine rows use `choose_at_run_time`. Both avoid -128,
    because instructions that multiply magnitudes do not support it. With `group_size`, a divisor of
    K, each group of a row has a scale: float32 (..., K / group_size).
    """
    if group_size is not None:
        *lead, features = data.ty.shape.values
        split = (*lead, int(features) // group_size, group_size)
        groups = emit(relax.op.reshape(data, split), "groups")
        pair = emit(qnn.quantize_rows(groups), "rows")
        codes, scales = emit(pair[0], "groups.q"), emit(pair[1], "groups.scale")
        return IntegerRows(
            emit(relax.op.reshape(codes, (*lead, features)), "rows.q"),
            emit(relax.op.reshape(scales, split[:-1]), "rows.scale"),
        )
    if spec.is_symmetric:
        pair = emit(qnn.quantize_rows(data), "rows")
        return IntegerRows(emit(pair[0], "rows.q"), emit(pair[1], "rows.scale"))
    lowest, highest = max(spec.limits[0], -ROW_LIMIT), min(spec.limits[1], ROW_LIMIT)
    scale, zero_point = (
        emit(relax.op.expand_dims(value, -1), "rows.scale")
        for value in choose_at_run_time(emit, data, lowest, highest, is_row=True)
    )
    shift = emit(relax.op.astype(zero_point, "float32"), "rows.zero_point")
    units = emit(relax.op.round(emit(relax.op.divide(data, scale), "rows.units")), "rows.rounded")
    shifted = emit(relax.op.add(units, shift), "rows.shifted")
    clipped = emit(relax.op.clip(shifted, float(lowest), float(highest)), "rows.clipped")
    return IntegerRows(emit(relax.op.astype(clipped, "int8"), "rows.q"), scale, shift)


@dataclass(frozen=True, eq=False)
class ExpertChoice:
    """The expert of each row, int32 or int64, and the number of experts."""

    chosen: relax.Expr
    experts: int


def multiply_groups(
    emit: Emit,
    data: relax.Expr | IntegerRows,
    weight: GroupedWeight,
    parts: Sequence[relax.Expr],
    choice: ExpertChoice | None = None,
) -> relax.Expr:
    """Multiply rows of data by a grouped weight -> float32 (..., N).

    `parts` are the constant codes, scales and zero points of the weight. With a `choice`, a row is
    multiplied by the weight of its expert.

        (q - z) * s @ w  ->  grouped_dense(q, s, w) - s * z * (sums of the rows of w)
    """
    form = weight.attributes

    def multiply(rows: relax.Expr, scale: relax.Expr | float) -> relax.Expr:
        if choice is None:
            return qnn.grouped_dense(rows, scale, *parts, **form)
        own = (choice.chosen, *parts)
        return qnn.grouped_expert_dense(rows, scale, *own, **form, experts=choice.experts)

    if not isinstance(data, IntegerRows):
        return multiply(data, 1.0)
    product = multiply(data.value, data.scale)
    if data.zero_point is None:
        return product
    totals = weight.decode().sum(axis=1, dtype="float64").astype("float32")
    sums: relax.Expr = relax.const(totals)
    if choice is not None:
        each = relax.const(totals.reshape(choice.experts, -1))
        sums = emit(relax.op.take(each, choice.chosen, 0, mode="wrap"), "row_sums")
    shift = emit(relax.op.multiply(data.scale, data.zero_point), "rows.shift")
    excess = emit(relax.op.multiply(shift, sums), "excess")
    return relax.op.subtract(emit(product, "product"), excess)


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A constant weight of integer products. Several products may share it.

    Attributes:
        units: Constant int8 or uint8 (N, K).
        zero_point: Constant int32 () or (N,).
        sums: Column sums of the weight without its zero point, int64 (N,).
    """

    units: relax.Expr
    zero_point: relax.Expr
    sums: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray, zero_point: np.ndarray) -> IntegerWeight:
        """Make it of a weight (K, N), whose zero point is () or (N,)."""
        return cls(
            relax.const(np.ascontiguousarray(weight.T), str(weight.dtype)),
            relax.const(np.asarray(zero_point, "int32"), "int32"),
            (weight.astype("int64") - zero_point).sum(axis=0),
        )


def multiply_at_run_time(
    emit: Emit,
    data: relax.Expr,
    zero_point: relax.Expr,
    weight: IntegerWeight,
    *,
    is_exact: bool = False,
) -> relax.Expr:
    """Sum (data - zero_point) * (weight - its zero point) in int32.

    `data` (..., K) is integers.

    A variable zero point is taken out of the kernel: qnn.dense(data, weight) - zero_point * (column
    sums of the weight). zero_point is () or, for data (M, K), (M,). Sums wrap modulo
    2^32. With `is_exact` they are int64 if an input could overflow int32.
    """
    units, zero = weight.units, weight.zero_point
    dtype = SUM_DTYPES[0]
    if is_exact:
        product = qnn.dense(data, units, 0, zero, 1.0, 1.0)
        dtype = choose_accumulator_dtype(product, is_dynamic=True)
    if constant_value(zero_point) is not None:
        return qnn.dense(data, units, zero_point, zero, 1.0, 1.0, out_dtype=dtype)
    product = qnn.dense(data, units, 0, zero, 1.0, 1.0, out_dtype=dtype)
    product = emit(product, "product")
    if zero_point.ty.ndim:
        zero_point = emit(relax.op.expand_dims(zero_point, -1), "zero_point.row")
    if dtype != SUM_DTYPES[0]:
        zero_point = emit(relax.op.astype(zero_point, dtype), "zero_point.wide")
    excess = relax.op.multiply(zero_point, relax.const(weight.sums.astype(dtype), dtype))
    return relax.op.subtract(product, emit(excess, "correction"))


def convolve_at_run_time(
    emit: Emit,
    data: relax.Expr,
    zero_point: relax.Expr,
    weight: np.ndarray,
    weight_zero: np.ndarray,
    *,
    name: str,
    is_exact: bool,
    **attrs: Any,
) -> relax.Expr | Skip:
    """Sum (data - zero_point) * (weight - weight_zero) of convolution qnn.<name> in int32.

    The padding is the zero point. `data` and the constant weight are integers. weight_zero is () or
    (O,).

    The variable zero point is taken out of the kernel: qnn.conv(data, weight) - zero_point *
    qnn.conv(ones, weight). `attrs` are the attributes of the operator. Sums wrap modulo 2^32. With
    `is_exact` they are int64 if an input could overflow int32. Returns Skip if sizes of the data
    are unknown.
    """
    zero = relax.const(np.asarray(weight_zero, "int32"), "int32")
    units = relax.const(np.ascontiguousarray(weight), str(weight.dtype))
    is_known = constant_value(zero_point) is not None
    shift = zero_point if is_known else 0
    product = getattr(qnn, name)(data, units, shift, zero, 1.0, 1.0, **attrs)
    dtype = SUM_DTYPES[0]
    if is_exact:
        dtype = choose_accumulator_dtype(product, is_dynamic=True)
        product = getattr(qnn, name)(data, units, shift, zero, 1.0, 1.0, **attrs, out_dtype=dtype)
    if is_known:
        return product
    layout = str(attrs.get("data_layout", "NC" + "DHW"[5 - weight.ndim :]))
    shape = tensor_shape(data)
    if shape is None or any(
        isinstance(size, str) for axis, size in zip(layout, shape, strict=True) if axis != "N"
    ):
        return Skip(
            f"the data shape {shape} is not fully known, but the zero point's part of the sums "
            "depends on it",
            "give all sizes but the batch, or quantize it with parameters from calibration",
        )
    ones = np.ones([1 if a == "N" else int(s) for a, s in zip(layout, shape, strict=True)], "int8")
    sums = getattr(numpy_qnn, name)(ones, weight, 0, weight_zero, 1.0, 1.0, **attrs)
    # If all positions have the same sums, one position is enough. Only borders can differ.
    corner = sums[tuple(slice(None) if a in "NC" else slice(1) for a in layout)]
    sums = corner if (sums == corner).all() else sums
    if dtype != SUM_DTYPES[0]:
        zero_point = emit(relax.op.astype(zero_point, dtype), "zero_point.wide")
    excess = relax.op.multiply(zero_point, relax.const(sums.astype(dtype), dtype))
    return relax.op.subtract(emit(product, "product"), emit(excess, "correction"))
