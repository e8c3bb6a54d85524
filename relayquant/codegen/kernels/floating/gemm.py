"""Specification of a float matrix product -> its kernel: dense layers and batched products.

    dense          y[m, n] = sum_k x[m, k] * w[n, k]  (+ bias[n]) (+ residual[m, n]), clipped
    batch_matmul   y[b, m, n] = sum_k x[b, m, k] * w[b, k, n]

Weights of dense layers are packed. M, N and K are arbitrary; M (and b) may be symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    build_kernel,
    ceil_div,
    emit_prefetch,
    load_vector,
)
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.stored import load_floats, store_floats
from relayquant.codegen.kernels.floating.tile import (
    FEWEST_ROWS,
    FLOAT_BYTES,
    PARALLEL_MACS,
    Ahead,
    Expr,
    FloatEpilogue,
    FloatIsa,
    FloatSchedule,
    Panels,
    choose_panels,
    choose_rows,
    declare_arguments,
    emit_panels,
    emit_tile,
    list_float_schedules,
    prefers_panels,
    static,
)
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.row_loops import choose_heights, loop_over_rows


@dataclass(frozen=True)
class FloatDense:
    """A dense layer with N outputs.

    x has `shape` (..., K) float32; `shape[:-1]` is static or symbolic.
    """

    shape: tuple[Any, ...]
    outputs: int
    epilogue: FloatEpilogue = field(default_factory=FloatEpilogue)
    schedule: FloatSchedule | None = None  #: None: the estimated best

    @property
    def inner(self) -> int:
        return int(self.shape[-1])

    @property
    def rows(self) -> Any:
        """Product of the leading extents: an int, or an expression of symbolic extents."""
        total: Any = 1
        for extent in self.shape[:-1]:
            known = static(extent)
            total = total * (extent if known is None else known)
        return total

    @property
    def least_rows(self) -> int:
        """Least number of rows: symbolic extents count as 1."""
        return prod(static(extent) or 1 for extent in self.shape[:-1])

    @property
    def out_shape(self) -> tuple[Any, ...]:
        return (*self.shape[:-1], self.epilogue.pitch(self.outputs))


def plan_dense(spec: FloatDense, isa: FloatIsa) -> tuple[FloatIsa, Panels]:
    """Choose vector width and panels, which determine the packed layout of the weights."""
    isa, panels = choose_panels(spec.outputs, static(spec.rows), isa, spec.inner)
    return isa, panels.follow(spec.schedule)


def walks_panels(spec: FloatDense, isa: FloatIsa, panels: Panels) -> bool:
    """Whether all rows, whose number is known, are computed for each panel of weights."""
    if spec.schedule is not None:
        return spec.schedule.by_panels
    rows, size = spec.least_rows, panels.vectors * panels.lanes * spec.inner * FLOAT_BYTES
    few = rows <= 2 * choose_rows(rows, panels.most_rows)
    return few or prefers_panels(size, rows * spec.inner * FLOAT_BYTES, isa)


def list_dense_schedules(spec: FloatDense, isa: FloatIsa) -> list[FloatSchedule]:
    """List schedules for a known number of rows, with the estimated best first."""
    isa, panels = plan_dense(spec, isa)
    return list_float_schedules(panels, walks_panels(spec, isa, panels), isa)


def pack_dense(weight: NDArray[np.float32], spec: FloatDense, isa: FloatIsa) -> NDArray[np.float32]:
    """Pack (N, K) -> flat [panel][K][vector of the panel][lanes]."""
    isa, panels = plan_dense(spec, isa)
    return pack_groups(weight[None], panels)


def pack_groups(weight: NDArray[np.float32], panels: Panels) -> NDArray[np.float32]:
    """Pack (group, N, K) -> flat [group][panel][K][vector of the panel][lanes]."""
    starts, parts = panels.starts(), []
    for group in weight:
        for first in range(0, len(starts), panels.blocks):
            chosen = starts[first : first + panels.blocks]
            rows = np.stack([group[s : s + panels.lanes] for s in chosen])  # [block, lane, K]
            parts.append(rows.transpose(2, 0, 1).reshape(-1))
    return np.ascontiguousarray(np.concatenate(parts), dtype="float32")


#: tile(rows of the tile, first vector of the panel, first channels of its vectors, what it fetches
#: of the next panel)
GemmTile = Callable[[list[Expr], Expr, list[Expr], Ahead | None], None]


def make_dense_tile(
    inner: int,
    isa: FloatIsa,
    epilogue: FloatEpilogue,
    operands: FloatOperands,
    place: Callable[[Expr], Expr],
    first_weight: Expr = 0,
    first_channel: Expr = 0,
) -> GemmTile:
    """Return a function that emits one tile of a dense layer with `inner` features.

    `place(row)` is the element of the result at which a row begins. Weights and channels may belong
    to one of several groups, which begins at `first_weight` and `first_channel`.
    """
    x, weight = operands.data, operands.weight

    def tile(
        rows: list[Expr], first_vector: Expr, starts: list[Expr], following: Ahead | None
    ) -> None:
        blocks = len(starts)

        def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
            base = first_weight + first_vector * (inner * isa.lanes)
            with T.serial(inner) as k:
                if following is not None:
                    following.fetch(weight, k)
                step(k, lambda b: base + (k * blocks + b) * isa.lanes)

        def fetch_next(k: Expr) -> None:
            """Fetch a line per step.

            The next tile's rows follow in memory, and all steps together fetch them.
            """
            line = CACHE_LINE // FLOAT_BYTES
            emit_prefetch(x, (rows[0] + len(rows)) * inner + k * line, level=1)

        results = (
            operands,
            epilogue,
            [place(row) for row in rows],
            [first_channel + start for start in starts],
        )
        emit_tile(
            isa,
            [row * inner for row in rows],
            blocks,
            x,
            weight,
            reduce,
            finish_into(*results, isa.lanes),
            touch=touch_results(*results),
            ahead=fetch_next,
        )

    return tile


def make_dense(spec: FloatDense, isa: FloatIsa, name: str = "float_dense") -> PrimFunc:
    """Make PrimFunc(x, packed weights, (bias[N],) (residual,) y), for `call_tir`."""
    isa, panels = plan_dense(spec, isa)
    inner, outputs, epilogue = spec.inner, spec.outputs, spec.epilogue

    def body() -> None:
        x, weight, bias, residual, y = declare_arguments(
            ("x", spec.shape),
            ("w", (panels.vectors * isa.lanes * inner,)),
            ("bias", (outputs,)) if epilogue.bias else None,
            ("residual", spec.out_shape) if epilogue.residual else None,
            ("y", spec.out_shape),
        )

        pitch, operands = epilogue.pitch(outputs), FloatOperands(x, weight, bias, residual, y)
        tile = make_dense_tile(inner, isa, epilogue, operands, lambda row: row * pitch)
        emit_gemm_loops(spec, isa, panels, tile)

    return build_kernel(name, body)


def emit_gemm_loops(spec: FloatDense, isa: FloatIsa, panels: Panels, tile: GemmTile) -> None:
    """Emit loops over tiles of rows and panels."""
    known, inner = static(spec.rows), spec.inner
    if known is None:
        emit_symbolic_rows(spec, panels, tile)
        return
    height = choose_rows(known, panels.most_rows)
    macs = max(known, FEWEST_ROWS) * panels.channels * inner
    parallel = macs >= PARALLEL_MACS

    tiles = ceil_div(known, height)

    def list_rows(index: Expr) -> list[Expr]:
        """List the rows of a tile. The last tile is moved back over its neighbour."""
        first = index * height
        first = first if known % height == 0 else T.min(first, known - height)
        return [first + row for row in range(height)]

    if panels.full and walks_panels(spec, isa, panels):
        emit_panels(
            panels,
            inner,
            1,
            tiles,
            parallel,
            isa,
            lambda at: tile(list_rows(at.index), at.first, at.starts, at.ahead),
        )
        return
    with (T.parallel if parallel else T.serial)(tiles) as index:
        rows = list_rows(index)
        if panels.full:
            with T.serial(panels.full) as panel:
                tile(rows, panel * panels.blocks, panels.starts_of(panel), None)
        if panels.tail:
            tile(rows, panels.full * panels.blocks, list(panels.tail), None)


def emit_symbolic_rows(spec: FloatDense, panels: Panels, tile: GemmTile) -> None:
    """Emit the loops of `emit_gemm_loops` for a number of rows that is known only at run time.

    Whether threads share them is decided at run time too, unless the least number of rows is
    enough.
    """

    def all_tiles(threads: bool) -> None:
        emit_row_tiles(spec.rows, panels, tile, threads)

    macs_per_row = panels.channels * spec.inner
    if max(spec.least_rows, FEWEST_ROWS) * macs_per_row >= PARALLEL_MACS:
        all_tiles(threads=True)
        return
    with T.If(spec.rows * macs_per_row >= PARALLEL_MACS):
        with T.Then():
            all_tiles(threads=True)
        with T.Else():
            all_tiles(threads=False)


def emit_row_tiles(rows: Expr, panels: Panels, tile: GemmTile, threads: bool) -> None:
    """Emit the tiles of a number of rows that is known only at run time."""
    heights = choose_heights(choose_rows(None, panels.most_rows))

    def whole(_: int, rows: list[Expr], panel: Expr, _index: Expr) -> None:
        tile(rows, panel * panels.blocks, panels.starts_of(panel), None)

    def tail(_: int, rows: list[Expr], _panel: Expr, _index: Expr) -> None:
        tile(rows, panels.full * panels.blocks, list(panels.tail), None)

    if panels.full:
        loop_over_rows(rows, heights, panels.full, threads, whole)
    if panels.tail:
        loop_over_rows(rows, heights, 1, threads and not panels.full, tail)


def finish_into(
    operands: FloatOperands,
    epilogue: FloatEpilogue,
    rows: list[Expr],
    channels: list[Expr],
    lanes: int,
    bf16: Bf16Isa | None = None,
) -> Callable[[int, int, Expr], None]:
    """Return a function that stores a tile.

    rows[i] is the offset of a row in the result and the residual. `bf16` rounds results that are
    stored as bfloat16.

    The bias is added to the finished sum. In a sum that starts with a large bias, each step would
    round to the bias's last bit.
    """

    bias, residual = operands.bias, operands.residual

    def finish(row: int, block: int, value: Expr) -> None:
        at = rows[row] + channels[block] + epilogue.first
        if bias is not None:
            value = value + load_vector(bias, channels[block], lanes)
        added = load_floats(residual, at, lanes) if residual is not None else None
        store_floats(operands.result, epilogue.finish(value, added, lanes), at, lanes, bf16)

    return finish


def touch_results(
    operands: FloatOperands, epilogue: FloatEpilogue, rows: list[Expr], channels: list[Expr]
) -> Callable[[int, int], None]:
    """Return a function that prefetches what `finish_into` reads and writes.

    It takes the same arguments.
    """

    def touch(row: int, block: int) -> None:
        at = rows[row] + channels[block] + epilogue.first
        emit_prefetch(operands.result, at, level=1, write=True)
        if operands.residual is not None:
            emit_prefetch(operands.residual, at, level=1)

    return touch


@dataclass(frozen=True)
class FloatMatmul:
    """A batched product of two activations. The batch extents, M and K may be symbolic.

    x (*batch, M, K); w (*batch, K, N), or (K, N) for all products if `shared`.
    """

    batch: tuple[Any, ...]
    rows: Any
    inner: Any
    outputs: int
    shared: bool = False


def make_batch_matmul(
    spec: FloatMatmul, isa: FloatIsa, name: str = "float_batch_matmul"
) -> PrimFunc:
    """Make PrimFunc(x, w, y). The weights are read in place, nothing is packed."""
    rows, inner, outputs = spec.rows, spec.inner, spec.outputs
    isa, panels = choose_panels(outputs, static(rows), isa, static(inner) or 0)

    def body() -> None:
        x, weight, y = declare_arguments(
            ("x", (*spec.batch, rows, inner)),
            ("w", (inner, outputs) if spec.shared else (*spec.batch, inner, outputs)),
            ("y", (*spec.batch, rows, outputs)),
        )
        operands = FloatOperands(x, weight, None, None, y)

        def tile(batch: Expr, members: list[Expr], starts: list[Expr]) -> None:
            base = 0 if spec.shared else batch * (inner * outputs)
            targets = [(batch * rows + row) * outputs for row in members]

            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(inner) as k:
                    step(k, lambda b: base + k * outputs + starts[b])

            emit_tile(
                isa,
                [(batch * rows + row) * inner for row in members],
                len(starts),
                x,
                weight,
                reduce,
                finish_into(operands, FloatEpilogue(), targets, starts, isa.lanes),
                prefetch=False,
            )

        emit_batch_loops(spec, panels, tile)

    return build_kernel(name, body)


#: tile(product, rows of the tile, first channels of its vectors)
BatchTile = Callable[[Expr, list[Expr], list[Expr]], None]


def emit_batch_loops(spec: FloatMatmul, panels: Panels, tile: BatchTile) -> None:
    """Emit loops over products, tiles of rows and panels.

    Whether threads share them is decided at run time if a size of a product is known only then.
    """
    rows, known_rows = spec.rows, static(spec.rows)
    batch = [extent if static(extent) is None else static(extent) for extent in spec.batch]
    count: Any = prod(batch)

    def all_panels(batch: Expr, members: list[Expr]) -> None:
        if panels.full:
            with T.serial(panels.full) as panel:
                tile(batch, members, panels.starts_of(panel))
        if panels.tail:
            tile(batch, members, list(panels.tail))

    def static_rows(total: int, threads: bool) -> None:
        height = choose_rows(total, panels.most_rows)
        tiles = ceil_div(total, height)
        with (T.parallel if threads else T.serial)(count * tiles) as index:
            batch, first = T.floordiv(index, tiles), T.floormod(index, tiles) * height
            if total % height:
                first = T.min(first, total - height)
            all_panels(batch, [first + r for r in range(height)])

    def symbolic_rows(threads: bool) -> None:
        heights = choose_heights(choose_rows(None, panels.most_rows))
        with (T.parallel if threads else T.serial)(count) as batch:
            loop_over_rows(
                rows, heights, 1, False, lambda _, members, _p, _i: all_panels(batch, members)
            )

    def all_rows(threads: bool) -> None:
        symbolic_rows(threads) if known_rows is None else static_rows(known_rows, threads)

    if known_rows is not None and static(spec.inner) is not None:
        all_rows((static(count) or 1) * rows * spec.inner * spec.outputs >= PARALLEL_MACS)
        return
    with T.If(count * rows * spec.inner * spec.outputs >= PARALLEL_MACS):
        with T.Then():
            all_rows(True)
        with T.Else():
            all_rows(False)
