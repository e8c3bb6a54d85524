"""Specification of a product of two computed float matrices -> its kernel with operands of
bfloat16.

    y[b, m, n] = sum_k bf16(x[b, m, k]) * bf16(w[b, k, n])

The operands may be permutations, such as heads of attention, of tensors that are read instead.
Both operands are rounded and the second is packed when the kernel runs, then the generator of
`bf16` computes the product as a convolution whose images have weights of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.curve import Curve
from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    PARALLEL_THRESHOLD,
    alloc_vectors,
    alloc_workspace,
    build_kernel,
    constant,
    declare_arguments,
    import_code,
    load_vector,
    loop_over,
    repeat_over_batch,
    split_index,
    store_vector,
)
from relayquant.codegen.kernels.floating.bf16 import (
    Bf16Plan,
    Bf16TiledPlan,
    choose_bf16_vectors,
    emit_bf16_products,
    emit_rounded_image,
)
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.gemm import FloatMatmul
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, static
from relayquant.codegen.kernels.integer.operands import Image, Operands
from relayquant.codegen.kernels.integer.tiled.plan import TileRows
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.codegen.kernels.permutation import transpose_vectors

#: Words of a pair of weights that are transposed together.
TRANSPOSED = 16
#: Fewer rows do not pay for the packing of the second operand.
FEWEST_ROWS = 8


@dataclass(frozen=True)
class Permuted:
    """An operand of this shape, which is `permute_dims` of a stored tensor. None: as it is."""

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        if self.axes is None:
            return self.shape
        return tuple(self.shape[self.axes.index(at)] for at in range(len(self.shape)))

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements of the stored tensor from one index of an axis to the next."""
        axes = range(len(self.shape)) if self.axes is None else self.axes
        return tuple(prod(self.stored[axis + 1 :]) for axis in axes)

    def locate(self, matrix: Expr) -> Expr:
        """Return the first element of a matrix of the batch."""
        batch = self.shape[:-2]
        at = split_index(matrix, batch) if len(batch) > 1 else (matrix,)
        return sum(i * stride for i, stride in zip(at, self.strides, strict=False))


@dataclass(frozen=True)
class Bf16Matmul:
    """x (*batch, M, K) times w (*batch, K, N), then a curve. With `is_batched` the first extent is
    1, and any number is taken. An operand with axes is `permute_dims` of the argument with them.
    """

    batch: tuple[int, ...]
    rows: int
    inner: int
    outputs: int
    is_batched: bool = False
    curve: Curve | None = None
    x_axes: tuple[int, ...] | None = None
    w_axes: tuple[int, ...] | None = None

    @property
    def x(self) -> Permuted:
        """The first operand."""
        return Permuted((*self.batch, self.rows, self.inner), self.x_axes)

    @property
    def w(self) -> Permuted:
        """The second operand."""
        return Permuted((*self.batch, self.inner, self.outputs), self.w_axes)

    def permute(
        self, x: tuple[int, ...] | None, w: tuple[int, ...] | None, isa: Bf16Isa
    ) -> Bf16Matmul:
        """Return the same product of permuted operands, as far as the kernel can read them.

        Rows have to be contiguous. Columns of w may be instead, for vectors of 16 words.
        """
        if self.inner % (isa.products * TRANSPOSED):
            return self
        spec = self
        if x is not None and x[0] == 0 and replace(self, x_axes=x).x.strides[-1] == 1:
            spec = replace(spec, x_axes=x)
        if w is not None and w[0] == 0:
            between_rows, between_columns = replace(self, w_axes=w).w.strides[-2:]
            is_transposed = between_rows == 1 and isa.lanes == TRANSPOSED
            if between_columns == 1 or is_transposed:
                spec = replace(spec, w_axes=w)
        return spec

    @property
    def conv(self) -> FloatConv2d:
        """The product as a 1x1 convolution over lines of M pixels."""
        return FloatConv2d(
            prod(self.batch),
            1,
            self.rows,
            self.inner,
            self.outputs,
            (1, 1),
            epilogue=FloatEpilogue(curve=self.curve),
        )


def read_bf16_matmul(spec: FloatMatmul, isa: Bf16Isa) -> Bf16Matmul | None:
    """Return the specification; None for symbolic extents but the first, shared weights, few rows,
    or fewer outputs than a vector has.
    """
    is_batched = bool(spec.batch) and static(spec.batch[0]) is None
    batch: tuple[Any, ...] = (1, *spec.batch[1:]) if is_batched else spec.batch
    sizes = [static(extent) for extent in (*batch, spec.rows, spec.inner)]
    if None in sizes or spec.shared or spec.outputs < isa.lanes:
        return None
    *known, rows, inner = (int(size) for size in sizes if size is not None)
    if rows < FEWEST_ROWS:
        return None
    return Bf16Matmul(tuple(known), rows, inner, spec.outputs, is_batched)


def make_bf16_matmul(spec: Bf16Matmul, isa: Bf16Isa, name: str = "bf16_batch_matmul") -> PrimFunc:
    """Make PrimFunc(x, w, y), float32, for `call_tir`."""
    plan = plan_bf16_matmul(spec, isa)

    def body() -> None:
        x, w, y = declare_arguments(
            ("x", spec.x.stored, "float32"),
            ("w", spec.w.stored, "float32"),
            ("y", (*spec.batch, spec.rows, spec.outputs), "float32"),
        )
        import_code(isa.code)
        threads = prod(spec.batch) * spec.rows * spec.inner * spec.outputs >= PARALLEL_THRESHOLD
        if spec.x_axes is None:
            image = emit_rounded_image(plan, x)
        else:
            image = emit_rounded_rows(plan, spec.x, x, threads)
        weight, bias = emit_packed_weights(plan, spec.w, w, threads)
        emit_bf16_products(plan, image, Operands(image.data, weight, bias, None, None, y), threads)

    if not spec.is_batched:
        return build_kernel(name, body)
    with repeat_over_batch((0, 1, 2)):
        return build_kernel(name, body)


def plan_bf16_matmul(spec: Bf16Matmul, isa: Bf16Isa) -> Bf16Plan:
    """Choose the plan of a product."""
    if isa.unit is None:
        return choose_bf16_vectors(spec.conv, isa, weights_per_image=True)
    return Bf16TiledPlan(spec.conv, isa, weights_per_image=True, rows=TileRows.MATRIX)


def emit_rounded_rows(plan: Bf16Plan, operand: Permuted, x: Buffer, threads: bool) -> Image:
    """Emit a copy of the rows of all matrices in bfloat16, one after the other."""
    *batch, rows, inner = operand.shape
    copy = alloc_workspace(prod(operand.shape) + COPY_BYTES, BF16_BITS)
    with loop_over((prod(batch), rows), threads) as (n, row):
        source = operand.locate(n) + row * operand.strides[-2]
        for i in range(0, inner, plan.isa.rounded_lanes):
            value = load_vector(x, source + i, plan.isa.rounded_lanes)
            value = plan.isa.round(value, plan.isa.rounded_lanes)
            store_vector(copy, value, (n * rows + row) * inner + i, plan.isa.rounded_lanes)
    return Image(copy, 1, plan.pixel_grid[2])


def emit_packed_weights(
    plan: Bf16Plan, operand: Permuted, w: Buffer, threads: bool
) -> tuple[Buffer, Buffer]:
    """Emit (packed weights, a bias of zeros) of every image in workspaces.

    A word has the weights of `Isa.products` rows of w. What is behind the last row is zero.
    """
    isa, lanes, blocks = plan.isa, plan.isa.lanes, plan.tile.blocks
    products = isa.products
    batch, inner, outputs = plan.spec.batch, plan.spec.in_channels, plan.spec.out_channels
    between_rows, between_columns = operand.strides[-2:]
    weight = alloc_workspace(batch * plan.weight_size, BF16_BITS)
    bias = alloc_workspace(batch * plan.channel_size, "float32")
    with loop_over((batch, plan.panels, blocks), threads) as (n, panel, block):
        number = panel * blocks + block
        store_vector(
            bias,
            constant("float32", 0, lanes),
            n * plan.channel_size + number * lanes,
            lanes,
        )
        channel = T.min(number * lanes, outputs - lanes)
        first = (n * plan.panels + panel) * plan.panel_vectors

        source = operand.locate(n) + channel * between_columns

        def load_row(row: Expr) -> Expr:
            return isa.round(load_vector(w, source + row * between_rows, lanes), lanes)

        def store_word(word: Expr, rows: int) -> None:
            """Store a word with this many rows of w."""
            values = [load_row(word * products + i) for i in range(rows)]
            values += [constant(BF16_BITS, 0, lanes)] * (products - rows)
            order = [T.int32(lane + i * lanes) for lane in range(lanes) for i in range(products)]
            at = (first + plan.number_vector(word, block)) * isa.weight_vector
            store_vector(weight, T.Shuffle(values, order), at, isa.weight_vector)

        def store_columns(part: Expr) -> None:
            """Store `TRANSPOSED` words of pairs, of columns of w that lie in memory as rows do."""
            # TVM would put the value of a name into all that reads it.
            held = alloc_vectors(lanes, lanes, "int32")
            for i, column in enumerate(held):
                at = source + i * between_columns + part * (products * TRANSPOSED)
                halves = [
                    isa.round(load_vector(w, at + k * lanes, lanes), lanes) for k in range(products)
                ]
                joined = T.Shuffle(halves, [T.int32(k) for k in range(products * lanes)])
                store_vector(column, T.reinterpret(f"int32x{lanes}", joined), 0, lanes)
            words = transpose_vectors([load_vector(each, 0, lanes) for each in held], lanes)
            for i, value in enumerate(words):
                number = plan.number_vector(part * TRANSPOSED + i, block)
                at = (first + number) * isa.weight_vector
                value = T.reinterpret(f"{BF16_BITS}x{isa.weight_vector}", value)
                store_vector(weight, value, at, isa.weight_vector)

        whole, rest = divmod(inner, products)
        if between_columns == 1:
            with T.serial(whole) as word:
                store_word(word, products)
        else:
            with T.serial(whole // TRANSPOSED) as part:
                store_columns(part)
        for word in range(whole, plan.words):
            store_word(T.int32(word), rest if word == whole else 0)
    return weight, bias
