"""Specification of a depthwise float convolution -> its loops. Each channel is one lane.

    y[n, oy, ox, c] = sum x[n, oy*s + ky*d - p, ox*s + kx*d - p, c] * w[ky, kx, c]
                      (+ bias[c]) (+ residual[n, oy, ox, c]), clipped

A task is a vector of channels of a few output rows. Columns whose windows leave the image are known
when the kernel is built, and read fewer taps:

    before      | columns between: a loop over tiles of neighbouring columns | behind
    (left edge) |                                                            | (right edge)
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    import_code,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d, count_macs
from relayquant.codegen.kernels.floating.gemm import finish_into
from relayquant.codegen.kernels.floating.stored import load_floats
from relayquant.codegen.kernels.floating.tile import PARALLEL_MACS, Expr, FloatIsa
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS

#: A depthwise multiply-add takes about as long as this many dense ones.
DEPTHWISE_COST = 8
#: Floats of the input rows of one task. They stay in the second-level cache.
TASK_FLOATS = 1 << 15


def emit_depthwise(spec: FloatConv2d, isa: FloatIsa, operands: FloatOperands) -> None:
    """Emit tasks of a few output rows times one vector of channels. Padding is not read: a row
    outside the image is skipped at run time, a column outside of it when the kernel is built.
    """
    if isa.bf16 is not None and operands.result.dtype == BF16_BITS:
        import_code(isa.bf16.code)
    (kh, _), (sh, _), (dh, _) = spec.kernel, spec.strides, spec.dilation
    (oh, _), channels, lanes = spec.out_size, spec.in_channels, isa.lanes
    row_size = spec.width * channels
    rows = oh
    while rows > 1 and ((rows - 1) * sh + (kh - 1) * dh + 1) * row_size > TASK_FLOATS:
        rows -= 1
    tasks, vectors = -(-oh // rows), -(-channels // lanes)
    rows = -(-oh // tasks)
    threads = count_macs(spec) * DEPTHWISE_COST >= PARALLEL_MACS
    with (T.parallel if threads else T.serial)(spec.batch * (tasks * vectors)) as index:
        task, vector = T.floordiv(index, vectors), T.floormod(index, vectors)
        n, first = T.floordiv(task, tasks), T.floormod(task, tasks) * rows
        first = T.min(first, oh - rows) if oh % rows else first
        channel = vector * lanes
        channel = T.min(channel, channels - lanes) if channels % lanes else channel
        with T.serial(rows) as r:
            emit_row(spec, isa, operands, n, first + r, channel)


def emit_row(
    spec: FloatConv2d,
    isa: FloatIsa,
    operands: FloatOperands,
    n: Expr,
    oy: Expr,
    channel: Expr,
) -> None:
    """Emit one row of results for a vector of channels."""
    (kh, kw), (sh, sw), (dh, dw) = spec.kernel, spec.strides, spec.dilation
    (oh, ow), channels, lanes = spec.out_size, spec.in_channels, isa.lanes
    (top, left, _, _), pitch = spec.padding, spec.epilogue.pitch(spec.out_channels)

    def emit_columns(ox: Expr, count: int) -> None:
        """Emit neighbouring results. A column that is known reads only the taps in the image."""
        accumulators = alloc_vectors(count, lanes, "float32")
        for acc in accumulators:
            store_vector(acc, broadcast(T.float32(0), lanes), 0, lanes)

        def add_row(ky: Expr, row: Expr) -> None:
            source = spec.find_row(n, row) * (spec.width * channels) + channel
            for kx in range(kw):
                tap = load_vector(operands.weight, (ky * kw + kx) * channels + channel, lanes)
                for c, acc in enumerate(accumulators):
                    column = (ox + c) * sw + (kx * dw - left)
                    if isinstance(column, int) and not 0 <= column < spec.width:
                        continue
                    product = load_floats(operands.data, source + column * channels, lanes) * tap
                    store_vector(acc, load_vector(acc, 0, lanes) + product, 0, lanes)

        with T.serial(kh) as ky:
            row = oy * sh + (ky * dh - top)
            with T.If(T.And(row >= 0, row < spec.height)), T.Then():
                add_row(ky, row)
        out = ((n * oh + oy) * ow + ox) * pitch
        targets = [out + c * pitch for c in range(count)]
        finish = finish_into(operands, spec.epilogue, targets, [channel], lanes, isa.bf16)
        for c, acc in enumerate(accumulators):
            finish(c, 0, load_vector(acc, 0, lanes))

    most = max(1, isa.accumulators // 3)
    before = min(-(-left // sw), ow)
    behind = max(min((spec.width + left - (kw - 1) * dw - 1) // sw + 1, ow), before)
    if ow <= most:
        before = behind = ow
    for begin, end in ((0, before), (behind, ow)):
        for ox in range(begin, end, most):
            emit_columns(ox, min(most, end - ox))
    count = behind - before
    if count:
        cols = max(range(1, min(count, most) + 1), key=lambda c: (-(-(-count // c) * (c + 1.5)), c))
        with T.serial(-(-count // cols)) as block:
            at = block * cols
            emit_columns(before + (T.min(at, count - cols) if count % cols else at), cols)
