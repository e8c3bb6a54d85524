"""Module -> the same module with convolutions, and operators between them, in the kernels' layout.

Transposes remain only at the inputs and outputs of the model. ConvertLayout does the work, and
`layout_exceptions` corrects it. Operators it cannot see through (pad, reshape of unit axes,
constants) are tidied here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.ir import Call, IRModule
from tvm.relax.dpl import is_op, wildcard

from relayquant.codegen.lowering.floating.convolution import (
    CONV_LAYOUT,
    CONV_TRANSPOSE_LAYOUT,
    SEQUENCE_LAYOUT,
)
from relayquant.codegen.rewrites.known_values import fold_known_values
from relayquant.codegen.rewrites.layout_exceptions import (
    CHANNELS_FIRST,
    RESIZE_LAYOUTS,
    convert_with_exceptions,
    put_channels_first,
    resize_in,
    rewrite_bindings,
)
from relayquant.codegen.rewrites.moved_quantization import MOVED_QUANTIZATION
from relayquant.codegen.rewrites.sunk_transposes import sink_transposes
from relayquant.ir.rewrite import Emitter, Match, Pattern, Rule, Skip, apply_rules
from relayquant.ir.rewrite.casts import canonicalize_bindings
from relayquant.ir.rewrite.expressions import list_bindings, op_name
from relayquant.ir.rewrite.function import is_one_block, list_functions
from relayquant.ir.rewrite.graph import constant_value, free_vars, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import keeps_order, list_permutation
from relayquant.ir.rewrite.walker import tidy_module

#: Layouts of data and weight that the kernels take.
KERNEL_LAYOUTS = {
    "relax.nn.conv1d": list(SEQUENCE_LAYOUT),
    "relax.nn.conv2d": list(CONV_LAYOUT),
    "relax.nn.conv2d_transpose": list(CONV_TRANSPOSE_LAYOUT),
    "relax.qnn.conv1d": list(SEQUENCE_LAYOUT),
    "relax.qnn.conv2d": list(CONV_LAYOUT),
    "relax.qnn.conv2d_transpose": list(CONV_LAYOUT),
}

#: Operators that read only the shape of their operand.
SHAPE_READERS = frozenset(
    f"relax.{name}" for name in ("eye_like", "full_like", "ones_like", "shape_of", "zeros_like")
)


def convert_layout(mod: IRModule) -> IRModule:
    """Convert convolutions to NHWC and OHWI, and the operators between them to NHWC.

    Constants are folded here, before there is any kernel.
    """
    functions = list_functions(mod).values()
    names = {op_name(binding.value) for func in functions for binding in list_bindings(func)}
    if not names.isdisjoint(CHANNELS_FIRST):
        mod = rewrite_bindings(mod, put_channels_first)
    has_conv = not names.isdisjoint(KERNEL_LAYOUTS)
    if has_conv:
        mod = convert_with_exceptions(mod, KERNEL_LAYOUTS)
    mod = relax.transform.Normalize()(mod)
    if has_conv and is_one_block(mod):
        # Most modules hold no other constants to fold.
        mod = apply_rules(mod, [TRANSPOSE_OF_CONSTANT])
    if has_constants(mod):
        mod = fold_known_values(mod)
    mod = canonicalize_bindings(mod)
    if not is_one_block(mod):
        return mod
    return tidy_module(apply_rules(sink_transposes(mod), TRANSPOSE_RULES))


def has_constants(mod: IRModule) -> bool:
    """Whether there may be a value that does not depend on the data."""
    return any(
        not isinstance(func.body, relax.SeqExpr)
        or not all(depends_on_data(binding.value) for binding in list_bindings(func))
        for func in list_functions(mod).values()
    )


def depends_on_data(value: relax.Expr) -> bool:
    """Whether a bound value reads the elements of a variable tensor, or only names other values."""
    if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
        return True
    if not isinstance(value, Call) or op_name(value) in SHAPE_READERS:
        return False
    return any(isinstance(var.ty, relax.TensorType | relax.TupleType) for var in free_vars(value))


def _transpose_of_constant() -> Rule:
    """Fold permute_dims(constant) -> constant."""
    data = wildcard()
    pattern = Pattern(is_op("relax.permute_dims")(data), {"data": data})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        value = constant_value(match.parts["data"])
        if value is None:
            return Skip("the operand is not a constant")
        axes = list_permutation(match.graph.values[match.root])
        permuted = np.ascontiguousarray(value.transpose(axes))
        return relax.const(permuted, tensor_dtype(match.root))

    return Rule("transpose of constant", pattern, rewrite)


def _of_transpose(
    what: str, op: str, repeat: Callable[[Emitter, Match, relax.Expr, list[int]], relax.Expr]
) -> Rule:
    """Rewrite op(permute_dims(x, axes)) -> repeat(emitter, match, x, axes)."""
    inner = is_op("relax.permute_dims")(wildcard())
    pattern = Pattern(is_op(op)(inner, varg_default_wildcard=True), {"inner": inner})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        call = match.graph.call_of(match.parts["inner"])
        if call is None:
            return Skip("the operand is not bound")
        return repeat(emitter, match, emitter.get(call.args[0]), list_permutation(call))

    return Rule(f"{what} of transpose", pattern, rewrite)


def merge_transposes(
    _emitter: Emitter, match: Match, value: relax.Expr, axes: list[int]
) -> relax.Expr:
    """Merge permute_dims(permute_dims(x)) -> permute_dims(x), or x."""
    order = [axes[axis] for axis in list_permutation(match.graph.values[match.root])]
    return value if order == sorted(order) else relax.op.permute_dims(value, order)


def move_pad(emitter: Emitter, match: Match, value: relax.Expr, axes: list[int]) -> relax.Expr:
    """Move pad(permute_dims(x)) -> permute_dims(pad(x)): the transpose may meet its inverse."""
    attrs = match.graph.values[match.root].attrs
    widths = [int(width) for width in attrs.pad_width]
    moved = [0] * len(widths)
    for position, axis in enumerate(axes):
        moved[2 * axis : 2 * axis + 2] = widths[2 * position : 2 * position + 2]
    padded = relax.op.nn.pad(value, moved, str(attrs.pad_mode), attrs.pad_value)
    return relax.op.permute_dims(emitter.emit(padded, f"{match.name}.nhwc"), axes)


def move_clip(emitter: Emitter, match: Match, value: relax.Expr, axes: list[int]) -> relax.Expr:
    """Move clip(permute_dims(x)) -> permute_dims(clip(x)).

    ConvertLayout knows no layout for clip. After a transpose, an integer clip could not be part of
    the kernel before it.
    """
    clipped = relax.op.clip(value, *match.graph.values[match.root].args[1:])
    return relax.op.permute_dims(emitter.emit(clipped, f"{match.name}.nhwc"), axes)


def _transpose_of_resize() -> Rule:
    """Move permute_dims(resize2d(x)) -> resize2d(permute_dims(x)), where x has fewer pixels.

    As behind a network that segments images.
    """
    resized = wildcard()
    pattern = Pattern(is_op("relax.permute_dims")(resized), {"resized": resized})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        call = match.graph.call_of(match.parts["resized"])
        if call is None or op_name(call) != "relax.image.resize2d":
            return Skip("the operand is not resized")
        sizes = [tensor_shape(each) for each in (call.args[0], call)]
        if not all(each and all(isinstance(size, int) for size in each[1:]) for each in sizes):
            return Skip("a size is symbolic")
        if not match.graph.has_one_user(match.parts["resized"]):
            return Skip("the images are read in both layouts")
        before, after = (np.prod(each[1:]) for each in sizes if each)
        axes = list_permutation(match.graph.values[match.root])
        layout = "".join(str(call.attrs.layout)[axis] for axis in axes)
        if before >= after or layout not in RESIZE_LAYOUTS:
            return Skip("there are not more pixels, or no resize has the layout")
        turned = relax.op.permute_dims(emitter.get(call.args[0]), axes)
        return resize_in(layout, emitter.emit(turned, f"{match.name}.turned"), call)

    return Rule("transpose of resize", pattern, rewrite)


def _transpose_of_unit_axes() -> Rule:
    """Replace a permute_dims(x) that moves only axes of size 1 by reshape(x), which is free."""
    data = wildcard()
    pattern = Pattern(is_op("relax.permute_dims")(data), {"data": data})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        shape = tensor_shape(match.parts["data"])
        if shape is None:
            return Skip("the shape is unknown")
        axes = list_permutation(match.graph.values[match.root])
        order = [axis for axis in axes if shape[axis] != 1]
        if order != sorted(order):
            return Skip("axes longer than 1 change places")
        return relax.op.reshape(emitter.get(match.parts["data"]), match.root.ty.shape)

    return Rule("transpose of unit axes", pattern, rewrite)


def _transposes_around_reshape() -> Rule:
    """Replace permute_dims(reshape(permute_dims(x))) by reshape(x) if it has the order of x.

    So do depthwise convolutions between dense layers: rows (N, H * W, C) are turned to NCHW and,
    for the kernel, to NHWC.
    """
    data, shape = wildcard(), wildcard()
    inner = is_op("relax.permute_dims")(data)
    reshaped = is_op("relax.reshape")(inner, shape)
    pattern = Pattern(is_op("relax.permute_dims")(reshaped), {"reshaped": reshaped, "shape": shape})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        call = match.graph.call_of(match.parts["reshaped"])
        inner = None if call is None else match.graph.call_of(call.args[0])
        if call is None or inner is None:
            return Skip("an operand is not bound")
        before, after = tensor_shape(inner.args[0]), tensor_shape(call)
        second = list_permutation(match.graph.values[match.root])
        if before is None or after is None:
            return Skip("a shape is unknown")
        if not keeps_order(before, list_permutation(inner), after, second):
            return Skip("elements change places")
        return relax.op.reshape(emitter.get(inner.args[0]), match.root.ty.shape)

    return Rule("transposes around reshape", pattern, rewrite)


def _reshape_of_reshape() -> Rule:
    """Merge reshape(reshape(x)) -> reshape(x)."""
    data, inner_shape, shape = wildcard(), wildcard(), wildcard()
    inner = is_op("relax.reshape")(data, inner_shape)
    pattern = Pattern(is_op("relax.reshape")(inner, shape), {"inner": inner, "shape": shape})

    def rewrite(emitter: Emitter, match: Match) -> relax.Expr | Skip:
        call = match.graph.call_of(match.parts["inner"])
        if call is None:
            return Skip("the operand is not bound")
        return relax.op.reshape(emitter.get(call.args[0]), match.root.ty.shape)

    return Rule("reshape of reshape", pattern, rewrite)


TRANSPOSE_OF_CONSTANT = _transpose_of_constant()

TRANSPOSE_RULES: tuple[Rule, ...] = (
    TRANSPOSE_OF_CONSTANT,
    _of_transpose("transpose", "relax.permute_dims", merge_transposes),
    _transpose_of_unit_axes(),
    _transposes_around_reshape(),
    _transpose_of_resize(),
    _of_transpose("pad", "relax.nn.pad", move_pad),
    _of_transpose("clip", "relax.clip", move_clip),
    _reshape_of_reshape(),
    *MOVED_QUANTIZATION,
)
