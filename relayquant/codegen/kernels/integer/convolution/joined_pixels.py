"""Convolution with few output channels -> one whose channels are those of neighbouring pixels.

    y[oy, P * i + p, o]  =  y'[oy, i, p * O + o],    w'[p * O + o, kh, p * s + kw]  =  w[o, kh, kw]

A vector of sums has one output channel in each lane, so one output channel leaves most lanes empty.
The windows of P pixels overlap: they are as wide as kw + (P - 1) * s columns. Weights outside of a
pixel's own window are 0. Results and residuals stay where they are, and so do all bits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relayquant.codegen.kernels.emit import ceil_div
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
        vectors = ceil_div(count * spec.out_channels, isa.lanes)
        run = find_window(spec, count) * spec.in_channels
        return vectors * (height * ceil_div(run, isa.products) + STORE_TIME) / count

    most = max(MOST_LANES // spec.out_channels, 1)
    best = min((d for d in range(1, min(most, width) + 1) if width % d == 0), key=time)
    return best if time(best) < GAIN * time(1) else 1


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
    multiplier = constants.multiplier
    if multiplier is not None and np.size(multiplier) > 1:
        multiplier = np.tile(multiplier, count)
    shape = join_pixels(spec, count).weight_shape
    return Constants(weight.reshape(shape), np.tile(constants.bias, count), multiplier)
