"""Image of a convolution -> the copy whose pixels a matrix unit can load as rows of a tile, as TIR.

Plans with `TileRows.GATHERED`, `TileRows.FOLDED` and `TileRows.SHIFTED` need one.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    alloc_workspace,
    ceil_div,
    constant,
    emit_vector_loop,
    load_vector,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.integer.operands import Image
from relayquant.codegen.kernels.integer.tiled.plan import TiledPlan
from relayquant.codegen.kernels.isa.base import Expr


def emit_gathered(plan: TiledPlan, image: Image, threads: bool) -> Image:
    """Emit a copy that holds the whole window of each output pixel, one after the other."""
    spec, size = plan.spec, plan.pixel_size
    images, height, width = plan.pixel_grid
    rows, columns = spec.kernel
    copy = alloc_workspace(images * height * width * size, image.data.dtype)
    pitch = image.width * spec.in_channels
    pieces = 1 if spec.dilation[1] == 1 else columns
    length = columns // pieces * spec.in_channels
    with (T.parallel if threads else T.serial)(images * height) as line:
        n, oy = split_index(line, (images, height))
        with T.grid(width, rows, pieces) as (ox, row, piece):
            y = oy * spec.strides[0] + row * spec.dilation[0]
            x = ox * spec.strides[1] + piece * spec.dilation[1]
            source = (n * image.height + y) * pitch + x * spec.in_channels
            target = (line * width + ox) * size + (row * pieces + piece) * length

            def move(at: Expr, lanes: int) -> None:
                value = load_vector(image.data, source + at, lanes)
                store_vector(copy, value, target + at, lanes)

            emit_vector_loop(length, plan.row_values, move)
        gap = plan.words * plan.isa.products - plan.run
        if gap and plan.isa.sum_dtype == "float32":  # 0 times whatever is there may be NaN
            with T.serial(width) as ox:
                zeros = constant(copy.dtype, 0, plan.row_values)
                target = (line * width + ox) * size + plan.run
                store_vector(copy, zeros, target, plan.row_values, gap)
    return Image(copy, 1, images * height * width)


def emit_folded(plan: TiledPlan, image: Image, threads: bool) -> Image:
    """Emit a copy in which the pixels of a square, as large as the strides, are one pixel.

    Each vector has some of them. What it has behind them is in a pixel that ends the line. Windows
    that end outside the image have weights of zero there.
    """
    spec, size, count = plan.spec, plan.pixel_size, plan.folded_pixels
    (high, wide), (height, width) = spec.strides, plan.folded_size
    pitch, run, lanes = width + 1, wide * spec.in_channels, plan.row_values
    copy = alloc_workspace(spec.batch * height * pitch * size + lanes, image.data.dtype)
    order = [0] * lanes
    for i in range(count * size):
        pixel, (row, at) = i // size, divmod(i % size, run)
        order[i] = row * (lanes // high) + pixel * run + at
    with (T.parallel if threads else T.serial)(spec.batch * height) as line:
        n, y = split_index(line, (spec.batch, height))
        with T.serial(ceil_div(width, count)) as part:
            x = T.min(part * count, width - count)
            pieces = []
            for row in range(high):
                source_row = n * image.height + T.min(y * high + row, image.height - 1)
                source = source_row * image.width * spec.in_channels + x * run
                pieces.append(load_vector(image.data, source, lanes // high))
            folded = T.Shuffle(pieces, [T.int32(i) for i in order])
            stored = lanes if lanes - count * size <= size else count * size
            store_vector(copy, folded, (line * pitch + x) * size, lanes, stored)
    return Image(copy, height, pitch)


def emit_shifted(plan: TiledPlan, image: Image, threads: bool) -> Image:
    """Emit a copy for each column of the window, of the pixels that it reads, line after line.

    With strides, lines of one phase follow each other: [column][phase][image][line][pixel]. So all
    pixels of an image are rows at equal distances for each tap. An image without a copy has no
    padding yet: it becomes zeros here.
    """
    spec, size = plan.spec, plan.pixel_size
    (images, _, width), lines = plan.pixel_grid, plan.shifted_lines
    columns, stride = spec.kernel[1], spec.strides[0]
    top, left = (0, 0) if plan.needs_copy else spec.padding[:2]
    copy = alloc_workspace(plan.shifted_pixels * size, image.data.dtype)
    with (T.parallel if threads else T.serial)(columns * stride * images * lines) as number:
        column, phase, n, line = split_index(number, (columns, stride, images, lines))
        y = line * stride + phase - top
        with T.serial(width) as pixel:
            x = pixel * spec.strides[1] + column * spec.dilation[1] - left
            source = ((n * image.height + y) * image.width + x) * spec.in_channels
            target = (number * width + pixel) * size

            def move(at: Expr, lanes: int) -> None:
                store_vector(copy, load_vector(image.data, source + at, lanes), target + at, lanes)

            def clear(at: Expr, lanes: int) -> None:
                store_vector(copy, constant(copy.dtype, 0, lanes), target + at, lanes)

            inside = T.And(T.And(y >= 0, y < image.height), T.And(x >= 0, x < image.width))
            with T.If(inside):
                with T.Then():
                    emit_vector_loop(spec.in_channels, plan.row_values, move)
                with T.Else():
                    emit_vector_loop(spec.in_channels, plan.row_values, clear)
    return Image(copy, lines, width)
