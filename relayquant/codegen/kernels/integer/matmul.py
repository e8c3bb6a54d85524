"""Specification of a batched product of two activation matrices -> its kernel, as TIR.

The second matrix is packed at run time.

    y[b, m, n] = epilogue(sum_k (x[b, m, k] - z_x) * (w[b, n, k] - z_w))
               = epilogue(sum x * w  - z_x * sum_k w  - z_w * sum_k x  + K * z_x * z_w)

The convolution generator computes the first sum, with one set of weights per image. The second sum
results from the packing and becomes the bias. The third is a term per row, needed only if z_w is
not 0. Packing also accepts a second operand whose K is not the last axis, such as the values of
attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    alloc_workspace,
    build_kernel,
    concat_vectors,
    constant,
    constant_lane,
    declare_arguments,
    emit_sum,
    load_vector,
    loop_over,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.convolution.direct import emit_convolution
from relayquant.codegen.kernels.integer.convolution.plan_choice import (
    choose_instructions,
    make_plan,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.integer.operands import Image, Operands, emit_prepared_image
from relayquant.codegen.kernels.integer.saturating_pack import PART, channel_order
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa


@dataclass(frozen=True)
class BatchMatmul:
    """x (B, M, K) times the transpose of w (B, N, K); both uint8 or int8, static shapes.

    `multiplier` is float32(double(s_x) * double(s_w) / double(s_out)), or the product of the scales
    to dequantize. It is not used if accumulators are stored. With `w_heads`, w is (B / w_heads, K,
    w_heads, N): rows of a dense layer that hold the values of several heads.
    """

    batch: int
    rows: int
    cols: int
    inner: int
    x_dtype: str = "uint8"
    x_zero_point: int = 0
    w_dtype: str = "int8"
    w_zero_point: int = 0
    multiplier: float = 1.0
    epilogue: Epilogue = field(default_factory=Epilogue)
    w_heads: int | None = None

    def __post_init__(self) -> None:
        for dtype in (self.x_dtype, self.w_dtype):
            if dtype not in ("uint8", "int8"):
                raise ValueError(f"BatchMatmul: operand is {dtype!r}; allowed: uint8, int8.")
        if self.w_heads is not None and (self.w_heads < 1 or self.batch % self.w_heads):
            raise ValueError(
                f"BatchMatmul: w_heads is {self.w_heads}; allowed: divisors of the batch "
                f"{self.batch}, or None.",
            )

    @property
    def w_shape(self) -> tuple[int, ...]:
        """Shape of w in memory."""
        if self.w_heads is None:
            return self.batch, self.cols, self.inner
        return self.batch // self.w_heads, self.inner, self.w_heads, self.cols

    @property
    def macs(self) -> int:
        return self.batch * self.rows * self.cols * self.inner


def build_batch_matmul(
    spec: BatchMatmul,
    isa: Isa,
    name: str = "batch_matmul",
    x_shape: tuple[int, ...] | None = None,
    w_shape: tuple[int, ...] | None = None,
    out_shape: tuple[int, ...] | None = None,
) -> PrimFunc:
    """Make PrimFunc(x, w[, residual], y).

    Shapes are (B, M, K), `spec.w_shape`, (B, M, N), or as given.
    """

    def body() -> None:
        plan = plan_batch_matmul(spec, isa)
        added = spec.epilogue.residual
        y_shape = (spec.batch, spec.rows, spec.cols) if out_shape is None else out_shape
        x, w, residual, out = declare_arguments(
            ("x", x_shape or (spec.batch, spec.rows, spec.inner), spec.x_dtype),
            ("w", w_shape or spec.w_shape, spec.w_dtype),
            ("residual", y_shape, added.dtype) if added else None,
            ("y", y_shape, spec.epilogue.dtype),
        )
        threads = spec.macs >= PARALLEL_THRESHOLD
        image = Image(x, 1, spec.rows)
        if plan.needs_copy:
            image = emit_prepared_image(x, plan.spec, plan.isa)
        weight, bias = emit_packed_operand(spec, plan, w, threads)
        w_zero_point = spec.w_zero_point - (128 if spec.w_dtype == "uint8" else 0)
        row_term = emit_row_term(spec, image.data, w_zero_point, threads) if w_zero_point else None
        factor = spec.multiplier if spec.epilogue.has_multiplier else None
        operands = Operands(image.data, weight, bias, factor, residual, out, row_term)
        emit_convolution(plan, image, operands, threads)

    return build_kernel(name, body)


def plan_batch_matmul(spec: BatchMatmul, isa: Isa) -> ConvPlan:
    """Choose the plan of the product.

    Packing the operand needs fewer instructions with longer words.
    """
    conv = as_conv2d(spec)
    return choose_instructions(lambda isa: make_plan(conv, isa, weights_per_image=True), isa)


def as_conv2d(spec: BatchMatmul) -> Conv2d:
    """Return the product as a 1x1 convolution: a batch of images of one row of M pixels."""
    return Conv2d(
        batch=spec.batch,
        height=1,
        width=spec.rows,
        in_channels=spec.inner,
        out_channels=spec.cols,
        kernel=(1, 1),
        in_dtype=spec.x_dtype,
        in_zero_point=spec.x_zero_point,
        epilogue=spec.epilogue,
    )


def emit_packed_operand(
    spec: BatchMatmul, plan: ConvPlan, w: Buffer, threads: bool
) -> tuple[Buffer, Buffer]:
    """Emit (packed weights, bias) of every image in workspaces.

    uint8 is stored as int8, minus 128.
    """
    isa, lanes = plan.isa, plan.isa.lanes
    weight = alloc_workspace(spec.batch * plan.weight_size, isa.weight_dtype)
    bias = alloc_workspace(spec.batch * plan.channel_size, "int32")
    blocks = plan.tile.blocks
    x_zero_point = spec.x_zero_point + plan.shift
    w_zero_point = spec.w_zero_point - (128 if spec.w_dtype == "uint8" else 0)
    flip = 0x80 if spec.w_dtype == "uint8" else 0

    with loop_over((spec.batch, plan.panels, blocks), threads) as (n, panel, block):
        channels = emit_channels(plan, panel, block)
        width = isa.accumulator_lanes
        (total,) = alloc_vectors(1, width)
        store_vector(total, constant("int32", 0, width), 0, width)
        ones = isa.repeat_word(int.from_bytes(bytes([1] * isa.products), "little"))
        first = (n * plan.panels + panel) * plan.panel_vectors

        def pack_word(word, count: int) -> None:
            """Pack word number `word` of all lanes, of which `count` bytes exist."""
            load = load_words if spec.w_heads is None else load_words_across
            words, dtype = load(spec, plan, w, n, channels, word, count), isa.word_dtype
            if flip:
                mask = np.frombuffer(bytes([flip] * count).ljust(8, b"\0"), dtype)[0]
                words = T.bitwise_xor(words, constant(dtype, int(mask), lanes))
            index = first + plan.number_vector(word, block)
            isa.store_weights(weight, index, words)
            loaded = isa.load_weights(weight, index)
            store_vector(total, isa.dot(load_vector(total, 0, width), ones, loaded), 0, width)

        full, rest = divmod(spec.inner, isa.products)
        if full:
            with T.serial(full) as word:
                pack_word(word, isa.products)
        if rest:
            pack_word(T.int32(full), rest)
        for word in range(full + bool(rest), plan.words):  # tiles take the same number of words
            index = first + plan.number_vector(T.int32(word), block)
            isa.store_weights(weight, index, constant(isa.word_dtype, 0, lanes))
        (own, *_) = isa.split_sums(load_vector(total, 0, width))
        sums = own * constant("int32", -x_zero_point, lanes)
        sums = sums + constant("int32", spec.inner * x_zero_point * w_zero_point, lanes)
        first = (n * plan.panels + panel) * blocks + block
        store_vector(bias, sums, first * lanes, lanes)
    return weight, bias


def emit_channels(plan: ConvPlan, panel: Expr, block: Expr) -> list[Expr]:
    """List the channel of every lane, like `ConvPlan.channel_map`, but never outside the matrix."""
    lanes, blocks, channels = plan.isa.lanes, plan.tile.blocks, plan.group_out
    if plan.is_narrow:
        start = T.min(panel * plan.panel_channels, max(channels - plan.panel_channels, 0))
        order = channel_order(lanes, blocks)  # linear in the block
        step = int(order[1, 0] - order[0, 0]) if blocks > 1 else 0
        own = [start + block * step + int(order[0, lane]) for lane in range(lanes)]
        is_full = channels >= plan.panel_channels
        return own if is_full else [T.min(channel, channels - 1) for channel in own]
    start = T.min((panel * blocks + block) * lanes, max(channels - lanes, 0))
    return [T.min(start + lane, channels - 1) for lane in range(lanes)]


def load_words(
    spec: BatchMatmul,
    plan: ConvPlan,
    w: Buffer,
    image: Expr,
    channels: list[Expr],
    word: Expr,
    count: int,
) -> Expr:
    """Load word number `word` of some channels, of which `count` bytes exist. The others are 0."""
    dtype, scalars = plan.isa.word_dtype, []
    for channel in channels:
        at = (image * spec.cols + channel) * spec.inner + word * plan.isa.products
        if count == np.dtype(dtype).itemsize:
            scalars.append(T.reinterpret(dtype, w.vload([at], f"{w.dtype}x{count}")))
            continue
        value = getattr(T, dtype)(0)
        for i in range(count):
            byte = T.Cast(dtype, T.reinterpret("uint8", w.vload([at + i])))
            value = T.bitwise_or(value, byte << (8 * i))
        scalars.append(value)
    return concat_vectors(scalars, 1)


def load_words_across(
    spec: BatchMatmul,
    plan: ConvPlan,
    w: Buffer,
    image: Expr,
    channels: list[Expr],
    word: Expr,
    count: int,
) -> Expr:
    """Load the same if channels are neighbours, and the bytes of a word are in `count` rows."""
    assert spec.w_heads is not None
    dtype, lanes, heads = plan.isa.word_dtype, plan.isa.lanes, spec.w_heads
    size = np.dtype(dtype).itemsize
    outer, head = T.floordiv(image, heads), T.floormod(image, heads)
    run = count_neighbours(plan)
    rows = [constant(w.dtype, 0, lanes)] * size
    for i in range(count):
        row = (outer * spec.inner + word * plan.isa.products + i) * heads + head
        starts = [row * spec.cols + channel for channel in channels[::run]]
        rows[i] = concat_vectors([load_vector(w, start, run) for start in starts], run)
    order = [T.int32(i * lanes + lane) for lane in range(lanes) for i in range(size)]
    return T.reinterpret(vector(dtype, lanes), T.Shuffle(rows, order))


def count_neighbours(plan: ConvPlan) -> int:
    """Count the consecutive lanes to which `emit_channels` gives consecutive channels."""
    if plan.is_narrow:
        return PART if plan.group_out >= plan.panel_channels else 1
    return plan.isa.lanes if plan.group_out >= plan.isa.lanes else 1


def emit_row_term(spec: BatchMatmul, data: Buffer, w_zero_point: int, threads: bool) -> Buffer:
    """Emit -z_w * sum_k x[b, m, k] of every row, int32, in a workspace.

    x is in the form that the dot product reads.
    """
    term = alloc_workspace(spec.batch * spec.rows, "int32")
    factor = constant_lane(-w_zero_point)
    with loop_over((spec.batch * spec.rows,), threads) as (row,):
        total = emit_sum(data, row * spec.inner, spec.inner)
        T.buffer_store(term, total * factor, [row])
    return term
