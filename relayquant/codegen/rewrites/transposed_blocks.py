"""Transposed convolutions of images whose size is known only at run time, and float ones of few
outputs -> convolutions that make blocks of pixels. Runs behind `layout`.

    conv2d_transpose(x, w), strides s    ->    blocks(conv2d(x, w'))

Each place gives a block of s[0] * s[1] pixels. A pixel reads ceil(k / s) places along an axis: w'
has the taps t, t + s, ... of pixel t, and zeros beyond the last tap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.codegen.kernels.windows import PixelBlocks, make_blocks
from relayquant.codegen.lowering.engine import mark_kernel
from relayquant.codegen.lowering.floating.convolution import CONV_LAYOUT, CONV_TRANSPOSE_LAYOUT
from relayquant.codegen.lowering.integer.linear import order_transposed_weight
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.legality import list_calls
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.expressions import op_name, shape_of
from relayquant.ir.rewrite.function import mutate_functions
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

INTEGER = "relax.qnn.conv2d_transpose"
#: Outputs below which float ones make blocks for fixed sizes, too: a vector of outputs has unused
#: lanes, one of blocks fewer.
FEW_OUTPUTS = 16
#: Transposed convolutions, and the kernels' layouts of their data and weights.
TRANSPOSED = {"relax.nn.conv2d_transpose": CONV_TRANSPOSE_LAYOUT, INTEGER: CONV_LAYOUT}


def make_pixel_blocks(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the transposed convolutions in every function of a module."""
    if not any(map(is_block, list_calls(mod))):
        return mod
    return mutate_functions(mod, BlockMutator(mod))


def is_block(call: Call) -> bool:
    """Whether a transposed convolution in the kernels' layout becomes one that makes blocks."""
    name = op_name(call)
    if name not in TRANSPOSED or not makes_blocks(call):
        return False
    layouts = str(call.attrs.data_layout), str(call.attrs.kernel_layout)
    return layouts == TRANSPOSED[name]


def makes_blocks(call: Call) -> bool:
    """Whether a transposed convolution, in any layout, reads images of free size, or makes few
    floats of each place: of all channels, with constant weights of zero point 0.
    """
    shape, weight = tensor_shape(call.args[0]), constant_value(call.args[1])
    if int(call.attrs.groups) != 1 or shape is None or weight is None:
        return False
    view = ConvView.of(call)
    sizes = dict(zip(view.layout, shape, strict=True))
    is_integer, outputs = op_name(call) == INTEGER, weight.shape[view.kernel_layout.index("O")]
    is_free = any(isinstance(sizes[each], str) for each in "HW")
    is_narrow = not is_integer and outputs < FEW_OUTPUTS and max(view.as_2d().strides) > 1
    if isinstance(sizes["C"], str) or not (is_free or is_narrow):
        return False
    if is_integer:
        zero = constant_value(call.args[3])
        is_served = zero is not None and not zero.any()
    else:
        is_served = {tensor_dtype(call.args[0]), tensor_dtype(call)} == {"float32"}
    if not is_served:
        return False
    taps = [weight.shape[view.kernel_layout.index(letter)] for letter in "HW"]
    return view.as_2d().dilation == (1, 1) and min(list_borders(call, taps)) >= 0


def list_borders(call: Call, taps: list[int]) -> list[int]:
    """Places behind the last one, of height and width, that the last pixels belong to."""
    view = ConvView.of(call).as_2d()
    axes = zip(taps, view.padding[2:], view.output_padding, view.strides, strict=True)
    return [(k - 1 - after + more) // step for k, after, more, step in axes]


@relax.expr_functor.mutator
class BlockMutator(relax.PyExprMutator):
    """Mutator that rewrites them."""

    def visit_call_(self, call: Call) -> relax.Expr:  # pyright: ignore[reportIncompatibleMethodOverride]
        visited: Any = self.visit_expr_post_order(call)
        if not isinstance(visited, Call) or not isinstance(visited.op, tvm.ir.Op):
            return visited
        if not is_block(visited):
            return visited
        view, weight = ConvView.of(visited), constant_value(visited.args[1])
        assert weight is not None
        ordered = order_transposed_weight(weight, view.kernel_layout, 1)
        outputs, *kernel, _ = ordered.shape
        strides, (top, left, *_) = view.as_2d().strides, view.as_2d().padding
        taps = split_pixels(ordered, strides)
        before = [size - 1 for size in taps.shape[1:3]]
        padding = [*before, *list_borders(visited, kernel)]
        data, *parameters = [visited.args[0], *visited.args[2:]]
        constant = relax.const(taps, str(taps.dtype))
        if op_name(visited) == INTEGER:
            parameters = [repeat_constant(each, len(taps) // outputs) for each in parameters]
            places = qnn.conv2d(
                data,
                constant,
                *parameters,
                padding=padding,
                data_layout="NHWC",
                kernel_layout="OHWI",
                out_dtype=str(visited.attrs.out_dtype),
            )
        else:
            layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
            places = relax.op.nn.conv2d(data, constant, padding=padding, **layouts)
        spec = PixelBlocks(outputs, strides, (top, left), tensor_dtype(call))
        kernel = self.builder_.add_func(mark_kernel(make_blocks(spec), macs=0), "blocks")
        rows = self.builder_.emit(places)
        return relax.call_tir(kernel, rows, relax.TensorType(shape_of(call), spec.dtype))


def split_pixels(weight: np.ndarray, strides: tuple[int, int]) -> np.ndarray:
    """Weights (O, KH, KW, I) -> (pixels * O, places, places, I), as the convolution reads places:
    the last tap first.
    """
    outputs, *kernel, channels = weight.shape
    places = [-(-taps // step) for taps, step in zip(kernel, strides, strict=True)]
    pads = [(0, n * step - k) for n, step, k in zip(places, strides, kernel, strict=True)]
    padded = np.pad(weight, [(0, 0), *pads, (0, 0)])
    split = padded.reshape(outputs, places[0], strides[0], places[1], strides[1], channels)
    ordered = split[:, ::-1, :, ::-1].transpose(2, 4, 0, 1, 3, 5)
    return np.ascontiguousarray(ordered.reshape(-1, *places, channels))


def repeat_constant(parameter: relax.Expr, count: int) -> relax.Expr:
    """A constant with one number for each output, for `count` times as many; one number stays."""
    value = constant_value(parameter)
    if count == 1 or value is None or value.size == 1:
        return parameter
    return relax.const(np.tile(value, count), str(value.dtype))
