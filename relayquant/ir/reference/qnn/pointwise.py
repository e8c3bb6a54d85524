"""Numpy forms of `relax.qnn` operators: functions of one value."""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import QnnError
from relayquant.ir.reference.affine import (
    align_parameter,
    get_scalar,
    scale_integer,
    subtract_zero_point,
)
from relayquant.ir.reference.fixed_point import (
    clip_to_integer,
    get_fixed_point_multiplier,
    multiply_fixed_point,
)
from relayquant.ir.reference.qnn.quantization import move_to_int32

Array = np.ndarray[Any, Any]

__all__ = ["leaky_relu", "lookup", "prelu"]


def leaky_relu(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    alpha: float = 0.01,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Compute x if x >= 0 else alpha * x, in the output's affine space, in the dtype of `data`.

    TONEAREST_EVEN requantizes. Below the input zero point, the multiplier is double(s_in) * alpha /
        double(s_out). UPWARD and TONEAREST requantize to int32. Below the zero point, they multiply
        by alpha in fixed point, like TVM v0.19.
    """
    data = np.asarray(data)
    dtype = data.dtype.name
    z_in = get_scalar(input_zero_point, "int32", "input_zero_point")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    if rounding is Rounding.TONEAREST_EVEN:
        s_in = get_scalar(input_scale, "float32", "input_scale").astype("float64")
        s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
        centred = subtract_zero_point(data, z_in, -1)
        multiplier = np.where(centred < 0, s_in * float(alpha) / s_out, s_in / s_out)
        return scale_integer(centred, multiplier, z_out, dtype, rounding, compute_dtype)
    moved = move_to_int32(
        data,
        (input_scale, input_zero_point, -1),
        (output_scale, output_zero_point),
        rounding,
        compute_dtype,
    )
    slope = get_fixed_point_multiplier(alpha)
    rest = get_fixed_point_multiplier(1.0 - alpha)
    scaled = multiply_fixed_point(moved, *slope, Rounding.UPWARD).astype("int64")
    scaled = scaled + multiply_fixed_point(z_out, *rest, Rounding.UPWARD)
    return clip_to_integer(np.where(data.astype("int64") < z_in, scaled, moved), dtype)


def prelu(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    slopes: Any,
    *,
    axis: int = 1,
) -> Array:
    """Compute x if x >= 0 else slopes * x, in the output's affine space, in the dtype of `data`.

    Rounds half to even like `leaky_relu`, with one slope per index of `axis`. The multiplier below
    the input zero point is double(s_in) * double(slope) / double(s_out).
    """
    data = np.asarray(data)
    s_in = get_scalar(input_scale, "float32", "input_scale").astype("float64")
    s_out = get_scalar(output_scale, "float32", "output_scale").astype("float64")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    slope = align_parameter(slopes, "float32", data, axis).astype("float64")
    centred = subtract_zero_point(
        data, get_scalar(input_zero_point, "int32", "input_zero_point"), -1
    )
    multiplier = np.where(centred < 0, s_in * slope / s_out, s_in / s_out)
    modes = (Rounding.TONEAREST_EVEN, Arithmetic.FLOAT32)
    return scale_integer(centred, multiplier, z_out, data.dtype.name, *modes)


def lookup(data: Array, table: Array) -> Array:
    """Read table[bit pattern of data as uint8]: data int8 or uint8, table (256,) of any dtype."""
    data, table = np.asarray(data), np.asarray(table)
    if data.dtype.name not in ("int8", "uint8") or table.shape != (256,):
        raise QnnError(
            f"qnn.lookup: data is {data.dtype}, table has shape {table.shape}; allowed: int8 or "
            "uint8 data and a table of shape (256,).",
            code="RQ601",
        )
    return np.asarray(table[data.view("uint8")])
