"""Numpy forms of `relax.qnn` operators: averages of windows and along axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relayquant.base.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.ir.reference.affine import (
    average_integer,
    get_scalar,
    subtract_zero_point,
    wrap_sums,
)
from relayquant.ir.reference.convolution import (
    Window,
    count_window_values,
    permute_layout,
    pool_windows,
)
from relayquant.ir.reference.fixed_point import (
    clip_to_integer,
)
from relayquant.ir.reference.qnn.quantization import move_to_int32
from relayquant.ir.rewrite.conv_view import get_spatial_letters

Array = np.ndarray[Any, Any]

__all__ = ["avg_pool2d", "mean"]


def avg_pool2d(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    pool_size: Sequence[int] = (1, 1),
    strides: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    layout: str = "NCHW",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Average each window, padded with the zero point. The result has the dtype of `data`.

    TONEAREST_EVEN averages first and rounds once. Windows and counts are the same as in
    `relax.nn.avg_pool2d`. UPWARD and TONEAREST reproduce TVM v0.19 with its defects: every value is
    first requantized to int32, the padding is 0 instead of the output's zero point, and the
    division by the count truncates.
    """
    data = np.asarray(data)
    is_relay = rounding is not Rounding.TONEAREST_EVEN
    window = Window(
        pool_size, strides, dilation, padding, ceil_mode, layout, starts_inside=not is_relay
    )
    z_in = get_scalar(input_zero_point, "int32", "input_zero_point")
    count = count_window_values(data.shape, window, count_include_pad)
    if rounding is Rounding.TONEAREST_EVEN:
        summands = subtract_zero_point(data, z_in, -1)
    else:
        output = (output_scale, output_zero_point)
        summands = move_to_int32(data, (input_scale, z_in, -1), output, rounding, compute_dtype)
    total = np.sum(list(pool_windows(summands.astype("int64"), window, 0)), axis=0)
    if not has_exact_sums(rounding, compute_dtype):
        total = wrap_sums(total, "avg_pool2d")
    if rounding is Rounding.TONEAREST_EVEN:
        scales = (input_scale, output_scale, output_zero_point)
        result = average_integer(total, count, scales, data.dtype.name, rounding, compute_dtype)
    else:
        quotient = np.sign(total) * (np.abs(total.astype("int64")) // count)
        result = clip_to_integer(quotient, data.dtype.name)
    return permute_layout(result, "N" + get_spatial_letters(layout) + "C", layout)


def mean(
    data: Array,
    input_scale: Any,
    input_zero_point: Any,
    output_scale: Any,
    output_zero_point: Any,
    *,
    axes: Sequence[int] | None = None,
    keepdims: bool = False,
    out_dtype: str = "",
    rounding: Rounding = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic = Arithmetic.FLOAT32,
) -> Array:
    """Average over `axes` in the output's affine space, rounded once. None or empty is all axes.

    The sum is exact in the default arithmetic and with FLOAT64, and int32 in other modes.
    """
    data = np.asarray(data)
    centred = subtract_zero_point(
        data, get_scalar(input_zero_point, "int32", "input_zero_point"), -1
    )
    over = tuple(int(axis) % data.ndim for axis in axes) if axes else tuple(range(data.ndim))
    total = np.asarray(np.sum(centred, axis=over, keepdims=keepdims, dtype="int64"))
    if not has_exact_sums(rounding, compute_dtype):
        total = wrap_sums(total, "mean")
    count = np.asarray(np.prod([data.shape[axis] for axis in over], dtype="int64"))
    return average_integer(
        total,
        count,
        (input_scale, output_scale, output_zero_point),
        out_dtype or data.dtype.name,
        rounding,
        compute_dtype,
    )
