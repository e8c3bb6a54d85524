"""Plan of a product with grouped weights + arguments -> its products on tiles, for many rows.

    A     16 rows x up to 64 bytes of a group, from a copy of the rows with one tile after the other
    B     16 words x 16 outputs x 4 bytes: codes minus zero points as int8, or codes as uint8 if
          there are offsets, unpacked from a panel
    sums  of a group, exact; stored to memory, from where vectors are multiplied by the scales and
          added to the float sums of the tile, which are in registers. First all products of a tile
          and a block, then all additions: taking turns, each waits for the other.

Blocks of a few panels by a few groups are unpacked once and multiplied with all rows of a chunk.
They fit the first-level cache, together with the same groups of 16 rows. Between the blocks the
float sums of a row are kept in memory. The groups of a row are added from the first to the last, as
on vectors, so both have the same bits.

The last tile of a chunk repeats the last row, which writes the same values twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    alloc_vectors,
    alloc_workspace,
    broadcast,
    ceil_div,
    constant,
    emit_prefetch,
    emit_sum,
    emit_vector_loop,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.grouped_dot import WORD, multiply_add
from relayquant.codegen.kernels.integer.grouped_plan import (
    Arguments,
    GroupedPlan,
    common_zero,
    read_zero,
    take_word,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.matrix_unit import MatrixUnit, Tiles

#: Panels of a block, and bytes of its weights.
BLOCK_PANELS, BLOCK_BYTES = 2, 16 * 1024


@dataclass(frozen=True)
class TiledGroups:
    """Sizes of a product with grouped weights on a matrix unit."""

    plan: GroupedPlan
    unit: MatrixUnit

    @cached_property
    def words(self) -> int:
        """Words of a group, and vectors of its unpacked weights."""
        return self.plan.stride // WORD

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        """(first word, words) of each product of tiles of a group."""
        most = self.unit.row_bytes // WORD
        return [(at, min(most, self.words - at)) for at in range(0, self.words, most)]

    @cached_property
    def panels(self) -> int:
        return min(BLOCK_PANELS, self.plan.panels)

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of a group of unpacked weights."""
        return self.words * self.plan.vector_bytes

    @cached_property
    def groups(self) -> int:
        """Groups of a block."""
        fitting = max(BLOCK_BYTES // (self.group_bytes * self.panels), 1)
        blocks = ceil_div(self.plan.groups, fitting)
        return ceil_div(self.plan.groups, blocks)

    @cached_property
    def blocks(self) -> int:
        """Blocks of a row."""
        return ceil_div(self.plan.groups, self.groups)

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of the copy of the rows of a tile."""
        return self.unit.rows * self.plan.groups * self.plan.stride

    @cached_property
    def chunk_tiles(self) -> int:
        """Most tiles of a chunk of rows."""
        return self.plan.chunk_rows // self.unit.rows

    @cached_property
    def register_shapes(self) -> list[tuple[int, int]]:
        """(rows, bytes of a row): the sums, then the rows and the weights of each size of step."""
        rows, size = self.unit.rows, self.unit.row_bytes
        shapes = [(rows, size)]
        for words in dict.fromkeys(words for _, words in self.steps):
            shapes += [(rows, words * WORD), (words, size)]
        return shapes

    def number_operands(self, words: int) -> int:
        """Return the register of the rows for a step; the next one is for the weights."""
        return 1 if words == self.steps[0][1] else 3


def emit_tiled_rows(plan: GroupedPlan, arguments: Arguments, threads: bool) -> None:
    """Emit all rows, one chunk after the other. Threads share the panels."""
    assert plan.unit is not None
    form, unit = TiledGroups(plan, plan.unit), plan.unit
    side, size = form.panels, form.chunk_tiles * unit.rows
    rows = arguments.rows
    with T.serial(T.floordiv(rows + (size - 1), size)) as chunk:
        first = T.bind(chunk * size)
        count = T.bind(T.min(rows - first, size))
        tiles = T.bind(T.floordiv(count + (unit.rows - 1), unit.rows))
        prepared = emit_tile_copy(form, arguments, first, tiles)
        with (T.parallel if threads else T.serial)(ceil_div(plan.panels, side)) as band:
            registers = unit.configure(form.register_shapes)
            panel = T.bind(T.min(band * side, plan.panels - side))
            emit_band(form, arguments, registers, prepared, panel, first, tiles)
            registers.release()


@dataclass(frozen=True, eq=False)
class TiledRows:
    """Rows of a chunk as tiles read them: for each tile and step one after the other.

    `sums`, float32: the sum of each group of each row, with the rows of a tile next to each other.
    None if groups have no offsets. `scales`, in the same order: None if there is one for a row.
    """

    copy: Buffer
    sums: Buffer | None
    scales: Buffer | None


def emit_tile_copy(form: TiledGroups, arguments: Arguments, first: Expr, tiles: Expr) -> TiledRows:
    """Copy the rows from `first` on."""
    plan, rows = form.plan, form.unit.rows
    spec = plan.spec
    copy = alloc_workspace(form.chunk_tiles * form.tile_bytes, "int8")
    count = form.chunk_tiles * plan.groups * rows
    sums = alloc_workspace(count, "float32") if spec.has_offsets else None
    scales = alloc_workspace(count, "float32") if spec.group_scales else None
    last = spec.features - (plan.groups - 1) * spec.group_size

    with T.grid(tiles, rows) as (tile, row):
        number = T.bind(T.min(first + tile * rows + row, arguments.rows - 1))

        def copy_group(group: Expr, length: int) -> None:
            origin = number * spec.features + group * spec.group_size
            start = tile * form.tile_bytes + group * (rows * plan.stride)
            for word, words in form.steps:
                at, size = word * WORD, words * WORD
                to = start + at * rows + row * size
                valid = min(max(length - at, 0), size)
                if valid:
                    copy_bytes(arguments.data, origin + at, copy, to, valid)
                if valid < size:
                    with T.serial(size - valid) as place:
                        T.buffer_store(copy, T.int8(0), [to + valid + place])
            place = (tile * plan.groups + group) * rows + row
            scale = T.float32(1)
            if scales is not None and arguments.group_scale is not None:
                scale = T.bind(arguments.group_scale[number * plan.groups + group])
                T.buffer_store(scales, scale, [place])
            if sums is not None:
                value = T.Cast("float32", emit_sum(arguments.data, origin, length))
                T.buffer_store(sums, value * scale, [place])

        full = plan.groups if last == spec.group_size else plan.groups - 1
        if full:
            with T.serial(full) as group:
                copy_group(group, spec.group_size)
        if last != spec.group_size:
            copy_group(T.int64(plan.groups - 1), last)
    return TiledRows(copy, sums, scales)


def copy_bytes(source: Buffer, start: Expr, target: Buffer, to: Expr, count: int) -> None:
    def move(offset: Expr, lanes: int) -> None:
        store_vector(target, load_vector(source, start + offset, lanes), to + offset, lanes)

    emit_vector_loop(count, COPY_BYTES, move)


def emit_band(
    form: TiledGroups,
    arguments: Arguments,
    registers: Tiles,
    prepared: TiledRows,
    panel: Expr,
    first: Expr,
    tiles: Expr,
) -> None:
    """Emit the outputs of some panels, from `panel` on, for all rows of a chunk."""
    plan, lanes, rows = form.plan, form.plan.dot.lanes, form.unit.rows
    weights = alloc_workspace(form.panels * form.groups * form.group_bytes, plan.tile_dtype)
    totals = alloc_workspace(form.chunk_tiles * form.panels * rows * lanes, "float32")
    sums = alloc_workspace(form.groups * rows * lanes, "int32")
    with T.serial(form.blocks) as block:
        start = T.bind(block * form.groups)
        groups = T.bind(T.min(plan.groups - start, form.groups))
        with T.grid(form.panels, groups) as (side, group):
            at = T.bind((panel + side) * plan.groups + start + group)
            to = T.bind((side * form.groups + group) * form.group_bytes)
            emit_unpacked(form, arguments, weights, at, to)
        with T.grid(tiles, form.panels) as (tile, side):
            kept = T.bind((tile * form.panels + side) * (rows * lanes))
            accs = alloc_vectors(rows, lanes, "float32")
            zero = constant("float32", 0, lanes)
            for row, acc in enumerate(accs):
                value = load_vector(totals, kept + row * lanes, lanes)
                store_vector(acc, T.if_then_else(block == 0, zero, value), 0, lanes)
            data = T.bind(tile * form.tile_bytes + start * (rows * plan.stride))
            weight = T.bind(side * (form.groups * form.group_bytes))

            with T.If(block == form.blocks - 1), T.Then():
                emit_output_prefetch(form, arguments, panel + side, first + tile * rows)
            with T.serial(groups) as group:
                at = T.bind(data + group * (rows * plan.stride))
                to = T.bind(weight + group * form.group_bytes)
                slot = group * (rows * lanes)
                emit_tile_sums(form, registers, prepared.copy, at, weights, to, sums, slot)
            with T.serial(groups) as group:
                at = T.bind(((panel + side) * plan.groups + start + group) * lanes)
                slot = T.bind(group * (rows * lanes))
                first_row = T.bind((tile * plan.groups + start + group) * rows)
                emit_scaled(form, arguments, at, sums, slot, prepared, first_row, accs)
            with T.If(block < form.blocks - 1):
                with T.Then():
                    for row, acc in enumerate(accs):
                        store_vector(totals, load_vector(acc, 0, lanes), kept + row * lanes, lanes)
                with T.Else():
                    emit_outputs(form, arguments, accs, panel + side, first + tile * rows)


def emit_unpacked(
    form: TiledGroups, arguments: Arguments, weights: Buffer, at: Expr, to: Expr
) -> None:
    """Unpack group number `at` of the weight: codes minus zero points."""
    plan, lanes, size = form.plan, form.plan.dot.lanes, form.plan.vector_bytes
    dtype = f"{plan.tile_dtype}x{size}"
    zero = read_zero(plan, arguments, at)
    if plan.spec.has_offsets:
        zeros = None
    elif zero is None:  # the middle of a byte, 128, is -128 as int8
        zeros = constant("int8", (common_zero(plan.spec) + 128) % 256 - 128, size)
    else:
        zeros = T.bind(T.reinterpret(dtype, zero * constant("int32", 0x01010101, lanes)))
    with T.serial(plan.vectors) as number:
        index = (at * plan.vectors + number) * size
        loaded = arguments.codes.vload([index], f"uint8x{size}")
        words = T.bind(T.reinterpret(vector("int32", lanes), loaded))
        for place in range(plan.each):
            value = T.reinterpret(dtype, take_word(plan, words, place))
            value = value if zeros is None else value - zeros
            store_vector(weights, value, to + (number * plan.each + place) * size, size)


def emit_tile_sums(
    form: TiledGroups,
    registers: Tiles,
    copy: Buffer,
    data: Expr,
    weights: Buffer,
    weight: Expr,
    sums: Buffer,
    slot: Expr,
) -> None:
    """Emit the sums of a group for the rows of a tile and the outputs of a panel."""
    size = form.plan.vector_bytes
    registers.clear(0)
    for word, words in form.steps:
        a = form.number_operands(words)
        registers.load(a, copy, data + word * WORD * form.unit.rows, words * WORD)
        registers.load(a + 1, weights, weight + word * size, size)
        registers.multiply(0, a, a + 1, ("int8", form.plan.tile_dtype))
    registers.store(0, sums, slot, form.plan.dot.lanes)


def emit_scaled(
    form: TiledGroups,
    arguments: Arguments,
    at: Expr,
    sums: Buffer,
    slot: Expr,
    prepared: TiledRows,
    first_row: Expr,
    accs: list[Buffer],
) -> None:
    """Add the sums of a group, times its scales, to the float sums of each row.

    With offsets, also the sums of the rows, times the offsets. `first_row` is the place of the
    first row in the sums and scales of the prepared rows.
    """
    lanes, has_fma = form.plan.dot.lanes, form.plan.dot.has_fma
    dtype = vector("float32", lanes)
    scale = T.bind(T.Cast(dtype, load_vector(arguments.scale, at, lanes)))
    offset = None
    if arguments.offsets is not None:
        offset = T.bind(T.Cast(dtype, load_vector(arguments.offsets, at, lanes)))
    for row, acc in enumerate(accs):
        value = T.Cast(dtype, load_vector(sums, slot + row * lanes, lanes))
        factor = scale
        if prepared.scales is not None:
            factor = scale * broadcast(prepared.scales[first_row + row], lanes)
        value = multiply_add(has_fma, value, factor, load_vector(acc, 0, lanes), lanes)
        if offset is not None and prepared.sums is not None:
            own = broadcast(prepared.sums[first_row + row], lanes)
            value = multiply_add(has_fma, own, offset, value, lanes)
        store_vector(acc, value, 0, lanes)


def emit_output_prefetch(form: TiledGroups, arguments: Arguments, panel: Expr, row: Expr) -> None:
    """Fetch the memory that `emit_outputs` will write. Results of many rows and outputs exceed the
    second-level cache, and the stores of a tile would wait for it.
    """
    with T.serial(form.unit.rows) as offset:
        emit_prefetch(
            arguments.out, find_output(form, arguments, panel, row + offset), 1, write=True
        )


def emit_outputs(
    form: TiledGroups, arguments: Arguments, accs: list[Buffer], panel: Expr, row: Expr
) -> None:
    """Store the outputs of a panel for the rows of a tile, from `row` on."""
    units, lanes = form.plan.spec.units, form.plan.dot.lanes
    for offset, acc in enumerate(accs):
        value = load_vector(acc, 0, lanes)
        if arguments.row_scale is not None:
            number = T.min(row + offset, arguments.rows - 1)
            value = value * broadcast(arguments.row_scale[number], lanes)
        at = find_output(form, arguments, panel, row + offset)
        store_vector(arguments.out, value, at, lanes, min(lanes, units))


def find_output(form: TiledGroups, arguments: Arguments, panel: Expr, row: Expr) -> Expr:
    """Return the index of the first output of a panel in a row. The last row stands for rows that
    are missing.
    """
    units, lanes = form.plan.spec.units, form.plan.dot.lanes
    channel = T.min(panel * lanes, max(units - lanes, 0))
    return T.bind(T.min(row, arguments.rows - 1) * units + channel)
