"""lower_grouped: operators on grouped weights, in every function -> calls of kernels.

The constants are packed once for each weight, whichever functions and operators read it. What no
kernel takes is left for exact legalization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.target import Target

from relayquant.codegen.floating import mark_kernel
from relayquant.codegen.kernels.integer.grouped import (
    LARGEST_SUM,
    GroupedDense,
    GroupedTake,
    build_grouped_dense,
    build_grouped_take,
    pack_grouped,
)
from relayquant.codegen.kernels.integer.row_quantize import RowQuantize, build_quantize_rows
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import (
    OnSkip,
    Rule,
    Skip,
    fire_first,
    log_skip,
    make_rule,
    select_rules,
)


def lower_grouped(mod: tvm.IRModule, target: Target, on_skip: OnSkip = log_skip) -> tvm.IRModule:
    """Replace operators on grouped weights of every Relax function by kernels for the target.

    Targets that are no LLVM CPUs keep theirs; `on_skip` hears of each that no kernel takes.
    """
    calls = [
        binding.value
        for func in mod.functions.values()
        for binding in iterate_bindings(func)
        if isinstance(binding.value, Call)
    ]
    names = {call_name(call) for call in calls}
    has_rule = any(select_rules(GROUPED_RULES, name) for name in names)
    if target.kind.name != "llvm" or not has_rule:
        return mod
    is_float = "relax.qnn.quantize_rows" not in names
    lowering = GroupedLowering(mod, select_isa(target), is_float, on_skip)
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function):
            lowering.builder_.update_func(gvar, lowering.visit_expr(func))
    return lowering.builder_.get()


@relax.expr_functor.mutator
class GroupedLowering(relax.PyExprMutator):
    """Rewrites the functions of one module; kernels and packed constants are made once.

    `is_float`: whether rows of the module are float, which tables without a product follow.
    """

    def __init__(self, mod: tvm.IRModule, isa: Isa, is_float: bool, on_skip: OnSkip) -> None:
        super().__init__(mod)
        self.isa, self.is_float, self.on_skip = isa, is_float, on_skip
        self.kernels: dict[Any, tvm.ir.GlobalVar] = {}
        self.packed: dict[Any, list[relax.Expr]] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        tried: list[tuple[Rule[Any, Any, Any], Any]] = []
        if isinstance(value, Call):
            call = Call(value.op, [*map(self.visit_expr, value.args)], value.attrs, value.ty_args)
            call = self.builder_.normalize(call)
            tried = [(rule, call) for rule in select_rules(GROUPED_RULES, call_name(call))]
        found = fire_first(tried, self, binding.var.name, self.on_skip)
        if found is None:
            super().visit_var_binding_(binding)
            return
        lowered = self.builder_.normalize(found[1])
        self.builder_.emit_normalized(relax.VarBinding(binding.var, lowered))

    def call_kernel(
        self, spec: Any, build: Callable[[], Any], operands: list[Any], call: Call
    ) -> Call:
        """call_tir of the kernel of `spec`, which is built unless it was."""
        if spec not in self.kernels:
            func = build()
            name = str(func.attrs["global_symbol"])
            marked = mark_kernel(func, count_macs(call))
            self.kernels[spec] = self.builder_.add_func(marked, name)
        ty: Any = call.ty
        outputs = list(ty.fields) if isinstance(ty, tvm.ir.TupleType) else ty
        return relax.call_tir(self.kernels[spec], relax.Tuple(operands), outputs)

    def pack(self, spec: GroupedDense, operands: list[Any]) -> list[relax.Expr]:
        """The constants of a weight as kernels read them."""
        alike = replace(spec, leading=())
        key = (alike, *(expr.value.data_ptr() for expr in operands))
        if key not in self.packed:
            arrays = [expr.value.numpy() for expr in operands]
            packed = pack_grouped(spec, self.isa, *arrays)
            kept = [packed.codes, packed.scale, *([packed.zeros] if spec.has_zeros else [])]
            self.packed[key] = [relax.const(array) for array in kept]
        return self.packed[key]


def lower_rows(lowering: GroupedLowering, call: Call) -> Call | Skip:
    """qnn.quantize_rows of rows of known length."""
    shape = tensor_shape(call.args[0])
    if shape is None or isinstance(shape[-1], str):
        return Skip("the length of a row is symbolic")
    spec = RowQuantize(read_leading(shape[:-1]), int(shape[-1]))
    return lowering.call_kernel(spec, lambda: build_quantize_rows(spec), [call.args[0]], call)


def lower_dense(lowering: GroupedLowering, call: Call) -> Call | Skip:
    """qnn.grouped_dense by constants."""
    data, data_scale, *weight = call.args
    shape, is_float = tensor_shape(data), tensor_dtype(data) == "float32"
    spec = read_weight(call, weight, is_float)
    if isinstance(spec, Skip) or shape is None:
        return spec if isinstance(spec, Skip) else Skip("the shape of the data is not known")
    if not is_float and spec.largest_sum > LARGEST_SUM:
        return Skip("sums of a group may not fit int32")
    if not is_float and data_scale.ty.ndim == 0:
        return Skip("one scale for all rows")
    spec = replace(spec, leading=read_leading(shape[:-1]))
    operands = [data] if is_float else [data, data_scale]
    operands += lowering.pack(spec, weight)
    return lowering.call_kernel(
        spec, lambda: build_grouped_dense(spec, lowering.isa), operands, call
    )


def lower_take(lowering: GroupedLowering, call: Call) -> Call | Skip:
    """qnn.grouped_take of constants."""
    indices, *weight = call.args
    shape = tensor_shape(indices)
    dense = read_weight(call, weight, lowering.is_float)
    if isinstance(dense, Skip) or shape is None:
        return dense if isinstance(dense, Skip) else Skip("the shape of indices is not known")
    spec = GroupedTake(read_leading(shape), tensor_dtype(indices), dense)
    operands = [indices, *lowering.pack(dense, weight)]
    return lowering.call_kernel(
        spec, lambda: build_grouped_take(spec, lowering.isa), operands, call
    )


def read_weight(call: Call, weight: list[Any], is_float: bool) -> GroupedDense | Skip:
    """How a constant weight is held."""
    arrays = [constant_value(expr) for expr in weight]
    codes, scale, zeros = arrays
    if codes is None or scale is None or zeros is None:
        return Skip("the weight is no constant")
    attrs = call.attrs
    has_zeros = zeros.ndim > 0
    if not has_zeros and int(zeros) != 1 << (int(attrs.bits) - 1):
        return Skip("one zero point for all groups that is not the middle")
    features = int(attrs.features)
    return GroupedDense(
        (),
        int(codes.shape[0]),
        features,
        int(attrs.bits),
        min(int(attrs.group_size), features),
        is_float,
        has_zeros,
        str(np.dtype(scale.dtype)),
    )


def read_leading(shape: tuple[int | str, ...]) -> tuple[int | None, ...]:
    """Extents as kernels take them: None where known at run time."""
    return tuple(None if isinstance(extent, str) else extent for extent in shape)


GROUPED_RULES: tuple[Rule[Any, Any, Call], ...] = (
    make_rule(lower_rows, "relax.qnn.quantize_rows"),
    make_rule(lower_dense, "relax.qnn.grouped_dense"),
    make_rule(lower_take, "relax.qnn.grouped_take"),
)
