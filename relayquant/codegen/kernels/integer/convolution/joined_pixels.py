"""Convolution with few output channels -> a convolution with neighbouring pixels joined to one.

    y[oy, P * i + p, o]  =  y'[oy, i, p * O + o],    w'[p * O + o, kh, p * s + kw]  =  w[o, kh, kw]

A pixel of P joined ones has the output channels of all of them. A vector of sums has one output
channel in each lane, so a pixel with one channel leaves most lanes empty.
The windows of P pixels overlap: they are as wide as kw + (P - 1) * s columns. Weights outside of a
pixel's own window are 0. Results and residuals stay where they are, and so do all bits.

A transposed convolution whose kernel is as wide as its stride makes s columns of each pixel. They
are channels of one:

    y[oy, s * (P * i + p) + k, o]  =  y'[oy, i, (p * s + k) * O + o]
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.integer.convolution.transposed import Conv2dTranspose
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d
from relayquant.codegen.kernels.isa.base import Isa

#: Lanes of the results of joined pixels.
MOST_LANES = 128
#: Joined pixels must take less than this share of the estimated time.
GAIN = 0.9
#: Dot products in the time in which a vector of sums is converted and stored.
STORE_TIME = 4


def count_joined_pixels(spec: Conv2d, isa: Isa) -> int:
    """Choose how many pixels to join: a divisor of the width of the results, 1 for none."""
    if spec.groups > 1 or spec.dilation[1] > 1 or spec.columns is not None:
        return 1
    (_, width), (height, _) = spec.out_size, spec.kernel

    def time(count: int) -> float:
        run = find_window(spec, count) * spec.in_channels
        return estimate_time(isa, count * spec.out_channels, run, height) / count

    best = min(list_divisors(width, spec.out_channels), key=time)
    return best if time(best) < GAIN * time(1) else 1


def list_divisors(width: int, channels: int) -> list[int]:
    """List how many pixels of so many channels may be joined."""
    most = min(max(MOST_LANES // channels, 1), width)
    return [count for count in range(1, most + 1) if width % count == 0]


def estimate_time(isa: Isa, channels: int, run: int, taps: int) -> float:
    """Estimate the time of a pixel, in dot products: `taps` runs of activations and the stores."""
    return ceil_div(channels, isa.lanes) * (taps * ceil_div(run, isa.products) + STORE_TIME)


def find_window(spec: Conv2d, count: int) -> int:
    """Return the width of the windows of `count` neighbouring pixels together."""
    return spec.kernel[1] + (count - 1) * spec.strides[1]


def join_pixels(spec: Conv2d, count: int) -> Conv2d:
    """Return the convolution that computes `count` pixels as one."""
    if count == 1:
        return spec
    (_, width), (rows, stride), (top, left, bottom, _) = spec.out_size, spec.strides, spec.padding
    if spec.kernel[1] == stride == 1 and not any(spec.padding):  # remains a product of matrices
        return replace(
            spec,
            width=width // count,
            in_channels=spec.in_channels * count,
            out_channels=spec.out_channels * count,
        )
    last = (width - 1) * stride + spec.kernel[1]  # columns that are read
    return replace(
        spec,
        out_channels=spec.out_channels * count,
        kernel=(spec.kernel[0], find_window(spec, count)),
        strides=(rows, stride * count),
        padding=(top, left, bottom, max(last - left - spec.width, 0)),
    )


def join_constants(spec: Conv2d, count: int, constants: Constants) -> Constants:
    """Return the constants of `join_pixels(spec, count)` from the constants of `spec`."""
    if count == 1:
        return constants
    outputs, rows, columns, inputs = constants.weight.shape
    weight = np.zeros((count, outputs, rows, find_window(spec, count), inputs), "int8")
    for pixel in range(count):
        first = pixel * spec.strides[1]
        weight[pixel, :, :, first : first + columns] = constants.weight
    shape = join_pixels(spec, count).weight_shape
    return repeat_channels(constants, weight.reshape(shape), count)


def count_joined_blocks(spec: Conv2dTranspose, isa: Isa) -> int:
    """Choose of how many pixels to join the columns: a divisor of the width, 0 for none."""
    columns, channels = spec.strides[1], spec.out_channels
    plain = spec.kernel[1] == columns and not (spec.padding[1] or spec.padding[3])
    if spec.groups > 1 or not plain or spec.dilation[1] > 1 or spec.output_padding[1]:
        return 0
    taps = ceil_div(spec.kernel[0], spec.strides[0])

    def time(count: int) -> float:
        run = count * spec.in_channels
        return estimate_time(isa, count * columns * channels, run, taps) / count

    best = min(list_divisors(spec.width, columns * channels), key=time)
    apart = columns * estimate_time(isa, channels, spec.in_channels, taps)
    return best if time(best) < GAIN * apart else 0


def join_blocks(spec: Conv2dTranspose, count: int) -> Conv2dTranspose:
    """Return the transposed convolution with the columns of `count` pixels as channels of one."""
    if count == 0:
        return spec
    return replace(
        spec,
        width=spec.width // count,
        in_channels=spec.in_channels * count,
        out_channels=spec.out_channels * count * spec.strides[1],
        kernel=(spec.kernel[0], 1),
        strides=(spec.strides[0], 1),
    )


def join_block_constants(spec: Conv2dTranspose, count: int, constants: Constants) -> Constants:
    """Return the constants of `join_blocks(spec, count)` from the constants of `spec`."""
    if count == 0:
        return constants
    outputs, rows, columns, inputs = constants.weight.shape
    weight = np.zeros((count, columns, outputs, rows, count, inputs), "int8")
    for pixel in range(count):
        weight[pixel, :, :, :, pixel] = constants.weight.transpose(2, 0, 1, 3)
    whole = join_blocks(spec, count)
    return repeat_channels(constants, weight.reshape(whole.weight_shape), count * columns)


def repeat_channels(constants: Constants, weight: NDArray[np.int8], count: int) -> Constants:
    """Return `weight` with so many copies of the other constants, one after the other."""
    multiplier = constants.multiplier
    if multiplier is not None and np.size(multiplier) > 1:
        multiplier = np.tile(multiplier, count)
    return Constants(weight, np.tile(constants.bias, count), multiplier)
