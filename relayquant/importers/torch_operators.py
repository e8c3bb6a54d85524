"""First stage, PyTorch: operators that TVM's frontend does not know, or gets wrong.

A conversion takes a node of the program and the importer of TVM's frontend, and returns the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax

from relayquant.importers.onnx_activations import emit_elu, scalar
from relayquant.importers.onnx_resize import Axis, Sampling, emit_resize
from relayquant.importers.refusal import Refusal
from relayquant.rewrite.graph import static_size, tensor_shape

#: node of the program, importer of TVM's frontend -> value
Convert = Callable[[Any, Any], relax.Expr]


def read_arguments(node: Any, *names: str) -> list[Any]:
    """The arguments of an operator by the names that its schema has, with its defaults."""
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    return [given[name] for name in names]


def convert_extreme(node: Any, importer: Any) -> relax.Expr:
    """amax(x, dims, keepdim) -> R.max, amin -> R.min; no dims are all."""
    operand, dims, keepdims = read_arguments(node, "self", "dim", "keepdim")
    reduce = relax.op.max if "amax" in str(node.target) else relax.op.min
    value = reduce(importer.env[operand], list(dims) or None, bool(keepdims))
    return importer.block_builder.emit(value)


def convert_extreme_of_axis(node: Any, importer: Any) -> relax.Expr:
    """max(x, dim, keepdim) -> (R.max, R.argmax), min alike; TVM has max as a sorted top 1."""
    operand, dim, keepdims = read_arguments(node, "self", "dim", "keepdim")
    data, emit = importer.env[operand], importer.block_builder.emit
    is_max = "max" in str(node.target)
    functions = (relax.op.max, relax.op.argmax) if is_max else (relax.op.min, relax.op.argmin)
    return relax.Tuple([emit(reduce(data, int(dim), bool(keepdims))) for reduce in functions])


def convert_elu(node: Any, importer: Any) -> relax.Expr:
    """elu(x, alpha, scale, input_scale) -> scale * (max(x, 0) + alpha * (exp(input_scale *
    min(x, 0)) - 1)); selu and celu are written so, and TVM knows alpha only.
    """
    operand, *factors = read_arguments(node, "self", "alpha", "scale", "input_scale")
    alpha, scale, input_scale = map(float, factors)
    total = emit_elu(importer.block_builder, importer.env[operand], alpha, input_scale)
    return importer.block_builder.emit(relax.op.multiply(total, scalar(scale, total)))


def convert_adaptive_max_pool(node: Any, importer: Any) -> relax.Expr:
    """adaptive_max_pool2d(x, 1) -> (R.max over height and width, nothing).

    Raises:
        Refusal: another size of the result.
    """
    operand, sizes = read_arguments(node, "self", "output_size")
    if list(sizes) != [1, 1]:
        raise Refusal(f"{node.name} pools to {list(sizes)}; supported: [1, 1]")
    data = importer.env[operand]
    value = importer.block_builder.emit(relax.op.max(data, [-2, -1], keepdims=True))
    return relax.Tuple([value])


def convert_upsample(node: Any, importer: Any) -> relax.Expr:
    """upsample_{nearest, bilinear, bicubic}2d(x, size or scales) -> what Resize of ONNX becomes.

    Coordinates are computed with a scale that is given, not with that of the rounded size. An
    antialiased kernel ends at the border, and its cubic has a = -0.5, -0.75 without.

    Raises:
        Refusal: the size is symbolic; corners are aligned with antialias.
    """
    mode, is_antialiased = UPSAMPLES[str(node.target).removeprefix("aten.")]
    names = [argument.name for argument in node.target._schema.arguments]
    operand, sizes = read_arguments(node, names[0], "output_size")
    if "scale_factors" in names:
        (factors,) = read_arguments(node, "scale_factors")
    else:
        factors = read_arguments(node, "scales_h", "scales_w")
    aligned = "align_corners" in names and read_arguments(node, "align_corners")[0]
    if aligned and is_antialiased:
        raise Refusal(f"{node.name} has antialias and align_corners; supported: one of them")
    data = importer.env[operand]
    axes = []
    for k, size in enumerate((tensor_shape(data) or ())[2:]):
        if not isinstance(size, int) or (sizes and not isinstance(sizes[k], int)):
            raise Refusal(f"{node.name} has a symbolic size; supported: fixed height and width")
        factor = factors[k] if factors else None
        result = int(sizes[k]) if sizes else math.floor(size * float(factor or 1.0))
        scale = float(factor) if factor and not aligned else result / size
        axes.append(Axis(k + 2, size, result, scale))
    sampling = Sampling(
        mode,
        "align_corners" if aligned else "asymmetric" if mode == "nearest" else "half_pixel",
        "floor",
        -0.5 if is_antialiased else -0.75,
        is_antialiased,
        antialias=is_antialiased,
    )
    return importer.block_builder.normalize(
        emit_resize(importer.block_builder, data, axes, sampling)
    )


def convert_grid_sample(node: Any, importer: Any) -> relax.Expr:
    """grid_sampler_2d(x, grid [n, height, width, 2]) -> R.image.grid_sample, whose grid has the
    coordinates on axis 1.
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
    """native_group_norm(x, weight, bias) -> R.nn.group_norm; none are ones and zeros."""
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


def convert_cumsum(node: Any, importer: Any) -> relax.Expr:
    """cumsum(x, dim, dtype) -> R.cumsum in the result's dtype: integers are summed as int64."""
    operand, dim = read_arguments(node, "self", "dim")
    data, emit = importer.env[operand], importer.block_builder.emit
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    if dtype != str(data.ty.dtype):
        data = emit(relax.op.astype(data, dtype))
    return emit(relax.op.cumsum(data, int(dim)))


def convert_avg_pool(node: Any, importer: Any) -> relax.Expr:
    """avg_pool2d as TVM's frontend has it, which takes no notice of a divisor of its own.

    Raises:
        Refusal: a divisor_override.
    """
    (divisor,) = read_arguments(node, "divisor_override")
    if divisor is not None:
        raise Refusal(f"{node.name} has divisor_override {divisor}; supported: None")
    return importer._avg_pool2d(node)


def convert_index(node: Any, importer: Any) -> relax.Expr:
    """x[i], x[:, i, j], x[i, :, j] -> R.take or R.index_tensor on the indexed axes, moved in front
    and, where they are neighbours, back. Negative indices count from the end.

    Raises:
        Refusal: an index is a mask.
    """
    operand, indices = read_arguments(node, "self", "indices")
    data, emit = importer.env[operand], importer.block_builder.emit
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [importer.env[indices[axis]] for axis in axes]
    if any(str(index.ty.dtype) == "bool" for index in given):
        raise Refusal(f"{node.name} selects by a mask, so that its size depends on the data")
    if len(given) == 1:
        return emit(relax.op.take(data, given[0], axis=axes[0]))
    given = [
        count_from_start(emit, index, data.ty.shape.values[axis])
        for axis, index in zip(axes, given, strict=True)
    ]
    rank, first = data.ty.ndim, axes[0]
    rest = [axis for axis in range(rank) if axis not in axes]
    moved = data if rest == [*range(len(axes), rank)] else permute(emit, data, [*axes, *rest])
    value = emit(relax.op.index_tensor(moved, given))
    if first == 0 or axes != [*range(first, first + len(axes))]:
        return value
    points = value.ty.ndim - len(rest)  # axes of the indices together
    order = [*range(points, points + first), *range(points), *range(points + first, value.ty.ndim)]
    return permute(emit, value, order)


def permute(emit: Callable[[relax.Expr], relax.Var], data: relax.Expr, order: list[int]):
    return emit(relax.op.permute_dims(data, order))


def count_from_start(
    emit: Callable[[relax.Expr], relax.Var], index: relax.Expr, size: Any
) -> relax.Expr:
    """An index, plus the size of its axis where it is negative.

    Raises:
        Refusal: the size is symbolic.
    """
    dtype, count = str(index.ty.dtype), static_size(size)
    if count is None:
        raise Refusal(f"an axis of size {size} has an index of several; supported: fixed sizes")
    shifted = emit(relax.op.add(index, relax.const(count, dtype)))
    return emit(relax.op.where(emit(relax.op.less(index, relax.const(0, dtype))), shifted, index))


def convert_max_pool(node: Any, importer: Any) -> relax.Expr:
    """max_poolNd_with_indices as TVM's frontend has it, whose indices are zeros.

    Raises:
        Refusal: the indices are used.
    """
    if any(user.args[1] == 1 and user.users for user in node.users):
        raise Refusal(f"{node.name} is asked for indices; supported: the maxima alone")
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    return getattr(importer, f"_{name}")(node)


def convert_clamp(node: Any, importer: Any) -> relax.Expr:
    """clamp(x, low, high) -> R.clip; of integers R.maximum or R.minimum where one bound is missing,
    which TVM's frontend makes an infinity.
    """
    operand, low, high = read_arguments(node, "self", "min", "max")
    data, emit = importer.env[operand], importer.block_builder.emit
    dtype = str(data.ty.dtype)
    if "int" not in dtype or (low is not None and high is not None):
        return importer._clamp(node)
    bound = relax.const(int(low if high is None else high), dtype)
    return emit((relax.op.minimum if low is None else relax.op.maximum)(data, bound))


#: operator of PyTorch -> (mode of Resize, antialias)
UPSAMPLES = {
    "upsample_nearest2d.vec": ("nearest", False),
    "upsample_bilinear2d.vec": ("linear", False),
    "upsample_bicubic2d.vec": ("cubic", False),
    "_upsample_bilinear2d_aa.default": ("linear", True),
    "_upsample_bicubic2d_aa.default": ("cubic", True),
}

#: name of an operator, as TVM's frontend calls it -> its conversion
OPERATORS: dict[str, Convert] = {
    "amax.default": convert_extreme,
    "amin.default": convert_extreme,
    "max.dim": convert_extreme_of_axis,
    "min.dim": convert_extreme_of_axis,
    "elu.default": convert_elu,
    "adaptive_max_pool2d.default": convert_adaptive_max_pool,
    "grid_sampler_2d.default": convert_grid_sample,
    "native_group_norm.default": convert_group_norm,
    "cumsum.default": convert_cumsum,
    "avg_pool2d.default": convert_avg_pool,
    "index.Tensor": convert_index,
    **{f"max_pool{rank}d_with_indices.default": convert_max_pool for rank in (1, 2, 3)},
    "clamp.default": convert_clamp,
    **dict.fromkeys(UPSAMPLES, convert_upsample),
}
