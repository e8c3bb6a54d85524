"""Specification of a dense layer -> its kernel for any number of rows, known at run time, as TIR.

    y[m, n] = epilogue(bias[n] + sum_k x[m, k] * w[n, k])          m = 0 .. M, any M

The register tiles are built as in `convolution`, with the heights of `row_loops`. All
tiles share the packed weights, so one kernel serves a single row as well as many. Many rows go to a
matrix unit, if there is one that this process may use (`tiled.rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_THRESHOLD,
    STORE_COST,
    alloc_workspace,
    build_kernel,
    declare_argument,
    flat_view,
    name_extents,
)
from relayquant.codegen.kernels.integer.conv_plan import (
    ConvPlan,
    count_chains,
    pack_constants,
)
from relayquant.codegen.kernels.integer.convolution.order import (
    SMALL_WEIGHT_BYTES,
    emit_residual_prefetch,
    plan_prefetch,
)
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_instructions
from relayquant.codegen.kernels.integer.convolution.tile import (
    emit_reduction,
    emit_start,
    locate_tile,
    store_integers,
)
from relayquant.codegen.kernels.integer.operands import (
    Image,
    Operands,
    Placement,
    declare_multiplier,
    emit_prepared_rows,
)
from relayquant.codegen.kernels.integer.specs import Constants, Dense, PackedWeights, Tile
from relayquant.codegen.kernels.integer.tiled.plan import FEWEST_PIXELS, TiledPlan
from relayquant.codegen.kernels.integer.tiled.rows import (
    FEWEST_ROWS,
    emit_tiled_rows,
    plan_tiled_rows,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.row_loops import choose_heights, count_chunk_rows, loop_over_rows
from relayquant.codegen.kernels.unit_permission import ask_unit, count_parts, emit_if

#: Rows for which the full tile is chosen: many, and divisible by every height.
MANY_ROWS = 5040
#: Tiles that fetch the next panel of weights together, by height. Their number is not known.
PREFETCH_SHARING = (8, 2, 1)


@dataclass(frozen=True)
class TilePlan(ConvPlan):
    """One tile of rows, with the same panels of weights as tiles of other heights.

    The words of a panel may be more than a row has, since a matrix unit reads the same panels.
    """

    blocks: int = 1
    least_words: int = 0

    @cached_property
    def words(self) -> int:
        return max(super().words, self.least_words)

    @cached_property
    def tile(self) -> Tile:
        rows = self.spec.width
        return Tile(1, rows, self.blocks, count_chains(rows * self.blocks, self.words, self.isa))


@dataclass(frozen=True)
class RowsPlan:
    """One to three tiles of a dense layer, highest first."""

    tiles: tuple[TilePlan, ...]
    tiled: TiledPlan | None = None  #: for many rows, on a matrix unit

    @property
    def full(self) -> TilePlan:
        return self.tiles[0]


def plan_rows(spec: Dense, isa: Isa, *, packs_later: bool = False) -> RowsPlan:
    """Make the plan for generator and packer. `spec.rows` does not matter.

    Weights that the kernel packs itself (`packs_later`) stay bytes.
    """
    many = replace(spec, rows=MANY_ROWS).as_conv2d()
    tiled = plan_tiled_rows(many, isa)
    isa = isa if isa.unit is None else isa.companion
    isa = isa if packs_later else isa.for_convolution(spec.in_dtype)
    plan = choose_instructions(lambda isa: ConvPlan(many, isa), isa)
    tile, words = plan.tile, 0
    if tiled is not None:
        # More rows take the unit, where it may be used. Higher tiles would take long to compile.
        tile = next(
            each
            for each in plan.ranked_tiles
            if each.blocks == tiled.tile.blocks and each.cols <= FEWEST_PIXELS
        )
        words = tiled.words
    tiles = (
        TilePlan(replace(many, width=height), plan.isa, blocks=tile.blocks, least_words=words)
        for height in choose_heights(tile.cols, plan.isa.pixels)
    )
    return RowsPlan(tuple(tiles), tiled)


def pack_dense_rows(spec: Dense, isa: Isa, constants: Constants) -> PackedWeights:
    """Pack the operands of `build_dense_rows`: weight (N, K), bias (N,), multiplier (N,) or ().

    Raises:
        ConfigError: A shape does not fit, or the multiplier is missing or not allowed.
    """
    return pack_constants(plan_rows(spec, isa).full, constants.as_conv2d())


def build_dense_rows(
    spec: Dense, isa: Isa, name: str = "dense", leading: Sequence[int | None] = (None,)
) -> PrimFunc:
    """Build the kernel of a dense layer: PrimFunc(x, weight, bias[, multiplier][, residual], y).

    x is (*leading, K) and y (*leading, N), with None for an extent known only at run time. The
    constants come from `pack_dense_rows`.
    """

    def body() -> None:
        plan = plan_rows(spec, isa)
        rows, operands = declare_rows(plan.full, leading)
        tiled = plan.tiled
        if tiled is None:
            emit_vector_rows(plan, operands, rows)
            return
        parts = count_parts(tiled.unit)
        emit_if(
            ask_unit(tiled.unit, rows, FEWEST_ROWS),
            lambda: emit_tiled_rows(tiled, operands, rows, parts),
            lambda: emit_vector_rows(plan, operands, rows),
        )

    return build_kernel(name, body)


def emit_vector_rows(plan: RowsPlan, operands: Operands, rows: Expr) -> None:
    """Emit all rows on vectors, on threads if there are enough."""
    inner, outputs = plan.full.spec.in_channels, plan.full.spec.out_channels
    work = inner * outputs + STORE_COST * outputs
    with T.If(rows * work >= PARALLEL_THRESHOLD):
        with T.Then():
            emit_rows(plan, operands, rows, threads=True)
        if work < PARALLEL_THRESHOLD:
            with T.Else():
                emit_rows(plan, operands, rows, threads=False)


def declare_rows(plan: ConvPlan, leading: Sequence[int | None]) -> tuple[Expr, Operands]:
    """Declare the arguments: (number of rows, flat views); see `build_dense_rows`."""
    spec, epilogue = plan.spec, plan.spec.epilogue
    extents = name_extents(leading)
    rows = prod(extents)

    def declare(name: str, width: int, dtype: str) -> Buffer:
        return T.arg(name, T.Buffer((*extents, width), dtype))

    x = declare("x", spec.in_channels, spec.in_dtype)
    weight, bias, multiplier = declare_constants(plan)
    residual = None
    if epilogue.residual:
        residual = declare("residual", spec.out_channels, epilogue.residual.dtype)
    y = declare("y", spec.out_channels, epilogue.dtype)

    return rows, Operands(
        data=flat_view(x),
        weight=weight,
        bias=bias,
        multiplier=multiplier,
        residual=None if residual is None else flat_view(residual),
        out=flat_view(y),
    )


def declare_constants(plan: ConvPlan) -> tuple[Buffer, Buffer, Buffer | None]:
    """Declare weight, bias and multiplier."""
    weight = declare_argument("weight", (plan.weight_size,), plan.isa.weight_dtype)
    bias = declare_argument("bias", (plan.channel_size,), "int32")
    multiplier = declare_multiplier(plan.spec.epilogue, plan.channel_size)
    return weight, bias, None if multiplier is None else declare_argument(*multiplier)


def emit_rows(plan: RowsPlan, operands: Operands, rows: Expr, threads: bool) -> None:
    """Emit all register tiles, from a copy of each chunk if they cannot read the rows in place.

    The copy has a static size, with a vector of slack at the end. A copy of all rows would be
    simpler, but TVM takes seconds to find out that it cannot shrink a buffer of symbolic size.
    """
    heights = [tile.spec.width for tile in plan.tiles]
    sharing, size = PREFETCH_SHARING[-len(plan.tiles) :], count_chunk_rows(heights)
    copies: list[tuple[Buffer, Expr]] = []  # of the current chunk: (copy, first row)

    def prepare(first: Expr, count: Expr) -> None:
        width = plan.full.spec.in_channels
        copy = alloc_workspace(size * width + COPY_BYTES, plan.full.isa.activation)
        emit_prepared_rows(operands.data, copy, width, first, count)
        copies[:] = [(copy, first)]

    def emit(kind: int, members: list[Expr], panel: Expr, index: Expr) -> None:
        data, first = copies[0] if copies else (operands.data, 0)
        own = replace(operands, data=data)
        emit_tile(plan.tiles[kind], own, members, first, panel, index, sharing[kind])

    copying = prepare if plan.full.needs_copy else None
    loop_over_rows(rows, heights, plan.full.panels, threads, emit, copying)


def emit_known_rows(plan: RowsPlan, operands: Operands, count: Expr, may_use: Expr | bool) -> None:
    """Emit `count` rows on one thread: on the matrix unit if it may be used and they are enough."""

    def emit_vectors() -> None:
        emit_rows(plan, operands, count, threads=False)

    tiled = plan.tiled
    if tiled is None:
        emit_vectors()
        return
    is_many = count >= FEWEST_ROWS
    condition = is_many if may_use is True else T.And(is_many, may_use)
    emit_if(condition, lambda: emit_tiled_rows(tiled, operands, count, None), emit_vectors)


def emit_tile(
    plan: TilePlan,
    operands: Operands,
    rows: list[Expr],
    first: Expr,
    panel: Expr,
    index: Expr,
    sharing: int,
) -> None:
    """Emit the register tile of one panel for these rows. The data begin with row `first`.

    It is tile number `index` of this panel, and `sharing` tiles fetch the next panel together.
    """
    spec = plan.spec
    image = Image(operands.data, 1, spec.width)
    place = Placement((1, spec.width))
    at = replace(
        locate_tile(plan, image, place, *[T.int64(0)] * 4, panel),
        origin=T.int64(0),
        pixel_starts=[(row - first) * spec.in_channels for row in rows],
        out_pixels=[row * spec.out_channels for row in rows],
    )
    ahead = None
    if plan.weight_bytes > SMALL_WEIGHT_BYTES:
        ahead = plan_prefetch(plan, place, panel, index, sharing)
    emit_residual_prefetch(plan, operands, at)
    chains = emit_start(plan, operands, at)
    emit_reduction(plan, image, operands, at, chains, ahead)
    store_integers(plan, operands, at, chains)
