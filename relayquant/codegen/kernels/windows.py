"""Images of any size -> the window that a convolution reads at a place, as a row; and blocks of
pixels -> the image that they make. For kernels.

All sizes are known only at run time. Neighbours in memory are copied as vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    LEAST_EXTENT,
    PARALLEL_BYTES,
    build_kernel,
    ceil_div,
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
from relayquant.codegen.kernels.row_loops import CHUNK_ROWS
from relayquant.codegen.kernels.unit_permission import emit_if

#: Bytes of the copies of one part, about, and the places of a part at most.
PART_BYTES, PART_ROWS = 1 << 17, 480
#: Bytes of an element.
WIDTHS = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "float32": 4}


@dataclass(frozen=True)
class ConvWindows:
    """Row (n, i, j) has the elements x[n, i * sh + a * dh - top, j * sw + b * dw - left, c] in the
    order (a, b, c), or `fill` for those outside x (N, H, W, C). c are the channels of one group.

    Sequences are images of height 1 whose tensors have no height: x (N, W, C).
    """

    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    dtype: str
    fill: int = 0
    groups: int = 1
    is_sequence: bool = False

    @property
    def places(self) -> tuple[None, ...]:
        """The extents of data and results but for the channels, all of the run time."""
        return (None, None) if self.is_sequence else (None, None, None)

    @property
    def group_channels(self) -> int:
        """Channels of one group."""
        return self.channels // self.groups

    @property
    def row(self) -> int:
        """Elements of one window."""
        return prod(self.kernel) * self.group_channels

    @property
    def is_pixel(self) -> bool:
        """Whether a window is the pixel at its place."""
        is_one = self.kernel == (1, 1) and self.strides == (1, 1) and self.groups == 1
        return is_one and not any(self.padding)

    @property
    def part_rows(self) -> int:
        """Places at most whose windows are copied next to one another, and stay in the cache."""
        fitting = PART_BYTES // (self.row * WIDTHS[self.dtype])
        return min(max(fitting // CHUNK_ROWS, 1) * CHUNK_ROWS, PART_ROWS)


def declare_windows(spec: ConvWindows) -> Buffer:
    """Declare the images."""
    return declare_argument("x", (*spec.places, spec.channels), spec.dtype)


def read_size(tensor: Buffer) -> tuple[Expr, Expr]:
    """Return height and width of images, or of sequences (N, W, C)."""
    *_, height, width = (T.int64(1), *tensor.shape[1:-1])
    return height, width


@dataclass(frozen=True)
class WindowParts:
    """All places of all images, in parts of neighbouring places, and the images that they read.

    Attributes:
        spec: The windows.
        source: The images, flat.
        size: Height and width of an image.
        places: Numbers of images, of rows of places, and of places in a row.
    """

    spec: ConvWindows
    source: Buffer
    size: tuple[Expr, Expr]
    places: tuple[Expr, Expr, Expr]

    @staticmethod
    def of(spec: ConvWindows, x: Buffer, y: Buffer) -> WindowParts:
        """The places of the results y (N, OH, OW, O), read from x (N, H, W, C)."""
        height, width = settle(*read_size(x))
        images, lines, columns = settle(y.shape[0], *read_size(y))
        return WindowParts(spec, flat_view(x), (height, width), (images, lines, columns))

    def emit(
        self, rows: int, macs: int, fewest_macs: int, emit: Callable[[Expr, Expr], None]
    ) -> None:
        """Emit a loop of emit(first place, number of places) for parts of at most `rows` places.

        Threads share it if all places have `fewest_macs`. One place has `macs`.
        """
        (total,) = settle(prod(self.places))
        (parts,) = settle(ceil_div(total, rows))
        least = max(ceil_div(fewest_macs, rows * macs), 2)
        with T.parallel(parts, annotations={LEAST_EXTENT: least}) as part:
            first, end = (T.floordiv(each * total, parts) for each in (part, part + 1))
            first, end = settle(first, end)
            emit(first, end - first)

    def emit_copies(self, first: Expr, count: Expr, target: Buffer, group: Expr = 0) -> None:
        """Emit the windows of a group at `count` places from `first` on, one after the other."""
        _, lines, columns = self.places
        with T.serial(count) as row:
            line, column = settle(
                T.floordiv(first + row, columns), T.floormod(first + row, columns)
            )
            image, line = settle(T.floordiv(line, lines), T.floormod(line, lines))
            self.emit_window((image, line, column), target, row * self.spec.row, group)

    def emit_window(
        self, place: tuple[Expr, Expr, Expr], target: Buffer, at: Expr, group: Expr
    ) -> None:
        """Emit the copy of a group's window to `at` of the target.

        `place` has the numbers of the image, and of the window along its height and width.
        """
        spec, (height, width), (image, row, column) = self.spec, self.size, place
        source, inner, pitch = self.source, spec.group_channels, spec.channels
        top, left, *_ = spec.padding
        taps, step = spec.kernel[1], spec.dilation[1]
        (first,) = settle(column * spec.strides[1] - left)
        channel = 0 if spec.groups == 1 else group * inner
        with T.serial(spec.kernel[0]) as tap:
            (line,) = settle(row * spec.strides[0] + tap * spec.dilation[0] - top)
            (begin,) = settle(((image * height + line) * width + first) * pitch + channel)
            (end,) = settle(at + tap * (taps * inner))

            def emit_pixels(line: Expr = line, begin: Expr = begin, end: Expr = end) -> None:
                with T.serial(taps) as pixel:
                    column = first + pixel * step
                    within = T.And(T.And(line >= 0, line < height), column >= 0)
                    to = end + pixel * inner
                    with T.If(T.And(within, column < width)):
                        with T.Then():
                            from_ = begin + pixel * (step * pitch)
                            move_elements(source, from_, target, to, inner)
                        with T.Else():
                            fill_elements(target, to, spec.fill, inner)

            def move_line(begin: Expr = begin, end: Expr = end) -> None:
                move_elements(source, begin, target, end, taps * inner)

            is_inside: Expr | bool = False
            if step == 1 and taps > 1 and spec.groups == 1:
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
