"""ONNX operators that are converted here instead of by TVM's frontend, and why.

TVM turns Clip, Pad and auto_pad into `call_tir` of anonymous loops, which no pattern recognizes. It
reduces a stacked copy for Min, Max and Sum. It ignores some attributes, outputs and versions, and
some of its run-time results differ from ONNX. Each function says which of these applies, also in
the modules of families, such as `convolutions`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.ir import GenericConst

from relayquant.formats.readers.elu import emit_elu
from relayquant.formats.readers.onnx.operators.activations import convert_softplus
from relayquant.formats.readers.onnx.operators.arithmetic import (
    convert_bit_shift,
    convert_dropout,
    convert_is_inf,
    convert_mish,
    convert_mod,
    convert_pow,
    convert_selu,
    convert_shrink,
    convert_thresholded_relu,
)
from relayquant.formats.readers.onnx.operators.broadcast import (
    convert_concat,
    convert_expand,
    list_sizes,
)
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Convert, Operands
from relayquant.formats.readers.onnx.operators.convolutions import (
    convert_conv,
    convert_conv_transpose,
)
from relayquant.formats.readers.onnx.operators.einsum import convert_einsum
from relayquant.formats.readers.onnx.operators.frontend import round_once, sum_in_float32
from relayquant.formats.readers.onnx.operators.indexing import (
    convert_gather,
    convert_gather_elements,
    convert_reverse_sequence,
    convert_scatter_elements,
    convert_slice,
)
from relayquant.formats.readers.onnx.operators.normalization import (
    convert_batch_normalization,
    convert_layer_normalization,
    convert_lp_normalization,
    convert_rms_normalization,
)
from relayquant.formats.readers.onnx.operators.padding import FLOATS, convert_pad
from relayquant.formats.readers.onnx.operators.pools import (
    convert_average_pool,
    convert_lp_pool,
    convert_max_pool,
)
from relayquant.formats.readers.onnx.operators.quantized import (
    convert_conv_integer,
    convert_dequantize_linear,
    convert_dynamic_quantize_linear,
    convert_matmul_integer,
    convert_quantize_linear,
)
from relayquant.formats.readers.onnx.operators.recurrent import GRU, LSTM, RNN, convert_recurrent
from relayquant.formats.readers.onnx.operators.reductions import (
    REDUCTIONS,
    convert_hardmax,
    convert_log_sum_exp,
    convert_one_hot,
    convert_reduction,
    convert_top_k,
    convert_unique,
)
from relayquant.formats.readers.onnx.operators.resize import convert_resize, convert_upsample
from relayquant.formats.readers.onnx.operators.signal import convert_dft, convert_stft
from relayquant.formats.readers.onnx.operators.sizes import (
    convert_constant_of_shape,
    convert_flatten,
    convert_reshape,
    convert_split,
    convert_trilu,
    limit_range,
    read_sizes,
)
from relayquant.formats.readers.onnx.operators.vision import (
    convert_non_max_suppression,
    convert_roi_align,
    convert_space_to_depth,
)
from relayquant.formats.readers.refusal import NotConstant
from relayquant.ir.rewrite.graph import constant_value


def read_constant(value: Any) -> np.ndarray | None:
    """Return the value of an operand. None if it is absent or computed at run time."""
    return None if value is None else constant_value(value)


def convert_squeeze(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
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


def convert_clip(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
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


def convert_elu(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Elu by `emit_elu`. TVM supports it in float32 only."""
    return emit_elu(bb, inputs[0], float(attrs.get("alpha", 1.0)))


def convert_celu(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Celu, which TVM lacks, by `emit_elu`."""
    alpha = float(attrs.get("alpha", 1.0))
    return emit_elu(bb, inputs[0], alpha, 1.0 / alpha)


def convert_hard_swish(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert HardSwish to x * (clip(x + 3, 0, 6) / 6) with scalars. TVM uses full tensors for the
    constants.
    """
    (data,) = inputs
    dtype = str(data.ty.dtype)
    shifted = bb.emit(relax.op.add(data, relax.const(3.0, dtype)))
    gate = bb.emit(relax.op.clip(shifted, 0.0, 6.0))
    return relax.op.multiply(data, bb.emit(relax.op.divide(gate, relax.const(6.0, dtype))))


def convert_tile(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Tile with constant repeats to R.tile."""
    repeats = constant_value(inputs[1])
    return None if repeats is None else relax.op.tile(inputs[0], [int(n) for n in repeats])


def require_constant(
    what: str, at: int, bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> None:
    """Check that operand `at` is a constant, and leave the node to TVM.

    Raises:
        NotConstant: it is not constant.
    """
    operand = inputs[at] if at < len(inputs) else None
    if operand is not None and read_sizes(operand) is None:
        raise NotConstant(what)


def convert_cumsum(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert CumSum to R.cumsum, between two R.flip with `reverse`. TVM flips by loops, which no
    other format can express.
    """
    axes = read_sizes(inputs[1])
    if axes is None:
        raise NotConstant("axis")
    data, axis = inputs[0], int(axes[0])
    is_reversed = bool(attrs.get("reverse", 0))
    if is_reversed:
        data = bb.emit(relax.op.flip(data, axis))
    total = bb.emit(relax.op.cumsum(data, axis, exclusive=bool(attrs.get("exclusive", 0))))
    return bb.emit(relax.op.flip(total, axis)) if is_reversed else total


def convert_eye_like(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
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
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr | None:
    """Convert OptionalHasElement without its optional input to False."""
    return None if len(inputs) else relax.const(False, "bool")


def _fold_pairs(
    op: Callable[[relax.Expr, relax.Expr], relax.Expr],
    bb: Builder,
    inputs: Operands,
    attrs: Attrs,
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


#: ONNX operator type -> its conversion here.
OPERATORS: dict[str, Convert] = {
    **{name: functools.partial(convert_reduction, name) for name in REDUCTIONS},
    "AveragePool": convert_average_pool,
    "Celu": round_once(convert_celu),
    "Clip": convert_clip,
    "DFT": round_once(convert_dft),
    "Elu": round_once(convert_elu),
    "Concat": convert_concat,
    "CumSum": convert_cumsum,
    "AffineGrid": functools.partial(require_constant, "size", 1),
    "Einsum": convert_einsum,
    "EyeLike": convert_eye_like,
    "MaxUnpool": functools.partial(require_constant, "output shape", 2),
    "OptionalHasElement": convert_optional_has_element,
    "Dropout": convert_dropout,
    "Expand": convert_expand,
    "Flatten": convert_flatten,
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
    "Shrink": convert_shrink,
    "SpaceToDepth": convert_space_to_depth,
    "STFT": round_once(convert_stft),
    "Squeeze": convert_squeeze,
    "TopK": convert_top_k,
    "Unique": convert_unique,
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
    "Hardmax": convert_hardmax,
    "HardSwish": round_once(convert_hard_swish),
    "MatMul": functools.partial(sum_in_float32, "MatMul"),
    "MatMulInteger": convert_matmul_integer,
    "MaxPool": convert_max_pool,
    "Mish": round_once(convert_mish),
    "Min": functools.partial(_fold_pairs, relax.op.minimum),
    "OneHot": convert_one_hot,
    "Pad": convert_pad,
    "QuantizeLinear": convert_quantize_linear,
    "ReverseSequence": convert_reverse_sequence,
    "RNN": functools.partial(convert_recurrent, RNN),
    "Range": limit_range,
    "GatherElements": convert_gather_elements,
    "ScatterElements": convert_scatter_elements,
    "Slice": convert_slice,
    "Split": convert_split,
    "Selu": round_once(convert_selu),
    "Softplus": round_once(convert_softplus),
    "ThresholdedRelu": convert_thresholded_relu,
    "Softmax": functools.partial(sum_in_float32, "Softmax"),
    "Sum": functools.partial(_fold_pairs, relax.op.add),
    "Tile": convert_tile,
    "Trilu": convert_trilu,
}
