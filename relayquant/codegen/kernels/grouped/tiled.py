"""Plan of a product with grouped weights + arguments -> its products on tiles, for many rows.

    A     16 rows x up to 64 bytes of a group, from a copy of the rows with one tile after the other
    B     up to 16 words x 16 outputs x 4 bytes: codes minus zero points as int8, or codes as uint8
          if there are offsets, unpacked from a panel
    sums  of a group, exact; stored to memory, from where vectors are multiplied by the scales and
          added to float sums, which are in memory too

Tiles are multiplied two by two, so that an operand is loaded for two products. The sums of a group
are converted and added during the products of the next group: the additions take about as long as
the products, and do not wait for them.

Blocks of a few panels by a few groups are unpacked once and multiplied with all rows of a chunk.
They fit the first-level cache, together with the same groups of two tiles of rows. Meanwhile the
codes of the next block are fetched. The groups of a row are added from the first to the last, as on
vectors, so both have the same bits.

The last tiles of a chunk repeat the last row, which writes the same values twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    alloc_workspace,
    broadcast,
    ceil_div,
    constant,
    emit_parts,
    emit_prefetch,
    emit_shared_loop,
    emit_sum,
    emit_vector_loop,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.grouped.dot import WORD, multiply_add
from relayquant.codegen.kernels.grouped.plan import (
    Arguments,
    GroupedPlan,
    common_zero,
    read_zero,
    take_word,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.matrix_unit import MatrixUnit, Tiles

#: Tiles of rows, and panels, whose sums are in registers together.
SIDE = 2
#: Panels that are unpacked together, if there are many, and bytes of a block of their weights.
BAND_PANELS, BLOCK_BYTES = 4, 16 * 1024


@dataclass(frozen=True)
class TiledGroups:
    """Sizes of a product with grouped weights on a matrix unit."""

    plan: GroupedPlan
    unit: MatrixUnit

    @cached_property
    def steps(self) -> int:
        """Products of tiles of a group."""
        return ceil_div(self.plan.stride, self.unit.row_bytes)

    @cached_property
    def width(self) -> int:
        """Bytes of a row in a step. Zeros of the rows fill the last step up."""
        return ceil_div(self.plan.stride // WORD, self.steps) * WORD

    @cached_property
    def side(self) -> int:
        """Panels whose sums are in registers together."""
        return min(SIDE, self.plan.panels)

    @cached_property
    def panels(self) -> int:
        """Panels that are unpacked together."""
        is_even = self.plan.panels % BAND_PANELS == 0 or self.plan.panels > 4 * BAND_PANELS
        return BAND_PANELS if is_even else self.side

    @cached_property
    def step_bytes(self) -> int:
        """Bytes of a step of unpacked weights."""
        return self.width * self.plan.dot.lanes

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of a group of unpacked weights."""
        return self.steps * self.step_bytes

    @cached_property
    def groups(self) -> int:
        """Groups of a block: all blocks have as many."""
        fitting = max(BLOCK_BYTES // (self.group_bytes * self.panels), 1)
        return max(n for n in range(1, fitting + 1) if self.plan.groups % n == 0)

    @cached_property
    def tile(self) -> int:
        """Sums of a tile."""
        return self.unit.rows * self.plan.dot.lanes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a group of the rows of a tile."""
        return self.unit.rows * self.steps * self.width

    @cached_property
    def chunk_tiles(self) -> int:
        """Most tiles of a chunk of rows."""
        return ceil_div(self.plan.chunk_rows // self.unit.rows, SIDE) * SIDE

    @cached_property
    def register_shapes(self) -> list[tuple[int, int]]:
        """(rows, bytes of a row): the sums, the rows, and the weights."""
        rows, size = self.unit.rows, self.unit.row_bytes
        sums = [(rows, size)] * (SIDE * self.side)
        return sums + [(rows, self.width)] + [(self.width // WORD, size)] * self.side


def emit_tiled_rows(plan: GroupedPlan, arguments: Arguments, threads: bool) -> None:
    """Emit all rows, one chunk after the other. Threads share the panels."""
    assert plan.unit is not None
    form, unit = TiledGroups(plan, plan.unit), plan.unit
    size = form.chunk_tiles * unit.rows
    rows = arguments.rows
    with T.serial(ceil_div(rows, size)) as chunk:
        first = T.bind(chunk * size)
        count = T.bind(T.min(rows - first, size))
        tiles = T.bind(ceil_div(count, unit.rows))
        prepared = emit_tile_copy(form, arguments, first, tiles, threads)
        with (T.parallel if threads else T.serial)(ceil_div(plan.panels, form.panels)) as band:
            registers = unit.configure(form.register_shapes)
            panel = T.bind(T.min(band * form.panels, plan.panels - form.panels))
            TiledBand(form, arguments, registers, prepared, panel, first, tiles).emit()
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


def emit_tile_copy(
    form: TiledGroups, arguments: Arguments, first: Expr, tiles: Expr, threads: bool
) -> TiledRows:
    """Copy the rows from `first` on."""
    plan, rows, width = form.plan, form.unit.rows, form.width
    spec = plan.spec
    copy = alloc_workspace(form.chunk_tiles * plan.groups * form.row_bytes, "int8")
    count = form.chunk_tiles * plan.groups * rows
    sums = alloc_workspace(count, "float32") if spec.has_offsets else None
    scales = alloc_workspace(count, "float32") if spec.group_scales else None

    def copy_row(tile: Expr, row: Expr) -> None:
        number = T.bind(T.min(first + tile * rows + row, arguments.rows - 1))
        number = arguments.find_source(number)

        def copy_group(group: Expr, length: int) -> None:
            origin = number * spec.features + group * spec.group_size
            at_group = tile * plan.groups + group
            for step in range(form.steps):
                at = step * width
                to = at_group * form.row_bytes + at * rows + row * width
                valid = min(max(length - at, 0), width)
                if valid:
                    copy_bytes(arguments.data, origin + at, copy, to, valid)
                if valid < width:
                    with T.serial(width - valid) as place:
                        T.buffer_store(copy, T.int8(0), [to + valid + place])
            place = at_group * rows + row
            scale = T.float32(1)
            if scales is not None and arguments.group_scale is not None:
                scale = T.bind(arguments.group_scale[number * plan.groups + group])
                T.buffer_store(scales, scale, [place])
            if sums is not None:
                value = T.Cast("float32", emit_sum(arguments.data, origin, length))
                T.buffer_store(sums, value * scale, [place])

        emit_parts(spec.features, spec.group_size, copy_group)

    def copy_tile(tile: Expr) -> None:
        with T.serial(rows) as row:
            copy_row(tile, row)

    emit_shared_loop(tiles, threads, copy_tile)
    return TiledRows(copy, sums, scales)


def copy_bytes(source: Buffer, start: Expr, target: Buffer, to: Expr, count: int) -> None:
    def move(offset: Expr, lanes: int) -> None:
        store_vector(target, load_vector(source, start + offset, lanes), to + offset, lanes)

    emit_vector_loop(count, COPY_BYTES, move)


@dataclass(frozen=True, eq=False)
class GroupSums:
    """Position of four sums: two tiles of rows, two panels, a group.

    Attributes:
        group: Of the whole row.
        own: The group within its block.
        side: The first panel within the band.
        pair: Of tiles of rows.
        slot: Where its sums are kept until they are added.
    """

    group: Expr
    own: Expr
    side: Expr
    pair: Expr
    slot: Expr


@dataclass(frozen=True, eq=False)
class TiledBand:
    """The outputs of some panels, from `panel` on, for all rows of a chunk."""

    form: TiledGroups
    arguments: Arguments
    registers: Tiles
    prepared: TiledRows
    panel: Expr
    first: Expr
    tiles: Expr

    def emit(self) -> None:
        form, plan = self.form, self.form.plan
        block, lanes = SIDE * form.side * form.tile, plan.dot.lanes
        weights = alloc_workspace(form.panels * form.groups * form.group_bytes, plan.tile_dtype)
        totals = alloc_workspace(form.chunk_tiles * form.panels * form.tile, "float32")
        sums = alloc_workspace(block, "int32")
        pairs = T.bind(ceil_div(self.tiles, SIDE))
        sides, blocks = form.panels // form.side, plan.groups // form.groups
        with T.serial(pairs * (form.panels * SIDE * form.unit.rows)) as row:
            store_vector(totals, constant("float32", 0, lanes), row * lanes, lanes)
        count = T.bind(pairs * (sides * form.groups))

        def locate(number: Expr, start: Expr) -> GroupSums:
            own, number_of_all = T.floormod(number, form.groups), T.floordiv(number, form.groups)
            return GroupSums(
                T.bind(start + own),
                own,
                T.bind(T.floormod(number_of_all, sides) * form.side),
                T.bind(T.floordiv(number_of_all, sides)),
                T.bind(number_of_all * block),
            )

        with T.serial(blocks) as number:
            start = T.bind(number * form.groups)
            self.emit_unpacked(weights, start)
            with T.serial(count + 1) as at:
                with T.If(at < form.panels * form.groups), T.Then():
                    self.emit_prefetch(number, at)
                own, before = locate(at, start), locate(at - 1, start)
                with T.If(number == blocks - 1), T.Then():
                    self.emit_output_prefetch(own)
                is_first, is_last = at == 0, at == count
                for i in range(SIDE):
                    with T.If(T.Not(is_last)), T.Then():
                        self.emit_products(weights, own, i)
                        if i:
                            self.emit_stores(sums, 0)
                    with T.If(T.Not(is_first)), T.Then():
                        if not i:
                            self.emit_stores(sums, 1)
                        self.emit_additions(sums, totals, before, i)
        with T.grid(pairs, form.panels, SIDE) as (pair, side, i):
            self.emit_outputs(totals, pair, side, i)

    def emit_unpacked(self, weights: Buffer, start: Expr) -> None:
        """Unpack a block of weights: codes minus zero points."""
        form, plan = self.form, self.form.plan
        lanes, size = plan.dot.lanes, plan.vector_bytes
        dtype = f"{plan.tile_dtype}x{size}"
        with T.grid(form.panels, form.groups) as (side, group):
            panel = self.arguments.find_panel(self.panel + side)
            at = T.bind(panel * plan.groups + start + group)
            to = T.bind((side * form.groups + group) * form.group_bytes)
            zero = read_zero(plan, self.arguments, at)
            if plan.spec.has_offsets:
                zeros = None
            elif zero is None:  # the middle of a byte, 128, is -128 as int8
                zeros = constant("int8", (common_zero(plan.spec) + 128) % 256 - 128, size)
            else:
                zeros = T.bind(T.reinterpret(dtype, zero * constant("int32", 0x01010101, lanes)))
            with T.serial(plan.vectors) as number:
                index = (at * plan.vectors + number) * size
                loaded = self.arguments.codes.vload([index], f"uint8x{size}")
                words = T.bind(T.reinterpret(vector("int32", lanes), loaded))
                for place in range(plan.each):
                    value = T.reinterpret(dtype, take_word(plan, words, place))
                    value = value if zeros is None else value - zeros
                    store_vector(weights, value, to + (number * plan.each + place) * size, size)

    def emit_prefetch(self, block: Expr, number: Expr) -> None:
        """Fetch group `number` of the codes and scales of the next block, perhaps of the next band.

        After the last band this is beyond the weights.
        """
        form, plan, arguments = self.form, self.form.plan, self.arguments
        start = T.bind((block + 1) * form.groups)
        panel, group = T.floordiv(number, form.groups), T.floormod(number, form.groups)
        is_end = T.bind(T.Cast("int64", start == plan.groups))
        panel = arguments.find_panel(self.panel + panel + is_end * form.panels)
        at = T.bind(panel * plan.groups + start * (1 - is_end) + group)
        for vectors in range(plan.vectors):
            place = (at * plan.vectors + vectors) * plan.vector_bytes
            emit_prefetch(arguments.codes, place, level=2)
        for values in arguments.group_values:
            emit_prefetch(values, at * plan.dot.lanes, level=2)

    def emit_products(self, weights: Buffer, block: GroupSums, i: int) -> None:
        """Emit the sums of a group for tile `i` of the pair and the panels of the block."""
        form, plan, registers = self.form, self.form.plan, self.registers
        a, b = SIDE * form.side, SIDE * form.side + 1
        row = T.bind((self.find_tile(block, i) * plan.groups + block.group) * form.row_bytes)
        weight = T.bind((block.side * form.groups + block.own) * form.group_bytes)
        for j in range(form.side):
            registers.clear(i * form.side + j)
        for step in range(form.steps):
            at = row + step * (form.width * form.unit.rows)
            registers.load(a, self.prepared.copy, at, form.width)
            for j in range(form.side):
                at = weight + j * (form.groups * form.group_bytes) + step * form.step_bytes
                registers.load(b + j, weights, at, plan.vector_bytes)
            for j in range(form.side):
                registers.multiply(i * form.side + j, a, b + j, ("int8", plan.tile_dtype))

    def emit_stores(self, sums: Buffer, i: int) -> None:
        """Store the sums of tile `i` of a pair."""
        for number in range(i * self.form.side, (i + 1) * self.form.side):
            place = T.int64(number * self.form.tile)
            self.registers.store(number, sums, place, self.form.plan.dot.lanes)

    def find_tile(self, block: GroupSums, i: int) -> Expr:
        """Return the number of tile `i` of a pair. The last one stands for one that is missing."""
        return T.bind(T.min(block.pair * SIDE + i, self.tiles - 1))

    def emit_additions(self, sums: Buffer, totals: Buffer, block: GroupSums, i: int) -> None:
        """Add the sums of a group, times its scales, to the float sums.

        With offsets, also the sums of the rows, times the offsets.
        """
        form, plan, arguments = self.form, self.form.plan, self.arguments
        lanes, has_fma = plan.dot.lanes, plan.dot.has_fma
        dtype = vector("float32", lanes)

        def read(values: Buffer) -> list[Expr]:
            panel = arguments.find_panel(self.panel + block.side)
            first = panel * plan.groups + block.group
            return [
                T.bind(T.Cast(dtype, load_vector(values, (first + j * plan.groups) * lanes, lanes)))
                for j in range(form.side)
            ]

        scales = read(arguments.scale)
        offsets = None if arguments.offsets is None else read(arguments.offsets)
        first = i * (form.side * form.tile)
        kept = T.bind(block.slot + first)
        first_row = T.bind((self.find_tile(block, i) * plan.groups + block.group) * form.unit.rows)
        with T.serial(form.unit.rows) as row:
            own = None
            if self.prepared.scales is not None:
                own = T.bind(broadcast(self.prepared.scales[first_row + row], lanes))
            for j, scale in enumerate(scales):
                at = j * form.tile + row * lanes
                value = T.Cast(dtype, load_vector(sums, first + at, lanes))
                factor = scale if own is None else scale * own
                before = load_vector(totals, kept + at, lanes)
                value = multiply_add(has_fma, value, factor, before, lanes)
                if offsets is not None and self.prepared.sums is not None:
                    total = broadcast(self.prepared.sums[first_row + row], lanes)
                    value = multiply_add(has_fma, total, offsets[j], value, lanes)
                store_vector(totals, value, kept + at, lanes)

    def emit_output_prefetch(self, block: GroupSums) -> None:
        """Fetch a part of the memory that `emit_outputs` will write. Results of many rows and
        outputs exceed the second-level cache, and all stores at once would wait for it.
        """
        form = self.form
        share = ceil_div(SIDE * form.unit.rows, form.groups)
        first = T.bind(block.pair * (SIDE * form.unit.rows) + block.own * share)
        with T.grid(share, form.side) as (row, j):
            at = self.find_output(first + row, block.side + j)
            emit_prefetch(self.arguments.out, at, level=1, write=True)

    def find_output(self, row: Expr, side: Expr) -> Expr:
        """Return the index of the first output of a panel in a row of the chunk. The last row
        stands for rows that are missing.
        """
        units, lanes = self.form.plan.spec.units, self.form.plan.dot.lanes
        channel = T.min((self.panel + side) * lanes, max(units - lanes, 0))
        number = T.min(self.first + row, self.arguments.rows - 1)
        return T.bind(self.arguments.find_result(number) * units + channel)

    def emit_outputs(self, totals: Buffer, pair: Expr, side: Expr, i: Expr) -> None:
        """Store the outputs of a panel for the rows of a tile."""
        form, arguments = self.form, self.arguments
        units, lanes = form.plan.spec.units, form.plan.dot.lanes
        sides, tile = form.panels // form.side, pair * SIDE + i
        block = pair * sides + T.floordiv(side, form.side)
        kept = T.bind(((block * SIDE + i) * form.side + T.floormod(side, form.side)) * form.tile)
        with T.serial(form.unit.rows) as row:
            number = T.bind(tile * form.unit.rows + row)
            value = load_vector(totals, kept + row * lanes, lanes)
            if arguments.row_scale is not None:
                place = T.min(self.first + number, arguments.rows - 1)
                scale = arguments.row_scale[arguments.find_source(place)]
                value = value * broadcast(scale, lanes)
            at = self.find_output(number, side)
            store_vector(arguments.out, value, at, lanes, min(lanes, units))
