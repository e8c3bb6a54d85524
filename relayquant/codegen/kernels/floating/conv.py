"""Specification of a float convolution -> its kernel in NHWC.

Any stride, dilation, padding and groups.

    y[n, oy, ox, o] = sum x[n, oy*s + ky*d - p, ox*s + kx*d - p, i] * w[o, ky, kx, i]
                      (+ bias[o]) (+ residual[n, oy, ox, o]), clipped

Depthwise convolutions have a separate loop. The batch may be symbolic; everything else is static.
Weights are packed at compile time by `pack_conv2d`, or at run time by the kernel of
`make_conv2d_packing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.conv_shape import Conv2dShape
from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    build_kernel,
    emit_vector_loop,
    import_code,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.gemm import (
    FloatDense,
    finish_into,
    list_dense_schedules,
    make_dense,
    plan_dense,
    start_with,
    touch_results,
)
from relayquant.codegen.kernels.floating.stored import Stored, load_floats
from relayquant.codegen.kernels.floating.tile import (
    FLOAT_BYTES,
    PARALLEL_MACS,
    RESIDENT_WEIGHTS,
    Ahead,
    Buffer,
    Expr,
    FloatEpilogue,
    FloatIsa,
    FloatSchedule,
    Panels,
    choose_panels,
    declare_arguments,
    emit_panels,
    emit_tile,
    list_float_schedules,
    prefers_panels,
    static,
)
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS

#: A depthwise multiply-add takes about as long as this many dense ones.
DEPTHWISE_COST = 8


@dataclass(frozen=True)
class FloatConv2d(Conv2dShape):
    """A float convolution and its epilogue.

    `stored` says what is bfloat16 in memory. Only depthwise kernels and those of module `bf16` read
    and write it; all others are for float32.
    """

    epilogue: FloatEpilogue = field(default_factory=FloatEpilogue)
    stored: Stored = field(default_factory=Stored)
    schedule: FloatSchedule | None = None  #: None: the estimated best

    @property
    def out_shape(self) -> tuple[Any, int, int, int]:
        """NHWC shape of the tensor that is written into."""
        return (self.batch, *self.out_size, self.epilogue.pitch(self.out_channels))

    @property
    def is_pointwise(self) -> bool:
        """Whether the convolution is a matrix product over pixels."""
        return (
            self.kernel == (1, 1)
            and self.strides == (1, 1)
            and self.padding == (0, 0, 0, 0)
            and self.groups == 1
        )

    def lay_down(self) -> FloatConv2d:
        """Return a convolution over one column, as in conv1d, as the same convolution over one row.

        The memory is the same, and the taps of a row are contiguous.
        """
        if self.width != 1 or self.kernel[1] != 1 or self.padding[1] or self.padding[3]:
            return self
        top, _, bottom, _ = self.padding
        return replace(
            self,
            height=1,
            width=self.height,
            kernel=self.kernel[::-1],
            strides=self.strides[::-1],
            padding=(0, top, 0, bottom),
            dilation=self.dilation[::-1],
        )

    def as_dense(self) -> FloatDense:
        """Return the same computation as a dense layer, if `is_pointwise`."""
        return FloatDense(self.in_shape, self.out_channels, self.epilogue, self.schedule)


def plan_conv2d(spec: FloatConv2d, isa: FloatIsa) -> tuple[FloatIsa, Panels]:
    """Choose vector width and panels of one group, which determine the layout of the weights."""
    if spec.is_depthwise:
        narrow = isa.narrow(spec.out_channels)
        return narrow, Panels(spec.out_channels, narrow.lanes, 1, narrow.accumulators)
    if spec.is_pointwise:
        return plan_dense(spec.as_dense(), isa)
    pitch = spec.strides[1] * spec.in_channels
    # Windows of neighbouring pixels share cache lines, which stay only if half of a set is enough.
    pitch = pitch if spec.kernel == (1, 1) else 2 * pitch
    isa, panels = choose_panels(spec.group_out, None, isa, pitch)
    return isa, panels.follow(spec.schedule)


def walks_panels(spec: FloatConv2d, isa: FloatIsa, panels: Panels) -> bool:
    """Whether all pixels are computed for each panel of weights."""
    if spec.groups > 1:
        return False
    if spec.schedule is not None:
        return spec.schedule.by_panels
    rows, cols = choose_tile(spec, panels.most_rows)
    tiles = -(-spec.out_size[0] // rows) * -(-spec.out_size[1] // cols)
    image_bytes = prod(spec.padded_size) * spec.in_channels * FLOAT_BYTES
    taps = spec.kernel[0] * spec.kernel[1] * spec.in_channels
    return panels.full >= 4 and prefers_panels(
        panels.vectors * panels.lanes * taps * FLOAT_BYTES,
        (static(spec.batch) or 1) * image_bytes,
        isa,
        many_tiles=tiles >= 32 and image_bytes > RESIDENT_WEIGHTS,
    )


def list_conv2d_schedules(spec: FloatConv2d, isa: FloatIsa) -> list[FloatSchedule]:
    """List schedules of a convolution that is not depthwise, with the estimated best first."""
    if spec.is_pointwise:
        return list_dense_schedules(spec.as_dense(), isa)
    isa, panels = plan_conv2d(spec, isa)
    return list_float_schedules(panels, walks_panels(spec.lay_down(), isa, panels), isa)


def packed_conv2d_size(spec: FloatConv2d, isa: FloatIsa) -> int:
    """Count the elements of the packed weights."""
    isa, panels = plan_conv2d(spec, isa)
    taps = spec.kernel[0] * spec.kernel[1]
    if spec.is_depthwise:
        return taps * spec.out_channels
    return spec.groups * panels.vectors * isa.lanes * taps * spec.group_in


def pack_conv2d(
    weight: NDArray[np.float32], spec: FloatConv2d, isa: FloatIsa
) -> NDArray[np.float32]:
    """Pack OHWI -> flat [group][panel][KH][KW][I][vector of the panel][lanes]; depthwise
    [KH][KW][C].
    """
    isa, panels = plan_conv2d(spec, isa)
    taps = spec.kernel[0] * spec.kernel[1]
    if spec.is_depthwise:
        flat = weight.reshape(spec.out_channels, taps).T
        return np.ascontiguousarray(flat, dtype="float32").reshape(-1)
    starts, parts = panels.starts(), []
    for group in weight.reshape(spec.groups, spec.group_out, taps * spec.group_in):
        for first in range(0, len(starts), panels.blocks):
            chosen = starts[first : first + panels.blocks]
            rows = np.stack([group[s : s + isa.lanes] for s in chosen])
            parts.append(rows.transpose(2, 0, 1).reshape(-1))
    return np.ascontiguousarray(np.concatenate(parts), dtype="float32")


def make_conv2d_packing(spec: FloatConv2d, isa: FloatIsa, name: str = "float_pack") -> PrimFunc:
    """Make PrimFunc(w OHWI, packed), `pack_conv2d` at run time, for weights that vary."""
    isa, panels = plan_conv2d(spec, isa)
    taps = spec.kernel[0] * spec.kernel[1]
    inner = taps * spec.group_in
    size = packed_conv2d_size(spec, isa)

    def body() -> None:
        weight, packed = declare_arguments(
            ("w", (spec.out_channels, *spec.kernel, spec.group_in)), ("packed", (size,))
        )
        if spec.is_depthwise:
            with T.grid(taps, spec.out_channels) as (tap, channel):
                T.buffer_store(
                    packed, weight[channel * taps + tap], [tap * spec.out_channels + channel]
                )
            return
        starts = panels.starts()
        with T.serial(spec.groups) as group:
            source = group * (spec.group_out * inner)
            target = group * (panels.vectors * isa.lanes * inner)
            for first in range(0, len(starts), panels.blocks):
                chosen = starts[first : first + panels.blocks]
                base = target + first * isa.lanes * inner
                with T.serial(inner) as k:
                    for block, channel in enumerate(chosen):
                        with T.serial(isa.lanes) as lane:
                            T.buffer_store(
                                packed,
                                weight[source + (channel + lane) * inner + k],
                                [base + (k * len(chosen) + block) * isa.lanes + lane],
                            )

    return build_kernel(name, body)


def make_conv2d(spec: FloatConv2d, isa: FloatIsa, name: str = "float_conv2d") -> PrimFunc:
    """Make PrimFunc(x, packed weights, (bias,) (residual,) y), for `call_tir`."""
    if spec.is_pointwise:
        return make_dense(spec.as_dense(), isa, name)
    size = packed_conv2d_size(spec, isa)
    isa, panels = plan_conv2d(spec, isa)

    def body() -> None:
        x, weight, bias, residual, y = declare_arguments(
            ("x", spec.stored_shape, spec.stored.data),
            ("w", (size,)),
            ("bias", (spec.out_channels,)) if spec.epilogue.bias else None,
            ("residual", spec.out_shape, spec.stored.residual) if spec.epilogue.residual else None,
            ("y", spec.out_shape, spec.stored.result),
        )
        if spec.is_depthwise:
            emit_depthwise(spec, isa, x, weight, bias, residual, y)
        else:
            emit_conv2d(spec.lay_down(), isa, panels, x, weight, bias, residual, y)

    return build_kernel(name, body)


def count_macs(spec: FloatConv2d) -> int:
    """Count the multiply-adds of one call. A symbolic batch counts as 1."""
    oh, ow = spec.out_size
    taps = spec.kernel[0] * spec.kernel[1] * spec.group_in
    return (static(spec.batch) or 1) * oh * ow * spec.out_channels * taps


def choose_tile(spec: FloatConv2d, most: int) -> tuple[int, int]:
    """Choose (rows, columns) of the pixel tile with the least work at the overlapping ends."""
    oh, ow = spec.out_size
    best: tuple[float, int, int] | None = None
    for rows in range(1, min(oh, 7) + 1):
        for cols in range(1, min(ow, most // rows) + 1):
            pixels, tiles = rows * cols, -(-oh // rows) * -(-ow // cols)
            cost = tiles * (max(pixels, most * 0.6) + 1.0) + 0.01 * rows - 0.001 * pixels
            if best is None or cost < best[0]:
                best = (cost, rows, cols)
    assert best is not None  # a convolution has at least one output pixel
    return best[1:]


@dataclass(frozen=True)
class FloatPlacement:
    """Where a convolution reads and writes, if it is part of another one. Pairs are rows, columns.

    Attributes:
        image: Size of the padded image.
        origin: Pixel of the image under the first tap of the first output.
        size: Size of the whole output.
        stride, offset: Output q of the part is output q * stride + offset of the whole.
        first_weight: Start of the part's packed weights.
    """

    image: tuple[int, int]
    size: tuple[int, int]
    origin: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    offset: tuple[int, int] = (0, 0)
    first_weight: int = 0


def emit_conv2d(
    spec: FloatConv2d,
    isa: FloatIsa,
    panels: Panels,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    residual: Buffer | None,
    y: Buffer,
) -> None:
    """Emit a padded copy of the image, then register tiles of pixels x channels."""
    threads = count_macs(spec) >= PARALLEL_MACS
    image = emit_padding(spec, isa, x, threads) if any(spec.padding) else x
    placement = FloatPlacement(spec.padded_size, spec.out_size)
    emit_tiles(spec, isa, panels, image, weight, bias, residual, y, threads, placement)


def emit_tiles(
    spec: FloatConv2d,
    isa: FloatIsa,
    panels: Panels,
    image: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    residual: Buffer | None,
    y: Buffer,
    threads: bool,
    placement: FloatPlacement,
) -> None:
    """Emit register tiles of pixels x channels over a padded image."""
    (kh, kw), (sh, sw), (dh, dw) = spec.kernel, spec.strides, spec.dilation
    (oh, ow), (height, width), channels = spec.out_size, placement.image, spec.in_channels
    inner, lanes = spec.group_in, isa.lanes
    image_size = height * width * channels
    rows, cols = choose_tile(spec, panels.most_rows)
    n_rows, n_cols = -(-oh // rows), -(-ow // cols)
    vector_size = kh * kw * inner * lanes
    # Along a row of the filter the activations of all taps are contiguous.
    run = kw * inner if dw == 1 and spec.groups == 1 else inner
    (first_row, first_col), (row_step, col_step) = placement.origin, placement.stride
    whole_height, whole_width = placement.size
    pitch = spec.epilogue.pitch(spec.out_channels)

    def tile(
        pixel: tuple[Expr, Expr, Expr],
        group: Expr,
        first: Expr,
        starts: list[Expr],
        ahead: Ahead | None = None,
    ) -> None:
        n, row, col = pixel
        oy = row * rows if oh % rows == 0 else T.min(row * rows, oh - rows)
        ox = col * cols if ow % cols == 0 else T.min(col * cols, ow - cols)
        blocks = len(starts)
        base = placement.first_weight
        base = base + group * (panels.vectors * vector_size) + first * vector_size
        corner = (oy * sh + first_row) * width + (ox * sw + first_col)
        origin = n * image_size + corner * channels + group * inner
        pixels = [(r, c) for r in range(rows) for c in range(cols)]
        to_row, to_col = oy * row_step + placement.offset[0], ox * col_step + placement.offset[1]
        out = ((n * whole_height + to_row) * whole_width + to_col) * pitch

        def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
            with T.grid(kh, kw * inner // run, run) as (ky, kx, k):
                index = (ky * (kw * inner // run) + kx) * run + k
                if ahead is not None:
                    ahead.fetch(weight, index)
                step(
                    (ky * (dh * width) + kx * dw) * channels + k,
                    lambda b: base + (index * blocks + b) * lanes,
                )

        absolute = [group * spec.group_out + s for s in starts]
        targets = [out + (r * row_step * whole_width + c * col_step) * pitch for r, c in pixels]
        emit_tile(
            isa,
            [origin + (r * sh * width + c * sw) * channels for r, c in pixels],
            blocks,
            image,
            weight,
            reduce,
            start_with(bias, absolute, lanes),
            finish_into(y, residual, spec.epilogue, targets, absolute, lanes),
            touch=touch_results(y, residual, spec.epilogue, targets, absolute),
        )

    per_image = n_rows * n_cols

    def locate(index: Expr) -> tuple[Expr, Expr, Expr]:
        """Locate tile `index`: image, row and column."""
        n, rest = T.floordiv(index, per_image), T.floormod(index, per_image)
        return n, T.floordiv(rest, n_cols), T.floormod(rest, n_cols)

    if walks_panels(spec, isa, panels):
        emit_panels(
            panels,
            kh * kw * inner,
            spec.batch,
            per_image,
            threads,
            isa,
            lambda at: tile(locate(at.index), 0, at.first, at.starts, at.ahead),
            placement.first_weight,
        )
        return
    with (T.parallel if threads else T.serial)(spec.batch * per_image) as index:
        pixel = locate(index)
        with T.serial(spec.groups) as group:
            if panels.full:
                with T.serial(panels.full) as panel:
                    tile(pixel, group, panel * panels.blocks, panels.starts_of(panel))
            if panels.tail:
                tile(pixel, group, panels.full * panels.blocks, list(panels.tail))


def emit_padding(spec: FloatConv2d, isa: FloatIsa, x: Buffer, threads: bool) -> Buffer:
    """Emit a scratch copy of all images with a border of zeros."""
    top, left, bottom, right = spec.padding
    height, width, channels = spec.height, spec.width, spec.in_channels
    padded_height, padded_width = spec.padded_size
    padded = T.alloc_buffer((spec.batch * (padded_height * padded_width * channels),), "float32")

    def fill(start: Expr, count: int) -> None:
        if count:
            emit_vector_loop(
                count,
                isa.lanes,
                lambda at, lanes: store_vector(
                    padded, broadcast(T.float32(0), lanes), start + at, lanes
                ),
            )

    with (T.parallel if threads else T.serial)(spec.batch * padded_height) as index:
        n, row = T.floordiv(index, padded_height), T.floormod(index, padded_height)
        to = index * (padded_width * channels)
        outside = T.Or(row < top, row >= top + height) if top or bottom else None

        def inside() -> None:
            source = (n * height + row - top) * (width * channels)
            fill(to, left * channels)
            emit_vector_loop(
                width * channels,
                isa.lanes,
                lambda at, lanes: store_vector(
                    padded, load_vector(x, source + at, lanes), to + left * channels + at, lanes
                ),
            )
            fill(to + (left + width) * channels, right * channels)

        if outside is None:
            inside()
        else:
            with T.If(outside):
                with T.Then():
                    fill(to, padded_width * channels)
                with T.Else():
                    inside()
    return padded


#: Floats of the input rows of one task. They stay in the second-level cache.
TASK_FLOATS = 1 << 15


def emit_depthwise(
    spec: FloatConv2d,
    isa: FloatIsa,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    residual: Buffer | None,
    y: Buffer,
) -> None:
    """Emit tasks of a few output rows times one vector of channels. Padding is not read: a row
    outside the image is skipped at run time, a column outside of it when the kernel is built.
    """
    if isa.bf16 is not None and y.dtype == BF16_BITS:
        import_code(isa.bf16.code)
    (kh, _), (sh, _), (dh, _) = spec.kernel, spec.strides, spec.dilation
    (oh, _), channels, lanes = spec.out_size, spec.in_channels, isa.lanes
    row_size = spec.width * channels
    rows = oh
    while rows > 1 and ((rows - 1) * sh + (kh - 1) * dh + 1) * row_size > TASK_FLOATS:
        rows -= 1
    tasks, vectors = -(-oh // rows), -(-channels // lanes)
    rows = -(-oh // tasks)
    threads = count_macs(spec) * DEPTHWISE_COST >= PARALLEL_MACS
    with (T.parallel if threads else T.serial)(spec.batch * (tasks * vectors)) as index:
        task, vector = T.floordiv(index, vectors), T.floormod(index, vectors)
        n, first = T.floordiv(task, tasks), T.floormod(task, tasks) * rows
        first = T.min(first, oh - rows) if oh % rows else first
        channel = vector * lanes
        channel = T.min(channel, channels - lanes) if channels % lanes else channel
        with T.serial(rows) as r:
            emit_depthwise_row(spec, isa, x, weight, bias, residual, y, n, first + r, channel)


def emit_depthwise_row(
    spec: FloatConv2d,
    isa: FloatIsa,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    residual: Buffer | None,
    y: Buffer,
    n: Expr,
    oy: Expr,
    channel: Expr,
) -> None:
    """Emit one row of results for a vector of channels."""
    (kh, kw), (sh, sw), (dh, dw) = spec.kernel, spec.strides, spec.dilation
    (oh, ow), channels, lanes = spec.out_size, spec.in_channels, isa.lanes
    (top, left, _, _), pitch = spec.padding, spec.epilogue.pitch(spec.out_channels)

    def emit_columns(ox: Expr, count: int) -> None:
        """Emit neighbouring results. A column that is known reads only the taps in the image."""
        accumulators = alloc_vectors(count, lanes, "float32")
        start = start_with(bias, [channel], lanes)
        for acc in accumulators:
            store_vector(acc, start(0), 0, lanes)

        def add_row(ky: Expr, row: Expr) -> None:
            source = spec.find_row(n, row) * (spec.width * channels) + channel
            for kx in range(kw):
                tap = load_vector(weight, (ky * kw + kx) * channels + channel, lanes)
                for c, acc in enumerate(accumulators):
                    column = (ox + c) * sw + (kx * dw - left)
                    if isinstance(column, int) and not 0 <= column < spec.width:
                        continue
                    product = load_floats(x, source + column * channels, lanes) * tap
                    store_vector(acc, load_vector(acc, 0, lanes) + product, 0, lanes)

        with T.serial(kh) as ky:
            row = oy * sh + (ky * dh - top)
            with T.If(T.And(row >= 0, row < spec.height)), T.Then():
                add_row(ky, row)
        out = ((n * oh + oy) * ow + ox) * pitch
        targets = [out + c * pitch for c in range(count)]
        finish = finish_into(y, residual, spec.epilogue, targets, [channel], lanes, isa.bf16)
        for c, acc in enumerate(accumulators):
            finish(c, 0, load_vector(acc, 0, lanes))

    most = max(1, isa.accumulators // 3)
    before = min(-(-left // sw), ow)
    behind = max(min((spec.width + left - (kw - 1) * dw - 1) // sw + 1, ow), before)
    if ow <= most:
        before = behind = ow
    for begin, end in ((0, before), (behind, ow)):
        for ox in range(begin, end, most):
            emit_columns(ox, min(most, end - ox))
    count = behind - before
    if count:
        cols = max(range(1, min(count, most) + 1), key=lambda c: (-(-(-count // c) * (c + 1.5)), c))
        with T.serial(-(-count // cols)) as block:
            at = block * cols
            emit_columns(before + (T.min(at, count - cols) if count % cols else at), cols)
