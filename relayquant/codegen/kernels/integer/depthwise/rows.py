"""Specification of a depthwise convolution -> its kernel, as TIR. Each channel is one lane.

    y[n, oy, ox, c] = epilogue(bias[c] + sum x[n, oy*s + kh*d, ox*s + kw*d, c] * w[c, kh, kw])

A word is `Isa.products` input rows of one column: the values of these rows, interleaved channel by
channel. One dot product is then a column of the filter. The same words serve several output rows:
their weights are shifted within the words and filled with zeros. As the window moves along the
columns, they also serve every kernel column. So interleaving is cheap compared to the dot products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

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
from relayquant.codegen.kernels.integer.depthwise.blocks import (
    emit_block,
    find_first_row,
    locate_block,
)
from relayquant.codegen.kernels.integer.depthwise.plan import (
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
from relayquant.codegen.kernels.integer.specs import Conv2d, Shape
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa

#: A depthwise multiply-add costs about as much as this many dense ones.
RELATIVE_COST = 6
#: Mask that flips the top bit of every byte of a word, by number of bytes and dtype of the word. In
#: a byte stored as a signed int16, the mask covers all bits from the byte's top bit on.
FLIP_BITS = {(4, "int32"): -0x7F7F7F80, (1, "int32"): 0x80, (1, "int16"): -0x80}


def build_depthwise(spec: Conv2d, isa: Isa, name: str, *shapes: Shape) -> PrimFunc:
    """Build the kernel of `build_conv2d` for depthwise convolutions."""

    def body() -> None:
        plan = plan_depthwise(spec, isa)
        operands = declare_operands(spec, plan.isa, plan.weight_size, plan.channel_size, *shapes)
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

    def emit(border: bool) -> None:
        window = [
            alloc_vectors(plan.words, plan.isa.lanes, plan.isa.row_dtype) for _ in range(plan.span)
        ]
        VectorRows(plan, operands, n, oy, v, border, window).emit()

    if not top and not bottom:
        emit(border=False)
        return
    first = oy * spec.strides[0] - top
    below = first + (plan.out_rows - 1) * spec.strides[0]
    below = below + (spec.kernel[0] - 1) * spec.dilation[0]
    with T.If(T.And(first >= 0, below < spec.height)):
        with T.Then():
            emit(border=False)
        with T.Else():
            emit(border=True)


@dataclass(frozen=True)
class SourceRow:
    """An input row: where the channels of its first pixel begin."""

    start: Expr
    inside: Expr | None  #: whether it lies in the image; None: it does, or nobody needs it


@dataclass(frozen=True)
class VectorRows:
    """Output rows of one vector of channels, and the window of words under the kernel.

    A slot of the window holds a column of the input. As the window moves on, most slots stay:

        kernel of 3 columns, stride 1       input column    0 1 2 3 4
                                            first result   [a b c]
        b and c move, d is loaded           next result      [b c d]
    """

    plan: DepthwisePlan
    operands: Operands
    image: Expr
    row: Expr  #: the first output row, of `DepthwisePlan.out_rows`
    vector: Expr  #: number of the vector
    border: bool  #: whether input rows may lie outside the image
    window: list[list[Buffer]]  #: words of each slot

    @property
    def channel(self) -> Expr:
        """The first channel. The last vector is moved back."""
        channels, lanes = self.plan.spec.out_channels, self.plan.isa.lanes
        first = self.vector * lanes
        return T.min(first, max(channels - lanes, 0)) if channels % lanes else first

    @property
    def unsigned(self) -> str:
        """Dtype of an activation's bits."""
        return "uint16" if self.plan.isa.activation == "int16" else "uint8"

    @property
    def flip(self) -> int:
        """The number that makes activations of stored values, by exclusive or of the bits."""
        return 0 if self.plan.spec.in_dtype == self.plan.isa.activation else 128

    @property
    def padding(self) -> int:
        """The zero point, as bits of an activation."""
        return (self.plan.spec.in_zero_point + self.plan.shift) % (
            INTEGER_LIMITS[self.unsigned][1] + 1
        )

    @cached_property
    def sources(self) -> list[SourceRow]:
        """The input rows of all words, from the top. Those not needed have zero weights."""
        plan, spec = self.plan, self.plan.spec
        (stride, _), (dilation, _), rows = spec.strides, spec.dilation, []
        for i in range(plan.words * plan.isa.products):
            y = self.row * stride + (i * dilation - spec.padding[0])
            needed = i <= (plan.out_rows - 1) * stride + spec.kernel[0] - 1
            inside = T.And(y >= 0, y < spec.height) if self.border and needed else None
            if self.border or not needed:
                y = T.max(T.min(y, spec.height - 1), 0)
            start = spec.find_row(self.image, y) * spec.width * spec.out_channels + self.channel
            rows.append(SourceRow(start, inside))
        return rows

    def emit(self) -> None:
        """Emit all columns: neighbours whose results are packed together, then what is left."""
        plan, width = self.plan, self.plan.spec.out_size[1]
        for slot in range(plan.kept):
            self.load_column(T.int32(slot - plan.spec.padding[1]), slot)
        together = 1 if self.border else plan.columns
        with T.serial(width // together) as i:
            self.emit_columns(i * together, together, plan.is_narrow and not self.border)
        for ox in range(width - width % together, width):
            self.emit_columns(T.int32(ox), 1, False)

    def emit_columns(self, ox: Expr, count: int, narrow: bool) -> None:
        """Emit `count` neighbouring output columns: their sums, then their results."""
        plan, spec, lanes = self.plan, self.plan.spec, self.plan.isa.lanes
        (height, width), rows = spec.out_size, plan.out_rows
        accs, offsets = alloc_vectors(count * rows, lanes), []
        for column in range(count):
            self.emit_sums(ox + column, accs[column * rows :][:rows])
            for r in range(rows):
                row = (self.image * height + self.row + r) * width
                offsets.append((row + ox + column) * spec.out_channels + self.channel)
        totals = [load_vector(acc, 0, lanes) for acc in accs]
        constants = self.vector * lanes
        for first in range(0, len(accs), PACKED):
            targets, values = offsets[first : first + PACKED], totals[first : first + PACKED]
            if narrow:
                emit_narrow_vectors(
                    plan.isa, spec.epilogue, self.operands, values, targets, constants, 1, lanes
                )
                continue
            width = min(spec.out_channels, lanes)
            for value, at in zip(values, targets, strict=True):
                emit_store(self.operands, spec.epilogue, value, at, constants, lanes, width)

    def emit_sums(self, ox: Expr, accs: list[Buffer]) -> None:
        """Emit the sums of the output rows at one column, then move the window."""
        plan, spec, isa = self.plan, self.plan.spec, self.plan.isa
        stride, left = spec.strides[1], spec.padding[1]
        for slot in range(plan.kept, plan.span):
            if plan.reads_slot(slot):
                self.load_column(ox * stride + (slot - left), slot)
        for r, total in enumerate(accs):
            acc = load_vector(self.operands.bias, self.vector * isa.lanes, isa.lanes)
            for tap, word in product(range(spec.kernel[1]), range(plan.words)):
                words = load_vector(self.window[tap * spec.dilation[1]][word], 0, isa.lanes)
                index = (r * spec.kernel[1] + tap) * plan.words + word
                index = index + self.vector * plan.vector_weights
                weights = isa.load_weights(self.operands.weight, index)
                acc = isa.dot(acc, isa.as_activation(words), weights)
                if isa.repeats_sums:  # otherwise every product doubles the code
                    store_vector(total, acc, 0, isa.lanes)
                    acc = load_vector(total, 0, isa.lanes)
            store_vector(total, acc, 0, isa.lanes)
        for slot, word in product(range(plan.kept), range(plan.words)):
            moved = load_vector(self.window[slot + stride][word], 0, isa.lanes)
            store_vector(self.window[slot][word], moved, 0, isa.lanes)

    def load_column(self, column: Expr, slot: int) -> None:
        """Fill a slot of the window with an input column, or with padding outside the image."""
        _, left, _, right = self.plan.spec.padding

        def load() -> None:
            self.fill(slot, [self.load_row(row, column) for row in self.sources], self.flip)

        if not left and not right:
            load()
            return
        with T.If(T.And(column >= 0, column < self.plan.spec.width)):
            with T.Then():
                load()
            with T.Else():
                outside = constant(self.unsigned, self.padding, self.plan.isa.lanes)
                self.fill(slot, [outside] * len(self.sources), 0)

    def load_row(self, row: SourceRow, column: Expr) -> Expr:
        """Load the stored bits of a row at one column. Outside the image they are the padding's."""
        lanes = self.plan.isa.lanes
        at = row.start + column * self.plan.spec.out_channels
        bits = T.reinterpret(
            vector(self.unsigned, lanes), load_vector(self.operands.data, at, lanes)
        )
        if row.inside is None:
            return bits
        outside = constant(self.unsigned, self.padding ^ self.flip, lanes)
        return T.Select(broadcast(row.inside, lanes), bits, outside)

    def fill(self, slot: int, rows: list[Expr], flip: int) -> None:
        """Interleave rows to the words of a slot."""
        isa = self.plan.isa
        for word, buffer in enumerate(self.window[slot]):
            bits = isa.interleave(rows[word * isa.products : (word + 1) * isa.products])
            if flip:
                flips = FLIP_BITS[isa.products, isa.row_dtype]
                bits = T.bitwise_xor(bits, constant(isa.row_dtype, flips, isa.lanes))
            store_vector(buffer, bits, 0, isa.lanes)
