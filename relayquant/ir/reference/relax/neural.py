"""Numpy forms of Relax's operators of neural networks: products, pooling, normalization, attention.

See `tensors` for what a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.ir.reference.convolution import (
    Window,
    convolve,
    convolve_transposed,
    count_window_values,
    expand_per_axis,
    get_spatial_letters,
    permute_layout,
    pool_windows,
)
from relayquant.ir.reference.relax.attributes import (
    Array,
    OperatorFunction,
    align,
    plain,
    to_dtype,
    to_ints,
    widen,
    widen_factors,
)
from relayquant.ir.reference.relax.tensors import truncate_divide
from relayquant.ir.reference.row_arithmetic import mean_along, softmax_along

# Activations -----------------------------------------------------------------------------------


def prelu(args: list[Any], attrs: Any) -> Any:
    data, slope = args
    shape = [1] * data.ndim
    shape[int(attrs.axis)] = -1
    return np.where(data > 0, data, data * slope.reshape(shape))


def softmax(args: list[Any], attrs: Any) -> Any:
    (x,) = args
    if x.dtype == np.float32:
        return softmax_along(x, int(attrs.axis))
    exponential = np.exp(x - x.max(axis=int(attrs.axis), keepdims=True))
    return exponential / exponential.sum(axis=int(attrs.axis), keepdims=True)


def log_softmax(args: list[Any], attrs: Any) -> Any:
    (x,) = args
    shifted = x - x.max(axis=int(attrs.axis), keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=int(attrs.axis), keepdims=True))


# Convolution, pooling, products ----------------------------------------------------------------


def finish_product(result: Array, operand: Array, out_dtype: Any) -> Array:
    """A product or sum of products in the dtype TVM gives it; integers wrap."""
    dtype = to_dtype(out_dtype, operand.dtype)
    return (result.astype("int64") if operand.dtype.kind in "iu" else result).astype(dtype)


def convolution(convolve: Callable[..., Array], *more: str) -> OperatorFunction:
    """A row that sums products over windows; `more` are attributes that name an extent per axis."""

    def compute(args: list[Any], attrs: Any) -> Any:
        data, kernel = widen_factors(*args)
        extents = ("strides", "padding", "dilation", *more)
        result = convolve(
            data,
            kernel,
            **{name: to_ints(getattr(attrs, name)) for name in extents},
            groups=int(attrs.groups),
            data_layout=attrs.data_layout,
            kernel_layout=attrs.kernel_layout,
            out_layout=attrs.out_layout,
        )
        return finish_product(result, args[0], attrs.out_dtype)

    return compute


def matmul(args: list[Any], attrs: Any) -> Any:
    return finish_product(np.matmul(*widen_factors(*args)), args[0], attrs.out_dtype)


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


# Normalization ---------------------------------------------------------------------------------


def normalize(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """(x - mean) * (1 / sqrt(variance + epsilon)) over `axes`, in float32 at least."""
    x = widen(x)
    centred = x - mean_along(x, axes)
    variance = mean_along(centred * centred, axes)
    return centred * (1 / np.sqrt(variance + x.dtype.type(epsilon)))


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
    root = np.sqrt(mean_along(x * x, axes) + x.dtype.type(attrs.epsilon))
    return x * (1 / root) * align(weight, axes, x.ndim)


def batch_norm(args: list[Any], attrs: Any) -> Any:
    """Inference only: (result, moving mean, moving variance)."""
    if attrs.training:
        return NotImplemented
    data, _, _, mean, variance = args
    axes = (int(attrs.axis),)
    centred = widen(data) - align(mean, axes, data.ndim)
    normal = centred / np.sqrt(align(variance, axes, data.ndim) + np.float32(attrs.epsilon))
    return apply_affine(normal, args, axes, attrs), mean, variance


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


def pixel_shuffle(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    r = int(attrs.upscale_factor)
    *batch, channels, height, width = data.shape
    split_shape = (*batch, channels // (r * r), r, r, height, width)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    moved = data.reshape(split_shape).transpose(order)
    return moved.reshape(*batch, channels // (r * r), height * r, width * r)


#: Name of the operator without "relax." -> its numpy form.
OPERATORS: dict[str, OperatorFunction] = {
    "nn.adaptive_avg_pool1d": adaptive_avg_pool,
    "nn.adaptive_avg_pool2d": adaptive_avg_pool,
    "nn.attention": attention,
    "nn.attention_bias": attention,
    "nn.avg_pool1d": avg_pool,
    "nn.avg_pool2d": avg_pool,
    "nn.avg_pool3d": avg_pool,
    "nn.batch_norm": batch_norm,
    "nn.conv1d": convolution(convolve),
    "nn.conv1d_transpose": convolution(convolve_transposed, "output_padding"),
    "nn.conv2d": convolution(convolve),
    "nn.conv2d_transpose": convolution(convolve_transposed, "output_padding"),
    "nn.conv3d_transpose": convolution(convolve_transposed, "output_padding"),
    "nn.conv3d": convolution(convolve),
    "nn.dropout": plain(lambda x: (x, np.ones_like(x))),
    "nn.group_norm": group_norm,
    "nn.instance_norm": instance_norm,
    "nn.layer_norm": layer_norm,
    "nn.leakyrelu": lambda args, attrs: np.where(args[0] > 0, args[0], args[0] * attrs.alpha),
    "nn.log_softmax": log_softmax,
    "nn.max_pool1d": max_pool,
    "nn.max_pool2d": max_pool,
    "nn.max_pool3d": max_pool,
    "nn.pixel_shuffle": pixel_shuffle,
    "nn.prelu": prelu,
    "nn.rms_norm": rms_norm,
    "nn.softmax": softmax,
    "matmul": matmul,
}
