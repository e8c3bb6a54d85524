"""Specification of a product with grouped weights -> its kernel, and the kernel that gathers rows.

The weights stay packed in memory.

    y[m, n] = s_x[m] * sum over groups g of s_w[n, g] * sum over k in g of x[m, k] * (c[n, k] - z)

or, with offsets o,

    y[m, n] = s_x[m] * sum over g of (s_w[n, g] * sum of x[m, k] * c[n, k]) + (o[n, g] * sum of x)

With a scale s_x[m, g] for each group of a row, it multiplies s_w[n, g] and the sum of x instead.

With a gate, the result is silu of the first half of y times the second half. A tile has panels of
both halves then.

The integer sums of a group are exact. They become float32, and the groups are added from the first
to the last, with fused multiply-adds if the target has them. `plan` says how weights are
stored.

One kernel serves any number of rows. Chunks of rows are prepared: they are copied, so that rows of
a tile do not fall into the same sets of a cache, and groups are added up for zero points. Then
threads share the panels. A single row waits for memory, so it is multiplied with several panels at
a time. Many rows go to a matrix unit, if there is one that this process may use (`tiled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_THRESHOLD,
    alloc_vectors,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    emit_parts,
    emit_prefetch,
    emit_sum,
    emit_vector_loop,
    load_vector,
    name_extents,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.silu import emit_silu
from relayquant.codegen.kernels.grouped.dot import WORD, PairsDot, PartsDot, multiply_add
from relayquant.codegen.kernels.grouped.plan import (
    Arguments,
    GroupedDense,
    GroupedPlan,
    common_zero,
    declare_grouped,
    plan_grouped,
    read_zero,
    take_word,
)
from relayquant.codegen.kernels.grouped.tiled import emit_tiled_rows
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, fence
from relayquant.codegen.kernels.row_loops import emit_chunk
from relayquant.codegen.kernels.unit_permission import ask_unit, emit_if

#: Distance at which codes are prefetched into the first-level cache for a tile of rows; one row has
#: its own (`GroupedPlan.streams`). Without it, products of the first rows wait for the hardware's
#: own prefetching, which ends with each page and follows few streams.
TILE_PREFETCH = 8 * 1024
#: Fewest rows for which a matrix unit is faster than vectors.
FEWEST_TILE_ROWS = 16


def build_grouped_dense(spec: GroupedDense, isa: Isa, name: str = "grouped_dense") -> PrimFunc:
    """Make PrimFunc(x (*leading, K)[, x_scale (*leading, 1 or G)], codes, scale[, zeros], y
    (*leading, N)).

    The constants come from `pack_grouped`. A gate needs a plan that `can_gate`.
    """

    def body() -> None:
        plan = plan_grouped(spec, isa)
        arguments = declare_grouped(plan)
        on_tiles = ask_unit(plan.unit, arguments.rows, FEWEST_TILE_ROWS)
        work = spec.units * spec.features
        if work >= PARALLEL_THRESHOLD or work * plan.chunk_rows < PARALLEL_THRESHOLD:
            emit_rows(plan, arguments, on_tiles, threads=work >= PARALLEL_THRESHOLD)
            return
        with T.If(arguments.rows * work >= PARALLEL_THRESHOLD):
            with T.Then():
                emit_rows(plan, arguments, on_tiles, threads=True)
            with T.Else():
                emit_rows(plan, arguments, on_tiles, threads=False)

    return build_kernel(name, body)


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows of a chunk as dot products read them.

    Attributes:
        first: Number of the first row among all rows.
        data: The rows, `row_stride` elements each.
        starts: Initial value of the sum of each group of each row, int32. It is minus the sum of
            the row times the common zero point. If groups have separate zero points, it is minus
            the sum of the row. None if it is 0.
        sums: Sum of each group of each row, float32, times its scale if each group has one. None
            if groups have no offsets.
    """

    first: Expr
    data: Buffer
    starts: Buffer | None
    sums: Buffer | None


@dataclass(frozen=True, eq=False)
class PanelGroup:
    """A group of a panel: where its codes begin, its zero points, and its sums for each row."""

    index: Expr
    zero: Expr | None
    sums: Sequence[Buffer]


def emit_rows(
    plan: GroupedPlan, arguments: Arguments, on_tiles: Expr | bool, threads: bool
) -> None:
    """Emit all rows, on the matrix unit if `on_tiles`."""
    emit_if(
        on_tiles,
        lambda: emit_tiled_rows(plan, arguments, threads),
        lambda: emit_vector_rows(plan, arguments, threads),
    )


def emit_vector_rows(plan: GroupedPlan, arguments: Arguments, threads: bool) -> None:
    """Emit all rows on vectors. A single row has separate code that uses several panels at once."""
    rows = arguments.rows
    if isinstance(rows, int) or plan.row_panels == plan.tile_panels:
        is_one = isinstance(rows, int) and rows == 1
        (emit_one_row if is_one else emit_many_rows)(plan, arguments, threads)
        return
    with T.If(rows == 1):
        with T.Then():
            emit_one_row(plan, arguments, threads)
        with T.Else():
            emit_many_rows(plan, arguments, threads)


def emit_one_row(plan: GroupedPlan, arguments: Arguments, threads: bool) -> None:
    """Emit one row, by several panels at once. The last of them overlap their neighbours."""
    side, row = plan.row_panels, T.int64(0)
    prepared = emit_preparation(plan, arguments, row, T.int64(1), 1)
    with (T.parallel if threads else T.serial)(ceil_div(plan.panels, side)) as band:
        first = locate_band(plan, band, side)
        emit_tile(plan, arguments, prepared, [row], list_panels(plan, first, side))


def locate_band(plan: GroupedPlan, band: Expr, side: int) -> Expr:
    """Return the first of the `side` panels of a band. The last band may overlap the one before."""
    parts = 2 if plan.spec.is_gated else 1
    size, step = plan.panels // parts, side // parts
    return band if step == 1 else T.bind(T.min(band * step, size - step))


def list_panels(plan: GroupedPlan, first: Expr, side: int) -> list[Expr]:
    """Return `side` panels from the first on: neighbours, or as many of each half of a gate."""
    starts = (0, plan.panels // 2) if plan.spec.is_gated else (0,)
    return [first + (start + i) for start in starts for i in range(side // len(starts))]


def emit_many_rows(plan: GroupedPlan, arguments: Arguments, threads: bool) -> None:
    """Emit rows, one chunk after the other."""
    side, size = plan.tile_panels, plan.chunk_rows
    rows = arguments.rows
    with T.serial(ceil_div(rows, size)) as chunk:
        first = T.bind(chunk * size)
        count = T.bind(T.min(rows - first, size))
        prepared = emit_preparation(plan, arguments, first, count, size)

        def emit(kind: int, members: list[Expr], panel: Expr, index: Expr) -> None:
            emit_tile(plan, arguments, prepared, members, list_panels(plan, panel, side))

        with (T.parallel if threads else T.serial)(ceil_div(plan.panels, side)) as band:
            panel = locate_band(plan, band, side)
            emit_chunk(rows, plan.heights, first, size, panel, emit)


def emit_preparation(
    plan: GroupedPlan, arguments: Arguments, first: Expr, count: Expr, rows: int
) -> PreparedRows:
    """Copy `count` rows, at most `rows`, to where tiles read them, and add up their groups."""
    spec, groups, size, stride = plan.spec, plan.groups, plan.spec.group_size, plan.stride
    data, width = arguments.data, plan.row_stride
    factor = -1 if spec.has_zeros else plan.offset - common_zero(spec)
    starts = alloc_workspace(rows * groups, "int32") if factor and not spec.is_float else None
    sums = alloc_workspace(rows * groups, "float32") if spec.has_offsets else None
    copy = alloc_workspace(rows * width, data.dtype)
    wide = alloc_workspace(rows * width, "int16") if isinstance(plan.dot, PairsDot) else None

    with T.serial(count) as row:
        source = arguments.find_source(first + row)

        def prepare_group(group: Expr, length: int) -> None:
            origin = source * spec.features + group * size
            at = row * width + group * stride

            def move(offset: Expr, lanes: int) -> None:
                store_vector(copy, load_vector(data, origin + offset, lanes), at + offset, lanes)

            emit_vector_loop(length, COPY_BYTES // 2, move)
            with T.serial(stride - length) as place:
                T.buffer_store(copy, T.Cast(copy.dtype, T.int32(0)), [at + length + place])
            if starts is not None or sums is not None:
                value = T.bind(emit_sum(data, origin, length))
                if starts is not None:
                    T.buffer_store(starts, value * factor, [row * groups + group])
                if sums is not None:
                    real = T.Cast("float32", value)
                    if arguments.group_scale is not None:
                        real = real * arguments.group_scale[source * groups + group]
                    T.buffer_store(sums, real, [row * groups + group])

        emit_parts(spec.features, size, prepare_group)
        if wide is not None:
            with T.serial(groups * stride // WORD) as word:
                at = row * width + word * WORD
                value = T.Cast(f"int16x{WORD}", load_vector(copy, at, WORD))
                order = [T.int32(i) for i in (0, 2, 1, 3)]
                store_vector(wide, T.Shuffle([value], order), at, WORD)
    return PreparedRows(first, copy if wide is None else wide, starts, sums)


def emit_tile(
    plan: GroupedPlan,
    arguments: Arguments,
    prepared: PreparedRows,
    members: Sequence[Expr],
    panels: Sequence[Expr],
) -> None:
    """Emit the outputs of some panels for some rows.

    Codes of several panels are read in parallel.
    """
    dot, lanes = plan.dot, plan.dot.lanes
    totals = [alloc_vectors(len(members), lanes, "float32") for _ in panels]
    for total in (each for row_totals in totals for each in row_totals):
        store_vector(total, constant("float32", 0, lanes), 0, lanes)
    accs = [alloc_vectors(len(members), lanes, dot.sum_dtype) for _ in panels]
    sources = [arguments.find_source(row) for row in members]
    with T.serial(plan.groups) as group:
        places = [T.bind(arguments.find_panel(panel) * plan.groups + group) for panel in panels]
        emit_group(plan, arguments, prepared, members, group, places, accs)
        for at, sums, row_totals in zip(places, accs, totals, strict=True):
            scale = T.Cast(
                vector("float32", lanes), load_vector(arguments.scale, at * lanes, lanes)
            )
            for acc, total, row, source in zip(sums, row_totals, members, sources, strict=True):
                value, factor = T.Cast(vector("float32", lanes), load_vector(acc, 0, lanes)), scale
                if arguments.group_scale is not None:
                    own = arguments.group_scale[source * plan.groups + group]
                    factor = scale * broadcast(own, lanes)
                before = load_vector(total, 0, lanes)
                value = multiply_add(dot.has_fma, value, factor, before, lanes)
                if arguments.offsets is not None and prepared.sums is not None:
                    offset = load_vector(arguments.offsets, at * lanes, lanes)
                    offset = T.Cast(vector("float32", lanes), offset)
                    number = (row - prepared.first) * plan.groups + group
                    own = broadcast(prepared.sums[number], lanes)
                    value = multiply_add(dot.has_fma, own, offset, value, lanes)
                store_vector(total, value, 0, lanes)
    emit_results(plan, arguments, members, panels, totals)


def emit_results(
    plan: GroupedPlan,
    arguments: Arguments,
    members: Sequence[Expr],
    panels: Sequence[Expr],
    totals: Sequence[Sequence[Buffer]],
) -> None:
    """Store the results of some panels for some rows. A gate reads rounded products."""
    spec, lanes = plan.spec, plan.dot.lanes
    width = min(lanes, spec.outputs)
    count = len(panels) // 2 if spec.is_gated else len(panels)
    results = [arguments.find_result(row) for row in members]
    sources = [arguments.find_source(row) for row in members]

    def finish(total: Buffer, place: int) -> Expr:
        value = load_vector(total, 0, lanes)
        if arguments.row_scale is not None:
            value = value * broadcast(arguments.row_scale[sources[place]], lanes)
        return fence(value, lanes) if spec.is_gated else value

    for number, panel in enumerate(panels[:count]):
        channel = T.min(panel * lanes, spec.outputs - width)
        for place, result in enumerate(results):
            value = finish(totals[number][place], place)
            if spec.is_gated:
                other = finish(totals[count + number][place], place)
                value = emit_silu(value, lanes) * other
            at = result * spec.outputs + channel
            store_vector(arguments.out, value, at, lanes, width)


def emit_group(
    plan: GroupedPlan,
    arguments: Arguments,
    prepared: PreparedRows,
    members: Sequence[Expr],
    group: Expr,
    places: Sequence[Expr],
    accs: Sequence[Sequence[Buffer]],
) -> None:
    """Emit the sums of a group of some rows with some panels, at these numbers of the weight."""
    spec, dot, lanes = plan.spec, plan.dot, plan.dot.lanes
    panels: list[PanelGroup] = []
    for at, sums in zip(places, accs, strict=True):
        at_codes = T.bind(at * (plan.vectors * plan.vector_bytes))
        zero = read_zero(plan, arguments, at)
        panels.append(PanelGroup(at_codes, zero, sums))
        for acc, row in zip(sums, members, strict=True):
            value = constant(dot.sum_dtype, 0, lanes)
            if prepared.starts is not None:
                start = prepared.starts[(row - prepared.first) * plan.groups + group]
                value = broadcast(start, lanes)
                if spec.has_zeros:
                    value = value * zero
            store_vector(acc, value, 0, lanes)

    def emit_vectors(number: Expr, count: int) -> None:
        # Bound to names: otherwise TVM would take long to simplify their values in every index.
        offset = group * plan.stride + number * (plan.each * WORD)
        starts = [T.bind((row - prepared.first) * plan.row_stride + offset) for row in members]
        blocks = [
            replace(panel, index=T.bind(panel.index + number * plan.vector_bytes))
            for panel in panels
        ]
        emit_words(plan, arguments.codes, blocks, count, prepared.data, starts)

    height = len(members) * (len(panels) if len(members) > 1 else 1)
    emit_blocks(plan.vectors, plan.block_vectors(height), emit_vectors)
    if len(members) == 1:
        ahead = ceil_div(plan.streams.ahead, plan.vectors * plan.vector_bytes)
        for at, values in product(places, arguments.group_values):
            emit_prefetch(values, (at + ahead) * lanes, level=1)


def emit_blocks(total: int, size: int, emit: Callable[[Expr, int], None]) -> None:
    """Call emit(first, count) for blocks of `size`, then for the rest."""
    whole, rest = divmod(total, size)
    if whole == 1:
        emit(T.int64(0), size)
    elif whole:
        with T.serial(whole) as block:
            emit(T.bind(block * size), size)
    if rest:
        emit(T.int64(whole * size), rest)


def emit_words(
    plan: GroupedPlan,
    codes: Buffer,
    panels: Sequence[PanelGroup],
    vectors: int,
    rows: Buffer,
    starts: Sequence[Expr],
) -> None:
    """Add the products of codes of each panel, and of the words of each row from its start on.

    Panels take turns, so that their sums do not wait for each other, and a word is read once.
    """
    dot, lanes, dtype = plan.dot, plan.dot.lanes, plan.dot.sum_dtype
    distance = plan.streams.ahead if len(starts) == 1 else TILE_PREFETCH
    accs = [acc for panel in panels for acc in panel.sums]
    sums = accs
    if isinstance(dot, PartsDot):
        lanes, dtype = dot.part_lanes, dot.part_dtype
        sums = alloc_vectors(len(accs), lanes, dtype)
        for total in sums:
            store_vector(total, constant(dtype, 0, lanes), 0, lanes)
    read = [dot.read_words(rows, start, vectors * plan.each) for start in starts]
    for number in range(vectors):
        loaded = []
        for panel in panels:
            index = panel.index + number * plan.vector_bytes
            emit_prefetch(codes, index + distance, level=1)
            loaded.append(codes.vload([index], f"uint8x{plan.vector_bytes}"))
        for place in range(plan.each):
            operands = []
            for each, panel in zip(loaded, panels, strict=True):
                words = T.reinterpret(vector("int32", dot.lanes), each)
                operands.append(dot.spread_codes(take_word(plan, words, place), panel.zero))
            for row, row_words in enumerate(read):
                word = row_words[number * plan.each + place]
                for operand, total in zip(operands, sums[row :: len(read)], strict=True):
                    value = dot.dot(load_vector(total, 0, lanes), operand, word)
                    store_vector(total, value, 0, lanes)
    if isinstance(dot, PartsDot):
        for acc, part in zip(accs, sums, strict=True):
            value = dot.join(load_vector(acc, 0, dot.lanes), load_vector(part, 0, lanes))
            store_vector(acc, value, 0, dot.lanes)


@dataclass(frozen=True)
class GroupedTake:
    """Rows of a grouped weight by their numbers.

    `dense` describes the layout of the weight. `leading` are the extents of the numbers, None for
    an extent known only at run time.
    """

    leading: tuple[int | None, ...]
    index_dtype: str
    dense: GroupedDense


def build_grouped_take(spec: GroupedTake, isa: Isa) -> PrimFunc:
    """Make PrimFunc(indices (*leading), codes, scale[, zeros], y (*leading, K)).

    The embedding reads the same constants as products.
    """

    def body() -> None:
        dense = spec.dense
        plan = plan_grouped(dense, isa)
        lanes, count = plan.dot.lanes, plan.panels * plan.groups * plan.dot.lanes
        extents = name_extents(spec.leading)
        rows = prod(extents)
        indices = T.arg("indices", T.Buffer(tuple(extents), spec.index_dtype))
        codes = T.arg("codes", T.Buffer((count * plan.vectors * WORD,), "uint8"))
        scale = T.arg("scale", T.Buffer((count,), plan.scale_dtype))
        zeros = None
        if dense.zeros_dtype:
            zeros = T.arg("zeros", T.Buffer((count,), plan.zeros_dtype))
        out = T.arg("y", T.Buffer((*extents, dense.features), "float32"))
        numbers = T.decl_buffer((rows,), indices.dtype, data=indices.data)
        result = T.decl_buffer((rows * dense.features,), "float32", data=out.data)
        with T.serial(rows) as row:
            number = T.bind(T.floormod(T.Cast("int64", numbers[row]), dense.units))
            panel = T.bind(T.floordiv(number, lanes))
            lane = T.bind(number - T.min(panel * lanes, max(dense.units - lanes, 0)))

            def emit_group(group: Expr, length: int) -> None:
                at = T.bind(panel * plan.groups + group)
                step = T.bind(T.Cast("float32", scale[at * lanes + lane]))
                shift = plan.offset if plan.bits == 8 else 0
                zero, offset = T.int32(common_zero(dense) - shift), None
                if zeros is not None:
                    own = zeros[at * lanes + lane]
                    if dense.has_zeros:
                        zero = T.bind(T.Cast("int32", own) - shift)
                    else:
                        offset = T.bind(T.Cast("float32", own))
                with T.serial(length) as place:
                    word = T.floordiv(place, WORD)
                    start = (at * plan.vectors + T.floordiv(word, plan.each)) * plan.vector_bytes
                    byte = codes[start + lane * WORD + T.floormod(place, WORD)]
                    value = T.Cast("int32", byte)
                    if shift:
                        value = T.Cast("int32", T.reinterpret("int8", byte))
                    if plan.each > 1:
                        bit = T.Cast("int32", T.floormod(word, plan.each) * plan.bits)
                        value = T.bitwise_and(T.shift_right(value, bit), (1 << plan.bits) - 1)
                    if dense.levels and plan.has_codes:
                        value = select_level(T.bind(value), dense.levels)
                    real = T.Cast("float32", value - zero)
                    if offset is None:
                        real = real * step
                    else:
                        real = multiply_add(plan.dot.has_fma, real, step, offset, 1)
                    index = row * dense.features + group * dense.group_size + place
                    T.buffer_store(result, real, [index])

            emit_parts(dense.features, dense.group_size, emit_group)

    return build_kernel("grouped_take", body)


def select_level(code: Expr, levels: Sequence[int]) -> Expr:
    """Return the level of a code 0..15, int32, from two constants of 8 bytes each."""
    low, high = (int.from_bytes(bytes(levels[i : i + 8]), "little") for i in (0, 8))
    # As signed numbers: TIR has no larger constants. The mask drops the copies of the sign.
    signed = [T.int64(half - (1 << 64 if half >> 63 else 0)) for half in (low, high)]
    half = T.Select(code < 8, *signed)
    bit = T.Cast("int64", T.bitwise_and(code, 7) * 8)
    return T.Cast("int32", T.bitwise_and(T.shift_right(half, bit), T.int64(255)))
