"""Blocks of the float kernels: vector widths of a target, epilogue, and the register tile.

Every float kernel here consists of one loop. A tile of output rows (pixels) times vectors of output
channels stays in registers. Each step adds one activation, broadcast to a vector, times one vector
of weights. LLVM contracts the product and the sum to an FMA if the target has one.

Remainders of channels overlap: the last vector is moved back to end at the last channel. So nothing
is read or written outside a buffer, and no vector is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.curve import Curve
from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    PARALLEL_BYTES,
    alloc_vectors,
    broadcast,
    build_kernel,
    ceil_div,
    emit_prefetch,
    emit_vector_loop,
    flat_view,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.isa.caches import COMMON_CACHES, Caches, find_caches
from relayquant.codegen.kernels.isa.target import Architecture, find_architecture, has_feature

#: Fewest output channels of a product for which vectors are worthwhile.
FEWEST_CHANNELS = 2

#: A TIR expression or buffer. TVM gives them no useful static type.
Expr = Any
Buffer = Any

#: Up to this many bytes of weights, all channels are computed per tile of pixels. Larger weights
#: are read once, panel by panel, over all pixels. Half of a common second-level cache.
RESIDENT_WEIGHTS = 1 << 20
#: From this many bytes of weights on, they are read panel by panel if a second-level cache holds
#: the rows.
PANEL_WEIGHTS = 1 << 18
#: Least number of items of a loop over panels on threads.
LEAST_ITEMS = 16
#: Bytes between addresses of one set of a first-level cache.
SET_STRIDE = 1 << 12
#: Most rows of a tile, even if registers allow more.
MOST_ROWS = 24
FLOAT_BYTES = 4
#: From this many vectors of a tile on, a step has time to fetch a line of activations.
LARGE_TILE = 24
#: Steps between the fetch of packed weights into the cache and their use.
PREFETCH_STEPS = 24
#: Below this many multiply-adds a kernel stays on one thread: they take 5 to 10 microseconds.
PARALLEL_MACS = 500_000
#: Products with fewer rows count as having this many: reading their weights takes the time.
FEWEST_ROWS = 8


@dataclass(frozen=True)
class FloatIsa:
    """Vector registers for float32: `lanes` per register, and `accumulators` per tile.

    `bf16` has the instruction that rounds results to bfloat16, if the target has one. `half`:
    whether there are instructions between float16 and float32. `caches`: the core's caches.
    `addresses`: rows of a tile for whose addresses there are registers. x86 has 16 in all: with 12
    rows, kernels take up to 2.5 times as long.
    """

    lanes: int
    accumulators: int
    bf16: Bf16Isa | None = None
    half: bool = False
    caches: Caches = COMMON_CACHES
    addresses: int = 10

    def narrow(self, channels: int) -> FloatIsa:
        """Return the same with vectors short enough for `channels`: a power of two."""
        lanes = self.lanes
        while lanes > channels:
            lanes //= 2
        return replace(self, lanes=lanes)


def choose_float_isa(target: Target) -> FloatIsa:
    """Choose the widest float vectors of `target`. This machine does not matter."""
    if target.kind.name == "llvm":
        half = has_half(target)
        if has_feature("avx512f", target):
            return FloatIsa(16, 28, half=half, caches=find_caches(target))
        if has_feature("avx2", target) or has_feature("avx", target):
            return FloatIsa(8, 12, half=half)
        if has_feature("neon", target):
            return FloatIsa(4, 24, half=half, addresses=12)
    return FloatIsa(4, 12)


def has_half(target: Target) -> bool:
    """Whether a CPU has instructions between vectors of float16 and float32."""
    architecture = find_architecture(target)
    if architecture is Architecture.X86:
        return has_feature("f16c", target)
    return architecture is Architecture.AARCH64


@dataclass(frozen=True)
class FloatEpilogue:
    """Operations on a sum before it is stored: + bias[channel], + residual, clip, then a curve.

    `low` and `high` are the bounds of the clip or None; relu is low=0. With `columns` (first,
    count) the results are columns of a wider tensor, whose other columns stay as they are.
    """

    bias: bool = False
    residual: bool = False
    low: float | None = None
    high: float | None = None
    columns: tuple[int, int] | None = None
    curve: Curve | None = None

    def __post_init__(self) -> None:
        if self.residual and self.columns:
            raise ValueError(
                "FloatEpilogue: a residual cannot be combined with columns of a wider tensor. "
                "Allowed: one of both.",
            )

    def pitch(self, channels: int) -> int:
        """Return the distance between rows of `channels` results, in elements."""
        return self.columns[1] if self.columns else channels

    @property
    def first(self) -> int:
        """Column of the first result."""
        return self.columns[0] if self.columns else 0

    def finish(self, value: Expr, residual: Expr | None, lanes: int) -> Expr:
        """Finish the sum `value`. A clip keeps NaN: TVM's max(a, b) is b if one is NaN."""
        if residual is not None:
            value = value + residual
        if self.low is not None:
            value = T.max(broadcast(T.float32(self.low), lanes), value)
        if self.high is not None:
            value = T.min(broadcast(T.float32(self.high), lanes), value)
        return value if self.curve is None else self.curve.apply(value, lanes)


@dataclass(frozen=True)
class Panels:
    """Output channels split into vectors, and vectors into panels of `blocks` vectors for a tile.

    `full` panels are regular. The `tail` holds the remaining vectors, including the one that was
    moved back to end at the last channel; its entries are first channels. A tile has at most
    `most_rows` rows.
    """

    channels: int
    lanes: int
    blocks: int
    most_rows: int

    @property
    def vectors(self) -> int:
        return -(-self.channels // self.lanes)

    @property
    def full(self) -> int:
        return self.channels // self.lanes // self.blocks

    @property
    def tail(self) -> tuple[int, ...]:
        first = self.full * self.blocks
        last = self.channels - self.lanes
        return tuple(min(v * self.lanes, last) for v in range(first, self.vectors))

    def follow(self, schedule: FloatSchedule | None) -> Panels:
        """Return panels of a schedule. None: these."""
        if schedule is None:
            return self
        return replace(self, blocks=schedule.blocks, most_rows=schedule.rows)

    def starts_of(self, panel: Expr) -> list[Expr]:
        """List the first channel of each vector of a full panel."""
        return [(panel * self.blocks + block) * self.lanes for block in range(self.blocks)]

    def starts(self) -> list[int]:
        """List the first channel of each vector, in packed order."""
        last = self.channels - self.lanes
        return [min(v * self.lanes, last) for v in range(self.vectors)]


@dataclass(frozen=True)
class FloatSchedule:
    """How a product is computed. It changes the time and no bit: each sum has the same order.

    Attributes:
        blocks: Vectors of a panel.
        rows: Most rows of a tile.
        by_panels: Whether all rows are computed for each panel, and not all panels for each tile.
    """

    blocks: int
    rows: int
    by_panels: bool


def list_float_schedules(panels: Panels, by_panels: bool, isa: FloatIsa) -> list[FloatSchedule]:
    """List the estimated best schedule, and others with full tiles of registers."""
    best = FloatSchedule(panels.blocks, panels.most_rows, by_panels)
    vectors = panels.channels // panels.lanes
    tiles = {best.blocks: best.rows} | {
        blocks: min(isa.accumulators // blocks, MOST_ROWS)
        for blocks in (2, 3)
        if blocks <= vectors and isa.accumulators // blocks >= 3
    }
    found = [
        FloatSchedule(*tile, order)
        for order in (by_panels, not by_panels)
        for tile in tiles.items()
    ]
    return [best, *[each for each in found if each != best]]


def choose_panels(
    channels: int, rows: int | None, isa: FloatIsa, pitch: int
) -> tuple[FloatIsa, Panels]:
    """Choose the panel width for `rows` rows (None: many): two vectors, more if there are few rows.

    Tiles have fewer rows if the rows fall into one set of the first-level cache (they are `pitch`
    values apart): one less than the set has lines, or it would drop lines before they are used up.
    If registers are left, panels are wider.
    """
    isa = isa.narrow(channels)
    vectors = -(-channels // isa.lanes)
    most_rows = MOST_ROWS
    if rows is not None and rows < 6:
        blocks = min(vectors, max(1, min(8, isa.accumulators // rows)))
    elif pitch * FLOAT_BYTES % SET_STRIDE == 0 and vectors >= 4 and isa.accumulators >= 24:
        most_rows = isa.caches.set_lines - 1
        # 7 rows of 4 vectors, plus weights and one word, need one more than 32 registers.
        blocks = min(isa.accumulators // most_rows, 3) if isa.accumulators >= 28 else 4
    elif vectors % 2 and vectors % 3 == 0 and isa.accumulators >= 24:
        blocks = 3
    else:
        blocks = min(vectors, 2)
    most_rows = max(1, min(isa.accumulators // blocks, most_rows))
    return isa, Panels(channels, isa.lanes, blocks, most_rows)


@dataclass(frozen=True)
class PanelTile:
    """One tile in a loop over panels of weights.

    Attributes:
        first: Number of the first vector of the panel.
        starts: First channel of each vector.
        index: Number of the tile of rows.
        ahead: What the tile fetches of the next panel.
    """

    first: Expr
    starts: list[Expr]
    index: Expr
    ahead: Ahead | None


@dataclass(frozen=True)
class Ahead:
    """What a tile fetches of the next panel of weights while it computes.

    All tiles of a panel fetch a share each. Weights of many channels come from the last-level cache
    or from memory, and need more time than the first tile of their panel computes.

    Attributes:
        start: First element.
        each: Elements for each step of the tile.
    """

    start: Expr
    each: int

    def fetch(self, weight: Buffer, step: Expr) -> None:
        """Fetch the share of a step into the second-level cache."""
        for element in range(0, self.each, CACHE_LINE // FLOAT_BYTES):
            emit_prefetch(weight, self.start + step * self.each + element, level=2)


def prefers_panels(
    weight_bytes: int, row_bytes: int, isa: FloatIsa, many_tiles: bool = False
) -> bool:
    """Whether weights are read panel by panel, with all rows for each, and not row by row.

    Each thread then reads all rows, also those that another thread has just written, and only its
    share of the weights.

    Args:
        row_bytes: Bytes of all rows of activations.
        many_tiles: Whether there are so many rows that reading them for each panel takes longer
            than reading the weights again.
    """
    if row_bytes <= isa.caches.near_bytes // 2:
        return weight_bytes > max(PANEL_WEIGHTS, row_bytes)
    return weight_bytes > RESIDENT_WEIGHTS and not many_tiles


def emit_panels(
    panels: Panels,
    steps: int,
    images: Any,
    image_tiles: int,
    threads: bool,
    isa: FloatIsa,
    emit: Callable[[PanelTile], None],
    first_weight: int = 0,
) -> None:
    """Emit a loop over all panels, and in it one over all tiles of rows.

    It is one loop, the last and narrower panel included, so that threads share it evenly.

    Args:
        steps: Weight vectors of each vector of channels.
        images: Number of images, which may be symbolic.
        image_tiles: Tiles of an image.
        first_weight: Offset of the packed weights.
    """
    items = panels.full + bool(panels.tail)
    tiles, least = images * image_tiles, (static(images) or 1) * image_tiles
    parts = min(ceil_div(LEAST_ITEMS, items), least) if threads else 1
    size = panels.blocks * steps * panels.lanes
    each = ceil_div(size, least * steps)
    is_ahead = size * FLOAT_BYTES <= isa.caches.near_bytes // 3

    def emit_part(first: Expr, starts: list[Expr], part: Expr) -> None:
        after = first_weight + (first + len(starts)) * (steps * panels.lanes)
        begin = T.floordiv(part * tiles, parts)
        with T.serial(T.floordiv((part + 1) * tiles, parts) - begin) as count:
            index = begin + count
            share = T.min(index * (each * steps), size - each * steps)
            emit(PanelTile(first, starts, index, Ahead(after + share, each) if is_ahead else None))

    with (T.parallel if threads else T.serial)(items * parts) as index:
        panel, part = T.floordiv(index, parts), T.floormod(index, parts)
        if not panels.tail:
            emit_part(panel * panels.blocks, panels.starts_of(panel), part)
            return
        with T.If(panel < panels.full):
            with T.Then():
                emit_part(panel * panels.blocks, panels.starts_of(panel), part)
            with T.Else():
                emit_part(panels.full * panels.blocks, list(panels.tail), part)


def choose_rows(total: int | None, most: int) -> int:
    """Choose the rows of a tile: `most`, or fewer if that wastes less at the end."""
    if total is None:
        return most
    if total <= most:
        return total
    return min(
        range(max(1, most // 2), most + 1),
        key=lambda rows: (-(-total // rows)) * (rows + 1.5),
    )


def emit_tile(
    isa: FloatIsa,
    rows: Sequence[Expr],
    blocks: int,
    image: Buffer,
    weight: Buffer,
    reduce: Callable[[Callable[[Expr, Callable[[int], Expr]], None]], None],
    finish: Callable[[int, int, Expr], None],
    prefetch: bool = True,
    touch: Callable[[int, int], None] | None = None,
    ahead: Callable[[Expr], None] | None = None,
) -> None:
    """Emit one register tile, whose sums start at 0.

    Args:
        rows: Offset of each row in `image`.
        blocks: Vectors of channels.
        image: Activations.
        weight: Weights.
        reduce: reduce(step) emits the loops and calls step(offset, weights). `offset` is the
            distance from a row's offset to the activation. weights(block) is the offset of a weight
            vector.
        finish: finish(row, block, value) stores a result.
        prefetch: Whether weights are read in memory order. Then they are fetched ahead, because
            large ones come from memory, at its latency.
        touch: touch(row, block) fetches what `finish` reads and writes, while the tile computes.
        ahead: ahead(offset) fetches what the next tile reads, while this one computes.
    """
    lanes = isa.lanes
    # Rows outer, blocks inner: the swapped order makes LLVM spill accumulators.
    slots = [(r, b) for r in range(len(rows)) for b in range(blocks)]
    accumulators = alloc_vectors(len(slots), lanes, "float32")
    for acc in accumulators:
        store_vector(acc, broadcast(T.float32(0), lanes), 0, lanes)
    if touch is not None:
        for r, b in slots:
            if b * lanes * FLOAT_BYTES % CACHE_LINE == 0:
                touch(r, b)

    def step(offset: Expr, weights: Callable[[int], Expr]) -> None:
        if ahead is not None and len(slots) >= LARGE_TILE:
            ahead(offset)
        if prefetch and len(slots) >= 8:
            for b in range(blocks):
                emit_prefetch(weight, weights(b) + PREFETCH_STEPS * blocks * lanes, level=1)
        for acc, (r, b) in zip(accumulators, slots, strict=True):
            x = broadcast(image[rows[r] + offset], lanes)
            product = x * load_vector(weight, weights(b), lanes)
            store_vector(acc, load_vector(acc, 0, lanes) + product, 0, lanes)

    reduce(step)
    for acc, (r, b) in zip(accumulators, slots, strict=True):
        finish(r, b, load_vector(acc, 0, lanes))


def declare_arguments(
    *arguments: tuple[str, tuple[Any, ...]] | tuple[str, tuple[Any, ...], str] | None,
) -> list[Any]:
    """Declare the arguments (name, shape[, dtype]) of the kernel, as flat views; None stays None.

    The dtype is float32 if there is none.
    """

    def declare(name: str, shape: tuple[Any, ...], dtype: str = "float32") -> Buffer:
        return T.arg(name, T.Buffer(shape, dtype))

    buffers = [None if a is None else declare(*a) for a in arguments]
    return [None if b is None else flat_view(b) for b in buffers]


def static(value: Any) -> int | None:
    """Return the extent as an int if it is known, else None."""
    return int(value) if isinstance(value, int | tirx.IntImm) else None


@dataclass(frozen=True)
class FloatCopy:
    """Copy of one input of a concatenation.

    `shape` (..., C) is copied into `columns` (first, count) of a tensor with `count` columns. The
    leading extents may be symbolic.
    """

    shape: tuple[Any, ...]
    columns: tuple[int, int]


def make_copy(spec: FloatCopy, isa: FloatIsa, name: str = "float_copy") -> PrimFunc:
    """Make PrimFunc(x, y), for `call_tir`. Other columns of y stay as they are."""
    (*leading, width), (first, pitch) = spec.shape, spec.columns
    rows: Any = 1
    for extent in leading:
        known = static(extent)
        rows = rows * (extent if known is None else known)

    def body() -> None:
        x, y = declare_arguments(("x", spec.shape), ("y", (*leading, pitch)))
        size = prod(static(extent) or 1 for extent in spec.shape)
        with (T.parallel if size * 4 >= PARALLEL_BYTES else T.serial)(rows) as row:
            emit_vector_loop(
                width,
                isa.lanes,
                lambda at, lanes: store_vector(
                    y, load_vector(x, row * width + at, lanes), row * pitch + first + at, lanes
                ),
            )

    return build_kernel(name, body)
