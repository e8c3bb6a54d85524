"""Context of the float rules, and calls of the kernels of products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from relayquant.codegen.kernels.floating.bf16 import (
    Bf16Conv2d,
    make_bf16_conv2d,
    pack_bf16,
    plan_bf16,
)
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d, make_conv2d_packing
from relayquant.codegen.kernels.floating.convolution.free import (
    FreeFloatConv2d,
    make_free_conv2d,
    make_free_packing,
)
from relayquant.codegen.kernels.floating.convolution.free_depthwise import make_free_depthwise
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.convolution.transposed import make_conv2d_transpose
from relayquant.codegen.kernels.floating.convolution.winograd import make_winograd
from relayquant.codegen.kernels.floating.gemm import make_batch_matmul, make_dense
from relayquant.codegen.kernels.floating.matmul_transposed_b import make_dots
from relayquant.codegen.kernels.floating.stored import Stored
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, FloatIsa, make_copy
from relayquant.codegen.kernels.integer.pool import MaxPool2d, build_max_pool2d
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.lowering.concat import find_columns
from relayquant.codegen.lowering.curve import follow_curve
from relayquant.codegen.lowering.engine import BlockView, Kernel, Lowered, Operand
from relayquant.codegen.lowering.kernel_call import build_for_batch, vector
from relayquant.codegen.lowering.narrow_values import StoringKernel
from relayquant.codegen.tuning.tuner import ChooseFloatSchedule, keep_float_estimate
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain, float_takes, follow_epilogue

#: Kernels take a bias as an array with one number per channel, so the bias has to be constant.
TAKES = float_takes(GenericConst)


def make_max_pool2d(
    spec: MaxPool2d, _isa: FloatIsa, name: str, symbolic: bool = False
) -> tirx.PrimFunc:
    """Make a PrimFunc(x, y) of a pool. With `symbolic`, the batch size is known at run time."""
    return build_for_batch(lambda: build_max_pool2d(spec, name), symbolic, (0, 1))


MAKERS: dict[str, Any] = {
    "float_conv2d": make_conv2d,
    "float_winograd": make_winograd,
    "float_conv2d_packing": make_conv2d_packing,
    "float_conv2d_transpose": make_conv2d_transpose,
    "float_copy": make_copy,
    "float_max_pool2d": make_max_pool2d,
    "float_max_pool2d_of_images": partial(make_max_pool2d, symbolic=True),
    "float_dense": make_dense,
    "float_free_conv2d": make_free_conv2d,
    "float_free_depthwise": make_free_depthwise,
    "float_free_packing": make_free_packing,
    "float_batch_matmul": make_batch_matmul,
    "float_dots": make_dots,
}


@dataclass(frozen=True, eq=False)
class FloatContext:
    """Context of the float rules: a block, the instruction set and symbolic extents."""

    block: BlockView
    isa: FloatIsa
    choose_schedule: ChooseFloatSchedule = keep_float_estimate
    symbols: dict[tirx.Var | str, tirx.Var] = field(default_factory=dict)

    def symbol(self, extent: Any) -> Any:
        """Return a constant extent as an int, or the variable for a symbolic extent.

        Their names differ, as a kernel is known by the text of its specification.
        """
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        key = extent if isinstance(extent, tirx.Var) else str(extent)
        if key not in self.symbols:
            self.symbols[key] = tirx.Var(f"n{len(self.symbols) or ''}", "int64")
        return self.symbols[key]

    def make_kernel(self, kind: str, spec: Any) -> Kernel:
        """Make the kernel `kind` (a name in MAKERS) for `spec`, with symbols known by name."""
        return Kernel(kind, repr(spec), lambda: MAKERS[kind](spec, self.isa, kind))

    @property
    def bf16(self) -> Bf16Isa | None:
        """Instructions of products with operands of bfloat16. None: they stay float32."""
        return self.isa.bf16

    def make_storing_kernel(self, kind: str, spec: Any, fields: Mapping[int, str]) -> Kernel:
        """Make the kernel for a `spec` with a field `stored`."""
        own = self.make_kernel(kind, spec)

        def choose(stored: Stored) -> Kernel:
            return self.make_kernel(kind, replace(spec, stored=stored))

        return StoringKernel(own.name, own.spec, own.build, choose, fields, is_product=False)

    def follow(self, root: relax.Var, channels: int) -> EpilogueChain:
        """Find the operators after a product that its kernel also computes."""
        start = EpilogueChain((root,), root.ty.ndim - 1, channels)
        block = self.block
        return follow_epilogue(block, start, TAKES, is_free=block.is_free)

    def choose_epilogue(self, chain: EpilogueChain) -> tuple[relax.Var | None, FloatEpilogue]:
        """Choose the epilogue of a product, and the concatenation that its kernel writes into."""
        bias, residual = chain.bias is not None, chain.residual is not None
        found = None if residual else find_columns(self.block, chain.last, "relax.concat")
        concat, columns = found or (None, None)
        return concat, FloatEpilogue(bias, residual, chain.low, chain.high, columns)

    def pack_at_run_time(
        self,
        kind: str,
        spec: FloatConv2d | FreeFloatConv2d,
        weight: relax.Expr,
        root: relax.Var,
        size: int,
    ) -> Lowered:
        """Call the kernel that packs weights which are no constant, to `size` elements. They are
        named after the result `root` of the convolution.
        """
        packing = self.make_kernel(kind, replace(spec, epilogue=FloatEpilogue()))
        packed = relax.DataflowVar(f"{root.name}_packed", relax.TensorType([size], "float32"))
        return Lowered((packed,), packing, (weight,))


def call_product(
    chain: EpilogueChain,
    kernel: Kernel,
    data: relax.Expr,
    packed: Operand,
    concat: relax.Var | None,
) -> Lowered:
    """Call the kernel of a product with everything it takes over."""
    operands: list[Operand] = [data, packed]
    if chain.bias is not None:
        operands.append(np.ascontiguousarray(vector(chain.bias, chain.channels)))
    if chain.residual is not None:
        operands.append(chain.residual)
    return Lowered(chain.vars, kernel, tuple(operands), concat=concat)


def call_bf16(
    context: FloatContext,
    chain: EpilogueChain,
    spec: Bf16Conv2d,
    data: relax.Expr,
    weight: np.ndarray,
    concat: relax.Var | None,
) -> Lowered:
    """Call the kernel of a product with operands of bfloat16. `weight` is float32, OHWI or OI.

    The kernel also computes a curve behind the product.
    """
    isa, inside = context.bf16, chain.vars
    assert isa is not None
    if concat is None:
        more, curve = follow_curve(context.block, chain.last)
        inside = *inside, *more
        epilogue = replace(spec.conv.epilogue, curve=curve)
        spec = replace(spec, conv=replace(spec.conv, epilogue=epilogue))
    name, plan = "bf16_conv2d", plan_bf16(spec, isa)

    def choose(stored: Stored) -> Kernel:
        conv = replace(spec.conv, stored=stored)
        chosen, own = replace(spec, conv=conv), plan.with_stored(stored)
        return Kernel(name, repr(chosen), lambda: make_bf16_conv2d(chosen, isa, name, own))

    plain = choose(Stored())
    fields = {0: "data", **({3: "residual"} if chain.residual is not None else {})}
    kernel = StoringKernel(name, plain.spec, plain.build, choose, fields, is_product=True)
    bias = None if chain.bias is None else vector(chain.bias, chain.channels)
    operands: list[Operand] = [data, *pack_bf16(weight, bias, spec, isa, plan)]
    if chain.residual is not None:
        operands.append(chain.residual)
    return Lowered(inside, kernel, tuple(operands), concat=concat)
