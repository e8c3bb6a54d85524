"""Specification of a linear resize of images -> its kernel, and the tables that it reads.

    y[oy, ox] = mix(mix(x[a, c], x[a, d]), mix(x[b, c], x[b, d])),    mix(u, v) = u (1 - t) + v t

The rows a and b of each row of y, its columns c and d, and the share t of the second one do not
depend on the data, so they are read from tables. Channels behind pixels are mixed as vectors. Of a
plane, rows of x get the width of y first, one value after the other; rows of y are their mixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    concat_vectors,
    declare_arguments,
    emit_vector_loop,
    load_vector,
    loop_over,
    store_vector,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr

LANES = 16
#: Values of y that one task computes, about.
TASK_VALUES = 1 << 15
#: Values of y from which on threads share the tasks.
PARALLEL_VALUES = 1 << 14


@dataclass(frozen=True)
class ResizedAxis:
    """An axis of x and of y: their sizes, and R.image.resize2d's coordinate mode."""

    size: int
    result: int
    mode: str

    @cached_property
    def coordinates(self) -> NDArray[np.float64]:
        """The place in x of each element of y.

        Formulas: ONNX, operator Resize. At run time TVM computes them in float32.
        """
        at, scale = np.arange(self.result, dtype="float64"), self.size / self.result
        if self.mode == "align_corners":
            return at * ((self.size - 1) / (self.result - 1))
        if self.mode == "asymmetric":
            return at * scale
        if self.mode == "pytorch_half_pixel" and self.result == 1:
            return np.zeros(1)
        return (at + 0.5) * scale - 0.5

    @property
    def places(self) -> NDArray[np.int32]:
        """The two elements of x for each one of y: (2, result). Those outside are the last one."""
        first = np.floor(self.coordinates).astype("int32")
        return np.clip([first, first + 1], 0, self.size - 1).astype("int32")

    @property
    def shares(self) -> NDArray[np.float32]:
        """How much each of both counts: (2, result)."""
        second = self.coordinates - np.floor(self.coordinates)
        return np.stack([1 - second, second]).astype("float32")


#: Coordinate modes of `ResizedAxis`.
MODES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


@dataclass(frozen=True)
class LinearResize:
    """x (N, C, H, W) or, unless `is_planar`, (N, H, W, C), float32, static -> y."""

    images: int
    channels: int
    rows: ResizedAxis
    columns: ResizedAxis
    is_planar: bool

    @property
    def is_worth(self) -> bool:
        """Whether the kernel is faster than a loop that computes each place, and can be fused.

        Whole vectors of channels share a place. Of a plane that shrinks, rows in the width of y
        would be computed that nobody reads.
        """
        if self.is_planar:
            return self.rows.size <= self.rows.result
        return self.channels % LANES != 0

    def list_tables(self) -> list[NDArray[np.generic]]:
        """List the operands after x: places of rows and of columns, and shares of both."""
        axes = self.rows, self.columns
        return [*(axis.places for axis in axes), *(axis.shares for axis in axes)]

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of images of so many rows and columns."""
        if self.is_planar:
            return self.images, self.channels, rows, columns
        return self.images, rows, columns, self.channels

    @property
    def task_rows(self) -> int:
        """Rows of y that a task computes."""
        width = self.columns.result if self.is_planar else 0
        return min(ceil_div(TASK_VALUES, width), self.rows.result) if width else 1

    @property
    def read_rows(self) -> int:
        """Most rows of x that a task of a plane reads.

        The last task is moved back, so that it has as many rows as the others.
        """
        first, second = self.rows.places
        starts = np.arange(0, self.rows.result, self.task_rows)
        starts = np.minimum(starts, self.rows.result - self.task_rows)
        return int((second[starts + self.task_rows - 1] - first[starts]).max()) + 1


@dataclass(frozen=True)
class ResizeOperands:
    """Operands as flat buffers."""

    x: Buffer
    row_places: Buffer
    column_places: Buffer
    row_shares: Buffer
    column_shares: Buffer
    y: Buffer


def make_resize(spec: LinearResize) -> PrimFunc:
    """Make PrimFunc(x, row places, column places, row shares, column shares, y)."""
    rows, columns = spec.rows, spec.columns
    values = spec.images * spec.channels * rows.result * columns.result

    def body() -> None:
        operands = ResizeOperands(
            *declare_arguments(
                ("x", spec.shape(rows.size, columns.size), "float32"),
                ("row_places", (2, rows.result), "int32"),
                ("column_places", (2, columns.result), "int32"),
                ("row_shares", (2, rows.result), "float32"),
                ("column_shares", (2, columns.result), "float32"),
                ("y", spec.shape(rows.result, columns.result), "float32"),
            )
        )
        emit = emit_planes if spec.is_planar else emit_pixels
        emit(spec, operands, values >= PARALLEL_VALUES)

    return build_kernel("resize2d", body)


def emit_planes(spec: LinearResize, operands: ResizeOperands, threads: bool) -> None:
    """Emit tasks of some rows of a plane: rows of x in the width of y first, then their mixes."""
    rows, columns, width = spec.rows, spec.columns, spec.columns.result
    tasks, planes = ceil_div(rows.result, spec.task_rows), spec.images * spec.channels
    x, y = operands.x, operands.y
    with loop_over((planes, tasks), threads) as (plane, task):
        start = T.min(task * spec.task_rows, rows.result - spec.task_rows)
        first = T.bind(operands.row_places[start])
        last = operands.row_places[rows.result + start + (spec.task_rows - 1)]
        wide = alloc_workspace(spec.read_rows * width, "float32")
        with T.serial(last - first + 1) as row:
            source = (plane * rows.size + first + row) * columns.size

            def widen(at: Expr, lanes: int, source: Expr = source, row: Expr = row) -> None:
                def gather(side: int) -> Expr:
                    places = (operands.column_places[side * width + at + i] for i in range(lanes))
                    return concat_vectors([x[source + place] for place in places], 1)

                shares = (
                    load_vector(operands.column_shares, side * width + at, lanes) for side in (0, 1)
                )
                store_vector(wide, mix(gather(0), gather(1), *shares), row * width + at, lanes)

            emit_vector_loop(width, LANES, widen)
        with T.serial(spec.task_rows) as row:
            number = start + row
            shares = read_pair(operands.row_shares, number, rows.result)
            sources = [
                T.bind((place - first) * width)
                for place in read_pair(operands.row_places, number, rows.result)
            ]
            target = (plane * rows.result + number) * width

            def store(at: Expr, lanes: int, state: Any = (shares, sources, target)) -> None:
                shares, sources, target = state
                pair = (load_vector(wide, source + at, lanes) for source in sources)
                both = (broadcast(share, lanes) for share in shares)
                store_vector(y, mix(*pair, *both), target + at, lanes)

            emit_vector_loop(width, LANES, store)


def emit_pixels(spec: LinearResize, operands: ResizeOperands, threads: bool) -> None:
    """Emit the pixels of y, each the mix of four pixels of x."""
    rows, columns, channels = spec.rows, spec.columns, spec.channels
    x, sides = operands.x, (0, 1)
    with loop_over((spec.images, rows.result), threads) as (image, number):
        row_shares = read_pair(operands.row_shares, number, rows.result)
        sources = [
            T.bind((image * rows.size + place) * columns.size)
            for place in read_pair(operands.row_places, number, rows.result)
        ]
        with T.serial(columns.result) as column:
            shares = read_pair(operands.column_shares, column, columns.result)
            places = read_pair(operands.column_places, column, columns.result)
            pixels = [
                [T.bind((source + place) * channels) for place in places] for source in sources
            ]
            target = ((image * rows.result + number) * columns.result + column) * channels

            def store(at: Expr, lanes: int, state: Any = (shares, pixels, target)) -> None:
                shares, pixels, target = state
                across = [broadcast(share, lanes) for share in shares]
                mixed = [
                    mix(*(load_vector(x, pixels[row][side] + at, lanes) for side in sides), *across)
                    for row in sides
                ]
                down = (broadcast(share, lanes) for share in row_shares)
                store_vector(operands.y, mix(*mixed, *down), target + at, lanes)

            emit_vector_loop(channels, LANES, store)


def read_pair(table: Buffer, at: Expr, length: int) -> list[Expr]:
    """Read both numbers of a table (2, length) at an index."""
    return [T.bind(table[side * length + at]) for side in (0, 1)]


def mix(first: Expr, second: Expr, share: Expr, other: Expr) -> Expr:
    """Compute first * share + second * other."""
    return first * share + second * other
