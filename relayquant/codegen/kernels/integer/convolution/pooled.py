"""A convolution and the maximum pool behind it -> one kernel.

The multipliers are not negative, so conversion and clamping keep the order of the int32 sums. The
maximum is taken of the sums, and only the results of the pool are converted and stored.

A window of s + 1 rows at steps of s shares its first row with the last row of the window above it.
With rows of the convolution counted from the first window on, and taken in order:

- Row y updates row y // s of the partial maxima; two of these rows are kept at a time. Along row y,
  the maximum over the columns of a window is taken of the sums in registers.
- After row s * (i + 1), the maximum of the partial rows i and i + 1 is row i of the results.

Threads share the rows of the results. Each computes the first row of its share, which is also the
last of another share, once more. So there are no more shares than threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_workspace,
    build_kernel,
    ceil_div,
    constant,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, pack_constants
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.tile import (
    add_chains,
    emit_reduction,
    emit_start,
    locate_tile,
    split_pixels,
)
from relayquant.codegen.kernels.integer.epilogue import Store
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    declare_operands,
    emit_narrow_vectors,
    emit_prepared_image,
    emit_store,
    locate_panel,
)
from relayquant.codegen.kernels.integer.pool import PoolWindow
from relayquant.codegen.kernels.integer.saturating_pack import count_packed
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, PackedWeights, Tile
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.unit_permission import count_threads, emit_if

#: A maximum of no sums.
LOWEST = INTEGER_LIMITS["int32"][0]
#: Most time of the convolution, by the estimate, relative to that in its fastest tile. The pool
#: alone takes as much more.
MOST_TIME = 1.1
#: Most words of a reduction. In longer ones the results are a small share of the time.
MOST_WORDS = 16


@dataclass(frozen=True)
class PooledConv2d:
    """A convolution, and a maximum pool over its results. No multiplier may be negative."""

    conv: Conv2d
    window: PoolWindow  #: over `conv.out_shape`


def plan_pooled(spec: PooledConv2d, isa: Isa) -> ConvPlan | None:
    """Choose the plan of the convolution in a pooled one. None if there is no such kernel.

    Tiles are one row of pixels, and begin where a window does. They have at most as many sums as
    the tile of the convolution alone. Of tiles that are about as fast, the one with the fewest
    loads and updates of partial maxima wins.
    """
    conv, window = spec.conv, spec.window
    takes = conv.epilogue.output is Store.REQUANTIZE and conv.epilogue.residual is None
    if not takes or conv.is_depthwise or conv.groups > 1 or conv.columns or conv.joined:
        return None
    overlaps = all(k == s + 1 for k, s in zip(window.kernel, window.strides, strict=True))
    if not overlaps or window.dilation != (1, 1) or window.misses_image:
        return None
    plan = choose_plan(replace(conv, tile=None), isa)
    if plan.isa.unit is not None or (plan.isa.pixels > 1 and plan.isa.narrowing is not None):
        return None
    if plan.is_matrix or plan.panel_words > MOST_WORDS:  # a matrix has no rows of pixels
        return None
    step, width = window.strides[1], plan.pixel_grid[2]

    def suits(tile: Tile) -> bool:
        fits = tile.rows == 1 and tile.cols % step == 0 == width % tile.cols % plan.isa.pixels
        is_small = tile.sums * tile.chains <= plan.tile.sums * plan.tile.chains
        return fits and is_small and (tile.blocks in plan.narrow_blocks) == plan.is_narrow

    def cost(tile: Tile) -> float:
        loads = (tile.cols + tile.blocks) / (tile.cols * tile.blocks)
        return loads + (tile.cols // step + 1) / tile.cols

    most = MOST_TIME * plan.timed_tiles[0].time
    tiles = [each.tile for each in plan.timed_tiles if each.time <= most and suits(each.tile)]
    tile = min(tiles, key=cost, default=None)
    return None if tile is None else replace(plan, spec=replace(conv, tile=tile))


def expect_plan(spec: PooledConv2d, isa: Isa) -> ConvPlan:
    """Return the plan of `plan_pooled`. Raises ValueError if there is none."""
    plan = plan_pooled(spec, isa)
    if plan is None:
        raise ValueError(f"PooledConv2d: no kernel of {isa.name} computes {spec}.")
    return plan


def pack_pooled_conv2d(spec: PooledConv2d, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the constant operands of `build_pooled_conv2d`; see `pack_conv2d`."""
    return pack_constants(expect_plan(spec, isa), constants)


def build_pooled_conv2d(spec: PooledConv2d, isa: Isa, name: str = "conv2d_max_pool2d") -> PrimFunc:
    """Make PrimFunc(x, weight, bias, multiplier, y); x and y are NHWC."""
    plan, window = expect_plan(spec, isa), spec.window
    conv, (height, _) = plan.spec, window.out_size

    def body() -> None:
        operands = declare_operands(
            conv, plan.isa, plan.weight_size, plan.channel_size, conv.stored_shape, window.out_shape
        )
        image = Image(operands.data, conv.height, conv.width)
        if plan.needs_copy:
            image = emit_prepared_image(operands.data, conv, plan.isa)
        is_shared = conv.macs >= PARALLEL_THRESHOLD
        parts = T.min(count_threads(), height) if is_shared else 1
        with T.serial(conv.batch) as n, (T.parallel if is_shared else T.serial)(parts) as part:
            first, end = (T.floordiv((part + i) * height, parts) for i in (0, 1))
            PooledRows(plan, window, image, operands, n).emit(T.bind(first), T.bind(end))

    return build_kernel(name, body)


@dataclass(frozen=True, eq=False)
class PooledRows:
    """Emits the results of one thread in image `n`."""

    plan: ConvPlan
    window: PoolWindow
    image: Image
    operands: Operands
    n: Expr

    @cached_property
    def place(self) -> Placement:
        return Placement(self.plan.pixel_grid[1:])

    @cached_property
    def pitch(self) -> int:
        """Elements of a row of partial maxima. A window on each side is not in the results."""
        return (self.window.out_size[1] + 2) * self.plan.channel_size

    def emit(self, first: Expr, end: Expr) -> None:
        """Emit rows `first` to `end` of the results."""
        step, lanes = self.window.strides[0], self.plan.isa.lanes
        rows, top = self.plan.pixel_grid[1], self.window.padding[0]
        partial = alloc_workspace(2 * self.pitch, "int32")
        with T.serial(2 * self.pitch // lanes) as i:
            store_vector(partial, constant("int32", LOWEST, lanes), i * lanes, lanes)
        with T.serial((end - first) * step + 1) as i:
            y = first * step + i
            number = T.floordiv(y, step)
            own = T.bitwise_and(number, 1) * self.pitch
            row = y - top
            is_whole = top == 0 and self.window.out_size[0] * step < rows
            emit_if(
                True if is_whole else T.And(row >= 0, row < rows),
                lambda: self.emit_row(partial, own, row),
            )
            with T.If(T.And(i > 0, T.floormod(y, step) == 0)), T.Then():
                self.emit_results(partial, own, number - 1)

    def emit_row(self, partial: Buffer, own: Expr, row: Expr) -> None:
        """Update the partial maxima from `own` on with a row of the convolution."""
        plan, cols, width = self.plan, self.plan.tile.cols, self.plan.pixel_grid[2]
        rest = width % cols
        with T.serial(plan.panels) as panel:
            with T.serial(width // cols) as col:
                self.emit_tile(plan, partial, own, row, col, col * cols, panel)
            if rest:
                last = replace(plan, spec=replace(plan.spec, tile=replace(plan.tile, cols=rest)))
                col = T.int32(ceil_div(width, rest) - 1)
                self.emit_tile(last, partial, own, row, col, T.int32(width - rest), panel)

    def emit_tile(
        self,
        plan: ConvPlan,
        partial: Buffer,
        own: Expr,
        row: Expr,
        col: Expr,
        x: Expr,
        panel: Expr,
    ) -> None:
        """Update the partial maxima with the tile of this number, which begins in column `x`."""
        at = locate_tile(plan, self.image, self.place, self.n, row, col, T.int32(0), panel)
        chains = emit_start(plan, self.operands, at)
        emit_reduction(plan, self.image, self.operands, at, chains, None)
        sums = [T.bind(total) for total in split_pixels(plan, add_chains(plan, chains))]
        step, size, left = self.window.strides[1], self.window.kernel[1], self.window.padding[1]
        blocks, cols = plan.tile.blocks, plan.tile.cols
        for number in range(-1, (cols - 1 + left) // step + 1):
            inside = [c for c in range(cols) if 0 <= c + left - number * step < size]
            for block in range(blocks if inside else 0):
                to = own + self.locate(T.floordiv(x, step) + number, panel, block)
                best = load_vector(partial, to, plan.isa.lanes)
                for c in inside:
                    best = T.max(best, sums[c * blocks + block])
                store_vector(partial, best, to, plan.isa.lanes)

    def locate(self, window: Expr, panel: Expr, block: int) -> Expr:
        """Return the place of a vector of maxima in a partial row."""
        plan = self.plan
        panels = (window + 1) * plan.channel_size + panel * plan.panel_channels
        return panels + block * plan.isa.lanes

    def emit_results(self, partial: Buffer, own: Expr, row: Expr) -> None:
        """Store a row of results, and clear the partial row for which `own` is the next one."""
        plan, blocks, width = self.plan, self.plan.tile.blocks, self.window.out_size[1]
        share = count_packed(blocks) // blocks if plan.is_narrow else 1
        with T.serial(plan.panels) as panel:
            with T.serial(width // share) as i:
                self.emit_pixels(partial, own, row, i * share, share, panel)
            if rest := width % share:
                self.emit_pixels(partial, own, row, T.int32(width - rest), rest, panel)

    def emit_pixels(
        self, partial: Buffer, own: Expr, row: Expr, first: Expr, count: int, panel: Expr
    ) -> None:
        """Store so many pixels of a panel, from column `first` on."""
        plan, operands, lanes = self.plan, self.operands, self.plan.isa.lanes
        blocks, epilogue, old = plan.tile.blocks, plan.spec.epilogue, self.pitch - own
        height, width = self.window.out_size
        panel_at = locate_panel(plan, self.place, self.n, T.int32(0), panel)
        pixels = [
            ((self.n * height + row) * width + first + i) * plan.result_pitch for i in range(count)
        ]
        best = []
        for i, block in np.ndindex(count, blocks):
            at = self.locate(first + i, panel, block)
            rows = [load_vector(partial, half + at, lanes) for half in (old, own)]
            best.append(T.bind(T.max(*rows)))
            store_vector(partial, constant("int32", LOWEST, lanes), old + at, lanes)
        constants, width = panel_at.constants, plan.store_width
        if plan.is_narrow:
            targets = [pixel + panel_at.channels[0] for pixel in pixels]
            emit_narrow_vectors(
                plan.isa, epilogue, operands, best, targets, constants, blocks, width
            )
            return
        for slot, sums in enumerate(best):
            pixel, block = divmod(slot, blocks)
            target = pixels[pixel] + panel_at.channels[block]
            emit_store(operands, epilogue, sums, target, constants + block * lanes, lanes, width)
