"""Operators between convolutions -> calls of integer kernels.

The rules lower quantize, requantize, add, multiply, lookup tables, concatenations and pools.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial, wraps
from math import prod

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.integer.channel_product import build_channel_product, fold_channels
from relayquant.codegen.kernels.integer.elementwise import (
    Add,
    Concatenate,
    CopyColumns,
    Dequantize,
    Multiply,
    Quantize,
    QuantizeImage,
    Requantize,
    ScaleChannels,
    Space,
    broadcast_view,
    build_add,
    build_concatenate,
    build_copy_columns,
    build_dequantize,
    build_multiply,
    build_quantize,
    build_quantize_image,
    build_requantize,
    build_scale_channels,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store
from relayquant.codegen.kernels.integer.lookup import Lookup, build_lookup
from relayquant.codegen.kernels.integer.pool import (
    AvgPool2d,
    MaxPool2d,
    Mean,
    PoolWindow,
    build_avg_pool2d,
    build_max_pool2d,
    build_mean,
    most_values,
)
from relayquant.codegen.lowering.concat import list_missing
from relayquant.codegen.lowering.engine import Lowered
from relayquant.codegen.lowering.integer.epilogue import absorb_clip
from relayquant.codegen.lowering.kernel_call import (
    IntegerRule,
    KernelContext,
    call_built,
    find_known,
    is_activation,
    is_byte,
    is_default_arithmetic,
    multiplier,
    split_batch,
)
from relayquant.ir.dialect import OPERATORS
from relayquant.ir.dialect.accumulator_range import choose_product_dtype
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.rewrite import Graph, Skip
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.expressions import read_number
from relayquant.ir.rewrite.graph import constant_value, free_vars, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import decline, make_rule

#: Up to this many values, the overhead of a kernel call exceeds the work: 0.3 us, as much as 256
#: look-ups one by one. Fused functions do look-ups one by one.
FEW_VALUES = 256
#: Operators that FuseOps fuses with each other, and with the slices between them.
FUSED_OPERATORS = frozenset(
    {"relax.clip", "relax.strided_slice", *(op.full_name for op in OPERATORS if op.is_elementwise)}
)
#: Up to this many channels, data are transposed while they are quantized.
IMAGE_CHANNELS = 4


def scalars(*exprs: relax.Expr) -> list[float] | None:
    """Read the values of constants with one element each. None if any is not such a constant."""
    values = [read_number(expr) for expr in exprs]
    return None if None in values else values  # pyright: ignore[reportReturnType]


def is_fused(graph: Graph, var: relax.Var, taken: Set[relax.Var]) -> bool:
    """Whether FuseOps should fuse an operator with its neighbours instead of a kernel call.

    True for a tensor with few values that another operator of `FUSED_OPERATORS` reads or writes, if
    no kernel has `taken` this operator.
    """
    if not has_few_values(graph, var):
        return False
    neighbours = {*free_vars(graph.values[var]), *graph.users[var]} - taken
    return any(has_few_values(graph, neighbour) for neighbour in neighbours)


def has_few_values(graph: Graph, var: relax.Var) -> bool:
    """Whether one of FUSED_OPERATORS computes `var`, with at most FEW_VALUES values."""
    shape = tensor_shape(var) if graph.op_name(var) in FUSED_OPERATORS else None
    if shape is None or any(isinstance(dim, str) for dim in shape):
        return False
    return prod(int(dim) for dim in shape) <= FEW_VALUES


def lower_quantize(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.quantize with one scale, and a transpose of images after it."""
    call, shape = context.call(var), split_batch(context.call(var).args[0])
    found = read_quantize(context, var)
    if isinstance(found, Skip) or shape is None:
        return found if isinstance(found, Skip) else Skip("an inner extent is symbolic")
    vars_, spec = found
    turned = context.next(vars_[-1], "relax.permute_dims")
    # Not with a symbolic batch: MobileNet became 18 % slower, since its buffers were not planned.
    if turned is not None and not shape[0] and is_image_transpose(context.call(turned), shape[1]):
        image = QuantizeImage(spec)
        build = partial(build_quantize_image, image, context.isa)
        return call_built((*vars_, turned), build, (call.args[0],))
    return call_built(vars_, partial(build_quantize, spec), (call.args[0],), shape[0])


def read_quantize(
    context: KernelContext, var: relax.Var
) -> tuple[tuple[relax.Var, ...], Quantize] | Skip:
    """Read a qnn.quantize with one scale, and a clip after it. Symbolic extents count as 1."""
    call = context.call(var)
    shape, numbers = tensor_shape(call.args[0]), scalars(*call.args[1:3])
    if shape is None or numbers is None or tensor_dtype(call.args[0]) != "float32":
        return Skip("not float32 with one constant scale")
    if str(call.attrs.rounding) != "TONEAREST_EVEN" or tensor_dtype(var) == "int32":
        return Skip("the rounding is not TONEAREST_EVEN, or the result is int32")
    vars_, out = absorb_clip(context, var, numbers[1])
    static = tuple(1 if isinstance(extent, str) else int(extent) for extent in shape)
    return vars_, Quantize(static, numbers[0], out, context.isa.has_fma)


def lower_softmax(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower nn.softmax of float32, with a positive factor before it and a quantize after it.

    The factor and the quantize are part of the kernel only if nothing else reads the values
    between.
    """
    call, factor, vars_ = context.call(var), None, (var,)
    data = call.args[0]
    if context.graph.op_name(var) == "relax.multiply":
        soft, factor = context.next(var, "relax.nn.softmax"), read_number(call.args[1])
        if soft is None or factor is None or not 0 < factor < np.inf:
            return Skip("not a positive number that multiplies the input of one softmax")
        if tensor_shape(data) != tensor_shape(var):
            return Skip("the number has more axes than the tensor it multiplies")
        vars_ = (var, soft)
    shape = tensor_shape(data)
    if not shape or 0 in shape or tensor_dtype(data) != "float32":
        return Skip("not float32 of known rank")
    extents = find_known(shape)
    axis = int(context.call(vars_[-1]).attrs.axis) % len(extents)
    if axis != len(extents) - 1:
        return Skip("not along the last axis")
    spec, codes = Softmax(extents, axis, factor), context.next(vars_[-1], "relax.qnn.quantize")
    found = Skip("") if codes is None or extents[-1] is None else read_quantize(context, codes)
    if not isinstance(found, Skip):
        vars_, spec = (*vars_, *found[0]), replace(spec, quantized=found[1])
    build = partial(make_softmax, spec, isa_lanes=context.isa.lanes)
    return call_built(vars_, build, (data,))


def is_image_transpose(call: Call, shape: tuple[int, ...]) -> bool:
    """Whether a permute_dims turns NCHW into NHWC, and there are only an image's channels."""
    return list_permutation(call) == [0, 2, 3, 1] and shape[1] <= IMAGE_CHANNELS


def lower_dequantize(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.dequantize with one scale."""
    call = context.call(var)
    shape, numbers = split_batch(call.args[0]), scalars(*call.args[1:3])
    if shape is None or numbers is None or tensor_dtype(var) != "float32":
        return Skip("not float32 with one constant scale")
    if tensor_dtype(call.args[0]) == "int64":
        return Skip("64-bit sums")
    spec = Dequantize(shape[1], tensor_dtype(call.args[0]), int(numbers[1]), numbers[0])
    return call_built((var,), partial(build_dequantize, spec), (call.args[0],), shape[0])


def lower_channel_scales(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.dequantize and qnn.requantize with one scale for each index along an axis."""
    op = context.graph.op_name(var)
    call = context.call(var)
    shape, scale = split_batch(call.args[0]), constant_value(call.args[1])
    if shape is None or scale is None or scale.ndim != 1:
        return Skip("symbolic dimensions, or the scales are not constants along one axis")
    axis = int(call.attrs.axis) % var.ty.ndim
    zero_points, dtype = constant_value(call.args[2]), tensor_dtype(call.args[0])
    if zero_points is None or np.ptp(zero_points) or dtype == "int64" or (shape[0] and not axis):
        return Skip("several zero points, int64, or a symbolic axis")
    if op == DEQUANTIZE:
        if tensor_dtype(var) != "float32":
            return Skip(f"the result is {tensor_dtype(var)}")
        if context.graph.users[var]:
            return Skip("the float operators that read it compute it in their loops")
        vars_, out = (var,), Epilogue(Store.DEQUANTIZE, "float32")
        factors = scale.astype("float32")
    else:
        numbers = scalars(*call.args[3:5])
        if numbers is None or not is_default_arithmetic(call) or tensor_dtype(var) == "int32":
            return Skip(
                "the result has several scales or is int32, or the arithmetic is not the default"
            )
        vars_, out = absorb_clip(context, var, numbers[1])
        factors = multiplier(scale, numbers[0])
    spec = ScaleChannels(shape[1], axis, dtype, int(zero_points.flat[0]), out)
    build, operands = partial(build_scale_channels, spec), (call.args[0], factors)
    return call_built(vars_, build, operands, shape[0], batched=(0, 2))


def lower_requantize(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.requantize with one input scale and one output scale."""
    call = context.call(var)
    shape, numbers = split_batch(call.args[0]), scalars(*call.args[1:5])
    if shape is None or numbers is None or not is_default_arithmetic(call):
        return Skip("several scales, or the arithmetic is not the default")
    dtype = tensor_dtype(var)
    if dtype == "int32" or tensor_dtype(call.args[0]) == "int64":
        return Skip(f"{tensor_dtype(call.args[0])} to {dtype}")
    s_in, z_in, s_out, z_out = numbers
    vars_, out = absorb_clip(context, var, z_out)
    data = Space(tensor_dtype(call.args[0]), int(z_in), float(multiplier(s_in, s_out)))
    spec = Requantize(shape[1], data, out)
    return call_built(vars_, partial(build_requantize, spec), (call.args[0],), shape[0])


def lower_binary(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.add, subtract and mul with one scale each. The second operand may be broadcast."""
    op = context.graph.op_name(var)
    call = context.call(var)
    lhs, rhs = call.args[:2]
    numbers = scalars(*call.args[2:8])
    shapes = [split_batch(expr) for expr in (lhs, rhs)]
    if numbers is None or None in shapes or not is_default_arithmetic(call):
        return Skip("several scales, symbolic dimensions, or the arithmetic is not the default")
    dtype = tensor_dtype(var)
    if not is_activation(var) or "int64" in (tensor_dtype(lhs), tensor_dtype(rhs)):
        return Skip(f"the result is {dtype}, or an operand is a 64-bit sum")
    if op == "relax.qnn.mul" and choose_product_dtype(call) != "int32":
        return Skip("products may exceed int32")
    (symbolic, shape), (rhs_symbolic, rhs_shape) = shapes  # pyright: ignore[reportGeneralTypeIssues]
    rhs_constant = constant_value(rhs) is not None
    if constant_value(lhs) is not None or str(lhs.ty.shape) != str(var.ty.shape):
        return Skip("the first operand is broadcast or a constant")
    if symbolic and not rhs_constant and not rhs_symbolic:
        return Skip("the second operand is broadcast over a symbolic batch")
    if broadcast_view(shape, rhs_shape) is None:
        return Skip("the second operand is broadcast along separate axes")
    ls, lz, rs, rz, os, oz = numbers
    vars_, out = absorb_clip(context, var, oz)
    dtypes = tensor_dtype(lhs), tensor_dtype(rhs)
    batched = (0, 1, 2) if rhs_symbolic else (0, 2)
    if op == "relax.qnn.mul":
        factor = float((np.float64(ls) * np.float64(rs) / np.float64(os)).astype("float32"))
        product = Multiply(shape, dtypes[0], int(lz), dtypes[1], int(rz), factor, out, rhs_shape)
        build = partial(build_multiply, product)
        if fold_channels(product, context.isa) is not None:
            build = partial(build_channel_product, product, context.isa)
    else:
        sign = -1.0 if op == "relax.qnn.subtract" else 1.0
        left = Space(dtypes[0], int(lz), float(multiplier(ls, os)))
        right = Space(dtypes[1], int(rz), sign * float(multiplier(rs, os)))
        build = partial(build_add, Add(shape, left, right, out, rhs_shape))
    return call_built(vars_, build, (lhs, rhs), symbolic, batched)


def lower_lookup(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.lookup."""
    call = context.call(var)
    shape = tensor_shape(call.args[0])
    if shape is None or not is_byte(call.args[0]):
        return Skip("an unknown shape, or data that is not 8 bit")
    spec = Lookup(find_known(shape), tensor_dtype(call.args[0]), tensor_dtype(var))
    return call_built((var,), partial(build_lookup, spec, context.shuffle), call.args)


def lower_concatenate(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.concatenate of a literal tuple."""
    call = context.call(var)
    if var in context.block.placed:
        return decline("kernels write all of it")
    if not all(isinstance(arg, relax.Tuple) for arg in call.args[:3]):
        return Skip("the operands are not a literal tuple")
    parts = list(call.args[0].fields)
    shapes = [split_batch(part) for part in parts]
    numbers = scalars(*call.args[1].fields, *call.args[2].fields, *call.args[3:5])
    if None in shapes or numbers is None or not is_default_arithmetic(call):
        return Skip("several scales, symbolic dimensions, or the arithmetic is not the default")
    count, out_scale, out_zero = len(parts), numbers[-2], numbers[-1]
    axis = int(call.attrs.axis) % var.ty.ndim
    symbolic = {shape[0] for shape in shapes if shape is not None}
    if symbolic == {True, False} or (symbolic == {True} and axis == 0):
        return Skip("operands are joined along a symbolic batch")
    vars_, out = absorb_clip(context, var, out_zero)
    data = tuple(
        Space(tensor_dtype(part), int(zero), float(multiplier(scale, out_scale)))
        for part, scale, zero in zip(parts, numbers[:count], numbers[count:-2], strict=True)
    )
    spec = Concatenate(tuple(shape[1] for shape in shapes if shape is not None), axis, data, out)
    return call_built(vars_, partial(build_concatenate, spec), parts, symbolic == {True})


def copy_parts(context: KernelContext, concat: relax.Var) -> Lowered | Skip:
    """Copy those inputs of a concatenation that no kernel writes in place; see `list_missing`."""
    missing, shape = list_missing(context.block, concat), split_batch(concat)
    if isinstance(missing, Skip) or shape is None:
        return missing if isinstance(missing, Skip) else decline("an inner extent is symbolic")
    is_symbolic, (*leading, total) = shape
    operands, columns = zip(*missing, strict=True)
    spec = CopyColumns(tuple(leading), tensor_dtype(concat), columns, total)
    build = partial(build_copy_columns, spec)
    return replace(call_built((concat,), build, operands, is_symbolic), concat=concat)


def make_window(call: Call, shape: tuple[int, ...]) -> PoolWindow:
    """Read the window of a 2-D pool over NHWC data."""
    view = ConvView.of(call).as_2d()
    return PoolWindow(
        *shape, view.window, view.strides, view.padding, view.dilation, bool(call.attrs.ceil_mode)
    )


def reads_nhwc(call: Call) -> bool:
    """Whether data and result of a pool are NHWC."""
    return str(call.attrs.layout) == "NHWC" and str(call.attrs.out_layout) in ("", "NHWC")


def lower_max_pool2d(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower nn.max_pool2d of integer NHWC data."""
    call = context.call(var)
    shape = split_batch(call.args[0])
    if not is_activation(call.args[0]) or not reads_nhwc(call) or shape is None:
        return Skip("not NHWC data of 8 or 16 bits, or not an NHWC result")
    spec = MaxPool2d(make_window(call, shape[1]), tensor_dtype(var))
    build = partial(build_max_pool2d, spec, "qnn_max_pool2d")
    return call_built((var,), build, call.args, shape[0])


def lower_average(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.avg_pool2d of NHWC data, and qnn.mean over neighbouring axes."""
    op = context.graph.op_name(var)
    call = context.call(var)
    shape, numbers = split_batch(call.args[0]), scalars(*call.args[1:5])
    if shape is None or numbers is None or not is_default_arithmetic(call):
        return Skip("several scales, symbolic dimensions, or the arithmetic is not the default")
    if not is_activation(call.args[0]) or not is_activation(var):
        return Skip("not data of 8 or 16 bits")
    s_in, z_in, s_out, z_out = numbers
    vars_, out = absorb_clip(context, var, z_out)
    data = Space(tensor_dtype(call.args[0]), int(z_in), float(multiplier(s_in, s_out)))
    if op == "relax.qnn.mean":
        rank = len(shape[1])
        axes = sorted(int(axis) % rank for axis in call.attrs.axes or range(rank))
        if axes != list(range(axes[0], axes[-1] + 1)) or (shape[0] and axes[0] == 0):
            return Skip("the mean is over separate axes, or over a symbolic batch")
        mean, result = Mean(shape[1], axes[0], axes[-1], data, out), split_batch(var)
        if mean.extents[1] > most_values(data.dtype) or result is None:
            return Skip("the mean is over too many values")
        build = partial(build_mean, mean, "qnn_average", result[1])
        return call_built(vars_, build, (call.args[0],), shape[0])
    if str(call.attrs.layout) != "NHWC":
        return Skip(f"layout {call.attrs.layout}")
    spec = AvgPool2d(make_window(call, shape[1]), data, out, bool(call.attrs.count_include_pad))
    if prod(spec.window.kernel) > most_values(data.dtype):
        return Skip("the window has too many values")
    build = partial(build_avg_pool2d, spec, "qnn_average")
    return call_built(vars_, build, (call.args[0],), shape[0])


def lower_clip(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower a clip that no earlier kernel took, as a requantize with equal parameters."""
    call = context.call(var)
    shape = split_batch(call.args[0])
    if shape is None or not is_activation(var):
        return Skip("symbolic dimensions, or not data of 8 or 16 bits")
    dtype = tensor_dtype(var)
    low, high = (int(arg.value) for arg in call.args[1:3])
    limits = INTEGER_LIMITS[dtype]
    out = Epilogue(Store.REQUANTIZE, dtype, 0, max(low, limits[0]), min(high, limits[1]))
    spec = Requantize(shape[1], Space(dtype, 0, 1.0), out)
    build = partial(build_requantize, spec, "qnn_clip")
    return call_built((var,), build, (call.args[0],), shape[0])


def unless_fused(
    lower: Callable[[KernelContext, relax.Var], Lowered | Skip],
) -> Callable[[KernelContext, relax.Var], Lowered | Skip]:
    """Wrap a rule so that it declines where FuseOps does better; see `is_fused`."""

    @wraps(lower)
    def rewrite(context: KernelContext, var: relax.Var) -> Lowered | Skip:
        if is_fused(context.graph, var, context.block.taken):
            return decline("few values, fused with its neighbours")
        return lower(context, var)

    return rewrite


ELEMENTWISE_RULES: tuple[IntegerRule, ...] = (
    make_rule(lower_softmax, "relax.multiply", "relax.nn.softmax"),
    make_rule(unless_fused(lower_quantize), "relax.qnn.quantize"),
    make_rule(unless_fused(lower_dequantize), "relax.qnn.dequantize"),
    make_rule(unless_fused(lower_requantize), "relax.qnn.requantize"),
    make_rule(unless_fused(lower_channel_scales), "relax.qnn.dequantize", "relax.qnn.requantize"),
    make_rule(unless_fused(lower_binary), "relax.qnn.add", "relax.qnn.subtract", "relax.qnn.mul"),
    make_rule(unless_fused(lower_lookup), "relax.qnn.lookup"),
    make_rule(copy_parts, "relax.qnn.concatenate"),
    make_rule(unless_fused(lower_concatenate), "relax.qnn.concatenate"),
    make_rule(lower_max_pool2d, "relax.nn.max_pool2d"),
    make_rule(unless_fused(lower_average), "relax.qnn.avg_pool2d", "relax.qnn.mean"),
    make_rule(unless_fused(lower_clip), "relax.clip"),
)
