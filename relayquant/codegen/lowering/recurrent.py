"""lower_recurrent: lstm, gru and rnn, in every function -> calls of kernels.

A layer whose shapes are not known is left for exact legalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.target import Target

from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.recurrent import Recurrence, build_recurrence, pack_recurrence
from relayquant.codegen.lowering.engine import (
    BlockView,
    Kernel,
    KernelRule,
    Lowered,
    lower_functions,
)
from relayquant.codegen.lowering.kernel_call import find_known
from relayquant.ir.dialect.qnn.recurrent import CELLS, is_left_out
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, make_rule


@dataclass(frozen=True, eq=False)
class RecurrentCall:
    """The call of a recurrent layer that a kernel computes.

    Attributes:
        spec: The layer.
        data, weight: Operands.
        constants: Weight and scale of an int8 weight, else None.
        others: The optional operands that are given, by name.
    """

    spec: Recurrence
    data: relax.Expr
    weight: relax.Expr
    constants: tuple[np.ndarray, np.ndarray] | None
    others: Mapping[str, relax.Expr]

    @staticmethod
    def of(call: Call) -> RecurrentCall | Skip:
        """Read a call, or return the reason why there is no kernel."""
        data, weight, scale, *optional = call.args
        shape, sizes, attrs = tensor_shape(data), tensor_shape(weight), call.attrs
        cell = call_name(call).removeprefix("relax.qnn.")
        if shape is None or sizes is None or not isinstance(sizes[0], int):
            return Skip("a shape is not known, or the number of units is symbolic")
        constants = None
        if tensor_dtype(weight) == "int8":
            arrays = constant_value(weight), constant_value(scale)
            if arrays[0] is None or arrays[1] is None:
                return Skip("the integer weight, or its scale, is not constant")
            constants = arrays[0], arrays[1]
        others = {
            name: operand
            for name, operand in zip(CELLS[cell].optional, optional, strict=True)
            if not is_left_out(name, operand)
        }
        for name, operand in others.items():
            if operand.ty.ndim == 0:
                return Skip(f"operand {name!r} is one number for all samples")
        steps, batch = find_known(shape[:2])
        spec = Recurrence(
            cell,
            steps,
            batch,
            sizes[0],
            constants is not None,
            tuple(str(name) for name in attrs.activations),
            float(attrs.clip),
            bool(attrs.is_reversed),
            bool(getattr(attrs, "linear_before_reset", False)),
            bool(getattr(attrs, "input_forget", False)),
            float(getattr(attrs, "cell_clip", 0.0)),
            tuple(others),
        )
        return RecurrentCall(spec, data, weight, constants, others)


@dataclass(frozen=True, eq=False)
class RecurrentBlock:
    """Context of the rules: a block, and the instructions of its kernels."""

    block: BlockView
    isa: Isa


def lower_recurrent(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Replace recurrent layers in every Relax function by kernels for the target.

    Targets other than LLVM CPUs keep the operators.
    """
    if target.kind.name != "llvm":
        return mod
    isa = select_isa(target)
    return lower_functions(
        mod,
        RECURRENT_RULES,
        lambda block: RecurrentBlock(block, isa),
        in_any_block=True,
    )


def lower_layer(context: RecurrentBlock, var: relax.Var) -> Lowered | Skip:
    """Lower a recurrent layer."""
    layer = RecurrentCall.of(context.block.values[var])
    if isinstance(layer, Skip):
        return layer
    spec = layer.spec
    weights = (
        [layer.weight]
        if layer.constants is None
        else pack_recurrence(spec, context.isa, *layer.constants)
    )
    kernel = Kernel(spec.cell, spec, lambda: build_recurrence(spec, context.isa, spec.cell))
    return Lowered((var,), kernel, (layer.data, *weights, *layer.others.values()))


RECURRENT_RULES: tuple[KernelRule[RecurrentBlock], ...] = tuple(
    make_rule(lower_layer, f"relax.qnn.{name}") for name in CELLS
)
