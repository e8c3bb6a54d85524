"""Numpy forms of Relax's operators on tensors: arithmetic, reductions, shapes, indices, creation.

A row maps the operator's name to a function of (arguments, attributes): arguments are arrays,
tuples of arrays, tuples of ints (shapes) or numbers, as the operator takes them. The function may
give NotImplemented for attributes it does not cover; the interpreter then compiles the operator.
Integer operators keep the dtype, as in TVM; the interpreter casts a result to the dtype TVM infers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relayquant.errors import DataError
from relayquant.ir.reference.relax.attributes import (
    OperatorFunction,
    align,
    plain,
    to_axes,
    to_dtype,
    to_ints,
    widen,
)
from relayquant.ir.reference.row_arithmetic import mean_along

# Elementwise -----------------------------------------------------------------------------------


def divide(args: list[Any], attrs: Any) -> Any:
    """True division of floats; integers truncate toward zero, as in C."""
    left, right = args
    if np.asarray(left).dtype.kind in "iu":
        return truncate_divide(left, right)
    return np.divide(left, right)


def power(args: list[Any], attrs: Any) -> Any:
    """x ** n; of integers modulo 2^bits, and for n below 0 1 / x ** -n without its part after the
    point, 0 of 0, as in PyTorch.
    """
    base, exponent = args
    if base.dtype.kind != "i" or not (exponent < 0).any():
        return np.power(base, exponent)
    sign = np.where(exponent & 1, base, 1)
    fraction = np.where((base == 1) | (base == -1), sign, 0)
    return np.where(exponent < 0, fraction, np.power(base, np.maximum(exponent, 0)))


def truncate_divide(left: Any, right: Any) -> Any:
    """Integer quotient rounded toward zero; 0 of a division by 0."""
    quotient = np.floor_divide(left, right)
    inexact = (quotient * right != left) & (np.asarray(right) != 0)
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


# Reductions ------------------------------------------------------------------------------------


def reduction(function: Callable[..., Any]) -> OperatorFunction:
    """A row that reduces `axis` by a numpy function which keeps the dtype."""

    def reduce(args: list[Any], attrs: Any) -> Any:
        (data,) = args
        extra = {"dtype": data.dtype} if function in (np.sum, np.prod) else {}
        return function(data, axis=to_axes(attrs.axis), keepdims=bool(attrs.keepdims), **extra)

    return reduce


def mean(args: list[Any], attrs: Any) -> Any:
    """Of float32 rows: in a stated order. Of integers: the wrapping sum, divided toward zero."""
    (data,) = args
    axes, keepdims = to_axes(attrs.axis), bool(attrs.keepdims)
    if data.dtype.kind not in "iu":
        if axes is None:
            return np.mean(data, keepdims=keepdims)
        result = mean_along(data, axes)
        return result if keepdims else np.squeeze(result, axes)
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


def find_order(data: Any, axis: int, descending: bool) -> Any:
    """Indices in the order of the data; of equals the first comes first."""
    if not descending:
        return np.argsort(data, axis=axis, kind="stable")
    backwards = np.argsort(np.flip(data, axis), axis=axis, kind="stable")
    return data.shape[axis] - 1 - np.flip(backwards, axis)


def sort(args: list[Any], attrs: Any) -> Any:
    order = find_order(args[0], int(attrs.axis), bool(attrs.descending))
    return np.take_along_axis(args[0], order, int(attrs.axis))


def argsort(args: list[Any], attrs: Any) -> Any:
    order = find_order(args[0], int(attrs.axis), bool(attrs.descending))
    return order.astype(to_dtype(attrs.dtype, "int32"))


def topk(args: list[Any], attrs: Any) -> Any:
    """The k first in order, all where k is less than 1: values, indices or both."""
    (data,), axis = args, int(attrs.axis)
    order = find_order(data, axis, bool(attrs.largest))
    if int(attrs.k) > 0:
        order = np.take(order, range(min(int(attrs.k), data.shape[axis])), axis)
    values = np.take_along_axis(data, order, axis)
    indices = order.astype(to_dtype(attrs.dtype, "int32"))
    return {"both": (values, indices), "values": values, "indices": indices}[str(attrs.ret_type)]


def cumulative(function: Callable[..., Any]) -> OperatorFunction:
    """cumsum or cumprod in the dtype of the data or of the attribute; with `exclusive` of the
    elements before each one.
    """

    def scan(args: list[Any], attrs: Any) -> Any:
        data = args[0].ravel() if attrs.axis is None else args[0]
        axis = 0 if attrs.axis is None else int(attrs.axis)
        if attrs.exclusive and data.shape[axis]:
            first = np.full_like(np.take(data, [0], axis), function is np.cumprod)
            data = np.concatenate([first, np.delete(data, -1, axis)], axis)
        return function(data, axis=axis, dtype=to_dtype(attrs.dtype, data.dtype))

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
            f"allowed: 0..{length - 1}, or mode 'clip' or 'wrap'.",
            code="RQ302",
        )
    return np.take(data, indices, axis=axis, mode=mode)


def pad(args: list[Any], attrs: Any) -> Any:
    (data,) = args
    widths = np.reshape(to_ints(attrs.pad_width), (-1, 2)).tolist()
    mode = str(attrs.pad_mode)
    if mode == "constant":
        return np.pad(data, widths, constant_values=data.dtype.type(attrs.pad_value))
    numpy_mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}.get(mode)
    return NotImplemented if numpy_mode is None else np.pad(data, widths, mode=numpy_mode)


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


#: Name of the operator without "relax." -> its numpy form.
OPERATORS: dict[str, OperatorFunction] = {
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
    "power": power,
    "right_shift": plain(np.right_shift),
    "subtract": plain(np.subtract),
    "where": plain(np.where),
    # affine spaces
    "dequantize": dequantize,
    "quantize": quantize,
    # reductions
    "argmax": arg_reduction(np.argmax),
    "argmin": arg_reduction(np.argmin),
    "argsort": argsort,
    "cumprod": cumulative(np.cumprod),
    "cumsum": cumulative(np.cumsum),
    "max": reduction(np.max),
    "mean": mean,
    "min": reduction(np.min),
    "prod": reduction(np.prod),
    "sort": sort,
    "std": standard_deviation,
    "sum": reduction(np.sum),
    "topk": topk,
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
    "nn.batch_flatten": batch_flatten,
    "nn.pad": pad,
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
