"""PyTorch reader: operators that TVM's frontend lacks or converts wrongly.

A conversion takes a node of the program and the importer of TVM's frontend, and returns the value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax, tirx

from relayquant.formats.readers.elu import emit_elu, scalar
from relayquant.formats.readers.indices import take_largest
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.torch.arguments import Convert, read_arguments
from relayquant.formats.readers.torch.indexing import (
    convert_gather,
    convert_index,
    convert_index_put,
    convert_scatter,
    convert_slice,
    convert_slice_scatter,
)
from relayquant.formats.readers.torch.pooling import (
    convert_adaptive_max_pool,
    convert_avg_pool,
    convert_embedding_bag,
    convert_max_pool,
    convert_pool,
)
from relayquant.formats.readers.torch.products import (
    convert_addmm,
    convert_convolution,
    convert_matmul,
)
from relayquant.formats.readers.torch.signature import read_array
from relayquant.formats.readers.torch.upsampling import (
    OPEN_UPSAMPLES,
    UPSAMPLES,
    convert_upsample,
)


def convert_sym_max(node: Any, importer: Any) -> Any:
    """Convert the larger of two sizes to an expression of sizes."""
    return tirx.max(*importer.retrieve_args(node))


def convert_extreme(node: Any, importer: Any) -> relax.Expr:
    """Convert amax(x, dims, keepdim) to R.max and amin to R.min. No dims means all."""
    operand, dims, keepdims = read_arguments(node, "self", "dim", "keepdim")
    reduce = relax.op.max if "amax" in str(node.target) else relax.op.min
    value = reduce(importer.env[operand], list(dims) or None, bool(keepdims))
    return importer.block_builder.emit(value)


def convert_extreme_of_axis(node: Any, importer: Any) -> relax.Expr:
    """Convert max(x, dim, keepdim) to (R.max, R.argmax), and min alike. TVM converts max to a
    sorted top 1.
    """
    operand, dim, keepdims = read_arguments(node, "self", "dim", "keepdim")
    data, emit = importer.env[operand], importer.block_builder.emit
    is_max = "max" in str(node.target)
    functions = (relax.op.max, relax.op.argmax) if is_max else (relax.op.min, relax.op.argmin)
    return relax.Tuple([emit(reduce(data, int(dim), bool(keepdims))) for reduce in functions])


def convert_topk(node: Any, importer: Any) -> relax.Expr:
    """Convert topk(x, k, dim, largest, sorted) to R.topk. The result is sorted even if it need not
    be.
    """
    operand, count, dim, largest = read_arguments(node, "self", "k", "dim", "largest")
    data, bb = importer.env[operand], importer.block_builder
    return bb.emit(take_largest(bb, data, int(count), int(dim), largest=bool(largest)))


def convert_elu(node: Any, importer: Any) -> relax.Expr:
    """Convert elu(x, alpha, scale, input_scale) to scale * (max(x, 0) + alpha * (exp(input_scale *
    min(x, 0)) - 1)).

    selu and celu are exported as elu with these factors. TVM supports alpha only.

    Raises:
        Refusal: a factor is infinite or NaN, because its product with 0 is NaN.
    """
    operand, *factors = read_arguments(node, "self", "alpha", "scale", "input_scale")
    alpha, scale, input_scale = map(float, factors)
    if not all(map(math.isfinite, (alpha, scale, input_scale))):
        raise Refusal(f"{node.name} has the factors {factors}; supported: finite ones")
    total = emit_elu(importer.block_builder, importer.env[operand], alpha, input_scale)
    return importer.block_builder.emit(relax.op.multiply(total, scalar(scale, total)))


def convert_grid_sample(node: Any, importer: Any) -> relax.Expr:
    """Convert grid_sampler_2d(x, grid [n, height, width, 2]) to R.image.grid_sample, whose grid has
    the coordinates on axis 1.
    """
    operand, grid, *options = read_arguments(
        node, "input", "grid", "interpolation_mode", "padding_mode", "align_corners"
    )
    emit = importer.block_builder.emit
    moved = emit(relax.op.permute_dims(importer.env[grid], [0, 3, 1, 2]))
    method, padding, aligned = options
    return emit(
        relax.op.image.grid_sample(
            importer.env[operand],
            moved,
            method=("bilinear", "nearest", "bicubic")[method],
            layout="NCHW",
            padding_mode=("zeros", "border", "reflection")[padding],
            align_corners=bool(aligned),
        )
    )


def convert_group_norm(node: Any, importer: Any) -> relax.Expr:
    """Convert native_group_norm(x, weight, bias) to R.nn.group_norm. A missing weight is ones, a
    missing bias zeros.
    """
    operand, weight, bias, channels, groups, eps = read_arguments(
        node, "input", "weight", "bias", "C", "group", "eps"
    )
    data = importer.env[operand]
    dtype, count = str(data.ty.dtype), int(channels)
    gamma = relax.const(np.ones(count, dtype)) if weight is None else importer.env[weight]
    beta = relax.const(np.zeros(count, dtype)) if bias is None else importer.env[bias]
    axes = list(range(2, len(data.ty.shape)))
    value = relax.op.nn.group_norm(data, gamma, beta, int(groups), 1, axes, float(eps))
    return importer.block_builder.emit(value)


def convert_view(node: Any, importer: Any) -> relax.Expr:
    """Convert view and reshape to R.reshape, and to nothing where the sizes stay.

    TVM's frontend compares the sizes with ==, which raises for two symbolic ones.
    """
    data, sizes = importer.retrieve_args(node)
    shape = importer.shape_of(data)
    if shape is not None and tvm_ffi.structural_equal([*shape], [*sizes]):
        return data
    return importer._emit_torch_reshape(data, sizes)


def convert_cumulative(node: Any, importer: Any) -> relax.Expr:
    """Convert cumsum(x, dim, dtype) to R.cumsum and cumprod to R.cumprod, in the result's dtype:
    integers become int64.
    """
    (dim,) = read_arguments(node, "dim")
    accumulate = relax.op.cumsum if "cumsum" in str(node.target) else relax.op.cumprod
    return importer.block_builder.emit(accumulate(read_as_result(node, importer), int(dim)))


def convert_prod(node: Any, importer: Any) -> relax.Expr:
    """Convert prod(x, dim, keepdim, dtype) to R.prod in the result's dtype: integers become int64.
    No dim means all.
    """
    is_whole = str(node.target) == "aten.prod.default"
    dim, keepdims = (None, False) if is_whole else read_arguments(node, "dim", "keepdim")
    return importer.block_builder.emit(relax.op.prod(read_as_result(node, importer), dim, keepdims))


def read_as_result(node: Any, importer: Any) -> relax.Expr:
    """Return the operand of a node, cast to the dtype of its result."""
    (operand,) = read_arguments(node, "self")
    data, dtype = importer.env[operand], result_dtype(node)
    if dtype == str(data.ty.dtype):
        return data
    return importer.block_builder.emit(relax.op.astype(data, dtype))


def result_dtype(node: Any) -> str:
    """Return the dtype that PyTorch gives the result of a node, or the first of several results."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, list | tuple) else value
    return str(first.dtype).removeprefix("torch.")


def convert_shift(node: Any, importer: Any) -> relax.Expr:
    """Convert x << n to R.left_shift and x >> n to R.right_shift. A number gets the type of the
    tensor.

    Raises:
        Refusal: n is a number not below the number of bits. PyTorch does not define the result.
    """
    operands = [importer.env.get(each, each) for each in node.args]
    dtype = result_dtype(node)
    bits = np.iinfo(dtype).bits
    if isinstance(node.args[1], int) and not 0 <= node.args[1] < bits:
        raise Refusal(f"{node.name} shifts {dtype} by {node.args[1]}; supported: 0 to {bits - 1}")
    emit = importer.block_builder.emit
    values = [
        relax.const(each, dtype) if isinstance(each, int) else emit(relax.op.astype(each, dtype))
        for each in operands
    ]
    is_left = any(part in str(node.target) for part in ("lshift", "left"))
    return emit((relax.op.left_shift if is_left else relax.op.right_shift)(*values))


def convert_fill(node: Any, importer: Any) -> relax.Expr:
    """Convert full, full_like and fill with TVM's frontend.

    An infinity or NaN becomes R.broadcast_to of a constant, because TVM's operator does not compile
    with it.
    """
    names = [argument.name for argument in node.target._schema.arguments]
    (value,) = read_arguments(node, names[1])
    if not isinstance(value, float) or math.isfinite(value):
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        return getattr(importer, f"_{name}")(node)
    source = importer.retrieve_args(node)[0]
    shape = importer.shape_of(source) if isinstance(source, relax.Expr) else source
    return emit_number(importer, value, shape, result_dtype(node))


def emit_number(importer: Any, value: float, shape: Any, dtype: str) -> relax.Expr:
    """Emit a number in all elements."""
    return importer.block_builder.emit(relax.op.broadcast_to(relax.const(value, dtype), shape))


def convert_arange(node: Any, importer: Any) -> relax.Expr:
    """Convert arange(start, end, step) to R.arange. One of floats or with a negative step becomes a
    constant of PyTorch's values, because TVM counts its elements wrongly.
    """
    numbers = read_arguments(node, "start", "end", "step")
    is_fixed = all(isinstance(each, int | float) for each in numbers)
    if not is_fixed or (all(isinstance(each, int) for each in numbers) and numbers[2] > 0):
        return importer._arange(node)
    import torch  # pyright: ignore[reportMissingImports]

    dtype = result_dtype(node)
    values = torch.arange(*numbers, dtype=getattr(torch, dtype))
    return importer.block_builder.emit(relax.const(read_array(values), dtype))


def convert_clamp(node: Any, importer: Any) -> relax.Expr:
    """Convert clamp(x, low, high) to R.clip.

    If a bound is missing, integers use R.maximum or R.minimum, because TVM's frontend uses an
    infinity as the bound. The upper bound wins, and a NaN bound gives NaN.
    """
    operand, low, high = read_arguments(node, "self", "min", "max")
    data, emit = importer.env[operand], importer.block_builder.emit
    dtype = str(data.ty.dtype)
    numbers = [bound for bound in (low, high) if isinstance(bound, int | float)]
    if any(map(math.isnan, numbers)):
        return emit_number(importer, math.nan, importer.shape_of(data), dtype)
    if len(numbers) == 2 and low > high:
        return emit_number(importer, high, importer.shape_of(data), dtype)
    if "int" not in dtype or (low is not None and high is not None):
        return importer._clamp(node)
    bound = relax.const(int(low if high is None else high), dtype)
    return emit((relax.op.minimum if low is None else relax.op.maximum)(data, bound))


#: names of operators that shift the bits of integers
SHIFTS = (
    *(f"__{side}shift__.{kind}" for side in "lr" for kind in ("Scalar", "Tensor")),
    *(
        f"bitwise_{side}_shift.{kind}"
        for side in ("left", "right")
        for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
)

#: operator name in TVM's frontend -> its conversion
OPERATORS: dict[str, Convert] = {
    "amax.default": convert_extreme,
    "amin.default": convert_extreme,
    "max.dim": convert_extreme_of_axis,
    "min.dim": convert_extreme_of_axis,
    "elu.default": convert_elu,
    "topk.default": convert_topk,
    "sym_max": convert_sym_max,
    "adaptive_max_pool2d.default": convert_adaptive_max_pool,
    "adaptive_max_pool3d.default": convert_adaptive_max_pool,
    "_embedding_bag_forward_only.default": convert_embedding_bag,
    "_embedding_bag.default": convert_embedding_bag,
    "grid_sampler_2d.default": convert_grid_sample,
    "native_group_norm.default": convert_group_norm,
    **dict.fromkeys(("view.default", "reshape.default"), convert_view),
    **dict.fromkeys(("cumsum.default", "cumprod.default"), convert_cumulative),
    **dict.fromkeys(("prod.default", "prod.dim_int"), convert_prod),
    **dict.fromkeys(SHIFTS, convert_shift),
    "convolution.default": convert_convolution,
    **dict.fromkeys(("mm.default", "bmm.default"), convert_matmul),
    **dict.fromkeys(("addmm.default", "baddbmm.default"), convert_addmm),
    "avg_pool1d.default": convert_pool,
    "avg_pool2d.default": convert_avg_pool,
    "avg_pool3d.default": convert_avg_pool,
    **{
        f"{prefix}adaptive_avg_pool{rank}d.default": convert_pool
        for prefix in ("", "_")
        for rank in (1, 2, 3)
    },
    "gather.default": convert_gather,
    "slice.Tensor": convert_slice,
    "slice_scatter.default": convert_slice_scatter,
    "index.Tensor": convert_index,
    "index_put.default": convert_index_put,
    "scatter.src": convert_scatter,
    "scatter_add.default": convert_scatter,
    "scatter_reduce.two": convert_scatter,
    **{f"max_pool{rank}d_with_indices.default": convert_max_pool for rank in (1, 2, 3)},
    "arange.start_step": convert_arange,
    "clamp.default": convert_clamp,
    **dict.fromkeys(("full.default", "full_like.default", "fill.Scalar"), convert_fill),
    **dict.fromkeys((*UPSAMPLES, *OPEN_UPSAMPLES), convert_upsample),
}
