"""Permutation of axes that moves the last one -> its kernel, by tiles that registers transpose.

A tile has equally many elements of the last axis of x and of the last axis of y. Its rows are
vectors of x, its columns become vectors of y. So memory is read and written in whole vectors.
A few channels, which are no tile, are interleaved: a vector of each becomes neighbouring pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    PARALLEL_BYTES,
    build_kernel,
    ceil_div,
    declare_arguments,
    emit_vector_loop,
    load_vector,
    loop_over,
    store_vector,
)
from relayquant.codegen.kernels.isa.base import Expr

#: Bytes of an element -> rows and columns of a tile.
TILES = {1: 16, 2: 8, 4: 8}
#: Most channels that are interleaved, and elements of a vector of one of them.
MOST_INTERLEAVED, INTERLEAVED_LANES = 4, 16
#: Tiles along the last axis of x that one task transposes.
TASK_TILES = 32


@dataclass(frozen=True)
class MovedAxis:
    """An axis of a permutation: its size, and the distance of its elements in x and in y."""

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class Permutation:
    """y = permute_dims(x, axes), where an element of x has `width` bytes."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    width: int

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of y."""
        return tuple(self.shape[axis] for axis in self.axes)

    def list_axes(self) -> list[MovedAxis]:
        """List the axes of y in order. Neighbours that stay neighbours are one axis."""
        axes: list[MovedAxis] = []
        for at, axis in enumerate(self.axes):
            size = self.shape[axis]
            source, target = prod(self.shape[axis + 1 :]), prod(self.out_shape[at + 1 :])
            if size == 1:
                continue
            if axes and axes[-1].source == source * size:
                axes[-1] = MovedAxis(axes[-1].size * size, source, target)
            else:
                axes.append(MovedAxis(size, source, target))
        return axes

    @property
    def has_kernel(self) -> bool:
        """Whether there is a kernel."""
        return self.fits_tiles or self.interleaves

    @property
    def interleaves(self) -> bool:
        """Whether the last axis of x becomes pixels, and the last one of y is a few channels."""
        axes = self.list_axes()
        if len(axes) < 2 or self.width not in TILES:
            return False
        *_, pixels, channels = axes
        is_long = pixels.source == 1 and pixels.size >= INTERLEAVED_LANES
        return is_long and channels.size <= MOST_INTERLEAVED

    @property
    def fits_tiles(self) -> bool:
        """Whether the last axes of x and y are two axes of at least one tile."""
        axes, tile = self.list_axes(), TILES.get(self.width)
        if tile is None or len(axes) < 2 or axes[-1].source == 1:
            return False
        return all(axis.size >= tile for axis in axes if axis.source == 1 or axis.target == 1)


def make_permutation(spec: Permutation) -> PrimFunc:
    """Make PrimFunc(x, y) of a permutation that has a kernel.

    The last tile of an axis overlaps its neighbour if the axis is no multiple of a tile.
    """
    return (make_tiled if spec.fits_tiles else make_interleaving)(spec)


def make_interleaving(spec: Permutation) -> PrimFunc:
    """Make the kernel of a permutation that interleaves a few channels."""
    *others, pixels, channels = spec.list_axes()
    lanes, count = INTERLEAVED_LANES, channels.size
    order = [T.int32(row * lanes + i) for i in range(lanes) for row in range(count)]

    def body() -> None:
        x, y = declare_arguments(("x", spec.shape, spec.dtype), ("y", spec.out_shape, spec.dtype))
        threads = prod(spec.shape) * spec.width >= PARALLEL_BYTES
        sizes = (*(axis.size for axis in others), ceil_div(pixels.size, lanes))
        with loop_over(sizes, threads) as (*at, block):
            source = sum(i * axis.source for i, axis in zip(at, others, strict=True))
            target = sum(i * axis.target for i, axis in zip(at, others, strict=True))
            pixel = T.min(block * lanes, pixels.size - lanes)
            rows = [
                load_vector(x, source + i * channels.source + pixel, lanes) for i in range(count)
            ]
            store_vector(y, T.Shuffle(rows, order), target + pixel * count, lanes * count)

    return build_kernel("permutation", body)


def make_tiled(spec: Permutation) -> PrimFunc:
    """Make the kernel of a permutation that fits tiles."""
    *outer, last = spec.list_axes()
    first = next(axis for axis in outer if axis.source == 1)
    others = [axis for axis in outer if axis is not first]
    tile = TILES[spec.width]
    line = max(CACHE_LINE // spec.width, tile)  # a task fills whole cache lines of y
    blocks, steps = ceil_div(last.size, line), ceil_div(first.size, tile)
    chunks = ceil_div(steps, TASK_TILES)
    steps = ceil_div(steps, chunks)

    def body() -> None:
        x, y = declare_arguments(("x", spec.shape, spec.dtype), ("y", spec.out_shape, spec.dtype))

        def emit_tile(source: Expr, target: Expr) -> None:
            rows = [load_vector(x, source + i * last.source, tile) for i in range(tile)]
            for j, column in enumerate(transpose_vectors(rows, tile)):
                store_vector(y, column, target + j * first.target, tile)

        sizes = tuple(axis.size for axis in others)
        threads = prod(spec.shape) * spec.width >= PARALLEL_BYTES
        with loop_over((*sizes, blocks, chunks), threads) as (*at, block, chunk):
            source = sum(i * axis.source for i, axis in zip(at, others, strict=True))
            target = sum(i * axis.target for i, axis in zip(at, others, strict=True))
            with T.grid(steps, line // tile) as (step, part):
                column = T.min((chunk * steps + step) * tile, first.size - tile)
                row = T.min(block * line + part * tile, last.size - tile)
                emit_tile(
                    source + row * last.source + column,
                    target + column * first.target + row,
                )

    return build_kernel("permutation", body)


def make_moved_rows(spec: Permutation) -> PrimFunc:
    """Make PrimFunc(x, y) of a permutation of float32 that keeps the last axis, row by row."""
    *others, row = spec.list_axes()
    assert row.source == row.target == 1

    def body() -> None:
        x, y = declare_arguments(("x", spec.shape, spec.dtype), ("y", spec.out_shape, spec.dtype))
        threads = prod(spec.shape) * spec.width >= PARALLEL_BYTES
        with loop_over(tuple(axis.size for axis in others), threads) as at:
            source = sum(i * axis.source for i, axis in zip(at, others, strict=True))
            target = sum(i * axis.target for i, axis in zip(at, others, strict=True))
            emit_vector_loop(
                row.size,
                CACHE_LINE // spec.width,
                lambda k, lanes: store_vector(
                    y, load_vector(x, source + k, lanes), target + k, lanes
                ),
            )

    return build_kernel("moved_rows", body)


def transpose_vectors(rows: list[Expr], size: int) -> list[Expr]:
    """Transpose `size` vectors of `size` elements, a power of two.

    Interleaving the upper with the lower half of the rows moves one bit of each element's row
    number into its column number; after all bits rows are columns.
    """
    half = size // 2
    for _ in range(size.bit_length() - 1):
        rows = [
            T.bind(
                T.Shuffle(
                    [rows[i], rows[i + half]],
                    [T.int32(at) for k in range(half) for at in (k + low, k + low + size)],
                )
            )
            for i in range(half)
            for low in (0, half)
        ]
    return rows
