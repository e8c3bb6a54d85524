"""Plan of a convolution -> the order of its tiles, and what each fetches for the next."""

from __future__ import annotations

from math import prod

import numpy as np
from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import CACHE_LINE, ceil_div, emit_prefetch
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.convolution.tile import Prefetch, TilePosition
from relayquant.codegen.kernels.integer.operands import Operands, Placement
from relayquant.codegen.kernels.isa.base import Expr

#: Packed weights of up to this many bytes stay in the first-level cache during all pixels.
SMALL_WEIGHT_BYTES = 20 * 1024
#: A larger image (in bytes) does not stay in the second-level cache; weights up to the second size
#: do.
LARGE_IMAGE_BYTES = 1024 * 1024
CACHED_WEIGHT_BYTES = 300 * 1024
#: Threads split the pixels up to this many weights per input value. Weights are read in order and
#: fetched ahead, while data that another core wrote has to be waited for.
WEIGHTS_PER_INPUT = 4

#: Loops over tiles: all panels of weights for each tile of pixels, or all pixels for each panel.
PIXEL_ORDER = "n row col group panel"
PANEL_ORDER = "group panel n row col"


def pick_order(plan: ConvPlan) -> str:
    """Choose the axes of the loop over tiles, outermost first.

    What changes last stays in the caches.
    """
    if plan.weight_bytes <= SMALL_WEIGHT_BYTES:
        return PIXEL_ORDER
    if plan.image_bytes > LARGE_IMAGE_BYTES and plan.weight_bytes <= CACHED_WEIGHT_BYTES:
        return PIXEL_ORDER
    return "n group panel row col" if plan.weights_per_image else PANEL_ORDER


def find_halved_axis(plan: ConvPlan, order: str, sizes: dict[str, int]) -> str | None:
    """Find the axis of pixels to split in two first. None: threads split the panels.

    A thread with part of the pixels finds them in its own cache, from the kernel before. A thread
    with part of the panels reads all pixels, also those that other threads wrote, but fewer
    weights.
    """
    if order != PANEL_ORDER or plan.weight_size > WEIGHTS_PER_INPUT * prod(plan.spec.in_shape):
        return None
    return next((axis for axis in ("n", "row", "col") if sizes[axis] % 2 == 0), None)


def plan_prefetch(
    plan: ConvPlan, place: Placement, panel: Expr, tile: Expr, tiles: int
) -> Prefetch:
    """Plan what tile number `tile` of `tiles` fetches during a panel.

    Shares are rounded up, and the last shares moved back, so no address is beyond the weights.
    """
    size = plan.isa.weight_vector
    words = plan.panel_vectors // plan.tile.blocks
    step = ceil_div(plan.tile.blocks * size, tiles)
    following = T.min(panel + 1, plan.groups * plan.panels - 1)
    first = (following * plan.panel_vectors + place.first_weight) * size
    start = T.min(tile * (words * step), plan.panel_vectors * size - words * step)
    return Prefetch(first + start, step)


def plan_pixel_prefetch(plan: ConvPlan, at: TilePosition, order: str, panel: Expr) -> Prefetch:
    """Plan what a tile of a matrix fetches of the pixels of the next tile, which follow in memory.

    If the pixels exceed the second-level cache, each line would be waited for: hardware sees only a
    run of a few lines in every pixel, too short to predict the next. With all panels of weights for
    a tile of pixels, each panel fetches a share.
    """
    size, sharing = plan.tile.cols * plan.spec.in_channels, 1
    if order == PIXEL_ORDER:
        sharing = plan.panels
    step = ceil_div(size, plan.words * sharing)
    start = at.origin + size
    return Prefetch(start + panel * (plan.words * step) if sharing > 1 else start, step)


def emit_residual_prefetch(plan: ConvPlan, operands: Operands, at: TilePosition) -> None:
    """Fetch the residual and the results that a tile will overwrite, while its dot products go on.

    The residual was computed some kernels ago, and its pixels are far apart. Without prefetching,
    every line of it would be waited for, and every line of y next to it.
    """
    if operands.residual is None:
        return
    for buffer, write in ((operands.residual, False), (operands.out, True)):
        line = CACHE_LINE // np.dtype(buffer.dtype).itemsize
        for pixel in at.out_pixels:
            for channel in range(0, min(plan.panel_channels, plan.group_out), line):
                emit_prefetch(buffer, pixel + at.out_channels[0] + channel, level=1, write=write)
