"""lower_grouped: operators on grouped weights, in every function -> calls of kernels.

The constants of each weight are packed once, however many functions and operators read it.
Operators without a kernel are left for exact legalization.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.target import Target

from relayquant.base.packing import middle_code, value_bits
from relayquant.codegen.kernels.grouped.bf16 import GroupedBf16, make_grouped_bf16
from relayquant.codegen.kernels.grouped.experts import build_grouped_experts
from relayquant.codegen.kernels.grouped.plan import (
    LARGEST_SUM,
    GroupedDense,
    GroupedExperts,
    pack_experts,
    pack_grouped,
    plan_grouped,
)
from relayquant.codegen.kernels.grouped.product import (
    FEWEST_TILE_ROWS,
    GroupedTake,
    build_grouped_dense,
    build_grouped_take,
)
from relayquant.codegen.kernels.integer.row_quantize import RowQuantize, build_quantize_rows
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.bf16 import TILES_BF16
from relayquant.codegen.kernels.isa.select import has_bf16_tiles, select_isa
from relayquant.codegen.lowering.engine import (
    BlockView,
    Kernel,
    KernelRule,
    Lowered,
    lower_functions,
)
from relayquant.codegen.lowering.grouped_results import (
    counts_many_rows,
    find_wide_rows,
    follow_product,
    follow_sum,
)
from relayquant.codegen.lowering.kernel_call import find_known
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, make_rule


def lower_grouped(
    mod: tvm.IRModule,
    target: Target,
    keeps_rows: bool = False,
    rounds_floats: bool = False,
) -> tvm.IRModule:
    """Replace operators on grouped weights in every Relax function by kernels for the target.

    Targets other than LLVM CPUs keep the operators. `keeps_rows`: no function may round rows to
    bfloat16 instead of 8 bits. `rounds_floats`: many float rows are rounded to bfloat16, if the
    target has tiles for it.
    """
    if target.kind.name != "llvm":
        return mod
    is_float = "relax.qnn.quantize_rows" not in {call_name(call) for call in list_calls(mod)}
    isa = select_isa(target)
    has_tiles = has_bf16_tiles(target)
    rounding = RoundsToBf16(has_tiles and not keeps_rows, has_tiles and rounds_floats)

    def make_context(block: BlockView) -> GroupedBlock:
        return GroupedBlock(block, isa, is_float, rounding)

    return lower_functions(mod, GROUPED_RULES, make_context, in_any_block=True)


@dataclass(frozen=True)
class RoundsToBf16:
    """Whether many rows are rounded to bfloat16: rows of 8 bits, where the function lets them, and
    float rows.
    """

    integers: bool
    floats: bool


@dataclass(frozen=True, eq=False)
class GroupedBlock:
    """Context of the rules for grouped weights.

    `is_float`: whether the rows of the module are float. A grouped table without a product then has
    float rows too.
    """

    block: BlockView
    isa: Isa
    is_float: bool
    rounding: RoundsToBf16

    def pack(
        self, spec: GroupedDense | GroupedExperts, weight: list[Any]
    ) -> tuple[relax.Expr, ...]:
        """Pack the constants of a weight for kernels, once for all readers."""

        def make() -> list[np.ndarray]:
            arrays = [expr.value.numpy() for expr in weight]
            if isinstance(spec, GroupedExperts):
                return pack_experts(spec, self.isa, *arrays).arrays
            return pack_grouped(spec, self.isa, *arrays).arrays

        key = spec.weight, *(expr.value.data_ptr() for expr in weight)
        return self.block.table.pack(key, make)


def lower_rows(context: GroupedBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.quantize_rows of rows of known length."""
    data = context.block.values[var].args[0]
    shape = tensor_shape(data)
    if shape is None or isinstance(shape[-1], str):
        return Skip("the length of a row is symbolic")
    spec = RowQuantize(find_known(shape[:-1]), int(shape[-1]))
    return Lowered(
        (var,), Kernel("quantize_rows", spec, lambda: build_quantize_rows(spec)), (data,)
    )


def lower_dense(context: GroupedBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.grouped_dense with constant weights."""
    call = context.block.values[var]
    data, data_scale, *weight = call.args
    spec = read_product(call, data, data_scale, weight)
    if isinstance(spec, Skip):
        return spec
    wide = find_rounded_rows(context, data, data_scale)
    if wide is not None:
        can_gate = spec.units % (2 * TILES_BF16.lanes) == 0
        found = follow_sum(context.block, follow_product(context.block, var, spec, can_gate))
        rounded = GroupedBf16(found.spec, bool(found.residual))
        kernel = Kernel("grouped_bf16", rounded, lambda: make_grouped_bf16(rounded, context.isa))
        operands = (wide, *context.pack(spec, weight), *found.residual)
        return Lowered(found.vars, kernel, operands)
    can_gate = plan_grouped(spec, context.isa).can_gate
    found = follow_product(context.block, var, spec, can_gate)
    kernel = Kernel(
        "grouped_dense", found.spec, lambda: build_grouped_dense(found.spec, context.isa)
    )
    rows = (data,) if spec.is_float else (data, data_scale)
    return Lowered(found.vars, kernel, (*rows, *context.pack(spec, weight)))


def lower_experts(context: GroupedBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.grouped_expert_dense with constant weights."""
    call = context.block.values[var]
    data, data_scale, chosen, *weight = call.args
    product, choices = read_product(call, data, data_scale, weight), tensor_shape(chosen)
    if isinstance(product, Skip):
        return product
    if choices is None or isinstance(choices[-1], str) or product.leading[-1] is None:
        return Skip("the number of choices is not known")
    count = int(call.attrs.experts)
    product = replace(product, units=product.units // count)
    spec = GroupedExperts(product, count, int(choices[-1]), tensor_dtype(chosen))
    kernel = Kernel("grouped_experts", spec, lambda: build_grouped_experts(spec, context.isa))
    rows = (data,) if product.is_float else (data, data_scale)
    return Lowered((var,), kernel, (*rows, chosen, *context.pack(spec, weight)))


def read_product(
    call: Call, data: relax.Expr, data_scale: relax.Expr, weight: list[Any]
) -> GroupedDense | Skip:
    """Read the product of rows with a constant weight."""
    shape, is_float = tensor_shape(data), tensor_dtype(data) == "float32"
    spec = read_weight(call, weight, is_float)
    if isinstance(spec, Skip) or shape is None:
        return spec if isinstance(spec, Skip) else Skip("the shape of the data is not known")
    if not is_float and spec.largest_sum > LARGEST_SUM:
        return Skip("the sums of a group may exceed int32")
    if not is_float and data_scale.ty.ndim == 0:
        return Skip("one scale for all rows")
    scales = tensor_shape(data_scale)
    if scales is None:
        return Skip("the shape of the scales of the data is not known")
    has_group_scales = not is_float and scales[-1] != 1
    return replace(spec, leading=find_known(shape[:-1]), group_scales=has_group_scales)


def find_rounded_rows(
    context: GroupedBlock, data: relax.Expr, data_scale: relax.Expr
) -> relax.Expr | None:
    """Find the float rows of a product that are rounded to bfloat16. None if none are.

    Integer rows keep their bits unless the function names an extent that counts many rows
    (`BF16_ROWS_ATTR`). Float rows are rounded where a module asks for it, if they are many.
    """
    if tensor_dtype(data) != "float32":
        is_wide = context.rounding.integers
        return find_wide_rows(context.block, data, data_scale) if is_wide else None
    leading = (tensor_shape(data) or ())[:-1]
    is_many = counts_many_rows(context.block, leading)
    if leading and not any(isinstance(extent, str) for extent in leading):
        is_many = prod(map(int, leading)) >= FEWEST_TILE_ROWS
    return data if is_many and context.rounding.floats else None


def lower_take(context: GroupedBlock, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.grouped_take of constants."""
    call = context.block.values[var]
    indices, *weight = call.args
    shape = tensor_shape(indices)
    dense = read_weight(call, weight, context.is_float)
    if isinstance(dense, Skip) or shape is None:
        return dense if isinstance(dense, Skip) else Skip("the shape of indices is not known")
    spec = GroupedTake(find_known(shape), tensor_dtype(indices), dense)
    kernel = Kernel("grouped_take", spec, lambda: build_grouped_take(spec, context.isa))
    return Lowered((var,), kernel, (indices, *context.pack(dense, weight)))


def read_weight(call: Call, weight: list[Any], is_float: bool) -> GroupedDense | Skip:
    """Read the storage format of a constant weight."""
    arrays = [constant_value(expr) for expr in weight]
    codes, scale, zeros = arrays
    if codes is None or scale is None or zeros is None:
        return Skip("the weight is not a constant")
    attrs, levels = call.attrs, tuple(int(level) for level in call.attrs.levels)
    if not zeros.ndim and int(zeros) != middle_code(value_bits(int(attrs.bits), levels)):
        return Skip("all groups have one zero point, which is not the middle of the range")
    features = int(attrs.features)
    return GroupedDense(
        (),
        int(codes.shape[0]),
        features,
        int(attrs.bits),
        min(int(attrs.group_size), features),
        is_float,
        str(zeros.dtype) if zeros.ndim else "",
        str(np.dtype(scale.dtype)),
        levels=levels,
    )


GROUPED_RULES: tuple[KernelRule[GroupedBlock], ...] = (
    make_rule(lower_rows, "relax.qnn.quantize_rows"),
    make_rule(lower_dense, "relax.qnn.grouped_dense"),
    make_rule(lower_experts, "relax.qnn.grouped_expert_dense"),
    make_rule(lower_take, "relax.qnn.grouped_take"),
)
