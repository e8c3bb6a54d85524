"""Plan of a depthwise convolution on x86 -> its loops over blocks of four vectors of sums.

The four vectors are stored as one byte vector.

    rows r0 .. r3, 64 bytes each   ->   words v = 0..3 of lanes (r0[c], r1[c], r2[c], r3[c])

Unpacking works within 128-bit blocks, as packing does (`saturating_pack`). It puts channel 16q + 4v
+ e into lane 4q + e of word vector v, and packing the four sums puts every byte back in place. So
interleaving takes two instructions per word vector, and storing takes no shuffle.

This suits words that serve only one output row, and hardly more than one output column because the
stride skips every other column. Nothing is kept from column to column, and pixels outside the image
are masked without branches. If words serve more outputs, words of a single vector stay in registers
as the window moves (`depthwise`), which is as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    ceil_div,
    constant,
    load_vector,
    loop_over,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.depthwise_plan import DepthwisePlan
from relayquant.codegen.kernels.integer.operands import Operands, load_multiplier
from relayquant.codegen.kernels.integer.saturating_pack import PACKED, PART, emit_packed
from relayquant.codegen.kernels.isa.base import Buffer, Expr


def emit_depthwise_blocks(plan: DepthwisePlan, operands: Operands, threads: bool) -> None:
    """Emit all rows of a depthwise convolution, like `emit_depthwise`, for a plan with blocks."""
    extents, size = (plan.spec.batch, plan.spec.out_size[0], plan.blocks), PACKED * plan.isa.lanes
    with loop_over(extents, threads) as (n, row, block):
        channel = T.min(block * size, plan.spec.out_channels - size)
        emit_row(plan, operands, BlockPosition(n, row, block, channel))


@dataclass(frozen=True)
class BlockPosition:
    """Output row `row` of `image`, for the block with this number and first channel."""

    image: Expr
    row: Expr
    block: Expr
    channel: Expr


@dataclass(frozen=True)
class InputRow:
    """An input row of words: offset of its first value in the block's channels."""

    start: Expr
    mask: Buffer | None  #: all bits set if the row is in the image; None: it always is


def emit_row(plan: DepthwisePlan, operands: Operands, at: BlockPosition) -> None:
    """Emit one output row. Columns whose window reaches beyond the image come first."""
    spec = plan.spec
    width, stride, left = spec.out_size[1], spec.strides[1], spec.padding[1]
    rows = locate_rows(plan, at)
    before = min(ceil_div(left, stride), width)
    behind = max(min((spec.width + left - plan.span) // stride + 1, width), before)
    inside = behind - before
    if inside < width:
        with T.serial(width - inside) as i:
            column = T.Select(i < before, i, i + inside)
            emit_column(plan, operands, at, rows, column, border=True)
    if inside:
        with T.serial(inside) as i:
            emit_column(plan, operands, at, rows, before + i, border=False)


def locate_rows(plan: DepthwisePlan, at: BlockPosition) -> list[InputRow | None]:
    """Locate every row of a word. None for a row that is not read."""
    spec = plan.spec
    lowest = -spec.padding[0]
    highest = (spec.out_size[0] - 1) * spec.strides[0] - spec.padding[0]
    rows: list[InputRow | None] = []
    for i in range(plan.isa.products):
        if i >= spec.kernel[0]:
            rows.append(None)
            continue
        moved = i * spec.dilation[0]
        y, tests = at.row * spec.strides[0] + (moved - spec.padding[0]), []
        if lowest + moved < 0:
            tests.append(y >= 0)
        if highest + moved >= spec.height:
            tests.append(y < spec.height)
        if tests:
            y = T.max(T.min(y, spec.height - 1), 0)
        start = spec.find_row(at.image, y) * (spec.width * spec.in_channels) + at.channel
        mask = None
        if tests:
            (mask,) = alloc_vectors(1, plan.isa.lanes)
            inside = T.And(tests[0], tests[-1])
            store_vector(mask, emit_mask(inside, plan.isa.lanes), 0, plan.isa.lanes)
        rows.append(InputRow(start, mask))
    return rows


def emit_mask(test: Expr, lanes: int) -> Expr:
    """Make an int32 vector with all bits set if the test holds.

    Without the fence LLVM would turn selections by the mask into branches, with a copy of all loops
    for each outcome.
    """
    bits = broadcast(-T.Cast("int32", test), lanes)
    mask = T.reinterpret(vector("float32", lanes), bits)
    name = f"llvm.arithmetic.fence.v{lanes}f32"
    mask = T.call_llvm_pure_intrin(name, mask, dtype=vector("float32", lanes))
    return T.reinterpret(vector("int32", lanes), mask)


def emit_column(
    plan: DepthwisePlan,
    operands: Operands,
    at: BlockPosition,
    rows: list[InputRow | None],
    column: Expr,
    border: bool,
) -> None:
    """Emit sums and results of a block at one output column."""
    spec, isa, lanes, taps = plan.spec, plan.isa, plan.isa.lanes, plan.spec.kernel[1]
    first = at.block * PACKED
    accs = alloc_vectors(PACKED, lanes)
    for v, acc in enumerate(accs):
        store_vector(acc, load_vector(operands.bias, (first + v) * lanes, lanes), 0, lanes)
    for tap in range(taps):
        x = column * spec.strides[1] + (tap * spec.dilation[1] - spec.padding[1])
        words = emit_words(plan, operands.data, rows, x, border)
        for v, (acc, word) in enumerate(zip(accs, words, strict=True)):
            weights = isa.load_weights(operands.weight, (first + v) * taps + tap)
            total = isa.dot(load_vector(acc, 0, lanes), isa.as_activation(word), weights)
            store_vector(acc, total, 0, lanes)
    reals = []
    for v, acc in enumerate(accs):
        factor = load_multiplier(operands, (first + v) * lanes, lanes)
        reals.append(spec.epilogue.emit_real(load_vector(acc, 0, lanes), factor, None, lanes))
    _, height, width, channels = spec.out_shape
    target = ((at.image * height + at.row) * width + column) * channels + at.channel
    store_vector(operands.out, emit_packed(isa, spec.epilogue, reals), target, PACKED * lanes)


def emit_words(
    plan: DepthwisePlan, data: Buffer, rows: list[InputRow | None], column: Expr, border: bool
) -> list[Expr]:
    """Interleave the rows of an input column to four vectors.

    Rows outside the image are padding. With `border` the column may be outside too.
    """
    spec, isa = plan.spec, plan.isa
    lanes, size = isa.lanes, PACKED * isa.lanes
    words = vector("int32", lanes)
    flip = 0 if spec.in_dtype == isa.activation else 128
    padding = (spec.in_zero_point + plan.shift) % 256
    outside = T.reinterpret(words, constant("uint8", padding, size))
    column_mask = None
    if border:
        (column_mask,) = alloc_vectors(1, lanes)
        inside = T.And(column >= 0, column < spec.width)
        store_vector(column_mask, emit_mask(inside, lanes), 0, lanes)
        column = T.max(T.min(column, spec.width - 1), 0)

    def load_row(row: InputRow | None) -> Expr:
        if row is None:  # has zero weights
            return constant("uint8", 0, size)
        bits = load_vector(data, row.start + column * spec.in_channels, size)
        bits = T.reinterpret(words, bits)
        if flip:
            bits = T.bitwise_xor(bits, T.reinterpret(words, constant("uint8", flip, size)))
        masks = [load_vector(m, 0, lanes) for m in (row.mask, column_mask) if m is not None]
        if masks:
            mask = T.bitwise_and(masks[0], masks[-1])
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
