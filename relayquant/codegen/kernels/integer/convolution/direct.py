"""Specification of a convolution or matrix product of integers -> its kernel, as TIR.

Activations have 8 or 16 bits, weights are int8:

    y[n, oy, ox, c] = epilogue(bias[c] + sum x[n, oy*s + kh*d, ox*s + kw*d, i] * w[c, kh, kw, i])

One generator serves conv2d, conv1d (height 1), dense (1x1 on a row of pixels) and the phases of a
transposed convolution. It keeps a register tile of `rows x cols` output pixels by `blocks` vectors
of output channels as accumulators, and goes through the reduction in words of `Isa.products`
activations:

- Pixels are the outer, channels the inner loop of the tile: the swapped order makes LLVM spill.
- Remainders of pixels and channels move the last tile back so that it overlaps its neighbour. Both
write the same values. The packer orders the weights accordingly, so there is no tail code.
- In NHWC the kw * c_in bytes under one kernel row are contiguous, so they are one run of words.
This suits a first convolution of 1 or 3 channels as well as any other. The end of a run is
multiplied by zero weights, or the ends of several runs are joined to words in registers
(`ConvPlan.end`).
- Weights that do not fit the first-level cache are read panel by panel, with all pixels for each,
while the next panel is fetched. Threads split the panels, or the pixels if there are few weights.
- Padding, a flip of the sign bit, and slack for the last word are one copy into a workspace, made
only if needed.
- Where a reduction is short, the results of a tile are converted and stored between the products of
the next one, if the core does not do so by itself.
- Where channels leave half of a vector empty, two pixels may share each (`Isa.forms`).
- Small groups are merged until a vector of output channels is filled; the weights between groups
are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    STORE_COST,
    WEIGHT_COST,
    alloc_vectors,
    build_kernel,
    ceil_div,
    emit_unknown,
    load_vector,
    loop_over,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.integer.conv_plan import (
    PREFETCH_TILES,
    UNROLLED_WORDS,
    ConvPlan,
    pack_constants,
)
from relayquant.codegen.kernels.integer.convolution.order import (
    LARGE_IMAGE_BYTES,
    PANEL_ORDER,
    emit_residual_prefetch,
    find_halved_axis,
    pick_order,
    plan_pixel_prefetch,
    plan_prefetch,
)
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.tile import (
    TilePosition,
    add_chains,
    emit_reduction,
    emit_start,
    emit_words,
    list_packed,
    locate_tile,
    split_pixels,
    store_integers,
)
from relayquant.codegen.kernels.integer.depthwise.plan import pack_depthwise
from relayquant.codegen.kernels.integer.depthwise.rows import build_depthwise
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    declare_operands,
    emit_prepared_image,
)
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense, PackedWeights, Shape
from relayquant.codegen.kernels.integer.tiled.plan import TiledPlan
from relayquant.codegen.kernels.integer.tiled.products import emit_tiled
from relayquant.codegen.kernels.integer.tiled.results import mark_stores_once
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa

#: Most runs of tiles that threads share, whose results are stored during the next products, and
#: the fewest tiles of a run. Their number is a power of two, so that most threads share evenly.
PARTS, FEWEST_RUN = 64, 4
#: Words of a long reduction between which results are stored.
MIXED_WORDS = 8


def build_planned(plan: ConvPlan, name: str = "conv2d", *shapes: Shape) -> PrimFunc:
    """Build the kernel of a convolution for a plan and the constants of `pack_constants`."""

    def body() -> None:
        spec = plan.spec
        operands = declare_operands(spec, plan.isa, plan.weight_size, plan.channel_size, *shapes)
        image = Image(operands.data, spec.height, spec.width)
        cost = spec.macs + STORE_COST * prod(spec.out_shape) + WEIGHT_COST * plan.weight_size
        threads = cost >= PARALLEL_THRESHOLD
        if plan.needs_copy:
            image = emit_prepared_image(operands.data, spec, plan.isa)
        emit_convolution(plan, image, operands, threads)

    return mark_stores_once(build_kernel(name, body), plan)


#: Stores the sums of a tile: (plan, operands, position of the tile, result of `split_pixels`).
StoreSums = Callable[[Any, Operands, TilePosition, list[Expr]], None]


def emit_convolution(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    threads: bool,
    placement: Placement | None = None,
    store: StoreSums | None = None,
) -> None:
    """Emit all tiles of a convolution over a prepared image.

    `store` None: `store_integers`. Plans for a matrix unit take no other.
    """
    images, n_rows, n_cols = plan.pixel_grid
    placement = placement or Placement((n_rows, n_cols))
    if isinstance(plan, TiledPlan):
        emit_tiled(plan, image, operands, threads, placement)
        return
    if plan.is_matrix:
        image = Image(image.data, 1, n_cols)
    sizes = {
        "n": images,
        "row": ceil_div(n_rows, plan.tile.rows),
        "col": ceil_div(n_cols, plan.tile.cols),
        "group": plan.groups,
        "panel": plan.panels,
    }
    order = pick_order(plan)
    axes, halved = order.split(), find_halved_axis(plan, order, sizes) if threads else None
    if halved is not None:
        axes, sizes = ["half", *axes], {**sizes, "half": 2, halved: sizes[halved] // 2}
    extents = tuple(sizes[axis] for axis in axes)

    def name_indices(indices: list[Expr]) -> dict[str, Expr]:
        index = dict(zip(axes, indices, strict=True))
        if halved is not None:
            index[halved] = index[halved] + index.pop("half") * sizes[halved]
        return index

    if plan.is_delayed:
        assert store is None
        emit_delayed(
            plan,
            image,
            operands,
            prod(extents),
            lambda tile: locate_tile(
                plan, image, placement, **name_indices(split_index(tile, extents))
            ),
            threads,
        )
        return
    tiles = sizes["n"] * sizes["row"] * sizes["col"]
    with loop_over(extents, threads) as indices:
        # of the half, if there are two
        within = dict(zip(axes, indices, strict=True))
        tile = (within["n"] * sizes["row"] + within["row"]) * sizes["col"] + within["col"]
        index = name_indices(indices)
        at = locate_tile(plan, image, placement, **index)
        ahead = None
        if order == PANEL_ORDER and tiles <= PREFETCH_TILES:
            panel = index["group"] * plan.panels + index["panel"]
            ahead = plan_prefetch(plan, placement, panel, tile, tiles)
        following = None
        if plan.is_matrix and plan.image_bytes > LARGE_IMAGE_BYTES:
            following = plan_pixel_prefetch(plan, at, order, index["panel"])
        emit_residual_prefetch(plan, operands, at)
        chains = emit_start(plan, operands, at)
        emit_reduction(plan, image, operands, at, chains, ahead, following)
        if store is None:
            store_integers(plan, operands, at, chains)
        else:
            store(plan, operands, at, split_pixels(plan, add_chains(plan, chains)))


def emit_delayed(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    tiles: int,
    locate: Callable[[Expr], TilePosition],
    threads: bool,
) -> None:
    """Emit so many tiles in runs, each of which stores results during the products of the next.

    `locate` finds a tile by its number. Each run ends with stores alone.
    """
    lanes, most = plan.isa.lanes, min(PARTS, tiles // FEWEST_RUN) if threads else 1
    parts = 1 << most.bit_length() - 1
    with loop_over((parts,), threads) as (part,):
        first, end = (T.floordiv((part + i) * tiles, parts) for i in (0, 1))
        count = end - first
        kept = alloc_vectors(plan.accumulators, lanes)
        unknown = emit_unknown(first + 1)

        def find(tile: Expr) -> TilePosition:
            # LLVM does not know that this is 0. It would load before the loop what is the same for
            # all tiles, and keep it on the stack.
            at, zero = locate(first + tile), (unknown + tile) >> 31
            return replace(at, origin=at.origin + zero, first_vector=at.first_vector + zero)

        def emit_products(tile: Expr, stores: Sequence[Callable[[], None]] = ()) -> None:
            at = find(tile)
            emit_residual_prefetch(plan, operands, at)
            (sums,) = emit_start(plan, operands, at)
            emit_mixed(plan, image, operands, at, sums, stores)
            for old, new in zip(kept, sums, strict=True):
                store_vector(old, load_vector(new, 0, lanes), 0, lanes)

        def list_stores(tile: Expr) -> list[Callable[[], None]]:
            totals = [load_vector(each, 0, lanes) for each in kept]
            return list_packed(plan, operands, find(tile), totals)

        emit_products(T.int32(0))
        with T.serial(count - 1) as i:
            emit_products(i + 1, list_stores(i))
        for emit in list_stores(count - 1):
            emit()


def emit_mixed(
    plan: ConvPlan,
    image: Image,
    operands: Operands,
    at: TilePosition,
    sums: list[Buffer],
    stores: Sequence[Callable[[], None]],
) -> None:
    """Emit all words of a tile, and `stores` evenly between the first ones."""
    is_long = plan.words > MIXED_WORDS + UNROLLED_WORDS  # LLVM makes a loop of the other words
    count, done = MIXED_WORDS if is_long else plan.words, 0

    def emit(word: Expr | int) -> None:
        emit_words(plan, image, operands, at, [sums], word * plan.isa.products, word, 1)

    for word in range(count):
        emit(word)
        due = ceil_div((word + 1) * len(stores), count)
        for store in stores[done:due]:
            store()
        done = due
    if count < plan.words:
        with T.serial(plan.words - count) as i:
            emit(i + count)


def build_conv2d(spec: Conv2d, isa: Isa, name: str = "conv2d", *shapes: Shape) -> PrimFunc:
    """Build the kernel of a convolution: PrimFunc(x, weight, bias[, multiplier][, residual], y).

    x is NHWC, residual and y are like the output; the others come from `pack_conv2d`. `shapes`
    declare x and y with other shapes of equally many elements, as for a conv1d (N, W, C) or a dense
    layer (..., K).
    """
    if spec.is_depthwise:
        return build_depthwise(spec, isa, name, *shapes)
    return build_planned(choose_plan(spec, isa), name, *shapes)


def pack_conv2d(spec: Conv2d, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the constant operands of `build_conv2d(spec, isa)`.

    Raises:
        ValueError: A shape does not fit, or the multiplier is missing or not allowed.
    """
    if spec.is_depthwise:
        return pack_depthwise(spec, isa, constants)
    return pack_constants(choose_plan(spec, isa), constants)


def build_dense(spec: Dense, isa: Isa, name: str = "dense", *shapes: Shape) -> PrimFunc:
    """Build the kernel of a dense layer: PrimFunc(x, weight, bias[, multiplier][, residual], y).

    x is (M, K) and y (M, N), or the given shapes with M split into several dimensions. The
    constants come from `pack_dense`.
    """
    shapes = shapes or ((spec.rows, spec.in_features), (spec.rows, spec.out_features))
    return build_conv2d(spec.as_conv2d(), isa, name, *shapes)


def pack_dense(spec: Dense, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the operands of `build_dense`: weight (N, K), bias (N,), multiplier (N,) or ()."""
    weight = constants.weight
    if weight.shape != (spec.out_features, spec.in_features):
        raise ValueError(
            f"pack_dense: weight has shape {weight.shape}, expected "
            f"{(spec.out_features, spec.in_features)}.",
        )
    return pack_conv2d(spec.as_conv2d(), isa, constants.as_conv2d())
