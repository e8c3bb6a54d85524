"""Numpy forms of Relax convolutions, matrix products and pools, with exact integer sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relayquant.ir.reference import convolution
from relayquant.ir.reference.convolution import (
    Window,
    count_window_values,
    max_windows,
    permute_layout,
    pool_windows,
)
from relayquant.ir.reference.relax.row import OperatorFunction, to_ints
from relayquant.ir.rewrite.conv_view import ConvView, expand_per_axis, get_spatial_letters

Array = np.ndarray[Any, Any]


def widen(array: Array) -> Array:
    """Cast narrow floats to float32 and integers to float64."""
    if array.dtype.kind in "iu":
        return array.astype("float64")
    return array.astype("float32") if array.dtype.itemsize < 4 else array


def widen_factors(left: Array, right: Array) -> tuple[Array, Array]:
    """Cast the operands of a sum of products.

    Narrow floats become float32. Integers become float64, which is fast, if every sum is then
    exact. Otherwise they become int64, which wraps.
    """
    if left.dtype.kind in "iu" and left.size and right.size:
        largest = [max(int(each.max()), -int(each.min())) for each in (left, right)]
        if largest[0] * largest[1] * min(left.size, right.size) >= 2**53:
            return left.astype("int64"), right.astype("int64")
    return widen(left), widen(right)


def finish_product(result: Array, operand: Array) -> Array:
    """Cast a product of integers to int64. The caller casts to the dtype that TVM infers, which
    wraps.
    """
    return result.astype("int64") if operand.dtype.kind in "iu" else result


def truncate_divide(left: Any, right: Any) -> Any:
    """Divide integers, rounded toward zero. Division by 0 gives 0."""
    quotient = np.floor_divide(left, right)
    inexact = (quotient * right != left) & (np.asarray(right) != 0)
    return quotient + (inexact & ((np.asarray(left) < 0) != (np.asarray(right) < 0)))


def sum_products(convolve: Callable[..., Array], *more: str) -> OperatorFunction:
    """Make a convolution. `more` names further attributes that are passed on."""

    def compute(args: list[Any], attrs: Any) -> Any:
        data, kernel = widen_factors(*args)
        view = ConvView.read(attrs)
        result = convolve(
            data,
            kernel,
            **{name: getattr(view, name) for name in more},
            strides=view.strides,
            padding=view.padding,
            dilation=view.dilation,
            groups=view.groups,
            data_layout=view.layout,
            kernel_layout=view.kernel_layout,
            out_layout=view.out_layout,
        )
        return finish_product(result, args[0])

    return compute


convolve = sum_products(convolution.convolve)
convolve_transposed = sum_products(convolution.convolve_transposed, "output_padding")


def get_window(attrs: Any) -> Window:
    """Return the window of a pool."""
    view = ConvView.read(attrs)
    numbers = view.window, view.strides, view.dilation, view.padding
    return Window(*numbers, bool(attrs.ceil_mode), view.layout)


def to_out_layout(channels_last: Array, attrs: Any) -> Array:
    """Convert a pool's result (N, spatial, C) to the layout of the operator's output."""
    layout = attrs.out_layout or attrs.layout
    return permute_layout(channels_last, "N" + get_spatial_letters(layout) + "C", layout)


def max_pool(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    lowest = np.iinfo(data.dtype).min if data.dtype.kind in "iu" else -np.inf
    return to_out_layout(max_windows(data, get_window(attrs), lowest), attrs)


def avg_pool(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    window = get_window(attrs)
    total = np.zeros((), data.dtype)
    for tap in pool_windows(data, window, 0):
        total = total + tap
    count = count_window_values(data.shape, window, bool(attrs.count_include_pad))
    if data.dtype.kind in "iu":
        return to_out_layout(truncate_divide(total.astype("int64"), count), attrs)
    return to_out_layout(total / count.astype(data.dtype), attrs)


def adaptive_avg_pool(args: list[Any], attrs: Any) -> Any:
    """Average for output i from floor(i * size / out) to ceil((i + 1) * size / out)."""
    (data,) = args
    letters = get_spatial_letters(attrs.layout)
    result = permute_layout(data, attrs.layout, "N" + letters + "C")
    sizes = result.shape[1:-1]
    outputs = (
        expand_per_axis(to_ints(attrs.output_size), len(letters)) if attrs.output_size else sizes
    )
    for axis, (size, out) in enumerate(zip(sizes, outputs, strict=True), start=1):
        parts = []
        for i in range(out):
            window = slice(i * size // out, -(-(i + 1) * size // out))
            at = (slice(None),) * axis + (window,)
            parts.append(result[at].mean(axis=axis, keepdims=True))
        result = np.concatenate(parts, axis=axis)
    return to_out_layout(result, attrs)
