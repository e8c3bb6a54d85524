"""Numpy forms of `relax.qnn` operators: quantize, dequantize, requantize, and their simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.ir.reference.affine import (
    align_parameter,
    cycle_parameter,
    get_scalar,
    has_parameters,
    pick_limits,
    saturate_float,
    scale_integer,
    subtract_zero_point,
    wrap_sums,
)
from relayquant.ir.reference.fixed_point import (
    finish_rounded,
    hold_multiplier,
    round_values,
)

Array = np.ndarray[Any, Any]

__all__ = ["dequantize", "quantize", "requantize", "simulated_dequantize", "simulated_quantize"]


def quantize(
    data: Array,
    scale: Any,
    zero_point: Any,
    *,
    axis: int = -1,
    out_dtype: str = "int8",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
) -> Array:
    """Compute round(data / scale) + zero_point, saturated to `out_dtype`. NaN gives the zero point.

    The division is a true float32 division. TONEAREST and UPWARD add the zero point in float32
    before the clamp, like TVM v0.19. This differs only beyond 2^24.
    """
    data = np.asarray(data).astype("float32", copy=False)
    s = align_parameter(scale, "float32", data, axis)
    z = align_parameter(zero_point, "int32", data, axis)
    with np.errstate(all="ignore"):
        rounded = round_values(np.asarray(data / s), rounding)
    if rounding is Rounding.TONEAREST_EVEN:
        return finish_rounded(rounded, z, out_dtype)
    with np.errstate(all="ignore"):
        shifted = np.where(np.isnan(rounded), np.float32(0), rounded) + z.astype("float32")
    return saturate_float(shifted, out_dtype)


def dequantize(
    data: Array, scale: Any, zero_point: Any, *, axis: int = -1, out_dtype: str = "float32"
) -> Array:
    """Compute float32(int32(data) - zero_point) * scale. float16 saturates at +-65504."""
    data = np.asarray(data)
    centred = subtract_zero_point(data, zero_point, axis).astype("float32")
    real = centred * align_parameter(scale, "float32", data, axis)
    if out_dtype == "float16":
        return np.clip(real, np.float32(-65504), np.float32(65504)).astype("float16")
    return np.asarray(real.astype(out_dtype, copy=False))


def requantize(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    axis: int = -1,
    out_dtype: str = "int8",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Convert to another affine space.

    Input parameters may be per-channel along `axis`. Output parameters are scalar.

    The modes of TVM v0.19 differ. INT64 rounds, wraps to int32 and then adds the zero point, and it
    does not clip an int32 result. FLOAT32 and FLOAT64 add the zero point and then round.
    """
    data = np.asarray(data)
    if data.dtype == np.int64 and not has_exact_sums(rounding, compute_dtype):
        data = wrap_sums(data, "requantize")
    s_in = align_parameter(input_scale, "float32", data, axis)
    s_out = get_scalar(output_scale, "float32", "output_scale")
    z_out = get_scalar(output_zero_point, "int32", "output_zero_point")
    multiplier = s_in.astype("float64") / s_out.astype("float64")
    if rounding is not Rounding.TONEAREST_EVEN and compute_dtype is not Arithmetic.INT64:
        dtype = compute_dtype.value
        z_in = align_parameter(input_zero_point, "int32", data, axis)
        centred = data.astype(dtype) - z_in.astype(dtype)
        value = hold_multiplier(multiplier, dtype) * centred + z_out.astype(dtype)
        return saturate_float(round_values(np.asarray(value), rounding), out_dtype)
    centred = subtract_zero_point(data, input_zero_point, axis)
    return scale_integer(centred, multiplier, z_out, out_dtype, rounding, compute_dtype)


def move_to_int32(
    data: Array,
    parameters: tuple[Any, Any, int],
    output: tuple[Any, Any],
    rounding: Rounding,
    compute_dtype: Arithmetic,
) -> Array:
    """Convert `data` to int32 in the output's affine space, unclipped.

    If it is in this space already, it is only cast.
    """
    scale, zero_point, axis = parameters
    if has_parameters(scale, zero_point, *output):
        return data.astype("int32")
    return requantize(
        data,
        scale,
        zero_point,
        *output,
        axis=axis,
        out_dtype="int32",
        rounding=rounding,
        compute_dtype=compute_dtype,
    )


def simulated_quantize(
    data: Array,
    dtype: Any,
    scale: Any,
    zero_point: Any,
    *,
    axis: int = -1,
    rounding: Rounding = Rounding.TONEAREST_EVEN,
) -> Array:
    """Quantize, but keep the dtype of `data`. `dtype` is a code of SIMULATED_RANGES.

    Computes max(min(round(data / scale) + zero_point, high), low) in float32. `dtype`, scale and
    zero point may have any length: channel i takes element i mod length. Code 0 and unknown codes
    pass data through. NaN gives the zero point, as in `quantize`.
    """
    data = np.asarray(data)
    codes, s, z = (cycle_parameter(values, data, axis) for values in (dtype, scale, zero_point))
    low, high = (pick_limits(codes, end) for end in (0, 1))
    if np.isnan(low).all():
        return data
    with np.errstate(all="ignore"):
        rounded = round_values(np.asarray(data.astype("float32") / s), rounding)
        rounded = np.where(np.isnan(rounded), np.float32(0), rounded)
        result = np.maximum(np.minimum(rounded + z, high), low).astype(data.dtype)
    return np.where(np.isnan(low), data, result)


def simulated_dequantize(
    data: Array, dtype: Any, scale: Any, zero_point: Any, *, axis: int = -1
) -> Array:
    """Compute (data - zero_point) * scale in float32, with the operands of `simulated_quantize`."""
    data = np.asarray(data)
    codes, s, z = (cycle_parameter(values, data, axis) for values in (dtype, scale, zero_point))
    passes = np.isnan(pick_limits(codes, 0))
    if passes.all():
        return data
    with np.errstate(all="ignore"):
        real = np.asarray((data.astype("float32") - z) * s).astype(data.dtype)
    return np.where(passes, data, real)
