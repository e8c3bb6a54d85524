"""Convolutions and matrix products -> calls of integer kernels with epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.integer.convolution.free import FreeConv2d, build_free_conv2d
from relayquant.codegen.kernels.integer.convolution.joined_pixels import (
    count_joined_blocks,
    count_joined_pixels,
    join_block_constants,
    join_blocks,
    join_constants,
    join_pixels,
)
from relayquant.codegen.kernels.integer.convolution.pooled import PooledConv2d, plan_pooled
from relayquant.codegen.kernels.integer.convolution.transposed import Conv2dTranspose
from relayquant.codegen.kernels.integer.convolution.winograd import can_winograd
from relayquant.codegen.kernels.integer.depthwise.free import FreeDepthwise, build_free_depthwise
from relayquant.codegen.kernels.integer.dynamic_matmul import DynamicMatmul, build_dynamic_matmul
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, build_batch_matmul
from relayquant.codegen.kernels.integer.product import DIRECT, choose_product
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense, PackedWeights
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.windows import ConvWindows
from relayquant.codegen.lowering.concat import find_columns
from relayquant.codegen.lowering.engine import Lowered
from relayquant.codegen.lowering.integer.curve import follow_quantized_curve
from relayquant.codegen.lowering.integer.elementwise import make_window, reads_nhwc
from relayquant.codegen.lowering.integer.epilogue import (
    LONE_TAKES,
    PLAIN_TAKES,
    UNBIASED_TAKES,
    IntegerEpilogueChain,
    follow_product,
)
from relayquant.codegen.lowering.joined_slices import read_joined_slices
from relayquant.codegen.lowering.kernel_call import (
    IntegerRule,
    KernelContext,
    call_built,
    find_known,
    is_activation,
    is_byte,
    split_batch,
    split_rows,
)
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.expressions import read_number
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import make_rule


@dataclass(frozen=True, eq=False)
class Linear:
    """Operands of a convolution or dense layer for kernels: constant int8 weights."""

    call: Call
    weight: np.ndarray
    zero_point: int
    is_symbolic: bool  #: whether the batch (dense: the number of rows) is known only at run time
    shape: tuple[int, ...]  #: 1 for dimensions known only at run time

    @property
    def data(self) -> relax.Expr:
        """The operand that is not constant."""
        return self.call.args[0]

    @property
    def dtype(self) -> str:
        """Dtype of the data: uint8, int8 or int16."""
        return tensor_dtype(self.data)


def read_linear(
    context: KernelContext,
    var: relax.Var,
    layouts: tuple[tuple[str, str], ...] = (),
    split: Callable[[relax.Expr], tuple[bool, tuple[int, ...]] | None] = split_batch,
) -> Linear | Skip:
    """Read the operands of a linear operator in one of the (data, weight) layouts.

    () allows any layout.

    `split` tells which dimensions may be symbolic.
    """
    call = context.call(var)
    if layouts:
        layout = (str(call.attrs.data_layout), str(call.attrs.kernel_layout))
        if layout not in layouts:
            return Skip(f"layout {'/'.join(layout)}")
    weight, kernel_zero = constant_value(call.args[1]), constant_value(call.args[3])
    zero_point, shape = read_number(call.args[2]), split(call.args[0])
    if weight is None or weight.dtype != np.int8:
        return Skip("the weight is not an int8 constant")
    if zero_point is None or kernel_zero is None or kernel_zero.any():
        return Skip("a zero point is a variable, or the weight zero point is not 0")
    if not is_activation(call.args[0]):
        return Skip(f"the data is {tensor_dtype(call.args[0])}")
    if tensor_dtype(var) != "int32":
        return Skip(f"the sums are {tensor_dtype(var)}")
    if shape is None:
        return Skip("a dimension that the kernel needs is symbolic")
    return Linear(call, weight, int(zero_point), *shape)


def make_call(
    linear: Linear,
    data: relax.Expr,
    chain: IntegerEpilogueChain,
    packed: PackedWeights,
    build: Callable[[], PrimFunc],
) -> Lowered:
    """Make the kernel call of a linear operator: data, packed constants, residual."""
    operands = (data, *packed.operands(), *chain.residuals)
    # The data, the residual and the result have a batch; constants have none.
    batched = [0, *range(len(operands) - len(chain.residuals), len(operands) + 1)]
    return call_built(chain.vars, build, operands, linear.is_symbolic, batched)


def lower_conv2d(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.conv2d in NHWC with constant OHWI weights.

    Also qnn.conv1d in NWC with constant OWI weights, as a convolution of height 1.
    """
    linear = read_linear(context, var, (("NHWC", "OHWI"), ("NWC", "OWI")))
    if isinstance(linear, Skip):
        return linear
    view = ConvView.of(linear.call).as_2d()
    weight, shape, name = linear.weight, linear.shape, "qnn_conv2d"
    if len(shape) == 3:
        name, shape, weight = "qnn_conv1d", (shape[0], 1, *shape[1:]), weight[:, None]
    batch, height, width, channels = shape
    outputs, *taps, _ = weight.shape
    chain = follow_product(context, var, outputs)
    if view.groups == 1:
        chain = follow_quantized_curve(context, chain)
    data, joined = linear.data, None
    if view.groups == channels == outputs > 1 and not linear.is_symbolic:
        data, joined = read_joined_slices(context.graph.call_of, data)
    spec = Conv2d(
        batch=batch,
        height=height,
        width=width,
        in_channels=channels,
        out_channels=outputs,
        kernel=(taps[0], taps[1]),
        strides=view.strides,
        padding=view.padding,
        dilation=view.dilation,
        groups=view.groups,
        in_dtype=linear.dtype,
        in_zero_point=linear.zero_point,
        epilogue=chain.epilogue,
        joined=joined,
    )
    isa = context.isa.for_weights(weight)
    has_curve = chain.epilogue.curve is not None
    may_transform = not has_curve and can_winograd(spec, isa, weight, chain.offsets)
    schedule = context.choose_schedule(spec, isa, may_transform)
    pool = None
    if not (schedule.transforms or has_curve):
        pool = find_pool(context, chain, spec, isa)
    if pool is not None:
        var, pooled = pool
        product, chain = choose_product(pooled, isa), replace(chain, vars=(*chain.vars, var))
        packed = product.pack(Constants(weight, chain.offsets, chain.multiplier))
        return make_call(linear, data, chain, packed, partial(product.build, f"{name}_max_pool2d"))
    concat = None
    if not (spec.is_depthwise or chain.residuals):
        found = find_columns(context.block, chain.last, "relax.qnn.concatenate")
        concat, columns = found or (None, None)
        spec = replace(spec, columns=columns)
    constants = Constants(weight, chain.offsets, chain.multiplier)
    count = 1 if schedule.transforms else count_joined_pixels(spec, isa)
    whole = join_pixels(spec, count)
    if count > 1:
        schedule = context.choose_schedule(whole, isa, False)
    product = choose_product(whole, isa, schedule)
    packed = product.pack(join_constants(spec, count, constants))
    sizes = (batch, *spec.out_size, spec.result_channels)
    out_shape = sizes if len(linear.shape) == 4 else (batch, *sizes[2:])
    in_shape = linear.shape if joined is None else spec.stored_shape
    call = make_call(linear, data, chain, packed, partial(product.build, name, in_shape, out_shape))
    return replace(call, concat=concat)


def lower_free_conv2d(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.conv2d in NHWC over images of free height or width, or qnn.conv1d in NWC over
    sequences of free length: depthwise, or of all channels.

    A convolution with one tap is a dense layer.
    """
    linear = read_linear(context, var, (("NHWC", "OHWI"), ("NWC", "OWI")), split_rows)
    if isinstance(linear, Skip):
        return linear
    view, channels = ConvView.of(linear.call).as_2d(), linear.shape[-1]
    is_sequence, name = len(linear.shape) == 3, "qnn_conv2d"
    outputs, *taps, _ = linear.weight.shape
    if is_sequence:
        taps, name = [1, *taps], "qnn_conv1d"
    windows = ConvWindows(
        channels,
        (taps[0], taps[1]),
        view.strides,
        view.padding,
        view.dilation,
        linear.dtype,
        linear.zero_point,
        is_sequence=is_sequence,
    )
    if view.groups == channels == outputs > 1 and is_byte(linear.data):
        chain = follow_product(context, var, channels, takes=LONE_TAKES)
        depthwise = FreeDepthwise(windows, chain.epilogue)
        packed = depthwise.pack(Constants(linear.weight, chain.offsets, chain.multiplier))
        build = partial(build_free_depthwise, depthwise, context.isa.lanes, name)
        return call_built(chain.vars, build, (linear.data, *packed))
    if view.groups > 1:
        return Skip("the images have a free size, and the channels are in groups")
    chain = follow_product(context, var, outputs)
    spec = Dense(1, windows.row, outputs, linear.dtype, linear.zero_point, chain.epilogue)
    isa, matrix = context.isa.for_weights(linear.weight), linear.weight.reshape(outputs, -1)
    product = choose_product(spec, isa, any_rows=True)
    packed = product.pack(Constants(matrix, chain.offsets, chain.multiplier))
    if windows.is_pixel:
        build = partial(product.build, name, windows.places)
    else:
        build = partial(build_free_conv2d, FreeConv2d(windows, spec), isa, name)
    operands = (linear.data, *packed.arguments(), *chain.residuals)
    return call_built(chain.vars, build, operands)


def find_pool(
    context: KernelContext, chain: IntegerEpilogueChain, spec: Conv2d, isa: Isa
) -> tuple[relax.Var, PooledConv2d] | None:
    """Find the maximum pool that is the only reader of a convolution, if one kernel does both."""
    pool = context.next(chain.vars[-1], "relax.nn.max_pool2d")
    if not isa.timing.counts_threads or pool is None or not reads_nhwc(context.call(pool)):
        return None
    if chain.multiplier is None or (chain.multiplier < 0).any():
        return None
    pooled = PooledConv2d(spec, make_window(context.call(pool), spec.out_shape))
    return None if plan_pooled(pooled, isa) is None else (pool, pooled)


def lower_conv2d_transpose(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.conv2d_transpose in NHWC with constant weights."""
    layouts = tuple(("NHWC", kernel) for kernel in ("OHWI", "IHWO", "IOHW", "HWIO", "HWOI"))
    linear = read_linear(context, var, layouts)
    if isinstance(linear, Skip):
        return linear
    view = ConvView.of(linear.call)
    numbers = view.as_2d()
    weight = order_transposed_weight(linear.weight, view.kernel_layout, view.groups)
    chain = follow_product(context, var, weight.shape[0])
    batch, height, width, channels = linear.shape
    spec = Conv2dTranspose(
        batch=batch,
        height=height,
        width=width,
        in_channels=channels,
        out_channels=weight.shape[0],
        kernel=(weight.shape[1], weight.shape[2]),
        strides=numbers.strides,
        padding=numbers.padding,
        output_padding=numbers.output_padding,
        dilation=numbers.dilation,
        groups=numbers.groups,
        in_dtype=linear.dtype,
        in_zero_point=linear.zero_point,
        epilogue=chain.epilogue,
    )
    isa, constants = (
        context.isa.for_weights(weight),
        Constants(weight, chain.offsets, chain.multiplier),
    )
    count = count_joined_blocks(spec, isa)
    product = choose_product(join_blocks(spec, count), isa)
    packed = product.pack(join_block_constants(spec, count, constants))
    build = partial(product.build, "qnn_conv2d_transpose", spec.in_shape, spec.out_shape)
    return make_call(linear, linear.data, chain, packed, build)


def order_transposed_weight(weight: np.ndarray, layout: str, groups: int) -> np.ndarray:
    """Reorder weights (I, ..., O/groups) of a transposed convolution to (O, KH, KW, I/groups)."""
    iohw = weight.transpose([layout.index(letter) for letter in "IOHW"])
    inputs, per_group, kh, kw = iohw.shape
    grouped = iohw.reshape(groups, inputs // groups, per_group, kh, kw)
    return np.ascontiguousarray(
        grouped.transpose(0, 2, 3, 4, 1).reshape(groups * per_group, kh, kw, inputs // groups)
    )


def lower_dense(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.dense with constant weights.

    All leading dimensions are rows, static or symbolic.
    """
    linear = read_linear(context, var, split=split_rows)
    if isinstance(linear, Skip):
        return linear
    units = linear.weight.shape[0]
    chain = follow_quantized_curve(context, follow_product(context, var, units))
    spec = Dense(
        rows=prod(linear.shape[:-1]),
        in_features=linear.shape[-1],
        out_features=units,
        in_dtype=linear.dtype,
        in_zero_point=linear.zero_point,
        epilogue=chain.epilogue,
    )
    isa, schedule = context.isa.for_weights(linear.weight), DIRECT
    if not linear.is_symbolic:
        schedule = context.choose_schedule(spec.as_conv2d(), isa, False)
    product = choose_product(spec, isa, schedule, any_rows=linear.is_symbolic)
    packed = product.pack(Constants(linear.weight, chain.offsets, chain.multiplier))
    operands = (linear.call.args[0], *packed.arguments(), *chain.residuals)
    if linear.is_symbolic:
        leading = find_known((tensor_shape(operands[0]) or ())[:-1])
        build = partial(product.build, "qnn_dense", leading)
    else:
        out_shape = (*linear.shape[:-1], units)
        build = partial(product.build, "qnn_dense", linear.shape, out_shape)
    return call_built(chain.vars, build, operands)


def lower_batch_matmul(context: KernelContext, var: relax.Var) -> Lowered | Skip:
    """Lower qnn.batch_matmul of two computed operands with equal batch dimensions, of any sizes.

    The second operand may be transposed, see `read_transposed`.
    """
    call = context.call(var)
    shapes = [tensor_shape(call.args[i]) for i in (0, 1)]
    zeros = [read_number(arg) for arg in call.args[2:4]]
    if None in shapes or None in zeros:
        return Skip("a shape is unknown, or a zero point not constant")
    if not (is_byte(call.args[0]) and is_byte(call.args[1])):
        return Skip("operands are not 8 bit")
    x_shape, y_shape = shapes
    if x_shape[:-2] != y_shape[:-2]:  # pyright: ignore[reportOptionalSubscript]
        return Skip("batch dimensions are broadcast")
    second, heads = read_transposed(context, call.args[1])
    product = ComputedProduct(
        context=context,
        var=var,
        operands=(call.args[0], second),
        zeros=(int(zeros[0]), int(zeros[1])),  # pyright: ignore[reportArgumentType]
        x_shape=x_shape,  # pyright: ignore[reportArgumentType]
        cols=y_shape[-2],  # pyright: ignore[reportOptionalSubscript]
        w_heads=heads,
    )
    x, y = split_batch(call.args[0]), split_batch(call.args[1])
    if x is None or y is None or (x[0] and len(x[1]) < 3):
        return lower_dynamic_product(product)
    return lower_static_product(product, *x)


@dataclass(frozen=True, eq=False)
class ComputedProduct:
    """Operands of a product of two computed matrices, as the kernels read them."""

    context: KernelContext
    var: relax.Var
    operands: tuple[relax.Expr, relax.Expr]
    zeros: tuple[int, int]
    x_shape: tuple[int | str, ...]
    cols: int | str
    w_heads: int | None

    @property
    def dtypes(self) -> tuple[str, str]:
        """Dtypes of the operands: uint8 or int8."""
        return tensor_dtype(self.operands[0]), tensor_dtype(self.operands[1])


def lower_static_product(
    product: ComputedProduct, is_symbolic: bool, x_shape: tuple[int, ...]
) -> Lowered | Skip:
    """Lower a product whose sizes are known but for the batch, which counts as 1 in `x_shape`."""
    if tensor_dtype(product.var) != "int32":
        return Skip(f"the sums are {tensor_dtype(product.var)}")
    chain = follow_product(product.context, product.var, 1, takes=UNBIASED_TAKES)
    spec = BatchMatmul(
        batch=prod(x_shape[:-2]),
        rows=x_shape[-2],
        cols=int(product.cols),
        inner=x_shape[-1],
        x_dtype=product.dtypes[0],
        x_zero_point=product.zeros[0],
        w_dtype=product.dtypes[1],
        w_zero_point=product.zeros[1],
        multiplier=read_multiplier(chain),
        epilogue=chain.epilogue,
        w_heads=product.w_heads,
    )
    stored = split_batch(product.operands[1])
    if stored is None:
        return Skip("a size of the second operand is unknown")
    shapes = (x_shape, stored[1], (*x_shape[:-1], spec.cols))
    build = partial(build_batch_matmul, spec, product.context.isa, "qnn_batch_matmul", *shapes)
    return call_built(chain.vars, build, (*product.operands, *chain.residuals), is_symbolic)


def lower_dynamic_product(product: ComputedProduct) -> Lowered | Skip:
    """Lower a product with sizes that are known only at run time."""
    chain = follow_product(product.context, product.var, 1, takes=PLAIN_TAKES)
    if chain.is_sums and tensor_dtype(product.var) != "int32":
        return Skip(f"the sums are {tensor_dtype(product.var)} and are stored")
    x_shape = find_known(product.x_shape)
    spec = DynamicMatmul(
        *find_known((product.cols, product.x_shape[-1])),
        x_dtype=product.dtypes[0],
        x_zero_point=product.zeros[0],
        w_dtype=product.dtypes[1],
        w_zero_point=product.zeros[1],
        multiplier=read_multiplier(chain),
        epilogue=chain.epilogue,
        w_heads=product.w_heads,
        sum_dtype=tensor_dtype(product.var),
    )
    stored = tensor_shape(product.operands[1])
    if stored is None:
        return Skip("a size of the second operand is unknown")
    shapes = (x_shape, find_known(stored), (*x_shape[:-1], spec.cols))
    build = partial(build_dynamic_matmul, spec, product.context.isa, "qnn_batch_matmul", *shapes)
    return call_built(chain.vars, build, product.operands)


def read_multiplier(chain: IntegerEpilogueChain) -> float:
    """Return the multiplier of sums that have one scale; 1 if they are stored."""
    return 1.0 if chain.multiplier is None else float(chain.multiplier.reshape(-1)[0])


def read_transposed(context: KernelContext, expr: relax.Expr) -> tuple[relax.Expr, int | None]:
    """Read the second operand of a batch_matmul, without the transposition that the kernel can do.

    Returns:
        The transposed value and its `BatchMatmul.w_heads`; or the operand itself and None.

    permute_dims(x, [..., 3, 2])      ->  x, 1
    permute_dims(x, [0, 2, 3, 1])     ->  x, its third dimension
    """
    call = context.graph.call_of(expr)
    if call is None or context.graph.op_name(expr) != "relax.permute_dims":
        return expr, None
    shape, axes = tensor_shape(call.args[0]), list_permutation(call)
    if shape is None:
        return expr, None
    rank = len(axes)
    if rank > 2 and axes == [*range(rank - 2), rank - 1, rank - 2]:
        return call.args[0], 1
    if axes == [0, 2, 3, 1] and isinstance(shape[2], int):
        return call.args[0], shape[2]
    return expr, None


LINEAR_RULES: tuple[IntegerRule, ...] = (
    make_rule(lower_conv2d, "relax.qnn.conv2d", "relax.qnn.conv1d"),
    make_rule(lower_free_conv2d, "relax.qnn.conv2d", "relax.qnn.conv1d"),
    make_rule(lower_conv2d_transpose, "relax.qnn.conv2d_transpose"),
    make_rule(lower_dense, "relax.qnn.dense"),
    make_rule(lower_batch_matmul, "relax.qnn.batch_matmul"),
)
