"""ONNX reader: convolutions. TVM turns auto_pad into anonymous loops and ignores output_shape.

Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax

from relayquant.formats.readers.onnx.operators.activations import find_activation
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.frontend import run_frontend, sum_in_float32
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.formats.readers.pooling import Windows
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.reference.folding import emit_folded
from relayquant.ir.rewrite.graph import tensor_shape


def resolve_auto_pad(
    attrs: Mapping[str, Any],
    sizes: Sequence[int | str],
    kernel: Sequence[int],
) -> list[int] | None:
    """Return explicit pads (all begins, then all ends) for attribute auto_pad. None if it defines
    none.

    SAME_* pads so that the output has ceil(size / stride) elements (ONNX, operator Conv). It never
    crops: with a kernel smaller than the stride the padding is 0, as in onnx's evaluator.

    Raises:
        Refusal: a symbolic size has a stride, so the padding depends on the size.
    """
    mode = read_auto_pad(attrs)
    if mode == "NOTSET":
        return None
    if mode == "VALID":
        return [0] * (2 * len(kernel))
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise Refusal(f"auto_pad is {mode!r}; allowed: NOTSET, VALID, SAME_UPPER, SAME_LOWER")
    strides = attrs.get("strides", [1] * len(kernel))
    dilations = attrs.get("dilations", [1] * len(kernel))
    begins, ends = [], []
    for size, extent, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        window = (extent - 1) * dilation + 1
        if isinstance(size, str):
            if stride != 1:
                raise Refusal(
                    f"auto_pad={mode} with stride {stride} over the symbolic dimension {size!r} "
                    "has no fixed padding; fix that dimension with shapes="
                )
            total = window - 1
        else:
            total = max(0, measure_same_pads(size, window, stride))
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    return begins + ends


def read_auto_pad(attrs: Mapping[str, Any]) -> str:
    mode = attrs.get("auto_pad", b"NOTSET")
    return mode.decode() if isinstance(mode, bytes) else str(mode)


def measure_same_pads(size: int, window: int, stride: int) -> int:
    """Return the padding of both sides that gives ceil(size / stride) windows. Negative if the
    last window ends before the data does.
    """
    return (-(-size // stride) - 1) * stride + window - size


def add_bias(bb: Builder, value: relax.Expr, bias: relax.Expr | None) -> relax.Expr:
    """Emit value + bias over axis 1. A constant bias becomes a constant of shape [1, C, 1, ...]."""
    if bias is None:
        return value
    value = bb.normalize(value)
    ones = [1] * (value.ty.ndim - 2)
    bias = emit_folded(bb, relax.op.reshape(bias, [1, -1, *ones]))
    return relax.op.add(bb.emit(value), bias)


def read_kernel_shape(weight: relax.Expr) -> list[int]:
    sizes = known_shape(weight, "weight")[2:]
    if any(isinstance(size, str) for size in sizes):
        raise Refusal(f"its kernel has a symbolic size {sizes}")
    return [int(size) for size in sizes]


def convert_conv(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Conv: auto_pad becomes explicit padding, and a constant bias is reshaped at once.

    Raises:
        Refusal: the kernel is wider than the padded data.
    """
    kernel = list(attrs.get("kernel_shape") or read_kernel_shape(inputs[1]))
    sizes = known_shape(inputs[0], "input")[2:]
    if "auto_pad" in attrs:
        pads = resolve_auto_pad(attrs, sizes, kernel)
        attrs.pop("auto_pad")
        if pads is not None:
            attrs["pads"] = pads
    ones, zeros = [1] * len(kernel), [0] * 2 * len(kernel)
    strides, dilations = attrs.get("strides") or ones, attrs.get("dilations") or ones
    Windows(kernel, strides, dilations, attrs.get("pads") or zeros, False).check(sizes)
    return add_bias(bb, sum_in_float32("Conv", bb, inputs[:2], attrs, opset), inputs[2])


def convert_fused_conv(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert com.microsoft.FusedConv(x, w, b, z) -> activation(Conv(x, w, b) + z).

    ONNX Runtime writes it into optimized models. activation_params are the activation's attributes
    in their own order.

    Raises:
        Refusal: the activation is unknown.
    """
    name = attrs.pop("activation", b"").decode()
    given = [float(value) for value in attrs.pop("activation_params", ())]
    data, weight, bias, other = (*inputs, None, None)[:4]
    value = bb.emit(convert_conv(bb, [data, weight, bias], attrs, opset))
    if other is not None:
        value = bb.emit(relax.op.add(value, other))
    if not name:
        return value
    if name == "Clip":
        low, high = (*given, math.inf)[:2] if given else (-math.inf, math.inf)
        return relax.op.clip(value, low, high)
    activation = find_activation(name)
    parameters = activation.choose_parameters({"alpha": given[:1], "beta": given[1:2]})
    return activation.apply(bb, value, *parameters)


def convert_conv_transpose(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert ConvTranspose: output_shape, which TVM ignores, becomes explicit padding (ONNX,
    operator ConvTranspose).

    Raises:
        Refusal: output_shape over a symbolic dimension, or pads wider than the result.
    """
    if "output_shape" in attrs:
        sizes = known_shape(inputs[0], "input")[2:]
        kernel = attrs.get("kernel_shape") or read_kernel_shape(inputs[1])
        rank = len(kernel)
        strides = attrs.get("strides", [1] * rank)
        dilations = attrs.get("dilations", [1] * rank)
        extra = list(attrs.get("output_padding", [0] * rank))
        mode = attrs.pop("auto_pad", b"NOTSET")
        begins, ends = [], []
        for i, (size, wanted) in enumerate(
            zip(sizes, attrs.pop("output_shape")[-rank:], strict=True)
        ):
            if isinstance(size, str):
                raise Refusal(f"output_shape over the symbolic dimension {size!r}")
            full = strides[i] * (size - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1
            total = full - wanted
            if total < 0:
                # The output reaches beyond the last product: it is padded at the end.
                extra[i] -= total
                total = 0
            small, large = total // 2, total - total // 2
            begins.append(small if mode == b"SAME_UPPER" else large)
            ends.append(large if mode == b"SAME_UPPER" else small)
        attrs.update(pads=begins + ends, output_padding=extra)
    value = bb.normalize(run_frontend("ConvTranspose", bb, inputs[:2], attrs, opset))
    shape = tensor_shape(value) or ()
    if any(isinstance(size, int) and size < 0 for size in shape):
        raise Refusal(
            f"its pads {list(attrs.get('pads', ()))} are wider than its result, which would have "
            f"the shape {shape}; supported: sizes of 0 and more"
        )
    return add_bias(bb, value, inputs[2])
