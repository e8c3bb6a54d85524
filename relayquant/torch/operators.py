"""Torch forms of Relax operators, as rows of one table: what `program` interprets modules with.

As `reference.relax`, and with the same arguments: tensors, tuples of tensors, tuples of
ints (shapes) or numbers, and the attributes by name. Gradients flow through every row that has any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from relayquant.errors import ModelError
from relayquant.ir.reference.convolution import (
    Window,
    count_window_values,
    expand_per_axis,
    get_spatial_letters,
    split_padding,
)
from relayquant.ir.reference.relax.attributes import to_axes, to_ints
from relayquant.ir.reference.unary import RELAX_UNARY, Unary

Tensor = torch.Tensor
TorchFunction = Callable[[list[Any], Any], Any]


def find_dtype(name: Any, default: torch.dtype) -> torch.dtype:
    """A dtype attribute; `default` where it is empty."""
    text = "" if name is None else str(name)
    return default if text in ("", "void") else getattr(torch, text)


def plain(function: Callable[..., Any]) -> TorchFunction:
    """A row that applies a function to the arguments and needs no attributes."""
    return lambda args, attrs: function(*args)


def as_tensors(args: Iterable[Any]) -> list[Tensor]:
    """Numbers as tensors among tensors."""
    return [arg if isinstance(arg, Tensor) else torch.as_tensor(arg) for arg in args]


# Elementwise -----------------------------------------------------------------------------------


def make_unary(row: Unary) -> TorchFunction | None:
    """The torch function of a row's name; None where torch has none."""
    if row.name == "gelu_tanh":
        return lambda args, attrs: F.gelu(args[0], approximate="tanh")
    function = getattr(torch, row.name, None) or getattr(F, row.name, None)
    if function is None:
        return None
    return lambda args, attrs: function(
        args[0], **{name: getattr(attrs, name) for name in row.attributes}
    )


def binary(function: Callable[[Tensor, Tensor], Tensor]) -> TorchFunction:
    """A row of a function of two tensors, either of which may be a number."""
    return lambda args, attrs: function(*as_tensors(args))


def divide(left: Tensor, right: Tensor) -> Tensor:
    """Integers truncate toward zero, as in C."""
    is_float = left.is_floating_point() or right.is_floating_point()
    return torch.div(left, right) if is_float else torch.div(left, right, rounding_mode="trunc")


def clip(args: list[Any], attrs: Any) -> Tensor:
    """Of floats hardtanh, whose gradient is one pass; that of clamp is three comparisons. At the
    bounds themselves it is 0.
    """
    data, low, high = args
    if data.is_floating_point() and low <= high:
        return F.hardtanh(data, float(low), float(high))
    return torch.clamp(data, low, high)


def prelu(args: list[Any], attrs: Any) -> Tensor:
    data, slope = args
    return torch.where(data > 0, data, data * align(slope, [int(attrs.axis)], data.ndim))


# Convolution, pooling, products ----------------------------------------------------------------


def permute(data: Tensor, source: str, target: str) -> Tensor:
    """`data` with its axes reordered from layout `source` to `target`."""
    return data if source == target else data.permute([source.index(letter) for letter in target])


def permute_weight(weight: Tensor, source: str, target: str) -> Tensor:
    """`permute`, in memory as well: some of torch's convolutions give the weight a gradient in no
    other order.
    """
    return permute(weight, source, target).contiguous()


def pad_edges(data: Tensor, edges: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """`data` with (before, after) values added to each of its last axes."""
    widths = [width for edge in reversed(edges) for width in edge]
    return F.pad(data, widths, value=value) if any(widths) else data


def pad_data(
    data: Tensor, edges: Sequence[tuple[int, int]]
) -> tuple[Tensor, list[int] | tuple[int, ...]]:
    """(data, padding) for a torch convolution, which pads as much before as behind."""
    if all(before == after for before, after in edges):
        return data, tuple(before for before, _ in edges)
    return pad_edges(data, edges), (0,) * len(edges)


CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONVOLVE_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolution(args: list[Any], attrs: Any) -> Tensor:
    letters = get_spatial_letters(attrs.data_layout)
    rank, order = len(letters), f"NC{letters}"
    data = permute(args[0], attrs.data_layout, order)
    weight = permute_weight(args[1], attrs.kernel_layout, f"OI{letters}")
    data, padding = pad_data(data, split_padding(attrs.padding, rank))
    strides, dilation = (expand_per_axis(v, rank) for v in (attrs.strides, attrs.dilation))
    result = CONVOLVE[rank](
        data, weight, None, strides, padding, dilation, groups=int(attrs.groups)
    )
    return permute(result, order, attrs.out_layout or attrs.data_layout)


def transposed_convolution(args: list[Any], attrs: Any) -> Tensor:
    """The kernel has I = input channels and O = output channels / groups. What is padded is cut
    off the full result.
    """
    letters = get_spatial_letters(attrs.data_layout)
    rank, order = len(letters), f"NC{letters}"
    data = permute(args[0], attrs.data_layout, order)
    weight = permute_weight(args[1], attrs.kernel_layout, f"IO{letters}")
    strides, dilation = (expand_per_axis(v, rank) for v in (attrs.strides, attrs.dilation))
    result = CONVOLVE_TRANSPOSED[rank](
        data, weight, None, strides, 0, 0, int(attrs.groups), dilation
    )
    result = pad_edges(result, [(0, n) for n in expand_per_axis(attrs.output_padding, rank)])
    edges = split_padding(attrs.padding, rank)
    for axis, (before, after) in enumerate(edges, start=2):
        result = result.narrow(axis, before, result.shape[axis] - before - after)
    return permute(result, order, attrs.out_layout or attrs.data_layout)


def matmul(args: list[Any], attrs: Any) -> Tensor:
    return torch.matmul(*args)


def open_window(data: Tensor, attrs: Any, value: float) -> tuple[Tensor, Window, list[int], str]:
    """(padded data in layout N C spatial, the window, number of windows by axis, layout)."""
    letters = get_spatial_letters(attrs.layout)
    order = f"NC{letters}"
    window = Window(
        to_ints(attrs.pool_size),
        to_ints(attrs.strides),
        to_ints(attrs.dilation),
        to_ints(attrs.padding),
        bool(attrs.ceil_mode),
        attrs.layout,
    )
    data = permute(data, attrs.layout, order)
    pads, outputs = window.fit(tuple(data.shape[2:]))
    return pad_edges(data, pads, value), window, outputs, order


def take_windows(result: Tensor, outputs: Sequence[int]) -> Tensor:
    """The first windows of each axis; torch counts those that fit, which may be more."""
    for axis, count in enumerate(outputs, start=2):
        result = result.narrow(axis, 0, count)
    return result


def max_pool(args: list[Any], attrs: Any) -> Tensor:
    (data,) = args
    lowest = -math.inf if data.is_floating_point() else torch.iinfo(data.dtype).min
    padded, window, outputs, order = open_window(data, attrs, lowest)
    size, strides, dilation = window.expand()
    pools = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
    result = pools[window.rank](padded, size, strides, 0, dilation)
    return permute(take_windows(result, outputs), order, attrs.out_layout or attrs.layout)


def avg_pool(args: list[Any], attrs: Any) -> Tensor:
    """Sums of the windows, by a convolution with ones, over the number of values in each."""
    (data,) = args
    shape = tuple(data.shape)
    padded, window, outputs, order = open_window(data, attrs, 0.0)
    size, strides, dilation = window.expand()
    ones = torch.ones((1, 1, *size), dtype=data.dtype)
    single = padded.reshape(-1, 1, *padded.shape[2:])
    total = CONVOLVE[window.rank](single, ones, None, strides, 0, dilation)
    total = take_windows(total, outputs).reshape(*padded.shape[:2], *outputs)
    counts = count_window_values(shape, window, bool(attrs.count_include_pad))
    count = torch.from_numpy(counts.reshape(1, 1, *outputs)).to(data.dtype)
    return permute(total / count, order, attrs.out_layout or attrs.layout)


def adaptive_avg_pool(args: list[Any], attrs: Any) -> Tensor:
    (data,) = args
    letters = get_spatial_letters(attrs.layout)
    rank, order = len(letters), f"NC{letters}"
    data = permute(data, attrs.layout, order)
    sizes = attrs.output_size
    sizes = expand_per_axis(to_ints(sizes), rank) if sizes else tuple(data.shape[2:])
    pools = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d}
    result = pools[rank](data, tuple(sizes) if rank > 1 else sizes[0])
    return permute(result, order, attrs.out_layout or attrs.layout)


PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "replicate"}


def pad(args: list[Any], attrs: Any) -> Tensor:
    """Modes other than constant by indices, which torch pads at any rank with."""
    (data,) = args
    widths = to_ints(attrs.pad_width)
    edges = [*zip(widths[::2], widths[1::2], strict=True)]
    mode = str(attrs.pad_mode)
    if mode == "constant":
        return pad_edges(data, edges, float(attrs.pad_value))
    for axis, (before, after) in enumerate(edges):
        if before or after:
            at = torch.arange(-before, data.shape[axis] + after)
            data = data.index_select(axis, fold_index(at, data.shape[axis], mode))
    return data


def fold_index(at: Tensor, size: int, mode: str) -> Tensor:
    """Indices beyond an axis of length `size` -> those inside that stand for them."""
    if mode == "replicate":
        return at.clamp(0, size - 1)
    if mode == "circular":
        return at.remainder(size)
    if mode == "reflect":
        turn = at.remainder(max(2 * size - 2, 1))
        return torch.where(turn < size, turn, 2 * size - 2 - turn)
    raise ModelError(
        f"nn.pad has no torch form for mode {mode!r}; allowed: constant, reflect, replicate, "
        "circular.",
        code="RQ206",
    )


# Normalization ---------------------------------------------------------------------------------


def align(values: Tensor, axes: Sequence[int], ndim: int) -> Tensor:
    """Parameters of the given axes, in their order, shaped to broadcast against `ndim` axes."""
    positions = [axis % ndim for axis in axes]
    if values.ndim > 1:
        values = values.permute(sorted(range(len(positions)), key=positions.__getitem__))
    shape = [1] * ndim
    for position, size in zip(sorted(positions), values.shape, strict=True):
        shape[position] = size
    return values.reshape(shape)


def normalize(x: Tensor, axes: Sequence[int], epsilon: float) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over `axes`."""
    centred = x - x.mean(tuple(axes), keepdim=True)
    variance = (centred * centred).mean(tuple(axes), keepdim=True)
    return centred * torch.rsqrt(variance + epsilon)


def apply_affine(x: Tensor, args: list[Any], axes: Sequence[int], attrs: Any) -> Tensor:
    """x * gamma + beta, with gamma and beta the second and third argument along `axes`."""
    if attrs.scale:
        x = x * align(args[1], axes, x.ndim)
    if attrs.center:
        x = x + align(args[2], axes, x.ndim)
    return x


def layer_norm(args: list[Any], attrs: Any) -> Tensor:
    axes = to_ints(attrs.axes)
    return apply_affine(normalize(args[0], axes, attrs.epsilon), args, axes, attrs)


def instance_norm(args: list[Any], attrs: Any) -> Tensor:
    normal = normalize(args[0], to_ints(attrs.axes), attrs.epsilon)
    return apply_affine(normal, args, (int(attrs.channel_axis),), attrs)


def group_norm(args: list[Any], attrs: Any) -> Tensor:
    data, groups = args[0], int(attrs.num_groups)
    axis = int(attrs.channel_axis) % data.ndim
    shape = tuple(data.shape)
    split = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    axes = [a % data.ndim for a in to_ints(attrs.axes)]
    # In the split array axes after the channel axis move by one; a group's channels are one of
    # them.
    moved = tuple(sorted({axis + 1, *(a + (a > axis) for a in axes if a != axis)}))
    normal = normalize(data.reshape(split), moved, attrs.epsilon).reshape(shape)
    return apply_affine(normal, args, (axis,), attrs)


def rms_norm(args: list[Any], attrs: Any) -> Tensor:
    data, weight = args[:2]
    axes = to_ints(attrs.axes)
    square = (data * data).mean(axes, keepdim=True)
    return data * torch.rsqrt(square + attrs.epsilon) * align(weight, axes, data.ndim)


def batch_norm(args: list[Any], attrs: Any) -> Any:
    """With the statistics that it has: (result, moving mean, moving variance).

    Raises:
        ModelError: it normalizes by the statistics of the batch (`training`).
    """
    if attrs.training:
        raise ModelError(
            "nn.batch_norm has no torch form for training=True; allowed: False, with the moving "
            "statistics. Export the model in eval mode.",
            code="RQ206",
        )
    data, _, _, mean, variance = args
    axes = (int(attrs.axis),)
    centred = data - align(mean, axes, data.ndim)
    normal = centred / torch.sqrt(align(variance, axes, data.ndim) + attrs.epsilon)
    return apply_affine(normal, args, axes, attrs), mean, variance


# Reductions ------------------------------------------------------------------------------------


def reduction(function: Callable[..., Tensor]) -> TorchFunction:
    """A row that reduces `axis`, all axes where it names none."""

    def reduce(args: list[Any], attrs: Any) -> Tensor:
        (data,) = args
        axes = to_axes(attrs.axis)
        axes = tuple(range(data.ndim)) if axes is None else axes
        return function(data, axes, keepdim=bool(attrs.keepdims)) if axes else data

    return reduce


def mean(data: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    """Of integers: the sum, divided toward zero."""
    if data.is_floating_point():
        return data.mean(axes, keepdim=keepdim)
    total = data.sum(axes, keepdim=keepdim)
    count = data.numel() // max(total.numel(), 1)
    return torch.div(total, count, rounding_mode="trunc")


def product(data: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    for axis in sorted((axis % data.ndim for axis in axes), reverse=True):
        data = data.prod(axis, keepdim=keepdim)
    return data


def population(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The variance or deviation of a population, not of a sample."""
    return lambda data, axes, keepdim: function(data, axes, correction=0, keepdim=keepdim)


def arg_reduction(function: Callable[..., Tensor]) -> TorchFunction:
    """argmax or argmin."""

    def reduce(args: list[Any], attrs: Any) -> Tensor:
        axis = None if attrs.axis is None else int(attrs.axis)
        return function(args[0], dim=axis, keepdim=bool(attrs.keepdims))

    return reduce


def sort(args: list[Any], attrs: Any) -> Tensor:
    (data,), axis = args, int(attrs.axis)
    return torch.sort(data, stable=True, dim=axis, descending=bool(attrs.descending)).values


def argsort(args: list[Any], attrs: Any) -> Tensor:
    (data,), axis = args, int(attrs.axis)
    order = torch.argsort(data, stable=True, dim=axis, descending=bool(attrs.descending))
    return order.to(find_dtype(attrs.dtype, torch.int32))


def topk(args: list[Any], attrs: Any) -> Any:
    """The k first in order, of equals the first one first; all where k is less than 1."""
    (data,), axis = args, int(attrs.axis)
    values, indices = torch.sort(data, stable=True, dim=axis, descending=bool(attrs.largest))
    if int(attrs.k) > 0:
        count = min(int(attrs.k), data.shape[axis])
        values, indices = values.narrow(axis, 0, count), indices.narrow(axis, 0, count)
    indices = indices.to(find_dtype(attrs.dtype, torch.int32))
    return {"both": (values, indices), "values": values, "indices": indices}[str(attrs.ret_type)]


def cumulative(function: Callable[..., Tensor]) -> TorchFunction:
    """cumsum or cumprod; with `exclusive` of the elements before each one."""

    def scan(args: list[Any], attrs: Any) -> Tensor:
        (data,) = args
        axis = 0 if attrs.axis is None else int(attrs.axis)
        data = data.reshape(-1) if attrs.axis is None else data
        if attrs.exclusive and data.shape[axis]:
            first = torch.full_like(data.narrow(axis, 0, 1), function is torch.cumprod)
            data = torch.cat([first, data.narrow(axis, 0, data.shape[axis] - 1)], axis)
        return function(data, axis, dtype=find_dtype(attrs.dtype, data.dtype))

    return scan


# Shape -----------------------------------------------------------------------------------------


def squeeze(args: list[Any], attrs: Any) -> Tensor:
    """Axes whose length is not 1 stay, as in TVM."""
    axes = to_axes(attrs.axis)
    return torch.squeeze(args[0]) if axes is None else torch.squeeze(args[0], axes)


def concat(args: list[Any], attrs: Any) -> Tensor:
    return torch.cat(args[0], 0 if attrs.axis is None else int(attrs.axis))


def split(args: list[Any], attrs: Any) -> Any:
    """Sections of ceil(length / count), or cut at indices; a single one is no tuple."""
    (data,) = args
    axis, where = int(attrs.axis), attrs.indices_or_sections
    length = data.shape[axis]
    if hasattr(where, "__len__"):
        cuts = [min(cut, length) for cut in to_ints(where)]
    else:
        step = -(-length // int(where))
        cuts = [min(i * step, length) for i in range(1, int(where))]
    if not cuts:
        return data
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    return torch.split(data, sizes, axis)


def strided_slice(args: list[Any], attrs: Any) -> Tensor:
    data, axes, begin, end, *rest = args
    strides = rest[0] if rest else (1,) * len(axes)
    for axis, first, last, step in zip(axes, begin, end, strides, strict=True):
        length = data.shape[axis]
        # A negative step that ends before index 0 ends at "nothing", which a slice writes None.
        stop = None if step < 0 and last < -length else int(last)
        at = range(length)[int(first) : stop : int(step)]
        if step > 0:
            index = [slice(None)] * data.ndim
            index[axis] = slice(at.start, at.stop, at.step)
            data = data[tuple(index)]
        else:
            data = data.index_select(int(axis), torch.tensor(list(at), dtype=torch.int64))
    return data


def take(args: list[Any], attrs: Any) -> Tensor:
    data, indices = args
    indices = torch.as_tensor(indices)
    if attrs.axis is None:
        data, axis = data.reshape(-1), 0
    else:
        axis = int(attrs.axis) % data.ndim
    length = data.shape[axis]
    flat = indices.reshape(-1).to(torch.int64)
    if str(attrs.mode) == "wrap":
        flat = flat.remainder(length)
    elif str(attrs.mode) == "clip":
        flat = flat.clamp(0, length - 1)
    else:
        flat = torch.where(flat < 0, flat + length, flat)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return data.index_select(axis, flat).reshape(shape)


def gather_elements(args: list[Any], attrs: Any) -> Tensor:
    data, indices = args
    axis = int(attrs.axis)
    indices = indices.to(torch.int64)
    return torch.gather(data, axis, torch.where(indices < 0, indices + data.shape[axis], indices))


def permute_dims(args: list[Any], attrs: Any) -> Tensor:
    (data,) = args
    return data.permute(
        tuple(reversed(range(data.ndim))) if attrs.axes is None else to_ints(attrs.axes)
    )


def expand_dims(args: list[Any], attrs: Any) -> Tensor:
    (data,) = args
    axes = to_ints(attrs.axis)
    rank = data.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


def tile(args: list[Any], attrs: Any) -> Tensor:
    return torch.tile(args[0], to_ints(attrs.repeats))


def repeat(args: list[Any], attrs: Any) -> Tensor:
    axis = None if attrs.axis is None else int(attrs.axis)
    return torch.repeat_interleave(args[0], int(attrs.repeats), axis)


def full(args: list[Any], attrs: Any) -> Tensor:
    shape, value = args
    value = torch.as_tensor(value)
    return value.to(find_dtype(attrs.dtype, value.dtype)).expand(shape)


def full_like(args: list[Any], attrs: Any) -> Tensor:
    data, value = args
    return torch.as_tensor(value).to(find_dtype(attrs.dtype, data.dtype)).expand(data.shape)


def filled(value: int) -> TorchFunction:
    """zeros or ones of a shape, or like a tensor."""

    def fill(args: list[Any], attrs: Any) -> Tensor:
        (like,) = args
        is_tensor = isinstance(like, Tensor)
        default = like.dtype if is_tensor else torch.float32
        shape = like.shape if is_tensor else like
        return torch.full(tuple(shape), value, dtype=find_dtype(attrs.dtype, default))

    return fill


def attention(args: list[Any], attrs: Any) -> Tensor:
    """softmax(q k^T * scale) v with q, k, v of shape (batch, sequence, heads, size)."""
    if attrs.causal_mask is not None or attrs.window_size is not None:
        raise ModelError(
            "nn.attention has no torch form for causal_mask and window_size; allowed: neither.",
            code="RQ206",
        )
    q, k, v = (operand.transpose(1, 2) for operand in args[:3])
    scale = q.shape[-1] ** -0.5 if attrs.scale is None else float(attrs.scale)
    scores = q @ k.transpose(-1, -2) * scale
    if len(args) > 3:
        scores = scores + args[3]
    return (scores.softmax(-1) @ v).transpose(1, 2)


#: Name of the operator without "relax." -> its torch form.
TORCH_OPERATORS: Mapping[str, TorchFunction] = {
    **{row.relax: made for row in RELAX_UNARY.values() if (made := make_unary(row)) is not None},
    # arithmetic
    "add": binary(torch.add),
    "atan2": binary(torch.atan2),
    "clip": clip,
    "divide": binary(divide),
    "equal": binary(torch.eq),
    "ewise_fma": plain(lambda x, y, z: x * y + z),
    "floor_divide": binary(torch.floor_divide),
    "floor_mod": binary(torch.remainder),
    "greater": binary(torch.gt),
    "greater_equal": binary(torch.ge),
    "less": binary(torch.lt),
    "less_equal": binary(torch.le),
    "log_add_exp": binary(torch.logaddexp),
    "logical_and": binary(torch.logical_and),
    "logical_or": binary(torch.logical_or),
    "logical_xor": binary(torch.logical_xor),
    "maximum": binary(torch.maximum),
    "minimum": binary(torch.minimum),
    "mod": binary(torch.fmod),
    "multiply": binary(torch.mul),
    "not_equal": binary(torch.ne),
    "power": binary(torch.pow),
    "subtract": binary(torch.sub),
    "where": plain(torch.where),
    # neural network
    "nn.adaptive_avg_pool1d": adaptive_avg_pool,
    "nn.adaptive_avg_pool2d": adaptive_avg_pool,
    "nn.attention": attention,
    "nn.attention_bias": attention,
    "nn.avg_pool1d": avg_pool,
    "nn.avg_pool2d": avg_pool,
    "nn.avg_pool3d": avg_pool,
    "nn.batch_flatten": plain(lambda x: x.reshape(x.shape[0], -1)),
    "nn.batch_norm": batch_norm,
    "nn.conv1d": convolution,
    "nn.conv1d_transpose": transposed_convolution,
    "nn.conv2d": convolution,
    "nn.conv2d_transpose": transposed_convolution,
    "nn.conv3d_transpose": transposed_convolution,
    "nn.conv3d": convolution,
    "nn.dropout": plain(lambda x: (x, torch.ones_like(x))),
    "nn.group_norm": group_norm,
    "nn.instance_norm": instance_norm,
    "nn.layer_norm": layer_norm,
    "nn.leakyrelu": lambda args, attrs: F.leaky_relu(args[0], float(attrs.alpha)),
    "nn.log_softmax": lambda args, attrs: torch.log_softmax(args[0], int(attrs.axis)),
    "nn.max_pool1d": max_pool,
    "nn.max_pool2d": max_pool,
    "nn.max_pool3d": max_pool,
    "nn.pad": pad,
    "nn.pixel_shuffle": lambda args, attrs: F.pixel_shuffle(args[0], int(attrs.upscale_factor)),
    "nn.prelu": prelu,
    "nn.rms_norm": rms_norm,
    "nn.softmax": lambda args, attrs: torch.softmax(args[0], int(attrs.axis)),
    "matmul": matmul,
    # reductions
    "argmax": arg_reduction(torch.argmax),
    "argmin": arg_reduction(torch.argmin),
    "argsort": argsort,
    "cumprod": cumulative(torch.cumprod),
    "cumsum": cumulative(torch.cumsum),
    "max": reduction(torch.amax),
    "mean": reduction(mean),
    "min": reduction(torch.amin),
    "prod": reduction(product),
    "sort": sort,
    "std": reduction(population(torch.std)),
    "sum": reduction(torch.sum),
    "topk": topk,
    "variance": reduction(population(torch.var)),
    # shape and indexing
    "astype": lambda args, attrs: args[0].to(find_dtype(attrs.dtype, args[0].dtype)),
    "broadcast_to": plain(lambda x, shape: x.expand(shape)),
    "collapse_sum_to": plain(lambda x, shape: x.sum_to_size(*shape)),
    "concat": concat,
    "einsum": lambda args, attrs: torch.einsum(str(attrs.subscripts), *args[0]),
    "expand_dims": expand_dims,
    "flatten": plain(lambda x: x.reshape(-1)),
    "flip": lambda args, attrs: torch.flip(args[0], (int(attrs.axis),)),
    "gather_elements": gather_elements,
    "permute_dims": permute_dims,
    "repeat": repeat,
    "reshape": plain(lambda x, shape: x.reshape(shape)),
    "shape_of": plain(lambda x: tuple(x.shape)),
    "shape_to_tensor": plain(lambda shape: torch.tensor(shape, dtype=torch.int64)),
    "split": split,
    "squeeze": squeeze,
    "stack": lambda args, attrs: torch.stack(tuple(args[0]), int(attrs.axis)),
    "strided_slice": strided_slice,
    "take": take,
    "tensor_to_shape": plain(lambda x: tuple(int(size) for size in x)),
    "tile": tile,
    "tril": plain(torch.tril),
    "triu": plain(torch.triu),
    # creation
    "full": full,
    "full_like": full_like,
    "ones": filled(1),
    "ones_like": filled(1),
    "zeros": filled(0),
    "zeros_like": filled(0),
}
