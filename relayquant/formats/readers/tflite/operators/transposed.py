"""TensorFlow Lite reader: transposed convolutions of images and volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.operators.reading import (
    find_shape,
    operands,
    read_constant,
    read_real,
    store_real,
)
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import constant_value


@dataclass(frozen=True)
class SpreadAxis:
    """A transposed convolution along one axis.

    Attributes:
        stride: Distance of two kernels in the result.
        cut: Elements that the result lacks, at its begin and at its end.
        added: Elements behind the last kernel.
        dilation: Distance of two elements of a kernel.
    """

    stride: int
    cut: tuple[int, int]
    added: int = 0
    dilation: int = 1


def place_window(
    count: int, size: int, kernel: int, stride: int, dilation: int, is_same: bool
) -> SpreadAxis:
    """Place the kernels of `count` elements in a result of `size` elements.

    Raises:
        Refusal: a convolution of a value of that size would not have `count` elements.
    """
    wide = (kernel - 1) * dilation + 1
    if math.ceil((size if is_same else size - wide + 1) / stride) != count:
        raise Refusal(f"its result has size {size} along an axis of {count}, with stride {stride}")
    added = size - (count - 1) * stride - wide
    cut = max(0, -added)
    return SpreadAxis(stride, (cut // 2, cut - cut // 2), max(0, added), dilation)


def convolve_transposed(
    converter: Any, data: relax.Expr, weight: relax.Expr, windows: Sequence[SpreadAxis]
) -> relax.Expr:
    """Return the transposed convolution. The weight is IOHW (images) or DHWOI (volumes)."""
    is_image = len(windows) == 2
    convolve = relax.op.nn.conv2d_transpose if is_image else relax.op.nn.conv3d_transpose
    value = convolve(
        data,
        weight,
        strides=[window.stride for window in windows],
        padding=[window.cut[end] for end in (0, 1) for window in windows],
        output_padding=[window.added for window in windows],
        dilation=[window.dilation for window in windows],
        data_layout="NHWC" if is_image else "NDHWC",
        kernel_layout="IOHW" if is_image else "DHWOI",
    )
    return converter.bb.emit(value)


def convert_transpose_conv(converter: Any, op: Any) -> relax.Expr:
    """Convert TRANSPOSE_CONV(sizes, weight, x, bias). TVM ignores fused activations, and gives a
    smaller result where more elements follow the last kernel than the kernel has.
    """
    options = read_options(op, "TransposeConvOptions")
    _, weight, data, *_ = converter.get_input_tensors(op)
    value, axes = converter.get_tensor_expr(weight), [3, 0, 1, 2]
    array = constant_value(value)
    if array is not None:
        turned = relax.const(array.transpose(axes), str(array.dtype))
    else:
        turned = converter.bb.emit(relax.op.permute_dims(value, axes))
    if weight.qnn_params:
        if weight.qnn_params["axis"]:
            raise Refusal(f"its weight has a scale per axis {weight.qnn_params['axis']}")
        scale, zero = weight.qnn_params["scale"], weight.qnn_params["zero_point"]
        turned = converter.bb.emit(relax.op.dequantize(turned, scale, zero, axis=1))
    strides = (options.StrideH(), options.StrideW())
    kernel = [int(n) for n in converter.get_tensor_shape(weight)[1:3]]
    windows = place_windows(converter, op, kernel, strides, options.Padding())
    value = convolve_transposed(converter, read_real(converter, data), turned, windows)
    return finish_product(converter, op, value, options)


def convert_conv3d_transpose(converter: Any, op: Any) -> relax.Expr:
    """Convert CONV_3D_TRANSPOSE(sizes, weight, x, bias)."""
    options = read_options(op, "Conv3DOptions")
    _, weight, data, *_ = operands(converter, op)
    tensor = converter.get_input_tensors(op)[1]
    kernel = [int(n) for n in converter.get_tensor_shape(tensor)[:3]]
    strides = (options.StrideD(), options.StrideH(), options.StrideW())
    dilation = (options.DilationDFactor(), options.DilationHFactor(), options.DilationWFactor())
    windows = place_windows(converter, op, kernel, strides, options.Padding(), dilation)
    value = convolve_transposed(converter, data, weight, windows)
    return finish_product(converter, op, value, options)


def place_windows(
    converter: Any,
    op: Any,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: int,
    dilation: Sequence[int] = (1, 1),
) -> list[SpreadAxis]:
    """Return the windows along the axes of an image or a volume, operand 2, for the sizes in
    operand 0.
    """
    from tflite import Padding

    counts = map(int, converter.get_tensor_shape(converter.get_input_tensors(op)[2])[1:-1])
    sizes = read_constant(converter, op, 0).tolist()[1:-1]
    return [
        place_window(*each, padding == Padding.SAME)
        for each in zip(counts, sizes, kernel, strides, dilation, strict=True)
    ]


def finish_product(converter: Any, op: Any, value: relax.Expr, options: Any) -> relax.Expr:
    """Add the bias, operand 3, if there is one, and apply the fused activation."""
    bias = [tensor for tensor in converter.get_input_tensors(op)[3:] if tensor.tensor_idx >= 0]
    if bias:
        value = converter.bb.emit(relax.op.add(value, read_real(converter, bias[0])))
    function = options.FusedActivationFunction()
    value = converter.convert_fused_activation_function(value, function)
    return store_real(converter, op, value)


def convert_transpose_conv_bias(converter: Any, op: Any) -> relax.Expr:
    """Convert MediaPipe's transposed convolution with a bias. Its options are a struct of C:
    padding (1: SAME, 2: VALID), horizontal and vertical stride.
    """
    raw = op.CustomOptionsAsNumpy()
    if not isinstance(raw, np.ndarray) or raw.size < 12:
        raise Refusal("it lacks its options (padding, stride_width, stride_height)")
    padding, *strides = np.frombuffer(raw.tobytes()[:12], "<i4").tolist()
    if padding not in (1, 2) or min(strides) < 1:
        raise Refusal(
            f"its padding is {padding}, its strides are {strides}; allowed: 1 (SAME) and 2 "
            "(VALID), and strides from 1 on"
        )
    data, weight, bias = operands(converter, op)
    windows = []
    for axis, stride in zip((1, 2), reversed(strides), strict=True):
        kernel, size = find_shape(weight)[axis], find_shape(data)[axis]
        cut = max(0, kernel - (size - 1) % stride - 1) if padding == 1 else 0
        windows.append(SpreadAxis(stride, (cut // 2, cut - cut // 2)))
    turned = converter.bb.emit(relax.op.permute_dims(weight, [3, 0, 1, 2]))
    return relax.op.add(convolve_transposed(converter, data, turned, windows), bias)
