"""Images of any size -> the window that a convolution reads at a place, as a row; and blocks of
pixels -> the image that they make. For kernels.

All sizes are known only at run time. Neighbours in memory are copied as vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_BYTES,
    build_kernel,
    constant,
    declare_argument,
    emit_shared_loop,
    emit_vector_loop,
    flat_view,
    load_vector,
    settle,
    store_vector,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.unit_permission import emit_if

#: Bytes of an element.
WIDTHS = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "float32": 4}


@dataclass(frozen=True)
class ConvWindows:
    """Row (n, i, j) has the elements x[n, i * sh + a * dh - top, j * sw + b * dw - left, c] in the
    order (a, b, c), or `fill` for those outside x (N, H, W, C).
    """

    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    dtype: str
    fill: int = 0

    @property
    def row(self) -> int:
        """Elements of one window."""
        return prod(self.kernel) * self.channels

    @property
    def is_pixel(self) -> bool:
        """Whether a window is the pixel at its place."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.padding)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.dtype]


def declare_windows(spec: ConvWindows) -> Buffer:
    """Declare the images."""
    return declare_argument("x", (None, None, None, spec.channels), spec.dtype)


def emit_windows(
    spec: ConvWindows,
    source: Buffer,
    size: tuple[Expr, Expr],
    place: tuple[Expr, Expr, Expr],
    target: Buffer,
    at: Expr,
) -> None:
    """Emit the copy of one window to `at` of the target.

    Args:
        source: The images, flat.
        size: Height and width of an image.
        place: Numbers of the image, and of the window along its height and width.
    """
    (height, width), (image, row, column) = size, place
    top, left, *_ = spec.padding
    taps, step = spec.kernel[1], spec.dilation[1]
    (first,) = settle(column * spec.strides[1] - left)
    with T.serial(spec.kernel[0]) as tap:
        (line,) = settle(row * spec.strides[0] + tap * spec.dilation[0] - top)
        (begin,) = settle(((image * height + line) * width + first) * spec.channels)
        (end,) = settle(at + tap * (taps * spec.channels))

        def emit_pixels(line: Expr = line, begin: Expr = begin, end: Expr = end) -> None:
            with T.serial(taps) as pixel:
                column = first + pixel * step
                within = T.And(T.And(line >= 0, line < height), column >= 0)
                to = end + pixel * spec.channels
                with T.If(T.And(within, column < width)):
                    with T.Then():
                        from_ = begin + pixel * (step * spec.channels)
                        move_elements(source, from_, target, to, spec.channels)
                    with T.Else():
                        fill_elements(target, to, spec.fill, spec.channels)

        def move_line(begin: Expr = begin, end: Expr = end) -> None:
            move_elements(source, begin, target, end, taps * spec.channels)

        is_inside: Expr | bool = False
        if step == 1 and taps > 1:
            columns_fit = T.And(first >= 0, first + (taps - 1) < width)
            is_inside = T.And(columns_fit, T.And(line >= 0, line < height))
        emit_if(is_inside, move_line, emit_pixels)


def move_elements(source: Buffer, begin: Expr, target: Buffer, at: Expr, size: int) -> None:
    """Emit a copy of `size` elements from `begin` of the source to `at` of the target."""

    def move(i: Expr, lanes: int) -> None:
        store_vector(target, load_vector(source, begin + i, lanes), at + i, lanes)

    emit_vector_loop(size, COPY_BYTES // WIDTHS[str(source.dtype)], move)


def fill_elements(target: Buffer, at: Expr, value: int, size: int) -> None:
    """Emit `size` elements of one value at `at` of the target."""

    def store(i: Expr, lanes: int) -> None:
        store_vector(target, constant(str(target.dtype), value, lanes), at + i, lanes)

    emit_vector_loop(size, COPY_BYTES // WIDTHS[str(target.dtype)], store)


@dataclass(frozen=True)
class PixelBlocks:
    """y[n, i, j, c] = x[n, (i + top) // kh, (j + left) // kw, (i + top) % kh, (j + left) % kw, c],
    with x as (N, H, W, KH * KW * C) and y (N, OH, OW, C).
    """

    channels: int
    size: tuple[int, int]
    start: tuple[int, int]
    dtype: str

    @property
    def row(self) -> int:
        """Elements of one block."""
        return prod(self.size) * self.channels


def make_blocks(spec: PixelBlocks) -> PrimFunc:
    """Make PrimFunc(x, y)."""

    def body() -> None:
        x = declare_argument("x", (None, None, None, spec.row), spec.dtype)
        y = declare_argument("y", (None, None, None, spec.channels), spec.dtype)
        source, target = flat_view(x), flat_view(y)
        height, width = settle(x.shape[1], x.shape[2])
        images, rows, columns = settle(*y.shape[:3])
        size = images * rows * columns * (spec.channels * WIDTHS[spec.dtype])
        (high, wide), (top, left) = spec.size, spec.start

        def emit_row(index: Expr) -> None:
            image, row = settle(T.floordiv(index, rows), T.floormod(index, rows) + top)
            block, inside = settle(T.floordiv(row, high), T.floormod(row, high))
            (line,) = settle((image * height + block) * width)
            with T.serial(columns) as column:
                at = column + left
                pixel = inside * wide + T.floormod(at, wide)
                begin = (line + T.floordiv(at, wide)) * spec.row + pixel * spec.channels
                to = (index * columns + column) * spec.channels
                move_elements(source, begin, target, to, spec.channels)

        emit_shared_loop(images * rows, size >= PARALLEL_BYTES, emit_row)

    return build_kernel("blocks", body)
