"""Transposes of images before operators on single values -> one transpose behind them.

    add(permute_dims(x), permute_dims(y))              ->  permute_dims(add(x, y))
    multiply(permute_dims(x), constant)                ->  permute_dims(multiply(x, constant'))
    add(permute_dims(x), dequantize(permute_dims(q)))  ->  permute_dims(add(x, dequantize(q)))

A network such as ConvNeXt adds in NCHW what its dense layers and kernels compute in NHWC. Behind a
sum a transpose meets its inverse before the next layer, and `layout` removes both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tvm import IRModule, relax
from tvm.ir import Call

from relayquant.codegen.rewrites.layout_exceptions import TWO_OPERANDS
from relayquant.ir.rewrite import Emitter, Graph
from relayquant.ir.rewrite.expressions import is_float32, op_name, with_operands
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.walker import rewrite_main

#: Axes of the transposes between NCHW and NHWC.
IMAGE_MOVES = ((0, 3, 1, 2), (0, 2, 3, 1))
#: Emits, or finds, a value before its transpose.
EmitBefore = Callable[[Emitter], relax.Expr]


def sink_transposes(mod: IRModule) -> IRModule:
    """Move transposes of images behind operators on two float32 operands, in one walk over main.

    A module in which no such operator reads one is returned as it is.
    """
    graph = Graph(mod)
    calls = {binding.var: graph.call_of(binding.var) for binding in graph.bindings}
    images = {var for var, call in calls.items() if call is not None and is_image_move(call)}
    for var, call in calls.items():
        if op_name(call) in TWO_OPERANDS and is_float32(var) and images.intersection(call.args):
            return rewrite_main(mod, SinkingWalk().visit, tidy=False)
    return mod


def is_image_move(call: Call) -> bool:
    """Whether a call is a transpose between NCHW and NHWC."""
    return op_name(call) == "relax.permute_dims" and tuple(list_permutation(call)) in IMAGE_MOVES


@dataclass(frozen=True, eq=False)
class SinkingWalk:
    """The values seen so far that are transposed images: their axes, and the images."""

    moved: dict[relax.Expr, tuple[tuple[int, ...], EmitBefore]] = field(default_factory=dict)

    def visit(self, emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        """Bind a value, as a transpose if its operands are transposed alike."""
        value, name = emitter.get(binding.value), binding.var.name
        operator = op_name(value)
        if operator in TWO_OPERANDS and is_float32(binding.var):
            found = self.find_operands(value)
            if found is not None:
                axes, operands = found
                inner = with_operands(value, [before(emitter) for before in operands])
                inner = emitter.emit(inner, f"{name}.before")
                bound = emitter.bind(binding.var, relax.op.permute_dims(inner, axes))
                self.moved[bound] = axes, lambda _: inner
                return bound
        bound = emitter.bind(binding.var, value)
        if operator == "relax.permute_dims" and is_image_move(value):
            self.moved[bound] = tuple(list_permutation(value)), lambda _: value.args[0]
        elif operator == "relax.qnn.dequantize" and value.args[0] in self.moved:
            self.note_dequantized(bound, value, name)
        return bound

    def note_dequantized(self, bound: relax.Expr, call: Call, name: str) -> None:
        """Note a dequantize with one scale, which is done once more if a sum needs it."""
        scale, zero = (constant_value(each) for each in call.args[1:3])
        if scale is None or zero is None or scale.size != 1 or zero.size != 1:
            return
        axes, before = self.moved[call.args[0]]

        def dequantize(emitter: Emitter) -> relax.Expr:
            operands = [before(emitter), *call.args[1:]]
            return emitter.emit(with_operands(call, operands), f"{name}.before")

        self.moved[bound] = axes, dequantize

    def find_operands(self, call: Call) -> tuple[tuple[int, ...], list[EmitBefore]] | None:
        """Find the axes by which the operands are transposed, and what they were before.

        None if no operand is transposed, or one is no constant, transposed by others, or broadcast.
        """
        moved = [each for each in call.args if each in self.moved]
        moves = {self.moved[each][0] for each in moved}
        if len(moves) != 1 or len(set(map(tensor_shape, moved))) != 1:
            return None
        (axes,) = moves
        operands: list[EmitBefore] = []
        for each in call.args:
            if each in self.moved:
                operands.append(self.moved[each][1])
                continue
            value = constant_value(each)
            if value is None or value.ndim > len(axes):
                return None
            operands.append(turn_constant(value, axes))
        return axes, operands


def turn_constant(value: np.ndarray, axes: tuple[int, ...]) -> EmitBefore:
    """Return what `permute_dims` by the axes makes a constant of, up to leading axes of size 1."""
    if value.size > 1:
        wide = value.reshape((1,) * (len(axes) - value.ndim) + value.shape)
        value = np.ascontiguousarray(wide.transpose(np.argsort(axes)))
    return lambda _: relax.const(value, str(value.dtype))
