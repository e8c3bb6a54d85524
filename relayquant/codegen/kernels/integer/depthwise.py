"""Specification of a depthwise convolution -> its kernel, as TIR. Each channel is one lane.

    y[n, oy, ox, c] = epilogue(bias[c] + sum x[n, oy*s + kh*d, ox*s + kw*d, c] * w[c, kh, kw])

A word is `Isa.products` input rows of one column: the values of these rows, interleaved channel by
channel. One dot product is then a column of the filter. The same words serve several output rows:
their weights are shifted within the words and filled with zeros. As the window moves along the
columns, they also serve every kernel column. So interleaving is cheap compared to the dot products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    broadcast,
    build_kernel,
    constant,
    load_vector,
    loop_over,
    split_index,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.depthwise_blocks import (
    emit_block,
    find_first_row,
    locate_block,
)
from relayquant.codegen.kernels.integer.depthwise_plan import (
    Blocks,
    DepthwisePlan,
    plan_depthwise,
)
from relayquant.codegen.kernels.integer.operands import (
    Operands,
    declare_operands,
    emit_narrow_vectors,
    emit_prepared_image,
    emit_store,
)
from relayquant.codegen.kernels.integer.saturating_pack import PACKED
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa

#: A depthwise multiply-add costs about as much as this many dense ones.
RELATIVE_COST = 6
#: Mask that flips the top bit of every byte of a word, by number of bytes and dtype of the word. In
#: a byte stored as a signed int16, the mask covers all bits from the byte's top bit on.
FLIP_BITS = {(4, "int32"): -0x7F7F7F80, (1, "int32"): 0x80, (1, "int16"): -0x80}


def build_depthwise(
    spec: Conv2d,
    isa: Isa,
    name: str,
    in_shape: tuple[int, ...] | None,
    out_shape: tuple[int, ...] | None,
) -> PrimFunc:
    """Build the kernel of `build_conv2d` for depthwise convolutions."""

    def body() -> None:
        plan = plan_depthwise(spec, isa)
        operands = declare_operands(
            spec, plan.isa, plan.weight_size, plan.channel_size, in_shape, out_shape
        )
        threads = spec.macs * RELATIVE_COST >= PARALLEL_THRESHOLD
        if plan.needs_copy:
            image = emit_prepared_image(operands.data, spec, plan.isa)
            padded = replace(
                spec,
                height=image.height,
                width=image.width,
                padding=(0, 0, 0, 0),
                joined=None,
                in_dtype=plan.isa.activation,
                in_zero_point=0,
            )
            plan = DepthwisePlan(padded, plan.isa)
            operands = replace(operands, data=image.data)
        emit_depthwise(plan, operands, threads)

    return build_kernel(name, body)


def emit_depthwise(plan: DepthwisePlan, operands: Operands, threads: bool) -> None:
    """Emit all rows of a depthwise convolution: the blocks of channels, and what is left.

    What is left are split blocks, or vectors.
    """
    batch, blocks, split = plan.spec.batch, plan.blocks, plan.split_blocks
    if split is not None:
        # An image may exceed the second-level cache, so all channels of some rows come together.
        parts = split.row_units if blocks.row_units == split.groups * split.row_units else 1
        extents = batch, parts, (blocks.units + split.units) // parts
        with loop_over(extents, threads) as (n, part, unit):

            def emit(kind: Blocks, unit: Expr) -> None:
                rows = kind.row_units // parts
                row, block = split_index(unit, (rows, kind.count))
                at = locate_block(plan, kind, n, part * rows + row, block)
                emit_block(plan, operands, at)

            counts = blocks.units // parts, split.units // parts
            emit_either((unit, *counts), partial(emit, blocks), partial(emit, split))
        return
    vectors = plan.vectors - PACKED * blocks.count
    with loop_over((batch, blocks.row_units, blocks.count + vectors), threads) as (n, row, unit):
        emit_either(
            (unit, blocks.count, vectors),
            lambda block: emit_block(plan, operands, locate_block(plan, blocks, n, row, block)),
            lambda vector: emit_vector(
                plan, operands, n, find_first_row(plan, row, 1), vector + PACKED * blocks.count
            ),
        )


def emit_either(
    units: tuple[Expr, int, int], first: Callable[[Expr], None], second: Callable[[Expr], None]
) -> None:
    """Emit a unit of one kind or of the other, from (number, units of the first kind, second)."""
    unit, count, others = units
    if not others:
        first(unit)
    elif not count:
        second(unit)
    else:
        with T.If(unit < count):
            with T.Then():
                first(unit)
            with T.Else():
                second(unit - count)


def emit_vector(plan: DepthwisePlan, operands: Operands, n: Expr, oy: Expr, v: Expr) -> None:
    """Emit output rows oy .. oy + out_rows of image n for channel vector v.

    Rows that reach into the padding above or below have separate code that selects row by row. The
    others read without tests.
    """
    spec, (top, _, bottom, _) = plan.spec, plan.spec.padding
    if not top and not bottom:
        emit_row(plan, operands, n, oy, v, border=False)
        return
    first = oy * spec.strides[0] - top
    below = first + (plan.out_rows - 1) * spec.strides[0]
    below = below + (spec.kernel[0] - 1) * spec.dilation[0]
    with T.If(T.And(first >= 0, below < spec.height)):
        with T.Then():
            emit_row(plan, operands, n, oy, v, border=False)
        with T.Else():
            emit_row(plan, operands, n, oy, v, border=True)


def emit_row(
    plan: DepthwisePlan, operands: Operands, n: Expr, oy: Expr, v: Expr, border: bool
) -> None:
    """Emit output rows oy .. oy + out_rows of image n for channel vector v."""
    spec, isa = plan.spec, plan.isa
    lanes, channels, span = isa.lanes, spec.out_channels, plan.span
    (_, out_width), (kh, kw) = spec.out_size, spec.kernel
    (stride_h, stride_w), (dilation_h, dilation_w) = spec.strides, spec.dilation
    top, left, _, right = spec.padding
    channel = T.min(v * lanes, max(channels - lanes, 0)) if channels % lanes else v * lanes
    width = min(channels, lanes)
    kept = plan.kept
    flip = 0 if spec.in_dtype == isa.activation else 128
    unsigned = "uint16" if isa.activation == "int16" else "uint8"
    padding = (spec.in_zero_point + plan.shift) % (INTEGER_LIMITS[unsigned][1] + 1)

    row_starts, inside = [], []
    for i in range(plan.words * isa.products):
        y = oy * stride_h + (i * dilation_h - top)
        needed = i <= (plan.out_rows - 1) * stride_h + kh - 1
        inside.append(T.And(y >= 0, y < spec.height) if border and needed else None)
        if border or not needed:  # rows that are not needed have zero weights
            y = T.max(T.min(y, spec.height - 1), 0)
        row_starts.append(spec.find_row(n, y) * spec.width * channels + channel)
    window = [alloc_vectors(plan.words, lanes, isa.row_dtype) for _ in range(span)]

    def load_row(i: int, column: Expr) -> Expr:
        bits = load_vector(operands.data, row_starts[i] + column * channels, lanes)
        bits = T.reinterpret(vector(unsigned, lanes), bits)
        if inside[i] is not None:
            outside = constant(unsigned, padding ^ flip, lanes)
            bits = T.Select(broadcast(inside[i], lanes), bits, outside)
        return bits

    def load_column(column: Expr, slot: int) -> None:
        """Fill a slot of the window with an input column, or with padding outside the image."""

        def fill(load: Callable[[int], Expr], mask: int) -> None:
            for word in range(plan.words):
                rows = range(word * isa.products, (word + 1) * isa.products)
                bits = isa.interleave([load(i) for i in rows])
                if mask:
                    flips = FLIP_BITS[isa.products, isa.row_dtype]
                    bits = T.bitwise_xor(bits, constant(isa.row_dtype, flips, lanes))
                store_vector(window[slot][word], bits, 0, lanes)

        if not left and not right:
            fill(lambda i: load_row(i, column), flip)
            return
        with T.If(T.And(column >= 0, column < spec.width)):
            with T.Then():
                fill(lambda i: load_row(i, column), flip)
            with T.Else():
                fill(lambda i: constant(unsigned, padding, lanes), 0)

    def emit_column(ox: Expr, accs: list[Buffer]) -> None:
        """Emit accumulators of the output rows at one column, then move the window."""
        for slot in range(kept, span):
            if plan.reads_slot(slot):
                load_column(ox * stride_w + (slot - left), slot)
        for r in range(plan.out_rows):
            acc = load_vector(operands.bias, v * lanes, lanes)
            for tap in range(kw):
                for word in range(plan.words):
                    words = load_vector(window[tap * dilation_w][word], 0, lanes)
                    index = (r * kw + tap) * plan.words + word + v * plan.vector_weights
                    weights = isa.load_weights(operands.weight, index)
                    acc = isa.dot(acc, isa.as_activation(words), weights)
                    if isa.repeats_sums:  # otherwise every product doubles the code
                        store_vector(accs[r], acc, 0, lanes)
                        acc = load_vector(accs[r], 0, lanes)
            store_vector(accs[r], acc, 0, lanes)
        for slot in range(kept):
            for word in range(plan.words):
                moved = load_vector(window[slot + stride_w][word], 0, lanes)
                store_vector(window[slot][word], moved, 0, lanes)

    def emit_columns(ox: Expr, count: int, narrow: bool) -> None:
        """Emit `count` neighbouring output columns."""
        accs = alloc_vectors(count * plan.out_rows, lanes)
        offsets = []
        for column in range(count):
            emit_column(ox + column, accs[column * plan.out_rows :][: plan.out_rows])
            for r in range(plan.out_rows):
                row = (n * spec.out_size[0] + oy + r) * out_width
                offsets.append((row + ox + column) * channels + channel)
        totals = [load_vector(acc, 0, lanes) for acc in accs]
        for first in range(0, len(accs), PACKED):
            targets = offsets[first : first + PACKED]
            values = totals[first : first + PACKED]
            if narrow:
                emit_narrow_vectors(
                    isa, spec.epilogue, operands, values, targets, v * lanes, 1, lanes
                )
                continue
            for value, at in zip(values, targets, strict=True):
                emit_store(operands, spec.epilogue, value, at, v * lanes, lanes, width)

    for slot in range(kept):
        load_column(T.int32(slot - left), slot)
    together = 1 if border else plan.columns
    narrow = plan.is_narrow and not border
    with T.serial(out_width // together) as i:
        emit_columns(i * together, together, narrow)
    for ox in range(out_width - out_width % together, out_width):
        emit_columns(T.int32(ox), 1, False)
