"""Plan of a depthwise convolution on x86 -> its loops over blocks of four vectors of sums.

The four vectors are stored as one byte vector.

    rows r0 .. r3, 64 bytes each   ->   words v = 0..3 of lanes (r0[c], r1[c], r2[c], r3[c])

Unpacking works within 128-bit blocks, as packing does (`saturating_pack`). It puts channel 16q + 4v
+ e into lane 4q + e of word vector v, and packing the four sums puts every byte back in place. So
interleaving takes two instructions per word vector, and storing takes no shuffle.

The words of the columns under the kernel stay in registers as the window moves, so there must be
few of them: one word per column, and a narrow kernel. Rows outside the image are masked without
branches.

A split block has fewer channels, of several groups of output rows side by side:

    32 bytes of a row of the first group, 32 bytes of the same row of the second, and so on

Words, sums and weights are as for 64 channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    concat_vectors,
    constant,
    emit_unknown,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.depthwise.plan import Blocks, DepthwisePlan
from relayquant.codegen.kernels.integer.operands import Operands, load_multipliers
from relayquant.codegen.kernels.integer.saturating_pack import PACKED, PART, emit_packed
from relayquant.codegen.kernels.isa.base import Buffer, Expr, fence


@dataclass(frozen=True)
class BlockPosition:
    """Output rows of `image` from `row` on, `DepthwisePlan.out_rows` for each group of rows."""

    image: Expr
    row: Expr
    channel: Expr  #: the first one
    vector: Expr  #: number of the first vector of constants
    groups: int
    width: int  #: channels


@dataclass(frozen=True)
class InputRow:
    """An input row of words: offset of its first value in the block's channels, for each group."""

    starts: list[Expr]
    mask: Buffer | None  #: all bits set where the row is in the image; None: it always is


def locate_block(
    plan: DepthwisePlan, blocks: Blocks, n: Expr, row: Expr, block: Expr
) -> BlockPosition:
    """Find block number `block` of image n at the row unit `row`."""
    channel = blocks.first * PACKED * plan.isa.lanes + block * blocks.width
    if plan.spec.out_channels % blocks.width:
        channel = T.min(channel, plan.spec.out_channels - blocks.width)
    return BlockPosition(
        image=n,
        row=find_first_row(plan, row, blocks.groups),
        channel=channel,
        vector=(blocks.first + block) * PACKED,
        groups=blocks.groups,
        width=blocks.width,
    )


def find_first_row(plan: DepthwisePlan, unit: Expr, groups: int) -> Expr:
    """Find the first output row of a unit of rows. The last unit is moved back."""
    height, rows = plan.spec.out_size[0], groups * plan.out_rows
    return T.min(unit * rows, height - rows) if height % rows else unit * rows


def emit_block(plan: DepthwisePlan, operands: Operands, at: BlockPosition) -> None:
    """Emit `out_rows` output rows of a block, while the window of words moves along the columns.

    Columns that read beyond the image have separate code, which knows where the padding is.
    """
    spec, lanes = plan.spec, plan.isa.lanes
    stride, left = spec.strides[1], spec.padding[1]
    rows, unknown = locate_rows(plan, at), emit_unknown(at.row + 1)
    window = [alloc_vectors(PACKED, lanes) for _ in range(plan.span)]

    def load_column(slot: int, column: Expr | int) -> None:
        if not plan.reads_slot(slot):
            return
        words = emit_words(plan, operands.data, rows, column)
        for buffer, word in zip(window[slot], words, strict=True):
            store_vector(buffer, word, 0, lanes)

    last = LastRow(plan, operands, at, alloc_vectors(PACKED, lanes))

    def emit(column: Expr | int) -> None:
        for slot in range(plan.kept, plan.span):
            load_column(slot, column * stride + (slot - left))
        zero = (unknown + column) >> 31
        for row in range(plan.out_rows):
            sums = emit_sums(plan, operands, at, window, row, zero)
            if plan.is_delayed:
                last.exchange(row, column, sums)
            else:
                store_results(plan, operands, at, row, column, sums)
        for slot, v in product(range(plan.kept), range(PACKED)):
            moved = load_vector(window[slot + stride][v], 0, lanes)
            store_vector(window[slot][v], moved, 0, lanes)

    for slot in range(plan.kept):
        load_column(slot, slot - left)
    before, behind = plan.inside_columns
    if plan.is_delayed:  # before the first column there are no results to store
        before, behind = max(before, 1), max(behind, 1)
    for column in range(before):
        emit(column)
    if behind > before:
        with T.serial(behind - before) as i:
            emit(i + before)
    for column in range(behind, spec.out_size[1]):
        emit(column)
    if plan.is_delayed:
        last.store(plan.out_rows, spec.out_size[1] - 1)


@dataclass(frozen=True)
class LastRow:
    """The sums of an output row, kept until the products of the next row stand in the code.

    So a core that looks ahead a limited number of instructions finds products between conversions.
    """

    plan: DepthwisePlan
    operands: Operands
    at: BlockPosition
    sums: list[Buffer]

    def exchange(self, row: int, column: Expr | int, sums: list[Expr]) -> None:
        """Emit the sums of a row, then the stores of the row before, if there is one."""
        lanes = self.plan.isa.lanes
        fresh = alloc_vectors(PACKED, lanes)
        for buffer, value in zip(fresh, sums, strict=True):
            store_vector(buffer, value, 0, lanes)
        if row or not isinstance(column, int) or column:
            self.store(row, column)
        for old, new in zip(self.sums, fresh, strict=True):
            store_vector(old, load_vector(new, 0, lanes), 0, lanes)

    def store(self, row: int, column: Expr | int) -> None:
        """Emit the stores of the row before `row` of a column."""
        before = (row - 1, column) if row else (self.plan.out_rows - 1, column - 1)
        sums = [load_vector(each, 0, self.plan.isa.lanes) for each in self.sums]
        store_results(self.plan, self.operands, self.at, *before, sums)


def locate_rows(plan: DepthwisePlan, at: BlockPosition) -> list[InputRow | None]:
    """Locate every row of a word. None for a row that is not read."""
    spec, stride = plan.spec, plan.spec.strides[0]
    rows: list[InputRow | None] = []
    for i in range(plan.isa.products):
        if i >= spec.kernel[0] + (plan.out_rows - 1) * stride:
            rows.append(None)
            continue
        starts, tests = [], []
        for group in range(at.groups):
            first = group * plan.out_rows * stride + i * spec.dilation[0] - spec.padding[0]
            last = first + (spec.out_size[0] - at.groups * plan.out_rows) * stride
            y, own = at.row * stride + first, []
            if first < 0:
                own.append(y >= 0)
            if last >= spec.height:
                own.append(y < spec.height)
            if own:
                y = T.max(T.min(y, spec.height - 1), 0)
            start = spec.find_row(at.image, y) * (spec.width * spec.in_channels)
            starts.append(start + at.channel)
            tests.append(T.And(own[0], own[-1]) if own else None)
        mask = None
        if any(test is not None for test in tests):
            (mask,) = alloc_vectors(1, plan.isa.lanes)
            store_vector(mask, emit_mask(tests, plan.isa.lanes), 0, plan.isa.lanes)
        rows.append(InputRow(starts, mask))
    return rows


def emit_mask(tests: list[Expr | None], lanes: int) -> Expr:
    """Make an int32 vector with all bits set where the test of these lanes holds. None: it does.

    Without the fence LLVM would turn selections by the mask into branches, with a copy of all loops
    for each outcome.
    """
    size = lanes // len(tests)
    parts = [
        constant("int32", -1, size) if test is None else broadcast(-T.Cast("int32", test), size)
        for test in tests
    ]
    mask = fence(T.reinterpret(vector("float32", lanes), concat_vectors(parts, size)), lanes)
    return T.reinterpret(vector("int32", lanes), mask)


def emit_sums(
    plan: DepthwisePlan,
    operands: Operands,
    at: BlockPosition,
    window: list[list[Buffer]],
    row: int,
    zero: Expr,
) -> list[Expr]:
    """Emit the sums of output row number `row` of a block, from the words of the window.

    `zero` is added to the numbers of weights. It depends on the column, and LLVM does not know that
    it is 0. Otherwise it would load all weights before the loop, and keep most on the stack.
    """
    spec, isa, lanes, taps = plan.spec, plan.isa, plan.isa.lanes, plan.spec.kernel[1]
    sums = []
    for v in range(PACKED):
        number = at.vector + v
        acc = load_vector(operands.bias, number * lanes, lanes)
        for tap in range(taps):
            word = load_vector(window[tap * spec.dilation[1]][v], 0, lanes)
            index = number * plan.vector_weights + (row * taps + tap) + zero
            weights = isa.load_weights(operands.weight, index)
            acc = isa.dot(acc, isa.as_activation(word), weights)
        sums.append(acc)
    return sums


def store_results(
    plan: DepthwisePlan,
    operands: Operands,
    at: BlockPosition,
    row: int,
    column: Expr | int,
    sums: list[Expr],
) -> None:
    """Emit the stores of output row number `row` of a block at one output column."""
    spec, isa, lanes = plan.spec, plan.isa, plan.isa.lanes
    _, height, width, channels = spec.out_shape
    reals = []
    for v, acc in enumerate(sums):
        factors = load_multipliers(operands, spec.epilogue, (at.vector + v) * lanes, lanes)
        reals.append(spec.epilogue.emit_real(acc, factors, None, lanes))
    packed = emit_packed(isa, spec.epilogue, reals)
    for group in range(at.groups):
        y = at.image * height + at.row + (group * plan.out_rows + row)
        target = (y * width + column) * channels + at.channel
        own = [T.int32(group * at.width + i) for i in range(at.width)]
        part = packed if at.groups == 1 else T.Shuffle([packed], own)
        store_vector(operands.out, part, target, at.width)


def emit_words(
    plan: DepthwisePlan, data: Buffer, rows: list[InputRow | None], column: Expr | int
) -> list[Expr]:
    """Interleave the rows of an input column to four vectors.

    Rows outside the image are padding, and so is a column whose number is known to be outside.
    """
    spec, isa = plan.spec, plan.isa
    lanes, size = isa.lanes, PACKED * isa.lanes
    words = vector("int32", lanes)
    flip = 0 if spec.in_dtype == isa.activation else 128
    padding = (spec.in_zero_point + plan.shift) % 256
    outside = T.reinterpret(words, constant("uint8", padding, size))
    if isinstance(column, int) and not 0 <= column < spec.width:
        return [outside] * PACKED

    def load_row(row: InputRow | None) -> Expr:
        if row is None:  # has zero weights
            return constant("uint8", 0, size)
        width = size // len(row.starts)
        loads = [load_vector(data, at + column * spec.in_channels, width) for at in row.starts]
        bits = T.reinterpret(words, concat_vectors(loads, width))
        if flip:
            bits = T.bitwise_xor(bits, T.reinterpret(words, constant("uint8", flip, size)))
        if row.mask is not None:
            mask = load_vector(row.mask, 0, lanes)
            bits = T.bitwise_and(bits, mask)
            if padding:
                bits = T.bitwise_or(bits, T.bitwise_and(outside, T.bitwise_not(mask)))
        return T.reinterpret(vector("uint8", size), bits)

    return emit_interleaved([load_row(row) for row in rows], lanes)


def emit_interleaved(rows: list[Expr], lanes: int) -> list[Expr]:
    """Interleave four byte vectors to four int32 vectors.

    Lane 4q + e of vector v has the four bytes number 16q + 4v + e.
    """
    size, parts = PACKED * lanes, lanes // PART
    pairs = [
        T.reinterpret(vector("uint16", size // 2), emit_unpack(*rows[i : i + 2], size, parts, half))
        for half in range(2)
        for i in (0, 2)
    ]
    return [
        T.reinterpret(
            vector("int32", lanes), emit_unpack(*pairs[i : i + 2], size // 2, parts, half)
        )
        for i in (0, 2)
        for half in range(2)
    ]


def emit_unpack(a: Expr, b: Expr, size: int, parts: int, half: int) -> Expr:
    """Alternate elements of a and b, from the lower or upper halves of their `parts`."""
    part = size // parts
    order = []
    for start in range(half * part // 2, size, part):
        for i in range(start, start + part // 2):
            order += [T.int32(i), T.int32(size + i)]
    return T.Shuffle([a, b], order)
