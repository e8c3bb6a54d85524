"""Specification of a pool or mean over integer NHWC data -> its kernel.

Maximum takes 8 or 16 bits or float32, average takes 8 or 16 bits, in the default arithmetic.

Average: S = int32 sum of (x - z_in) over the window; t = RN(float32(S) * RN(m / float32(count)));
then rounded and clamped as in `epilogue`. Padded pixels contribute 0 and count only with
`count_include_pad`. Pixels beyond the padding, which `ceil_mode` can reach, never count. A mean is
an average over a window as large as the image. The averaged axes become the height of that image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.windows import count_windows
from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    alloc_vectors,
    broadcast,
    build_kernel,
    constant,
    declare_arguments,
    emit_sum,
    emit_vector_loop,
    load_vector,
    loop_over,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.stored import Stored, load_floats, store_floats
from relayquant.codegen.kernels.integer.elementwise import Space, check_integer_output
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.errors import format_count

#: From this many read elements on, threads share the work.
PARALLEL_READS = 1 << 18
#: Fewest rows of results that threads share, instead of pixels.
FEWEST_ROWS = 16
#: Channels summed at once; and in sums of 16 bits.
LANES, NARROW_LANES = 16, 64
#: Fewest values of a sum of 16 bits. Fewer do not repay that it is converted to 32 bits.
FEWEST_NARROW = 8
#: The integer of minus infinity; see `order_bits`.
LOWEST_ORDERED = 0x807F - 0x10000


@dataclass(frozen=True)
class PoolWindow:
    """A pooling window over static NHWC data. `padding` is (top, left, bottom, right)."""

    batch: int
    height: int
    width: int
    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False

    def __post_init__(self) -> None:
        if min(self.out_size) < 1:
            raise ValueError(
                f"PoolWindow: a {self.kernel} window with dilation {self.dilation} does not fit "
                f"into {self.height}x{self.width} with padding {self.padding}.",
            )

    @property
    def out_size(self) -> tuple[int, int]:
        """(OH, OW)."""
        height, width = (
            count_windows(size, k, s, d, pads, self.ceil_mode)
            for size, k, s, d, pads in zip(
                (self.height, self.width), self.kernel, self.strides, self.dilation, self.pads,
                strict=True,
            )
        )  # fmt: skip
        return height, width

    @property
    def pads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(before, after) for each axis."""
        top, left, bottom, right = self.padding
        return (top, bottom), (left, right)

    @property
    def in_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.height, self.width, self.channels)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, *self.out_size, self.channels)

    @property
    def leaves_image(self) -> bool:
        """Whether some window reaches a pixel that is not in the data."""
        return self.reaches_beyond(((0, 0), (0, 0)))

    def reaches_beyond(self, pads: Sequence[tuple[int, int]]) -> bool:
        """Whether some window reaches a pixel that is neither in the data nor in these pads."""
        return any(
            own > before or (out - 1) * s + (k - 1) * d - own >= size + after
            for out, s, k, d, size, (own, _), (before, after) in zip(
                self.out_size, self.strides, self.kernel, self.dilation,
                (self.height, self.width), self.pads, pads, strict=True,
            )
        )  # fmt: skip

    @property
    def misses_image(self) -> bool:
        """Whether some window may lie completely in the padding."""
        return any(
            max(pads) > (k - 1) * d
            for pads, k, d in zip(self.pads, self.kernel, self.dilation, strict=True)
        )

    @property
    def threads(self) -> bool:
        return prod(self.out_shape) * prod(self.kernel) >= PARALLEL_READS


@dataclass(frozen=True)
class MaxPool2d:
    """Maximum over the pixels of the window that lie in the data.

    The affine space stays the same. `stored` is for float32: it may be bfloat16 in memory.
    """

    window: PoolWindow
    dtype: str = "uint8"
    stored: Stored = field(default_factory=Stored)

    @property
    def is_float(self) -> bool:
        return self.dtype == "float32"


@dataclass(frozen=True)
class AvgPool2d:
    """Average, requantized. `data.multiplier` is float32(double(s_in) / double(s_out))."""

    window: PoolWindow
    data: Space
    out: Epilogue
    count_include_pad: bool = False


def most_values(dtype: str) -> int:
    """Return how many values of a dtype, minus any zero point, always have a sum in int32."""
    low, high = INTEGER_LIMITS[dtype]
    return INTEGER_LIMITS["int32"][1] // (high - low)


@dataclass(frozen=True)
class Mean:
    """Mean over neighbouring axes of `shape`, `first` to `last`. Otherwise like `AvgPool2d`."""

    shape: tuple[int, ...]
    first: int
    last: int
    data: Space
    out: Epilogue

    @property
    def extents(self) -> tuple[int, int, int]:
        """(outer, count, inner): number of elements before, along and after the axes."""
        ends = self.first, self.last + 1
        return (
            prod(self.shape[: ends[0]]),
            prod(self.shape[ends[0] : ends[1]]),
            prod(self.shape[ends[1] :]),
        )


@contextmanager
def loop_over_pixels(window: PoolWindow) -> Iterator[list[Expr]]:
    """Emit the loop over (image, row, column) of the results, and yield the coordinates.

    Threads share rows, so that what depends on the row is computed once for all of its pixels. They
    share pixels if there are few rows.
    """
    *rows, columns = window.out_shape[:3]
    if prod(rows) < FEWEST_ROWS:
        with loop_over((*rows, columns), window.threads) as pixel:
            yield pixel
        return
    with loop_over(tuple(rows), window.threads) as row, T.serial(columns) as column:
        yield [*row, column]


def emit_tap(window: PoolWindow, out: Expr, tap: Expr, axis: int) -> tuple[Expr, Expr]:
    """Return a tap's coordinate along an axis, clamped to the data, and whether it was inside."""
    size = (window.height, window.width)[axis]
    at = out * window.strides[axis] + tap * window.dilation[axis] - window.padding[axis]
    if not window.leaves_image:
        return at, T.bool(True)
    return T.max(T.min(at, size - 1), 0), T.And(at >= 0, at < size)


def build_max_pool2d(spec: MaxPool2d, name: str = "max_pool2d") -> PrimFunc:
    """Make PrimFunc(x, y), both NHWC.

    From bfloat16 to bfloat16, integers in the order of the numbers are compared.
    """
    window = spec.window
    (kh, kw), channels = window.kernel, window.channels
    dtypes = (spec.stored.data, spec.stored.result) if spec.is_float else (spec.dtype,) * 2
    is_ordered = dtypes == (BF16_BITS, BF16_BITS)
    dtype = "int16" if is_ordered else spec.dtype
    lowest = float("-inf") if spec.is_float else INTEGER_LIMITS[dtype][0]
    if is_ordered:
        lowest = LOWEST_ORDERED

    def body() -> None:
        data, out = declare_arguments(
            ("x", window.in_shape, dtypes[0]), ("y", window.out_shape, dtypes[1])
        )

        def load(buffer: Buffer, at: Expr, lanes: int) -> Expr:
            if not spec.is_float:
                return load_vector(buffer, at, lanes)
            if not is_ordered:
                return load_floats(buffer, at, lanes)
            bits = load_vector(buffer, at, lanes)
            return order_bits(T.reinterpret(vector("int16", lanes), bits), lanes)

        with loop_over_pixels(window) as (n, oy, ox):

            def step(channel: Expr, lanes: int) -> None:
                (best,) = alloc_vectors(1, lanes, dtype)
                store_vector(best, constant(dtype, lowest, lanes), 0, lanes)
                with T.grid(kh, kw) as (i, j):
                    y, y_inside = emit_tap(window, oy, i, 0)
                    x, x_inside = emit_tap(window, ox, j, 1)
                    at = ((n * window.height + y) * window.width + x) * channels + channel
                    value = load(data, at, lanes)
                    # Without dilation a pixel clamped to the data is another pixel of the window.
                    if window.misses_image or (window.leaves_image and window.dilation != (1, 1)):
                        inside = broadcast(T.And(y_inside, x_inside), lanes)
                        value = T.Select(inside, value, constant(dtype, lowest, lanes))
                    store_vector(best, T.max(load_vector(best, 0, lanes), value), 0, lanes)
                height, width = window.out_size
                at = ((n * height + oy) * width + ox) * channels + channel
                value = load_vector(best, 0, lanes)
                if is_ordered:
                    bits = T.reinterpret(vector(BF16_BITS, lanes), order_bits(value, lanes))
                    store_vector(out, bits, at, lanes)
                elif spec.is_float:
                    store_floats(out, value, at, lanes, isa=None)
                else:
                    store_vector(out, value, at, lanes)

            emit_vector_loop(channels, COPY_BYTES, step)

    return build_kernel(name, body)


def order_bits(bits: Expr, lanes: int) -> Expr:
    """Map the bits of bfloat16, as int16, to integers in the order of the numbers; and back.

    -0 comes before 0. NaN come behind infinity, or with a sign before all numbers.
    """
    sign = T.shift_right(bits, constant("int16", 15, lanes))
    return T.bitwise_xor(bits, T.bitwise_and(sign, constant("int16", 0x7FFF, lanes)))


def build_avg_pool2d(
    spec: AvgPool2d,
    name: str = "avg_pool2d",
    in_shape: tuple[int, ...] | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> PrimFunc:
    """Make PrimFunc(x, y), both NHWC, or with the given shapes of equally many elements."""
    check_integer_output("AvgPool2d", spec.out)
    window = spec.window
    counted = window.pads if spec.count_include_pad else ((0, 0), (0, 0))
    sum_dtype = choose_sums(spec)
    (kh, kw), channels = window.kernel, window.channels

    def body() -> None:
        data, out = declare_arguments(
            ("x", in_shape or window.in_shape, spec.data.dtype),
            ("y", out_shape or window.out_shape, spec.out.dtype),
        )
        with loop_over_pixels(window) as (n, oy, ox):
            count: Expr = T.int32(kh * kw)
            if window.reaches_beyond(counted):
                count = emit_count(window, oy, 0, counted) * emit_count(window, ox, 1, counted)
            factor = T.float32(spec.data.multiplier) / T.Cast("float32", count)

            def step(channel: Expr, lanes: int) -> None:
                (total,) = alloc_vectors(1, lanes, sum_dtype)
                store_vector(total, constant(sum_dtype, 0, lanes), 0, lanes)
                with T.grid(kh, kw) as (i, j):
                    y, y_inside = emit_tap(window, oy, i, 0)
                    x, x_inside = emit_tap(window, ox, j, 1)
                    at = ((n * window.height + y) * window.width + x) * channels + channel
                    value = T.Cast(vector(sum_dtype, lanes), load_vector(data, at, lanes))
                    if window.leaves_image:
                        value = value - constant(sum_dtype, spec.data.zero_point, lanes)
                        inside = broadcast(T.And(y_inside, x_inside), lanes)
                        value = T.Select(inside, value, constant(sum_dtype, 0, lanes))
                    store_vector(total, load_vector(total, 0, lanes) + value, 0, lanes)
                sums = T.Cast(vector("int32", lanes), load_vector(total, 0, lanes))
                if not window.leaves_image:
                    sums = sums - constant("int32", kh * kw * spec.data.zero_point, lanes)
                real = T.Cast(vector("float32", lanes), sums)
                value = spec.out.emit_rounded(real * broadcast(factor, lanes), lanes)
                height, width = window.out_size
                at = ((n * height + oy) * width + ox) * channels + channel
                store_vector(out, value, at, lanes)

            emit_vector_loop(channels, LANES if sum_dtype == "int32" else NARROW_LANES, step)

    return build_kernel(name, body)


def choose_sums(spec: AvgPool2d) -> str:
    """Return the dtype of the sums of windows: 16 bits if they hold all sums of the values.

    The zero point is subtracted from the whole sum, or from each value if windows leave the image.
    """
    dtype, count = spec.data.dtype, prod(spec.window.kernel)
    narrow = "uint16" if dtype.startswith("u") else "int16"
    low, high = (count * limit for limit in INTEGER_LIMITS[dtype])
    fits = INTEGER_LIMITS[narrow][0] <= low and high <= INTEGER_LIMITS[narrow][1]
    is_narrow = fits and count >= FEWEST_NARROW and not spec.window.leaves_image
    return narrow if is_narrow else "int32"


def build_mean(
    spec: Mean, name: str = "mean", out_shape: tuple[int, ...] | None = None
) -> PrimFunc:
    """Make PrimFunc(x, y). y has the averaged axes with extent 1, or the given shape.

    Raises:
        ValueError: `out` does not store integers, or too many values are averaged for an int32 sum.
    """
    check_integer_output("Mean", spec.out)
    outer, count, inner = spec.extents
    out_shape = (
        out_shape
        if out_shape is not None
        else (
            *spec.shape[: spec.first],
            *[1] * (spec.last + 1 - spec.first),
            *spec.shape[spec.last + 1 :],
        )
    )
    if inner > 1:
        window = PoolWindow(outer, count, 1, inner, (count, 1))
        return build_avg_pool2d(AvgPool2d(window, spec.data, spec.out), name, spec.shape, out_shape)
    most = most_values(spec.data.dtype)
    if count > most:
        raise ValueError(
            f"Mean: {format_count(count, 'value')} of {spec.data.dtype}; allowed: up to {most}.",
        )
    factor = np.float32(spec.data.multiplier) / np.float32(count)

    def body() -> None:
        data, out = declare_arguments(
            ("x", spec.shape, spec.data.dtype), ("y", out_shape, spec.out.dtype)
        )
        with loop_over((outer,), outer > 1 and outer * count >= PARALLEL_READS) as (row,):
            total = emit_sum(data, row * count, count) - T.int32(count * spec.data.zero_point)
            value = T.Cast("float32", total) * T.float32(float(factor))
            store_vector(out, spec.out.emit_rounded(value, 1), row, 1)

    return build_kernel(name, body)


def emit_count(window: PoolWindow, out: Expr, axis: int, pads: Sequence[tuple[int, int]]) -> Expr:
    """Count the taps of the window in the data or in these `pads` along an axis.

    At least 1, so that it can divide.
    """
    size = (window.height, window.width)[axis]
    (before, after), count = pads[axis], T.int32(0)
    for tap in range(window.kernel[axis]):
        at = out * window.strides[axis] + (tap * window.dilation[axis] - window.padding[axis])
        count = count + T.Cast("int32", T.And(at >= -before, at < size + after))
    return T.max(count, 1)
