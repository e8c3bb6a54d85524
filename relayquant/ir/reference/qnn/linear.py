"""Numpy forms of `relax.qnn` operators: convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.errors import QnnError
from relayquant.ir.reference.affine import (
    cast_accumulator,
    center_factors,
    choose_exact_dtype,
    count_magnitude,
    get_scalar,
    subtract_zero_point,
)
from relayquant.ir.reference.convolution import (
    convolve,
    convolve_transposed,
    permute_layout,
)

Array = np.ndarray[Any, Any]

__all__ = ["batch_matmul", "conv1d", "conv2d", "conv2d_transpose", "dense"]


def make_convolution(spatial: str) -> Callable[..., Array]:
    """Make the convolution over the axes with these letters."""
    rank = len(spatial)

    def convolution(
        data: Array,
        weight: Array,
        input_zero_point: Any,
        kernel_zero_point: Any,
        input_scale: Any,
        kernel_scale: Any,
        *,
        strides: Sequence[int] = (1,) * rank,
        padding: Sequence[int] = (0,) * 2 * rank,
        dilation: Sequence[int] = (1,) * rank,
        groups: int = 1,
        data_layout: str = "NC" + spatial,
        kernel_layout: str = "OI" + spatial,
        out_dtype: str = "int32",
    ) -> Array:
        """Convolve data - input_zero_point with weight - kernel_zero_point, padded with real 0.

        The result has scale input_scale * kernel_scale and zero point 0. The scales do not affect
        the integers. Kernel parameters are scalar or per output channel. Sums have dtype
        `out_dtype`, int32 or int64. A sum that overflows int32 wraps modulo 2^32, with a warning.
        """
        del input_scale, kernel_scale
        axis = kernel_layout.index("O")
        result = convolve(
            *center_factors(data, weight, input_zero_point, kernel_zero_point, axis),
            strides=strides,
            padding=padding,
            dilation=dilation,
            groups=groups,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
        )
        return cast_accumulator(result, out_dtype, "conv")

    return convolution


conv1d, conv2d = make_convolution("W"), make_convolution("HW")


def conv2d_transpose(
    data: Array,
    weight: Array,
    input_zero_point: Any,
    kernel_zero_point: Any,
    input_scale: Any,
    kernel_scale: Any,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    output_padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    data_layout: str = "NCHW",
    kernel_layout: str = "IOHW",
    out_dtype: str = "int32",
) -> Array:
    """Convolve transposed. Kernel parameters are scalar or per output channel.

    Output channel c is entry c mod O of the kernel's O axis, in group c // O.
    """
    del input_scale, kernel_scale
    inputs, per_group = (np.shape(weight)[kernel_layout.index(letter)] for letter in "IO")
    zero_points = np.asarray(kernel_zero_point, "int32")
    if zero_points.size > 1:
        if zero_points.size != per_group * groups:
            raise QnnError(
                f"qnn.conv2d_transpose: kernel_zero_point has shape {zero_points.shape}; allowed: "
                f"() or ({per_group * groups},), one per output channel.",
                code="RQ601",
            )
        per_input = np.repeat(zero_points.reshape(groups, per_group), inputs // groups, axis=0)
        zero_points = permute_layout(per_input[..., None, None], "IOHW", kernel_layout)
    kernel = np.asarray(weight).astype("int64") - zero_points
    centred = subtract_zero_point(np.asarray(data), input_zero_point, -1)
    largest = count_magnitude(centred) * count_magnitude(kernel)
    kind = choose_exact_dtype(largest * kernel.size)
    result = convolve_transposed(
        centred.astype(kind),
        kernel.astype(kind),
        strides=strides,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    )
    return cast_accumulator(result, out_dtype, "conv2d_transpose")


def dense(
    data: Array,
    weight: Array,
    input_zero_point: Any,
    kernel_zero_point: Any,
    input_scale: Any,
    kernel_scale: Any,
    *,
    out_dtype: str = "int32",
) -> Array:
    """Compute (data - z_x) @ (weight - z_w).T: data (..., K), weight (N, K), result (..., N)."""
    del input_scale, kernel_scale
    x, w = center_factors(data, weight, input_zero_point, kernel_zero_point, 0)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise QnnError(
            f"qnn.dense: data {x.shape} and weight {w.shape} do not fit; allowed: (..., K), "
            "(N, K).",
            code="RQ601",
        )
    return cast_accumulator(x @ w.T, out_dtype, "dense")


def batch_matmul(
    x: Array,
    y: Array,
    x_zero_point: Any,
    y_zero_point: Any,
    x_scale: Any,
    y_scale: Any,
    *,
    out_dtype: str = "int32",
) -> Array:
    """Compute (x - z_x) @ (y - z_y)^T: x (..., M, K), y (..., N, K) -> (..., M, N).

    Leading dimensions broadcast.
    """
    del x_scale, y_scale
    left = subtract_zero_point(np.asarray(x), get_scalar(x_zero_point, "int32", "x_zero_point"), -1)
    right = subtract_zero_point(
        np.asarray(y), get_scalar(y_zero_point, "int32", "y_zero_point"), -1
    )
    if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-1]:
        raise QnnError(
            f"qnn.batch_matmul: x {left.shape} and y {right.shape} do not fit; allowed: "
            "(..., M, K) and (..., N, K).",
            code="RQ601",
        )
    largest = count_magnitude(left) * count_magnitude(right) * left.shape[-1]
    kind = choose_exact_dtype(largest)
    product = left.astype(kind) @ right.astype(kind).swapaxes(-1, -2)
    return cast_accumulator(product, out_dtype, "batch_matmul")
