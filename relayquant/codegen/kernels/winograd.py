"""Winograd's minimal filtering F(4x4, 3x3): parts shared by the integer and float kernels.

    y = A (sum over i of (G w[i] G') * (B d[i] B')) A'

d[i] are 6x6 activations of channel i, w[i] its 3x3 weights, y the 4x4 results, * is elementwise: 36
products instead of 144. The matrices A, B and G are in the modules that use them.

An image is processed in chunks of tile rows that fit the second-level cache. For each chunk: B d B'
of all tiles, then for each of the 36 elements a matrix product of tiles by channels, then the
results of all tiles. If there are few chunks, the output channels of each are split into several
parts, for many threads.

Source: A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, 2015, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.conv_shape import Conv2dShape
from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    alloc_workspace,
    ceil_div,
    emit_prefetch,
    load_vector,
    loop_over,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.unit_permission import count_threads

#: Size of a tile of results, and of the input it is computed from, in pixels per direction.
OUT, IN = 4, 6
POINTS = IN * IN
#: Bytes of transformed activations and products in a chunk.
CHUNK_BYTES = 640 * 1024
#: Least number of chunks times parts of an image, if it has enough channels: work for that many
#: threads.
LEAST_ITEMS = 8
#: Least number of tiles of a chunk, if more chunks are wanted only for threads and parts share
#: inputs. All weights are read for each chunk.
LEAST_TILES = 7
#: Channels of a part.
PART_CHANNELS = 64


def can_transform(spec: Conv2dShape, lanes: int) -> bool:
    """Whether these transforms can compute a convolution.

    It must be 3x3 without stride, dilation or groups, have whole vectors of channels, and have
    results of at least one tile.
    """
    plain = spec.kernel == (3, 3) and spec.groups == 1
    plain = plain and spec.strides == spec.dilation == (1, 1) and min(spec.out_size) >= OUT
    return plain and spec.in_channels % lanes == spec.out_channels % lanes == 0


@dataclass(frozen=True)
class TileResults:
    """Position of the results of tile `number` of a chunk: image, row, column."""

    number: Expr
    image: Expr
    row: Expr
    col: Expr


@dataclass(frozen=True)
class PanelRange:
    """The panels of a part: the first one, and the first one of the next part."""

    first: Expr
    end: Expr

    def locate_next(self, point: Expr, index: Expr, panels: int) -> Expr:
        """Number of the panel of weights behind panel `index` of the part and of element `point`.

        It may be of the next element. An element has `panels` panels.
        """
        count = self.end - self.first
        following = point * panels + self.first + index + 1
        following += T.floordiv(index + 1, count) * (panels - count)  # of the next element
        return T.min(following, POINTS * panels - 1)


@dataclass(frozen=True)
class TileGrid:
    """The tiles of an image, split into chunks and parts.

    Attributes:
        out_size: (rows, columns) of pixels.
        out_channels: Output channels.
        tile_bytes: Bytes of transformed activations and products of a tile.
        images: Least number of images.
        is_parallel: Whether threads share the work.
        shares_inputs: Whether the parts of a chunk read the same transformed activations. Else each
            part transforms again.
        fewest_tiles: Least number of tiles of a chunk, if the image has them.
        chunk_bytes: Bytes of transformed activations and products in a chunk.
        least_chunks: Least number of chunks of all images, if they have enough tiles.
        splits_late: Whether chunks end anywhere in a row of tiles, and have parts only for the
            threads without a chunk, which are counted at run time.
    """

    out_size: tuple[int, int]
    out_channels: int
    tile_bytes: int
    images: int
    is_parallel: bool
    shares_inputs: bool = False
    fewest_tiles: int = 0
    chunk_bytes: int = CHUNK_BYTES
    least_chunks: int = LEAST_ITEMS
    splits_late: bool = False

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """(rows, columns) of tiles. The last one along each axis is moved back into the image."""
        rows, cols = self.out_size
        return ceil_div(rows, OUT), ceil_div(cols, OUT)

    @cached_property
    def unit(self) -> int:
        """Tiles that stay in one chunk: a row of them, or one."""
        return 1 if self.splits_late else self.tiles[1]

    @cached_property
    def units(self) -> int:
        """Units of tiles of an image."""
        return prod(self.tiles) // self.unit

    @cached_property
    def chunks(self) -> int:
        """Chunks of an image: one, or an even number, which two threads share."""
        fewest = ceil_div(self.fewest_tiles, self.unit)
        most = self.chunk_bytes // (self.unit * self.tile_bytes)
        count = ceil_div(self.units, max(most, fewest, 1))
        if self.is_parallel and (self.shares_inputs or self.splits_late):
            wanted = ceil_div(self.least_chunks, self.images)
            least = max(ceil_div(LEAST_TILES, self.unit), fewest)
            count = max(count, min(wanted, self.units // least))
        elif self.is_parallel:
            parts = ceil_div(self.out_channels, PART_CHANNELS)
            count = max(count, ceil_div(LEAST_ITEMS, self.images * parts))
        return min(count + count % 2, self.units) if count > 1 else 1

    @cached_property
    def least_tiles(self) -> int:
        """Tiles of the smallest chunk."""
        return self.units // self.chunks * self.unit

    @cached_property
    def most_tiles(self) -> int:
        """Tiles of the largest chunk."""
        return ceil_div(self.units, self.chunks) * self.unit

    def count_parts(self, panels: int) -> int:
        """Count the parts of `panels` panels that are known now, for threads without a chunk."""
        if not self.is_parallel or self.splits_late:
            return 1
        return min(max(LEAST_ITEMS // (self.images * self.chunks), 1), panels)

    def locate_results(self, n: Expr, row: Expr, col: Expr, number: Expr) -> TileResults:
        """Locate the results of the tile with these indices.

        The last tile of an axis is moved back.
        """
        starts = [
            T.bind(T.min(index * OUT, size - OUT) if size % OUT else index * OUT)
            for index, size in zip((row, col), self.out_size, strict=True)
        ]
        return TileResults(T.bind(number), n, *starts)


@dataclass(frozen=True)
class Share:
    """One unit of work: `tiles` tiles of an image, for some panels."""

    grid: TileGrid
    image: Expr
    first: Expr  #: number of the first tile
    tiles: Expr
    own: PanelRange

    @contextmanager
    def loop_over_tiles(self) -> Iterator[TileResults]:
        """Loop over the tiles in order."""
        with T.serial(self.tiles) as number:
            row, col = split_index(self.first + number, self.grid.tiles)
            yield self.grid.locate_results(self.image, row, col, number)


@contextmanager
def loop_over_shares(grid: TileGrid, batch: Any, panels: int) -> Iterator[Share]:
    """Loop over all chunks and parts of all images, on threads if they share the work."""
    chunks, parts = grid.chunks, grid.count_parts(panels)
    if grid.splits_late and grid.is_parallel:
        parts = T.bind(T.min(ceil_div(count_threads(), grid.images * chunks), panels))
    with loop_over((batch * chunks * parts,), grid.is_parallel) as (index,):
        if grid.shares_inputs:
            # The chunks of a part follow each other, so one thread loads its weights from far
            # memory only once.
            n, part, chunk = split_index(index, (batch, parts, chunks))
        else:  # the parts may be known only at run time
            n, chunk = split_index(T.floordiv(index, parts), (batch, chunks))
            part = T.floormod(index, parts)
        starts = [T.bind((chunk + i) * grid.units // chunks * grid.unit) for i in range(2)]
        own = PanelRange(*[T.bind((part + i) * panels // parts) for i in range(2)])
        yield Share(grid, n, starts[0], T.bind(starts[1] - starts[0]), own)


@dataclass(frozen=True)
class TileMemory:
    """Memory of a thread for transformed activations and their products, of all 36 elements.

    Attributes:
        grid: The tiles.
        channels: Channels of activations, and of the products of the largest part.
        dtypes: Types of activations and products.
        lanes: Lanes of a vector of 4 bytes each.
        is_common: Whether all threads read the transformed activations of all images.
    """

    grid: TileGrid
    channels: tuple[int, int]
    dtypes: tuple[str, str]
    lanes: int
    is_common: bool

    @cached_property
    def input_stride(self) -> int:
        """Distance between elements of transformed activations.

        It is one vector more than the tiles need, or all 36 might fall into one set of the cache.
        """
        tiles = prod(self.grid.tiles) if self.is_common else self.grid.most_tiles
        return tiles * self.channels[0] + 4 * self.lanes // np.dtype(self.dtypes[0]).itemsize

    @cached_property
    def sum_stride(self) -> int:
        """Distance between elements of the products."""
        return self.grid.most_tiles * self.channels[1] + self.lanes


@dataclass(frozen=True)
class TileSteps:
    """What a kernel computes in its own arithmetic.

    Attributes:
        transform: (transformed activations, tile, origin) -> B d B' of the tile, all channels.
            Tile 0 begins at the origin.
        multiply: (transformed activations, origin, products, share) -> for every element,
            activations times weights of the share's part. The share begins at the origin.
        finish: (products, tile, share) -> the results of the tile, all channels of the part.
    """

    transform: Callable[[Buffer, TileResults, Expr], None]
    multiply: Callable[[Buffer, Expr, Buffer, Share], None]
    finish: Callable[[Buffer, TileResults, Share], None]


def emit_shares(memory: TileMemory, steps: TileSteps, batch: Any, panels: int) -> None:
    """Emit all results for padded activations, one share of the work after the other."""
    grid, size = memory.grid, POINTS * memory.input_stride
    rows, cols = grid.tiles
    with ExitStack() as held:

        def allocate(elements: Expr, dtype: str) -> Buffer:
            return held.enter_context(view_buffers(alloc_workspace(elements, dtype)))[0]

        common = allocate(batch * size, memory.dtypes[0]) if memory.is_common else None
        if common is not None:
            with loop_over((batch, rows, cols), grid.is_parallel) as (n, row, col):
                at = grid.locate_results(n, row, col, row * cols + col)
                steps.transform(common, at, n * size)
        share = held.enter_context(loop_over_shares(grid, batch, panels))
        sums = allocate(POINTS * memory.sum_stride, memory.dtypes[1])
        if common is not None:
            origin = T.bind(share.image * size + share.first * memory.channels[0])
            steps.multiply(common, origin, sums, share)
        else:
            inputs = allocate(size, memory.dtypes[0])
            with share.loop_over_tiles() as at:
                steps.transform(inputs, at, 0)
            steps.multiply(inputs, 0, sums, share)
        with share.loop_over_tiles() as at:
            steps.finish(sums, at, share)


def transform_columns(
    load: Callable[[int, Expr], Expr],
    transform: Callable[[list[Expr]], list[Expr]],
    count: int,
    lanes: int,
    dtype: str,
) -> list[list[Expr]]:
    """Emit M v for a 6x6 tile v of vectors. Return its rows: a load of a vector for each column.

    `transform` multiplies M, which has `count` rows, by a column. load(i, j) is an element of v.
    """
    # All columns of a row, one after the other.
    rows = [view_buffer(buffer) for buffer in alloc_vectors(count, IN * lanes, dtype)]
    with T.unroll(IN) as j:
        column = [T.bind(load(i, j)) for i in range(IN)]
        for row, value in zip(rows, transform(column), strict=True):
            store_vector(row, value, j * lanes, lanes)
    return [[load_vector(row, j * lanes, lanes) for j in range(IN)] for row in rows]


def view_buffer(buffer: Buffer) -> Buffer:
    """Make a view of the same memory.

    TVM takes long to find out which part of a buffer is used. It does not do this for a view.
    """
    return T.decl_buffer(buffer.shape, buffer.dtype, data=buffer.data)


@contextmanager
def view_buffers(*buffers: Buffer) -> Iterator[list[Buffer]]:
    """Make views of buffers that keep their memory until the end of the block.

    TVM does not see that views are read, and reuses the memory after the last use it sees. So the
    last use here is a prefetch.
    """
    yield [view_buffer(buffer) for buffer in buffers]
    for buffer in buffers:
        emit_prefetch(buffer, 0, level=1)
