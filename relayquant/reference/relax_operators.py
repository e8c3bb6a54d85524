"""Numpy forms of the usual Relax operators, as rows of one table for the interpreter.

A row maps the operator's name to a function of (arguments, attributes): arguments are arrays,
tuples of arrays, tuples of ints (shapes) or numbers, as the operator takes them. The function may
give NotImplemented for attributes it does not cover; the interpreter then compiles the operator.
Integer operators keep the dtype, as in TVM; the interpreter casts a result to the dtype TVM infers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.errors import DataError
from relayquant.reference.convolution import (
    Window,
    convolve,
    convolve_transposed,
    count_window_values,
    expand_per_axis,
    get_spatial_letters,
    permute_layout,
    pool_windows,
)
from relayquant.reference.unary import RELAX_UNARY

Array = np.ndarray[Any, Any]
OperatorFunction = Callable[[list[Any], Any], Any]


# Attributes ------------------------------------------------------------------------------------


def to_ints(values: Any) -> tuple[int, ...]:
    """An array of integer attributes as Python ints."""
    return tuple(int(value) for value in values)


def to_axes(values: Any) -> tuple[int, ...] | None:
    """An axis attribute: None (all axes), one integer or an array of them."""
    if values is None:
        return None
    return to_ints(values) if hasattr(values, "__len__") else (int(values),)


def to_dtype(value: Any, default: Any) -> str:
    """A dtype attribute, or the dtype of an array where it is empty."""
    text = "" if value is None else str(value)
    return text if text not in ("", "void") else np.dtype(default).name


# Elementwise -----------------------------------------------------------------------------------


def divide(args: list[Any], attrs: Any) -> Any:
    """True division of floats; integers truncate toward zero, as in C."""
    left, right = args
    if np.asarray(left).dtype.kind in "iu":
        return truncate_divide(left, right)
    return np.divide(left, right)


def truncate_divide(left: Any, right: Any) -> Any:
    """Integer quotient rounded toward zero."""
    quotient = np.floor_divide(left, right)
    inexact = quotient * right != left
    return quotient + (inexact & ((np.asarray(left) < 0) != (np.asarray(right) < 0)))


def truncated_mod(args: list[Any], attrs: Any) -> Any:
    """Remainder with the sign of the dividend, as in C."""
    return np.fmod(*args)


def clip(args: list[Any], attrs: Any) -> Any:
    """Limits are floats; for integer data they are truncated and held within its dtype."""
    data, low, high = args
    if data.dtype.kind in "iu":
        info = np.iinfo(data.dtype)
        low, high = (int(min(max(limit, info.min), info.max)) for limit in (low, high))
    return np.minimum(np.maximum(data, data.dtype.type(low)), data.dtype.type(high))


def prelu(args: list[Any], attrs: Any) -> Any:
    data, slope = args
    shape = [1] * data.ndim
    shape[int(attrs.axis)] = -1
    return np.where(data > 0, data, data * slope.reshape(shape))


def softmax(args: list[Any], attrs: Any) -> Any:
    (x,) = args
    exponential = np.exp(x - x.max(axis=int(attrs.axis), keepdims=True))
    return exponential / exponential.sum(axis=int(attrs.axis), keepdims=True)


def log_softmax(args: list[Any], attrs: Any) -> Any:
    (x,) = args
    shifted = x - x.max(axis=int(attrs.axis), keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=int(attrs.axis), keepdims=True))


# Convolution, pooling, products ----------------------------------------------------------------


def widen(array: Array) -> Array:
    """The operands of a product: floats as float32 at least, integers in exact float64."""
    if array.dtype.kind in "iu":
        return array.astype("float64")
    return array.astype("float32") if array.dtype.itemsize < 4 else array


def finish_product(result: Array, operand: Array, out_dtype: Any) -> Array:
    """A product or sum of products in the dtype TVM gives it; integers wrap."""
    dtype = to_dtype(out_dtype, operand.dtype)
    return (result.astype("int64") if operand.dtype.kind in "iu" else result).astype(dtype)


def convolution(args: list[Any], attrs: Any) -> Any:
    data, kernel = args
    result = convolve(
        widen(data),
        widen(kernel),
        strides=to_ints(attrs.strides),
        padding=to_ints(attrs.padding),
        dilation=to_ints(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
    )
    return finish_product(result, data, attrs.out_dtype)


def transposed_convolution(args: list[Any], attrs: Any) -> Any:
    data, kernel = args
    result = convolve_transposed(
        widen(data),
        widen(kernel),
        strides=to_ints(attrs.strides),
        padding=to_ints(attrs.padding),
        output_padding=to_ints(attrs.output_padding),
        dilation=to_ints(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
    )
    return finish_product(result, data, attrs.out_dtype)


def matmul(args: list[Any], attrs: Any) -> Any:
    left, right = args
    return finish_product(np.matmul(widen(left), widen(right)), left, attrs.out_dtype)


def get_window(attrs: Any) -> Window:
    """The window of a pool's attributes."""
    return Window(
        to_ints(attrs.pool_size),
        to_ints(attrs.strides),
        to_ints(attrs.dilation),
        to_ints(attrs.padding),
        bool(attrs.ceil_mode),
        attrs.layout,
    )


def to_out_layout(channels_last: Array, attrs: Any) -> Array:
    """A pool's result, axes N, spatial, C, in the layout of the operator's output."""
    layout = attrs.out_layout or attrs.layout
    return permute_layout(channels_last, "N" + get_spatial_letters(layout) + "C", layout)


def max_pool(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    lowest = np.iinfo(data.dtype).min if data.dtype.kind in "iu" else -np.inf
    taps = pool_windows(data, get_window(attrs), lowest)
    result = next(taps)
    for tap in taps:
        result = np.maximum(result, tap)
    return to_out_layout(result, attrs)


def avg_pool(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    window = get_window(attrs)
    total = np.zeros((), data.dtype)
    for tap in pool_windows(data, window, 0):
        total = total + tap
    count = count_window_values(data.shape, window, bool(attrs.count_include_pad))
    if data.dtype.kind in "iu":
        return to_out_layout(truncate_divide(total.astype("int64"), count), attrs)
    return to_out_layout(total / count.astype(data.dtype), attrs)


def adaptive_avg_pool(args: list[Any], attrs: Any) -> Any:
    """Output i averages from floor(i * size / out) to ceil((i + 1) * size / out)."""
    (data,) = args
    letters = get_spatial_letters(attrs.layout)
    result = permute_layout(data, attrs.layout, "N" + letters + "C")
    sizes = result.shape[1:-1]
    outputs = (
        expand_per_axis(to_ints(attrs.output_size), len(letters)) if attrs.output_size else sizes
    )
    for axis, (size, out) in enumerate(zip(sizes, outputs, strict=True), start=1):
        parts = []
        for i in range(out):
            window = slice(i * size // out, -(-(i + 1) * size // out))
            at = (slice(None),) * axis + (window,)
            parts.append(result[at].mean(axis=axis, keepdims=True))
        result = np.concatenate(parts, axis=axis)
    return to_out_layout(result, attrs)


def pad(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    widths = np.reshape(to_ints(attrs.pad_width), (-1, 2)).tolist()
    mode = str(attrs.pad_mode)
    if mode == "constant":
        return np.pad(data, widths, constant_values=data.dtype.type(attrs.pad_value))
    numpy_mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}.get(mode)
    return NotImplemented if numpy_mode is None else np.pad(data, widths, mode=numpy_mode)


# Normalization ---------------------------------------------------------------------------------


def normalize(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """(x - mean) / sqrt(variance + epsilon) over `axes`, in float32 at least."""
    x = widen(x)
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = np.mean(centred * centred, axis=axes, keepdims=True)
    return centred / np.sqrt(variance + x.dtype.type(epsilon))


def align(values: Array, axes: Sequence[int], ndim: int) -> Array:
    """Parameters of the given axes, in their order, shaped to broadcast against `ndim` axes."""
    positions = [axis % ndim for axis in axes]
    values = np.transpose(values, np.argsort(positions))
    shape = [1] * ndim
    for position, size in zip(sorted(positions), values.shape, strict=True):
        shape[position] = size
    return values.reshape(shape)


def apply_affine(x: Array, args: list[Any], axes: Sequence[int], attrs: Any) -> Array:
    """x * gamma + beta, with gamma and beta the second and third argument along `axes`."""
    if attrs.scale:
        x = x * align(args[1], axes, x.ndim)
    if attrs.center:
        x = x + align(args[2], axes, x.ndim)
    return x


def layer_norm(args: list[Any], attrs: Any) -> Any:
    axes = to_ints(attrs.axes)
    return apply_affine(normalize(args[0], axes, attrs.epsilon), args, axes, attrs)


def instance_norm(args: list[Any], attrs: Any) -> Any:
    normal = normalize(args[0], to_ints(attrs.axes), attrs.epsilon)
    return apply_affine(normal, args, (int(attrs.channel_axis),), attrs)


def group_norm(args: list[Any], attrs: Any) -> Any:
    data, groups, axis = args[0], int(attrs.num_groups), int(attrs.channel_axis) % args[0].ndim
    split = (*data.shape[:axis], groups, data.shape[axis] // groups, *data.shape[axis + 1 :])
    axes = [a % data.ndim for a in to_ints(attrs.axes)]
    # In the split array axes after the channel axis move by one; a group's channels are one of
    # them.
    moved = tuple(sorted({axis + 1, *(a + (a > axis) for a in axes if a != axis)}))
    normal = normalize(data.reshape(split), moved, attrs.epsilon).reshape(data.shape)
    return apply_affine(normal, args, (axis,), attrs)


def rms_norm(args: list[Any], attrs: Any) -> Any:
    data, weight = args[:2]
    axes = to_ints(attrs.axes)
    x = widen(data)
    square = np.mean(x * x, axis=axes, keepdims=True)
    return x / np.sqrt(square + x.dtype.type(attrs.epsilon)) * align(weight, axes, x.ndim)


def batch_norm(args: list[Any], attrs: Any) -> Any:
    """Inference only: (result, moving mean, moving variance)."""
    if attrs.training:
        return NotImplemented
    data, _, _, mean, variance = args
    axes = (int(attrs.axis),)
    centred = widen(data) - align(mean, axes, data.ndim)
    normal = centred / np.sqrt(align(variance, axes, data.ndim) + np.float32(attrs.epsilon))
    return apply_affine(normal, args, axes, attrs), mean, variance


# Reductions ------------------------------------------------------------------------------------


def reduction(function: Callable[..., Any]) -> OperatorFunction:
    """A row that reduces `axis` by a numpy function which keeps the dtype."""

    def reduce(args: list[Any], attrs: Any) -> Any:
        (data,) = args
        extra = {"dtype": data.dtype} if function in (np.sum, np.prod) else {}
        return function(data, axis=to_axes(attrs.axis), keepdims=bool(attrs.keepdims), **extra)

    return reduce


def mean(args: list[Any], attrs: Any) -> Any:
    """Of integers: the wrapping sum, divided toward zero."""
    (data,) = args
    axes, keepdims = to_axes(attrs.axis), bool(attrs.keepdims)
    if data.dtype.kind not in "iu":
        return np.mean(data, axis=axes, keepdims=keepdims)
    total = np.sum(data, axis=axes, keepdims=keepdims, dtype=data.dtype)
    count = data.size // max(np.asarray(total).size, 1)
    return truncate_divide(np.asarray(total).astype("int64"), np.int64(count))


def variance(args: list[Any], attrs: Any) -> Any:
    """Population variance of floats."""
    (data,) = args
    if data.dtype.kind in "iu":
        return NotImplemented
    return np.var(data, axis=to_axes(attrs.axis), keepdims=bool(attrs.keepdims))


def standard_deviation(args: list[Any], attrs: Any) -> Any:
    result = variance(args, attrs)
    return result if result is NotImplemented else np.sqrt(result)


def arg_reduction(function: Callable[..., Any]) -> OperatorFunction:
    """argmax or argmin: the first index that attains it."""

    def reduce(args: list[Any], attrs: Any) -> Any:
        axis = None if attrs.axis is None else int(attrs.axis)
        return function(args[0], axis=axis, keepdims=bool(attrs.keepdims))

    return reduce


def cumulative(function: Callable[..., Any]) -> OperatorFunction:
    """cumsum or cumprod in the dtype of the data or of the attribute."""

    def scan(args: list[Any], attrs: Any) -> Any:
        if attrs.exclusive:
            return NotImplemented
        axis = None if attrs.axis is None else int(attrs.axis)
        return function(args[0], axis=axis, dtype=to_dtype(attrs.dtype, args[0].dtype))

    return scan


# Shape -----------------------------------------------------------------------------------------


def squeeze(args: list[Any], attrs: Any) -> Any:
    """Axes whose length is not 1 stay, as in TVM."""
    (data,) = args
    axes = to_axes(attrs.axis)
    chosen = range(data.ndim) if axes is None else (axis % data.ndim for axis in axes)
    return np.squeeze(data, axis=tuple(axis for axis in chosen if data.shape[axis] == 1))


def concat(args: list[Any], attrs: Any) -> Any:
    return np.concatenate(args[0], axis=0 if attrs.axis is None else int(attrs.axis))


def split(args: list[Any], attrs: Any) -> Any:
    """Sections of ceil(length / count), the last one shorter, or cut at indices; a single one is no
    tuple, as TVM infers it.
    """
    (data,) = args
    axis, where = int(attrs.axis), attrs.indices_or_sections
    if hasattr(where, "__len__"):
        cuts = list(to_ints(where))
    else:
        step = -(-data.shape[axis] // int(where))
        cuts = [i * step for i in range(1, int(where))]
    return tuple(np.split(data, cuts, axis=axis)) if cuts else data


def strided_slice(args: list[Any], attrs: Any) -> Any:
    data, axes, begin, end, *rest = args
    strides = rest[0] if rest else (1,) * len(axes)
    at: list[Any] = [slice(None)] * data.ndim
    for axis, first, last, step in zip(axes, begin, end, strides, strict=True):
        # A negative step that ends before index 0 ends at "nothing", which a slice writes None.
        stop = None if step < 0 and last < -data.shape[axis] else int(last)
        at[int(axis)] = slice(int(first), stop, int(step))
    return data[tuple(at)]


def take(args: list[Any], attrs: Any) -> Any:
    data, indices = args
    axis = None if attrs.axis is None else int(attrs.axis)
    mode = {"wrap": "wrap", "clip": "clip"}.get(str(attrs.mode), "raise")
    indices, length = np.asarray(indices), data.size if axis is None else data.shape[axis]
    if mode == "raise" and ((indices < -length) | (indices >= length)).any():
        raise DataError(
            f"indices {indices.min()}..{indices.max()} do not fit an axis of length {length}; "
            f"allowed: 0..{length - 1}, or mode 'clip' or 'wrap'."
        )
    return np.take(data, indices, axis=axis, mode=mode)


def reshape(args: list[Any], attrs: Any) -> Any:
    data, shape = args
    return np.reshape(data, shape)


def flatten(args: list[Any], attrs: Any) -> Any:
    return np.reshape(args[0], -1)


def batch_flatten(args: list[Any], attrs: Any) -> Any:
    return np.reshape(args[0], (args[0].shape[0], -1))


def expand_dims(args: list[Any], attrs: Any) -> Any:
    return np.expand_dims(args[0], to_ints(attrs.axis))


def permute_dims(args: list[Any], attrs: Any) -> Any:
    return np.transpose(args[0], None if attrs.axes is None else to_ints(attrs.axes))


def collapse_sum_to(args: list[Any], attrs: Any) -> Any:
    """The sum that undoes broadcasting to `data` from the given shape."""
    data, shape = args
    extra = data.ndim - len(shape)
    axes = [i for i in range(data.ndim) if i < extra or shape[i - extra] != data.shape[i]]
    return np.reshape(data.sum(axis=tuple(axes), dtype=data.dtype), shape)


def tile(args: list[Any], attrs: Any) -> Any:
    return np.tile(args[0], to_ints(attrs.repeats))


def repeat(args: list[Any], attrs: Any) -> Any:
    axis = None if attrs.axis is None else int(attrs.axis)
    return np.repeat(args[0], int(attrs.repeats), axis=axis)


def gather_nd(args: list[Any], attrs: Any) -> Any:
    data, indices = args
    if int(attrs.batch_dims):
        return NotImplemented
    return data[tuple(np.moveaxis(indices, -1, 0))]


def one_hot(args: list[Any], attrs: Any) -> Any:
    indices, on, off = args
    axis = int(attrs.axis) % (indices.ndim + 1)
    hot = np.expand_dims(indices, axis) == align(
        np.arange(int(attrs.depth)), (axis,), indices.ndim + 1
    )
    return np.where(hot, on, off)


def pixel_shuffle(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    r = int(attrs.upscale_factor)
    *batch, channels, height, width = data.shape
    split_shape = (*batch, channels // (r * r), r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    moved = data.reshape(split_shape).transpose(order)
    return moved.reshape(*batch, channels // (r * r), height * r, width * r)


# Creation --------------------------------------------------------------------------------------


def full(args: list[Any], attrs: Any) -> Any:
    shape, value = args
    return np.full(shape, value, to_dtype(attrs.dtype, np.asarray(value).dtype))


def full_like(args: list[Any], attrs: Any) -> Any:
    data, value = args
    return np.full(data.shape, value, to_dtype(attrs.dtype, data.dtype))


def filled(value: int) -> OperatorFunction:
    """zeros or ones of a shape."""
    return lambda args, attrs: np.full(args[0], value, to_dtype(attrs.dtype, "float32"))


def filled_like(value: int) -> OperatorFunction:
    """zeros_like or ones_like."""
    return lambda args, attrs: np.full(args[0].shape, value, to_dtype(attrs.dtype, args[0].dtype))


def arange(args: list[Any], attrs: Any) -> Any:
    return np.arange(*args, dtype=to_dtype(attrs.dtype, "int64"))


def astype(args: list[Any], attrs: Any) -> Any:
    return args[0].astype(str(attrs.dtype))


def quantize(args: list[Any], attrs: Any) -> Any:
    """relax.quantize: clip(round_half_even(x / s) + z) in float32."""
    data, scale, zero_point = args
    axes = (int(attrs.axis),)
    s, z = (align(p, axes, data.ndim) if p.ndim else p for p in (scale, zero_point))
    rounded = np.rint(widen(data) / s.astype("float32")) + z.astype("float32")
    dtype = np.dtype(str(attrs.out_dtype))
    if dtype.kind not in "iu":
        return NotImplemented
    info = np.iinfo(dtype)
    return np.clip(rounded, info.min, info.max).astype(dtype)


def dequantize(args: list[Any], attrs: Any) -> Any:
    """relax.dequantize: float(int32(q) - z) * s."""
    data, scale, zero_point = args
    if data.dtype.kind not in "iu":
        return NotImplemented
    axes = (int(attrs.axis),)
    s, z = (align(p, axes, data.ndim) if p.ndim else p for p in (scale, zero_point))
    return (data.astype("int32") - z.astype("int32")).astype("float32") * s.astype("float32")


def attention(args: list[Any], attrs: Any) -> Any:
    """softmax(q k^T * scale) v with q, k, v of shape (batch, sequence, heads, size)."""
    if attrs.causal_mask is not None or attrs.window_size is not None:
        return NotImplemented
    q, k, v = (widen(operand).transpose(0, 2, 1, 3) for operand in args[:3])
    scale = q.shape[-1] ** -0.5 if attrs.scale is None else float(attrs.scale)
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(scale)
    if len(args) > 3:
        scores = scores + args[3]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3)


def plain(function: Callable[..., Any]) -> OperatorFunction:
    """A row that applies a numpy function to the arguments and needs no attributes."""
    return lambda args, attrs: function(*args)


#: Name of the operator without "relax." -> its numpy form.
OPERATORS: dict[str, OperatorFunction] = {
    **{row.relax: row.evaluate for row in RELAX_UNARY.values()},
    # arithmetic
    "add": plain(np.add),
    "atan2": plain(np.arctan2),
    "bitwise_and": plain(np.bitwise_and),
    "bitwise_or": plain(np.bitwise_or),
    "bitwise_xor": plain(np.bitwise_xor),
    "clip": clip,
    "divide": divide,
    "equal": plain(np.equal),
    "ewise_fma": plain(lambda x, y, z: x * y + z),
    "floor_divide": plain(np.floor_divide),
    "floor_mod": plain(np.mod),
    "greater": plain(np.greater),
    "greater_equal": plain(np.greater_equal),
    "left_shift": plain(np.left_shift),
    "less": plain(np.less),
    "less_equal": plain(np.less_equal),
    "log_add_exp": plain(np.logaddexp),
    "logical_and": plain(np.logical_and),
    "logical_or": plain(np.logical_or),
    "logical_xor": plain(np.logical_xor),
    "maximum": plain(np.maximum),
    "minimum": plain(np.minimum),
    "mod": truncated_mod,
    "multiply": plain(np.multiply),
    "not_equal": plain(np.not_equal),
    "power": plain(np.power),
    "right_shift": plain(np.right_shift),
    "subtract": plain(np.subtract),
    "where": plain(np.where),
    # neural network
    "dequantize": dequantize,
    "quantize": quantize,
    "nn.adaptive_avg_pool1d": adaptive_avg_pool,
    "nn.adaptive_avg_pool2d": adaptive_avg_pool,
    "nn.attention": attention,
    "nn.attention_bias": attention,
    "nn.avg_pool1d": avg_pool,
    "nn.avg_pool2d": avg_pool,
    "nn.avg_pool3d": avg_pool,
    "nn.batch_flatten": batch_flatten,
    "nn.batch_norm": batch_norm,
    "nn.conv1d": convolution,
    "nn.conv1d_transpose": transposed_convolution,
    "nn.conv2d": convolution,
    "nn.conv2d_transpose": transposed_convolution,
    "nn.conv3d": convolution,
    "nn.dropout": plain(lambda x: (x, np.ones_like(x))),
    "nn.group_norm": group_norm,
    "nn.instance_norm": instance_norm,
    "nn.layer_norm": layer_norm,
    "nn.leakyrelu": lambda args, attrs: np.where(args[0] > 0, args[0], args[0] * attrs.alpha),
    "nn.log_softmax": log_softmax,
    "nn.max_pool1d": max_pool,
    "nn.max_pool2d": max_pool,
    "nn.max_pool3d": max_pool,
    "nn.pad": pad,
    "nn.pixel_shuffle": pixel_shuffle,
    "nn.prelu": prelu,
    "nn.rms_norm": rms_norm,
    "nn.softmax": softmax,
    "matmul": matmul,
    # reductions
    "argmax": arg_reduction(np.argmax),
    "argmin": arg_reduction(np.argmin),
    "cumprod": cumulative(np.cumprod),
    "cumsum": cumulative(np.cumsum),
    "max": reduction(np.max),
    "mean": mean,
    "min": reduction(np.min),
    "prod": reduction(np.prod),
    "std": standard_deviation,
    "sum": reduction(np.sum),
    "variance": variance,
    # shape and indexing
    "astype": astype,
    "broadcast_to": plain(np.broadcast_to),
    "collapse_sum_to": collapse_sum_to,
    "concat": concat,
    "einsum": lambda args, attrs: np.einsum(str(attrs.subscripts), *args[0]),
    "expand_dims": expand_dims,
    "flatten": flatten,
    "flip": lambda args, attrs: np.flip(args[0], int(attrs.axis)),
    "gather_elements": lambda args, attrs: np.take_along_axis(args[0], args[1], int(attrs.axis)),
    "gather_nd": gather_nd,
    "one_hot": one_hot,
    "permute_dims": permute_dims,
    "repeat": repeat,
    "reshape": reshape,
    "shape_of": plain(lambda x: tuple(int(size) for size in x.shape)),
    "shape_to_tensor": plain(lambda shape: np.asarray(shape, "int64")),
    "split": split,
    "squeeze": squeeze,
    "stack": lambda args, attrs: np.stack(args[0], axis=int(attrs.axis)),
    "strided_slice": strided_slice,
    "take": take,
    "tensor_to_shape": plain(lambda x: tuple(int(size) for size in x)),
    "tile": tile,
    "tril": plain(np.tril),
    "triu": plain(np.triu),
    # creation
    "arange": arange,
    "eye": lambda args, attrs: np.eye(*args, dtype=to_dtype(attrs.dtype, "float32")),
    "full": full,
    "full_like": full_like,
    "ones": filled(1),
    "ones_like": filled_like(1),
    "zeros": filled(0),
    "zeros_like": filled_like(0),
}
