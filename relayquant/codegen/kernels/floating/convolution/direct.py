"""Plan of a float convolution -> its kernel in NHWC.

Any stride, dilation, padding and groups.

    y[n, oy, ox, o] = sum x[n, oy*s + ky*d - p, ox*s + kx*d - p, i] * w[o, ky, kx, i]
                      (+ bias[o]) (+ residual[n, oy, ox, o]), clipped

The batch may be symbolic; everything else is static. Weights are packed at compile time by
`pack_conv2d`, or at run time by the kernel of `make_conv2d_packing`.

    specification -> 1x1: a dense layer | depthwise: module depthwise | else: padded image -> tiles
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    broadcast,
    build_kernel,
    emit_vector_loop,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.convolution.depthwise import emit_depthwise
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    choose_tile,
    count_macs,
    packed_conv2d_size,
    plan_conv2d,
    walks_panels,
)
from relayquant.codegen.kernels.floating.gemm import (
    finish_into,
    make_dense,
    touch_results,
)
from relayquant.codegen.kernels.floating.tile import (
    PARALLEL_MACS,
    Ahead,
    Buffer,
    Expr,
    FloatIsa,
    Panels,
    declare_arguments,
    emit_panels,
    emit_tile,
)


def make_conv2d_packing(spec: FloatConv2d, isa: FloatIsa, name: str = "float_pack") -> PrimFunc:
    """Make PrimFunc(w OHWI, packed), `pack_conv2d` at run time, for weights that vary."""
    isa, panels = plan_conv2d(spec, isa)
    taps = spec.kernel[0] * spec.kernel[1]
    inner = taps * spec.group_in
    size = packed_conv2d_size(spec, isa)

    def body() -> None:
        weight, packed = declare_arguments(
            ("w", spec.leave_height(spec.out_channels, *spec.kernel, spec.group_in)),
            ("packed", (size,)),
        )
        if spec.is_depthwise:
            with T.grid(taps, spec.out_channels) as (tap, channel):
                T.buffer_store(
                    packed, weight[channel * taps + tap], [tap * spec.out_channels + channel]
                )
            return
        emit_packing(weight, packed, spec.groups, inner, panels)

    return build_kernel(name, body)


def emit_packing(weight: Buffer, packed: Buffer, groups: int, inner: int, panels: Panels) -> None:
    """Emit `pack_groups`."""
    starts, lanes = panels.starts(), panels.lanes
    with T.serial(groups) as group:
        source = group * (panels.channels * inner)
        target = group * (panels.vectors * lanes * inner)
        for first in range(0, len(starts), panels.blocks):
            chosen = starts[first : first + panels.blocks]
            base = target + first * lanes * inner
            with T.serial(inner) as k:
                for block, channel in enumerate(chosen):
                    with T.serial(lanes) as lane:
                        T.buffer_store(
                            packed,
                            weight[source + (channel + lane) * inner + k],
                            [base + (k * len(chosen) + block) * lanes + lane],
                        )


def make_conv2d(spec: FloatConv2d, isa: FloatIsa, name: str = "float_conv2d") -> PrimFunc:
    """Make PrimFunc(x, packed weights, (bias,) (residual,) y), for `call_tir`."""
    if spec.is_pointwise:
        return make_dense(spec.as_dense(), isa, name)
    size = packed_conv2d_size(spec, isa)
    isa, panels = plan_conv2d(spec, isa)

    def body() -> None:
        declared = declare_arguments(
            ("x", spec.stored_shape, spec.stored.data),
            ("w", (size,)),
            ("bias", (spec.out_channels,)) if spec.epilogue.bias else None,
            ("residual", spec.out_shape, spec.stored.residual) if spec.epilogue.residual else None,
            ("y", spec.out_shape, spec.stored.result),
        )
        operands = FloatOperands(*declared)
        if spec.is_depthwise:
            emit_depthwise(spec, isa, operands)
        else:
            emit_conv2d(spec.lay_down(), isa, panels, operands)

    return build_kernel(name, body)


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


def emit_conv2d(spec: FloatConv2d, isa: FloatIsa, panels: Panels, operands: FloatOperands) -> None:
    """Emit a padded copy of the image, then register tiles of pixels x channels."""
    threads = count_macs(spec) >= PARALLEL_MACS
    if any(spec.padding):
        operands = replace(operands, data=emit_padding(spec, isa, operands.data, threads))
    placement = FloatPlacement(spec.padded_size, spec.out_size)
    emit_tiles(ConvTiles(spec, isa, panels, operands, placement), threads)


def emit_tiles(tiles: ConvTiles, threads: bool) -> None:
    """Emit all tiles: of each panel all pixels, or of each tile of pixels all panels."""
    spec, panels = tiles.spec, tiles.panels
    if walks_panels(spec, tiles.isa, panels):
        emit_panels(
            panels,
            tiles.taps,
            spec.batch,
            tiles.per_image,
            threads,
            tiles.isa,
            lambda at: tiles.emit(tiles.locate(at.index), 0, at.first, at.starts, at.ahead),
            tiles.placement.first_weight,
        )
        return
    with (T.parallel if threads else T.serial)(spec.batch * tiles.per_image) as index:
        pixel = tiles.locate(index)
        with T.serial(spec.groups) as group:
            if panels.full:
                with T.serial(panels.full) as panel:
                    tiles.emit(pixel, group, panel * panels.blocks, panels.starts_of(panel))
            if panels.tail:
                tiles.emit(pixel, group, panels.full * panels.blocks, list(panels.tail))


def move_back(tile: Expr, size: int, extent: int) -> Expr:
    """Find where a tile begins, if the last one must end with the extent."""
    return tile * size if extent % size == 0 else T.min(tile * size, extent - size)


@dataclass(frozen=True)
class ConvTiles:
    """Register tiles of rows x cols neighbouring pixels, over a padded image.

    Those at the lower and the right end move back into the output and overlap others:

        columns of the output       0 1 2 3 4
        three tiles of 2 columns    a a b b
                                          c c
    """

    spec: FloatConv2d
    isa: FloatIsa
    panels: Panels
    operands: FloatOperands  #: whose data is the padded image
    placement: FloatPlacement

    @cached_property
    def size(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return choose_tile(self.spec, self.panels.most_rows)

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles along the rows and columns of an output."""
        (oh, ow), (rows, cols) = self.spec.out_size, self.size
        return -(-oh // rows), -(-ow // cols)

    @property
    def per_image(self) -> int:
        """Tiles of one image."""
        return prod(self.counts)

    @property
    def taps(self) -> int:
        """Products of one result."""
        return prod(self.spec.kernel) * self.spec.group_in

    @property
    def pixels(self) -> list[tuple[int, int]]:
        """Row and column of each pixel in a tile."""
        rows, cols = self.size
        return list(product(range(rows), range(cols)))

    def locate(self, index: Expr) -> tuple[Expr, Expr, Expr]:
        """Locate tile `index`: its image, and row and column of its first pixel."""
        n, rest = T.floordiv(index, self.per_image), T.floormod(index, self.per_image)
        (_, columns), (rows, cols), (oh, ow) = self.counts, self.size, self.spec.out_size
        row, column = T.floordiv(rest, columns), T.floormod(rest, columns)
        return n, move_back(row, rows, oh), move_back(column, cols, ow)

    def list_sources(self, pixel: tuple[Expr, Expr, Expr], group: Expr) -> list[Expr]:
        """Element of the padded image under the first tap of each pixel of a tile."""
        (n, oy, ox), (sh, sw) = pixel, self.spec.strides
        (height, width), channels = self.placement.image, self.spec.in_channels
        first_row, first_col = self.placement.origin
        corner = (oy * sh + first_row) * width + (ox * sw + first_col)
        origin = n * (height * width * channels) + corner * channels + group * self.spec.group_in
        return [origin + (r * sh * width + c * sw) * channels for r, c in self.pixels]

    def list_targets(self, pixel: tuple[Expr, Expr, Expr]) -> list[Expr]:
        """Element of the whole output that each pixel of a tile begins at."""
        (n, oy, ox), (height, width) = pixel, self.placement.size
        (row_step, col_step), (row, col) = self.placement.stride, self.placement.offset
        pitch = self.spec.epilogue.pitch(self.spec.out_channels)
        out = ((n * height + (oy * row_step + row)) * width + (ox * col_step + col)) * pitch
        return [out + (r * row_step * width + c * col_step) * pitch for r, c in self.pixels]

    def emit(
        self,
        pixel: tuple[Expr, Expr, Expr],
        group: Expr,
        first: Expr,
        starts: list[Expr],
        ahead: Ahead | None = None,
    ) -> None:
        """Emit one tile: the pixels from `pixel` on, times the channels that begin at `starts`.

        Args:
            first: Vector of the group's packed weights that the panel begins at.
            ahead: What the loop fetches for the next panel.
        """
        spec, operands, lanes = self.spec, self.operands, self.isa.lanes
        (kh, kw), (dh, dw), inner = spec.kernel, spec.dilation, spec.group_in
        channels, width, blocks = spec.in_channels, self.placement.image[1], len(starts)
        # Along a row of the filter the activations of all taps are contiguous.
        run = kw * inner if dw == 1 and spec.groups == 1 else inner
        vector_size = self.taps * lanes
        base = self.placement.first_weight
        base = base + group * (self.panels.vectors * vector_size) + first * vector_size

        def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
            with T.grid(kh, kw * inner // run, run) as (ky, kx, k):
                index = (ky * (kw * inner // run) + kx) * run + k
                if ahead is not None:
                    ahead.fetch(operands.weight, index)
                step(
                    (ky * (dh * width) + kx * dw) * channels + k,
                    lambda b: base + (index * blocks + b) * lanes,
                )

        absolute = [group * spec.group_out + start for start in starts]
        results = operands, spec.epilogue, self.list_targets(pixel), absolute
        emit_tile(
            self.isa,
            self.list_sources(pixel, group),
            blocks,
            operands.data,
            operands.weight,
            reduce,
            finish_into(*results, lanes),
            touch=touch_results(*results),
        )


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
