"""Depthwise convolution of integers over images whose size is known only at run time -> its kernel.

`rows` and `blocks` are planned for one height and width. Here a pixel is computed alone, in vectors
of channels. A tap outside the image reads the zero point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    build_kernel,
    constant,
    declare_argument,
    emit_shared_loop,
    emit_vector_loop,
    flat_view,
    load_vector,
    settle,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.integer.operands import declare_multiplier
from relayquant.codegen.kernels.integer.specs import Constants
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.windows import ConvWindows, declare_windows, read_size


@dataclass(frozen=True)
class FreeDepthwise:
    """x (N, H, W, C) of bytes, weights (C, KH, KW, 1) -> y (N, OH, OW, C), without a residual."""

    windows: ConvWindows
    epilogue: Epilogue

    def list_taps(self) -> list[tuple[int, int, int]]:
        """(row, column, number) of each tap relative to the first pixel of its window."""
        (high, wide), (dy, dx) = self.windows.kernel, self.windows.dilation
        return [(i * dy, j * dx, i * wide + j) for i in range(high) for j in range(wide)]

    def pack(self, constants: Constants) -> tuple[np.ndarray, ...]:
        """Weights (KH * KW * C,) and bias (C,), int32, and the multipliers, if there are any."""
        channels = self.windows.channels
        taps = constants.weight.reshape(channels, -1).T.astype("int32")
        bias = constants.bias - np.int32(self.windows.fill) * taps.sum(axis=0, dtype="int32")
        packed = (np.ascontiguousarray(taps).reshape(-1), bias.astype("int32"))
        if constants.multiplier is None:
            return packed
        every = np.broadcast_to(constants.multiplier, (self.epilogue.multipliers, channels))
        return (*packed, every.astype("float32").reshape(-1))


@dataclass(frozen=True)
class Pixel:
    """The window of one result: its first pixel, also as an element, and the image's size."""

    row: Expr
    column: Expr
    begin: Expr
    height: Expr
    width: Expr


def build_free_depthwise(spec: FreeDepthwise, lanes: int, name: str) -> PrimFunc:
    """Make PrimFunc(x, weights, bias, (multiplier,) y)."""
    windows, taps = spec.windows, spec.list_taps()
    channels = windows.channels

    def body() -> None:
        x = declare_windows(windows)
        weight = declare_argument("weight", (len(taps) * channels,), "int32")
        bias = declare_argument("bias", (channels,), "int32")
        multiplier = declare_multiplier(spec.epilogue, channels)
        factors = None if multiplier is None else declare_argument(*multiplier)
        y = declare_argument("y", (*windows.places, channels), spec.epilogue.dtype)
        source, target = flat_view(x), flat_view(y)
        height, width = settle(*read_size(x))
        images, rows, columns = settle(y.shape[0], *read_size(y))
        macs = images * rows * columns * (len(taps) * channels)

        def emit_pixel(pixel: Pixel, at: Expr, add: Callable[..., None]) -> None:
            def emit(offset: Expr, lanes: int) -> None:
                (sums,) = alloc_vectors(1, lanes)
                store_vector(sums, load_vector(bias, offset, lanes), 0, lanes)
                for tap in taps:
                    add(pixel, tap, sums, offset, lanes)
                value = load_vector(sums, 0, lanes)
                count = spec.epilogue.multipliers
                own = [load_vector(factors, offset + i * channels, lanes) for i in range(count)]
                result = spec.epilogue.emit(value, own, None, lanes)
                store_vector(target, result, at + offset, lanes)

            emit_vector_loop(channels, lanes, emit)

        def add_product(
            pixel: Pixel, tap: tuple[int, int, int], sums: Buffer, offset: Expr, lanes: int
        ) -> None:
            down, right, number = tap
            begin = pixel.begin + (down * pixel.width + right) * channels + offset
            value = T.Cast(vector("int32", lanes), load_vector(source, begin, lanes))
            product = value * load_vector(weight, number * channels + offset, lanes)
            store_vector(sums, load_vector(sums, 0, lanes) + product, 0, lanes)

        def add_checked(
            pixel: Pixel, tap: tuple[int, int, int], sums: Buffer, offset: Expr, lanes: int
        ) -> None:
            down, right, number = tap
            row, column = pixel.row + down, pixel.column + right
            within = T.And(T.And(row >= 0, row < pixel.height), column >= 0)
            with T.If(T.And(within, column < pixel.width)):
                with T.Then():
                    add_product(pixel, tap, sums, offset, lanes)
                with T.Else():
                    weights = load_vector(weight, number * channels + offset, lanes)
                    product = weights * constant("int32", windows.fill, lanes)
                    store_vector(sums, load_vector(sums, 0, lanes) + product, 0, lanes)

        def emit_row(index: Expr) -> None:
            image, line = settle(T.floordiv(index, rows), T.floormod(index, rows))
            (row,) = settle(line * windows.strides[0] - windows.padding[0])
            last_row, last_column, _ = taps[-1]
            with T.serial(columns) as place:
                (column,) = settle(place * windows.strides[1] - windows.padding[1])
                (begin,) = settle(((image * height + row) * width + column) * channels)
                pixel = Pixel(row, column, begin, height, width)
                at = (index * columns + place) * channels
                rows_fit = T.And(row >= 0, row + last_row < height)
                columns_fit = T.And(column >= 0, column + last_column < width)
                with T.If(T.And(rows_fit, columns_fit)):
                    with T.Then():
                        emit_pixel(pixel, at, add_product)
                    with T.Else():
                        emit_pixel(pixel, at, add_checked)

        emit_shared_loop(images * rows, macs >= PARALLEL_THRESHOLD, emit_row)

    return build_kernel(name, body)
