"""Specification of a product with grouped weights -> its plan, packed constants and arguments.

A weight is stored panel by panel, each with `lanes` outputs (the last panel overlaps its
neighbour):

    for each group     vectors of 4 * lanes bytes: byte 4 * l + p of vector v is of output l and
                       holds the codes at p of words v * e .. v * e + e - 1 (e = 8 / bits of them),
                       the first in the lowest bits
    scales, zeros      one per output and group, in separate arrays. Zeros are zero points or
                       offsets.

Codes of 3 bits take 4 bits here. Levels are looked up in a register. Where no instruction does so,
memory has the levels, 8 bits each. Groups are filled up to whole vectors with codes whose rows are
0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from tvm.script.ir_builder import tirx as T

from relayquant.base.packing import (
    count_groups,
    middle_code,
    read_levels,
    unpack_codes,
    value_bits,
)
from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    ceil_div,
    constant,
    load_vector,
    name_extents,
    vector,
)
from relayquant.codegen.kernels.grouped.dot import (
    SHORT_WORDS,
    WORD,
    FloatDot,
    GroupedDot,
    LevelShuffle,
    PartsDot,
    TableDot,
    choose_dot,
    choose_shuffle,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.isa.matrix_unit import MatrixUnit
from relayquant.codegen.kernels.isa.timing import COMMON, GroupedTiming, Streams
from relayquant.codegen.kernels.row_loops import choose_heights

#: A multiple of every height of tiles.
TILE_ROWS = 24
#: Rows that are prepared together: least and most, and their size in bytes between these bounds.
LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS = 2 * TILE_ROWS, 6 * TILE_ROWS
CHUNK_BYTES = 640 * 1024
#: Codes that are packed at once: few enough for the second-level cache.
PACKED_CODES = 1 << 18
#: Instruction sets with fewer lanes have too few registers for several streams of codes.
STREAM_LANES = 16
#: Most dot products, or multiply-adds of a word, that are unrolled. More are a loop over vectors.
UNROLLED = 96
#: Smallest group of a matrix unit. The sums of a group go through memory, and with groups of 16
#: vectors are faster.
LEAST_TILE_GROUP = 32
#: Largest sum of a group that int32 holds.
LARGEST_SUM = 2**31 - 1


@dataclass(frozen=True)
class GroupedDense:
    """A product of rows (..., features) with a grouped weight (units, features).

    `leading` are the extents before the last one, None for an extent known only at run time.
    `is_float`: rows are float32, else int8 with one scale per row, or with one for each of several
    groups of a row if `group_scales`. `zeros_dtype`: uint8 if each
    group has its own zero point, a float dtype if it has an offset, "" if the middle of the codes
    is the zero point of all. `is_gated`: the result has half as many outputs, silu(first half) *
    second half.
    """

    leading: tuple[int | None, ...]
    units: int
    features: int
    bits: int
    group_size: int
    is_float: bool = False
    zeros_dtype: str = ""
    scale_dtype: str = "float32"
    group_scales: bool = False
    is_gated: bool = False
    levels: tuple[int, ...] = ()

    @property
    def value_bits(self) -> int:
        """Bits of the value of a code: of a level, if `levels` are the values."""
        return value_bits(self.bits, self.levels)

    @property
    def outputs(self) -> int:
        """Results of a row."""
        return self.units // 2 if self.is_gated else self.units

    @property
    def weight(self) -> GroupedDense:
        """What the packed constants depend on: the same for all products with the weight."""
        return replace(self, leading=(), group_scales=False, is_gated=False)

    @property
    def has_zeros(self) -> bool:
        """Whether each group has its own zero point."""
        return self.zeros_dtype == "uint8"

    @property
    def has_offsets(self) -> bool:
        """Whether a group has an offset: real = scale * code + offset."""
        return self.zeros_dtype.startswith("float")

    @property
    def largest_sum(self) -> int:
        """Bound of the magnitude of a sum of integers."""
        return self.group_size * 128 * ((1 << self.value_bits) - 1)


@dataclass(frozen=True)
class GroupedExperts:
    """A product of rows with the grouped weights that they choose.

    Attributes:
        dense: The product of one expert. Its last leading extent is 1 if all choices share a row.
        count: Number of experts.
        slots: Choices for each token.
    """

    dense: GroupedDense
    count: int
    slots: int
    index_dtype: str

    @property
    def weight(self) -> GroupedExperts:
        """What the packed constants depend on, as `GroupedDense.weight`."""
        return replace(self, dense=self.dense.weight, slots=0, index_dtype="")

    @property
    def slots_of_row(self) -> int:
        """Rows of the result for each row of the data."""
        return self.slots if self.dense.leading[-1] == 1 else 1


def code_bits(bits: int) -> int:
    """Return the bits of a code in memory."""
    return 4 if bits == 3 else bits


@dataclass(frozen=True)
class GroupedPlan:
    """Memory layout of a weight for an instruction set, and its tiles."""

    spec: GroupedDense
    dot: GroupedDot
    unit: MatrixUnit | None = None  #: for many rows, if there is one that takes these codes
    timing: GroupedTiming = COMMON.grouped  #: of the target's core
    shuffle: LevelShuffle | None = None  #: looks levels up

    @cached_property
    def has_codes(self) -> bool:
        """Whether memory has the codes, and not their levels."""
        looks_up = isinstance(self.dot, TableDot) or self.shuffle is not None
        return looks_up or not self.spec.levels

    @cached_property
    def bits(self) -> int:
        """Bits of a code in memory."""
        return code_bits(self.spec.bits) if self.has_codes else self.spec.value_bits

    @cached_property
    def each(self) -> int:
        """Words in a vector of codes."""
        return 8 // self.bits

    @cached_property
    def groups(self) -> int:
        return count_groups(self.spec.features, self.spec.group_size)

    @cached_property
    def vectors(self) -> int:
        """Vectors of codes of a group."""
        return ceil_div(self.spec.group_size, WORD * self.each)

    @property
    def stride(self) -> int:
        """Elements of a group in a prepared row."""
        return self.vectors * self.each * WORD

    @property
    def panels(self) -> int:
        return ceil_div(self.spec.units, self.dot.lanes)

    @property
    def streams(self) -> Streams:
        """How a single row reads codes: one panel for each stream.

        The products of a group wait for each other, which takes longer than reading them if they
        are many. Then there are several streams on every core.
        """
        is_short = self.block_vectors(1) == self.vectors and not isinstance(self.dot, FloatDot)
        streams = self.timing.streams if is_short else COMMON.grouped.streams
        count = min(streams.count, self.panels) if self.dot.lanes >= STREAM_LANES else 1
        return replace(streams, count=count)

    @property
    def row_panels(self) -> int:
        """Panels that a single row is multiplied with at a time: with a gate, of both halves."""
        return max(self.streams.count // 2, 1) * 2 if self.spec.is_gated else self.streams.count

    @property
    def can_gate(self) -> bool:
        """Whether a tile has a panel of each half of the outputs."""
        halves = self.panels * self.dot.lanes == self.spec.units and self.panels % 2 == 0
        return halves and self.tile_panels == 2 and self.unit is None

    @property
    def tile_panels(self) -> int:
        """Panels of a tile of several rows."""
        is_wide = self.dot.lanes >= STREAM_LANES and not isinstance(self.dot, FloatDot)
        return min(self.timing.panels if is_wide else 1, self.panels)

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of tiles, most first. Low tiles of several panels still have enough sums."""
        if self.tile_panels == 1:
            return choose_heights(self.dot.rows)
        full = self.dot.rows // self.tile_panels
        return full, full * 2 // 3, full // 3, 1

    @property
    def vector_bytes(self) -> int:
        return WORD * self.dot.lanes

    @property
    def offset(self) -> int:
        """Subtracted from the values of codes to get what the dot product reads."""
        return 128 if self.spec.value_bits == 8 and self.dot.is_signed else 0

    @property
    def levels(self) -> tuple[int, ...]:
        """What the dot product reads for each code, bytes. Empty if it reads what memory has."""
        is_read = self.shuffle is not None and not isinstance(self.dot, TableDot)
        return tuple(level ^ self.offset for level in self.spec.levels) if is_read else ()

    def block_vectors(self, height: int) -> int:
        """Count the vectors of codes that are processed without a loop, for `height` rows."""
        if isinstance(self.dot, PartsDot):
            return min(self.vectors, SHORT_WORDS // self.each)
        steps = self.vectors * self.each * height * self.dot.steps
        return self.vectors if steps <= UNROLLED else 1

    @property
    def row_stride(self) -> int:
        """Distance between prepared rows in elements.

        It is an odd number of cache lines, so that the rows of a tile do not fall into the same
        cache sets.
        """
        size = np.dtype(self.dot.row_dtype).itemsize
        return (ceil_div(self.groups * self.stride * size, CACHE_LINE) | 1) * CACHE_LINE // size

    @property
    def chunk_rows(self) -> int:
        """Rows that are prepared together: as many as fit the second-level cache with a panel."""
        size = np.dtype(self.dot.row_dtype).itemsize * self.row_stride
        fitting = CHUNK_BYTES // size // TILE_ROWS * TILE_ROWS
        return max(LEAST_CHUNK_ROWS, min(fitting, MOST_CHUNK_ROWS))

    @property
    def scale_dtype(self) -> str:
        """Dtype of scales: float16 only if one instruction converts vectors of it."""
        return self.spec.scale_dtype if self.dot.lanes >= 8 else "float32"

    @property
    def zeros_dtype(self) -> str:
        """Dtype of zero points or offsets, like `scale_dtype`."""
        keeps = self.spec.has_zeros or self.dot.lanes >= 8
        return self.spec.zeros_dtype if keeps else "float32"

    @property
    def tile_dtype(self) -> str:
        """Dtype of codes minus zero points on a matrix unit."""
        return "uint8" if self.spec.has_offsets else "int8"

    @cached_property
    def channels(self) -> np.ndarray:
        """(panels, lanes): the output of every lane.

        Lanes without an output repeat the last one.
        """
        lanes, units = self.dot.lanes, self.spec.units
        first = np.minimum(np.arange(self.panels) * lanes, max(units - lanes, 0))
        return np.minimum(first[:, None] + np.arange(lanes), units - 1)


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """Constant operands of the kernels: codes, scales, and zero points or offsets, if any."""

    codes: np.ndarray
    scale: np.ndarray
    zeros: np.ndarray | None

    @property
    def arrays(self) -> list[np.ndarray]:
        """The operands in the order of the kernels' arguments."""
        return [self.codes, self.scale, *([] if self.zeros is None else [self.zeros])]


def plan_grouped(spec: GroupedDense, isa: Isa) -> GroupedPlan:
    """Make the plan for generator and packer. The packed weights do not depend on the rows."""
    bits = code_bits(spec.value_bits)
    fits_int8 = bits < 8 or not spec.has_zeros  # codes minus zero points
    on_tiles = not spec.is_float and fits_int8 and spec.group_size >= LEAST_TILE_GROUP
    zero = None if spec.has_zeros else common_zero(spec)
    dot = choose_dot(isa, spec.is_float, bits, zero, spec.levels)
    shuffle = choose_shuffle(isa) if spec.levels else None
    return GroupedPlan(spec, dot, isa.unit if on_tiles else None, isa.timing.grouped, shuffle)


def pack_experts(
    spec: GroupedExperts, isa: Isa, weight: np.ndarray, scale: np.ndarray, zeros: np.ndarray
) -> PackedGroups:
    """Pack the operands of `qnn.grouped_expert_dense` for the kernel, expert by expert."""
    units = spec.dense.units
    packed = [
        pack_grouped(
            spec.dense, isa, weight[at : at + units], scale[at : at + units],
            zeros[at : at + units] if zeros.ndim else zeros,
        )
        for at in range(0, spec.count * units, units)
    ]  # fmt: skip
    joined = [
        np.concatenate(parts) for parts in zip(*(each.arrays for each in packed), strict=True)
    ]
    return PackedGroups(*joined, *([None] * (3 - len(joined))))


def pack_grouped(
    spec: GroupedDense, isa: Isa, weight: np.ndarray, scale: np.ndarray, zeros: np.ndarray
) -> PackedGroups:
    """Pack the operands of `qnn.grouped_dense` for the kernels."""
    plan = plan_grouped(spec, isa)
    lanes, groups = plan.dot.lanes, plan.groups
    packed = np.empty((plan.panels, groups, plan.vectors, lanes), "<u4")
    step = max(1, PACKED_CODES // (lanes * groups * plan.stride))
    for first in range(0, plan.panels, step):
        rows = plan.channels[first : first + step]
        words = pack_words(plan, weight[rows.reshape(-1)])
        words = words.reshape(len(rows), lanes, groups, plan.vectors)
        packed[first : first + step] = words.transpose(0, 2, 3, 1)

    def arrange(values: np.ndarray, dtype: str) -> np.ndarray:
        return np.ascontiguousarray(values[plan.channels].swapaxes(1, 2).reshape(-1), dtype)

    return PackedGroups(
        packed.reshape(-1).view("uint8"),
        arrange(scale, plan.scale_dtype),
        arrange(zeros, plan.zeros_dtype) if spec.zeros_dtype else None,
    )


def pack_words(plan: GroupedPlan, weight: np.ndarray) -> np.ndarray:
    """Pack rows of codes, uint8 (N, bytes), to what a lane has of each vector, uint32 (N, groups *
    vectors).
    """
    spec, size = plan.spec, plan.spec.group_size
    flip = np.uint32(0x01010101 * (plan.offset if plan.bits == 8 else 0))
    is_whole = plan.stride == size and spec.features % size == 0
    if is_whole and plan.bits == spec.bits == 8:
        return np.ascontiguousarray(weight).view("<u4") ^ flip
    if is_whole and plan.bits == spec.bits == 4:
        return part_words(np.ascontiguousarray(weight).view("<u4"))
    codes = unpack_codes(weight, spec.bits, spec.features)
    if not plan.has_codes:
        codes = read_levels(codes, spec.levels)
    codes = np.pad(codes, [(0, 0), (0, plan.groups * size - spec.features)])
    codes = codes.reshape(-1, plan.groups, size)
    codes = np.pad(codes, [(0, 0), (0, 0), (0, plan.stride - size)])
    codes = codes.reshape(len(weight), -1, plan.each, WORD)
    joined = codes[:, :, 0].copy()
    for word in range(1, plan.each):
        joined |= codes[:, :, word] << np.uint8(plan.bits * word)
    return joined.view("<u4")[..., 0] ^ flip


def part_words(packed: np.ndarray) -> np.ndarray:
    """Reorder the 8 codes of 4 bits in each uint32. Neighbours become two words, and the first word
    has the low half of each byte. The highest bits are on the left here:

        c7 c6 c5 c4 c3 c2 c1 c0  ->  c7 c3 c6 c2 c5 c1 c4 c0
    """
    halves = []
    for half in (packed & np.uint32(0xFFFF), packed >> np.uint32(16)):
        half = (half | half << np.uint32(8)) & np.uint32(0x00FF00FF)
        halves.append((half | half << np.uint32(4)) & np.uint32(0x0F0F0F0F))
    return halves[0] | halves[1] << np.uint32(4)


@dataclass(frozen=True, eq=False)
class ChosenRows:
    """Rows that read the same part of a weight, such as an expert.

    Attributes:
        first_panel: Of this part.
        slots: Rows of the result for each row of the data.
        order: Numbers of the rows of the result, from `start` on. None: they are as they come.
    """

    first_panel: Expr
    slots: int
    order: Buffer | None = None
    start: Expr = 0

    def find_result(self, row: Expr) -> Expr:
        """Return the number of a row among the rows of the result."""
        return row if self.order is None else T.Cast("int64", self.order[self.start + row])

    def find_source(self, row: Expr) -> Expr:
        """Return the number of a row among the rows of the data."""
        return T.floordiv(self.find_result(row), self.slots)


@dataclass(frozen=True, eq=False)
class Arguments:
    """Flat views of a kernel's arguments."""

    rows: Expr  #: number of rows of the result
    data: Buffer
    row_scale: Buffer | None
    group_scale: Buffer | None  #: of each group of each row
    codes: Buffer
    scale: Buffer
    zeros: Buffer | None  #: zero points
    offsets: Buffer | None
    out: Buffer
    choices: Buffer | None = None  #: the expert of each row of the result
    chosen: ChosenRows | None = None  #: which rows these are; None: all of them, in their order

    def find_panel(self, panel: Expr) -> Expr:
        """Return the number of a panel among those in memory."""
        return panel if self.chosen is None else self.chosen.first_panel + panel

    def find_source(self, row: Expr) -> Expr:
        """Return the number of a row among the rows of the data."""
        return row if self.chosen is None else T.bind(self.chosen.find_source(row))

    def find_result(self, row: Expr) -> Expr:
        """Return the number of a row among the rows of the result."""
        return row if self.chosen is None else T.bind(self.chosen.find_result(row))

    @property
    def group_values(self) -> list[Buffer]:
        """What there is one of for each output and group."""
        return [each for each in (self.scale, self.zeros, self.offsets) if each is not None]


def declare_grouped(plan: GroupedPlan, experts: GroupedExperts | None = None) -> Arguments:
    """Declare the arguments of `build_grouped_dense`, or of `build_grouped_experts`."""
    spec = plan.spec
    extents = name_extents(spec.leading)
    results = extents if experts is None else [*extents[:-1], experts.slots]

    def declare(name: str, extents: Sequence[Any], dtype: str) -> Buffer:
        return T.arg(name, T.Buffer(tuple(extents), dtype))

    def view(buffer: Buffer) -> Buffer:
        return T.decl_buffer((prod(buffer.shape),), buffer.dtype, data=buffer.data)

    count = plan.panels * plan.groups * plan.dot.lanes * (experts.count if experts else 1)
    data = declare("x", [*extents, spec.features], "float32" if spec.is_float else "int8")
    width = plan.groups if spec.group_scales else 1
    declared = None if spec.is_float else declare("x_scale", [*extents, width], "float32")
    choices = None if experts is None else declare("chosen", results, experts.index_dtype)
    codes = declare("codes", [count * plan.vectors * WORD], "uint8")
    scale = declare("scale", [count], plan.scale_dtype)
    zeros = declare("zeros", [count], plan.zeros_dtype) if spec.zeros_dtype else None
    out = declare("y", [*results, spec.outputs], "float32")
    data_scale = None if declared is None else view(declared)
    return Arguments(
        prod(results), view(data), None if spec.group_scales else data_scale,
        data_scale if spec.group_scales else None, codes, scale,
        zeros if spec.has_zeros else None, zeros if spec.has_offsets else None, view(out),
        None if choices is None else view(choices),
    )  # fmt: skip


def common_zero(spec: GroupedDense) -> int:
    """Return the zero point of all groups, if they have no separate zero points."""
    return 0 if spec.has_offsets else middle_code(spec.value_bits)


def read_zero(plan: GroupedPlan, arguments: Arguments, at: Expr) -> Expr | None:
    """Read the zero point that is subtracted from the codes of a group, as an int32 vector.

    None if it is the same for all groups, and integer sums subtract it through the sum of the row,
    or a table of values has it.
    """
    lanes = plan.dot.lanes
    if arguments.zeros is None:
        subtracts = isinstance(plan.dot, FloatDot) and not isinstance(plan.dot, TableDot)
        return constant("int32", common_zero(plan.spec), lanes) if subtracts else None
    zero = T.Cast(vector("int32", lanes), load_vector(arguments.zeros, at * lanes, lanes))
    return zero - constant("int32", plan.offset, lanes) if plan.offset else zero


def take_word(plan: GroupedPlan, words: Expr, place: int) -> Expr:
    """Extract the values of the codes of one word, one byte each, as an int32 vector."""
    if plan.bits == 8:
        return words
    lanes, mask = plan.dot.lanes, ((1 << plan.bits) - 1) * 0x01010101
    if place:
        words = plan.dot.shift_codes(words, plan.bits * place)
    if plan.dot.reads_low_bits:
        return words
    codes = T.bitwise_and(words, constant("int32", mask, lanes))
    if plan.shuffle is None:
        return codes
    return plan.shuffle.look_up(codes, plan.levels, lanes)
