"""Numpy forms of `relax.qnn` operators: add, subtract, mul and concatenate of affine tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.base.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.errors import QnnError, format_count
from relayquant.ir.reference.affine import (
    align_parameter,
    get_scalar,
    has_parameters,
    saturate_float,
    scale_integer,
    subtract_zero_point,
    wrap_sums,
)
from relayquant.ir.reference.fixed_point import (
    clip_to_integer,
    finish_rounded,
    fma_float32,
    hold_multiplier,
    round_values,
    wrap_int32,
)
from relayquant.ir.reference.qnn.quantization import move_to_int32, requantize

Array = np.ndarray[Any, Any]

__all__ = ["add", "concatenate", "mul", "subtract"]


def make_sum(sign: int) -> Callable[..., Array]:
    """Make the function of lhs + sign * rhs."""

    def combine(
        lhs: Array,
        rhs: Array,
        lhs_scale: Any,
        lhs_zero_point: Any,
        rhs_scale: Any,
        rhs_zero_point: Any,
        output_scale: Any,
        output_zero_point: Any,
        *,
        lhs_axis: int = -1,
        rhs_axis: int = -1,
        out_dtype: str = "",
        rounding: Rounding = Rounding.TONEAREST_EVEN,
        compute_dtype: Arithmetic = Arithmetic.FLOAT32,
    ) -> Array:
        """Add or subtract two broadcast affine tensors, in the output's affine space.

        The default dtype is the dtype of lhs.

        Default arithmetic: fma(float32(r - z_r), m_r, RN(float32(l - z_l) * m_l)), rounded once,
        with -m_r for a difference. All other modes round each side to int32 like TVM v0.19, then
        add and saturate.
        """
        left, right = np.asarray(lhs), np.asarray(rhs)
        dtype = out_dtype or left.dtype.name
        z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
        if rounding is Rounding.TONEAREST_EVEN and compute_dtype is Arithmetic.FLOAT32:
            s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
            m_l, m_r = (
                (align_parameter(scale, "float32", data, axis).astype("float64") / s_out)
                for data, scale, axis in ((left, lhs_scale, lhs_axis), (right, rhs_scale, rhs_axis))
            )
            centred = subtract_zero_point(left, lhs_zero_point, lhs_axis).astype("float32")
            other = subtract_zero_point(right, rhs_zero_point, rhs_axis).astype("float32")
            first = np.asarray(centred * hold_multiplier(m_l, "float32"))
            total = fma_float32(other, hold_multiplier(sign * m_r, "float32"), first)
            return finish_rounded(np.rint(total), z_out, dtype)
        output, modes = (output_scale, output_zero_point), (rounding, compute_dtype)
        moved_left = move_to_int32(left, (lhs_scale, lhs_zero_point, lhs_axis), output, *modes)
        moved_right = move_to_int32(right, (rhs_scale, rhs_zero_point, rhs_axis), output, *modes)
        others = moved_right.astype("int64") - z_out
        total = wrap_int32(np.asarray(moved_left.astype("int64") + sign * others))
        return clip_to_integer(total, dtype)

    return combine


add, subtract = make_sum(1), make_sum(-1)


def mul(
    lhs: Array,
    rhs: Array,
    lhs_scale: Any,
    lhs_zero_point: Any,
    rhs_scale: Any,
    rhs_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Multiply: P = (lhs - z_l) * (rhs - z_r), requantized.

    TONEAREST_EVEN: the multiplier is double(s_l) * double(s_r) / double(s_o). UPWARD and TONEAREST
        use float32(s_l * s_r) like TVM v0.19. P is exact in the default arithmetic and with
        FLOAT64, and int32 in other modes.
    """
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    left = subtract_zero_point(lhs, lhs_zero_point, lhs_axis).astype("int64")
    product = np.asarray(left * subtract_zero_point(rhs, rhs_zero_point, rhs_axis))
    if not has_exact_sums(rounding, compute_dtype):
        product = wrap_sums(product, "mul")
    s_l = align_parameter(lhs_scale, "float32", lhs, lhs_axis)
    s_r = align_parameter(rhs_scale, "float32", rhs, rhs_axis)
    s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    if rounding is Rounding.TONEAREST_EVEN:
        multiplier = s_l.astype("float64") * s_r.astype("float64") / s_out
    else:
        multiplier = (s_l * s_r).astype("float64") / s_out
    dtype = out_dtype or lhs.dtype.name
    if rounding is not Rounding.TONEAREST_EVEN and compute_dtype is not Arithmetic.INT64:
        real = compute_dtype.value
        value = hold_multiplier(multiplier, real) * product.astype(real) + z_out.astype(real)
        return saturate_float(round_values(np.asarray(value), rounding), dtype)
    return scale_integer(product, multiplier, z_out, dtype, rounding, compute_dtype)


def concatenate(
    data: Sequence[Array],
    input_scales: Sequence[Any],
    input_zero_points: Sequence[Any],
    output_scale: Any,
    output_zero_point: Any,
    *,
    axis: int = -1,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Join tensors of one dtype along `axis`. Tensors with other parameters than the output are
    requantized.
    """
    if not len(data) == len(input_scales) == len(input_zero_points) or not data:
        raise QnnError(
            f"qnn.concatenate: {format_count(len(data), 'tensor')}, "
            f"{format_count(len(input_scales), 'scale')} and "
            f"{format_count(len(input_zero_points), 'zero point')}; allowed: the same number of "
            "each, at least 1.",
            code="RQ601",
        )
    parts = []
    for part, scale, zero_point in zip(data, input_scales, input_zero_points, strict=True):
        part = np.asarray(part)
        if not has_parameters(scale, zero_point, output_scale, output_zero_point):
            part = requantize(
                part,
                scale,
                zero_point,
                output_scale,
                output_zero_point,
                axis=axis,
                out_dtype=part.dtype.name,
                rounding=rounding,
                compute_dtype=compute_dtype,
            )
        parts.append(part)
    return np.concatenate(parts, axis=axis)
