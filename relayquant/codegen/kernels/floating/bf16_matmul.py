"""Specification of a product of two computed float matrices -> its kernel with operands of
bfloat16.

    y[b, m, n] = sum_k bf16(x[b, m, k]) * bf16(w[b, k, n])

Both operands are rounded and the second is packed when the kernel runs, then the generator of
`bf16` computes the product as a convolution whose images have weights of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_workspace,
    build_kernel,
    constant,
    declare_arguments,
    import_code,
    load_vector,
    loop_over,
    repeat_over_batch,
    store_vector,
)
from relayquant.codegen.kernels.floating.bf16 import (
    Bf16Plan,
    Bf16TiledPlan,
    choose_bf16_vectors,
    emit_bf16_products,
    emit_rounded_image,
)
from relayquant.codegen.kernels.floating.conv import FloatConv2d
from relayquant.codegen.kernels.floating.curve import Curve
from relayquant.codegen.kernels.floating.gemm import FloatMatmul
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, static
from relayquant.codegen.kernels.integer.operands import Operands
from relayquant.codegen.kernels.integer.tiled_plan import TileRows
from relayquant.codegen.kernels.isa.base import Buffer, Expr
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS

#: Fewer rows do not pay for the packing of the second operand.
FEWEST_ROWS = 8


@dataclass(frozen=True)
class Bf16Matmul:
    """x (*batch, M, K) times w (*batch, K, N), then a curve. With `is_batched` the first extent is
    1, and any number is taken.
    """

    batch: tuple[int, ...]
    rows: int
    inner: int
    outputs: int
    is_batched: bool = False
    curve: Curve | None = None

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
            ("x", (*spec.batch, spec.rows, spec.inner), "float32"),
            ("w", (*spec.batch, spec.inner, spec.outputs), "float32"),
            ("y", (*spec.batch, spec.rows, spec.outputs), "float32"),
        )
        import_code(isa.code)
        threads = prod(spec.batch) * spec.rows * spec.inner * spec.outputs >= PARALLEL_THRESHOLD
        image = emit_rounded_image(plan, x)
        weight, bias = emit_packed_weights(plan, w, threads)
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


def emit_packed_weights(plan: Bf16Plan, w: Buffer, threads: bool) -> tuple[Buffer, Buffer]:
    """Emit (packed weights, a bias of zeros) of every image in workspaces.

    A word has the weights of `Isa.products` rows of w. What is behind the last row is zero.
    """
    isa, lanes, blocks = plan.isa, plan.isa.lanes, plan.tile.blocks
    products = isa.products
    batch, inner, outputs = plan.spec.batch, plan.spec.in_channels, plan.spec.out_channels
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

        def load_row(row: Expr) -> Expr:
            return isa.round(load_vector(w, (n * inner + row) * outputs + channel, lanes), lanes)

        def store_word(word: Expr, rows: int) -> None:
            """Store a word with this many rows of w."""
            values = [load_row(word * products + i) for i in range(rows)]
            values += [constant(BF16_BITS, 0, lanes)] * (products - rows)
            order = [T.int32(lane + i * lanes) for lane in range(lanes) for i in range(products)]
            at = (first + plan.number_vector(word, block)) * isa.weight_vector
            store_vector(weight, T.Shuffle(values, order), at, isa.weight_vector)

        whole, rest = divmod(inner, products)
        with T.serial(whole) as word:
            store_word(word, products)
        for word in range(whole, plan.words):
            store_word(T.int32(word), rest if word == whole else 0)
    return weight, bias
