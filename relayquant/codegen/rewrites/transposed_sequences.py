"""Transposed convolutions of sequences -> the same of images of height 1, which have kernels. Runs
before `layout`.

    conv1d_transpose(x, w)    ->    squeeze(conv2d_transpose(expand_dims(x), w'))
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.expressions import is_float32, op_name
from relayquant.ir.rewrite.function import mutate_functions
from relayquant.ir.rewrite.graph import constant_value


def lay_sequences(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the transposed convolutions of sequences in every function of a module."""
    if not any(map(is_sequence, list_calls(mod))):
        return mod
    return mutate_functions(mod, SequenceMutator(mod))


def is_sequence(call: Call) -> bool:
    """Whether a call is a transposed convolution of sequences of float32 with constant weights."""
    if op_name(call) != "relax.nn.conv1d_transpose":
        return False
    view = ConvView.of(call)
    layouts = view.layout, view.kernel_layout, view.out_layout
    is_known = constant_value(call.args[1]) is not None and is_float32(call)
    return is_known and is_float32(call.args[0]) and layouts == ("NCW", "IOW", "NCW")


@relax.expr_functor.mutator
class SequenceMutator(relax.PyExprMutator):
    """Mutator that rewrites them."""

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        if not isinstance(visited, Call) or not is_sequence(visited):
            return visited
        weight, numbers = constant_value(visited.args[1]), ConvView.of(visited).as_2d()
        assert weight is not None
        image = self.builder_.emit(relax.op.expand_dims(visited.args[0], 2))
        rows = relax.op.nn.conv2d_transpose(
            image,
            relax.const(weight[:, :, None], "float32"),
            strides=numbers.strides,
            padding=numbers.padding,
            output_padding=numbers.output_padding,
            dilation=numbers.dilation,
            groups=numbers.groups,
            data_layout="NCHW",
            kernel_layout="IOHW",
        )
        return relax.op.squeeze(self.builder_.emit(rows), [2])
