"""ONNX operators that are converted here instead of by TVM's frontend, and why.

TVM turns Clip, Pad and auto_pad into `call_tir` of anonymous loops, which no pattern recognizes. It
reduces a stacked copy for Min, Max and Sum. It ignores some attributes, outputs and versions, and
some of its run-time results differ from ONNX. Each function says which of these applies.

A conversion takes the block builder, the inputs (constants where known, None where absent), the
attributes and the opset. It returns the value, or None to leave the node to TVM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.ir import GenericConst

from relayquant.base import _tvm
from relayquant.errors import format_count
from relayquant.formats.readers.elu import emit_elu
from relayquant.formats.readers.indices import count_from_start, gather_elements, scatter_elements
from relayquant.formats.readers.onnx.activations import find_activation
from relayquant.formats.readers.onnx.arithmetic import (
    convert_bit_shift,
    convert_cosh,
    convert_dropout,
    convert_is_inf,
    convert_mod,
    convert_pow,
    convert_sinh,
)
from relayquant.formats.readers.onnx.broadcast import convert_expand, is_same, list_sizes
from relayquant.formats.readers.onnx.contrib import (
    convert_dynamic_quantize_lstm,
    convert_dynamic_quantize_matmul,
    convert_matmul_integer_to_float,
    convert_qattention,
    convert_qembed_layer_normalization,
    convert_qlinear_where,
)
from relayquant.formats.readers.onnx.einsum import convert_einsum
from relayquant.formats.readers.onnx.grouped import (
    GROUPED_PRODUCTS,
    convert_matmul_nbits,
    gather_rows,
)
from relayquant.formats.readers.onnx.normalization import (
    convert_batch_normalization,
    convert_embed_layer_normalization,
    convert_layer_normalization,
    convert_lp_normalization,
    convert_rms_normalization,
    convert_skip_layer_normalization,
)
from relayquant.formats.readers.onnx.quantized import (
    convert_conv_integer,
    convert_dequantize_linear,
    convert_dynamic_quantize_linear,
    convert_matmul_integer,
    convert_quantize_linear,
    find_real,
)
from relayquant.formats.readers.onnx.recurrent import GRU, LSTM, RNN, convert_recurrent
from relayquant.formats.readers.onnx.reductions import (
    REDUCTIONS,
    convert_log_sum_exp,
    convert_one_hot,
    convert_reduction,
    convert_top_k,
)
from relayquant.formats.readers.onnx.resize import convert_resize, convert_upsample
from relayquant.formats.readers.onnx.sizes import (
    convert_constant_of_shape,
    convert_reshape,
    convert_split,
    emit_item,
    emit_sizes,
    fill_outside,
    known_shape,
    limit_range,
    pad_at_run_time,
    read_sizes,
    slice_value,
)
from relayquant.formats.readers.onnx.vision import (
    convert_non_max_suppression,
    convert_roi_align,
    convert_space_to_depth,
)
from relayquant.formats.readers.pooling import Windows, emit_pool, emit_window_sum
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype

_FRONTEND = _tvm.load_onnx_frontend()

Convert = Callable[[relax.BlockBuilder, Sequence[Any], dict[str, Any], int], "relax.Expr | None"]

#: Dtypes for which R.nn.pad computes the pad value in the dtype of the data.
FLOATS = ("float16", "float32", "float64")


def read_constant(value: Any) -> np.ndarray | None:
    """Return the value of an operand. None if it is absent or computed at run time."""
    return None if value is None else constant_value(value)


def convert_squeeze(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr | None:
    """Convert Squeeze of symbolic sizes to R.squeeze behind a match_cast, which rejects every size
    but 1 at run time. All others are left to TVM.
    """
    data = inputs[0]
    axes = attrs.get("axes") if opset < 13 else read_constant(inputs[1])
    if axes is None or not isinstance(getattr(data.ty, "shape", None), relax.ShapeExpr):
        return None
    sizes = list_sizes(data)
    gone = [int(axis) % len(sizes) for axis in axes]
    if all(isinstance(sizes[axis], int) for axis in gone):
        return None
    for axis in gone:
        sizes[axis] = sizes[axis] if isinstance(sizes[axis], int) else 1
    return relax.op.squeeze(bb.match_cast(data, relax.TensorType(sizes, data.ty.dtype)), gone)


def convert_clip(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert Clip to R.clip. An absent or NaN bound means no bound, as in ONNX Runtime.

    Run-time bounds, and those of int64 data, whose limits do not fit in float64, become
    R.minimum(R.maximum(x, low), high).
    """
    data = inputs[0]
    dtype = str(data.ty.dtype)
    low, high = -math.inf, math.inf
    if opset < 11:
        low, high = float(attrs.get("min", low)), float(attrs.get("max", high))
    else:
        bounds = [constant_value(bound) for bound in inputs[1:3] if bound is not None]
        is_wide = dtype not in FLOATS and np.iinfo(dtype).bits > 32
        if is_wide or any(bound is None for bound in bounds):
            for bound, limit in zip(inputs[1:3], (relax.op.maximum, relax.op.minimum), strict=True):
                data = data if bound is None else bb.emit(limit(data, bound))
            return data
        low, high = (
            default if bound is None else constant_value(bound).item()
            for bound, default in zip(inputs[1:3], (low, high), strict=True)
        )
    low = -math.inf if low != low else low
    high = math.inf if high != high else high
    if dtype in FLOATS:
        # An empty range gives the upper bound, in ONNX and in min(max(x, low), high).
        return relax.op.clip(data, float(min(low, high)), float(high))
    limits = np.iinfo(dtype)
    low, high = max(low, limits.min), min(high, limits.max)
    return relax.op.clip(data, int(min(low, high)), int(high))


#: mode in ONNX -> mode of R.nn.pad
PAD_MODES = {
    b"constant": "constant",
    b"reflect": "reflect",
    b"edge": "replicate",
    b"wrap": "circular",
}


def convert_elu(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert Elu to max(x, 0) + min(alpha * (exp(x) - 1), 0). TVM supports it in float32 only."""
    return emit_elu(bb, inputs[0], float(attrs.get("alpha", 1.0)))


def convert_celu(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert Celu, which TVM lacks, to max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)."""
    alpha = float(attrs.get("alpha", 1.0))
    return emit_elu(bb, inputs[0], alpha, 1.0 / alpha)


def convert_hard_swish(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert HardSwish to x * (clip(x + 3, 0, 6) / 6) with scalars. TVM uses full tensors for the
    constants.
    """
    (data,) = inputs
    dtype = str(data.ty.dtype)
    shifted = bb.emit(relax.op.add(data, relax.const(3.0, dtype)))
    gate = bb.emit(relax.op.clip(shifted, 0.0, 6.0))
    return relax.op.multiply(data, bb.emit(relax.op.divide(gate, relax.const(6.0, dtype))))


def convert_tile(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr | None:
    """Convert Tile with constant repeats to R.tile."""
    repeats = constant_value(inputs[1])
    return None if repeats is None else relax.op.tile(inputs[0], [int(n) for n in repeats])


def convert_pad(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr | None:
    """Convert Pad to R.nn.pad. Negative pads crop first: R.strided_slice.

    Integer data is left to TVM, unless its pads are computed at run time.
    """
    mode = PAD_MODES.get(attrs.get("mode", b"constant"))
    if mode is None:
        return None
    data = inputs[0]
    shape = known_shape(data)
    fill = 0.0
    axes = list(range(len(shape)))
    if opset < 11:
        pads, fill = list(attrs["pads"]), float(attrs.get("value", 0.0))
    else:
        arrays = [None if given is None else find_real(bb, given) for given in inputs]
        pairs = list(zip(arrays, inputs, strict=True))[1:]
        late = [at for at, (array, given) in enumerate(pairs, 1) if array is None is not given]
        if late == [2] and mode == "constant":
            return pad_with_value(bb, inputs, attrs, opset)
        if late:
            return pad_at_run_time(bb, inputs, attrs.get("mode", b"constant"))
        pads = arrays[1].tolist()
        if len(arrays) > 2 and arrays[2] is not None:
            fill = float(arrays[2].item())
        if len(arrays) > 3 and arrays[3] is not None:
            axes = [int(axis) % len(shape) for axis in arrays[3]]
    if str(data.ty.dtype) not in FLOATS:
        return None
    if len(pads) != 2 * len(axes):
        raise Refusal(
            f"Pad has {format_count(len(pads), 'pad')} for {format_count(len(axes), 'axis')}; "
            f"expected {2 * len(axes)}"
        )
    widths = [[0, 0] for _ in shape]
    for i, axis in enumerate(axes):
        widths[axis] = [int(pads[i]), int(pads[i + len(axes)])]
    cropped = [axis for axis, (before, after) in enumerate(widths) if before < 0 or after < 0]
    if cropped:
        if any(isinstance(shape[axis], str) for axis in cropped):
            return None
        begin = [max(0, -widths[axis][0]) for axis in cropped]
        end = [int(shape[axis]) - max(0, -widths[axis][1]) for axis in cropped]
        data = bb.emit(relax.op.strided_slice(data, cropped, begin, end, [1] * len(cropped)))
        widths = [[max(0, before), max(0, after)] for before, after in widths]
    return relax.op.nn.pad(data, [int(pad) for pair in widths for pad in pair], mode, fill)


def pad_with_value(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Pad by constant counts with a run-time value: pad with zeros, then select the value outside
    the data.
    """
    data, pads, fill, *axes = inputs
    dtype = str(data.ty.dtype)
    plain = [data, pads, relax.const(np.zeros((), dtype), dtype), *axes]
    padded = convert_pad(bb, plain, attrs, opset)
    if padded is None:
        padded = _run_frontend("Pad", bb, plain, attrs, opset)
    counts = read_sizes(pads) or []
    half = len(counts) // 2
    places = [axis for given in axes if given is not None for axis in read_sizes(given) or []]
    pairs = zip(counts[:half], counts[half:], strict=True)
    widths = dict(zip(places or range(half), pairs, strict=True))
    return fill_outside(bb, bb.emit(padded), data, widths, fill)


def convert_gather(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr | None:
    """Convert Gather with constant indices to R.take. Negative indices are counted from the end
    here, not at run time. For rows of a grouped weight, only these rows are read.
    """
    grouped = gather_rows(bb, inputs, attrs)
    if grouped is not None:
        return grouped
    data, indices = inputs[0], constant_value(inputs[1])
    if indices is None or isinstance(data, GenericConst | relax.ShapeExpr):
        return None
    shape = known_shape(data)
    axis = int(attrs.get("axis", 0)) % len(shape)
    size = shape[axis]
    if isinstance(size, str):
        if (indices < 0).any():
            return None
    elif ((indices < -size) | (indices >= size)).any():
        raise Refusal(f"indices {indices.tolist()} leave axis {axis} of size {size}")
    else:
        indices = np.where(indices < 0, indices + size, indices)
    return relax.op.take(data, relax.const(indices.astype("int64"), "int64"), axis)


def resolve_auto_pad(
    attrs: Mapping[str, Any],
    sizes: Sequence[int | str],
    kernel: Sequence[int],
) -> list[int] | None:
    """Return explicit pads (all begins, then all ends) for attribute auto_pad. None if it defines
    none.

    SAME_* pads so that the output has ceil(size / stride) elements (ONNX, operator Conv).

    Raises:
        ValueError: a symbolic size has a stride, so the padding depends on the size.
    """
    mode = attrs.get("auto_pad", b"NOTSET")
    mode = mode.decode() if isinstance(mode, bytes) else str(mode)
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
                    "has no "
                    "fixed padding; fix that dimension with shapes="
                )
            total = window - 1
        else:
            total = max(0, (-(-size // stride) - 1) * stride + window - size)
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    return begins + ends


def _run_frontend(
    name: str, bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    converter = _FRONTEND._get_convert_map()[name].get_converter(opset)
    return converter(bb, _FRONTEND.onnx_input(inputs), attrs, [{}, {}])


def _add_bias(bb: relax.BlockBuilder, value: relax.Expr, bias: relax.Expr | None) -> relax.Expr:
    """Emit value + bias over axis 1. A constant bias becomes a constant of shape [1, C, 1, ...]."""
    if bias is None:
        return value
    value = bb.normalize(value)
    ones = [1] * (value.ty.ndim - 2)
    array = constant_value(bias)
    if array is not None:
        bias = relax.const(array.reshape([1, -1, *ones]), str(array.dtype))
    else:
        bias = relax.op.reshape(bias, [1, -1, *ones])
    return relax.op.add(bb.emit(value), bias)


def _kernel_shape(weight: relax.Expr) -> list[int]:
    sizes = known_shape(weight, "weight")[2:]
    if any(isinstance(size, str) for size in sizes):
        raise Refusal(f"its kernel has a symbolic size {sizes}")
    return [int(size) for size in sizes]


def sum_in_float32(
    op: str, bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert with TVM's frontend, and compute float16 in float32.

    The sum is rounded once. TVM's float16 kernels round each partial sum. A product with rows of a
    grouped weight reads the codes.
    """
    multiply = GROUPED_PRODUCTS.get(op)
    grouped = multiply(bb, inputs, attrs) if multiply is not None else None
    if grouped is not None:
        return grouped
    if str(inputs[0].ty.dtype) != "float16":
        return _run_frontend(op, bb, list(inputs), attrs, opset)
    wide = [each if each is None else bb.emit(relax.op.astype(each, "float32")) for each in inputs]
    value = bb.emit(_run_frontend(op, bb, wide, attrs, opset))
    return bb.emit(relax.op.astype(value, "float16"))


def convert_conv(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert Conv: auto_pad becomes explicit padding, and a constant bias is reshaped at once."""
    kernel = attrs.get("kernel_shape") or _kernel_shape(inputs[1])
    if "auto_pad" in attrs:
        pads = resolve_auto_pad(attrs, known_shape(inputs[0], "input")[2:], kernel)
        attrs.pop("auto_pad")
        if pads is not None:
            attrs["pads"] = pads
    return _add_bias(bb, sum_in_float32("Conv", bb, inputs[:2], attrs, opset), inputs[2])


def convert_fused_conv(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
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


def convert_slice(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert Slice. Below opset 10, where bounds are attributes, they become inputs."""
    if opset >= 10:
        return slice_value(bb, inputs)
    axes = attrs.get("axes", range(len(attrs["starts"])))
    rows = (attrs["starts"], attrs["ends"], axes)
    bounds = (relax.const(np.array(list(row), "int64"), "int64") for row in rows)
    return slice_value(bb, [inputs[0], *bounds])


def convert_conv_transpose(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert ConvTranspose: output_shape, which TVM ignores, becomes explicit padding (ONNX,
    operator ConvTranspose).
    """
    if "output_shape" in attrs:
        sizes = known_shape(inputs[0], "input")[2:]
        kernel = attrs.get("kernel_shape") or _kernel_shape(inputs[1])
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
    value = _run_frontend("ConvTranspose", bb, inputs[:2], attrs, opset)
    return _add_bias(bb, value, inputs[2])


def read_windows(data: relax.Expr, attrs: Mapping[str, Any]) -> Windows:
    """Read the windows of a pool over this data."""
    kernel = list(attrs["kernel_shape"])
    pads = resolve_auto_pad(attrs, known_shape(data, "input")[2:], kernel)
    return Windows(
        kernel,
        list(attrs.get("strides") or [1] * len(kernel)),
        list(attrs.get("dilations") or [1] * len(kernel)),
        pads or list(attrs.get("pads") or [0] * 2 * len(kernel)),
        bool(attrs.get("ceil_mode", 0)),
    )


def convert_average_pool(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert AveragePool, see `emit_pool`."""
    counts = bool(attrs.get("count_include_pad", 0))
    return emit_pool(bb, "average", inputs[0], read_windows(inputs[0], attrs), counts)


def convert_max_pool(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert MaxPool, see `emit_pool`. TVM lacks its second output, the indices of the maxima.

    Raises:
        Refusal: the indices are used.
    """
    if attrs["tvm_custom"]["num_outputs"] > 1:
        raise Refusal("its second output, the indices, is used; supported: only the maxima")
    return emit_pool(bb, "maximum", inputs[0], read_windows(inputs[0], attrs))


def convert_lp_pool(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert LpPool: the sum of |x| ** p of each window, to the power of 1 / p.

    TVM multiplies an average by the kernel size, although fewer elements count with ceil_mode.
    """
    data, order = inputs[0], float(attrs.get("p", 2))
    exponents = [relax.const(number, str(data.ty.dtype)) for number in (order, 1 / order)]
    powers = bb.emit(relax.op.power(bb.emit(relax.op.abs(data)), exponents[0]))
    total = emit_window_sum(bb, powers, read_windows(data, attrs))
    return relax.op.power(total, exponents[1])


def convert_gather_elements(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert GatherElements. Its index may be smaller than the data along the other axes."""
    data, index = inputs
    axis = int(attrs.get("axis", 0)) % data.ty.ndim
    return gather_elements(bb, data, count_along(bb, data, index, axis), axis)


def convert_scatter_elements(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr | None:
    """Convert ScatterElements with fewer indices than elements along another axis, where TVM writes
    to wrong places. Equal sizes are left to TVM.
    """
    data, index, updates = inputs
    axis = int(attrs.get("axis", 0)) % data.ty.ndim
    sizes = list_sizes(index)
    pairs = enumerate(zip(list_sizes(data), sizes, strict=True))
    if all(is_same(*pair) for at, pair in pairs if at != axis):
        return None
    kind = attrs.get("reduction", b"none").decode()
    index = count_along(bb, data, index, axis)
    reduction = "update" if kind == "none" else kind
    return scatter_elements(bb, data, index, sizes, updates, axis, reduction)


def count_along(
    bb: relax.BlockBuilder, data: relax.Expr, index: relax.Expr, axis: int
) -> relax.Expr:
    """Count an index from the start of an axis of the data, also of symbolic size."""
    size = list_sizes(data)[axis]
    if not isinstance(size, int):
        dtype = tensor_dtype(index)
        size = bb.emit(relax.op.astype(emit_item(bb, emit_sizes(bb, data), axis), dtype))
    return count_from_start(bb, index, size)


def require_constant(
    what: str,
    at: int,
    bb: relax.BlockBuilder,
    inputs: Sequence[Any],
    attrs: dict[str, Any],
    opset: int,
) -> None:
    """Check that operand `at` is a constant, and leave the node to TVM.

    Raises:
        NotConstant: it is not constant.
    """
    operand = inputs[at] if at < len(inputs) else None
    if operand is not None and read_sizes(operand) is None:
        raise NotConstant(what)


def convert_eye_like(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert EyeLike to R.eye_like of data with the wanted dtype. TVM supports the dtype of the
    data only.
    """
    wanted = attrs.get("dtype")
    dtype = str(inputs[0].ty.dtype)
    if wanted is not None:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(wanted)).name
    like = bb.emit(relax.op.astype(inputs[0], dtype))
    return relax.op.eye_like(like, int(attrs.get("k", 0)), dtype)


def convert_optional_has_element(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr | None:
    """Convert OptionalHasElement without its optional input to False."""
    return None if len(inputs) else relax.const(False, "bool")


def _fold_pairs(
    op: Callable[[relax.Expr, relax.Expr], relax.Expr],
    bb: relax.BlockBuilder,
    inputs: Sequence[Any],
    attrs: dict[str, Any],
    opset: int,
) -> relax.Expr | None:
    """Convert Min, Max, Sum of any number of inputs to one binary operator per further input."""
    if len(inputs) < 2 or all(isinstance(given, GenericConst) for given in inputs):
        return None
    # The frontend's input list does not support negative indices.
    value, *others, last = list(inputs)
    for given in others:
        value = bb.emit(op(value, given))
    return op(value, last)


#: Key that TVM's frontend adds to the attributes of every node.
OF_FRONTEND = "tvm_custom"


@dataclass(frozen=True)
class ForeignOperator:
    """An operator of another domain, which `onnx.checker` does not check.

    Attributes:
        convert: Its conversion here. None if TVM converts it.
        known: Attributes that the conversion reads, and hints that change no result.
        required: Attributes in `known` that a node must have.
        neutral: Attributes that are not read -> the only value with which they change nothing.
        outputs: How many of its outputs the conversion computes.
    """

    convert: Convert | None = None
    known: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def select_attributes(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes that the conversion may read.

        Raises:
            Refusal: a required attribute is missing, an unknown attribute is set, or the node has
                more outputs than are computed.
        """
        count = attrs[OF_FRONTEND]["num_outputs"]
        if count > self.outputs:
            raise Refusal(
                f"it has {format_count(count, 'output')}; supported: the first {self.outputs}"
            )
        missing = [name for name in self.required if name not in attrs]
        if missing:
            raise Refusal(f"it has no attribute {', '.join(missing)}; required: all of them")
        for name, value in attrs.items():
            is_neutral = name in self.neutral and value == self.neutral[name]
            if is_neutral or name in self.known or name == OF_FRONTEND:
                continue
            allowed = f"{self.neutral[name]}" if name in self.neutral else "none of that name"
            raise Refusal(f"its attribute {name} is {value!r}; supported: {allowed}")
        return {name: value for name, value in attrs.items() if name not in self.neutral}


_ATTENTION = dict.fromkeys(
    ("do_rotary", "past_present_share_buffer", "rotary_embedding_dim", "unidirectional"), 0
)
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_RECURRENT = (
    *("activation_alpha", "activation_beta", "activations"),
    *("clip", "direction", "hidden_size", "input_forget"),
)
_QUANTIZED = ("axis", "block_size", "output_dtype", "precision", "saturate")

#: Known operators of other domains, by domain and type.
FOREIGN: dict[str, dict[str, ForeignOperator]] = {
    "com.microsoft": {
        "Attention": ForeignOperator(
            known=("mask_filter_value", "num_heads", "qkv_hidden_sizes"),
            required=("num_heads",),
            neutral=_ATTENTION,
        ),
        "BiasGelu": ForeignOperator(),
        "DequantizeLinear": ForeignOperator(convert_dequantize_linear, _QUANTIZED),
        "DynamicQuantizeLSTM": ForeignOperator(
            convert_dynamic_quantize_lstm, _RECURRENT, outputs=3
        ),
        "DynamicQuantizeMatMul": ForeignOperator(convert_dynamic_quantize_matmul),
        "EmbedLayerNormalization": ForeignOperator(
            convert_embed_layer_normalization, ("epsilon", "mask_index_type"), outputs=3
        ),
        "FastGelu": ForeignOperator(),
        "FusedConv": ForeignOperator(
            convert_fused_conv, ("activation", "activation_params", *_CONV)
        ),
        "Gelu": ForeignOperator(),
        "MatMulInteger16": ForeignOperator(),
        "MatMulIntegerToFloat": ForeignOperator(convert_matmul_integer_to_float),
        "MatMulNBits": ForeignOperator(
            convert_matmul_nbits,
            ("K", "N", "accuracy_level", "bits", "block_size"),
            required=("K", "N", "block_size"),
            # Any other value means a byte layout for one kind of GPU.
            neutral={"weight_prepacked": 0},
        ),
        "QAttention": ForeignOperator(
            convert_qattention,
            ("mask_filter_value", "num_heads", "scale", "unidirectional"),
            required=("num_heads",),
            neutral={"do_rotary": 0, "past_present_share_buffer": 0},
            outputs=2,
        ),
        "QEmbedLayerNormalization": ForeignOperator(
            convert_qembed_layer_normalization, ("epsilon",), outputs=2
        ),
        "QLinearWhere": ForeignOperator(convert_qlinear_where),
        "QuantizeLinear": ForeignOperator(convert_quantize_linear, _QUANTIZED),
        "SkipLayerNormalization": ForeignOperator(
            convert_skip_layer_normalization, ("epsilon",), outputs=4
        ),
    }
}

#: ONNX operator type -> its conversion here.
OPERATORS: dict[str, Convert] = {
    **{name: functools.partial(convert_reduction, name) for name in REDUCTIONS},
    "AveragePool": convert_average_pool,
    "Celu": convert_celu,
    "Clip": convert_clip,
    "Cosh": convert_cosh,
    "Elu": convert_elu,
    "CumSum": functools.partial(require_constant, "axis", 1),
    "AffineGrid": functools.partial(require_constant, "size", 1),
    "Einsum": convert_einsum,
    "EyeLike": convert_eye_like,
    "MaxUnpool": functools.partial(require_constant, "output shape", 2),
    "OptionalHasElement": convert_optional_has_element,
    "Dropout": convert_dropout,
    "Expand": convert_expand,
    "IsInf": convert_is_inf,
    "LayerNormalization": convert_layer_normalization,
    "LpNormalization": convert_lp_normalization,
    "LpPool": convert_lp_pool,
    "Mod": convert_mod,
    "NonMaxSuppression": convert_non_max_suppression,
    "Pow": convert_pow,
    "RMSNormalization": convert_rms_normalization,
    "ReduceLogSumExp": convert_log_sum_exp,
    "Reshape": convert_reshape,
    "Resize": convert_resize,
    "RoiAlign": convert_roi_align,
    "Sinh": convert_sinh,
    "SpaceToDepth": convert_space_to_depth,
    "Squeeze": convert_squeeze,
    "TopK": convert_top_k,
    "Upsample": convert_upsample,
    "BatchNormalization": convert_batch_normalization,
    "BitShift": convert_bit_shift,
    "ConstantOfShape": convert_constant_of_shape,
    "Conv": convert_conv,
    "ConvInteger": convert_conv_integer,
    "ConvTranspose": convert_conv_transpose,
    "DequantizeLinear": convert_dequantize_linear,
    "DynamicQuantizeLinear": convert_dynamic_quantize_linear,
    "Gather": convert_gather,
    "GRU": functools.partial(convert_recurrent, GRU),
    "Gemm": functools.partial(sum_in_float32, "Gemm"),
    "LSTM": functools.partial(convert_recurrent, LSTM),
    "Max": functools.partial(_fold_pairs, relax.op.maximum),
    "HardSwish": convert_hard_swish,
    "MatMul": functools.partial(sum_in_float32, "MatMul"),
    "MatMulInteger": convert_matmul_integer,
    "MaxPool": convert_max_pool,
    "Min": functools.partial(_fold_pairs, relax.op.minimum),
    "OneHot": convert_one_hot,
    "Pad": convert_pad,
    "QuantizeLinear": convert_quantize_linear,
    "RNN": functools.partial(convert_recurrent, RNN),
    "Range": limit_range,
    "GatherElements": convert_gather_elements,
    "ScatterElements": convert_scatter_elements,
    "Slice": convert_slice,
    "Split": convert_split,
    "Softmax": functools.partial(sum_in_float32, "Softmax"),
    "Sum": functools.partial(_fold_pairs, relax.op.add),
    "Tile": convert_tile,
}
