"""Specification of bilinear samples of images at given places -> their kernel.

    y[n, c, p] = sum of x[n, c, corner] * share[corner] over the 4 pixels around place p of image n

All channels of an image share the places. So a task lays some channels of x behind its pixels,
finds corners and shares of a few places at once, and adds vectors of channels. A tile of such sums
is transposed in registers, because y has a plane for each channel. Corners outside of x read a
pixel of zeros behind the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    declare_arguments,
    load_vector,
    loop_over,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.permutation import transpose_vectors

#: Channels and places of a tile.
TILE = 8
#: Most channels of a task. Its image, with these, should stay in the second cache.
TASK_CHANNELS = 32
#: Most pixels of x for each place. An image that is hardly read is not worth being transposed.
MOST_PIXELS = 8
#: Values of y from which on threads share the tasks.
PARALLEL_VALUES = 1 << 14


@dataclass(frozen=True)
class GridSample:
    """x (N, C, H, W) and grid (N, 2, rows, columns), float32 -> y (N, C, rows, columns).

    Attributes:
        images, channels, height, width: Sizes of x.
        rows, columns: Sizes of y.
        is_aligned: -1 and 1 are the middles of the outer pixels (`align_corners`), not their edges.
        is_clipped: Places outside of x are moved to its edge. Otherwise x is 0 there.
    """

    images: int
    channels: int
    height: int
    width: int
    rows: int
    columns: int
    is_aligned: bool
    is_clipped: bool

    @property
    def places(self) -> int:
        """Places in each image."""
        return self.rows * self.columns

    @property
    def pixels(self) -> int:
        """Pixels of each image."""
        return self.height * self.width

    @property
    def task_channels(self) -> int:
        """Channels of a task, whole tiles. The last task is moved back."""
        return min(TASK_CHANNELS, self.channels // TILE * TILE)

    @property
    def is_worth(self) -> bool:
        """Whether the kernel is faster than a loop that finds the corners for each value."""
        fits = min(self.channels, self.pixels, self.places) >= TILE
        return fits and self.pixels <= MOST_PIXELS * self.places


@dataclass(frozen=True)
class Corners:
    """The corners of a tile of places: where their pixels begin, and their shares, (4, TILE)."""

    starts: Buffer
    shares: Buffer


def make_grid_sample(spec: GridSample) -> PrimFunc:
    """Make PrimFunc(x, grid, y)."""
    images, channels = spec.images, spec.channels
    tasks, result = ceil_div(channels, spec.task_channels), (spec.rows, spec.columns)

    def body() -> None:
        x, grid, y = declare_arguments(
            ("x", (images, channels, spec.height, spec.width), "float32"),
            ("grid", (images, 2, *result), "float32"),
            ("y", (images, channels, *result), "float32"),
        )
        threads = images * channels * spec.places >= PARALLEL_VALUES
        with loop_over((images, tasks), threads) as (image, task):
            first = T.min(task * spec.task_channels, channels - spec.task_channels)
            pixels = alloc_workspace((spec.pixels + 1) * spec.task_channels, "float32")
            emit_pixels(spec, x, (image * channels + first) * spec.pixels, pixels)
            corners = Corners(
                alloc_workspace(4 * TILE, "int32"), alloc_workspace(4 * TILE, "float32")
            )
            with T.serial(ceil_div(spec.places, TILE)) as block:
                at = T.min(block * TILE, spec.places - TILE)
                emit_corners(spec, grid, image * 2 * spec.places + at, corners)
                target = (image * channels + first) * spec.places + at
                emit_sums(spec, pixels, corners, y, target)

    return build_kernel("grid_sample", body)


def emit_pixels(spec: GridSample, x: Buffer, source: Expr, pixels: Buffer) -> None:
    """Lay the channels of a task behind the pixels, and a pixel of zeros behind all of them."""
    width = spec.task_channels
    with T.grid(ceil_div(spec.pixels, TILE), width // TILE) as (block, group):
        pixel = T.min(block * TILE, spec.pixels - TILE)
        start = source + group * TILE * spec.pixels + pixel
        rows = [load_vector(x, start + i * spec.pixels, TILE) for i in range(TILE)]
        for i, column in enumerate(transpose_vectors(rows, TILE)):
            store_vector(pixels, column, (pixel + i) * width + group * TILE, TILE)
    with T.serial(width // TILE) as group:
        zeros = constant("float32", 0, TILE)
        store_vector(pixels, zeros, spec.pixels * width + group * TILE, TILE)


def emit_corners(spec: GridSample, grid: Buffer, source: Expr, corners: Corners) -> None:
    """Find the corners of a tile of places."""
    columns, across = emit_axis(spec, load_vector(grid, source, TILE), spec.width)
    rows, down = emit_axis(spec, load_vector(grid, source + spec.places, TILE), spec.height)
    outside = constant("int32", spec.pixels, TILE)
    for side in range(4):
        row, column = rows[side // 2], columns[side % 2]
        start = T.Select(is_inside(row, spec.height), row * spec.width + column, outside)
        start = T.Select(is_inside(column, spec.width), start, outside)
        store_vector(corners.starts, start * spec.task_channels, side * TILE, TILE)
        store_vector(corners.shares, down[side // 2] * across[side % 2], side * TILE, TILE)


def emit_axis(spec: GridSample, at: Expr, size: int) -> tuple[list[Expr], list[Expr]]:
    """Emit the two pixels around places of an axis, int32, and their shares.

    Formulas: `torch.nn.functional.grid_sample`.
    """
    one, half = (constant("float32", value, TILE) for value in (1, 0.5))
    if spec.is_aligned:
        place = (at + one) * constant("float32", size - 1, TILE) * half
    else:
        place = ((at + one) * constant("float32", size, TILE) - one) * half
    if spec.is_clipped:
        place = T.min(
            T.max(place, constant("float32", 0, TILE)), constant("float32", size - 1, TILE)
        )
    place = T.bind(place)
    below = T.bind(T.floor(place))
    share = T.bind(place - below)
    # Places far outside have no int32. Two pixels outside is outside as well.
    near = T.min(T.max(below, constant("float32", -2, TILE)), constant("float32", size, TILE))
    low = T.bind(T.Cast(vector("int32", TILE), near))
    return [low, low + constant("int32", 1, TILE)], [one - share, share]


def is_inside(place: Expr, size: int) -> Expr:
    """Whether places are within 0 .. size. Negative ones are large without their sign."""
    return T.Cast(vector("uint32", TILE), place) < constant("uint32", size, TILE)


def emit_sums(spec: GridSample, pixels: Buffer, corners: Corners, y: Buffer, target: Expr) -> None:
    """Emit the values of y at a tile of places, `target` of the first channel."""
    with T.serial(spec.task_channels // TILE) as group:
        rows = []
        for i in range(TILE):
            terms = [
                load_vector(pixels, corners.starts[side * TILE + i] + group * TILE, TILE)
                * broadcast(corners.shares[side * TILE + i], TILE)
                for side in range(4)
            ]
            rows.append(T.bind(terms[0] + terms[1] + terms[2] + terms[3]))
        for i, column in enumerate(transpose_vectors(rows, TILE)):
            store_vector(y, column, target + (group * TILE + i) * spec.places, TILE)
