"""Depthwise float convolution over images whose size is known only at run time -> its kernel.

Each channel is one lane. A part of neighbouring places is a few segments of rows of results. Of a
segment, columns whose windows leave the image are computed alone, the others in tiles:

    before      | between: tiles of COLUMNS neighbouring results | behind
    (left edge) |                                                | (right edge)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    build_kernel,
    ceil_div,
    load_vector,
    settle,
    store_vector,
)
from relayquant.codegen.kernels.floating.convolution.depthwise import DEPTHWISE_COST
from relayquant.codegen.kernels.floating.convolution.free import FreeFloatConv2d, count_packed
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.gemm import finish_into
from relayquant.codegen.kernels.floating.tile import PARALLEL_MACS, Expr, FloatIsa
from relayquant.codegen.kernels.windows import WindowParts

#: Neighbouring results of a tile, which share loads of weights.
COLUMNS = 4
#: Multiply-adds of one part, about, and its fewest results.
PART_MACS, PART_PLACES = 1 << 17, 16


@dataclass(frozen=True)
class Segment:
    """Neighbouring results in a row.

    Attributes:
        row: Number of the row among those of all images.
        source: First row of the image, among the rows of all images.
        top: Row of the image under the first tap.
        start, stop: Columns of the results.
        before, behind: Columns between which tiles are computed.
    """

    row: Expr
    source: Expr
    top: Expr
    start: Expr
    stop: Expr
    before: Expr
    behind: Expr


def make_free_depthwise(
    spec: FreeFloatConv2d, isa: FloatIsa, name: str = "float_free_depthwise"
) -> PrimFunc:
    """Make PrimFunc(x, packed weights, (bias,) (residual,) y), for `call_tir`."""
    macs = prod(spec.windows.kernel) * spec.outputs
    rows = max(PART_MACS // macs, PART_PLACES)
    isa = isa.narrow(spec.outputs)

    def body() -> None:
        x, y, operands = spec.declare(count_packed(spec, isa))
        parts = WindowParts.of(spec.windows, x, y)

        def emit_part(first: Expr, count: Expr) -> None:
            _, _, columns = parts.places
            begin, end = settle(T.floordiv(first, columns), ceil_div(first + count, columns))
            with T.serial(end - begin) as index:
                (row,) = settle(begin + index)
                segment = locate_segment(parts, row, first, first + count)
                emit_segment(spec, isa, parts, operands, segment)

        parts.emit(rows, macs * DEPTHWISE_COST, PARALLEL_MACS, emit_part)

    return build_kernel(name, body)


def locate_segment(parts: WindowParts, row: Expr, first: Expr, end: Expr) -> Segment:
    """Find the results of a row between two places, and those whose windows are in the image."""
    spec, (height, width), (_, lines, columns) = parts.spec, parts.size, parts.places
    (top, left, _, _), (sh, sw) = spec.padding, spec.strides
    reach = (spec.kernel[1] - 1) * spec.dilation[1]
    start, stop = settle(
        T.max(first - row * columns, T.int64(0)), T.min(end - row * columns, columns)
    )
    inside = T.floordiv(width + (left - reach - 1), sw) + 1
    before, behind = settle(
        T.min(T.max(start, T.int64(-(-left // sw))), stop),
        T.min(T.max(inside, start), stop),
    )
    is_wide = behind - before >= COLUMNS
    before, behind = settle(T.Select(is_wide, before, stop), T.Select(is_wide, behind, stop))
    image, line = T.floordiv(row, lines), T.floormod(row, lines)
    source, above = settle(image * height, line * sh - top)
    return Segment(row, source, above, start, stop, before, behind)


def emit_segment(
    spec: FreeFloatConv2d,
    isa: FloatIsa,
    parts: WindowParts,
    operands: FloatOperands,
    segment: Segment,
) -> None:
    """Emit all channels of a segment, vector by vector."""
    channels, lanes = spec.outputs, isa.lanes
    count = segment.behind - segment.before
    (tiles,) = settle(ceil_div(count, COLUMNS))
    edge = segment.before - segment.start
    with T.serial(-(-channels // lanes)) as vector:
        at = vector * lanes
        (channel,) = settle(T.min(at, channels - lanes) if channels % lanes else at)

        def emit(column: Expr, count: int, channel: Expr = channel) -> None:
            emit_columns(spec, isa, parts, operands, segment, (column, channel), count)

        with T.serial(tiles) as tile:
            (column,) = settle(segment.before + T.min(tile * COLUMNS, count - COLUMNS))
            emit(column, COLUMNS)
        with T.serial(edge + (segment.stop - segment.behind)) as index:
            is_before = index < edge
            column = T.Select(is_before, segment.start + index, segment.behind + (index - edge))
            emit(*settle(column), 1)


def emit_columns(
    spec: FreeFloatConv2d,
    isa: FloatIsa,
    parts: WindowParts,
    operands: FloatOperands,
    segment: Segment,
    place: tuple[Expr, Expr],
    count: int,
) -> None:
    """Emit neighbouring results of a vector of channels. One alone may reach beyond the image.

    `place` has the column of the first result, and the first channel.
    """
    windows, lanes, (column, channel) = spec.windows, isa.lanes, place
    (height, width), (_, _, columns) = parts.size, parts.places
    (kh, kw), (dh, dw), sw = windows.kernel, windows.dilation, windows.strides[1]
    channels, pitch = windows.channels, spec.epilogue.pitch(spec.outputs)
    accumulators = alloc_vectors(count, lanes, "float32")
    for acc in accumulators:
        store_vector(acc, broadcast(T.float32(0), lanes), 0, lanes)
    (first,) = settle(column * sw - windows.padding[1])

    def add_tap(source: Expr, ky: Expr, kx: int) -> None:
        tap = load_vector(operands.weight, (ky * kw + kx) * channels + channel, lanes)
        for c, acc in enumerate(accumulators):
            at = source + (c * sw + kx * dw) * channels
            product = load_vector(operands.data, at, lanes) * tap
            store_vector(acc, load_vector(acc, 0, lanes) + product, 0, lanes)

    with T.serial(kh) as ky:
        row = segment.top + ky * dh
        with T.If(T.And(row >= 0, row < height)), T.Then():
            (source,) = settle(((segment.source + row) * width + first) * channels + channel)
            for kx in range(kw):
                if count > 1:
                    add_tap(source, ky, kx)
                    continue
                under = first + kx * dw
                with T.If(T.And(under >= 0, under < width)), T.Then():
                    add_tap(source, ky, kx)
    out = (segment.row * columns + column) * pitch
    targets = [out + c * pitch for c in range(count)]
    finish = finish_into(operands, spec.epilogue, targets, [channel], lanes)
    for c, acc in enumerate(accumulators):
        finish(c, 0, load_vector(acc, 0, lanes))
