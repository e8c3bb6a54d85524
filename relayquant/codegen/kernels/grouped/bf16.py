"""Product of float rows with a grouped weight -> its kernel in bfloat16, on tiles.

    y[m, n] = sum over k of bf16(x[m, k]) * bf16(s_w[n, g] * (c[n, k] - z))  (+ residual[m, n])

or, with a gate, silu of the first half of the results times the second half. The sums are float32.
Rows are rounded to nearest even, weights with ties away from zero, which is less work. Weights stay
packed as `plan` says, so that products of integer rows read the same memory.

    A   16 rows x 32 values, from a copy of the rows in bfloat16 with one tile after the other
    B   16 pairs of values x 16 outputs, unpacked from a panel

Sums stay in tile registers over all groups, so no group costs a store. A chunk of rows shares what
is unpacked. Columns are taken in blocks whose copy of the chunk fits the second-level cache;
between the blocks the sums are in memory. The last tile of a chunk repeats the last row, which
writes the same values twice.

A process that may not use tiles computes the same blocks on vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import gcd, prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    declare_argument,
    emit_prefetch,
    emit_shared_loop,
    flat_view,
    import_code,
    load_vector,
    name_extents,
    store_vector,
)
from relayquant.codegen.kernels.floating.silu import emit_silu
from relayquant.codegen.kernels.grouped.dot import WORD, look_up_floats, multiply_add
from relayquant.codegen.kernels.grouped.plan import (
    GroupedDense,
    GroupedPlan,
    common_zero,
    plan_grouped,
)
from relayquant.codegen.kernels.integer.operands import load_partial
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.isa.bf16 import TILES_BF16, Bf16Isa, join_pairs
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS, MoveTile, Tiles
from relayquant.codegen.kernels.unit_permission import ask_permission, emit_if

#: Tiles of rows, and panels, of a block of sums.
SIDE = 2
#: Values of a row in a tile, and of one output in a word of B.
STEP, PAIR = 32, 2
#: Most rows of a chunk, and bytes of its copy.
CHUNK_ROWS, COPY_BYTES = 512, 1024 * 1024
#: Rows whose sums are in registers where there are no tiles.
VECTOR_ROWS = 8


@dataclass(frozen=True)
class GroupedBf16:
    """A product of float32 rows (..., features) with a grouped weight, whose form `dense` has.

    `has_residual`: a tensor like the result is added.
    """

    dense: GroupedDense
    has_residual: bool = False


def make_grouped_bf16(spec: GroupedBf16, isa: Isa, bf16: Bf16Isa = TILES_BF16) -> PrimFunc:
    """Make PrimFunc(x (*leading, K), codes, scale[, zeros][, residual (*leading, N)], y).

    The constants come from `pack_grouped` for `isa`, the instruction set of products of integers.
    """
    return build_kernel(
        "grouped_bf16", lambda: TiledBf16(spec, plan_grouped(spec.dense, isa), bf16).emit()
    )


class TiledBf16:
    """Sizes and statements of the kernel."""

    def __init__(self, spec: GroupedBf16, plan: GroupedPlan, isa: Bf16Isa) -> None:
        assert isa.unit is not None
        self.has_residual, self.spec = spec.has_residual, spec.dense
        self.plan, self.isa, self.unit = plan, isa, isa.unit
        self.rows_of_tile, self.lanes = self.unit.rows, plan.dot.lanes
        self.tile = self.rows_of_tile * self.lanes  #: sums of a tile
        self.chunk_tiles = CHUNK_ROWS // self.rows_of_tile

    @cached_property
    def panels(self) -> int:
        """Panels of a block of sums."""
        return min(SIDE, self.plan.panels)

    @cached_property
    def bands(self) -> int:
        return ceil_div(self.plan.panels, self.panels)

    @cached_property
    def groups(self) -> int:
        """Groups of a block of columns."""
        fitting = max(COPY_BYTES // (CHUNK_ROWS * PAIR * self.plan.stride), 1)
        blocks = ceil_div(self.plan.groups, fitting)
        return ceil_div(self.plan.groups, blocks)

    @cached_property
    def blocks(self) -> int:
        """Blocks of columns."""
        return ceil_div(self.plan.groups, self.groups)

    @cached_property
    def steps(self) -> int:
        """Products of tiles over a block of columns."""
        return ceil_div(self.groups * self.plan.stride, STEP)

    def emit(self) -> None:
        """Emit all rows, one chunk after the other."""
        self.declare()
        import_code(self.isa.code)
        self.may_use = ask_permission(self.unit)
        rows, size, spec = self.rows, CHUNK_ROWS, self.spec
        block_rows = self.chunk_tiles * self.rows_of_tile
        self.copy = alloc_workspace(block_rows * self.steps * STEP, BF16_BITS)
        self.totals = None
        if self.blocks > 1:
            count = ceil_div(self.chunk_tiles, SIDE) * self.bands * SIDE * self.panels
            self.totals = alloc_workspace(count * self.tile, "float32")
        is_shared = rows * (spec.units * spec.features) >= PARALLEL_THRESHOLD
        with T.serial(ceil_div(rows, size)) as chunk:
            self.first = T.bind(chunk * size)
            count = T.bind(T.min(rows - self.first, size))
            tiles = T.bind(ceil_div(count, self.rows_of_tile))
            with T.serial(self.blocks) as block:
                self.start = T.bind(block * self.groups)
                emit_shared_loop(tiles, is_shared, self.emit_copy)
                emit_shared_loop(self.bands, is_shared, partial(self.emit_band, tiles, block))

    def declare(self) -> None:
        """Declare the arguments."""
        spec, plan = self.spec, self.plan
        extents = name_extents(spec.leading)
        self.rows = prod(extents)
        count = plan.panels * plan.groups * self.lanes
        data = declare_argument("x", [*extents, spec.features], "float32")
        codes = declare_argument("codes", [count * plan.vectors * WORD], "uint8")
        scale = declare_argument("scale", [count], plan.scale_dtype)
        zeros = residual = None
        if spec.zeros_dtype:
            zeros = declare_argument("zeros", [count], plan.zeros_dtype)
        if self.has_residual:
            residual = declare_argument("residual", [*extents, spec.outputs], "float32")
        out = declare_argument("y", [*extents, spec.outputs], "float32")
        self.data, self.out = flat_view(data), flat_view(out)
        self.residual = None if residual is None else flat_view(residual)
        self.codes, self.scale, self.zeros = codes, scale, zeros

    # --- Operands -------------------------------------------------------------------------------

    def emit_copy(self, tile: Expr) -> None:
        """Round the rows of a tile, for a block of columns."""
        plan, spec = self.plan, self.spec
        last = spec.features - (plan.groups - 1) * spec.group_size
        groups = T.min(plan.groups - self.start, self.groups)
        base = tile * (self.steps * self.rows_of_tile * STEP)
        lanes = gcd(self.isa.rounded_lanes, plan.stride)  # no vector is in two steps
        with T.serial(self.rows_of_tile) as row:
            number = T.bind(T.min(self.first + tile * self.rows_of_tile + row, self.rows - 1))

            def place(column: Expr) -> Expr:
                step = T.floordiv(column, STEP)
                return base + (step * self.rows_of_tile + row) * STEP + T.floormod(column, STEP)

            def fill(column: Expr, count: Expr | int) -> None:
                with T.serial(count) as at:
                    T.buffer_store(self.copy, T.uint16(0), [place(column + at)])

            def copy_group(group: Expr, length: int) -> None:
                origin = number * spec.features + (self.start + group) * spec.group_size
                column = group * plan.stride

                def move(at: Expr, lanes: int) -> None:
                    value = self.isa.round(load_vector(self.data, origin + at, lanes), lanes)
                    store_vector(self.copy, value, place(column + at), lanes)

                with T.serial(length // lanes) as index:
                    move(index * lanes, lanes)
                with T.serial(length % lanes) as at:
                    move(length // lanes * lanes + at, 1)
                if length < plan.stride:
                    fill(column + length, plan.stride - length)

            is_short = last != spec.group_size
            end = T.min(plan.groups - 1 - self.start, groups) if is_short else groups
            with T.serial(end) as group:
                copy_group(group, spec.group_size)
            if is_short:
                with T.If(end < groups), T.Then():
                    copy_group(end, last)
            rest = self.steps * STEP - groups * plan.stride
            fill(groups * plan.stride, rest)

    def emit_unpacked(self, weights: Buffer, panel: Expr, to: Expr) -> None:
        """Unpack a block of columns of a panel to pairs of bfloat16."""
        plan, lanes = self.plan, self.lanes
        groups = T.min(plan.groups - self.start, self.groups)
        dtype = f"float32x{lanes}"
        with T.serial(groups) as group:
            at = T.bind(panel * plan.groups + self.start + group)
            scale = T.bind(T.Cast(dtype, load_vector(self.scale, at * lanes, lanes)))
            if self.zeros is None:
                offset = scale * constant("float32", -common_zero(self.spec), lanes)
            else:
                offset = T.Cast(dtype, load_vector(self.zeros, at * lanes, lanes))
                if self.spec.has_zeros:
                    offset = scale * -offset
            offset = T.bind(offset)
            # A code is multiplied where it stands in its word, without a shift.
            scales = {
                bit: T.bind(scale * constant("float32", 2.0**-bit, lanes)) if bit else scale
                for bit in range(0, 32 - plan.bits, plan.bits)
            }
            with T.serial(plan.vectors) as number:
                index = (at * plan.vectors + number) * plan.vector_bytes
                loaded = self.codes.vload([index], f"uint8x{plan.vector_bytes}")
                words = T.bind(T.reinterpret(f"int32x{lanes}", loaded))

                def value(bit: int, words: Expr = words, scales: dict = scales) -> Expr:
                    if plan.spec.levels:
                        zero = 0 if plan.spec.zeros_dtype else common_zero(plan.spec)
                        levels = [level - zero for level in plan.spec.levels]
                        code = look_up_floats(levels, words, bit)
                        added = offset if plan.spec.zeros_dtype else constant("float32", 0, lanes)
                        return multiply_add(True, code, scale, added, lanes)
                    if bit + plan.bits == 32:
                        shifted = T.shift_right(
                            T.reinterpret(f"uint32x{lanes}", words), constant("uint32", bit, lanes)
                        )
                        code, factor = T.reinterpret(f"int32x{lanes}", shifted), scale
                    else:
                        mask = ((1 << plan.bits) - 1) << bit
                        code = T.bitwise_and(words, constant("int32", mask, lanes))
                        factor = scales[bit]
                    return multiply_add(True, T.Cast(dtype, code), factor, offset, lanes)

                first = to + (group * plan.vectors + number) * (plan.each * WORD * lanes)
                for word in range(plan.each):
                    for pair in range(WORD // PAIR):
                        low, high = (8 * (PAIR * pair + i) + plan.bits * word for i in range(PAIR))
                        place = first + (word * WORD + PAIR * pair) * lanes
                        joined = join_pairs(value(low), value(high), lanes)
                        store_vector(weights, joined, place, PAIR * lanes)
        zero = constant(BF16_BITS, 0, PAIR * lanes)
        with T.serial(T.floordiv(self.steps * STEP - groups * plan.stride, PAIR)) as pair:
            place = to + (groups * plan.stride + PAIR * pair) * lanes
            store_vector(weights, zero, place, PAIR * lanes)

    # --- Products -------------------------------------------------------------------------------

    def list_panels(self, band: Expr) -> list[Expr]:
        """Return the panels of a band: neighbours, or a panel of each half."""
        if self.spec.is_gated:
            return [band, band + self.plan.panels // 2]
        first = T.bind(T.min(band * self.panels, self.plan.panels - self.panels))
        return [first + side for side in range(self.panels)]

    def emit_band(self, tiles: Expr, block: Expr, band: Expr) -> None:
        """Emit the results of some panels for all rows of a chunk."""
        panels, size = self.list_panels(band), self.steps * STEP * self.lanes
        weights = alloc_workspace(self.panels * size, BF16_BITS)
        sums = alloc_workspace(SIDE * self.panels * self.tile, "float32")
        registers: list[Tiles] = []
        shapes = [(self.unit.rows, self.unit.row_bytes)] * self.unit.registers
        emit_if(self.may_use, lambda: registers.append(self.unit.configure(shapes)))
        for side, panel in enumerate(panels):
            self.emit_unpacked(weights, panel, T.int64(side * size))
        with T.serial(ceil_div(tiles, SIDE)) as pair:
            numbers = [T.bind(T.min(pair * SIDE + i, tiles - 1)) for i in range(SIDE)]
            kept = T.bind((pair * self.bands + band) * (SIDE * self.panels * self.tile))
            emit_if(
                self.may_use,
                lambda n=numbers, k=kept: self.emit_tiles(
                    registers[0], weights, sums, n, k, block, panels
                ),
                lambda n=numbers, k=kept: self.emit_vectors(weights, sums, n, k, block),
            )
            with T.If(block == self.blocks - 1), T.Then():
                for i, number in enumerate(numbers):
                    self.emit_results(sums, i, number, panels)
        emit_if(self.may_use, lambda: registers[0].release())

    def emit_tiles(
        self,
        registers: Tiles,
        weights: Buffer,
        sums: Buffer,
        tiles: list[Expr],
        kept: Expr,
        block: Expr,
        panels: list[Expr],
    ) -> None:
        """Emit the sums of a block of tiles of rows and panels, on tiles."""
        places = [(i, j) for i in range(SIDE) for j in range(self.panels)]
        a, b = len(places), len(places) + SIDE
        size, lanes = self.rows_of_tile * STEP, self.lanes

        def each(move: MoveTile, buffer: Buffer | None, base: Expr) -> None:
            for number in range(len(places)):
                move(number, buffer, base + number * self.tile, lanes)

        def begin() -> None:
            for number in range(len(places)):
                registers.clear(number)

        is_first = True if self.totals is None else block == 0
        emit_if(is_first, begin, lambda: each(registers.load, self.totals, kept))
        with T.serial(self.steps) as step:
            for i, tile in enumerate(tiles):
                # past the first-level cache, which keeps the weights
                registers.stream(a + i, self.copy, (tile * self.steps + step) * size, STEP)
            for j in range(self.panels):
                registers.load(b + j, weights, (j * self.steps + step) * size, STEP)
            for number, (i, j) in enumerate(places):
                registers.multiply(number, a + i, b + j, (BF16_BITS, BF16_BITS))
            self.emit_output_prefetch(tiles[0], panels, step)
        is_last = True if self.totals is None else block == self.blocks - 1
        emit_if(
            is_last,
            lambda: each(registers.store, sums, T.int64(0)),
            lambda: each(registers.store, self.totals, kept),
        )

    def emit_vectors(
        self, weights: Buffer, sums: Buffer, tiles: list[Expr], kept: Expr, block: Expr
    ) -> None:
        """Emit the same sums on vectors."""
        lanes, size = self.lanes, self.rows_of_tile * STEP
        for i, tile in enumerate(tiles):
            with T.serial(self.rows_of_tile // VECTOR_ROWS) as part:
                accs = [alloc_vectors(VECTOR_ROWS, lanes, "float32") for _ in range(self.panels)]

                def locate(j: int, row: int, i: int = i, part: Expr = part) -> Expr:
                    place = i * self.panels + j
                    return place * self.tile + (part * VECTOR_ROWS + row) * lanes

                def each(target: Buffer | None, base: Expr | int, accs: list = accs) -> None:
                    for j, own in enumerate(accs):
                        for row, acc in enumerate(own):
                            if target is not None:
                                value = load_vector(acc, 0, lanes)
                                store_vector(target, value, base + locate(j, row), lanes)
                                continue
                            value = constant("float32", 0, lanes)
                            if self.totals is not None:
                                before = load_vector(self.totals, base + locate(j, row), lanes)
                                value = T.if_then_else(block == 0, value, before)
                            store_vector(acc, value, 0, lanes)

                each(None, kept)
                with T.grid(self.steps, STEP // PAIR) as (step, pair):
                    at = (tile * self.steps + step) * size + part * (VECTOR_ROWS * STEP)
                    words = [
                        T.reinterpret(
                            "int32",
                            load_vector(self.copy, at + row * STEP + pair * PAIR, PAIR),
                        )
                        for row in range(VECTOR_ROWS)
                    ]
                    for j, own in enumerate(accs):
                        place = (j * self.steps + step) * size + pair * (PAIR * lanes)
                        codes = T.bind(load_vector(weights, place, PAIR * lanes))
                        for acc, word in zip(own, words, strict=True):
                            value = self.isa.dot(
                                load_vector(acc, 0, lanes), broadcast(word, lanes), codes
                            )
                            store_vector(acc, value, 0, lanes)
                is_last = True if self.totals is None else block == self.blocks - 1
                emit_if(is_last, lambda e=each: e(sums, 0), lambda e=each: e(self.totals, kept))

    # --- Results --------------------------------------------------------------------------------

    def find_output(self, row: Expr, panel: Expr) -> Expr:
        """Return the index of the first output of a panel in a row."""
        outputs = self.spec.outputs
        channel = T.min(panel * self.lanes, max(outputs - self.lanes, 0))
        return T.bind(T.min(row, self.rows - 1) * outputs + channel)

    def list_outputs(self, panels: list[Expr]) -> list[Expr]:
        return panels[:1] if self.spec.is_gated else panels

    def emit_output_prefetch(self, tile: Expr, panels: list[Expr], step: Expr) -> None:
        """Fetch a part of the memory that `emit_results` will use, after each step. Many at once
        would wait for each other.
        """
        share = ceil_div(SIDE * self.rows_of_tile, self.steps)
        row = self.first + tile * self.rows_of_tile + step * share
        for panel, i in product(self.list_outputs(panels), range(share)):
            at = self.find_output(row + i, panel)
            emit_prefetch(self.out, at, 1, write=True)
            if self.residual is not None:
                emit_prefetch(self.residual, at, 1)

    def emit_results(self, sums: Buffer, i: int, tile: Expr, panels: list[Expr]) -> None:
        """Store the results of a tile of rows."""
        lanes, width = self.lanes, min(self.lanes, self.spec.outputs)
        with T.serial(self.rows_of_tile) as row:
            number = self.first + tile * self.rows_of_tile + row
            values = [
                load_vector(sums, (i * self.panels + j) * self.tile + row * lanes, lanes)
                for j in range(self.panels)
            ]
            if self.spec.is_gated:
                values = [emit_silu(values[0], lanes) * values[1]]
            for panel, value in zip(self.list_outputs(panels), values, strict=True):
                at = self.find_output(number, panel)
                if self.residual is not None:
                    value = value + load_partial(self.residual, at, lanes, width)
                store_vector(self.out, value, at, lanes, width)
