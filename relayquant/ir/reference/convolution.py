"""Convolution, transposed convolution and windows in numpy, for N spatial dimensions and any
layout.

Used by the integer operators (float64, exact below 2^53) and by the float operators of the
interpreter. Layouts are strings of axis letters, as in `relax.nn.conv2d`: N C and spatial letters
for data, O I and spatial letters for kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relayquant.errors import QnnError, format_count
from relayquant.ir.rewrite.conv_view import (
    Ints,
    expand_per_axis,
    get_spatial_letters,
    split_padding,
)

Array = np.ndarray[Any, Any]


def permute_layout(array: Array, source: str, target: str) -> Array:
    """Return a view of `array` with its axes reordered from layout `source` to `target`."""
    if array.ndim != len(source):
        raise QnnError(
            f"an array of shape {array.shape} does not have layout {source!r}.", code="RQ601"
        )
    return array.transpose([source.index(letter) for letter in target])


def pad_constant(data: Array, widths: Sequence[tuple[int, int]], value: Any) -> Array:
    """Return the same as `np.pad` with constant values, which takes four times as long for the
    data of a small layer.

    Raises:
        ValueError: A width is negative.
    """
    if min((width for edges in widths for width in edges), default=0) < 0:
        raise ValueError(f"The padding is {widths}; allowed: no negative width.")
    shape = [
        before + size + after for size, (before, after) in zip(data.shape, widths, strict=True)
    ]
    padded = np.full(shape, value, data.dtype, order="F" if data.flags.fnc else "C")
    padded[tuple(slice(a, a + size) for size, (a, _) in zip(data.shape, widths, strict=True))] = (
        data
    )
    return padded


def iterate_taps(
    kernel: Sequence[int],
    outputs: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Iterate over (index in the kernel, slices of padded channels-last data) for each tap."""
    for tap in itertools.product(*map(range, kernel)):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (o - 1) * s + 1, s)
                for t, d, o, s in zip(tap, dilation, outputs, strides, strict=True)
            ),
        )


def convolve(
    data: Array,
    kernel: Array,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str = "",
) -> Array:
    """Convolve in groups with zero padding, in the dtype of the operands (float32 or float64).

    `data` has `data_layout`; `kernel` has `kernel_layout` with O = output channels and
    I = input channels / groups. The result has `out_layout`, or `data_layout` by default.

    Raises:
        QnnError: Layouts, channels or groups do not match, or the output would be empty.
    """
    letters = get_spatial_letters(data_layout)
    rank = len(letters)
    x = permute_layout(data, data_layout, "N" + letters + "C")
    w = permute_layout(kernel, kernel_layout, letters + "IO")
    strides, dilation = expand_per_axis(strides, rank), expand_per_axis(dilation, rank)
    pads = split_padding(padding, rank)
    per_group, out_channels = w.shape[-2:]
    if x.shape[-1] != per_group * groups or out_channels % groups:
        raise QnnError(
            f"convolution of {format_count(x.shape[-1], 'channel')} in "
            f"{format_count(groups, 'group')} with a kernel of {per_group} input and "
            f"{format_count(out_channels, 'output channel')}: input channels must be groups * "
            "kernel input channels, output channels a multiple of groups.",
            code="RQ601",
        )
    x = pad_constant(x, [(0, 0), *pads, (0, 0)], 0)
    taps = w.shape[:rank]
    outputs = [
        (size - d * (k - 1) - 1) // s + 1
        for size, d, k, s in zip(x.shape[1:-1], dilation, taps, strides, strict=True)
    ]
    if min(outputs) <= 0:
        raise QnnError(
            f"convolution with a {taps} kernel leaves nothing of data {data.shape}.", code="RQ601"
        )
    windows = [
        (tap, x[(slice(None), *at)]) for tap, at in iterate_taps(taps, outputs, strides, dilation)
    ]
    shape = (x.shape[0], *outputs, out_channels)
    is_empty = 0 in (x.size, w.size)  # there is no product to add, or no sum
    result = np.zeros(shape, x.dtype) if is_empty else add_products(w, windows, groups)
    return permute_layout(result.reshape(shape), "N" + letters + "C", out_layout or data_layout)


def add_products(w: Array, windows: Sequence[tuple[tuple[int, ...], Array]], groups: int) -> Array:
    """Add the products of each tap of `w` (*taps, I, O) with what it reads (N, *outputs, groups *
    I). The result reshapes to (N, *outputs, O).
    """
    per_group, out_channels = w.shape[-2:]
    first = windows[0][1]
    shape, dtype = first.shape[:-1], first.dtype
    if groups == 1 and per_group * len(windows) <= 1024:
        # Few channels: one product over all taps is faster than one thin product per tap.
        columns = np.concatenate([window for _, window in windows], axis=-1)
        return columns.reshape(-1, columns.shape[-1]) @ w.reshape(-1, out_channels)
    if groups == 1:
        result = np.zeros((int(np.prod(shape)), out_channels), dtype)
        for tap, window in windows:
            result += window.reshape(-1, per_group) @ w[tap]
        return result
    if per_group == 1:
        # Depthwise: every input channel contributes to out_channels / groups consecutive outputs.
        result = np.zeros((*shape, groups, out_channels // groups), dtype)
        products = np.empty_like(result)
        for tap, window in windows:
            result += np.multiply(window[..., None], w[tap].reshape(groups, -1), out=products)
        return result
    split = (-1, groups, per_group)
    result = np.zeros((groups, int(np.prod(shape)), out_channels // groups), dtype)
    for tap, window in windows:
        column = window.reshape(split).transpose(1, 0, 2)
        result += column @ w[tap].reshape(per_group, groups, -1).transpose(1, 0, 2)
    return result.transpose(1, 0, 2)


def convolve_transposed(
    data: Array,
    kernel: Array,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str = "",
) -> Array:
    """Gradient of `convolve` for its data, as `relax.nn.conv2d_transpose`.

    `kernel` has I = input channels and O = output channels / groups. Spatial output size:
    (size - 1) * stride + dilation * (kernel - 1) + 1 + output_padding - padding.

    Raises:
        QnnError: Layouts, channels or groups do not match, or the output would be empty.
    """
    letters = get_spatial_letters(data_layout)
    rank = len(letters)
    x = permute_layout(data, data_layout, "N" + letters + "C")
    w = permute_layout(kernel, kernel_layout, letters + "IO")
    strides, dilation = expand_per_axis(strides, rank), expand_per_axis(dilation, rank)
    pads, extra = split_padding(padding, rank), expand_per_axis(output_padding, rank)
    channels, per_group = w.shape[-2:]
    if x.shape[-1] != channels or channels % groups:
        raise QnnError(
            f"transposed convolution of {format_count(x.shape[-1], 'channel')} in "
            f"{format_count(groups, 'group')} with a kernel of "
            f"{format_count(channels, 'input channel')}: these must be equal and a multiple of "
            "groups.",
            code="RQ601",
        )
    taps, sizes = w.shape[:rank], x.shape[1:-1]
    full = [
        (size - 1) * s + d * (k - 1) + 1 + e
        for size, s, d, k, e in zip(sizes, strides, dilation, taps, extra, strict=True)
    ]
    result = np.zeros((x.shape[0], *full, groups, per_group), x.dtype)
    # One product for each group: of each pixel alone, they would take ten times as long.
    split = np.moveaxis(x.reshape(math.prod(x.shape[:-1]), groups, channels // groups), 1, 0)
    multiply = np.multiply if channels == groups else np.matmul
    for tap, at in iterate_taps(taps, sizes, strides, dilation) if x.size else ():
        products = multiply(split, w[tap].reshape(groups, channels // groups, per_group))
        moved = np.moveaxis(products, 0, 1)
        result[(slice(None), *at)] += moved.reshape(*x.shape[:-1], groups, per_group)
    result = result.reshape(x.shape[0], *full, groups * per_group)
    crop = [slice(before, size - after) for (before, after), size in zip(pads, full, strict=True)]
    result = result[(slice(None), *crop)]
    if 0 in result.shape[1:-1]:
        raise QnnError(f"transposed convolution of data {data.shape} leaves nothing.", code="RQ601")
    return permute_layout(result, "N" + letters + "C", out_layout or data_layout)


@dataclass(frozen=True)
class Window:
    """The window of a pool, with one number per spatial axis.

    Padding holds the numbers before each axis, then the numbers after each axis.

    With `ceil_mode`, the last window may reach beyond the data and its padding. TVM 0.27 drops a
    window that starts there (`starts_inside`). If padding counts, it does not count elements beyond
    the padding. v0.19 kept the window and counted all of it.
    """

    pool_size: Sequence[int]
    strides: Sequence[int]
    dilation: Sequence[int]
    padding: Sequence[int]
    ceil_mode: bool
    layout: str
    starts_inside: bool = True

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(get_spatial_letters(self.layout))

    def expand(self) -> tuple[Ints, Ints, Ints]:
        """Return size, strides and dilation with one number per axis."""
        size, strides, dilation = (
            expand_per_axis(values, self.rank)
            for values in (self.pool_size, self.strides, self.dilation)
        )
        return size, strides, dilation

    def fit(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return ((before, after) padding per spatial axis that holds every window, number of
        windows).

        Raises:
            QnnError: No window fits into the padded data.
        """
        pads, outputs = [], []
        edges = split_padding(self.padding, self.rank)
        for size, k, s, d, (before, after) in zip(sizes, *self.expand(), edges, strict=True):
            span = size + before + after - d * (k - 1) - 1
            count = (-(-span // s) if self.ceil_mode else span // s) + 1
            if self.starts_inside and self.ceil_mode and (count - 1) * s >= size + before:
                count -= 1
            if count <= 0:
                raise QnnError(
                    f"a pool of size {k} leaves nothing of an axis of length {size}.", code="RQ601"
                )
            needed = (count - 1) * s + d * (k - 1) + 1 - size - before
            pads.append((before, max(after, needed)))
            outputs.append(count)
        return pads, outputs


def pad_pooled(data: Array, window: Window, fill: Any) -> tuple[Array, list[int]]:
    """Return the data with its padding, as N, spatial, C, and the spatial sizes of the output.

    `data` has the window's layout. Beyond the borders, the data is `fill`.
    """
    x = permute_layout(data, window.layout, "N" + get_spatial_letters(window.layout) + "C")
    pads, outputs = window.fit(x.shape[1:-1])
    if np.any(pads):
        x = pad_constant(x, [(0, 0), *pads, (0, 0)], fill)
    return x, outputs


def max_windows(data: Array, window: Window, fill: Any) -> Array:
    """Return the largest value of each window: N, spatial, C. See `pad_pooled`.

    A window is taken along one axis after the other, which reads fewer values than all its taps.
    """
    x, outputs = pad_pooled(data, window, fill)
    for axis, numbers in enumerate(zip(outputs, *window.expand(), strict=True), start=1):
        output, size, stride, dilation = numbers
        before = (slice(None),) * axis
        taps = [x[(*before, *at)] for _, at in iterate_taps([size], [output], [stride], [dilation])]
        x = taps[0] if size == 1 else np.maximum(*taps[:2])
        for tap in taps[2:]:
            np.maximum(x, tap, out=x)
    return x


def pool_windows(data: Array, window: Window, fill: Any) -> Iterator[Array]:
    """Iterate over the data at each tap of the window, in the shape of the output: N, spatial, C.

    `data` has the window's layout. Beyond the borders, the data is `fill`.
    """
    x, outputs = pad_pooled(data, window, fill)
    size, strides, dilation = window.expand()
    for _, at in iterate_taps(size, outputs, strides, dilation):
        yield x[(slice(None), *at)]


def count_window_values(shape: Sequence[int], window: Window, count_include_pad: bool) -> Array:
    """Return the divisors of an average pool, int64 of shape (1, output sizes..., 1).

    A divisor counts the window elements inside the data. With `count_include_pad` it also counts
    padding (see `Window`). It is at least 1.
    """
    letters = get_spatial_letters(window.layout)
    sizes = [shape[window.layout.index(letter)] for letter in letters]
    pads, outputs = window.fit(sizes)
    counted = np.ones(sizes, "int64")
    if count_include_pad:
        edges = split_padding(window.padding, window.rank) if window.starts_inside else pads
        counted = np.pad(counted, edges, constant_values=1)
        pads = [(0, all_[1] - edge[1]) for all_, edge in zip(pads, edges, strict=True)]
    counted = np.pad(counted, pads)[None, ..., None]
    size, strides, dilation = window.expand()
    total = np.zeros((1, *outputs, 1), "int64")
    for _, at in iterate_taps(size, outputs, strides, dilation):
        total += counted[(slice(None), *at)]
    return np.maximum(total, 1)
