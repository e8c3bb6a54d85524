"""Float convolutions, also transposed or of images of free size -> calls of kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, GenericConst

from relayquant.codegen.kernels.floating.bf16 import read_bf16_conv2d
from relayquant.codegen.kernels.floating.convolution.free import (
    FreeFloatConv2d,
    count_packed,
    pack_free_conv2d,
)
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    pack_conv2d,
    packed_conv2d_size,
)
from relayquant.codegen.kernels.floating.convolution.transposed import (
    FloatConv2dTranspose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.floating.convolution.winograd import pack_winograd, prefers_winograd
from relayquant.codegen.kernels.floating.gemm import FloatDense
from relayquant.codegen.kernels.floating.tile import FEWEST_CHANNELS
from relayquant.codegen.kernels.windows import ConvWindows
from relayquant.codegen.lowering.engine import Lowered, Operand
from relayquant.codegen.lowering.floating.context import FloatContext, call_bf16, call_product
from relayquant.codegen.lowering.integer.linear import order_transposed_weight
from relayquant.codegen.lowering.joined_slices import read_joined_slices
from relayquant.ir.rewrite.conv_view import Conv2dView, ConvView
from relayquant.ir.rewrite.expressions import is_float32, shape_of, static_sizes
from relayquant.ir.rewrite.graph import static_size
from relayquant.ir.rewrite.rule import Skip, decline

#: Layouts of data and weights for the convolution kernels.
CONV_LAYOUT = ("NHWC", "OHWI")


#: The same for convolutions of sequences.
SEQUENCE_LAYOUT = ("NWC", "OWI")


#: The same for transposed convolutions, whose weights are rearranged when they are packed.
CONV_TRANSPOSE_LAYOUT = ("NHWC", "IOHW")


@dataclass(frozen=True, eq=False)
class ConvOperands:
    """What a convolution reads, in the layout of the kernels; sequences as images of height 1.

    Attributes:
        shape: Of the data, NHWC.
        kernel: Shape of the weights, OHWI.
        numbers: Strides, padding, dilation and groups.
        is_sequence: Whether the tensors have no height.
    """

    shape: list[Any]
    kernel: list[Any]
    numbers: Conv2dView
    is_sequence: bool

    @staticmethod
    def read(call: Call) -> ConvOperands | Skip:
        """Read a nn.conv2d or nn.conv1d. Skip for other layouts and types than the kernels take."""
        view = ConvView.of(call)
        layouts = view.layout, view.kernel_layout, view.out_layout
        if layouts not in [(*each, each[0]) for each in (CONV_LAYOUT, SEQUENCE_LAYOUT)]:
            return Skip(f"layout {'/'.join(layouts)}")
        if not all(is_float32(each) for each in (*call.args, call)):
            return decline("not float32 of known rank")
        shape, kernel = (shape_of(each) for each in call.args)
        is_sequence = len(shape) == 3
        if is_sequence:
            one = tirx.IntImm("int64", 1)
            shape, kernel = [shape[0], one, *shape[1:]], [kernel[0], one, *kernel[1:]]
        return ConvOperands(shape, kernel, view.as_2d(), is_sequence)


def read_conv2d(call: Call) -> FloatConv2d | Skip:
    """Read the specification of a nn.conv2d in the layout of the kernels, for one image; or of a
    nn.conv1d, as a convolution of height 1.

    Returns:
        Skip with the reason if no kernel computes it.
    """
    found = ConvOperands.read(call)
    if isinstance(found, Skip):
        return found
    numbers = found.numbers
    sizes = static_sizes([*found.shape[1:], *found.kernel])
    if sizes is None:
        return decline("a size other than the batch is symbolic")
    height, width, channels, outputs, kh, kw, _ = sizes
    spec = FloatConv2d(
        1,
        height,
        width,
        channels,
        outputs,
        (kh, kw),
        numbers.strides,
        numbers.padding,
        numbers.dilation,
        numbers.groups,
        is_sequence=found.is_sequence,
    )
    if min(spec.group_out, outputs) < FEWEST_CHANNELS and not spec.is_depthwise:
        return decline("too few channels")
    if min(spec.padding) < 0:
        return decline("the padding is negative")
    if min(spec.out_size) < 1:
        return decline("the result is empty")
    return spec


def read_conv2d_transpose(call: Call) -> FloatConv2dTranspose | Skip:
    """Read the specification of a nn.conv2d_transpose, for one image and in any layout of the data.

    Returns:
        Skip with the reason if no kernel computes it.
    """
    data, weight = call.args
    view = ConvView.of(call)
    if sorted(view.layout) != sorted("NHWC") or view.out_layout != view.layout:
        return Skip(f"layout {view.layout}/{view.out_layout}")
    if not (is_float32(data) and is_float32(weight) and isinstance(weight, GenericConst)):
        return decline("not float32 of known rank, or the weights are not constant")
    extents = dict(zip(view.layout, shape_of(data), strict=True))
    sizes = static_sizes([extents[letter] for letter in "HWC"])
    if sizes is None:
        return decline("a size other than the batch is symbolic")
    kernel = dict(zip(view.kernel_layout, map(int, weight.ty.shape.values), strict=True))
    numbers = view.as_2d()
    if kernel["O"] < FEWEST_CHANNELS:
        return decline("too few channels")
    if min(numbers.padding) < 0:
        return decline("the padding is negative")
    return FloatConv2dTranspose(
        1,
        *sizes,
        kernel["O"] * numbers.groups,
        (kernel["H"], kernel["W"]),
        numbers.strides,
        numbers.padding,
        numbers.dilation,
        numbers.groups,
        numbers.output_padding,
    )


def lower_conv2d(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.conv2d and nn.conv1d in the layout of the kernels."""
    call = context.block.values[root]
    data, weight = call.args
    spec = read_conv2d(call)
    if isinstance(spec, Skip):
        return spec
    chain = context.follow(root, spec.out_channels)
    concat, epilogue = context.choose_epilogue(chain)
    joined = None
    if spec.is_depthwise and not spec.is_sequence:
        data, joined = read_joined_slices(context.block.call_of, data)
    batch = context.symbol(shape_of(call.args[0])[0])
    spec = replace(spec, batch=batch, epilogue=epilogue, joined=joined)
    if context.bf16 is not None and isinstance(weight, GenericConst) and not spec.is_depthwise:
        narrow = read_bf16_conv2d(spec)
        return call_bf16(context, chain, narrow, data, weight.value.numpy(), concat)
    isa = context.isa
    kind, before = "float_conv2d", ()
    packed: Operand
    if isinstance(weight, GenericConst) and prefers_winograd(spec, isa):
        kind = "float_winograd"
        packed = pack_winograd(weight.value.numpy(), spec, isa)
    elif isinstance(weight, GenericConst):
        if not spec.is_depthwise:
            spec = replace(spec, schedule=context.choose_schedule(spec, isa))
        packed = pack_conv2d(weight.value.numpy(), spec, isa)
    else:
        size = packed_conv2d_size(spec, isa)
        packing = context.pack_at_run_time("float_conv2d_packing", spec, weight, root, size)
        packed, before = packing.output, (packing,)
    kernel = context.make_kernel(kind, spec)
    if spec.is_depthwise:
        operand = 2 + epilogue.bias
        fields = {0: "data", **({operand: "residual"} if epilogue.residual else {})}
        kernel = context.make_storing_kernel(kind, spec, fields)
    return replace(call_product(chain, kernel, data, packed, concat), before=before)


def read_free_conv2d(call: Call) -> FreeFloatConv2d | Skip:
    """Read the specification of a nn.conv2d of images of free height or width, or of a nn.conv1d of
    sequences of free length, in the layout of the kernels.

    Returns:
        Skip with the reason if no kernel computes it.
    """
    found = ConvOperands.read(call)
    if isinstance(found, Skip):
        return found
    numbers = found.numbers
    sizes = static_sizes([found.shape[-1], *found.kernel])
    if sizes is None:
        return decline("the number of channels, or a size of the weights, is symbolic")
    if static_sizes(found.shape[1:]) is not None:
        return Skip("the images have a known size")
    if min(numbers.padding) < 0:
        return decline("the padding is negative")
    channels, outputs, kh, kw, _ = sizes
    windows = ConvWindows(
        channels,
        (kh, kw),
        numbers.strides,
        numbers.padding,
        numbers.dilation,
        "float32",
        groups=numbers.groups,
        is_sequence=found.is_sequence,
    )
    return FreeFloatConv2d(windows, outputs)


def lower_free_conv2d(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.conv2d over images of free height or width, or nn.conv1d over sequences of free
    length. A convolution with one tap is a dense layer.
    """
    call = context.block.values[root]
    data, weight = call.args
    spec = read_free_conv2d(call)
    if isinstance(spec, Skip):
        return spec
    chain = context.follow(root, spec.outputs)
    concat, epilogue = context.choose_epilogue(chain)
    spec, isa, before = replace(spec, epilogue=epilogue), context.isa, ()
    packed: Operand
    if isinstance(weight, GenericConst):
        packed = pack_free_conv2d(weight.value.numpy(), spec, isa)
    else:
        size = count_packed(spec, isa)
        packing = context.pack_at_run_time("float_free_packing", spec, weight, root, size)
        packed, before = packing.output, (packing,)
    if spec.windows.is_pixel:
        # Equal layers share one kernel, so symbols have the same names in all of them.
        letters, extents = "nhw"[: data.ty.ndim - 1], shape_of(data)[:-1]
        rows = [
            static_size(extent) or tirx.Var(letter, "int64")
            for letter, extent in zip(letters, extents, strict=True)
        ]
        dense = FloatDense((*rows, spec.windows.channels), spec.outputs, epilogue)
        kernel = context.make_kernel("float_dense", dense)
    else:
        kind = "float_free_depthwise" if spec.is_depthwise else "float_free_conv2d"
        kernel = context.make_kernel(kind, spec)
    return replace(call_product(chain, kernel, data, packed, concat), before=before)


def lower_conv2d_transpose(context: FloatContext, root: relax.Var) -> Lowered | Skip:
    """Lower nn.conv2d_transpose in the layout of the kernels, with constant weights."""
    call = context.block.values[root]
    data, weight = call.args
    spec = read_conv2d_transpose(call)
    if isinstance(spec, Skip):
        return spec
    if str(call.attrs.data_layout) != CONV_TRANSPOSE_LAYOUT[0]:
        return Skip(f"layout {call.attrs.data_layout}")
    chain = context.follow(root, spec.out_channels)
    batch = context.symbol(shape_of(data)[0])
    concat, epilogue = context.choose_epilogue(chain)
    spec = replace(spec, batch=batch, epilogue=epilogue)
    taps = order_transposed_weight(weight.value.numpy(), str(call.attrs.kernel_layout), spec.groups)
    packed = pack_conv2d_transpose(taps, spec, context.isa)
    kernel = context.make_kernel("float_conv2d_transpose", spec)
    return call_product(chain, kernel, data, packed, concat)
