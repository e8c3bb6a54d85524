"""lower_recurrent: lstm, gru and rnn, in every function -> calls of kernels.

A layer whose shapes are not known is left for exact legalization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.recurrent import Recurrence, build_recurrence, pack_recurrence
from relayquant.codegen.lowering import BlockView, Kernel, KernelRule, Lowered, lower_functions
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.dialect.qnn.recurrent import CELLS, is_left_out
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import OnSkip, Skip, log_skip, make_rule, select_rules


@dataclass(frozen=True, eq=False)
class RecurrentBlock:
    """Context of the rules: a block, and the instructions of its kernels."""

    block: BlockView
    isa: Isa


def lower_recurrent(mod: tvm.IRModule, target: Target, on_skip: OnSkip = log_skip) -> tvm.IRModule:
    """Replace recurrent layers in every Relax function by kernels for the target.

    Targets other than LLVM CPUs keep the operators. `on_skip` gets the reason for each operator
    without a kernel.
    """
    names = {
        call_name(binding.value)
        for func in mod.functions.values()
        for binding in iterate_bindings(func)
        if isinstance(binding.value, tvm.ir.Call)
    }
    if target.kind.name != "llvm" or not any(select_rules(RECURRENT_RULES, n) for n in names):
        return mod
    isa = select_isa(target)
    return lower_functions(
        mod,
        RECURRENT_RULES,
        lambda block: RecurrentBlock(block, isa),
        on_skip=on_skip,
        in_any_block=True,
    )


def lower_layer(context: RecurrentBlock, var: relax.Var) -> Lowered | Skip:
    """Lower a recurrent layer."""
    call = context.block.values[var]
    data, weight, scale, *others = call.args
    shape, sizes, attrs = tensor_shape(data), tensor_shape(weight), call.attrs
    cell = call_name(call).removeprefix("relax.qnn.")
    is_integer = tensor_dtype(weight) == "int8"
    if shape is None or sizes is None or not isinstance(sizes[0], int):
        return Skip("a shape is not known, or the number of units is symbolic")
    constants = [constant_value(weight), constant_value(scale)]
    if is_integer and any(array is None for array in constants):
        return Skip("the integer weight, or its scale, is not constant")
    given, operands = [], []
    for name, operand in zip(CELLS[cell].optional, others, strict=True):
        if is_left_out(name, operand):
            continue
        if operand.ty.ndim == 0:
            return Skip(f"operand {name!r} is one number for all samples")
        given.append(name)
        operands.append(operand)
    steps, batch = (size if isinstance(size, int) else None for size in shape[:2])
    spec = Recurrence(
        cell,
        steps,
        batch,
        sizes[0],
        is_integer,
        tuple(str(name) for name in attrs.activations),
        float(attrs.clip),
        bool(attrs.is_reversed),
        bool(getattr(attrs, "linear_before_reset", False)),
        bool(getattr(attrs, "input_forget", False)),
        float(getattr(attrs, "cell_clip", 0.0)),
        tuple(given),
    )
    weights: Sequence[relax.Expr | np.ndarray] = [weight]
    if is_integer:
        weights = pack_recurrence(spec, context.isa, *constants)  # pyright: ignore[reportArgumentType]
    kernel = Kernel(cell, spec, lambda: build_recurrence(spec, context.isa, cell))
    return Lowered((var,), kernel, (data, *weights, *operands))


RECURRENT_RULES: tuple[KernelRule[RecurrentBlock], ...] = tuple(
    make_rule(lower_layer, f"relax.qnn.{name}") for name in CELLS
)
